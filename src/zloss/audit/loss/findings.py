"""The questions put to a loss. Each is one function: its id, severity and remedy, its measurement, sentence and witness.

A function measures on the draw that `evidence.draw` holds. `answer_all` puts every question to the first draw, and every error
and warning again to the second, independent one: what that does not show is not reported as a finding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from zloss.audit.loss.calls import BlackBox, LossCallError, Outcome, probe_width
from zloss.audit.loss.identify import (
    APART,
    POWERS,
    Draw,
    Identification,
    Weights,
    computes_in,
    difference,
    identify,
    take_draw,
    weigh,
    weigh_batches,
)
from zloss.audit.loss.model_tokens import audited_probe, beyond_rounding, measure_source
from zloss.audit.loss.probes import Probe, Reference, draw, seeded
from zloss.audit.loss.returned import Returned, recognise, reported_z
from zloss.audit.loss.sizes import SizeTried, try_sizes
from zloss.audit.loss.source import NAMED, NOT_SQUARED, PROBABILITIES, UNIT, best_fit, decompose, nothing_but_ce
from zloss.decide.stages import REMEDIES
from zloss.results.loss_audit import Finding, Identified, Severity, SourceError, Verdict, Witness

NO_Z = "The loss has no Z."
UNSTABLE = "The same inputs give different answers, so calls cannot be compared: see not_repeatable."
CANNOT_TELL = "What the loss applies could not be identified: see unexplained_source."


@dataclass(frozen=True)
class Evidence:
    """Inputs of every question. `off` and `per_token` are None where the caller gave none."""

    box: BlackBox
    off: BlackBox | None
    per_token: BlackBox | None
    expect: dict[str, Any]
    ident: Identification
    source: SourceError
    floor: float
    """The `delta_src` that fp32 rounding of the total gradient alone can cause on the audited logits."""
    draw: Draw
    """The draw that is looked at."""
    weights: tuple[Weights, ...]
    """The weights on CE and Z in batches of several sizes and masks, of this draw."""
    reach: tuple[SizeTried, ...] = ()
    """What other sizes gave."""
    given: bool = False
    """Whether the audited logits are the caller's, so that there is one draw of them."""
    stable: bool = True
    """False where the same inputs gave another answer: then calls cannot be compared with each other."""

    @property
    def mixed(self) -> tuple[Probe, Outcome]:
        return self.draw.probes["mixed"], self.draw.outcomes["mixed"]

    @property
    def loudest(self) -> tuple[Probe, Outcome]:
        """The batch on which Z is louder than cross-entropy, where the loss is finite there."""
        name = "wide" if "wide" in self.draw.outcomes else "mixed"
        return self.draw.probes[name], self.draw.outcomes[name]

    def attempt(self, probe: Probe, dtype: torch.dtype | None = None, **options: Any) -> Outcome | str:
        """The outcome, by default in the dtype of the identification, or the sentence in which the loss failed."""
        try:
            return self.box(probe, dtype or self.ident.dtype, **options)
        except LossCallError as error:
            return str(error)

    @cached_property
    def returned(self) -> tuple[Returned, ...]:
        """What the loss returns next to the loss."""
        if not self.draw.outcomes["mixed"].reported:
            return ()
        ident, masked = self.ident, None
        known = ident.trusted and ident.masks_accepted and ident.identified.ce_weights != "groups"
        if known and {ident.model.ce_denominator, ident.model.z_denominator or "none"} <= NAMED:
            probe = draw("half ignored", ident.space, self.draw.seed)
            outcome = self.attempt(probe)
            masked = None if isinstance(outcome, str) or not outcome.finite else (probe, outcome)
        return recognise(ident, self.draw, self.expect.get("target"), masked)

    @property
    def reported(self) -> Returned | None:
        """The Z among them."""
        return reported_z(self.returned)

    def witness(
        self,
        quantity: str,
        measured: float | None,
        expected: float | None = 0.0,
        *,
        on: Probe | None = None,
        noise: float | None = None,
        dtype: str | None = None,
        shape: tuple[int, ...] | None = None,
    ) -> Witness:
        """The two numbers and where they were measured; the noise is by default the rounding of the larger one."""
        probe, name = on or self.draw.probes["mixed"], dtype or str(self.ident.dtype).removeprefix("torch.")
        sizes = [abs(x) for x in (measured, expected) if x is not None and math.isfinite(x)]
        rounding = self.ident.eps * max(sizes, default=0.0) if noise is None else noise
        shape = shape or tuple(probe.logits_TV.shape)
        return Witness(shape, name, probe.seed, expected, measured, rounding, probe.name, quantity)


@dataclass(frozen=True)
class Answer:
    """What one question found on one draw."""

    verdict: Verdict
    sentence: str
    figure: float | None = None
    witness: Witness | None = None


@dataclass(frozen=True)
class Question:
    """A registered finding."""

    id: str
    severity: Severity
    remedy: str
    measure: Callable[[Evidence], Answer]
    repeat: bool
    """Whether a second draw has to show it too; False for open answers and facts of one call."""

    def put(self, evidence: Evidence) -> Finding:
        answer = self.measure(evidence)
        severity = self.severity if answer.verdict == "finding" else None
        witness = answer.witness if severity in ("error", "warning") else None
        return Finding(self.id, answer.verdict, answer.sentence, answer.figure, severity, witness)


FINDINGS: dict[str, Question] = {}


def finding(
    severity: Severity, *, repeat: bool = True
) -> Callable[[Callable[[Evidence], Answer]], Callable[[Evidence], Answer]]:
    """Register the decorated function under its name; the remedy is the one that the decision map reads too."""

    def register(measure: Callable[[Evidence], Answer]) -> Callable[[Evidence], Answer]:
        id = measure.__name__
        FINDINGS[id] = Question(id, severity, REMEDIES[id], measure, repeat)
        return measure

    return register


def passed(sentence: str, figure: float | None = None) -> Answer:
    return Answer("pass", sentence, figure)


def found(sentence: str, figure: float | None, witness: Witness | None) -> Answer:
    return Answer("finding", sentence, figure, witness)


def not_applicable(sentence: str, figure: float | None = None) -> Answer:
    return Answer("not_applicable", sentence, figure)


def answer_all(evidence: Evidence) -> tuple[Finding, ...]:
    """Every question, errors and warnings on two draws.

    One that the second draw does not show is unexplained: its question has no answer, and its figure is stated there.
    """
    findings = {id: question.put(evidence) for id, question in FINDINGS.items()}
    doubted = [id for id, one in findings.items() if one.severity in ("error", "warning") and FINDINGS[id].repeat]
    second = evidence.ident.second
    if not doubted or second is None or "mixed" not in second.outcomes:
        return tuple(findings.values())
    again = _second_evidence(evidence, second, doubted)
    lost = {id: one for id in doubted if (one := FINDINGS[id].put(again)).verdict != "finding"}
    if "size_dependent" in doubted and "size_dependent" not in lost:
        # Only the sizes that differ on both draws are named.
        twice = {one.words for one in again.reach if one.verdict == "differs"}
        reach = tuple(one for one in evidence.reach if one.verdict != "differs" or one.words in twice)
        findings["size_dependent"] = FINDINGS["size_dependent"].put(replace(evidence, reach=reach))
    for id in lost:
        # The same question on the same draw: another answer now is state, and not the draw.
        if id not in ("size_dependent", "denominator_mismatch") and FINDINGS[id].put(evidence).verdict != "finding":
            one = findings[id]
            why = f"The same check gives a different result when it is repeated ({id}: “{one.sentence}”): the loss keeps state."
            state = replace(findings["not_repeatable"], verdict="finding", sentence=why, figure=one.figure)
            findings["not_repeatable"] = replace(state, severity="warning", witness=one.witness)
            return tuple(findings.values())
    if lost:
        told = [
            f"{id}: on the first “{findings[id].sentence}”, on the second “{one.sentence}”" for id, one in lost.items()
        ]
        open_one, first = findings["unexplained_source"], findings[next(iter(lost))]
        said = f"{open_one.sentence} " if open_one.verdict == "finding" else ""
        sentence = f"{said}Two draws of the probes disagree. {'; '.join(told)}"
        findings["unexplained_source"] = Finding(
            "unexplained_source", "finding", sentence, None, "warning", open_one.witness or first.witness
        )
        for id in lost:
            why = "Seen on one draw of the probes and not on a second: see unexplained_source."
            findings[id] = Finding(id, "not_applicable", why, findings[id].figure)
    return tuple(findings.values())


def _second_evidence(evidence: Evidence, second: Draw, doubted: list[str]) -> Evidence:
    """The same evidence from the second draw; what is costly is measured again only for the findings in doubt."""
    ident, box = evidence.ident, evidence.box
    weights, source, floor, reach = evidence.weights, evidence.source, evidence.floor, evidence.reach
    if "denominator_mismatch" in doubted and ident.known:
        weights = weigh_batches(box, ident, second.seed)[0]
    if "low_precision_source" in doubted and source.delta_src is not None and not evidence.given:
        probe, dtype = audited_probe(ident, None, None, box.ignore_index, second.seed)
        source, floor = measure_source(box, evidence.off, ident, probe, dtype)
    if "size_dependent" in doubted:
        reach = try_sizes(box, ident, second.seed, thorough=True, again=reach)
    return replace(evidence, draw=second, weights=weights, source=source, floor=floor, reach=reach)


