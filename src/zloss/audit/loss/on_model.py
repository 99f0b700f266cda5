"""How far the applied source is from fp64 on the logits of the model that is to be trained.

The synthetic probes identify what a loss applies; here the same model of the loss predicts, in fp64, its value and gradient
on a real model's logits of a text. A loss of (logits, target) is compared at the logits. A loss of (hidden, weight, target)
gets the model's hidden states and its head, and is compared at ∂/∂hidden = Wᵀδ and ∂/∂weight = δᵀu.
Axes: T tokens, D width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from zloss.audit.loss.callable import BlackBox
from zloss.audit.loss.identification import Identification
from zloss.audit.loss.model_errors import Compared, ErrorTally
from zloss.audit.loss.model_tokens import ModelTokens
from zloss.audit.loss.output import LossCallError
from zloss.audit.loss.precision import UNIT
from zloss.audit.loss.reference import Reference
from zloss.console import Progress
from zloss.errors import InputError
from zloss.results.loss_audit import TargetModelSource
from zloss.results.named_path import without_folders

ENTRIES = 2**23
"""Logits of one call at most: about ten fp64 copies of them live at once."""
SLICE = 8192
"""Rows of the head that are widened to fp64 at once."""


@dataclass(frozen=True)
class HeadReference(Reference):
    """The fp64 softmax of a real head's logits, with its gain."""

    weight_VD: Tensor = field(kw_only=True)

    @cached_property
    def gain_squared_T(self) -> Tensor:
        """A_p² = ‖Wᵀp‖²/‖p‖²."""
        return times_weight(self.p_TV, self.weight_VD).square().sum(-1) / self.p_TV.square().sum(-1)


def source_on_model(
    box: BlackBox, off: BlackBox | None, ident: Identification, tokens: ModelTokens, progress: Progress
) -> TargetModelSource:
    """Value, source and per-token errors on every block; each part of a block is one call of the loss."""
    at: Literal["logits", "hidden"] = "hidden" if box.linear else "logits"
    of: Literal["z", "total"] = "z" if ident.model.penalties else "total"
    head = tokens.head
    found = TargetModelSource(
        # A whole path would show the folders of someone's machine.
        model=without_folders(tokens.checkpoint.name),
        text=tokens.text,
        tokens=0,
        calls=0,
        dtype=str(tokens.dtype).removeprefix("torch."),
        vocab=head.vocab,
        at=at,
        of=of,
    )
    ident, assumed = unblurred(ident)
    found = replace(found, assumed=assumed)
    why = _not_comparable(box, ident, tokens, known=assumed is not None)
    if why is not None:
        return replace(found, reason=why)
    tally = ErrorTally()
    try:
        with progress.step("source on the model's logits", tokens.blocks.predictions) as step:
            for hidden_TD, target_T in tokens:
                for hidden, target in _parts(hidden_TD, target_T, head.vocab):
                    tally.add(_compare(box, off, ident, tokens, hidden, target))
                    step.advance(len(target))
    except LossCallError as error:
        return replace(found, reason=str(error))
    return tally.record(found)


def unblurred(ident: Identification) -> tuple[Identification, str | None]:
    """A loss of low precision with the usual λ and c inside the identified intervals, and a sentence that says so.

    Its own rounding blurs what was identified, c most of all. A c of 0 or log V inside the interval is taken, and the λ of
    fewest digits; without such a c nothing is assumed, because a wrong c would be read as an error of the source.
    """
    got, model = ident.identified, ident.model
    if ident.selection.how != "rounded" or len(model.penalties) != 1 or got.coef is None or got.target is None:
        return ident, None
    (penalty,) = model.penalties
    log_v = math.log(model.probe_vocab)
    width = got.uncertainty.target or 0.0
    near = [c for c in (0.0, log_v) if abs(penalty.target - c) <= width]
    if len(near) != 1 or got.ce_weights != "uniform":
        return ident, None
    coef = _shortest(penalty.coef, got.uncertainty.coef or 0.0)
    exact = replace(model, penalties=(replace(penalty, coef=coef, target=near[0]),), log_v_target=near[0] == log_v)
    name = "log V" if near[0] == log_v else "0"
    return replace(ident, model=exact), f"λ = {coef:g} and c = {name}, which the rounding of the loss leaves possible"


def _shortest(value: float, width: float) -> float:
    """The number of fewest digits within `width` of `value`."""
    return next(
        (short for digits in range(1, 8) if abs((short := float(f"{value:.{digits}g}")) - value) <= width), value
    )


def _not_comparable(box: BlackBox, ident: Identification, tokens: ModelTokens, *, known: bool) -> str | None:
    """Why there is no fp64 gradient to compare with."""
    head, lanes = tokens.head, ident.space.lanes
    if ident.space.padded and lanes > head.vocab:
        raise InputError(f"`valid_vocab` is {lanes}, but the head of {tokens.checkpoint.name} has {head.vocab} rows.")
    if not ident.trusted and not known:
        return "the gradient is not explained by a known penalty with equal token weights: no reference to compare with"
    got = ident.identified
    if got.ce_weights == "groups":
        return "the loss averages means of groups of tokens, whose sizes on another number of tokens are not known"
    if not known and got.target is not None and got.target_rule is None and got.vocab not in (None, head.vocab):
        return f"whether c follows the vocabulary could not be probed, so c at V = {head.vocab} is not known"
    if ident.special:
        return f"one class is weighted differently ({ident.special[0].words}), and the text may have it as a target"
    if not box.linear:
        return None
    if head.bias_V is not None:
        return "the head has a bias, which a loss of (hidden, weight, target) does not see"
    damped = any(penalty.damping is not None for penalty in ident.model.penalties)
    if damped and not ident.model.warp.identity:
        return "the gain under the loss's own change of the logits is not defined here"
    return None


