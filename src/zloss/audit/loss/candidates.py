"""The penalties a loss may apply: for λ(v − c)² the logit source is 2λ(v − c)·∂v/∂z, so each is a pair (v, ∂v/∂z).

Another function f of v is the same with f'(v) in place of 2(v − c): then c is part of it, and `fixed` is set.

The list holds the right ones, the wrong ones seen in the field, and a few plausible slips; what none of them explains
is reported as a residual.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from zloss.audit.loss.reference import Reference


@dataclass(frozen=True)
class Candidate:
    """One penalised quantity v per token and the shape its source has at the logits."""

    name: str
    coordinate: str
    """ "raw", "centered", "max_shifted" or "other": the coordinate named in the result."""
    words: str
    value: Callable[[Reference], Tensor]
    shape: Callable[[Reference], Tensor]
    coupled: bool = False
    """Whether v mixes the tokens of a batch; then it must be evaluated batch by batch."""
    fixed: bool = False
    """Whether the source is `value` itself, without a c to be fitted."""
    factor: float = 2.0
    """The source is factor · λ · (value − c) · shape."""
    target: float | None = None
    """c of a fixed candidate, where its form has one."""
    extra: tuple[tuple[str, float], ...] = ()
    """Further numbers of its form: power, width, clip."""


def _raw_shape(r: Reference) -> Tensor:
    return r.p_TV


def _centered_shape(r: Reference) -> Tensor:
    return r.p_TV - r.uniform_TV


def _centered_value(r: Reference) -> Tensor:
    return torch.logsumexp(r.inside_TV - r.mu_T.unsqueeze(-1), dim=-1)


def _max_shifted_value(r: Reference) -> Tensor:
    return torch.logsumexp(r.inside_TV - r.max_T.unsqueeze(-1), dim=-1)


def _probability_value(r: Reference) -> Tensor:
    return torch.logsumexp(r.p_TV[:, : r.lanes], dim=-1)


def _probability_shape(r: Reference) -> Tensor:
    """∂ logsumexp(p)/∂z = p ∘ (q − p·q) with q = softmax(p)."""
    p = r.p_TV[:, : r.lanes]
    q = torch.softmax(p, dim=-1)
    return r.widen(p * (q - (p * q).sum(-1, keepdim=True)))


def _batch_mean(r: Reference) -> Tensor:
    counted = r.log_z_T[r.valid_T]
    return torch.full_like(r.log_z_T, float(counted.mean()) if counted.numel() else 0.0)


def _variation(r: Reference) -> Tensor:
    return r.log_z_T - _batch_mean(r)


def not_squared(of: Candidate) -> Candidate:
    """λ·v in place of λ(v − c)²: its source is λ·∂v/∂z, whatever v is."""
    return Candidate(
        f"{of.name}_not_squared",
        "other",
        f"{of.words}, which is not squared: λ·mean({of.words.split(' (')[0]})",
        lambda r: torch.ones_like(r.log_z_T),
        of.shape,
        fixed=True,
        factor=1.0,
    )


RAW = Candidate("raw", "raw", "log Z", lambda r: r.log_z_T, _raw_shape)
CENTERED = Candidate("centered", "centered", "log Z − μ (row-centered)", _centered_value, _centered_shape)
MEAN_LOGIT = Candidate("mean_logit", "other", "the mean logit μ", lambda r: r.mu_T, lambda r: r.uniform_TV)

NOT_SQUARED = (not_squared(RAW),)
"""λ·mean(log Z − μ) is not among them: its source is that of label smoothing, and no gradient tells the two apart."""

CANDIDATES: tuple[Candidate, ...] = (
    *NOT_SQUARED,
    RAW,
    CENTERED,
    Candidate(
        "max_shifted_detached",
        "max_shifted",
        "log Z − max z with the maximum detached",
        _max_shifted_value,
        _raw_shape,
    ),
    Candidate(
        "max_shifted",
        "max_shifted",
        "log Z − max z",
        _max_shifted_value,
        lambda r: r.p_TV - r.argmax_TV(split=False),
    ),
    Candidate(
        "max_shifted_split",
        "max_shifted",
        "log Z − max z",
        _max_shifted_value,
        lambda r: r.p_TV - r.argmax_TV(split=True),
    ),
    Candidate(
        "probabilities",
        "other",
        "logsumexp of the probabilities, not of the logits",
        _probability_value,
        _probability_shape,
    ),
    Candidate(
        "probabilities_detached",
        "other",
        "logsumexp of the probabilities, with p as its source",
        _probability_value,
        _raw_shape,
    ),
    Candidate(
        "centered_detached",
        "other",
        "log Z − μ with μ detached (its source is p, not p − 1/V)",
        _centered_value,
        _raw_shape,
    ),
    Candidate("row_max", "other", "the row maximum", lambda r: r.max_T, lambda r: r.argmax_TV(split=False)),
    Candidate("row_max_split", "other", "the row maximum", lambda r: r.max_T, lambda r: r.argmax_TV(split=True)),
    MEAN_LOGIT,
    Candidate(
        "batch_mean",
        "other",
        "the batch mean of log Z (squared after averaging, not before)",
        _batch_mean,
        _raw_shape,
        coupled=True,
    ),
    Candidate(
        "variance",
        "other",
        "the variance of log Z over the batch: log Z less its batch mean",
        _variation,
        _raw_shape,
        coupled=True,
        fixed=True,
    ),
)

MAX_SHIFTED = frozenset(c.name for c in CANDIDATES if c.coordinate == "max_shifted")
PROBABILITIES = frozenset({"probabilities", "probabilities_detached"})
