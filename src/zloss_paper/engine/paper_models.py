"""The models of the paper by its names, and the models a user names instead."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

MODEL_IDS = {
    "DistilGPT-2": "distilgpt2",
    "GPT-2": "gpt2",
    "GPT-2 Medium": "gpt2-medium",
    "GPT-2 Large": "gpt2-large",
    "Pythia-160M": "EleutherAI/pythia-160m-deduped",
    "Pythia-410M": "EleutherAI/pythia-410m-deduped",
    "Pythia-1B": "EleutherAI/pythia-1b-deduped",
}
"""The paper's names and the checkpoints; it states the ids of the Pythia models only."""


def paper_name(name: str) -> str | None:
    """The paper's name of a model given by name or id; None: it is not a model of the paper."""
    for known, identifier in MODEL_IDS.items():
        if name.lower() in (known.lower(), identifier.lower()):
            return known
    return None


@dataclass(frozen=True)
class GivenModel:
    """A model as the user names it: NAME=FOLDER, NAME, or a folder, file or id that is not the paper's."""

    word: str
    known: str | None
    """The paper's name of it; None: a model of its own."""
    folder: str
    """Where a model of the paper lies; empty: on the hub."""

    @property
    def printed(self) -> str:
        """The name of a model of its own in a table."""
        return Path(self.word).name if Path(self.word).exists() else self.word


def given_model(word: str) -> GivenModel:
    """One word of `Overrides.models`, read; an existing path is never a name."""
    name, equals, folder = word.partition("=")
    known = paper_name(name) if equals else None if Path(word).exists() else paper_name(word)
    return GivenModel(word, known, folder)
