"""The arms of a training table: a method and its coefficient."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zloss.results.train_config import TrainConfig
from zloss_paper.engine.paper_methods import CE, CENTERED, CENTERED_HEAD, METHODS, RAW_METHODS, STANDARD
from zloss_paper.engine.table import Key


@dataclass(frozen=True)
class Arm:
    """A method at a coefficient: one line of a training table."""

    method: str
    """By the paper's name."""
    coef: float = 0.0
    key: tuple[tuple[str, Key], ...] = ()
    """Key of its line; empty: the method alone."""

    def of(self, shared: TrainConfig, seed: int) -> TrainConfig:
        """The run of this arm at a seed; `shared` holds the rest of its setting."""
        return replace(shared, method=METHODS[self.method], coef=self.coef, seed=seed)


BASELINE = Arm(CE)


def low_coefficient_arms(coef: float = 1e-4) -> tuple[Arm, ...]:
    """CE, Centered head, Standard, Centered."""
    return (BASELINE, Arm(CENTERED_HEAD), Arm(STANDARD, coef), Arm(CENTERED, coef))


def stress_arms(coef: float) -> tuple[Arm, ...]:
    """All six methods in the order of the stress tables."""
    raw = (Arm(method, coef) for method in RAW_METHODS)
    return (BASELINE, Arm(CENTERED_HEAD), *raw, Arm(CENTERED, coef))
