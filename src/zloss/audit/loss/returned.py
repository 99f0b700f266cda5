"""What a loss returns beside itself, recognised by its numbers on several probes and not by its place."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch

from zloss.audit.loss.identification import Identification
from zloss.audit.loss.outcome import Outcome, Reported
from zloss.audit.loss.output import Z_NAMES
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
    "unknown": "a number that is not recognised: not the Z that is trained, CE, a token count or an accuracy",
}
Z_ROLES = ("z", "z_without_coef", "z_multiple")
CLOSE, CLOSE_16_BITS = 2e-3, 2e-2


@dataclass(frozen=True)
class Returned:
    """One returned value and what it is.

    `ratio` is reported over trained Z where the two are in proportion; for a Z that is not trained, reported over the
    mean of (log Z − c)², None where the two are equal. `target` is the c of a Z that is not trained, in words; empty for 0.
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

    @property
    def named_z(self) -> bool:
        return self.name.rpartition(".")[2].lower() in Z_NAMES


def recognise(
    ident: Identification, expected_target: float | None = None, masked: tuple[Probe, Outcome] | None = None
) -> tuple[Returned, ...]:
    """Every value beside the loss; `expected_target` is the c that its user believes in, None if that is unknown or log V.

    `masked` is a batch with ignored tokens: what is reported over all tokens and trained over valid ones differs only there.
    """
    first = ident.outcomes["mixed"].reported
    return tuple(_where_masked(ident, _recognise(ident, item, expected_target), masked) for item in first)


def _where_masked(ident: Identification, one: Returned, masked: tuple[Probe, Outcome] | None) -> Returned:
    predicted = _meanings(ident).get(one.role)
    if masked is None or predicted is None or one.role not in ("z", "z_without_coef", "ce"):
        return one
    probe, outcome = masked
    item, wanted = outcome.item(one.name), predicted(probe, "")
    if item is None or item.value is None or wanted is None:
        return one
    close = CLOSE_16_BITS if item.dtype in (torch.bfloat16, torch.float16) else CLOSE
    slack = 1e-9 + abs(outcome.value) * ident.eps * 4
    if abs(item.value - wanted) <= close * max(abs(item.value), abs(wanted)) + slack:
        return one
    return replace(one, masked=(item.value, wanted))


def reported_z(returned: tuple[Returned, ...]) -> Returned | None:
    """The value that is the Z: recognised as one, else called one."""
    for role in Z_ROLES:
        for one in returned:
            if one.role == role:
                return one
    # A Z without a λ may be a statistic that is only logged; one with a λ claims to be trained.
    claims = (one.role == "unknown" or (one.role == "z_not_trained" and one.ratio is not None) for one in returned)
    return next((one for one, claim in zip(returned, claims, strict=True) if one.named_z and claim), None)


def _recognise(ident: Identification, item: Reported, expected_target: float | None) -> Returned:
    if item.value is None:
        wide = math.prod(item.shape) >= ident.space.tokens * ident.space.lanes // 2
        return Returned(item.name, "logits" if wide else "tensor")
    names = [
        name
        for name, outcome in ident.outcomes.items()
        if outcome.item(item.name) is not None and not (ident.selection.how == "moderate_only" and name == "wide")
    ]
    said = [_value(ident, name, item.name) for name in names]
    close = CLOSE_16_BITS if item.dtype in (torch.bfloat16, torch.float16) else CLOSE
    for role, predicted in _meanings(ident).items():
        wanted = [predicted(ident.probes[name], name) for name in names]
        if all(w is not None for w in wanted) and _agree(said, [w or 0.0 for w in wanted], close, ident, names):
            return Returned(item.name, role, 1.0 if role == "z" else None)
    if ident.trusted and ident.identified.has_z:
        ratios = [
            s / t
            for s, name in zip(said, names, strict=True)
            if (t := ident.model.z_value(ident.probes[name].reference))
        ]
        if (
            len(ratios) > 1
            and math.isfinite(ratios[0])
            and all(math.isclose(x, ratios[0], rel_tol=close) for x in ratios)
            and ratios[0]
        ):
            return Returned(item.name, "z_multiple", ratios[0])
    if ident.identified.has_z is False:
        untrained = _untrained(ident, names, said, close, expected_target)
        if untrained is not None:
            ratio, target = untrained
            return Returned(item.name, "z_not_trained", ratio, target)
    return Returned(item.name, "unknown")


def _untrained(
    ident: Identification, names: list[str], said: list[float], close: float, expected_target: float | None
) -> tuple[float, str] | None:
    """(λ, c in words) where the values are λ times the mean of (log Z − c)² on every probe; c is 0, log V or the expected one."""
    log_v = math.log(ident.space.lanes)
    targets = {"": 0.0, "log V": log_v} | ({f"{expected_target:.5g}": expected_target} if expected_target else {})
    found: list[tuple[float, float, str]] = []
    for words, c in targets.items():
        means = [float((ident.probes[name].reference.log_z_T - c).square().mean()) for name in names]
        ratios = [s / mean for s, mean in zip(said, means, strict=True) if mean]
        if len(ratios) < 2 or not ratios[0] or not all(math.isfinite(x) for x in ratios):
            continue
        spread = max(abs(x / ratios[0] - 1) for x in ratios)
        if spread <= close:
            found.append((spread, ratios[0], words))
    if not found:
        return None
    _, ratio, words = min(found)
    return ratio, words


def _value(ident: Identification, name: str, item: str) -> float:
    found = ident.outcomes[name].item(item)
    return math.nan if found is None or found.value is None else found.value


def _agree(said: list[float], wanted: list[float], close: float, ident: Identification, names: list[str]) -> bool:
    """Within `close` on every probe; where CE is rounded with it, within that rounding."""
    slack = [1e-9 + abs(ident.outcomes[name].value) * ident.eps * 4 for name in names]
    return all(
        math.isfinite(s) and abs(s - w) <= close * max(abs(s), abs(w)) + e
        for s, w, e in zip(said, wanted, slack, strict=True)
    )


def _meanings(ident: Identification) -> dict[Role, Callable[[Probe, str], float | None]]:
    """Role → its value on a probe; the Z ones first, where the model is known."""
    meanings: dict[Role, Callable[[Probe, str], float | None]] = {}
    trusted, model, got = ident.trusted, ident.model, ident.identified
    square = all(not p.candidate.fixed for p in model.penalties)
    if trusted and got.has_z and square:
        coef = got.coef
        meanings["z"] = lambda probe, _: model.z_value(probe.reference)
        if coef and abs(coef - 1) > CLOSE and len(model.penalties) == 1:
            meanings["z_without_coef"] = lambda probe, _: model.z_value(probe.reference) / coef
    if trusted:
        meanings["ce"] = lambda probe, _: (
            model.value(probe.reference) - (model.z_value(probe.reference) if model.penalties else 0.0)
        )
    meanings["total"] = lambda probe, name: ident.outcomes[name].value
    meanings["tokens"] = lambda probe, _: float(len(probe.target_T))
    meanings["accuracy"] = lambda probe, _: _accuracy(probe)
    meanings["log_z"] = lambda probe, _: float(probe.reference.log_z_T.mean())
    if not got.has_z:
        meanings["z_not_trained"] = lambda probe, _: float(probe.reference.log_z_T.square().mean())
    return meanings


def _accuracy(probe: Probe) -> float:
    return float((probe.reference.inside_TV.argmax(-1) == probe.target_T).double().mean())
