"""Objectives by name, as the command line and training configs use them."""

from __future__ import annotations

from collections.abc import Callable

from zloss.errors import UnknownNameError
from zloss.source.objective import Objective
from zloss.source.objectives.centered import CenteredZLoss
from zloss.source.objectives.centered_head import CenteredHead
from zloss.source.objectives.cross_entropy import CrossEntropy
from zloss.source.objectives.factorized import FactorizedZLoss
from zloss.source.objectives.gain_aware import GainAwareZLoss
from zloss.source.objectives.standard import StandardZLoss

ObjectiveFactory = Callable[[float | None], Objective]
"""From one coefficient to an objective: what a sweep over λ needs."""

_FACTORIES: dict[str, ObjectiveFactory] = {
    CrossEntropy.name: lambda coef: CrossEntropy(),
    CenteredHead.name: lambda coef: CenteredHead(),
    StandardZLoss.name: lambda coef: StandardZLoss(coef),
    CenteredZLoss.name: lambda coef: CenteredZLoss(coef),
    # The paper's convention: λ_μ = λ_rel = λ, c_μ = 0, c_rel = log V.
    FactorizedZLoss.name: lambda coef: FactorizedZLoss(coef, coef),
    GainAwareZLoss.name: lambda coef: GainAwareZLoss(coef),
}


def objective_names() -> tuple[str, ...]:
    """Every registered name, the paper's six first."""
    return tuple(_FACTORIES)


def register_objective(name: str, factory: ObjectiveFactory) -> None:
    """Make an objective of your own known by name, e.g. to the methods of `zloss train`.

    >>> register_objective("z-around-zero", lambda coef: StandardZLoss(coef, target=0.0))
    >>> make_objective("z-around-zero", 1e-4)
    StandardZLoss(coef=0.0001, target=0.0)
    """
    _FACTORIES[name] = factory


def make_objective(name: str, coef: float | None) -> Objective:
    """The objective `name` with coefficient `coef`; CE and centered-head have none and ignore it.

    >>> make_objective("factorized", 1e-4)
    FactorizedZLoss(shift_coef=0.0001, relative_coef=0.0001, shift_target=0.0, relative_target=None)
    """
    if not isinstance(name, str) or name not in _FACTORIES:
        raise UnknownNameError("objective", name, _FACTORIES)
    return _FACTORIES[name](coef)
