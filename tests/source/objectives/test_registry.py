"""Objectives by name."""

from __future__ import annotations

import dataclasses

import pytest

import zloss
from zloss import errors
from zloss import objectives as registry


def test_the_papers_six_are_known_by_their_own_names() -> None:
    for name in ("ce", "centered-head", "standard", "centered", "factorized", "gain-aware"):
        assert zloss.make_objective(name, 1e-4).name == name
        assert not zloss.make_objective(name, 0).active


def test_unknown_names_suggest_the_nearest() -> None:
    with pytest.raises(errors.UnknownNameError, match="Did you mean 'standard'"):
        zloss.make_objective("standart", 1e-4)


def test_a_registered_objective_is_made_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_FACTORIES", dict(registry._FACTORIES))
    zloss.register_objective("palm", lambda coef: zloss.StandardZLoss(coef, target=0.0))
    assert zloss.make_objective("palm", 1e-4) == zloss.StandardZLoss(1e-4, target=0.0)


@pytest.mark.parametrize("target", [None, "0", float("nan")])
def test_the_target_of_the_shift_has_no_default_of_log_v(target: object) -> None:
    """The error once offered None (log V), which is refused."""
    with pytest.raises(errors.CoefficientError, match="`shift_target` is expected to be a finite number"):
        zloss.FactorizedZLoss(1e-4, 1e-4, shift_target=target)


def test_objectives_are_frozen_values() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        zloss.StandardZLoss(1e-4).coef = 2.0  # type: ignore[misc]
    assert zloss.StandardZLoss(1e-4) == zloss.StandardZLoss(1e-4)