def _no_z(evidence: Evidence, *, numbers: bool = False) -> str | None:
    """Why a question about the Z (with `numbers`, about its form) cannot be asked; None where it can."""
    has_z = evidence.ident.identified.has_z
    if has_z is None or (numbers and has_z and not evidence.ident.known):
        return CANNOT_TELL
    return None if has_z else NO_Z


# Value and gradient.


@finding("error")
def zero_gradient_z(e: Evidence) -> Answer:
    """Is there a Z in the value that never reaches the gradient (detached logits, Z of log-probabilities)?"""
    ident = e.ident
    if ident.identified.has_z is None:
        return not_applicable(CANNOT_TELL)
    if ident.identified.has_z:
        return passed("The Z source is there in the gradient.")
    if not ident.trusted:
        return not_applicable("Token weights keep the value of the cross-entropy from being predicted.")
    if (worst := _value_offset(e)) is not None:
        where, what = "", "trains nothing (detached, or a constant)"
        if _hidden_against_weight(e) > 1e-3:
            where, what = " at the weight", "does not train the weight"
        return found(
            f"The value differs from cross-entropy by up to {worst[0]:.4g}, but the gradient{where} is cross-entropy alone: "
            f"a Z is reported that {what}.",
            *worst,
        )
    if coef := e.expect.get("coef"):
        return found(
            f"A Z with λ = {float(coef):.3g} was expected, but neither value nor gradient holds one.",
            0.0,
            e.witness("λ", 0.0, float(coef)),
        )
    return not_applicable(
        "Neither value nor gradient holds a Z; pass `expect={'coef': λ}` if you believe there is one."
    )


FACTOR_LIMIT = 5e-2
"""A factor on Z or CE with 16-bit logits that rounding of the gradient to 16 bits does not explain."""
BF16_STORED = 5e-3
"""Error of dW on bf16 inputs that only bf16 logits explain. Stated, not held against it: it needs bf16 inputs to happen."""


@finding("error")
def low_precision_source(e: Evidence) -> Answer:
    """Is the source computed from rounded logits, or in 16-bit arithmetic?"""
    ident, source = e.ident, e.source
    delta = "Δ_src, ‖applied − fp64‖ / ‖fp64‖"
    continuous = draw("continuous", ident.space, e.draw.seed)
    if ident.identified.computes_in in ("bfloat16", "float16"):
        return found(
            f"Its gradients are {ident.identified.computes_in} numbers although the logits were not: the loss computes "
            "in 16 bits.",
            source.delta_src,
            e.witness("unit roundoff of the gradient", ident.eps, UNIT["float32"], on=continuous, noise=0.0),
        )
    if ident.how == "rounded":
        share = ident.identified.uncertainty.unexplained or 0.0
        return found(
            f"{share:.1%} of the non-CE gradient is noise that changes with every small shift of the logits: part "
            "of the source is computed in 16 bits.",
            share,
            e.witness("share of the non-CE gradient that no penalty explains", share, 0.0, on=continuous, noise=1e-3),
        )
    if ident.how == "filtered":
        return not_applicable("Entries are missing from the source: see filtered_source.", source.delta_src)
    if source.delta_src is None or source.delta_total is None:
        return not_applicable(f"Not measured: {source.reason}.")
    if beyond_rounding(source, e.floor):
        shape = (source.tokens, ident.identified.vocab or ident.space.width)
        return found(
            f"On {source.dtype} logits the source is off by Δ_src = {source.delta_src:.3g} from fp64 "
            f"(total gradient {source.delta_total:.3g}), far beyond fp32 rounding: logits or statistics are rounded.",
            source.delta_src,
            e.witness(delta, source.delta_src, on=continuous, noise=e.floor, dtype=source.dtype, shape=shape),
        )
    if (other := _in_16_bits(e)) is not None:
        return other
    note = f"; up to {e.floor:.2g} of it is the rounding of the total gradient" if e.floor > 1e-3 else ""
    if source.bf16_inputs is not None:
        stored = " (it stores bf16 logits)" if source.bf16_inputs > BF16_STORED else ""
        note += f"; with bf16 hidden and weight its dW is off by {source.bf16_inputs:.2g}{stored}"
    return passed(f"Δ_src = {source.delta_src:.3g} against fp64 on {source.dtype} logits{note}.", source.delta_src)


def _in_16_bits(e: Evidence) -> Answer | None:
    """A finding where 16-bit logits, as mixed precision passes them, get another objective.

    Read from saturated rows, which 16 bits hold exactly. On their target CE is silent and Z stands alone; elsewhere the entry at
    the target is CE alone.
    """
    ident, got, model = e.ident, e.ident.identified, e.ident.model
    known = not got.has_z or got.coordinate in ("raw", "centered")
    if (
        not known
        or not ident.plain
        or not model.warp.identity
        or got.label_smoothing
        or "confident" not in e.draw.outcomes
    ):
        return None
    silent, loud = e.draw.probes["confident"], e.draw.probes["mixed"]
    wide = str(ident.dtype).removeprefix("torch.")
    z_TV = model.z_source(silent.reference)[silent.saturated_T]
    ce_T = (model.ce_source(loud.reference) * loud.reference.onehot_TV).sum(-1)[loud.saturated_T]
    weight = abs(model.ce_scale) / model.count(model.ce_denominator, silent.reference)
    for dtype in (torch.bfloat16, torch.float16):
        name, answers = str(dtype).removeprefix("torch."), [e.attempt(probe, dtype) for probe in (silent, loud)]
        grads = [one.grad_TV for one in answers if not isinstance(one, str) and one.finite]
        if len(grads) < 2:
            continue
        seen_TV = grads[0][silent.saturated_T]
        # A kernel that forms 1 + 2λ(log Z − c) in 16 bits rounds every row by a unit of the weight on CE.
        noise = UNIT[name] * weight * math.sqrt(len(z_TV))
        if not got.has_z and float(seen_TV.norm()) > 8 * noise:
            extra = float(seen_TV.norm()) / (weight * math.sqrt(len(z_TV)))
            witness = e.witness("Z source relative to CE", extra, 0.0, on=silent, noise=UNIT[name], dtype=name)
            words = (
                f"With {name} logits there is a source in addition to cross-entropy, with {wide} logits there is none."
            )
            return found(words, extra, witness)
        limit = max(FACTOR_LIMIT, 8 * noise / max(float(z_TV.norm()), 1e-300))
        # Below its normal range fp16 holds few digits.
        readable = got.has_z and limit < 0.5 and (dtype == torch.bfloat16 or float(z_TV.abs().max()) > 2.0**-18)
        z = float((seen_TV * z_TV).sum() / (z_TV * z_TV).sum()) if readable else 1.0
        entries_T = (grads[1] * loud.reference.onehot_TV).sum(-1)[loud.saturated_T]
        if got.coordinate == "centered":
            entries_T = (
                entries_T - z * (model.z_source(loud.reference) * loud.reference.onehot_TV).sum(-1)[loud.saturated_T]
            )
        ce = float((entries_T * ce_T).sum() / (ce_T * ce_T).sum()) if bool(ce_T.any()) else 1.0
        if abs(z - 1) > limit or abs(ce - 1) > FACTOR_LIMIT:
            of_z = f"λ is {z:.3g} times and " if readable else ""
            worse, on = (z, silent) if abs(z - 1) > limit else (ce, loud)
            witness = e.witness(f"weight relative to {wide}", worse, 1.0, on=on, noise=UNIT[name], dtype=name)
            words = f"With {name} logits {of_z}the weight on CE is {ce:.3g} times what it is with {wide} logits."
            return found(words, z, witness)
    return None


TOLERANCE = 3e-3
"""Mismatch of scalar and gradient that is a finding."""


@finding("error")
def forward_backward_mismatch(e: Evidence) -> Answer:
    """Is the gradient the derivative of the scalar? Finite differences, the value itself, and hidden against weight."""
    ident = e.ident
    if not e.stable:
        return not_applicable(UNSTABLE)
    if ident.how == "rounded" or ident.coarse:
        return not_applicable(
            "The loss, or a part of it, computes in 16 bits: finite differences of its scalar say nothing."
        )
    if ident.damped:
        return not_applicable("Gain-aware: the stop-gradient on the gain is part of the objective.")
    disagreement = _hidden_against_weight(e) if ident.known else 0.0
    if disagreement > 1e-3:
        return found(
            f"The gradients at hidden and at weight belong to different sources (relative {disagreement:.3g}).",
            disagreement,
            e.witness("‖dh − δW‖ / ‖δW‖ with δ read from dW", disagreement, noise=1e3 * ident.eps),
        )
    worst = max(_slopes(e), key=lambda slope: slope.mismatch, default=None)
    if worst is not None and worst.mismatch > TOLERANCE:
        return found(
            f"Along {worst.words} the scalar changes by {worst.scalar:.4g} per unit, its gradient says "
            f"{worst.gradient:.4g}: what is trained is not what is printed.",
            worst.mismatch,
            e.witness(f"slope along {worst.words}", worst.gradient, worst.scalar, on=worst.probe, noise=worst.rounding),
        )
    squares = not any(penalty.quantity.fixed for penalty in ident.model.penalties)
    predictable = ident.identified.has_z and ident.how == "explained" and ident.trusted and not ident.identified.extra
    offset = _value_offset(e) if predictable and squares else None
    if offset is not None and abs(offset[0]) > TOLERANCE * abs(offset[1].expected or 0.0):
        return found(
            f"The scalar is off by {offset[0]:.3g} from the objective whose gradient is returned: a constant "
            "that trains nothing, or another objective.",
            *offset,
        )
    if worst is None:
        return not_applicable("No finite difference of the scalar stands out of its rounding.")
    return passed("Finite differences of the scalar agree with the gradient.", worst.mismatch)


