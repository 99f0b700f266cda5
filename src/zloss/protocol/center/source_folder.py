"""The folder that holds a checkpoint's files: a local one, a converted GGUF file, or a snapshot of the hub.

What `zloss center` reads is never replaced by what it writes, not even with `force`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from zloss.errors import CheckpointError, OutputError
from zloss.models.checkpoint import (
    SMOLLM2_HUB,
    check_folder_exists,
    check_gguf_exists,
    check_not_adapter,
    embedded_smollm2,
    hub_options,
    not_found,
)
from zloss.models.gguf import converted_gguf
from zloss.results.choices import SMOLLM2

WANTED = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.md", "LICENSE*")


@contextlib.contextmanager
def source_folder(name: str) -> Iterator[Path]:
    """A folder in the Hugging Face format with safetensors weights."""
    gguf = embedded_smollm2() if name == SMOLLM2 else Path(name) if name.endswith(".gguf") else None
    if gguf is not None:
        check_gguf_exists(gguf)
        with converted_gguf(gguf) as (folder, _wants_bos):
            yield folder
        return
    if Path(name).is_dir():
        yield Path(name)
        return
    check_folder_exists(name)
    from huggingface_hub import snapshot_download

    identifier = SMOLLM2_HUB if name == SMOLLM2 else name
    try:
        fetched = Path(snapshot_download(identifier, allow_patterns=list(WANTED), **hub_options()))
    except Exception as error:
        raise CheckpointError(not_found(name, identifier, error)) from error
    # Outside the `try`: what goes wrong in the caller's block is not a failed download.
    check_not_adapter(name, fetched)
    yield fetched


def refuse_overlap(out: Path, inputs: Sequence[Path]) -> None:
    """An error where writing to `out` would change or remove one of the `inputs`, files or folders.

    Folders are compared by identity, so links, relative paths and the case of letters make no difference.
    """
    for given in inputs:
        if _same(out, given):
            raise OutputError(f"`out` is {given} itself, and an original is never overwritten: choose another folder.")
        if any(_same(parent, given) for parent in out.parents):
            raise OutputError(f"`out` is inside {given}, and an original is never changed: choose a folder outside it.")
        for file in (given, *(given.iterdir() if given.is_dir() else ())):
            # The files of a folder may be links to another one, as in the cache of the hub.
            if any(_same(parent, out) for parent in file.resolve().parents):
                raise OutputError(
                    f"`out` contains {file}, and an original is never overwritten: choose a folder that does not contain it."
                )


def _same(one: Path, other: Path) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False
