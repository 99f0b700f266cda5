"""Choose the penalty that explains the measured gradients, from simple to composite to partial."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from zloss.audit.loss.candidates import CANDIDATES, CENTERED, MEAN_LOGIT, RAW, Candidate
from zloss.audit.loss.fit import ROUNDING, Fit, fit
from zloss.audit.loss.measured import Measured
from zloss.audit.loss.reference import Reference

How = Literal["none", "explained", "filtered", "moderate_only", "rounded", "unexplained"]

COARSE = 2.0**-20
"""Unit roundoff above which the arithmetic is 16-bit."""
AS_GOOD_AS_CAN_BE = 1.0
"""Residual in units of rounding below which no other candidate can be better."""
ROUGHLY = 0.3
"""The share of the non-CE gradient that low precision may leave unexplained."""
CLEARLY = 4.0
"""A later candidate replaces an earlier one only if its residual is smaller by this factor."""


@dataclass(frozen=True)
class Selection:
    """The chosen fit and in what sense it holds.

    `none`: CE alone explains everything. `explained`: the penalty explains every probe. `filtered`: it does, except for
    entries that were set to exactly 0. `moderate_only`: it does for ordinary log Z but not for large ones.
    `rounded`: it does up to noise that low precision would leave. `unexplained`: nothing known does; the fit is the
    nearest.
    """

    how: How
    fit: Fit

    @property
    def has_z(self) -> bool:
        """Whether a penalty is part of the fit that explains the gradients."""
        return self.how not in ("none", "unexplained")


def select(data: Measured, *, gain_squared_T: Tensor | None = None) -> Selection:
    """The first of: CE, CE + one penalty, the same with label smoothing, sums of penalties, gain-aware, partial."""
    chosen = _select(data, gain_squared_T)
    if (
        chosen.how not in ("explained", "moderate_only")
        or len(chosen.fit.candidates) != 1
        or chosen.fit.damping is not None
    ):
        return chosen
    rows = data if chosen.how == "explained" else _without(data, "wide")
    sharp = fit(rows, chosen.fit.candidates, smoothing=chosen.fit.smoothing != 0.0, refine=True)
    return Selection(chosen.how, sharp) if sharp.good else chosen


def misfit(data: Measured) -> float:
    """‖residual‖/‖gradient‖ of the better right penalty: what the search for a scale or softcap minimises."""
    whole, r = max(float(data.grad_TV.norm()), 1e-300), data.reference
    left = []
    for c in (RAW, CENTERED):
        shape, ce = data.transport(c.shape(r)), data.transport(r.p_TV - r.onehot_TV)
        columns = torch.stack([ce.flatten(), (c.value(r).unsqueeze(-1) * shape).flatten(), shape.flatten()], dim=-1)
        goal = data.grad_TV.flatten()
        left.append(float((goal - columns @ torch.linalg.lstsq(columns, goal).solution).norm()))
    return min(left) / whole


def nearest(data: Measured) -> Fit:
    """The single penalty that leaves the least, whether or not that is little enough."""
    return min((fit(data, (c,)) for c in (RAW, CENTERED)), key=lambda f: f.worst)


def _select(data: Measured, gain_squared_T: Tensor | None) -> Selection:
    plain = [fit(data), fit(data, smoothing=True)]
    for bare in plain:
        if _only_rounding(bare, data):
            return Selection("none", bare)
    singles: list[Fit] = []
    for candidate in CANDIDATES:
        singles.append(fit(data, (candidate,)))
        if singles[-1].good and singles[-1].chi < AS_GOOD_AS_CAN_BE:
            break
    if (chosen := _best(singles)) is not None:
        return Selection("explained", chosen)
    # For the centered shape, smoothing and c are one direction: the weight on onehot(y) tells them apart later.
    smoothed = [fit(data, (c,), smoothing=True) for c in CANDIDATES if c is not CENTERED and not c.fixed]
    composites = [fit(data, pair) for pair in ((CENTERED, MEAN_LOGIT), (RAW, CENTERED))]
    if gain_squared_T is not None:
        composites.append(fit(data, (RAW,), gain_squared_T=gain_squared_T))
    for group in (smoothed, composites):
        if (chosen := _best(group)) is not None:
            return Selection("explained", chosen)
    kept = [fit(data, (c,), nonzero_only=True) for c in CANDIDATES]
    if (chosen := _best(kept)) is not None and _dropped_share(chosen, data) > 0:
        return Selection("filtered", chosen)
    if "wide" in data.groups:
        moderate = _without(data, "wide")
        inner = _select(moderate, None if gain_squared_T is None else gain_squared_T[~data.groups["wide"]])
        if inner.how in ("explained", "none"):
            return Selection("moderate_only" if inner.how == "explained" else "unexplained", inner.fit)
    return Selection("unexplained", min([*singles, *smoothed, *composites], key=lambda f: (f.worst, f.chi)))


def _best(fits: list[Fit]) -> Fit | None:
    """The good fit with the smallest residual; the earlier one unless a later one is clearly better."""
    chosen: Fit | None = None
    for one in fits:
        if one.good and (chosen is None or one.chi * CLEARLY < chosen.chi):
            chosen = one
    return chosen


def _only_rounding(bare: Fit, data: Measured) -> bool:
    """Whether CE leaves nothing but rounding in every group."""
    weight = max(abs(bare.ce_weight), 1e-30)
    limit_T = ROUNDING * data.eps * data.noise_T * weight * data.omega_T.abs()
    if not all(float(bare.residual_TV[rows].norm()) <= float(limit_T[rows].norm()) for rows in data.groups.values()):
        return False
    if data.eps < COARSE:
        return True
    # In 16 bits the limit above hides a λ of 6e-5. Where p is onehot(y) cross-entropy is silent in any format.
    silent = (data.noise_T == 1) & (data.reference.cross_entropy_T == 0)
    return not bool(silent.any()) or float(data.grad_TV[silent].abs().max()) <= 2 * data.eps * weight


def dropped(chosen: Fit, data: Measured) -> Tensor:
    """bool [T, V]: entries that came back exactly 0 although the fitted gradient there is well above rounding."""
    r = data.reference
    expected = chosen.ce_weight * data.omega_T.unsqueeze(-1) * (r.p_TV - r.onehot_TV) + chosen.auxiliary_TV
    scale_T = data.noise_T * (abs(chosen.ce_weight) + chosen.auxiliary_TV.abs().amax(-1))
    return (data.grad_TV == 0) & (expected.abs() > (ROUNDING * data.eps * scale_T).unsqueeze(-1))


def _dropped_share(chosen: Fit, data: Measured) -> float:
    return float(dropped(chosen, data).double().mean())


def _without(data: Measured, group: str) -> Measured:
    rows = ~data.groups[group]
    weights = (None if x is None else x[rows] for x in (data.ce_weight_T, data.z_weight_T))
    return Measured(
        reference=_rows(data.reference, rows),
        given=_rows(data.given, rows),
        warp=data.warp,
        grad_TV=data.grad_TV[rows],
        noise_T=data.noise_T[rows],
        groups={name: member[rows] for name, member in data.groups.items() if name != group},
        batch_T=data.batch_T[rows],
        eps=data.eps,
        ce_weight_T=next(weights),
        z_weight_T=next(weights),
    )


def _rows(r: Reference, rows: Tensor) -> Reference:
    return Reference(r.logits_TV[rows], r.target_T[rows], r.lanes)


def is_factorized(candidates: tuple[Candidate, ...]) -> bool:
    return candidates == (CENTERED, MEAN_LOGIT)
