"""Small models and a text for all tests of commands, and a check of rejected commands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.tiny_models import save_model
from zloss.cli.main import main
from zloss.text import pydoc_topics

Refused = Callable[..., str]


@pytest.fixture(scope="session")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied head and a table of 128 positions."""
    return save_model("gpt2", tmp_path_factory.mktemp("models") / "gpt2")


@pytest.fixture(scope="session")
def neox(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untied head and rotary positions, made for 128."""
    return save_model("neox", tmp_path_factory.mktemp("models") / "neox")


@pytest.fixture(scope="session")
def topics(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An English text."""
    path = tmp_path_factory.mktemp("text") / "topics.txt"
    path.write_text("\n\n".join(pydoc_topics()))
    return path


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    """Run a command that must exit with code 2 and print one line with all of the sentences; return that line."""

    def run(argv: Sequence[object], *sentences: str) -> str:
        capsys.readouterr()
        assert main([str(word) for word in argv]) == 2, argv
        error = capsys.readouterr().err
        assert error.count("\n") == 1, error
        for sentence in sentences:
            assert sentence in error
        return error

    return run
