"""Options of training runs, read without torch: what is kept of a run, and the paper's stress settings by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

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
STRESSES: dict[StressName, dict[str, float]] = {
    # A tenfold coefficient under the usual clipping (tab:stress_diag).
    "high-coef": {"coef": 1e-3},
    # Effectively no clipping, four times the learning rate (tab:fineweb_noclip_stress).
    "unclipped": {"coef": 1e-3, "clip": EFFECTIVELY_UNCLIPPED, "lr": 2e-4},
    # Effectively no clipping, sixteen times the learning rate (tab:fineweb_update_outlier).
    "update-outlier": {"coef": 3e-3, "clip": EFFECTIVELY_UNCLIPPED, "lr": 8e-4},
    # The learning rate of update-outlier, clipped as usual.
    "high-lr": {"lr": 8e-4},
}
"""The defaults of --coef, --clip and --lr that a stress setting of the paper changes."""
