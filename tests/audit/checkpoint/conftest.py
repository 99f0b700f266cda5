"""A text and one tiny model of every kind, shared by the audits of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_models import save_model
from zloss.text import pydoc_topics

KINDS = ("gpt2", "neox", "phi", "cohere", "granite", "gemma2", "mixtral")


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "topics.txt"
    path.write_text("\n\n".join(pydoc_topics()[:30]))
    return path


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {kind: save_model(kind, root / kind) for kind in KINDS}
