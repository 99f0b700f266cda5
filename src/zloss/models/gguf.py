"""GGUF files, converted once to a safetensors folder in the user's cache.

Dequantising takes most of the loading time. A model that transformers loads straight from GGUF stays marked as quantized, so
it cannot be saved or trained; one loaded from the converted folder can.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from zloss.cache import cache_root
from zloss.errors import CheckpointError, MissingDependencyError, first_line
from zloss.models.loaded_weights import check_loaded

_NOTE = "zloss.json"
"""The file of a converted folder that holds what safetensors do not; it is written last, so with it the folder is whole."""


@contextlib.contextmanager
def converted_gguf(file: Path) -> Iterator[tuple[Path, bool]]:
    """(folder, wants_bos) of the converted file, in the cache, or in a temporary folder where the cache cannot be written."""
    folder = cache_root() / "gguf" / f"{file.stem}-{_fingerprint(file)}"
    if not _is_converted(folder):
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".converting-"))
        except OSError:
            with tempfile.TemporaryDirectory() as temporary:
                _convert(file, Path(temporary))
                yield Path(temporary), _wants_bos(Path(temporary))
            return
        try:
            _convert(file, scratch)
            with contextlib.suppress(OSError):  # another process has finished the same conversion
                if folder.exists() and not _is_converted(folder):
                    folder.rename(scratch / "before")
                scratch.rename(folder)
                shutil.rmtree(folder / "before", ignore_errors=True)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    yield folder, _wants_bos(folder)


def _is_converted(folder: Path) -> bool:
    """Whether the folder is a whole conversion. Earlier versions did not check the weights, so theirs are made again."""
    try:
        return bool(json.loads((folder / _NOTE).read_text())["checked"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _wants_bos(folder: Path) -> bool:
    return bool(json.loads((folder / _NOTE).read_text())["wants_bos"])


def _fingerprint(file: Path) -> str:
    """Identity of the file and of the converter: name, size, time, first megabyte, version of transformers."""
    digest = hashlib.sha256()
    status = file.stat()
    with file.open("rb") as handle:
        digest.update(handle.read(2**20))
    digest.update(repr((file.name, status.st_size, status.st_mtime_ns, metadata.version("transformers"))).encode())
    return digest.hexdigest()[:16]


def _convert(file: Path, folder: Path) -> None:
    try:
        import accelerate  # noqa: F401  (transformers reads GGUF only with it)
        import gguf
        from safetensors.torch import save_file
    except ImportError as error:
        raise MissingDependencyError(error.name or "gguf", "reading a GGUF file", "audit") from error
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        reader = gguf.GGUFReader(str(file))
        wants_bos, superfluous = gguf_wants_bos(reader), _superfluous(reader)
        tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
        with _without_bar():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                str(file.parent),
                gguf_file=file.name,
                dtype=torch.float32,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # `check_loaded` refuses them by name
            )
    except Exception as error:
        raise CheckpointError(f"{file} cannot be read as a GGUF language model: {first_line(error)}.") from error
    model, info = loaded
    # transformers leaves out of `info` what it does not look for in the file.
    check_loaded(str(file), {**info, "unexpected_keys": {*info["unexpected_keys"], *superfluous}})
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    save_file(_untied_state(model), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / _NOTE).write_text(json.dumps({"wants_bos": wants_bos, "file": file.name, "checked": True}))


@contextlib.contextmanager
def _without_bar() -> Iterator[None]:
    """Without the bar that transformers shows while it dequantizes, which its own switch does not turn off."""
    import transformers.modeling_gguf_pytorch_utils as reading

    module: Any = reading
    before = module.tqdm
    module.tqdm = functools.partial(before, disable=True)
    try:
        yield
    finally:
        module.tqdm = before


def _untied_state(model: Any) -> dict[str, Any]:
    """The weights, each storage once: safetensors refuses tensors that share memory, and loading ties them again."""
    state: dict[str, Any] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            state[name] = tensor.contiguous()
    return state


def _superfluous(reader: Any) -> list[str]:
    """Tensors of layers beyond the number that the metadata gives."""
    architecture = reader.get_field("general.architecture")
    layers = None if architecture is None else reader.get_field(f"{architecture.contents()}.block_count")
    if layers is None:
        return []
    numbered = ((tensor.name, re.match(r"blk\.(\d+)\.", tensor.name)) for tensor in reader.tensors)
    return [name for name, match in numbered if match and int(match[1]) >= layers.contents()]


def gguf_wants_bos(reader: Any) -> bool:
    """The value of `tokenizer.ggml.add_bos_token`; without that key, whether `tokenizer.ggml.model` is "llama"."""
    field = reader.get_field("tokenizer.ggml.add_bos_token")
    if field is not None:
        return bool(field.contents())
    kind = reader.get_field("tokenizer.ggml.model")
    return kind is not None and str(kind.contents()) == "llama"
