"""The folder in which a checkpoint's files lie: a local one, a converted GGUF file, or a snapshot of the hub."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from zloss.errors import CheckpointError
from zloss.models.checkpoint import SMOLLM2_HUB, embedded_smollm2, not_found, refuse_missing_gguf
from zloss.models.gguf import converted_gguf
from zloss.models.hub import hub_options, refuse_missing_folder
from zloss.results.choices import SMOLLM2

WANTED = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.md", "LICENSE*")


@contextlib.contextmanager
def source_folder(name: str) -> Iterator[Path]:
    """A folder in the Hugging Face format with safetensors weights."""
    gguf = embedded_smollm2() if name == SMOLLM2 else Path(name) if name.endswith(".gguf") else None
    if gguf is not None:
        refuse_missing_gguf(gguf)
        with converted_gguf(gguf) as (folder, _wants_bos):
            yield folder
        return
    if Path(name).is_dir():
        yield Path(name)
        return
    refuse_missing_folder(name)
    from huggingface_hub import snapshot_download

    identifier = SMOLLM2_HUB if name == SMOLLM2 else name
    try:
        fetched = Path(snapshot_download(identifier, allow_patterns=list(WANTED), **hub_options()))
    except Exception as error:
        raise CheckpointError(not_found(name, identifier, error)) from error
    # Outside the `try`: what goes wrong in the caller's block is no failure of the download.
    yield fetched
