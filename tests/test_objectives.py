"""Objectives: values and coefficients against autograd at the logits, and objectives by name."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import zloss
from tests.laws.definitions import relative_error
from zloss import errors, objectives
from zloss.objectives import token_loss
from zloss.statistics import TokenStats

ROOT = Path(__file__).parents[1]


def public_objectives() -> list[type[zloss.Objective]]:
    """The classes of objectives that `import zloss` offers."""
    exported = [getattr(zloss, name) for name in zloss.__all__]
    classes = [one for one in exported if isinstance(one, type) and issubclass(one, zloss.Objective)]
    return [one for one in classes if one is not zloss.Objective]


PUBLIC = public_objectives()
NAMES = [one.name for one in PUBLIC if one.name in objectives.objective_names()]
WITHOUT_GAIN = tuple(made for made in (zloss.make_objective(name, 0.7) for name in NAMES) if not made.needs_gain)


def statistics(z: torch.Tensor, index: torch.Tensor, valid: torch.Tensor) -> tuple[TokenStats, torch.Tensor]:
    row_max = z.amax(1)
    exp = torch.exp(z - row_max.unsqueeze(1))
    picked = z.gather(1, index.unsqueeze(1)).squeeze(1)
    return TokenStats(row_max, exp.sum(1).log(), picked, valid, z.shape[1], mu=z.mean(1)), exp


@pytest.mark.parametrize(
    "objective", [*WITHOUT_GAIN, zloss.FactorizedZLoss(0.5, 0.9)], ids=lambda objective: objective.name
)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_coefficients_give_the_gradient_at_the_logits(objective: zloss.Objective, smoothing: float) -> None:
    g = torch.Generator().manual_seed(0)
    z = torch.randn(6, 11, generator=g, dtype=torch.float64).requires_grad_()
    index, weight = torch.randint(11, (6,), generator=g), torch.rand(6, generator=g, dtype=torch.float64)
    valid = torch.tensor([True, True, False, True, True, True])
    ce = torch.nn.functional.cross_entropy(z, index, reduction="none", label_smoothing=smoothing)
    aux = objective.penalty(z, None)
    counted = torch.where(valid, weight, 0.0)
    total = torch.autograd.grad((counted * (ce + aux)).sum(), z, retain_graph=True)[0]
    cross_entropy = torch.autograd.grad((counted * ce).sum(), z)[0]

    stats, exp = statistics(z.detach(), index, valid)
    loss = token_loss(stats, objective, smoothing)
    assert relative_error(loss.cross_entropy, ce) < 1e-14
    assert relative_error(loss.auxiliary, aux) < 1e-14
    onehot = torch.nn.functional.one_hot(index, 11)
    for part, want in (("total", total), ("z", total - cross_entropy)):
        source = loss.exp_coefficients(weight, valid, exp.sum(1), part)
        got = source.a.unsqueeze(1) * exp
        if source.b is not None:
            got = got - source.b.unsqueeze(1) * onehot
        if source.g is not None:
            got = got - source.g.unsqueeze(1) / 11
        assert relative_error(got, want) < 1e-13


def test_objectives_are_made_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        assert zloss.make_objective(name, 1e-4).name == name
        assert not zloss.make_objective(name, 0).active
    with pytest.raises(errors.UnknownNameError, match="Did you mean 'standard'"):
        zloss.make_objective("standart", 1e-4)
    monkeypatch.setattr(objectives, "_FACTORIES", dict(objectives._FACTORIES))
    zloss.register_objective("palm", lambda coef: zloss.StandardZLoss(coef, target=0.0))
    assert zloss.make_objective("palm", 1e-4) == zloss.StandardZLoss(1e-4, target=0.0)
    assert zloss.make_objective("palm", 1e-4, target=None) == zloss.StandardZLoss(1e-4)
    for name in NAMES:
        made: Any = zloss.make_objective(name, 1e-4, target=2.0)
        assert made.name == name
        assert getattr(made, "target", getattr(made, "relative_target", 2.0)) == 2.0
        assert getattr(made, "shift_target", 0.0) == 0.0


@pytest.mark.parametrize(
    ("objective", "arguments"),
    [
        (zloss.StandardZLoss, (-1e-4,)),
        (zloss.StandardZLoss, ("1e-4",)),
        (zloss.StandardZLoss, (1e-4, float("inf"))),
        (zloss.StandardZLoss, (1e-4, "x")),
        (zloss.CenteredZLoss, (float("nan"),)),
        (zloss.FactorizedZLoss, (1e-4, float("inf"))),
        (zloss.GainAwareZLoss, (1e-4, -1)),
        (zloss.GainAwareZLoss, (1e-4, None)),
    ],
)
def test_numbers_out_of_their_domain_are_refused(objective: Any, arguments: tuple[object, ...]) -> None:
    with pytest.raises(errors.CoefficientError, match="expected"):
        objective(*arguments)


@pytest.mark.parametrize("target", [None, "0", float("nan")])
def test_the_target_of_the_shift_has_no_default_of_log_v(target: object) -> None:
    """The error once offered None (log V), which is refused."""
    with pytest.raises(errors.CoefficientError, match="`shift_target` is expected to be a finite number"):
        zloss.FactorizedZLoss(1e-4, 1e-4, shift_target=target)


@pytest.mark.parametrize("name", [name for name in NAMES if zloss.make_objective(name, 0.7).active])
@pytest.mark.parametrize("backend", ["dense", "chunked"])
@pytest.mark.parametrize("value", [0.0, 0.7, 50.0])
def test_a_coefficient_may_be_a_tensor_or_a_function_of_the_step(name: str, backend: str, value: float) -> None:
    make: Any = functools.partial(zloss.make_objective, name)
    g = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(rows, 6, generator=g).requires_grad_() for rows in (9, 31))
    target = torch.randint(31, (9,), generator=g)
    found = []
    for coef in (value, torch.tensor(value), torch.tensor(value).double(), lambda step: value if step == 7 else 0.1):
        out = zloss.head_loss(hidden, weight, target, make(coef).at(7), backend=backend)
        found.append((out.loss, out.auxiliary, *torch.autograd.grad(out.loss, (hidden, weight))))
    for other in found[1:]:
        assert all(torch.equal(got, want) for got, want in zip(other, found[0], strict=True))
    assert make(value).at(3) == make(value)


def test_coefficients_that_no_loss_can_use_are_refused() -> None:
    for coef in (torch.ones(2), torch.tensor(1), torch.tensor(-1.0), torch.ones((), requires_grad=True)):
        with pytest.raises(errors.CoefficientError, match="coef"):
            zloss.StandardZLoss(coef)
    tensors = torch.randn(3, 4), torch.randn(5, 4), torch.tensor([0, 1, 2])
    with pytest.raises(errors.CoefficientError, match=r"objective\.at\(step\)"):
        zloss.head_loss(*tensors, zloss.CenteredZLoss(lambda step: 1e-4))
    with pytest.raises(errors.CoefficientError, match="negative"):
        zloss.CenteredZLoss(lambda step: -1.0).at(0)
    with pytest.raises(errors.CoefficientError, match=r"`relative_coef` of FactorizedZLoss .* 0-d tensor"):
        objectives.require_target(zloss.FactorizedZLoss(None, lambda step: 1e-4, relative_target=0.0))


@dataclass(frozen=True)
class CurvedObjective(zloss.StandardZLoss):
    """λ·f((log Z − c)²), with a function f that is not a coefficient."""

    curve: Callable[[torch.Tensor], torch.Tensor] = torch.sqrt


@dataclass(frozen=True)
class WithoutCoefficient(zloss.CrossEntropy):
    """Always on."""

    strength: float = 1.0

    @property
    def active(self) -> bool:
        return True


def test_only_coefficients_are_set_and_only_those_that_are_on() -> None:
    """A function that is not a coefficient was called with the step; a term that is off was switched on."""
    assert CurvedObjective(lambda step: step / 10).at(3) == CurvedObjective(0.3)
    assert zloss.FactorizedZLoss(None, 1e-4).with_coef(1.0) == zloss.FactorizedZLoss(None, 1.0)
    assert zloss.FactorizedZLoss(torch.tensor(0.0), lambda step: 0.1).with_coef(1.0) == zloss.FactorizedZLoss(1.0, 1.0)
    assert zloss.CrossEntropy().with_coef(0.0) == zloss.CrossEntropy()
    with pytest.raises(errors.CoefficientError, match=r'WithoutCoefficient has no coefficient.* ends in "coef"'):
        WithoutCoefficient().with_coef(0.0)


def test_every_public_objective_is_registered_and_in_the_help() -> None:
    public = {one.name for one in PUBLIC}
    assert public <= set(objectives.objective_names()), "give it an entry in _FACTORIES of objectives.py"
    text = (ROOT / "docs/reference/commands.md").read_text(encoding="utf-8")
    (line,) = [line for line in text.splitlines() if "ce, centered-head, standard" in line]
    assert not [name for name in public if name not in line], (
        "name it in the help of --methods (cli/train.py), then `make pages`"
    )


@pytest.mark.parametrize(
    ("place", "key"),
    [
        ("docs/axolotl.md", "name"),
        ("docs/nemo.md", "name"),
        ("docs/torchtitan.md", "name"),
        ("src/zloss/integrations/torchtitan.py", "name"),
        ("docs/megatron.md", "__name__"),
        ("docs/objectives.md", "__name__"),
    ],
)
def test_every_list_of_objectives_names_every_z_loss(place: str, key: str) -> None:
    text = (ROOT / place).read_text(encoding="utf-8")
    names = [getattr(one, key) for one in PUBLIC if one.name in NAMES and zloss.make_objective(one.name, 0.7).active]
    missing = [name for name in names if not re.search(rf"""[`".]{name}[`"(]""", text)]
    assert not missing, f"name {', '.join(missing)} where {place} lists the objectives"
