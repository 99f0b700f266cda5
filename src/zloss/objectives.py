"""The objectives of the paper: cross-entropy plus a penalty on the log-normalizer.

Every objective has a logit source with only three shapes,

    δ_t = a_t · p_t  −  b_t · onehot(y_t)  −  g_t · 1/V

so an objective is a pure function of per-token statistics that returns a value and the coefficients (a, b, g). It knows
nothing about kernels; a backend turns coefficients into gradients and knows nothing about objectives.

| objective                  | value added to cross-entropy            | added to a                  | added to g        |
|----------------------------|-----------------------------------------|-----------------------------|-------------------|
| CrossEntropy, CenteredHead | 0                                       | 0                           | 0                 |
| StandardZLoss              | λ(log Z − c)²                           | 2λ(log Z − c)               | 0                 |
| CenteredZLoss              | λ(log Z̃ − c)²                           | s = 2λ(log Z̃ − c)           | s                 |
| FactorizedZLoss            | λ_μ(μ − c_μ)² + λ_rel(log Z̃ − c_rel)²   | s = 2λ_rel(log Z̃ − c_rel)   | s − 2λ_μ(μ − c_μ) |
| GainAwareZLoss             | λ(log Z − c)² / (1 + β·sg(A²))          | 2λ(log Z − c) / (1 + βA²)   | 0                 |

Cross-entropy itself contributes a = 1 and b = 1 (with label smoothing ε: b = 1 − ε, g = ε), so in total a is 1 plus its column.

A coefficient is a number, a 0-d tensor (a compiled loss reads its value at every call, so changing it in place recompiles
nothing), or a function of the optimizer step, which `Objective.at` turns into a number: a loss does not know the step. The
first step is 1. The fields that hold coefficients have names that end in "coef".

Axes: T tokens, V vocabulary.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from types import EllipsisType
from typing import ClassVar, Literal, Self, TypeAlias, TypeGuard

import torch
from torch import Tensor

from zloss.errors import CoefficientError, MissingInputError, UnknownNameError
from zloss.results.options import Coordinate
from zloss.statistics import TokenStats
from zloss.tensors import is_number, may_read

Coef: TypeAlias = "float | Tensor | Callable[[int], float] | None"
"""λ: None or 0 is off."""


@dataclass(frozen=True)
class Coefficients:
    """(a, b, g) of every token: δ_t = a_t·p_t − b_t·onehot(y_t) − g_t/V. None is 0.

    Scaling: whatever builds them states which weights they include; those of an objective are per token, before any reduction.
    """

    a: Tensor
    b: Tensor | None = None
    g: Tensor | None = None

    def filled(self) -> tuple[Tensor, Tensor, Tensor]:
        """(a, b, g) with zeros for None, as kernels take them."""
        zero = torch.zeros_like(self.a)
        return self.a, zero if self.b is None else self.b, zero if self.g is None else self.g


class Objective(ABC):
    """Cross-entropy plus a penalty on the log-normalizer. Subclasses are frozen dataclasses."""

    name: ClassVar[str]
    """The name on the command line."""
    coordinate: ClassVar[Coordinate] = "raw"
    """The logits this method deploys: raw, or row-centered."""
    needs_mu: ClassVar[bool] = False
    needs_gain: ClassVar[bool] = False

    @property
    @abstractmethod
    def active(self) -> bool:
        """False when every coefficient is None or 0: then the objective is cross-entropy, bit for bit. A tensor always
        counts as on."""

    def coefficients(self) -> dict[str, Coef]:
        """The fields whose names end in "coef", by name.

        >>> FactorizedZLoss(None, 1e-4).coefficients()
        {'shift_coef': None, 'relative_coef': 0.0001}
        """
        names: list[str] = [field.name for field in fields(self)] if is_dataclass(self) else []
        return {name: getattr(self, name) for name in names if name.endswith("coef")}

    def at(self, step: int) -> Self:
        """The objective at an optimizer step, the first of which is 1: coefficients that are functions of the step become
        their values there.

        >>> StandardZLoss(lambda step: 1e-4 if step < 1000 else 0.0).at(1000)
        StandardZLoss(coef=0.0, target=None)
        """
        values = {name: coef(step) for name, coef in self.coefficients().items() if _is_function(coef)}
        return replace(self, **values) if values else self  # type: ignore[type-var]

    def with_coef(self, value: float) -> Self:
        """The same objective with every coefficient that is on set to `value`: 0 is off, 1 is the unscaled penalty.

        >>> FactorizedZLoss(None, 1e-3).with_coef(1.0)
        FactorizedZLoss(shift_coef=None, relative_coef=1.0, shift_target=0.0, relative_target=None)
        """
        coefs = self.coefficients()
        if not coefs and self.active:
            raise CoefficientError(
                f"{type(self).__name__} has no coefficient that could be set to {value}: it needs a field whose name ends in "
                '"coef", such as `coef`.'
            )
        on = [name for name, coef in coefs.items() if _is_function(coef) or is_on(coef)]
        return replace(self, **dict.fromkeys(on, value)) if on else self  # type: ignore[type-var]

    @abstractmethod
    def penalty(self, logits_TV: Tensor, gain_T: Tensor | None) -> Tensor:
        """The definition, in differentiable tensor operations on whole logits: what `source` is tested against."""

    @abstractmethod
    def source(self, stats: TokenStats) -> tuple[Tensor, Coefficients]:
        """The penalty of every token and the coefficients (a, g) of its source, from the statistics.

        This `a` is without the 1 of CE, which `TokenLoss.exp_coefficients` adds.
        """


Part = Literal["z", "total"]
"""The auxiliary alone, or cross-entropy plus auxiliary."""


@dataclass(frozen=True)
class TokenLoss:
    """Cross-entropy and auxiliary of every token, and what they inject at the logits. Scaling: before any reduction."""

    cross_entropy: Tensor
    auxiliary: Tensor
    source: Coefficients | None
    """(a, g) of the auxiliary; None if the objective is off."""
    label_smoothing: float

    def exp_coefficients(
        self, weight: Tensor, valid: Tensor | None, exp_sum: Tensor, part: Part = "total"
    ) -> Coefficients:
        """The coefficients of Σ_t weight_t·ℓ_t, 0 at ignored tokens.

        The `a` returned multiplies E = exp(z − m) = S·p, not p: it is w·(1 + source.a)/S (without the 1 for part="z").
        `valid`: which tokens count; None if all do.
        """
        a, g = (None, None) if self.source is None else (self.source.a, self.source.g)
        b, epsilon = None, self.label_smoothing
        if part == "total":
            a = None if a is None else a + 1
            b = weight if epsilon == 0 else weight * (1 - epsilon)
        elif a is None:
            a = torch.zeros_like(exp_sum)
        a = (weight if a is None else weight * a) / exp_sum
        if part == "total" and epsilon:
            g = weight * epsilon if g is None else weight * (g + epsilon)
        elif g is not None:
            g = weight * g
        if valid is not None:  # `where` and not a product: the values at an ignored token may be infinite
            a = torch.where(valid, a, 0)
            b, g = (None if value is None else torch.where(valid, value, 0) for value in (b, g))
        return Coefficients(a, b, g)


def token_loss(stats: TokenStats, objective: Objective, label_smoothing: float = 0.0) -> TokenLoss:
    """Label-smoothed cross-entropy plus the auxiliary of the objective, from the statistics of every token."""
    epsilon = label_smoothing
    # log Z − (1 − ε)z_y − εμ, written in differences from m so that a common shift cancels first.
    below = stats.target_logit - stats.row_max
    ce = stats.log_s - (below if epsilon == 0 else (1 - epsilon) * below)
    if epsilon:
        assert stats.mu is not None, "a loss rejects label smoothing if it has no mean logit"
        ce = ce - epsilon * (stats.mu - stats.row_max)
    if not objective.active:
        return TokenLoss(ce, torch.zeros_like(ce), None, epsilon)
    value, penalty = objective.source(stats)
    return TokenLoss(ce, value, penalty, epsilon)


@dataclass(frozen=True)
class CrossEntropy(Objective):
    """The CE baseline, deployed with raw logits.

    >>> CrossEntropy().active
    False
    """

    name: ClassVar[str] = "ce"

    @property
    def active(self) -> bool:
        return False

    def penalty(self, logits_TV: Tensor, gain_T: Tensor | None) -> Tensor:
        return logits_TV.new_zeros(logits_TV.shape[:-1])

    def source(self, stats: TokenStats) -> tuple[Tensor, Coefficients]:
        zero = torch.zeros_like(stats.log_s)
        return zero, Coefficients(a=zero)


@dataclass(frozen=True)
class CenteredHead(CrossEntropy):
    """Cross-entropy on row-centered logits z − μ1: the paper's control without an auxiliary loss.

    A common shift changes neither CE nor its gradient, so training equals `CrossEntropy` bit for bit; only the deployed
    coordinate, in which Z-loss metrics are read, differs.

    >>> CenteredHead().active, CenteredHead().coordinate
    (False, 'centered')
    """

    name: ClassVar[str] = "centered-head"
    coordinate: ClassVar[Coordinate] = "centered"


class _OneCoefficient(Objective):
    """A penalty with one λ and one c."""

    coef: Coef
    target: float | None

    def __post_init__(self) -> None:
        check_coefficient("coef", self.coef)
        check_target("target", self.target)

    @property
    def active(self) -> bool:
        return is_on(self.coef)


@dataclass(frozen=True)
class StandardZLoss(_OneCoefficient):
    """λ(log Z − c)²; source 2λ(log Z − c)·p (paper eq:zloss, eq:source).

    `target=None` is c = log V in every objective, as in the paper; most codebases use 0. (In `zloss.testing.check_loss`, None
    leaves c unchecked.)

    >>> StandardZLoss(1e-4).active, StandardZLoss(0.0).active, StandardZLoss(None).active
    (True, False, False)
    """

    coef: Coef
    target: float | None = None
    name: ClassVar[str] = "standard"

    def penalty(self, logits_TV: Tensor, gain_T: Tensor | None) -> Tensor:
        c = resolve_target(self.target, logits_TV.shape[-1])
        return off_is_zero(self.coef) * (torch.logsumexp(logits_TV, dim=-1) - c) ** 2

    def source(self, stats: TokenStats) -> tuple[Tensor, Coefficients]:
        violation = stats.log_z - resolve_target(self.target, stats.vocab)
        coef = off_is_zero(self.coef)
        return violation.square() * coef, Coefficients(a=violation * (2 * coef))


@dataclass(frozen=True)
class CenteredZLoss(_OneCoefficient):
    """λ(log Z̃ − c)² with log Z̃ = log Z − μ; source s·(p − 1/V) with s = 2λ(log Z̃ − c).

    The source sums to zero over the vocabulary, and a common shift of the logits does not change it (paper
    eq:centered_head, eq:centered_raw_adjoint). `target=None` is c = log V.

    >>> logits = torch.tensor([[1.0, 2.0, 4.0]])
    >>> bool(torch.allclose(CenteredZLoss(0.1).penalty(logits + 50, None), CenteredZLoss(0.1).penalty(logits, None)))
    True
    """

    coef: Coef
    target: float | None = None
    name: ClassVar[str] = "centered"
    coordinate: ClassVar[Coordinate] = "centered"
    needs_mu: ClassVar[bool] = True

    def penalty(self, logits_TV: Tensor, gain_T: Tensor | None) -> Tensor:
        c = resolve_target(self.target, logits_TV.shape[-1])
        centered_TV = logits_TV - logits_TV.mean(dim=-1, keepdim=True)
        return off_is_zero(self.coef) * (torch.logsumexp(centered_TV, dim=-1) - c) ** 2

    def source(self, stats: TokenStats) -> tuple[Tensor, Coefficients]:
        violation = _centered_log_z(stats) - resolve_target(self.target, stats.vocab)
        coef = off_is_zero(self.coef)
        s = violation * (2 * coef)
        return violation.square() * coef, Coefficients(a=s, g=s)


@dataclass(frozen=True)
class FactorizedZLoss(Objective):
    """λ_μ(μ − c_μ)² + λ_rel(log Z̃ − c_rel)²: Z-loss without the cross term of its expansion (paper eq:factorized).

    Source: s·p − (s − 2λ_μ(μ − c_μ))/V with s = 2λ_rel(log Z̃ − c_rel). The paper uses λ_μ = λ_rel, c_μ = 0.

    >>> FactorizedZLoss(1e-4, 1e-4).active, FactorizedZLoss(None, 0.0).active
    (True, False)
    """

    shift_coef: Coef
    relative_coef: Coef
    shift_target: float = 0.0
    relative_target: float | None = None
    name: ClassVar[str] = "factorized"
    needs_mu: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_coefficient("shift_coef", self.shift_coef)
        check_coefficient("relative_coef", self.relative_coef)
        if not (is_number(self.shift_target) and math.isfinite(self.shift_target)):
            raise CoefficientError(
                f"`shift_target` is expected to be a finite number (0 in the paper), but got {self.shift_target!r}."
            )
        check_target("relative_target", self.relative_target)

    @property
    def active(self) -> bool:
        return is_on(self.shift_coef, self.relative_coef)

    def penalty(self, logits_TV: Tensor, gain_T: Tensor | None) -> Tensor:
        c_rel = resolve_target(self.relative_target, logits_TV.shape[-1])
        mu = logits_TV.mean(dim=-1)
        log_z_centered = torch.logsumexp(logits_TV - mu.unsqueeze(-1), dim=-1)
        shift = off_is_zero(self.shift_coef) * (mu - self.shift_target) ** 2
        return shift + off_is_zero(self.relative_coef) * (log_z_centered - c_rel) ** 2

    def source(self, stats: TokenStats) -> tuple[Tensor, Coefficients]:
        relative = _centered_log_z(stats) - resolve_target(self.relative_target, stats.vocab)
        assert stats.mu is not None  # log Z̃ exists only with μ
        shift = stats.mu - self.shift_target
        shift_coef, relative_coef = off_is_zero(self.shift_coef), off_is_zero(self.relative_coef)
        s = 2 * relative_coef * relative
        return shift_coef * shift**2 + relative_coef * relative**2, Coefficients(a=s, g=s - 2 * shift_coef * shift)


@dataclass(frozen=True)
class GainAwareZLoss(_OneCoefficient):
    """λ(log Z − c)² / (1 + β·sg(A_p²)); the stop-gradient is part of the objective (paper eq:gain_aware).

    Source: 2λ(log Z − c)/(1 + βA_p²)·p. It attenuates the source where A_p is large; it does not lower A_p.

    >>> logits, gain = torch.zeros(1, 4), torch.tensor([10.0])
    >>> float(GainAwareZLoss(1.0, beta=0.01, target=0.0).penalty(logits, gain))  # (log 4)² / 2
    0.960906...
    """

    coef: Coef
    beta: float = 1e-2
    target: float | None = None
    name: ClassVar[str] = "gain-aware"
    needs_gain: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (is_number(self.beta) and math.isfinite(self.beta) and self.beta >= 0):
            raise CoefficientError(f"`beta` is expected to be a finite number ≥ 0, but got {self.beta!r}.")

    def penalty(self, logits_TV: Tensor, gain_T: Tensor | None) -> Tensor:
        c = resolve_target(self.target, logits_TV.shape[-1])
        damping = 1 + self.beta * _required_gain(gain_T).detach() ** 2
        return off_is_zero(self.coef) * (torch.logsumexp(logits_TV, dim=-1) - c) ** 2 / damping

    def source(self, stats: TokenStats) -> tuple[Tensor, Coefficients]:
        violation = stats.log_z - resolve_target(self.target, stats.vocab)
        weight = (1 + self.beta * _required_gain(stats.gain) ** 2).reciprocal() * off_is_zero(self.coef)
        return weight * violation**2, Coefficients(a=2 * weight * violation)


def _centered_log_z(stats: TokenStats) -> Tensor:
    assert stats.log_z_centered is not None, "a loss rejects an objective with `needs_mu` if it has no mean logit"
    return stats.log_z_centered


def _required_gain(gain: Tensor | None) -> Tensor:
    if gain is None:
        raise MissingInputError(
            "Gain-aware Z-loss needs the output-to-hidden gain: pass `weight`, the [V, D] output head."
        )
    return gain


def check_coefficient(name: str, value: Coef) -> None:
    """A coefficient is None or a finite number ≥ 0, a 0-d tensor of one, or a function of the step that returns one."""
    if isinstance(value, Tensor):
        if value.dim() or not value.is_floating_point() or value.requires_grad:
            raise CoefficientError(
                f"`{name}` is expected to be a number, or a 0-d float tensor that requires no gradient, but got "
                f"{value.dtype} {list(value.shape)}{' with requires_grad' if value.requires_grad else ''}."
            )
        if not may_read(value):
            return
        value = float(value)
    if value is None or callable(value):
        return
    expected = f"`{name}` is expected to be None (off) or a finite number ≥ 0, but got {value!r}"
    if not (is_number(value) and math.isfinite(value)):
        raise CoefficientError(f"{expected}.")
    if value < 0:
        raise CoefficientError(f"{expected}: a negative penalty would drive log Z away from its target.")


def check_target(name: str, value: float | None) -> None:
    """A target is None (log V) or a finite number."""
    if value is not None and not (is_number(value) and math.isfinite(value)):
        raise CoefficientError(f"`{name}` is expected to be None (log V) or a finite number, but got {value!r}.")


def require_target(objective: Objective) -> None:
    """An error if an active objective leaves its target to the default, log V: training frameworks use 0. They do not tell
    the loss their step, so a coefficient cannot be a function of it."""
    refuse_functions(objective)
    for name in ("target", "relative_target"):
        if objective.active and getattr(objective, name, 0.0) is None:
            if isinstance(objective, (CenteredZLoss, FactorizedZLoss)):
                raise MissingInputError(
                    f"`{name}` of {type(objective).__name__} must be given here: pass {name}=math.log(V). log Z − μ is never "
                    "below log V, so 0 cannot be reached."
                )
            raise MissingInputError(
                f"`{name}` of {type(objective).__name__} must be given here: {name}=0.0, which training frameworks use, or "
                f"{name}=math.log(V), the paper's, with which logits of 0 have no penalty."
            )


def refuse_functions(objective: Objective, otherwise: str = "") -> None:
    """An error if a coefficient is a function of the optimizer step, for places that do not count steps."""
    for name, coef in objective.coefficients().items():
        if _is_function(coef):
            raise CoefficientError(
                f"`{name}` of {type(objective).__name__} is a function of the optimizer step, which is not known here: pass a "
                f"0-d tensor and set its value before every step{otherwise}."
            )


def _is_function(coef: Coef) -> TypeGuard[Callable[[int], float]]:
    return callable(coef) and not isinstance(coef, Tensor)


def is_on(*coefficients: Coef) -> bool:
    """Whether any coefficient is switched on; None and 0 are both off, a tensor is on."""
    return any(isinstance(coef, Tensor) or bool(off_is_zero(coef) != 0) for coef in coefficients)


def off_is_zero(coefficient: Coef) -> float | Tensor:
    """The factor of a penalty: a number or a 0-d tensor."""
    if _is_function(coefficient):
        raise CoefficientError(
            "a coefficient of this objective is a function of the optimizer step, but a loss does not know the step: pass "
            "`objective.at(step)`."
        )
    return 0.0 if coefficient is None else coefficient  # type: ignore[return-value]


def resolve_target(target: float | None, vocab: int) -> float:
    """c, with None meaning log V: then the zero logit vector has no violation."""
    return math.log(vocab) if target is None else target


ObjectiveFactory = Callable[[float | None], Objective]
"""From one coefficient to an objective: what a sweep over λ needs."""

_FACTORIES: dict[str, ObjectiveFactory] = {
    CrossEntropy.name: lambda coef: CrossEntropy(),
    CenteredHead.name: lambda coef: CenteredHead(),
    StandardZLoss.name: StandardZLoss,
    CenteredZLoss.name: CenteredZLoss,
    # The paper's convention: λ_μ = λ_rel = λ, c_μ = 0, c_rel = log V.
    FactorizedZLoss.name: lambda coef: FactorizedZLoss(coef, coef),
    GainAwareZLoss.name: GainAwareZLoss,
}


def objective_names() -> tuple[str, ...]:
    """Every registered name, the paper's six first."""
    return tuple(_FACTORIES)


def register_objective(name: str, factory: ObjectiveFactory) -> None:
    """Register an objective by name, e.g. for the methods of `zloss train`.

    >>> register_objective("z-around-zero", lambda coef: StandardZLoss(coef, target=0.0))
    >>> make_objective("z-around-zero", 1e-4)
    StandardZLoss(coef=0.0001, target=0.0)
    """
    _FACTORIES[name] = factory


def make_objective(name: str, coef: float | None, target: float | EllipsisType | None = ...) -> Objective:
    """The objective `name` with coefficient `coef` and, if it is given, target c; CE and centered-head have neither and
    ignore both. The target of a factorized Z-loss is its `relative_target`.

    >>> make_objective("factorized", 1e-4, target=0.0)
    FactorizedZLoss(shift_coef=0.0001, relative_coef=0.0001, shift_target=0.0, relative_target=0.0)
    """
    if not isinstance(name, str) or name not in _FACTORIES:
        raise UnknownNameError("objective", name, _FACTORIES)
    objective = _FACTORIES[name](coef)
    if target is ...:
        return objective
    named = {"target", "relative_target"} & {field.name for field in fields(objective)}  # type: ignore[arg-type]
    return replace(objective, **dict.fromkeys(named, target))  # type: ignore[type-var]
