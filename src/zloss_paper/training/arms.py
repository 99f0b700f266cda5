"""The arms of a training table: a method and its coefficient."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zloss.train.config import TrainConfig
from zloss_paper.engine.table import Key

CE, CENTERED_HEAD, STANDARD = "CE baseline", "Centered head", "Standard Z-loss"
FACTORIZED, GAIN_AWARE, CENTERED = "Factorized Z-loss", "Gain-aware Z-loss", "Centered Z-loss"
METHODS = {
    CE: "ce",
    CENTERED_HEAD: "centered-head",
    STANDARD: "standard",
    FACTORIZED: "factorized",
    GAIN_AWARE: "gain-aware",
    CENTERED: "centered",
}
"""The paper's names of the methods, and ours."""


@dataclass(frozen=True)
class Arm:
    """One line of a table."""

    method: str
    """By the paper's name."""
    coef: float = 0.0
    key: tuple[tuple[str, Key], ...] = ()
    """Key of its line where the method alone is not."""

    def of(self, shared: TrainConfig, seed: int) -> TrainConfig:
        """Its run at a seed."""
        return replace(shared, method=METHODS[self.method], coef=self.coef, seed=seed)


BASELINE = Arm(CE)


def low_coefficient_arms(coef: float = 1e-4) -> tuple[Arm, ...]:
    """CE, Centered head, Standard, Centered."""
    return (BASELINE, Arm(CENTERED_HEAD), Arm(STANDARD, coef), Arm(CENTERED, coef))


def stress_arms(coef: float) -> tuple[Arm, ...]:
    """All six methods in the order of the stress tables."""
    raw = (Arm(method, coef) for method in (STANDARD, FACTORIZED, GAIN_AWARE))
    return (BASELINE, Arm(CENTERED_HEAD), *raw, Arm(CENTERED, coef))