def _hidden_against_weight(e: Evidence) -> float:
    """dh must be δ·W with the δ read from dW."""
    probe, outcome = e.mixed
    if outcome.grad_hidden_TD is None:
        return 0.0
    wanted = outcome.grad_TV @ probe.logits_TV.T
    return float((outcome.grad_hidden_TD - wanted).norm() / wanted.norm().clamp(min=1e-300))


@dataclass(frozen=True)
class Slope:
    """One direction: the scalar's own derivative, the gradient's, and their relative mismatch beyond rounding."""

    words: str
    probe: Probe
    scalar: float
    gradient: float
    rounding: float
    mismatch: float


def _slopes(e: Evidence) -> Iterator[Slope]:
    """Ordinary logits along the gradient, at random and along a shift; saturated ones along a shift and the top logit.

    Cross-entropy does not see a common shift, so along it even a tiny Z stands alone; and λ(log Z − c)² is quadratic in the
    shift, so central differences are exact at steps far above rounding.
    """
    ident = e.ident
    # Large steps presume a quadratic. Where the penalty is not one, stay local, and off the grid where kinks would lie.
    fixed = any(penalty.quantity.fixed for penalty in ident.model.penalties)
    quadratic = ident.trusted and not fixed and ident.model.warp.identity
    names = [name for name in ("mixed", "saturated", "wide", "confident") if name in e.draw.outcomes]
    at = {name: (e.draw.probes[name], e.draw.outcomes[name]) for name in names}
    if not quadratic:
        moved = {name: probe.shifted(0.13) for name, (probe, _) in at.items()}
        at = {
            name: (probe, outcome) for name, probe in moved.items() if not isinstance(outcome := e.attempt(probe), str)
        }
    if "mixed" not in at:
        return
    probe, outcome = at["mixed"]
    r = probe.reference
    # A tied maximum has no derivative for losses that use it; 2 · 0.05 both ways cannot bridge the 0.25 of the grid.
    smooth = ((r.inside_TV == r.max_T.unsqueeze(-1)).sum(-1) == 1).unsqueeze(-1)
    yield from _along_gradient(e, probe, outcome, smooth, "its own gradient")
    if ident.masks_accepted:
        masked = probe.masked(torch.arange(len(probe.target_T)) % 3 > 0)
        if not isinstance(answer := e.attempt(masked), str) and answer.finite:
            # Value and gradient may have denominators of their own.
            yield from _along_gradient(e, masked, answer, smooth, "its own gradient, with tokens ignored")
    random = smooth * torch.randn(r.logits_TV.shape, generator=seeded(e.draw.seed + 2), dtype=torch.float64)
    yield from _slope(e, probe, outcome, random / random.abs().max(), 0.05, "a random direction")
    for name, (probe, outcome) in at.items():
        r, step = probe.reference, (32.0 if name == "wide" else 4.0) if quadratic and name != "confident" else 0.05
        shift = torch.zeros_like(r.logits_TV)
        shift[:, : r.lanes] = 1.0
        yield from _slope(e, probe, outcome, shift, step, "a common shift of the logits")
        if name in ("saturated", "wide"):
            yield from _slope(e, probe, outcome, r.argmax_TV(split=False), step / 2, "the largest logit")


def _along_gradient(e: Evidence, probe: Probe, outcome: Outcome, smooth: Tensor, words: str) -> Iterator[Slope]:
    largest = float((outcome.grad_TV * smooth).abs().max())
    if largest > 0:
        yield from _slope(e, probe, outcome, smooth * outcome.grad_TV / largest, 0.05, words)


def _slope(e: Evidence, probe: Probe, outcome: Outcome, direction: Tensor, step: float, words: str) -> Iterator[Slope]:
    """The better of two steps: a kink within the larger one, such as a clamp has, disagrees there and not in the smaller."""
    ways = [one for k in (1.0, 1 / 16) if (one := _slope_at(e, probe, outcome, direction, k * step, words)) is not None]
    if ways:
        yield min(ways, key=lambda slope: slope.mismatch)


def _slope_at(e: Evidence, probe: Probe, outcome: Outcome, direction: Tensor, step: float, words: str) -> Slope | None:
    try:
        low2, low1, high1, high2 = values = [
            e.box.value(probe.logits_TV + k * step * direction, probe.target_T, e.ident.dtype) for k in (-2, -1, 1, 2)
        ]
    except LossCallError:
        return None
    if not all(abs(value) < math.inf for value in values):
        return None
    scalar = (8 * (high1 - low1) - (high2 - low2)) / (12 * step)
    gradient = float((outcome.grad_TV * direction).sum())
    # The scalar may come back in a narrower format even where the gradient is fp64.
    unit = max(e.ident.eps, UNIT.get(str(outcome.dtype).removeprefix("torch."), 0.0))
    # A constant may have been taken off the scalar: its terms are as large as gradient times logits.
    terms = float((outcome.grad_TV * probe.logits_TV).abs().sum())
    rounding = 16 * unit * max(terms, *(abs(value) for value in values)) / step
    # The gradient is rounded too: where CE cancels along the direction, what is left of it is noise of this size.
    entries_T = (outcome.grad_TV * direction).abs().sum(-1)
    rounding += 2 * unit * float((probe.noise_T * entries_T).sum())
    scale = max(abs(scalar), abs(gradient))
    # Rounding that hides half of the slope says nothing about it.
    if step < 0.05 and rounding > 1e-3 * scale:
        return None
    beyond = max(abs(scalar - gradient) - rounding, 0.0)
    return Slope(words, probe, scalar, gradient, rounding, beyond / scale if scale else 0.0)


def _value_offset(e: Evidence) -> tuple[float, Witness] | None:
    """How far the scalar is from the value of the identified objective, where that is largest; None within rounding.

    With label smoothing a constant is part of the objective: t5x takes off the entropy of its target, a KL divergence too.
    """
    model, offsets = e.ident.model, {}
    for name, outcome in e.draw.outcomes.items():
        wanted = model.value(e.draw.probes[name].reference)
        # The scalar may come back in a narrower format than it was computed in.
        unit = max(e.ident.eps, UNIT.get(str(outcome.dtype).removeprefix("torch."), 0.0))
        slack = 1e-4 * (1 + abs(wanted)) * max(1.0, unit / 2**-24)
        offsets[name] = (outcome.value - wanted, slack, wanted, outcome.value)
    constant = offsets["mixed"][0] if model.smoothing else 0.0
    beyond = {name: one for name, one in offsets.items() if abs(one[0] - constant) > one[1]}
    if not beyond:
        return None
    name = max(beyond, key=lambda name: abs(beyond[name][0]) / beyond[name][1])
    off, slack, wanted, value = beyond[name]
    return off, e.witness("value of the loss", value, wanted, on=e.draw.probes[name], noise=slack)


@finding("warning")
def all_ignored_nonfinite(e: Evidence) -> Answer:
    """Does a batch whose tokens are all ignored stay finite? And does an infinite logit of an ignored token stay outside?"""
    probe, _ = e.mixed
    tokens = len(probe.target_T)
    some = e.attempt(probe.masked(torch.arange(tokens) % 2 == 0))
    if isinstance(some, str):
        return not_applicable(f"Ignored targets could not be tried: {some}")
    empty = draw("all ignored", e.ident.space, e.draw.seed)
    outcome = e.attempt(empty)
    witness = e.witness("value of the loss with every token ignored", None, 0.0, noise=0.0, on=empty)
    if isinstance(outcome, str):
        return found(f"A batch whose tokens are all ignored fails: {outcome}", None, witness)
    if not outcome.finite:
        what = "loss" if not math.isfinite(outcome.value) else "gradient"
        return found(f"A batch whose tokens are all ignored gives a non-finite {what} (0/0).", None, witness)
    silent = not bool(some.grad_TV[1::2].any())
    if silent and not e.box.linear:
        # With hidden and weight an infinite logit cannot be given to one token alone.
        logits = probe.logits_TV.clone()
        logits[1, 0] = math.inf
        keep = torch.ones(tokens, dtype=torch.bool)
        keep[1] = False
        leak = e.attempt(probe.with_logits(logits).masked(keep))
        if isinstance(leak, str):
            return passed(f"All-ignored batches are sound; infinite logits could not be tried: {leak}")
        # The ignored row's own gradient is not looked at: PyTorch's cross_entropy leaves NaN there.
        if not (math.isfinite(leak.value) and bool(torch.isfinite(leak.grad_TV[keep]).all())):
            return found(
                "An infinite logit of an ignored token makes the loss non-finite: the mask multiplies (inf · 0).",
                None,
                replace(witness, quantity="value of the loss with an infinite logit at ignored token 1"),
            )
    return passed(f"All-ignored batches give a finite loss ({outcome.value:.3g}).", outcome.value)


