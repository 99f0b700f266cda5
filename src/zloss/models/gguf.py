"""GGUF files, converted once to a safetensors folder in the user's cache.

Dequantizing takes most of the loading time. A model that transformers loads straight from GGUF stays marked as quantized, so
it cannot be saved or trained; one loaded from the converted folder can.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import tempfile
import time
import zlib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from zloss.errors import CheckpointError, InputError, MissingDependencyError, OutputError, first_line
from zloss.models.checkpoint import check_depth, check_loaded
from zloss.results.folder import whole_folder
from zloss.results.io import read_object, remove_abandoned, take_lock

_NOTE = "zloss.json"
"""The file of a converted folder that holds what safetensors do not, and the checksum of every other file."""
_LOCK_TIMEOUT = 300.0
"""Seconds that a process waits while another one converts."""


@contextlib.contextmanager
def converted_gguf(file: Path) -> Iterator[tuple[Path, bool]]:
    """(folder, wants_bos) of the converted file, in the cache, or in a temporary folder if the cache cannot be used."""
    try:
        fingerprint = _fingerprint(file)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}.") from error
    folder = _cache_folder(f"{file.stem[:100]}-{fingerprint}")
    if folder is not None and (note := _intact_note(folder) or _convert_into(folder, file)) is not None:
        yield folder, bool(note["wants_bos"])
        return
    with tempfile.TemporaryDirectory(prefix="zloss-", ignore_cleanup_errors=True) as temporary:
        place = Path(temporary) / "converted"
        try:
            with whole_folder(place) as part:
                note = _convert(file, part)
        except OutputError as error:
            raise CheckpointError(
                f"{file} cannot be converted, because neither the cache nor {tempfile.gettempdir()} has room for the "
                "converted weights: free some space, or set ZLOSS_CACHE to a folder that has it."
            ) from error
        yield place, bool(note["wants_bos"])


def _cache_folder(name: str) -> Path | None:
    """The folder of a conversion in the cache; None if there is no cache or it cannot be written."""
    try:
        folder = _cache_root() / "gguf" / name
        folder.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(folder.parent, os.W_OK):
            return folder if folder.is_dir() else None
        remove_abandoned(folder.parent)
    except (OSError, RuntimeError):  # `Path.home` raises a RuntimeError for a user without a home folder
        return None
    return folder


def _cache_root() -> Path:
    """$ZLOSS_CACHE, else zloss/ in $XDG_CACHE_HOME or ~/.cache."""
    if configured := os.environ.get("ZLOSS_CACHE"):
        return Path(configured)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zloss"


def _convert_into(folder: Path, file: Path) -> dict[str, Any] | None:
    """Convert to `folder`, replacing a damaged conversion; None if the cache cannot be written."""
    try:
        with _one_at_a_time(folder.parent):
            # Another process may have converted it in the meantime.
            if (note := _intact_note(folder)) is not None:
                return note
            with whole_folder(folder) as part:
                return _convert(file, part)
    except OutputError:
        return None


@contextlib.contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Wait until no other process converts into `folder`, at most `_LOCK_TIMEOUT` seconds: it may have been suspended."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        end = time.monotonic() + _LOCK_TIMEOUT
        while not take_lock(handle) and time.monotonic() < end:
            time.sleep(0.1)
        yield
    finally:
        os.close(handle)


def _intact_note(folder: Path) -> dict[str, Any] | None:
    """The note of a conversion if all its files have their checksums; None if one is damaged or missing."""
    try:
        note = read_object(folder / _NOTE, advice="it is written again")
        files = note["files"]
        if not isinstance(note["wants_bos"], bool) or not files:
            return None
        return note if all(_checksum(folder / name) == checksum for name, checksum in files.items()) else None
    except (OSError, InputError, KeyError, AttributeError, TypeError):
        return None


def _checksum(file: Path) -> int:
    """CRC-32 of a file: detects damage, in a fraction of the loading time."""
    checksum = 0
    with file.open("rb") as content:
        while piece := content.read(2**22):
            checksum = zlib.crc32(piece, checksum)
    return checksum


def _fingerprint(file: Path) -> str:
    """Identity of the file and of the converter: name, size, time, first megabyte, version of transformers."""
    digest = hashlib.sha256()
    status = file.stat()
    with file.open("rb") as handle:
        digest.update(handle.read(2**20))
    digest.update(repr((file.name, status.st_size, status.st_mtime_ns, metadata.version("transformers"))).encode())
    return digest.hexdigest()[:16]


def _convert(file: Path, folder: Path) -> dict[str, Any]:
    """Fill `folder` with the converted model; returns the note, which is written last."""
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
        wants_bos, unexpected = _wants_bos(reader), _unexpected(reader)
        check_depth(str(file), _layers(reader) or 0, len(reader.tensors))
        tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
        with _without_progress_bar():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                str(file.parent),
                gguf_file=file.name,
                dtype=torch.float32,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # `check_loaded` raises an error that names them
            )
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{file} cannot be read as a GGUF language model: {first_line(error)}.") from error
    model, info = loaded
    # `info` leaves out tensors that transformers does not look for in the file.
    check_loaded(str(file), {**info, "unexpected_keys": {*info["unexpected_keys"], *unexpected}})
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    save_file(_untied_state(model), folder / "model.safetensors", metadata={"format": "pt"})
    checksums = {entry.name: _checksum(entry) for entry in sorted(folder.iterdir())}
    note = {"wants_bos": wants_bos, "file": file.name, "files": checksums}
    (folder / _NOTE).write_text(json.dumps(note), encoding="utf-8")
    return note


@contextlib.contextmanager
def _without_progress_bar() -> Iterator[None]:
    """Hide the progress bar of dequantization, which `disable_progress_bar` of transformers does not cover."""
    import transformers.modeling_gguf_pytorch_utils as reading

    module: Any = reading
    before = module.tqdm
    module.tqdm = functools.partial(before, disable=True)
    try:
        yield
    finally:
        module.tqdm = before


def _untied_state(model: Any) -> dict[str, Any]:
    """The weights, each storage once: safetensors rejects tensors that share memory, and loading ties them again."""
    state: dict[str, Any] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            state[name] = tensor.contiguous()
    return state


def _unexpected(reader: Any) -> list[str]:
    """Tensors of layers beyond the number in the metadata."""
    layers = _layers(reader)
    if layers is None:
        return []
    numbered = ((tensor.name, re.match(r"blk\.(\d+)\.", tensor.name)) for tensor in reader.tensors)
    return [name for name, match in numbered if match and int(match[1]) >= layers]


def _layers(reader: Any) -> int | None:
    """The number of layers in the metadata."""
    architecture = reader.get_field("general.architecture")
    layers = None if architecture is None else reader.get_field(f"{architecture.contents()}.block_count")
    return None if layers is None else int(layers.contents())


def _wants_bos(reader: Any) -> bool:
    """The value of `tokenizer.ggml.add_bos_token`; without that key, whether `tokenizer.ggml.model` is "llama"."""
    field = reader.get_field("tokenizer.ggml.add_bos_token")
    if field is not None:
        return bool(field.contents())
    kind = reader.get_field("tokenizer.ggml.model")
    return kind is not None and str(kind.contents()) == "llama"
