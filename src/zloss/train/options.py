"""Options of training runs that are read without torch: what is kept of a run, and the paper's stress settings by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from zloss.results.options import NotAnOption, Option, check_counts


@dataclass(frozen=True)
class RunOptions:
    """Checkpoints, trackers, and which parts of a run are kept."""

    checkpoint_every: int = 100
    """Steps between checkpoints; 0 keeps none."""
    trackers: Annotated[tuple[str, ...], Option(metavar="A,B,...", comma_separated=True)] = ()
    """Trackers of accelerate: tensorboard, wandb, ...; `none` for none."""
    validate_every: int = 0
    """Steps between evaluations of the cross-entropy on the first 8 validation blocks, for the terminal, trackers and
    steps.jsonl; 0 for none."""
    save_model: bool = False
    """Keep the trained model of every run, in the Hugging Face format, in `model/` of its folder."""
    command: Annotated[str, NotAnOption] = "zloss.train.run.run_training"
    """The command line or function that started the run, for its provenance."""

    def __post_init__(self) -> None:
        check_counts(self, ("checkpoint_every", "validate_every"), least=0)


StressName = Literal["high-coef", "unclipped", "update-outlier", "high-lr"]
EFFECTIVELY_UNCLIPPED = 1e8
"""A clipping threshold that no gradient norm of these runs reaches."""


@dataclass(frozen=True)
class Stress:
    """One setting."""

    meaning: str
    """What it is, with its table in the paper."""
    changes: dict[str, Any]
    """Fields of `TrainConfig` with their values."""
    coef: float | None = None
    """λ of the methods; None leaves it as it is without the setting."""


STRESSES: dict[StressName, Stress] = {
    "high-coef": Stress("a tenfold coefficient under the usual clipping (tab:stress_diag)", {}, coef=1e-3),
    "unclipped": Stress(
        "effectively no clipping, four times the learning rate (tab:fineweb_noclip_stress)",
        {"clip": EFFECTIVELY_UNCLIPPED, "lr": 2e-4},
        coef=1e-3,
    ),
    "update-outlier": Stress(
        "effectively no clipping, sixteen times the learning rate (tab:fineweb_update_outlier)",
        {"clip": EFFECTIVELY_UNCLIPPED, "lr": 8e-4},
        coef=3e-3,
    ),
    "high-lr": Stress("the learning rate of the update-outlier setting, clipped at 1", {"lr": 8e-4}),
}