# Denominators and coordinates.


@finding("error")
def denominator_mismatch(e: Evidence) -> Answer:
    """Are CE and Z divided by the same token count? λ relative to CE must not change with batch size or mask."""
    ident, named = e.ident, e.ident.identified
    wanted_ce = e.expect.get("ce_denominator", e.expect.get("denominator"))
    wanted_z = e.expect.get("z_denominator", e.expect.get("denominator"))
    if not ident.known:
        return not_applicable(CANNOT_TELL)
    for part, wanted, got in (("CE", wanted_ce, named.ce_denominator), ("Z", wanted_z, named.z_denominator)):
        if part == "Z" and not named.has_z:
            return not_applicable(NO_Z)
        if wanted is not None and wanted != got:
            witness = _weights_witness(e, f"weight on the {part} of one token", part == "Z", wanted)
            return found(f"{part} is divided by {got!r}, but {wanted!r} was expected.", None, witness)
    if ident.special:
        others = ", ".join(str(one.index) for one in ident.special)
        return not_applicable(f"CE has class weights (class {others}), so the two denominators cannot be compared.")
    if named.ce_weights in ("class", "position", "token"):
        return _weighted_denominators(named)
    if any(w.misplaced for w in e.weights):
        return not_applicable("Ignored tokens are trained and valid ones are not: see ignored_tokens_leak.")
    ratios = [(w.z / w.ce, w) for w in e.weights if w.ce]
    if not ratios or named.ce_denominator == "none":
        return not_applicable("No cross-entropy was found next to the Z.")
    if len(ratios) < 2:
        return not_applicable("The loss accepts one size and no mask, so denominators cannot be told apart.")
    (low, few), (high, many) = min(ratios, key=lambda x: abs(x[0])), max(ratios, key=lambda x: abs(x[0]))
    change = abs(high / low) if low else math.inf
    if change > 1 + max(1e-2, 16 * ident.eps, 8 * max(w.slack for w in e.weights)):
        span = ", ".join(f"{w.valid} of {w.tokens} valid" for w in e.weights[:3])
        words = f"λ relative to CE with {many.valid} of {many.tokens} tokens valid, against {few.valid} of {few.tokens}"
        witness = e.witness(words, high, low, shape=(many.tokens, ident.space.width))
        return found(
            f"CE is divided by {_count_words(named.ce_denominator)}, Z by {_count_words(named.z_denominator)}: λ relative to the "
            f"weight on CE changes by a factor of {change:.3g} between batches with {span}.",
            change,
            _masked_witness(e) or witness,
        )
    if not ident.masks_accepted:
        return passed("CE and Z share one denominator; the loss refuses ignored targets, so only sizes were tried.")
    if named.ce_weights == "groups":
        return passed("Groups of tokens are averaged, then their means; CE and Z share these weights.", change)
    return passed(f"CE and Z share one denominator: {_count_words(named.ce_denominator)}.", change)


def _masked_witness(e: Evidence) -> Witness | None:
    """λ relative to CE where half of the tokens are ignored, against the same batch without a mask; None where they are equal."""
    half, (probe, whole) = draw("half ignored", e.ident.space, e.draw.seed), e.mixed
    keep, outcome = half.reference.valid_T, e.attempt(half)
    if isinstance(outcome, str) or not outcome.finite:
        return None
    masked = weigh(e.ident, probe, keep, outcome.grad_TV)
    plain = weigh(e.ident, probe, torch.ones_like(keep), whole.grad_TV)
    if not (masked.ce and plain.ce) or math.isclose(masked.z / masked.ce, plain.z / plain.ce, rel_tol=1e-2):
        return None
    words = f"λ relative to CE with {masked.valid} of {masked.tokens} tokens valid, against all of them"
    return e.witness(words, masked.z / masked.ce, plain.z / plain.ce, on=half)


def _weights_witness(e: Evidence, quantity: str, of_z: bool, wanted: str) -> Witness:
    """The weight of one token in a masked batch, against the one that the expected count would give."""
    model, w = e.ident.model, next((w for w in e.weights if w.valid < w.tokens), e.weights[0])
    scale = (model.penalties[0].coef if of_z else model.ce_scale) or 1.0
    valid = torch.arange(w.tokens) < w.valid
    r = Reference(torch.zeros(w.tokens, 2), torch.where(valid, 0, -1), 2)
    words = f"{quantity} with {w.valid} of {w.tokens} tokens valid"
    return e.witness(
        words, w.z if of_z else w.ce, scale / model.count(wanted, r), shape=(w.tokens, e.ident.space.width)
    )


def _weighted_denominators(named: Identified) -> Answer:
    """Token weights differ by design; what can be compared are the counts behind the two means."""
    kind = {"class": "class weights", "position": "weights by position"}.get(named.ce_weights or "", "token weights")
    if named.z_weights == "shared":
        return passed(f"CE has {kind}, and Z shares them.")
    if named.ce_denominator == named.z_denominator != "other":
        return passed(f"CE has {kind}, Z has none; both are divided by {_count_words(named.ce_denominator)}.")
    return not_applicable(f"CE has {kind} and Z has none, so their denominators cannot be compared.")


def _count_words(name: str | None) -> str:
    words = {"valid": "the valid tokens", "all": "all tokens", "mean": "the tokens", "sum": "1 (a sum)"}
    words["other"] = "a count that is none of the known ones"
    name = name or "other"
    if name.startswith("sqrt_"):
        return f"the square root of {words[name.removeprefix('sqrt_')]}"
    if name.endswith(("+1", "-1")):
        return f"{words[name[:-2]]} {'plus' if name[-2] == '+' else 'less'} 1"
    return words.get(name, name)


@finding("error")
def max_shifted(e: Evidence) -> Answer:
    """Is log Z taken after subtracting the row maximum, and never restored?"""
    if (why := _no_z(e, numbers=True)) is not None:
        return not_applicable(why)
    if e.ident.identified.coordinate != "max_shifted":
        return passed("The row maximum is not left out of log Z.")
    probe, outcome = e.mixed
    moved = e.attempt(probe.shifted(8.0))
    change = 0.0 if isinstance(moved, str) else abs(float((moved.grad_TV - outcome.grad_TV).sum()))
    coef, model = e.ident.identified.coef or 0.0, e.ident.model
    wanted = abs(2 * coef * 8.0 * len(probe.target_T) / model.count(model.z_denominator or "sum", probe.reference))
    return found(
        f"The penalised quantity is {e.ident.identified.penalty}: it is blind to a common shift of the logits, "
        "which is what Z-loss is there to hold. Add the row maximum back.",
        0.0,
        e.witness("change of the summed gradient when 8 is added to every logit", change, wanted),
    )


@finding("error")
def not_off(e: Evidence) -> Answer:
    """Is "off" off? The loss with its Z switched off must be cross-entropy, in gradient and in value."""
    if e.off is None:
        return not_applicable("Pass the same loss with its Z switched off as `off=`.")
    ident, off = e.ident, e.off
    outcomes = take_draw(off, ident.space, e.draw.seed, ident.dtype, APART).parts(*APART)
    if not outcomes:
        return found(
            "The loss with Z off gives no finite value on the probes.", None, e.witness("value of the loss", None)
        )
    continuous = draw("continuous", ident.space, e.draw.seed)
    eps = max(ident.eps, UNIT[computes_in(off, continuous, ident.dtype)])
    rows = decompose(outcomes, eps)
    on = ident.fit.slope[0] if ident.fit is not None and ident.fit.slope else 0.0
    if rows.exact and nothing_but_ce(rows) is not None:
        return passed("With Z switched off the gradient is cross-entropy alone.", 0.0)
    if rows.exact and (left := best_fit(rows)) is not None:
        slope = left.slope[0]
        applied = decompose(ident.rows.parts, ident.rows.eps, warp=ident.rows.warp).k_T.norm() if on else None
        share = abs(slope / on) if on else math.inf
        if applied is not None and float(rows.k_T.norm()) <= 1e-6 * float(applied):
            return passed("With Z switched off the gradient is cross-entropy alone.", 0.0)
        words = f" ({share:.3g} of the λ that is applied when on)" if on else ""
        at = probe_of(outcomes, rows.k_T)
        return found(
            f"With Z switched off the gradient still holds a Z{words}: off is not off.",
            slope,
            e.witness("slope of the source against log Z with Z off", slope, 0.0, on=at),
        )
    alone = identify(replace(off), ident.space, e.draw.seed).identified
    if alone.has_z is None:
        return not_applicable(f"What the loss with Z off applies could not be identified. {alone.reason}")
    if alone.has_z:
        witness = e.witness("λ with Z off", alone.coef, 0.0)
        return found("With Z switched off the gradient still holds a Z: off is not off.", alone.coef, witness)
    return passed("With Z switched off the gradient is cross-entropy alone.", 0.0)