def _parts(hidden_TD: Tensor, target_T: Tensor, vocab: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Equal parts of a block whose logits fit the memory."""
    count = -(-len(target_T) * vocab // ENTRIES)
    yield from zip(hidden_TD.chunk(count), target_T.chunk(count), strict=True)


def _compare(
    box: BlackBox, off: BlackBox | None, ident: Identification, tokens: ModelTokens, hidden_TD: Tensor, target_T: Tensor
) -> Compared:
    head, model, dtype = tokens.head, ident.model_at(tokens.head.weight_VD.shape[1]), tokens.dtype
    lanes = ident.space.lanes if ident.space.padded else head.vocab
    labels = torch.where(target_T == box.ignore_index, torch.full_like(target_T, -1), target_T)
    if bool((labels >= lanes).any()):
        raise InputError(f"the text has token ids beyond the {lanes} classes of `valid_vocab`.")
    if box.linear:
        # The scale of the logits belongs to the weight: a loss of (hidden, weight, target) sees z = Wu.
        weight_VD = (head.weight_VD.detach().cpu() * head.logit_scale).to(dtype)
        logits_TV = torch.cat([hidden_TD.double() @ rows.double().T for rows in torch.split(weight_VD, SLICE)], dim=-1)
        r: Reference = HeadReference(logits_TV, labels, lanes, weight_VD=weight_VD)
    else:
        with torch.no_grad():
            logits_TV = head.logits(hidden_TD.to(head.weight_VD.device)).cpu()
        r = Reference(logits_TV.double(), labels, lanes)
    ce_TV, z_TV = model.ce_source(r), model.z_source(r)
    total_TV = ce_TV + z_TV
    if not box.linear:
        outcome = box(r.logits_TV, labels, dtype=dtype)
        without = None if off is None else off(r.logits_TV, labels, dtype=dtype).grad_TV
        grad, here = (outcome.value, outcome.grad_TV), (model.value(r), total_TV, z_TV)
        return _errors(grad, without, here, bool(model.penalties), _rounding(r, dtype))
    value, grad_hidden, grad_weight = box.on_head(hidden_TD, weight_VD, labels, dtype=dtype)
    without = None if off is None else off.on_head(hidden_TD, weight_VD, labels, dtype=dtype)[1]
    total_TD, z_TD = times_weight(total_TV, weight_VD), times_weight(z_TV, weight_VD)
    wanted_here = (model.value(r), total_TD, z_TD)
    compared = _errors((value, grad_hidden), without, wanted_here, bool(model.penalties), _rounding(r, dtype))
    of_TV = z_TV if model.penalties else total_TV
    error = wanted = 0.0
    u_TD = hidden_TD.double()
    for start in range(0, head.vocab, SLICE):
        rows = slice(start, start + SLICE)
        error += float((grad_weight[rows] - total_TV[:, rows].T @ u_TD).square().sum())
        wanted += float((of_TV[:, rows].T @ u_TD).square().sum())
    return replace(compared, weight_error=error, weight_wanted=wanted)


def _rounding(r: Reference, dtype: torch.dtype) -> Tensor:
    """Relative rounding of p: exp(z − log Z) inherits the rounding of log Z; a 16-bit gradient is rounded as it is stored."""
    unit = max(UNIT.get(str(dtype).removeprefix("torch."), UNIT["float32"]), UNIT["float32"])
    return 2 * unit * (1.0 + r.max_T.abs() if unit == UNIT["float32"] else torch.ones_like(r.max_T))


def _errors(
    applied: tuple[float, Tensor],
    without: Tensor | None,
    wanted: tuple[float, Tensor, Tensor],
    has_z: bool,
    rounding_T: Tensor,
) -> Compared:
    """`applied` is (value, gradient), `wanted` (value, gradient, its Z part) in fp64."""
    (value, grad), (wanted_value, total, z) = applied, wanted
    total_error = grad - total
    error = total_error
    if has_z and without is not None and bool(torch.isfinite(without).all()):
        # An `off` that still applies a Z would give 0, so the nearer of the two differences is taken.
        error = min(total_error, grad - without - z, key=lambda one: float(one.norm()))
    return Compared(value, wanted_value, error, z if has_z else total, total_error, total, rounding_T)


def times_weight(source_TV: Tensor, weight_VD: Tensor) -> Tensor:
    """source · W in fp64, [T, D], without a copy of the whole head."""
    out = source_TV.new_zeros(len(source_TV), weight_VD.shape[1])
    for start in range(0, len(weight_VD), SLICE):
        out += source_TV[:, start : start + SLICE] @ weight_VD[start : start + SLICE].double()
    return out
