"""Options of a training run that do not change its numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from zloss.results.checks import check_counts
from zloss.results.option import NotAnOption, Option


@dataclass(frozen=True)
class RunOptions:
    """Checkpoints, trackers and what is kept of a run."""

    checkpoint_every: int = 100
    """Steps between checkpoints; 0 keeps none."""
    trackers: Annotated[tuple[str, ...], Option(metavar="A,B,...", comma_separated=True)] = ()
    """Trackers of accelerate: tensorboard, wandb, ...; `none` for none."""
    validate_every: int = 0
    """Steps between two looks at the cross-entropy of the first 8 validation blocks, for the terminal, trackers and
    steps.jsonl; 0 for none."""
    save_model: bool = False
    """Keep the trained model of every run, in the Hugging Face format, in `model/` of its folder."""
    command: Annotated[str, NotAnOption] = "zloss.train.run.run_training"
    """The command line or function that started the run, for its provenance."""

    def __post_init__(self) -> None:
        check_counts(self, ("checkpoint_every", "validate_every"), least=0)