def probe_of(parts: list[tuple[Probe, Tensor]], size_T: Tensor) -> Probe:
    """The batch in which the largest entry of `size_T` lies."""
    at = int(size_T.abs().argmax())
    for probe, _ in parts:
        if at < len(probe.target_T):
            return probe
        at -= len(probe.target_T)
    raise AssertionError("the entry lies in none of the batches")


@finding("error")
def counted_twice(e: Evidence) -> Answer:
    """Is the applied λ a whole multiple of the one the user set?"""
    expected, got = e.expect.get("coef"), e.ident.identified
    if not expected:
        return not_applicable("Pass `expect={'coef': λ, 'target': c}`: what you believe the loss applies.")
    if not got.has_z or got.coef is None:
        return not_applicable(_no_z(e) or "The penalty is not a known one, so its λ cannot be compared.")
    ratio = got.coef / float(expected)
    whole = round(ratio)
    if whole >= 2 and abs(ratio - whole) < 1e-2 * whole:
        return found(
            f"λ = {got.coef:.5g} is {whole} times the expected {float(expected):.5g}: Z is added again.",
            ratio,
            e.witness("λ", got.coef, float(expected), noise=got.uncertainty.coef),
        )
    return passed(f"λ is {ratio:.5g} times the expected one.", ratio)


# Side effects and returned values.


@finding("warning", repeat=False)
def overwrites_input(e: Evidence) -> Answer:
    """Are the caller's tensors still what they were after forward and backward, in every dtype?"""
    ident, (probe, _) = e.ident, e.mixed
    # Some losses rewrite only the targets they ignore; `float()` copies all but fp32.
    masked = probe.masked(torch.arange(len(probe.target_T)) % 2 == 0)
    wide = str(ident.dtype).removeprefix("torch.")
    changed = {(name, wide) for outcome in e.draw.outcomes.values() for name in outcome.overwritten}
    tried: list[str] = []
    for dtype in dict.fromkeys((ident.dtype, torch.float32, torch.bfloat16, torch.float16)):
        outcome = e.attempt(masked, dtype)
        outcome = e.attempt(probe, dtype) if isinstance(outcome, str) else outcome
        if not isinstance(outcome, str):
            tried.append(str(dtype).removeprefix("torch."))
            changed |= {(name, tried[-1]) for name in outcome.overwritten}
    if not changed:
        return passed(f"The inputs are left as they were, in {', '.join(tried)}.", 0.0)
    names, seen = sorted({name for name, _ in changed}), {dtype for _, dtype in changed}
    rest = sorted({*tried} - seen)
    where = f" in {' and '.join(sorted(seen))} (not in {', '.join(rest)})" if rest else ""
    return found(
        f"{' and '.join(f'`{name}`' for name in names)} no longer held the caller's values after the call{where}: nothing else "
        "may read them.",
        len(names),
        e.witness("arguments whose contents changed", len(names), 0.0, noise=0.0, dtype=min(seen)),
    )


