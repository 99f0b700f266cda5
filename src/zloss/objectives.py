"""What an objective is: a value per token and the coefficients of its logit source.

Every objective of the paper adds to cross-entropy a logit adjoint with only two shapes,

    δᶻ_t = along_p_t · p_t  −  along_uniform_t · 1/V

so an objective is a pure function of per-token statistics and knows no kernel; a backend turns the coefficients into
gradients and knows no objective.

[zloss.objectives] What a loss injects at the logits of a token: cross-entropy plus auxiliary, as coefficients of three vectors.

    δ_t = along_p_t · p_t  −  along_target_t · onehot(y_t)  −  along_uniform_t · 1/V

Axes: C tokens of a chunk.

[zloss.objectives] Plain cross-entropy: no auxiliary source.

[zloss.objectives] The gauge-only control of the paper: row-centered deployment, no auxiliary loss.

[zloss.objectives] Standard Z-loss: λ(log Z − c)² on raw logits (paper eq:zloss, eq:source).

[zloss.objectives] Centered Z-loss: λ(log Z̃ − c)² on row-centered logits (paper eq:centered_head, eq:centered_raw_adjoint).

[zloss.objectives] Factorized Z-loss: shift and relative normalizer penalised apart (paper eq:factorized).

[zloss.objectives] Gain-aware Z-loss: the standard penalty, damped where the head amplifies (paper eq:gain_aware).

[zloss.objectives] Objectives by name, as the command line and training configs use them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar
from torch import Tensor
from zloss.errors import CoefficientError, CoordinateError, MissingInputError
from zloss.results.coordinate import Coordinate as Coordinate
from zloss.tensors import is_number as is_number
from zloss.statistics import TokenStats
import torch
from zloss.errors import CoordinateError
from zloss.errors import CoefficientError
from collections.abc import Callable
from zloss.errors import UnknownNameError


# <<< zloss.objectives
@dataclass(frozen=True)
class Source:
    """The auxiliary value and logit source of every token. Scaling: per token, before any reduction."""

    value: Tensor
    along_p: Tensor
    along_uniform: Tensor | None = None


class Objective(ABC):
    """Cross-entropy plus a penalty on the log-normalizer. Subclasses are frozen dataclasses, one per file."""

    name: ClassVar[str]
    """The name on the command line."""
    coordinate: ClassVar[Coordinate] = "raw"
    """The logits this method deploys: raw, or row-centered."""
    needs_mu: ClassVar[bool] = False
    needs_gain: ClassVar[bool] = False

    @property
    @abstractmethod
    def active(self) -> bool:
        """False when every coefficient is None or 0: then the objective is cross-entropy, bit for bit."""

    @abstractmethod
    def penalty(self, logits_TV: Tensor, gain_T: Tensor | None) -> Tensor:
        """The definition, in differentiable tensor operations on whole logits: the truth the source is tested against."""

    @abstractmethod
    def source(self, stats: TokenStats) -> Source:
        """Value and logit-source coefficients from the statistics."""


def check_coefficient(name: str, value: float | None) -> None:
    """A coefficient is None or a finite number ≥ 0."""
    if value is None:
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


def is_on(*coefficients: float | None) -> bool:
    """Whether any coefficient is switched on; None and 0 are both off."""
    return any(coefficient is not None and coefficient != 0 for coefficient in coefficients)


def off_is_zero(coefficient: float | None) -> float:
    """The coefficient as a number: None is 0, and 0 stays 0."""
    return 0.0 if coefficient is None else coefficient


def resolve_target(target: float | None, vocab: int) -> float:
    """c, with None meaning log V: then the zero logit vector has no violation."""
    return math.log(vocab) if target is None else target


def require_centered_log_z(stats: TokenStats, method: str) -> Tensor:
    """log Z̃, or the reason why it does not exist."""
    if stats.log_z_centered is None:
        raise CoordinateError(
            f"{method} needs the mean logit μ, which does not exist for softcapped logits or a -inf bias. "
            "Use StandardZLoss, or exclude the -inf rows with `valid_vocab`."
        )
    return stats.log_z_centered


def require_gain(gain: Tensor | None, method: str) -> Tensor:
    """The gain A_p, or what to pass to get it."""
    if gain is None:
        raise MissingInputError(f"{method} needs the output-to-hidden gain: pass `weight`, the [V, D] output head.")
    return gain


# <<< zloss.objectives
@dataclass(frozen=True)
class Injection:
    """Values and source coefficients of every token. Scaling: per token, before any reduction."""

    cross_entropy: Tensor
    auxiliary: Tensor
    along_p: Tensor
    along_target: float
    along_uniform: Tensor | float
    auxiliary_along_p: Tensor
    auxiliary_along_uniform: Tensor | None

    @property
    def has_uniform(self) -> bool:
        return isinstance(self.along_uniform, Tensor) or self.along_uniform != 0


def inject(stats: TokenStats, objective: Objective, label_smoothing: float = 0.0) -> Injection:
    """Label-smoothed cross-entropy (along_target = 1 − ε, along_uniform = ε) plus the auxiliary of the objective."""
    epsilon = label_smoothing
    ce = -stats.target_log_prob
    if epsilon:
        if stats.mu is None:
            raise CoordinateError("`label_smoothing` needs the mean logit μ, which does not exist for these logits.")
        # log Z − (1 − ε)z_y − εμ, written in differences from m so that a common shift cancels first.
        ce = stats.log_s - (1 - epsilon) * (stats.target_logit - stats.row_max) - epsilon * (stats.mu - stats.row_max)
    if objective.active:
        source = objective.source(stats)
    else:
        zero = torch.zeros_like(ce)
        source = Source(value=zero, along_p=zero)
    uniform = epsilon if source.along_uniform is None else source.along_uniform + epsilon
    return Injection(
        cross_entropy=ce,
        auxiliary=source.value,
        along_p=1 + source.along_p,
        along_target=1 - epsilon,
        along_uniform=uniform,
        auxiliary_along_p=source.along_p,
        auxiliary_along_uniform=source.along_uniform,
    )


@dataclass(frozen=True)
class WeightedSource:
    """δ of a chunk in terms of E = exp(z − m) = S·p: along_exp·E − along_target·onehot(y) − along_uniform/V.

    Scaling: multiplied by the weight of every token (reduction and upstream gradient); 0 at ignored tokens.
    """

    along_exp_C: Tensor
    along_target_C: Tensor | None
    """None for the auxiliary alone, which has no target."""
    along_uniform_C: Tensor | None
    """None where nothing is injected along 1/V."""


def weighted_source(injection: Injection, sum_C: Tensor, valid_C: Tensor, weight_C: Tensor) -> WeightedSource:
    """The source of cross-entropy plus auxiliary; `sum_C` is S = Σ exp(z − m)."""
    return WeightedSource(
        along_exp_C=_counted(valid_C, weight_C * injection.along_p / sum_C),
        along_target_C=_counted(valid_C, weight_C * injection.along_target),
        along_uniform_C=_counted(valid_C, weight_C * injection.along_uniform) if injection.has_uniform else None,
    )


def weighted_auxiliary_source(injection: Injection, sum_C: Tensor, valid_C: Tensor, weight_C: Tensor) -> WeightedSource:
    """The source of the auxiliary alone."""
    uniform = injection.auxiliary_along_uniform
    return WeightedSource(
        along_exp_C=_counted(valid_C, weight_C * injection.auxiliary_along_p / sum_C),
        along_target_C=None,
        along_uniform_C=None if uniform is None else _counted(valid_C, weight_C * uniform),
    )


def _counted(valid_C: Tensor, value_C: Tensor) -> Tensor:
    """`where` and not a product: what an ignored token computed may be infinite."""
    return torch.where(valid_C, value_C, value_C.new_zeros(()))


# <<< zloss.objectives
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

    def source(self, stats: TokenStats) -> Source:
        zero = torch.zeros_like(stats.log_s)
        return Source(value=zero, along_p=zero)


# <<< zloss.objectives
@dataclass(frozen=True)
class CenteredHead(CrossEntropy):
    """Cross-entropy on row-centered logits z − μ1.

    A common shift changes neither CE nor its gradient, so training equals `CrossEntropy` bit for bit; only the deployed
    coordinate, in which Z-loss metrics are read, differs.

    >>> CenteredHead().active, CenteredHead().coordinate
    (False, 'centered')
    """

    name: ClassVar[str] = "centered-head"
    coordinate: ClassVar[Coordinate] = "centered"


# <<< zloss.objectives
@dataclass(frozen=True)
class StandardZLoss(Objective):
    """λ(log Z − c)²; source 2λ(log Z − c)·p.

    `target=None` is c = log V, as in the paper; most codebases use 0.

    >>> StandardZLoss(1e-4).active, StandardZLoss(0.0).active, StandardZLoss(None).active
    (True, False, False)
    """

    coef: float | None
    target: float | None = None
    name: ClassVar[str] = "standard"

    def __post_init__(self) -> None:
        check_coefficient("coef", self.coef)
        check_target("target", self.target)

    @property
    def active(self) -> bool:
        return is_on(self.coef)

    def penalty(self, logits_TV: Tensor, gain_T: Tensor | None) -> Tensor:
        c = resolve_target(self.target, logits_TV.shape[-1])
        return off_is_zero(self.coef) * (torch.logsumexp(logits_TV, dim=-1) - c) ** 2

    def source(self, stats: TokenStats) -> Source:
        violation = stats.log_z - resolve_target(self.target, stats.vocab)
        coef = off_is_zero(self.coef)
        return Source(value=coef * violation**2, along_p=2 * coef * violation)


# <<< zloss.objectives
@dataclass(frozen=True)
class CenteredZLoss(Objective):
    """λ(log Z̃ − c)² with log Z̃ = log Z − μ; source s·(p − 1/V) with s = 2λ(log Z̃ − c).

    The source sums to zero over the vocabulary, and a common shift of the logits does not change it.

    >>> logits = torch.tensor([[1.0, 2.0, 4.0]])
    >>> bool(torch.allclose(CenteredZLoss(0.1).penalty(logits + 50, None), CenteredZLoss(0.1).penalty(logits, None)))
    True
    """

    coef: float | None
    target: float | None = None
    name: ClassVar[str] = "centered"
    coordinate: ClassVar[Coordinate] = "centered"
    needs_mu: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_coefficient("coef", self.coef)
        check_target("target", self.target)

    @property
    def active(self) -> bool:
        return is_on(self.coef)

    def penalty(self, logits_TV: Tensor, gain_T: Tensor | None) -> Tensor:
        c = resolve_target(self.target, logits_TV.shape[-1])
        centered_TV = logits_TV - logits_TV.mean(dim=-1, keepdim=True)
        return off_is_zero(self.coef) * (torch.logsumexp(centered_TV, dim=-1) - c) ** 2

    def source(self, stats: TokenStats) -> Source:
        violation = require_centered_log_z(stats, "Centered Z-loss") - resolve_target(self.target, stats.vocab)
        coef = off_is_zero(self.coef)
        s = 2 * coef * violation
        return Source(value=coef * violation**2, along_p=s, along_uniform=s)


# <<< zloss.objectives
@dataclass(frozen=True)
class FactorizedZLoss(Objective):
    """λ_μ(μ − c_μ)² + λ_rel(log Z̃ − c_rel)²: the expansion of Z-loss without its cross term.

    Source: s·p − (s − 2λ_μ(μ − c_μ))/V with s = 2λ_rel(log Z̃ − c_rel). The paper uses λ_μ = λ_rel, c_μ = 0.

    >>> FactorizedZLoss(1e-4, 1e-4).active, FactorizedZLoss(None, 0.0).active
    (True, False)
    """

    shift_coef: float | None
    relative_coef: float | None
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

    def source(self, stats: TokenStats) -> Source:
        relative = require_centered_log_z(stats, "Factorized Z-loss") - resolve_target(
            self.relative_target, stats.vocab
        )
        assert stats.mu is not None  # log Z̃ exists only with μ
        shift = stats.mu - self.shift_target
        shift_coef, relative_coef = off_is_zero(self.shift_coef), off_is_zero(self.relative_coef)
        s = 2 * relative_coef * relative
        return Source(
            value=shift_coef * shift**2 + relative_coef * relative**2,
            along_p=s,
            along_uniform=s - 2 * shift_coef * shift,
        )


# <<< zloss.objectives
@dataclass(frozen=True)
class GainAwareZLoss(Objective):
    """λ(log Z − c)² / (1 + β·sg(A_p²)); the stop-gradient is part of the objective.

    Source: 2λ(log Z − c)/(1 + βA_p²)·p. It attenuates the source where A_p is large; it does not lower A_p.

    >>> logits, gain = torch.zeros(1, 4), torch.tensor([10.0])
    >>> float(GainAwareZLoss(1.0, beta=0.01, target=0.0).penalty(logits, gain))  # (log 4)² / 2
    0.960906...
    """

    coef: float | None
    beta: float = 1e-2
    target: float | None = None
    name: ClassVar[str] = "gain-aware"
    needs_gain: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_coefficient("coef", self.coef)
        check_target("target", self.target)
        if not (is_number(self.beta) and math.isfinite(self.beta) and self.beta >= 0):
            raise CoefficientError(f"`beta` is expected to be a finite number ≥ 0, but got {self.beta!r}.")

    @property
    def active(self) -> bool:
        return is_on(self.coef)

    def penalty(self, logits_TV: Tensor, gain_T: Tensor | None) -> Tensor:
        c = resolve_target(self.target, logits_TV.shape[-1])
        damping = 1 + self.beta * require_gain(gain_T, "Gain-aware Z-loss").detach() ** 2
        return off_is_zero(self.coef) * (torch.logsumexp(logits_TV, dim=-1) - c) ** 2 / damping

    def source(self, stats: TokenStats) -> Source:
        violation = stats.log_z - resolve_target(self.target, stats.vocab)
        weight = off_is_zero(self.coef) / (1 + self.beta * require_gain(stats.gain, "Gain-aware Z-loss") ** 2)
        return Source(value=weight * violation**2, along_p=2 * weight * violation)


# <<< zloss.objectives
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
