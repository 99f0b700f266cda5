"""What a function returns in addition to its loss, recognized by the numbers on several probes, not by position."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch

from zloss.audit.loss.calls import Z_NAMES, Outcome
from zloss.audit.loss.identify import Draw, Identification
from zloss.audit.loss.probes import Probe

Role = Literal[
    "z", "z_without_coef", "z_multiple", "z_not_trained", "ce", "total", "tokens", "accuracy", "log_z", "logits", "tensor",
    "unknown",
]  # fmt: skip

WORDS: dict[Role, str] = {
    "z": "the Z that is trained",
    "z_without_coef": "Z without its λ",
    "z_multiple": "a multiple of the Z that is trained",
    "z_not_trained": "the mean of (log Z)², which is not trained",
    "ce": "the cross-entropy",
    "total": "the loss again",
    "tokens": "the number of tokens",
    "accuracy": "the accuracy",
    "log_z": "the mean log Z",
    "logits": "logits",
    "tensor": "a tensor",
    "unknown": "a number that is not recognized: not the Z that is trained, CE, a token count or an accuracy",
}
CLOSE, CLOSE_16_BITS = 2e-3, 2e-2


@dataclass(frozen=True)
class Returned:
    """One returned value and what it is.

    `ratio` is the reported Z divided by the trained Z if the two are proportional; for a Z that is not trained, the reported
    Z divided by the mean of (log Z − c)². None if the two are equal.
    `target` is the c of a Z that is not trained, in words; empty for 0.
    """

    name: str
    role: Role
    ratio: float | None = None
    target: str = ""
    masked: tuple[float, float] | None = None
    """(reported, expected) on a batch with ignored tokens, where the two differ there."""

    @property
    def words(self) -> str:
        if self.masked is not None:
            return f"{WORDS[self.role]}, but not where tokens are ignored"
        if self.role != "z_not_trained" or self.ratio is None:
            return WORDS[self.role]
        square = f"(log Z − {self.target})²" if self.target else "(log Z)²"
        return f"{self.ratio:.4g} times the mean of {square}, which is not trained"


def reported_z(returned: tuple[Returned, ...]) -> Returned | None:
    """The value that is the Z: by its numbers, else by its name."""
    by_numbers = [one for role in ("z", "z_without_coef", "z_multiple") for one in returned if one.role == role]
    # A Z without a λ may be a statistic that is only logged; one with a λ claims to be trained.
    named = [one for one in returned if one.name.rpartition(".")[2].lower() in Z_NAMES]
    claims = [one for one in named if one.role == "unknown" or (one.role == "z_not_trained" and one.ratio is not None)]
    return next(iter(by_numbers + claims), None)


Meaning = Callable[[Probe, Outcome], float]


def recognize(
    name: str,
    ident: Identification,
    draw: Draw,
    expected_target: float | None,
    masked: tuple[Probe, Outcome] | None,
) -> Returned:
    """What the value `name` is; `expected_target` is the c that the user expects, None if that is unknown or log V.

    `masked` is a batch with ignored tokens: what is reported over all tokens and trained over valid ones differs only there.
    """
    item = draw.outcomes["mixed"].reported[name]
    if item.value is None:
        wide = math.prod(item.shape) >= ident.space.tokens * ident.space.lanes // 2
        return Returned(name, "logits" if wide else "tensor")
    close = CLOSE_16_BITS if item.dtype in (torch.bfloat16, torch.float16) else CLOSE

    def value_in(outcome: Outcome) -> float:
        value = outcome.reported[name].value
        return math.nan if value is None else value

    def agrees(meaning: Meaning, probe: Probe, outcome: Outcome) -> bool:
        """Within `close`; where CE is rounded with it, within that rounding."""
        value, wanted, slack = value_in(outcome), meaning(probe, outcome), 1e-9 + abs(outcome.value) * ident.eps * 4
        return math.isfinite(value) and abs(value - wanted) <= close * max(abs(value), abs(wanted)) + slack

    if masked is not None and ((other := masked[1].reported.get(name)) is None or other.value is None):
        masked = None  # not reported there
    calls = [(draw.probes[batch], out) for batch, out in draw.outcomes.items() if name in out.reported]
    for role, meaning in _meanings(ident).items():
        if all(agrees(meaning, *call) for call in calls):
            one = Returned(name, role, 1.0 if role == "z" else None)
            if masked is None or role not in ("z", "z_without_coef", "ce") or agrees(meaning, *masked):
                return one
            return replace(one, masked=(value_in(masked[1]), meaning(*masked)))

    def ratio(of: Callable[[Probe], float]) -> float | None:
        """The one factor between the value and `of` on every probe; None if there is none."""
        ratios = [value_in(outcome) / wanted for probe, outcome in calls if (wanted := of(probe))]
        if len(ratios) < 2 or not ratios[0] or not all(math.isfinite(x) for x in ratios):
            return None
        return ratios[0] if all(math.isclose(x, ratios[0], rel_tol=close) for x in ratios) else None

    if ident.trusted and ident.identified.has_z:
        factor = ratio(ident.model.z_value)
        if factor is not None:
            return Returned(name, "z_multiple", factor)
    if ident.identified.has_z is False:
        # λ times the mean of (log Z − c)²; c is 0, log V or the expected one.
        targets = {"": 0.0, "log V": math.log(ident.space.lanes)}
        targets |= {f"{expected_target:.5g}": expected_target} if expected_target else {}
        for words, c in targets.items():
            factor = ratio(lambda probe, c=c: float((probe.log_z_T - c).square().mean()))  # type: ignore[misc]
            if factor is not None:
                return Returned(name, "z_not_trained", factor, words)
    return Returned(name, "unknown")


def _meanings(ident: Identification) -> dict[Role, Meaning]:
    """Role → its value on a batch; the Z ones first, where the model is known."""
    meanings: dict[Role, Meaning] = {}
    model, coef, has_z = ident.model, ident.identified.coef, ident.identified.has_z
    if ident.trusted and has_z and not any(penalty.quantity.fixed for penalty in model.penalties):
        meanings["z"] = lambda probe, _: model.z_value(probe)
        if coef and abs(coef - 1) > CLOSE and len(model.penalties) == 1:
            meanings["z_without_coef"] = lambda probe, _: model.z_value(probe) / coef
    if ident.trusted:
        meanings["ce"] = lambda probe, _: model.value(probe) - model.z_value(probe)
    meanings["total"] = lambda _, outcome: outcome.value
    meanings["tokens"] = lambda probe, _: float(len(probe.target_T))
    meanings["accuracy"] = lambda probe, _: float((probe.inside_TV.argmax(-1) == probe.target_T).double().mean())
    meanings["log_z"] = lambda probe, _: float(probe.log_z_T.mean())
    if not has_z:
        meanings["z_not_trained"] = lambda probe, _: float(probe.log_z_T.square().mean())
    return meanings