@finding("warning", repeat=False)
def reported_z_dtype(e: Evidence) -> Answer:
    """Is the reported Z rounded to 16 bits? Called with bf16 logits, as a mixed-precision model would."""
    probe, plain = e.mixed
    half = e.attempt(probe, torch.bfloat16)
    z = e.reported
    returned = "" if isinstance(half, str) else f" bf16 logits give a {_name(half.dtype)} loss."
    bits = e.witness("bits of the value", 16.0, 32.0, noise=0.0)
    if plain.dtype in (torch.bfloat16, torch.float16):
        wide = _name(e.ident.dtype)
        return found(
            f"{wide} logits give a {_name(plain.dtype)} loss: the logged value has two or three digits.", 16.0, bits
        )
    if z is None:
        return not_applicable(f"The loss reports no Z apart.{returned}")
    for outcome in [plain] if isinstance(half, str) else [plain, half]:
        item = outcome.item(z.name)
        if item is not None and item.dtype in (torch.bfloat16, torch.float16):
            bits = replace(bits, dtype=bits.dtype if outcome is plain else "bfloat16", quantity=f"bits of `{z.name}`")
            return found(
                f"The reported Z comes in {_name(item.dtype)}, with two or three digits.{returned}", 16.0, bits
            )
    return passed(f"The reported Z has at least fp32.{returned}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@finding("error")
def reported_z_no_gradient(e: Evidence) -> Answer:
    """Does a reported Z that claims a gradient have one? Detached openly (`requires_grad` False) is fine."""
    z, (probe, outcome) = e.reported, e.mixed
    plain = None if z is None else outcome.item(z.name)
    if plain is None:
        return not_applicable("The loss reports no Z apart.")
    if not plain.requires_grad:
        return passed("The reported Z is openly detached: nobody can train on it by mistake.")
    through = e.attempt(probe, through=plain.name)
    witness = e.witness(f"norm of the gradient of `{plain.name}` at the logits", 0.0, float(outcome.grad_TV.norm()))
    if isinstance(through, str):
        return found(f"The reported Z requires a gradient, but backward through it fails: {through}", None, witness)
    norm = float(through.grad_TV.norm())
    if norm == 0.0:
        return found(
            "The reported Z has `requires_grad`, but its gradient at the logits is zero: silently.", 0.0, witness
        )
    return passed("The reported Z carries a gradient.", norm)


@finding("error")
def reported_z_value(e: Evidence) -> Answer:
    """Is the reported Z the one that is trained: λ Σ (v − c)²/D of the penalty that the gradient holds?"""
    ident, z = e.ident, e.reported
    if z is None:
        untrained = any(one.role == "z_not_trained" for one in e.returned)
        more = " A (log Z)² is returned, and the loss does not train it." if untrained else ""
        return not_applicable(f"The loss reports no Z apart.{more}")
    if not ident.known:
        return not_applicable(CANNOT_TELL)
    if not ident.trusted:
        return not_applicable("Token weights or the form of the penalty keep its value from being predicted.")
    values = [outcome.item(z.name) for outcome in e.draw.outcomes.values()]
    probe, outcome = e.mixed
    item, trained = outcome.item(z.name), ident.model.z_value(probe.reference)
    witness = e.witness(f"`{z.name}`", None if item is None else item.value, trained)
    if any(one is not None and one.value is not None and not math.isfinite(one.value) for one in values):
        return found("The reported Z is not finite on ordinary logits.", None, witness)
    if z.masked is not None:
        said, over_valid = z.masked
        what = "the mean of (log Z − c)²" if z.role == "z_without_coef" else "the one that is trained"
        return found(
            f"The reported Z (`{z.name}`) is {what} on batches without ignored tokens only: where tokens are ignored it is "
            f"{said:.4g}, and {over_valid:.4g} over the tokens that are trained.",
            said / over_valid if over_valid else None,
            replace(witness, measured=said, expected=over_valid, quantity=f"`{z.name}` with tokens ignored"),
        )
    if z.role == "z":
        return passed(f"The reported Z (`{z.name}`) is the one that is trained.", 1.0)
    if z.role == "z_without_coef":
        return passed(f"The reported Z (`{z.name}`) is the mean of (log Z − c)² without its λ.", 1.0)
    if z.role == "z_multiple":
        ratio = z.ratio or 0.0
        return found(f"The reported Z (`{z.name}`) is {ratio:.4g} times the Z that is trained.", ratio, witness)
    if not ident.identified.has_z:
        if all(one is None or one.value == 0 for one in values):
            return passed("The reported Z is 0, and none is trained.", 0.0)
        return found(f"A Z is reported (`{z.name}`), but the gradient holds none.", None, witness)
    sentence = f"The value `{z.name}` is called a Z, but is neither the Z that is trained nor a multiple of it."
    return found(sentence, None, witness)


@finding("error")
def upstream_ignored(e: Evidence) -> Answer:
    """Do gradients honour what multiplies the loss? k·loss must give k·gradient, Σ u_t ℓ_t u_t times each row."""
    ident, (probe, outcome) = e.ident, e.mixed
    if not e.stable:
        return not_applicable(UNSTABLE)
    base, worst = outcome.grad_TV, 0.0
    tolerance = 1e-2 if ident.how == "rounded" else max(1e-4, 8 * ident.eps)
    for factor in (3.0, -0.5):
        scaled = e.attempt(probe, upstream=factor)
        if isinstance(scaled, str):
            return found(
                f"Multiplying the loss by {factor} fails: {scaled}", None, e.witness("error", None, noise=tolerance)
            )
        error = float((scaled.grad_TV - factor * base).norm()) / max(abs(factor) * float(base.norm()), 1e-300)
        worst = max(worst, error)
    if not worst <= tolerance:
        words = f"k · loss does not give k · gradient (relative error {worst:.3g})."
        return found(
            words, worst, e.witness("‖gradient of k·loss − k·gradient‖ / ‖k·gradient‖", worst, noise=tolerance)
        )
    if e.per_token is None:
        hint = "Pass its reduction='none' variant as `per_token=` to check that one too."
        return passed(f"k · loss gives k · gradient. {hint}", worst)
    upstream_T = 0.25 + torch.rand(len(probe.target_T), generator=seeded(e.draw.seed), dtype=torch.float64)
    upstream_T[::5] *= -1
    try:
        ones, given = (
            e.per_token(probe, ident.dtype, upstream=u, per_token=True)
            for u in (torch.ones_like(upstream_T), upstream_T)
        )
    except LossCallError as error:
        return not_applicable(f"The per-token variant could not be tried: {error}")
    wanted = upstream_T.unsqueeze(-1) * ones.grad_TV
    if not ones.has_gradient or not float(wanted.norm()) > 0:
        return found("The per-token variant has no gradient.", 1.0, e.witness("norm of its gradient", 0.0, None))
    error_T = float((given.grad_TV - wanted).norm()) / float(wanted.norm())
    if not error_T <= tolerance:
        return found(
            f"The per-token variant does not honour per-token upstream gradients (relative error {error_T:.3g}).",
            error_T,
            e.witness("‖gradient of Σ u_t ℓ_t − u_t · gradient‖ / ‖u_t · gradient‖", error_T, noise=tolerance),
        )
    return passed("Upstream gradients are honoured, per token too.", max(worst, error_T))


@finding("error")
def probabilities_not_logits(e: Evidence) -> Answer:
    """Is the logsumexp taken of probabilities instead of logits?"""
    if (why := _no_z(e, numbers=True)) is not None:
        return not_applicable(why)
    if e.ident.fit is None or not set(e.ident.fit.quantities) & set(PROBABILITIES):
        return passed("Z is not taken of probabilities.")
    probe, _ = e.mixed
    v_T = e.ident.fit.quantities[0].value(probe.reference)
    return found(
        "Z is the logsumexp of the probabilities: it lies between log V and log(V + e − 1) whatever the logits "
        "are, and nothing holds their normalizer. Pass the logits.",
        e.ident.identified.coef,
        e.witness("range of the penalised quantity over the batch, against that of log Z", float(v_T.max() - v_T.min()),
                  float(probe.reference.log_z_T.max() - probe.reference.log_z_T.min())),
    )  # fmt: skip


@finding("error")
def overflow(e: Evidence) -> Answer:
    """Does a common shift of ±100 break it? (A naive log Σ exp overflows in fp32 at 89.)"""
    ident = e.ident
    base = draw("continuous", ident.space, e.draw.seed)
    calm = _shift_error(e, base)
    for shift in (100.0, -100.0):
        probe = base.shifted(shift)
        outcome = e.attempt(probe, torch.float32)
        witness = e.witness(
            f"relative error of the gradient after a common shift of {shift:+.0f}", None, on=base, dtype="float32"
        )
        if isinstance(outcome, str):
            return found(f"A common shift of {shift:+.0f} fails: {outcome}", shift, witness)
        if not outcome.finite:
            return found(f"A common shift of {shift:+.0f} makes loss or gradient non-finite in fp32.", shift, witness)
        error = _shift_error(e, probe)
        if calm is not None and calm < 1e-3 and error is not None and error > 2e-2:
            words = f"A common shift of {shift:+.0f} leaves a gradient that is off by {error:.2g} (relative)."
            return found(words, error, replace(witness, measured=error, noise=calm))
    missing = sorted(set(e.draw.probes) - set(e.draw.outcomes))
    if missing:
        witness = e.witness("value of the loss", None, None, on=e.draw.probes[missing[0]])
        return found("Logits of ±128 to 2048 make loss or gradient non-finite.", 2048.0, witness)
    if calm is None:
        return passed(
            "A common shift of ±100 leaves loss and gradient finite; there is nothing to compare them with.", 0.0
        )
    return passed("A common shift of ±100 leaves value and gradient sound.", 0.0)


def _shift_error(e: Evidence, probe: Probe) -> float | None:
    # Far out on a softcap the derivative itself is a difference that fp32 cannot hold.
    if not e.ident.trusted or e.ident.how == "filtered" or e.ident.model.warp.cap is not None:
        return None
    outcome = e.attempt(probe, torch.float32)
    if isinstance(outcome, str):
        return None
    wanted = e.ident.model.source(probe.reference)
    return float((outcome.grad_TV - wanted).norm() / wanted.norm())


@finding("error")
def filtered_source(e: Evidence) -> Answer:
    """Are small gradient entries, or confident tokens, set to zero and their Z source with them?"""
    ident = e.ident
    if (why := _no_z(e, numbers=True)) is not None:
        return not_applicable(why)
    if ident.how != "filtered":
        return passed("No entry of the Z source is missing.")
    lost, whole, rows = 0.0, 0.0, 0
    limits: dict[str, list[float]] = {}
    emptied = True
    worst: Probe | None = None
    for name, outcome in e.draw.outcomes.items():
        probe = e.draw.probes[name]
        r, model, grad_TV = probe.reference, ident.model, outcome.grad_TV
        z_TV, wanted = model.z_source(r).abs(), model.source(r)
        scale_T = (
            ident.eps * probe.noise_T * (abs(model.ce_scale) / model.count(model.ce_denominator, r) + z_TV.amax(-1))
        )
        gone = (grad_TV == 0) & (wanted.abs() > 30 * scale_T.unsqueeze(-1))
        if bool(gone.any()):
            worst = worst or probe
            emptied = emptied and not bool((grad_TV != 0).any(-1)[gone.any(-1)].any())
            for key, value in (("|p − y|", (r.p_TV - r.onehot_TV).abs()), ("p", r.p_TV)):
                limits.setdefault(key, [0.0, math.inf])
                limits[key][0] = max(limits[key][0], float(value[gone].max()))
        for key, value in (("|p − y|", (r.p_TV - r.onehot_TV).abs()), ("p", r.p_TV)):
            limits.setdefault(key, [0.0, math.inf])
            limits[key][1] = min(limits[key][1], float(value[grad_TV != 0].min()))
        lost, whole, rows = lost + float(z_TV[gone].sum()), whole + float(z_TV.sum()), rows + int(gone.any(-1).sum())
    if worst is None:
        return passed("No entry of the Z source is missing.")
    share, cause = lost / whole if whole else 0.0, "what they have in common was not found"
    separating = next((key for key, (highest, lowest) in limits.items() if highest <= lowest), None)
    if emptied:
        cause = "whole rows are dropped"
    elif separating is not None:
        highest, lowest = limits[separating]
        drops = " This drops the Z of confident tokens" if separating != "p" else ""
        cause = (
            f"entries with {separating} up to {highest:.3g} are dropped, those from {lowest:.3g} on are kept.{drops}"
        )
    return found(
        f"Gradient entries come back exactly 0 where the Z source is not ({rows} probe tokens, {share:.1%} of its mass): "
        f"{cause}.",
        share,
        e.witness("share of the Z source whose entries are exactly 0", share, on=worst),
    )


@finding("error")
def padding_in_log_z(e: Evidence) -> Answer:
    """Do padding rows of the vocabulary enter log Z? Fill them differently, and cut them off: nothing may change.

    The whole batch is also moved down to −40, where lanes masked before a softcap come back above the real ones.
    """
    ident, lanes, width = e.ident, e.ident.space.lanes, e.ident.space.width
    if lanes == width:
        return not_applicable("If the vocabulary is padded, pass the number of real rows as `valid_vocab=`.")
    base = draw("continuous", ident.space, e.draw.seed)
    worst, where, tried = 0.0, "", 0
    for shift in (0.0, -40.0):
        moved = base.shifted(shift)
        plain = e.attempt(moved)
        if isinstance(plain, str):
            return not_applicable(f"Padded logits could not be tried: {plain}")
        others = {
            "lanes cut off": replace(moved, reference=Reference(moved.logits_TV[:, :lanes], moved.target_T, lanes))
        }
        for fill in (0.0, 50.0):
            logits = moved.logits_TV.clone()
            logits[:, lanes:] = fill
            others[f"lanes at {fill:+.0f}"] = moved.with_logits(logits)
        for words, probe in others.items():
            outcome = e.attempt(probe)
            if isinstance(outcome, str):
                continue
            tried += 1
            value = abs(plain.value - outcome.value) / max(abs(plain.value), 1e-12)
            inside, other = plain.grad_TV[:, :lanes], outcome.grad_TV[:, :lanes]
            change = max(value, float((inside - other).norm()) / max(float(inside.norm()), 1e-300))
            beyond = float(outcome.grad_TV[:, lanes:].norm()) / max(float(outcome.grad_TV.norm()), 1e-300)
            for size, what in ((change, words), (beyond, f"{words}, which receive a gradient")):
                if not size <= worst:
                    worst, where = size, what
    if not worst <= max(1e-4, 16 * ident.eps):
        return found(
            f"Padding rows enter log Z: value or gradient moves by {worst:.3g} ({where}).",
            worst,
            e.witness(f"relative change of value or gradient ({where})", worst, on=base, noise=16 * ident.eps),
        )
    if not tried:
        return not_applicable("The loss accepts no other values in its padding rows, so nothing could be compared.")
    return passed(f"The {width - lanes} padding rows stay outside log Z.", worst)


# What the objective is.

WEIGHTS = {
    "class": "with class weights",
    "position": "with weights by position",
    "token": "with a weight of its own on each token",
    "groups": "averaged over groups of tokens first",
}


@finding("warning", repeat=False)
def unexplained_source(e: Evidence) -> Answer:
    """Is all of the gradient explained by CE and a penalty of the known good kind? If so, the objective in one sentence."""
    ident, got = e.ident, e.ident.identified
    if ident.how == "rounded":
        return not_applicable("What is left over behaves like rounding: see low_precision_source.")
    if not e.stable or ident.kept_state is not None:
        return not_applicable(
            "The same inputs give different answers, which no objective explains: see not_repeatable."
        )
    share = ident.fit.worst if ident.fit is not None else float((~ident.rows.inside_T).double().mean())
    witness = e.witness("share of the gradient that no known objective explains", share or 1.0, noise=1e-3)
    if got.has_z is None:
        return found(f"What the loss applies cannot be told. {got.reason}", None, witness)
    if got.reason is not None:
        return found(f"There is a Z, but its numbers cannot be told. {got.reason}", None, _curve_witness(e) or witness)
    if ident.fit is not None and NOT_SQUARED in ident.fit.quantities:
        return not_applicable("The gradient is explained; its penalty is not squared: see not_squared.")
    if ident.fit is not None and set(ident.fit.quantities) & set(PROBABILITIES):
        return not_applicable("The gradient is explained; Z is taken of probabilities: see probabilities_not_logits.")
    if apart := [one for one in ident.special if not one.shares and one.z is not None and abs(one.z - 1) >= 1e-2]:
        witness = e.witness(f"Z of class {apart[0].index} relative to the others", apart[0].z, 1.0, noise=1e-3)
        return found(f"{_objective(ident)}, but {'; '.join(one.words for one in apart)}.", None, witness)
    if "centered_coef" in got.extra:
        return found(
            f"There are two penalties: λ = {got.coef or 0.0:.5g} on log Z and λ = {got.extra['centered_coef']:.5g} on log Z − μ "
            "(row-centered). Together they act on log Z and on the shift μ with different strengths.",
            None,
            e.witness("λ on log Z − μ next to the one on log Z", got.extra["centered_coef"], 0.0),
        )
    if got.coordinate == "other" and not got.extra.keys() & {"shift_coef", "beta"}:
        words = f"The penalty is none of the known good ones: it acts on {got.penalty}."
        return found(words, None, e.witness("λ of that penalty", got.coef, 0.0))
    if got.target_rule == "other":
        words = "c changes with the vocabulary, but not as log V plus a constant."
        return found(
            words, None, e.witness(f"c at V = {got.vocab}, against log V", got.target, math.log(got.vocab or 1))
        )
    if ident.targets_unused:
        return passed(
            f"{_objective(ident)} explains the gradient. The function does not read its targets: if it is the Z-loss of a "
            "router, `zloss.audit_router(model, batches)` audits the routers of a model.",
            share,
        )
    turned = " The loss takes its weight as [D, V]." if e.box.transposed else ""
    return passed(f"{_objective(ident)} explains the gradient.{turned}", share)


def _curve_witness(e: Evidence) -> Witness | None:
    """The point of the measured curve that is furthest from the best line through it."""
    if not e.ident.identified.curve:
        return None
    v, s = torch.tensor(e.ident.identified.curve, dtype=torch.float64).unbind(-1)
    columns = torch.stack([v, torch.ones_like(v)], dim=-1)
    line = columns @ torch.linalg.lstsq(columns, s.unsqueeze(-1)).solution.flatten()
    at = int((s - line).abs().argmax())
    return e.witness(
        f"coefficient of p at log Z = {float(v[at]):.5g}, against the best line", float(s[at]), float(line[at])
    )


def _objective(ident: Identification) -> str:
    got = ident.identified
    before = "".join(
        f" of logits with {key} {value:.5g}{_width_rule(ident) if key == 'logit_scale' else ''}"
        for key, value in got.extra.items()
        if key in ("logit_scale", "softcap")
    )
    smoothing = f" with label smoothing {got.label_smoothing:.4g}" if got.label_smoothing else ""
    weights = WEIGHTS.get(got.ce_weights or "", "")
    if weights and ident.special:
        weights += f" ({'; '.join(one.words for one in ident.special)})"
    scale = got.ce_scale if got.ce_scale is not None else 1.0
    plain = got.ce_weights == "uniform" and got.ce_denominator not in ("other", "none")
    scaled = f", scaled by {scale:.5g}" if plain and abs(scale - 1) > 1e-3 else ""
    shared = ", which shares these weights," if got.z_weights == "shared" else ""
    penalty = f" plus a penalty on {got.penalty}{shared}" if got.has_z else ""
    if got.ce_denominator == "none":
        return f"A penalty on {got.penalty} alone"
    return f"Cross-entropy{before}{smoothing}{' ' + weights if weights else ''}{scaled}{penalty}"


def _width_rule(ident: Identification) -> str:
    """How the scale of the logits follows the width, where it does."""
    for rule, power in POWERS.items():
        if ident.scale_power == power:
            width = probe_width(ident.space.tokens, ident.space.width)
            constant = ident.model.warp.scale / width**power
            times = "" if abs(constant - 1) < 1e-6 else f"{constant:.5g} · "
            return f" ({times}{rule} at D = {width})"
    return ""


@finding("error")
def not_squared(e: Evidence) -> Answer:
    """Is the square missing, λ·mean(log Z) in place of λ·mean((log Z − c)²)?"""
    if (why := _no_z(e, numbers=True)) is not None:
        return not_applicable(why)
    if e.ident.fit is None or NOT_SQUARED not in e.ident.fit.quantities:
        return passed("The penalty depends on log Z as it should: its source is not constant.")
    got = e.ident.identified
    probe, outcome = e.loudest
    rows = decompose([(probe, outcome.grad_TV)], e.ident.eps)
    spread = float((rows.k_T.max() - rows.k_T.min()) / rows.k_T.abs().max())
    return found(
        f"The penalty is {got.penalty}, with λ = {got.coef or 0.0:.5g}. Its source is the same at every log Z, so it "
        "drives log Z down without end and has no target: square it.",
        got.coef,
        e.witness("relative spread of the Z source over tokens of different log Z", spread, 1.0, on=probe),
    )


@finding("error")
def size_dependent(e: Evidence) -> Answer:
    """Does the loss apply the same objective to many tokens and to a large vocabulary?"""
    if not e.ident.known:
        return not_applicable(CANNOT_TELL)
    if not e.reach:
        return not_applicable("Other sizes were not tried: the gradient is filtered, in 16 bits, or of another form.")
    by = {
        verdict: [one for one in e.reach if one.verdict == verdict]
        for verdict in ("differs", "same", "refused", "left_out")
    }
    if by["differs"]:
        first, others = by["differs"][0], len(by["differs"]) - 1
        more = f" So it is at {others} further size{'s' * (others > 1)}." if others else ""
        probe = e.draw.probes["mixed"]
        witness = e.witness("largest relative error of a token's source", first.figure, on=probe, shape=first.shape)
        witness = replace(witness, seed=e.draw.seed + 5)
        return found(f"At {first.words}: {first.sentence}.{more}", first.figure, witness)
    if not by["same"]:
        untried = "No other size was tried, for time (`thorough=True` tries them)."
        return not_applicable("The loss accepts no other size." if by["refused"] else untried)
    notes = f" It refuses {len(by['refused'])} sizes." if by["refused"] else ""
    left_out = "; ".join(one.words for one in by["left_out"])
    notes += f" Not tried, for time: {left_out} (`thorough=True`)." if left_out else ""
    tokens, vocab = (max(one.shape[i] for one in by["same"]) for i in (0, 1))
    return passed(
        f"The same objective at {len(by['same'])} other sizes, up to T = {tokens:,} and V = {vocab:,}.{notes}"
    )


@finding("error", repeat=False)
def targets_moved(e: Evidence) -> Answer:
    """Is row t trained on its own target? Labels shifted inside are usual in models; rolled ones train the last row wrongly."""
    if e.box.targets == "rolled":
        return found(
            "Targets look rolled by one: row t is trained on target t + 1 and the last row on target 0. All else was "
            "audited with the targets rolled back.",
            None,
            e.witness(
                "rows that are trained on the target of the next row", float(e.ident.space.tokens), 0.0, noise=0.0
            ),
        )
    if e.box.targets == "shifted":
        return passed(
            "Targets look shifted by one: row t is trained on target t + 1 inside the loss, the last row on none. All "
            "else was audited with the targets moved accordingly."
        )
    if not e.ident.known:
        return not_applicable(CANNOT_TELL)
    if e.ident.identified.ce_denominator == "none":
        return not_applicable("There is no cross-entropy, so rows are not trained on targets.")
    return passed("Each row is trained on its own target.")


@finding("note")
def returned_values(e: Evidence) -> Answer:
    """What does the loss return next to the loss? A Z that the caller has to add is worth a note."""
    if e.box.added is not None:
        return found(
            f"The first returned value is cross-entropy alone, and the Z is returned next to it (`{e.box.added}`). "
            "It trains only if the caller adds it: what is identified here is the sum of the two.",
            None,
            None,
        )
    if not e.returned:
        return not_applicable("The loss returns one value.")
    return passed(f"Next to the loss: {'; '.join(f'`{one.name}` is {one.words}' for one in e.returned)}.")


@finding("error")
def negative_coefficient(e: Evidence) -> Answer:
    """Does the Z push log Z away from its target?"""
    coef = e.ident.identified.coef
    if (why := _no_z(e)) is not None:
        return not_applicable(why)
    if coef is None:
        return not_applicable("The penalty is not a known one, so its sign cannot be read.")
    if e.ident.fit is not None and NOT_SQUARED in e.ident.fit.quantities:
        return not_applicable("The penalty is not squared: see not_squared.")
    if coef < 0:
        witness = e.witness("λ", coef, abs(coef), noise=e.ident.identified.uncertainty.coef)
        return found(f"λ = {coef:.4g} is negative: log Z is driven away from c.", coef, witness)
    return passed("λ is positive.", coef)


@finding("error")
def ignored_tokens_leak(e: Evidence) -> Answer:
    """Do ignored tokens receive a gradient?"""
    if e.ident.targets_unused:
        return not_applicable("The function does not read its targets, so no token is ignored: see unexplained_source.")
    probe = draw("half ignored", e.ident.space, e.draw.seed)
    keep, outcome = probe.reference.valid_T, e.attempt(probe)
    if isinstance(outcome, str):
        return not_applicable(f"Ignored targets could not be tried: {outcome}")
    quantity = "gradient norm on ignored tokens relative to valid ones"
    if not outcome.finite:
        return found(
            "A batch with ignored tokens gives a non-finite loss or gradient.", None, e.witness(quantity, None)
        )
    norm = max(float(outcome.grad_TV.norm()), 1e-300)
    if outcome.beyond > 1e-7 * norm:
        share = outcome.beyond / norm
        return found(
            f"The last row, which has no target, receives a gradient ({share:.3g} of the norm on all others).",
            share,
            e.witness("gradient norm on the last row relative to the others", share, on=probe),
        )
    # Where hidden and weight are changed before their product, the columns of dW mix tokens; the rows of dh never do.
    rows_TX = outcome.grad_TV if outcome.grad_hidden_TD is None else outcome.grad_hidden_TD
    inside, whole = float(rows_TX[keep].norm()), max(float(rows_TX.norm()), 1e-300)
    share = float(rows_TX[~keep].norm()) / (inside or whole)
    silent = int((rows_TX[keep].norm(dim=-1) == 0).sum())
    if share > 1e-7:
        more = (
            f", and {silent} of {int(keep.sum())} valid ones receive none (is the mask shifted?)" if silent > 2 else ""
        )
        return found(
            f"Ignored tokens receive a gradient ({share:.3g} of the norm on valid ones){more}: padding trains the model.",
            share,
            e.witness(quantity, share, on=probe),
        )
    if not inside:
        return not_applicable("With some tokens ignored no token receives a gradient, so nothing can leak.")
    return passed("Ignored tokens receive no gradient.", share)


@finding("error")
def differs_from_expected(e: Evidence) -> Answer:
    """Does the loss apply what its user believes, within 1e-3 or the stated uncertainty?

    What another finding already reports is not reported again, and it is no pass.
    """
    expect, got, ident = e.expect, e.ident.identified, e.ident
    if not expect:
        return not_applicable("Pass `expect={'coef': λ, 'target': c}`: what you believe the loss applies.")
    if not ident.known:
        return not_applicable(CANNOT_TELL)
    differences: list[tuple[str, Witness]] = []
    elsewhere: list[str] = []
    figure: float | None = None
    if "coef" in expect:
        wanted = float(expect["coef"] or 0.0)
        applied = got.coef if got.has_z and got.coef is not None else 0.0
        figure = applied / wanted if wanted else None
        slack = max(1e-3 * wanted, got.uncertainty.coef or 0.0)
        if ident.how == "rounded":
            # Noise of 16 bits moves the fitted λ by up to its share of the gradient; low_precision_source reports it.
            slack = max(slack, (got.uncertainty.unexplained or 0.0) * wanted)
        if abs(applied - wanted) > slack:
            ratio = applied / wanted if wanted > 0 else 0.0
            if wanted and not got.has_z and ident.trusted:
                elsewhere.append("The gradient holds no Z to compare: see zero_gradient_z.")
            elif round(ratio) >= 2 and abs(ratio - round(ratio)) < 1e-2 * ratio:
                elsewhere.append("λ is a whole multiple of the expected one: see counted_twice.")
            else:
                witness = e.witness("λ", applied, wanted, noise=got.uncertainty.coef)
                differences.append((f"λ is {applied:.5g}, not {wanted:.5g}", witness))
    if "target" in expect and got.has_z and got.target is not None and got.vocab:
        # None is log V, as everywhere in this package.
        c = math.log(got.vocab) if expect["target"] is None else float(expect["target"])
        witness = e.witness(f"c at V = {got.vocab}", got.target, c, noise=got.uncertainty.target)
        if abs(got.target - c) > max(1e-3, got.uncertainty.target or 0.0):
            follows = expect["target"] is not None and got.target_rule == "log_v"
            # A c that follows V was measured at the V of the probe, which is not the user's.
            hint = f" (it follows log V, and V is {got.vocab} here: where log V is meant, pass `expect={{'target': 'log_v'}}`)"
            differences.append((f"c is {got.target:.5g}, not {c:.5g}{hint if follows else ''}", witness))
        elif expect["target"] is None and got.target_rule not in (None, "log_v"):
            differences.append(("c does not follow log V", witness))
    if not got.has_z and "coef" not in expect and {"target", "coordinate"} & expect.keys():
        elsewhere.append("The gradient holds no Z to compare. Pass `expect={'coef': λ}` if you believe there is one.")
    if "target" in expect and got.has_z and got.target is None:
        elsewhere.append("The penalty has no c to compare.")
    if "coordinate" in expect and got.has_z and got.coordinate != expect["coordinate"]:
        words = f"the coordinate is {got.coordinate!r}, not {expect['coordinate']!r}"
        differences.append((words, e.witness("λ in the expected coordinate", 0.0, got.coef)))
    smoothing = got.label_smoothing or 0.0
    if "label_smoothing" in expect and abs(smoothing - float(expect["label_smoothing"] or 0.0)) > 1e-3:
        witness = e.witness("label smoothing", smoothing, float(expect["label_smoothing"] or 0.0))
        differences.append((f"label smoothing is {smoothing:.4g}, not {expect['label_smoothing']}", witness))
    if not {"coef", "target", "coordinate", "label_smoothing"} & expect.keys():
        return not_applicable("Only denominators were expected: see denominator_mismatch.")
    if differences:
        return found(f"Not as expected: {'; '.join(words for words, _ in differences)}.", figure, differences[0][1])
    if elsewhere:
        return not_applicable(" ".join(elsewhere), figure)
    return passed("What it applies is what was expected.", figure)


REPEATS = 32
"""Calls of one batch, each under another random seed: whatever happens on every n-th call shows up to n = 32."""


@finding("warning", repeat=False)
def not_repeatable(e: Evidence) -> Answer:
    """Does the same call give the same answer, whatever the random state and whatever was called before?

    Put last: it asks whether the calls in between have left a trace.
    """
    ident, (probe, first), (loud, loudest) = e.ident, e.mixed, e.loudest
    tolerance = max(1e-5, 8 * ident.eps)
    quantity = "relative change between two calls with the same inputs"
    if ident.kept_state is not None:
        return found(ident.kept_state, None, e.witness(quantity, None, noise=tolerance, on=loud))
    again, louder = e.attempt(probe), e.attempt(loud)
    if isinstance(again, str):
        words = f"A call that worked at first fails after {e.box.calls} calls: {again}"
        return found(words, None, e.witness(quantity, None, noise=tolerance))
    drift = max(difference(first, again), 0.0 if isinstance(louder, str) else difference(loudest, louder))
    if not drift <= tolerance:
        return found(
            f"The same inputs give another answer after {e.box.calls} calls (relative change {drift:.3g}): "
            "the loss keeps state, and what was identified holds for one moment of it.",
            drift,
            e.witness(quantity, drift, noise=tolerance, on=loud),
        )
    reseeded = e.attempt(probe, seed=e.draw.seed + 12345)
    if isinstance(reseeded, str):
        words = f"The same call fails under another random seed: {reseeded}"
        return found(words, None, e.witness(quantity, None, noise=tolerance))
    noise = difference(first, reseeded)
    if not noise <= tolerance:
        words = f"The loss draws random numbers: another seed changes it by {noise:.3g} (dropout inside?)."
        return found(words, noise, e.witness(quantity, noise, noise=tolerance))

    def change(seed: int) -> float:
        now = e.box.value(loud.logits_TV, loud.target_T, ident.dtype, seed)
        return abs(now - loudest.value) / max(abs(loudest.value), 1e-12)

    for call in range(REPEATS):
        seed = e.draw.seed + 1000 + call
        changed = change(seed)
        if changed <= tolerance:
            continue
        # The same seed again tells chance from state.
        witness = e.witness(quantity, changed, noise=tolerance, on=loud)
        if abs(change(seed) - changed) <= tolerance * max(1.0, changed):
            words = f"The loss draws random numbers: one seed in {call + 1} changes it by {changed:.3g}."
            return found(words, changed, witness)
        return found(
            f"One of {call + 1} calls with the same inputs gives another value (relative change {changed:.3g}): the loss keeps "
            "state, or uses a generator that the audit cannot seed.",
            changed,
            witness,
        )
    return passed(f"The same inputs give the same value in {REPEATS} calls, and the same gradient.", max(drift, noise))
