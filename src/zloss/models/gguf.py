"""GGUF files, converted once to a safetensors folder in the user's cache.

Dequantising takes most of the loading time. A model that transformers loads straight from GGUF stays marked as quantized, so
it cannot be saved or trained; one loaded from the converted folder can.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import tempfile
import zlib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from filelock import FileLock

from zloss.errors import CheckpointError, InputError, MissingDependencyError, OutputError, first_line
from zloss.models.checkpoint import check_loaded
from zloss.results.folder import whole_folder
from zloss.results.io import read_object

_NOTE = "zloss.json"
"""The file of a converted folder that holds what safetensors do not, and the checksum of every other file."""
_LOCK_TIMEOUT = 300.0
"""Seconds that a process waits while another one converts."""


@contextlib.contextmanager
def converted_gguf(file: Path) -> Iterator[tuple[Path, bool]]:
    """(folder, wants_bos) of the converted file, in the cache, or in a temporary folder if the cache cannot be written."""
    if not file.is_file():
        raise CheckpointError(f"there is no GGUF file {file}.")
    try:
        folder = cache_root() / "gguf" / f"{file.stem[:100]}-{_fingerprint(file)}"
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}.") from error
    note = _intact_note(folder)
    if note is None:
        # One process at a time. One that waits too long, or cannot write the cache, converts to a temporary folder.
        with contextlib.suppress(OutputError, OSError), FileLock(cache_root() / "gguf.lock", timeout=_LOCK_TIMEOUT):
            note = _intact_note(folder)
            if note is None:
                with whole_folder(folder) as part:
                    converted = _convert(file, part)
                note = converted
    if note is not None:
        yield folder, bool(note["wants_bos"])
        return
    with tempfile.TemporaryDirectory(prefix="zloss-", ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary) / "converted"
        try:
            with whole_folder(folder) as part:
                note = _convert(file, part)
        except OutputError as error:
            raise CheckpointError(
                f"{file} cannot be converted, because neither the cache nor {tempfile.gettempdir()} has room for the "
                "converted weights: free some space, or set ZLOSS_CACHE to a folder that has it."
            ) from error
        yield folder, bool(note["wants_bos"])


def cache_root() -> Path:
    """$ZLOSS_CACHE, else zloss/ under the user's cache folder; an `OutputError` for a user without a home."""
    if configured := os.environ.get("ZLOSS_CACHE"):
        return Path(configured)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "zloss"
    except RuntimeError as error:  # neither $HOME nor an entry in the password file
        raise OutputError("no folder can be used as a cache: set ZLOSS_CACHE to one.") from error


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
        tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
        # `disable_progress_bar` of transformers does not cover the bar of dequantization.
        with contextlib.redirect_stderr(io.StringIO()):
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
    # Each storage once: safetensors refuses tensors that share memory, and loading ties them again.
    state = model.state_dict()
    names = {state[name].data_ptr(): name for name in reversed(state)}
    untied = {name: state[name].contiguous() for name in state if name in names.values()}
    save_file(untied, folder / "model.safetensors", metadata={"format": "pt"})
    checksums = {entry.name: _checksum(entry) for entry in sorted(folder.iterdir())}
    note = {"wants_bos": wants_bos, "file": file.name, "files": checksums}
    (folder / _NOTE).write_text(json.dumps(note), encoding="utf-8")
    return note


def _unexpected(reader: Any) -> list[str]:
    """Tensors of layers beyond the number in the metadata."""
    architecture = reader.get_field("general.architecture")
    layers = None if architecture is None else reader.get_field(f"{architecture.contents()}.block_count")
    if layers is None:
        return []
    numbered = ((tensor.name, re.match(r"blk\.(\d+)\.", tensor.name)) for tensor in reader.tensors)
    return [name for name, match in numbered if match and int(match[1]) >= layers.contents()]


def _wants_bos(reader: Any) -> bool:
    """The value of `tokenizer.ggml.add_bos_token`; without that key, whether `tokenizer.ggml.model` is "llama"."""
    field = reader.get_field("tokenizer.ggml.add_bos_token")
    if field is not None:
        return bool(field.contents())
    kind = reader.get_field("tokenizer.ggml.model")
    return kind is not None and str(kind.contents()) == "llama"
