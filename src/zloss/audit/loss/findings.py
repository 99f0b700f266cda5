"""The checks of a loss. Each is one function: its id (the name), severity, measurement, sentence and witness.

Each check is measured on the draw in `evidence.draw`. `answer_all` runs every check on the first draw, and every error and
warning again on the second, independent one: a finding that the second draw does not reproduce is not reported. Remedies
are in `REMEDIES` (`decide/stages.py`), which the decision map reads without torch. The module is long because there are
many checks; each can be read on its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from zloss.audit.loss.calls import BlackBox, LossCallError, Outcome, dtype_name
from zloss.audit.loss.identify import (
    Draw,
    Identification,
    Weights,
    identify,
    straight_line,
    unrepeatable,
    weigh,
    weigh_batches,
)
from zloss.audit.loss.model_tokens import audited_probe, beyond_rounding, bf16_input_error, measure_source
from zloss.audit.loss.probes import Probe, draw, seeded
from zloss.audit.loss.returned import Returned, recognize, reported_z
from zloss.audit.loss.sizes import SizeTried, try_sizes
from zloss.audit.loss.source import NOT_SQUARED, PROBABILITIES, UNIT, decompose, relative_error, token_count
from zloss.decide.stages import REMEDIES
from zloss.results.loss_audit import Finding, Severity, SourceError, Witness

NO_Z = "The loss has no Z."
UNSTABLE = "The same inputs give different results, so calls cannot be compared: see not_repeatable."
CANNOT_TELL = "What the loss applies could not be identified: see unexplained_source."
Need = Literal["anything", "stable", "determined", "known", "z", "z numbers"]
"""What a check requires: calls that repeat; `has_z` determined; its numbers too; a Z; a Z with its numbers."""


@dataclass(frozen=True)
class Evidence:
    """Inputs of every check, and what is measured for several of them. `off` and `per_token` are None if not given."""

    box: BlackBox
    off: BlackBox | None
    per_token: BlackBox | None
    expect: dict[str, Any]
    ident: Identification
    draw: Draw
    """The current draw."""
    audited: tuple[Tensor | None, Tensor | None] = (None, None)
    """Logits and targets of the caller, where the source is measured; these are not drawn again."""
    thorough: bool = False
    differing: tuple[SizeTried, ...] | None = None
    """On the second draw: the sizes at which the first one showed a different objective."""
    stable: bool = True
    """False if the same inputs gave a different result: then calls cannot be compared with each other."""

    def again(self, second: Draw) -> Evidence:
        """The same checks on the second draw."""
        return replace(self, draw=second, differing=tuple(one for one in self.reach if one.verdict == "differs"))

    @property
    def mixed(self) -> tuple[Probe, Outcome]:
        return self.draw.probes["mixed"], self.draw.outcomes["mixed"]

    @property
    def loudest(self) -> tuple[Probe, Outcome]:
        """The batch on which Z outweighs cross-entropy, if the loss is finite on it."""
        name = "wide" if "wide" in self.draw.outcomes else "mixed"
        return self.draw.probes[name], self.draw.outcomes[name]

    @cached_property
    def weights(self) -> tuple[Weights, ...]:
        """The weights on CE and Z in batches of several sizes and masks."""
        if self.draw is self.ident.first or not self.ident.known:
            return self.ident.weights
        return weigh_batches(self.box, self.ident, self.draw.seed)[0]

    @cached_property
    def source(self) -> tuple[SourceError, float]:
        """The applied source against fp64 on the audited logits, and the `delta_src` that rounding alone can cause there."""
        if not self.stable:
            return SourceError(None, None, None, reason="the loss is not repeatable"), 0.0
        probe, dtype = audited_probe(self.ident, *self.audited, self.box.ignore_index, self.draw.seed)
        source, floor = measure_source(self.box, self.off, self.ident, probe, dtype)
        return replace(source, bf16_inputs=bf16_input_error(self.box, self.ident, self.draw.seed)), floor

    @cached_property
    def reach(self) -> tuple[SizeTried, ...]:
        """What other sizes gave. A source that is rounded here is rounded at every size."""
        if not self.stable or beyond_rounding(*self.source):
            return ()
        return try_sizes(self.box, self.ident, self.draw.seed, thorough=self.thorough, only=self.differing)

    @cached_property
    def returned(self) -> tuple[Returned, ...]:
        """What the function returns in addition to the loss."""
        reported = self.draw.outcomes["mixed"].reported
        masked: tuple[Probe, Outcome] | None = None
        if reported and self.ident.masks_predicted:
            probe = draw("half ignored", self.ident.space, self.draw.seed)
            masked = None if (outcome := self.box.attempt(probe)) is None else (probe, outcome)
        target = self.expect.get("target")
        return tuple(recognize(name, self.ident, self.draw, target, masked) for name in reported)

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
        probe = on or self.draw.probes["mixed"]
        sizes = [abs(x) for x in (measured, expected) if x is not None and math.isfinite(x)]
        rounding = self.ident.eps * max(sizes, default=0.0) if noise is None else noise
        shape, dtype = shape or tuple(probe.logits_TV.shape), dtype or dtype_name(self.box.dtype)
        return Witness(shape, dtype, probe.seed, expected, measured, rounding, probe.name, quantity)


@dataclass(frozen=True)
class Check:
    """A registered check."""

    id: str
    severity: Severity
    needs: Need
    measure: Callable[[Evidence], Finding]
    repeat: bool
    """Whether a second draw has to show it too; False for open answers and facts about a single call."""

    def answer(self, evidence: Evidence) -> Finding:
        lacking = _lacking(evidence, self.needs)
        try:
            answer = self.measure(evidence) if lacking is None else not_applicable(lacking)
        except LossCallError as error:
            answer = not_applicable(f"This could not be tried: {error}")
        return replace(answer, id=self.id, severity=self.severity if answer.verdict == "finding" else None)


def _lacking(e: Evidence, needs: Need) -> str | None:
    """Why a check does not apply; None if it does."""
    if needs in ("anything", "stable"):
        return None if e.stable or needs == "anything" else UNSTABLE
    has_z = e.ident.identified.has_z
    if has_z is None or (needs in ("known", "z numbers") and has_z and not e.ident.known):
        return CANNOT_TELL
    return NO_Z if needs.startswith("z") and not has_z else None


FINDINGS: dict[str, Check] = {}

Measure = Callable[[Evidence], Finding]


def finding(severity: Severity, needs: Need = "anything", *, repeat: bool = True) -> Callable[[Measure], Measure]:
    """Register the decorated function under its name, for which the decision map has a remedy."""

    def register(measure: Measure) -> Measure:
        id = measure.__name__
        assert id in REMEDIES, f"give {id} a remedy in REMEDIES of decide/stages.py"
        FINDINGS[id] = Check(id, severity, needs, measure, repeat)
        return measure

    return register


def passed(sentence: str, figure: float | None = None) -> Finding:
    return Finding("", "pass", sentence, figure)


def found(sentence: str, figure: float | None, witness: Witness | None) -> Finding:
    return Finding("", "finding", sentence, figure, witness=witness)


def not_applicable(sentence: str, figure: float | None = None) -> Finding:
    return Finding("", "not_applicable", sentence, figure)


def answer_all(evidence: Evidence) -> tuple[Finding, ...]:
    """Run every check, errors and warnings on two draws.

    One that the second draw does not show is unexplained: its check has no result, and its figure is stated there.
    """
    findings = {id: check.answer(evidence) for id, check in FINDINGS.items()}
    doubted = [id for id, one in findings.items() if one.severity in ("error", "warning") and FINDINGS[id].repeat]
    second = evidence.ident.second
    if not doubted or second is None or "mixed" not in second.outcomes:
        return tuple(findings.values())
    again = evidence.again(second)
    seen = {id: FINDINGS[id].answer(again) for id in doubted}
    lost = {id: one for id, one in seen.items() if one.verdict != "finding"}
    if "size_dependent" in seen.keys() - lost.keys():
        # Only the sizes that differ on both draws are named.
        findings["size_dependent"] = seen["size_dependent"]
    for id in lost:
        if id in ("size_dependent", "denominator_mismatch"):
            continue
        # The same check on the same draw: a different result now comes from state, not from the draw.
        if FINDINGS[id].answer(replace(evidence)).verdict != "finding":
            one = findings[id]
            why = f"The same check gives a different result when it is repeated ({id}: “{one.sentence}”): the loss keeps state."
            findings["not_repeatable"] = Finding("not_repeatable", "finding", why, one.figure, "warning", one.witness)
            return tuple(findings.values())
    if lost:
        both = [
            f"{id}: on the first “{findings[id].sentence}”, on the second “{one.sentence}”" for id, one in lost.items()
        ]
        plain, first = findings["unexplained_source"], findings[next(iter(lost))]
        before = f"{plain.sentence} " if plain.verdict == "finding" else ""
        sentence = f"{before}Two draws of the probes disagree. {'; '.join(both)}"
        findings["unexplained_source"] = Finding(
            "unexplained_source", "finding", sentence, None, "warning", plain.witness or first.witness
        )
        why = "Seen on one draw of the probes and not on a second: see unexplained_source."
        findings |= {id: Finding(id, "not_applicable", why, findings[id].figure) for id in lost}
    return tuple(findings.values())


# Value and gradient.


@finding("error", "determined")
def zero_gradient_z(e: Evidence) -> Finding:
    """Is there a Z in the value that never reaches the gradient (detached logits, Z of log-probabilities)?"""
    if e.ident.identified.has_z:
        return passed("The gradient contains the Z term.")
    if not e.ident.trusted:
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
        words = f"A Z with λ = {float(coef):.3g} was expected, but neither value nor gradient contains one."
        return found(words, 0.0, e.witness("λ", 0.0, float(coef)))
    return not_applicable(
        "Neither value nor gradient contains a Z; pass `expect={'coef': λ}` if you believe there is one."
    )


FACTOR_LIMIT = 5e-2
"""A factor on Z or CE with 16-bit logits that rounding of the gradient to 16 bits does not explain."""
BF16_STORED = 5e-3
"""Error of dW on bf16 inputs that only bf16 logits explain. A note, not an error: it only happens with bf16 inputs."""


@finding("error")
def low_precision_source(e: Evidence) -> Finding:
    """Is the source computed from rounded logits, or in 16-bit arithmetic?"""
    ident, (source, floor) = e.ident, e.source
    continuous = draw("continuous", ident.space, e.draw.seed)
    if ident.identified.computes_in in ("bfloat16", "float16"):
        return found(
            f"Its gradients hold only {ident.identified.computes_in} values although the logits had more precision: the loss "
            "computes in 16 bits.",
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
    if beyond_rounding(source, floor):
        shape = (source.tokens, ident.identified.vocab or ident.space.width)
        words = "Δ_src, ‖applied − fp64‖ / ‖fp64‖"
        return found(
            f"On {source.dtype} logits the source is off by Δ_src = {source.delta_src:.3g} from fp64 "
            f"(total gradient {source.delta_total:.3g}), far beyond fp32 rounding: logits or statistics are rounded.",
            source.delta_src,
            e.witness(words, source.delta_src, on=continuous, noise=floor, dtype=source.dtype, shape=shape),
        )
    if (other := _in_16_bits(e)) is not None:
        return other
    note = f"; rounding of the whole gradient alone could cause up to {floor:.2g}" if floor > 1e-3 else ""
    if source.bf16_inputs is not None:
        stored = " (it stores bf16 logits)" if source.bf16_inputs > BF16_STORED else ""
        note += f"; with bf16 hidden and weight its dW is off by {source.bf16_inputs:.2g}{stored}"
    return passed(f"Δ_src = {source.delta_src:.3g} against fp64 on {source.dtype} logits{note}.", source.delta_src)


def _in_16_bits(e: Evidence) -> Finding | None:
    """A finding if the loss applies a different objective to 16-bit logits, as under mixed precision.

    Read from saturated rows, which 16 bits hold exactly. Where the target is the largest logit, only Z has a gradient.
    """
    ident, got, model = e.ident, e.ident.identified, e.ident.model
    known = not got.has_z or got.coordinate in ("raw", "centered")
    unusual = not model.warp.identity or got.label_smoothing or "confident" not in e.draw.outcomes
    if not known or not ident.plain or unusual:
        return None
    silent, loud, wide = e.draw.probes["confident"], e.draw.probes["mixed"], dtype_name(e.box.dtype)
    z_TV = model.z_source(silent)[silent.saturated_T]
    for dtype in (torch.bfloat16, torch.float16):
        name, alone, both = dtype_name(dtype), e.box.attempt(silent, dtype), e.box.attempt(loud, dtype)
        if alone is None or both is None:
            continue
        seen_TV = alone.grad_TV[silent.saturated_T]
        # A kernel that forms 1 + 2λ(log Z − c) in 16 bits rounds every row by a unit of the weight on CE.
        noise = UNIT[name] * model.ce_weight(silent) * math.sqrt(len(z_TV))
        limit = max(FACTOR_LIMIT, 8 * noise / max(float(z_TV.norm()), 1e-300))
        # Below its normal range fp16 holds few digits.
        readable = got.has_z and limit < 0.5 and (dtype == torch.bfloat16 or float(z_TV.abs().max()) > 2.0**-18)
        z = _along(seen_TV, z_TV) if readable else 1.0
        left_TV = (both.grad_TV - z * model.z_source(loud))[loud.saturated_T]
        ce = _along(left_TV, model.ce_source(loud)[loud.saturated_T])
        if abs(z - 1) > limit or abs(ce - 1) > FACTOR_LIMIT:
            of_z = f"λ is {z:.3g} times and " if readable else ""
            worse, on = (z, silent) if abs(z - 1) > limit else (ce, loud)
            witness = e.witness(f"weight relative to {wide}", worse, 1.0, on=on, noise=UNIT[name], dtype=name)
            words = f"With {name} logits {of_z}the weight on CE is {ce:.3g} times what it is with {wide} logits."
            return found(words, z, witness)
    return None


def _along(seen: Tensor, wanted: Tensor) -> float:
    """The factor k for which k · wanted is nearest to what was seen; 1 where nothing is wanted."""
    size = float((wanted * wanted).sum())
    return float((seen * wanted).sum()) / size if size else 1.0


TOLERANCE = 3e-3
"""Mismatch between scalar and gradient above which there is a finding."""


@finding("error", "stable")
def forward_backward_mismatch(e: Evidence) -> Finding:
    """Is the gradient the derivative of the scalar? Finite differences, the value itself, and hidden against weight."""
    ident = e.ident
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
    worst = max(slopes(e), key=lambda slope: slope.mismatch, default=None)
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
        return not_applicable("No finite difference of the scalar exceeds its rounding error.")
    return passed("Finite differences of the scalar agree with the gradient.", worst.mismatch)


def _hidden_against_weight(e: Evidence) -> float:
    """dh must be δ·W with the δ read from dW."""
    probe, outcome = e.mixed
    if outcome.hidden_grad_TT is None:
        return 0.0
    return relative_error(outcome.hidden_grad_TT, outcome.grad_TV @ probe.logits_TV.T)


class Slope(NamedTuple):
    """One direction: the relative mismatch beyond rounding of the scalar's own derivative and the gradient's."""

    mismatch: float
    scalar: float
    gradient: float
    rounding: float
    words: str
    probe: Probe


def slopes(e: Evidence) -> Iterator[Slope]:
    """The better of two steps in every direction: a kink within the larger step, such as that of a clamp, shows only there.

    A third one decides where both disagree and the scalar is fine enough: the kinks of a top-k selection lie between tokens of
    nearly the same loss.
    """
    for words, probe, outcome, direction, step in _directions(e):
        ways = [_slope(e, words, probe, outcome, direction, k * step) for k in (1.0, 1 / 16)]
        seen = [slope for slope in ways if slope is not None]
        if seen and min(slope.mismatch for slope in seen) > TOLERANCE:
            finest = _slope(e, words, probe, outcome, direction, step / 256)
            seen += [] if finest is None else [finest]
        if seen:
            yield min(seen, key=lambda slope: slope.mismatch)


def _directions(e: Evidence) -> Iterator[tuple[str, Probe, Outcome, Tensor, float]]:
    """(words, batch, answer to it, direction, step) of every finite difference.

    Ordinary logits along the gradient, at random and along a shift; saturated ones along a shift and the top logit.
    Cross-entropy is invariant to a common shift, so along it even a tiny Z stands out; and λ(log Z − c)² is quadratic in the
    shift, so central differences are exact at steps far above rounding.
    """
    ident = e.ident
    # Large steps presume a quadratic. Where the penalty is not one, stay local, and off the grid where kinks would lie.
    fixed = any(penalty.quantity.fixed for penalty in ident.model.penalties)
    quadratic = ident.trusted and not fixed and ident.model.warp.identity
    at = {name: (e.draw.probes[name], outcome) for name, outcome in e.draw.outcomes.items() if name != "crowded"}
    if not quadratic:
        moved = {name: probe.shifted(0.13) for name, (probe, _) in at.items()}
        at = {name: (probe, answer) for name, probe in moved.items() if (answer := e.box.attempt(probe)) is not None}
    if "mixed" not in at:
        return
    probe, outcome = at["mixed"]
    # A tied maximum has no derivative for losses that use it; 2 · 0.05 both ways cannot bridge the 0.25 of the grid.
    smooth = ((probe.inside_TV == probe.max_T.unsqueeze(-1)).sum(-1) == 1).unsqueeze(-1)
    local = [("its own gradient", probe, outcome, outcome.grad_TV)]
    masked = probe.masked(torch.arange(len(probe.target_T)) % 3 > 0)
    if ident.masks_accepted and (answer := e.box.attempt(masked)) is not None:
        # Value and gradient may have different denominators.
        local.append(("its own gradient, with tokens ignored", masked, answer, answer.grad_TV))
    random = torch.randn(probe.logits_TV.shape, generator=seeded(e.draw.seed + 2), dtype=torch.float64)
    local.append(("a random direction", probe, outcome, random))
    for words, on, answer, way in local:
        if largest := float((smooth * way).abs().max()):
            yield words, on, answer, smooth * way / largest, 0.05
    for name, (probe, outcome) in at.items():
        step = (32.0 if name == "wide" else 4.0) if quadratic and name != "confident" else 0.05
        shift = probe.widen(torch.ones_like(probe.inside_TV))
        yield "a common shift of the logits", probe, outcome, shift, step
        if name in ("saturated", "wide"):
            yield "the largest logit", probe, outcome, probe.argmax_TV(split=False), step / 2


def _slope(e: Evidence, words: str, probe: Probe, outcome: Outcome, direction: Tensor, step: float) -> Slope | None:
    """The derivative along one direction; None if the scalar cannot be read finely enough."""
    try:
        low2, low1, high1, high2 = values = [
            e.box.value(probe.logits_TV + k * step * direction, probe.target_T) for k in (-2, -1, 1, 2)
        ]
    except LossCallError:
        return None
    if not all(abs(value) < math.inf for value in values):
        return None
    scalar = (8 * (high1 - low1) - (high2 - low2)) / (12 * step)
    gradient = float((outcome.grad_TV * direction).sum())
    unit = _scalar_unit(e, outcome)
    # A constant may have been taken off the scalar: its terms are as large as gradient times logits.
    terms = float((outcome.grad_TV * probe.logits_TV).abs().sum())
    rounding = 16 * unit * max(terms, *(abs(value) for value in values)) / step
    # The gradient is rounded too: where CE cancels along the direction, what is left of it is noise of this size.
    rounding += 2 * unit * float((probe.noise_T * (outcome.grad_TV * direction).abs().sum(-1)).sum())
    scale = max(abs(scalar), abs(gradient))
    # Rounding that hides half of the slope says nothing about it.
    if step < 0.05 and rounding > 1e-3 * scale:
        return None
    beyond = max(abs(scalar - gradient) - rounding, 0.0)
    return Slope(beyond / scale if scale else 0.0, scalar, gradient, rounding, words, probe)


def _scalar_unit(e: Evidence, outcome: Outcome) -> float:
    """The scalar may come back in a narrower format than it, or the gradient, was computed in."""
    return max(e.ident.eps, UNIT.get(dtype_name(outcome.dtype), 0.0))


def _value_offset(e: Evidence) -> tuple[float, Witness] | None:
    """How far the scalar is from the value of the identified objective, where that is largest; None within rounding.

    With label smoothing a constant is part of the objective: t5x subtracts the entropy of its target, as does a KL divergence.
    """
    wanted = {name: e.ident.model.value(e.draw.probes[name]) for name in e.draw.outcomes}
    off = {name: outcome.value - wanted[name] for name, outcome in e.draw.outcomes.items()}
    slack = {
        name: 1e-4 * (1 + abs(wanted[name])) * max(1.0, _scalar_unit(e, outcome) / 2**-24)
        for name, outcome in e.draw.outcomes.items()
    }
    constant = off["mixed"] if e.ident.model.smoothing else 0.0
    beyond = [name for name in off if abs(off[name] - constant) > slack[name]]
    if not beyond:
        return None
    name = max(beyond, key=lambda name: abs(off[name]) / slack[name])
    value = e.draw.outcomes[name].value
    return off[name], e.witness("value of the loss", value, wanted[name], on=e.draw.probes[name], noise=slack[name])


@finding("warning")
def all_ignored_nonfinite(e: Evidence) -> Finding:
    """Does a batch whose tokens are all ignored stay finite? And is an infinite logit of an ignored token kept out of the
    loss?"""
    probe, _ = e.mixed
    tokens = len(probe.target_T)
    some = e.box(probe.masked(torch.arange(tokens) % 2 == 0))
    empty = draw("all ignored", e.ident.space, e.draw.seed)
    witness = e.witness("value of the loss with every token ignored", None, 0.0, noise=0.0, on=empty)
    try:
        outcome = e.box(empty)
    except LossCallError as error:
        return found(f"A batch whose tokens are all ignored fails: {error}", None, witness)
    if not outcome.finite:
        what = "loss" if not math.isfinite(outcome.value) else "gradient"
        return found(f"A batch whose tokens are all ignored gives a non-finite {what} (0/0).", None, witness)
    if not bool(some.grad_TV[1::2].any()) and not e.box.linear:
        # With hidden and weight an infinite logit cannot be given to one token alone.
        logits, keep = probe.logits_TV.clone(), torch.arange(tokens) != 1
        logits[1, 0] = math.inf
        try:
            leak = e.box(replace(probe, logits_TV=logits).masked(keep))
        except LossCallError as error:
            return passed(f"All-ignored batches give a finite loss; infinite logits could not be tried: {error}")
        # The ignored row's own gradient is not looked at: PyTorch's cross_entropy leaves NaN there.
        if not (math.isfinite(leak.value) and bool(torch.isfinite(leak.grad_TV[keep]).all())):
            return found(
                "An infinite logit of an ignored token makes the loss non-finite: the mask multiplies (inf · 0).",
                None,
                replace(witness, quantity="value of the loss with an infinite logit at ignored token 1"),
            )
    return passed(f"All-ignored batches give a finite loss ({outcome.value:.3g}).", outcome.value)


# Denominators and coordinates.


@finding("error", "known")
def denominator_mismatch(e: Evidence) -> Finding:
    """Are CE and Z divided by the same token count? λ relative to CE must not change with batch size or mask."""
    ident, named, both = e.ident, e.ident.identified, e.expect.get("denominator")
    for part, wanted, got in (
        ("CE", e.expect.get("ce_denominator", both), named.ce_denominator),
        ("Z", e.expect.get("z_denominator", both), named.z_denominator),
    ):
        if part == "Z" and not named.has_z:
            return not_applicable(NO_Z)
        if wanted is not None and wanted != got:
            w = next((w for w in e.weights if w.valid < w.tokens), e.weights[0])
            scale = (ident.model.penalties[0].coef if part == "Z" else ident.model.ce_scale) or 1.0
            expected = scale / max(token_count(wanted, w.valid, w.tokens), 1.0)
            words = f"weight on the {part} of one token with {w.valid} of {w.tokens} tokens valid"
            witness = e.witness(words, w.z if part == "Z" else w.ce, expected, shape=(w.tokens, ident.space.width))
            return found(f"{part} is divided by {got!r}, but {wanted!r} was expected.", None, witness)
    if ident.special:
        others = ", ".join(str(one.index) for one in ident.special)
        return not_applicable(f"CE has class weights (class {others}), so the two denominators cannot be compared.")
    if named.ce_weights in ("class", "position", "token"):
        # Token weights differ by design; what can be compared are the counts behind the two means.
        kind = WEIGHTS[named.ce_weights].removeprefix("with ")
        if named.z_weights == "shared":
            return passed(f"CE is computed with {kind}, and Z shares them.")
        if named.ce_denominator == named.z_denominator != "other":
            count = COUNT_WORDS[named.ce_denominator]
            return passed(f"CE is computed with {kind}, Z without; both are divided by {count}.")
        return not_applicable(f"CE is computed with {kind} and Z without, so their denominators cannot be compared.")
    if any(w.misplaced for w in e.weights):
        return not_applicable("Ignored tokens are trained and valid ones are not: see ignored_tokens_leak.")
    ratios = [(w.z / w.ce, w) for w in e.weights if w.ce]
    if not ratios or named.ce_denominator == "none":
        return not_applicable("No cross-entropy was found next to the Z.")
    if len(ratios) < 2:
        return not_applicable("The loss accepts one size and no mask, so denominators cannot be distinguished.")
    (low, few), (high, many) = min(ratios, key=lambda x: abs(x[0])), max(ratios, key=lambda x: abs(x[0]))
    change = abs(high / low) if low else math.inf
    if change > 1 + max(1e-2, 16 * ident.eps, 8 * max(w.slack for w in e.weights)):
        span = ", ".join(f"{w.valid} of {w.tokens} valid" for w in e.weights[:3])
        words = f"λ relative to CE with {many.valid} of {many.tokens} tokens valid, against {few.valid} of {few.tokens}"
        witness = e.witness(words, high, low, shape=(many.tokens, ident.space.width))
        return found(
            f"CE is divided by {COUNT_WORDS[named.ce_denominator]}, Z by {COUNT_WORDS[named.z_denominator or 'other']}: "
            f"λ relative to the weight on CE changes by a factor of {change:.3g} between batches with {span}.",
            change,
            _masked_witness(e) or witness,
        )
    if not ident.masks_accepted:
        return passed(
            "CE and Z share one denominator; the loss rejects ignored targets, so only batch sizes were varied."
        )
    if named.ce_weights == "groups":
        return passed("Groups of tokens are averaged, then their means; CE and Z share these weights.", change)
    return passed(f"CE and Z share one denominator: {COUNT_WORDS[named.ce_denominator]}.", change)


def _masked_witness(e: Evidence) -> Witness | None:
    """λ relative to CE where half of the tokens are ignored, against the same batch without a mask; None if they are equal."""
    half, (probe, whole) = draw("half ignored", e.ident.space, e.draw.seed), e.mixed
    if (outcome := e.box.attempt(half)) is None:
        return None
    masked = weigh(e.ident, probe, half.valid_T, outcome.grad_TV)
    plain = weigh(e.ident, probe, torch.ones_like(half.valid_T), whole.grad_TV)
    if not (masked.ce and plain.ce) or math.isclose(masked.z / masked.ce, plain.z / plain.ce, rel_tol=1e-2):
        return None
    words = f"λ relative to CE with {masked.valid} of {masked.tokens} tokens valid, against all of them"
    return e.witness(words, masked.z / masked.ce, plain.z / plain.ce, on=half)


COUNT_WORDS = {
    "valid": "the valid tokens",
    "all": "all tokens",
    "mean": "the tokens",
    "sum": "1 (a sum)",
    "other": "an unknown count",
    "valid+1": "the valid tokens plus 1",
    "all+1": "all tokens plus 1",
    "mean+1": "the tokens plus 1",
    "valid-1": "the valid tokens less 1",
    "mean-1": "the tokens less 1",
    "sqrt_valid": "the square root of the valid tokens",
    "sqrt_all": "the square root of all tokens",
    "sqrt_mean": "the square root of the tokens",
}


@finding("error", "z numbers")
def max_shifted(e: Evidence) -> Finding:
    """Is log Z taken after subtracting the row maximum, and never restored?"""
    if e.ident.identified.coordinate != "max_shifted":
        return passed("The row maximum is not left out of log Z.")
    probe, outcome = e.mixed
    moved = e.box(probe.shifted(8.0))
    change = abs(float((moved.grad_TV - outcome.grad_TV).sum()))
    coef, model = e.ident.identified.coef or 0.0, e.ident.model
    wanted = abs(2 * coef * 8.0 * len(probe.target_T) / model.count(model.z_denominator or "sum", probe))
    return found(
        f"The penalized quantity is {e.ident.identified.penalty}: it is blind to a common shift of the logits, "
        "which is what Z-loss is meant to control. Add the row maximum back.",
        0.0,
        e.witness("change of the summed gradient when 8 is added to every logit", change, wanted),
    )


KEPT = 1e-6
"""The share of λ that counts as off."""


@finding("error")
def not_off(e: Evidence) -> Finding:
    """Is "off" off? The loss with its Z switched off must be cross-entropy."""
    if e.off is None:
        return not_applicable("Pass the same loss with its Z switched off as `off=`.")
    alone, on = identify(replace(e.off), e.ident.space, e.draw.seed).identified, e.ident.identified.coef
    if alone.has_z is None:
        return not_applicable(f"What the loss with Z off applies could not be identified. {alone.reason}")
    share = alone.coef / on if on and alone.coef is not None else None
    if not alone.has_z or (share is not None and abs(share) <= KEPT):
        return passed("With Z switched off the gradient is cross-entropy alone.", 0.0)
    words = f" ({abs(share):.3g} of the λ that is applied when on)" if share is not None else ""
    return found(
        f"With Z switched off the gradient still holds a Z{words}: off is not off.",
        alone.coef,
        e.witness("λ with Z off", alone.coef, 0.0, noise=alone.uncertainty.coef),
    )


@finding("error")
def counted_twice(e: Evidence) -> Finding:
    """Is the applied λ a whole multiple of the one the user set?"""
    expected, got = e.expect.get("coef"), e.ident.identified
    if not expected:
        return not_applicable("Pass `expect={'coef': λ, 'target': c}`: what you believe the loss applies.")
    if not got.has_z or got.coef is None:
        return not_applicable(_lacking(e, "z") or "The penalty was not identified, so its λ cannot be compared.")
    ratio = got.coef / float(expected)
    if (whole := _whole_multiple(ratio)) is None:
        return passed(f"λ is {ratio:.5g} times the expected one.", ratio)
    return found(
        f"λ = {got.coef:.5g} is {whole} times the expected {float(expected):.5g}: Z is added again.",
        ratio,
        e.witness("λ", got.coef, float(expected), noise=got.uncertainty.coef),
    )


def _whole_multiple(ratio: float) -> int | None:
    whole = round(ratio)
    return whole if whole >= 2 and abs(ratio - whole) < 1e-2 * whole else None


# Side effects and returned values.


@finding("warning", repeat=False)
def overwrites_input(e: Evidence) -> Finding:
    """Are the caller's tensors still what they were after forward and backward, in every dtype?"""
    probe, _ = e.mixed
    # Some losses rewrite only the targets they ignore; `float()` copies all but fp32.
    masked = probe.masked(torch.arange(len(probe.target_T)) % 2 == 0)
    changed = {(name, dtype_name(e.box.dtype)) for outcome in e.draw.outcomes.values() for name in outcome.overwritten}
    tried: list[str] = []
    for dtype in dict.fromkeys((e.box.dtype, torch.float32, torch.bfloat16, torch.float16)):
        for batch in (masked, probe):
            try:
                outcome = e.box(batch, dtype)
            except LossCallError:
                continue
            tried.append(dtype_name(dtype))
            changed |= {(name, tried[-1]) for name in outcome.overwritten}
            break
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
def reported_z_dtype(e: Evidence) -> Finding:
    """Is the reported Z rounded to 16 bits? Called with bf16 logits, as a mixed-precision model would."""
    probe, plain = e.mixed
    half = e.box.attempt(probe, torch.bfloat16)
    outcomes = [plain] if half is None else [plain, half]
    returned = "" if half is None else f" bf16 logits give a {dtype_name(half.dtype)} loss."
    z, narrow = reported_z(e.returned), (torch.bfloat16, torch.float16)
    bits = e.witness("bits of the value", 16.0, 32.0, noise=0.0)
    if plain.dtype in narrow:
        dtypes = f"{dtype_name(e.box.dtype)} logits give a {dtype_name(plain.dtype)} loss"
        return found(f"{dtypes}: the logged value has two or three digits.", 16.0, bits)
    if z is None:
        return not_applicable(f"The loss does not report Z separately.{returned}")
    for outcome in outcomes:
        item = outcome.reported.get(z.name)
        if item is not None and item.dtype in narrow:
            bits = replace(bits, dtype=bits.dtype if outcome is plain else "bfloat16", quantity=f"bits of `{z.name}`")
            return found(
                f"The reported Z is in {dtype_name(item.dtype)}, which has two or three digits.{returned}", 16.0, bits
            )
    return passed(f"The reported Z is at least fp32.{returned}")


@finding("error")
def reported_z_no_gradient(e: Evidence) -> Finding:
    """Does a reported Z that claims a gradient have one? Explicitly detached (`requires_grad` False) is fine."""
    z, (probe, outcome) = reported_z(e.returned), e.mixed
    if z is None:
        return not_applicable("The loss does not report Z separately.")
    if not outcome.reported[z.name].requires_grad:
        return passed("The reported Z is explicitly detached, so it cannot be trained on by mistake.")
    witness = e.witness(f"norm of the gradient of `{z.name}` at the logits", 0.0, float(outcome.grad_TV.norm()))
    try:
        norm = float(e.box(probe, through=z.name).grad_TV.norm())
    except LossCallError as error:
        return found(f"The reported Z requires a gradient, but backward through it fails: {error}", None, witness)
    if norm == 0.0:
        words = "The reported Z has `requires_grad`, but its gradient at the logits is silently zero."
        return found(words, 0.0, witness)
    return passed("The reported Z carries a gradient.", norm)


@finding("error")
def reported_z_value(e: Evidence) -> Finding:
    """Is the reported Z the one that is trained: λ Σ (v − c)²/D of the penalty that the gradient holds?"""
    ident, z = e.ident, reported_z(e.returned)
    if z is None:
        untrained = any(one.role == "z_not_trained" for one in e.returned)
        more = " A (log Z)² is returned, and the loss does not train it." if untrained else ""
        return not_applicable(f"The loss does not report Z separately.{more}")
    if not ident.known:
        return not_applicable(CANNOT_TELL)
    if not ident.trusted:
        return not_applicable("Token weights or the form of the penalty keep its value from being predicted.")
    values = [item.value for outcome in e.draw.outcomes.values() if (item := outcome.reported.get(z.name)) is not None]
    probe, outcome = e.mixed
    witness = e.witness(f"`{z.name}`", outcome.reported[z.name].value, ident.model.z_value(probe))
    if any(value is not None and not math.isfinite(value) for value in values):
        return found("The reported Z is not finite on ordinary logits.", None, witness)
    what = "the mean of (log Z − c)²" if z.role == "z_without_coef" else "the one that is trained"
    if z.masked is not None:
        reported, over_valid = z.masked
        quantity = f"`{z.name}` with tokens ignored"
        return found(
            f"The reported Z (`{z.name}`) is {what} only on batches without ignored tokens: with ignored tokens it is "
            f"{reported:.4g}, and {over_valid:.4g} over the tokens that are trained.",
            reported / over_valid if over_valid else None,
            replace(witness, measured=reported, expected=over_valid, probe="half ignored", quantity=quantity),
        )
    if z.role in ("z", "z_without_coef"):
        return passed(f"The reported Z (`{z.name}`) is {what}{' without its λ' * (z.role != 'z')}.", 1.0)
    if z.role == "z_multiple":
        ratio = z.ratio or 0.0
        return found(f"The reported Z (`{z.name}`) is {ratio:.4g} times the Z that is trained.", ratio, witness)
    if ident.identified.has_z:
        sentence = f"The value `{z.name}` is called a Z, but is neither the Z that is trained nor a multiple of it."
        return found(sentence, None, witness)
    if not any(values):
        return passed("The reported Z is 0, and none is trained.", 0.0)
    return found(f"A Z is reported (`{z.name}`), but the gradient contains none.", None, witness)


@finding("error", "stable")
def upstream_ignored(e: Evidence) -> Finding:
    """Do gradients honor what multiplies the loss? k·loss must give k·gradient, Σ u_t ℓ_t u_t times each row."""
    ident, (probe, outcome) = e.ident, e.mixed
    worst, tolerance = 0.0, 1e-2 if ident.how == "rounded" else max(1e-4, 8 * ident.eps)
    for factor in (3.0, -0.5):
        worst = max(worst, relative_error(e.box(probe, upstream=factor).grad_TV, factor * outcome.grad_TV))
    if not worst <= tolerance:
        words = f"k · loss does not give k · gradient (relative error {worst:.3g})."
        witness = e.witness("‖gradient of k·loss − k·gradient‖ / ‖k·gradient‖", worst, noise=tolerance)
        return found(words, worst, witness)
    if e.per_token is None:
        hint = "Pass its reduction='none' variant as `per_token=` to check that one too."
        return passed(f"k · loss gives k · gradient. {hint}", worst)
    upstream_T = 0.25 + torch.rand(len(probe.target_T), generator=seeded(e.draw.seed), dtype=torch.float64)
    upstream_T[::5] *= -1
    ones, given = (e.per_token(probe, upstream=u, per_token=True) for u in (torch.ones_like(upstream_T), upstream_T))
    wanted = upstream_T.unsqueeze(-1) * ones.grad_TV
    if not ones.has_gradient or not float(wanted.norm()) > 0:
        return found("The per-token variant has no gradient.", 1.0, e.witness("norm of its gradient", 0.0, None))
    error_T = relative_error(given.grad_TV, wanted)
    if not error_T <= tolerance:
        return found(
            f"The per-token variant does not honor per-token upstream gradients (relative error {error_T:.3g}).",
            error_T,
            e.witness("‖gradient of Σ u_t ℓ_t − u_t · gradient‖ / ‖u_t · gradient‖", error_T, noise=tolerance),
        )
    return passed("Upstream gradients are honored, per token too.", max(worst, error_T))


@finding("error", "z numbers")
def probabilities_not_logits(e: Evidence) -> Finding:
    """Is the logsumexp taken of probabilities instead of logits?"""
    if not set(e.ident.quantities) & set(PROBABILITIES):
        return passed("Z is not computed from probabilities.")
    r = e.mixed[0]
    penalized, log_z = (float(v.max() - v.min()) for v in (e.ident.quantities[0].value(r), r.log_z_T))
    return found(
        "Z is the logsumexp of the probabilities: it lies between log V and log(V + e − 1) whatever the logits "
        "are, and nothing constrains their normalizer. Pass the logits.",
        e.ident.identified.coef,
        e.witness("range of the penalized quantity over the batch, against that of log Z", penalized, log_z),
    )


@finding("error")
def overflow(e: Evidence) -> Finding:
    """Does a common shift of ±100 break it? (A naive log Σ exp overflows in fp32 at 89.)"""
    base, model = draw("continuous", e.ident.space, e.draw.seed), e.ident.model
    # Far out on a softcap the derivative itself is a difference that fp32 cannot hold.
    compared = e.ident.trusted and e.ident.how != "filtered" and model.warp.cap is None
    calm = e.box.attempt(base, torch.float32) if compared else None
    noise = math.inf if calm is None else relative_error(calm.grad_TV, model.source(base))
    for shift in (100.0, -100.0):
        words, probe = f"A common shift of {shift:+.0f}", base.shifted(shift)
        quantity = f"relative error of the gradient after a common shift of {shift:+.0f}"
        witness = e.witness(quantity, None, on=base, dtype="float32")
        try:
            outcome = e.box(probe, torch.float32)
        except LossCallError as error:
            return found(f"{words} fails: {error}", shift, witness)
        if not outcome.finite:
            return found(f"{words} makes loss or gradient non-finite in fp32.", shift, witness)
        if noise < 1e-3 and (off := relative_error(outcome.grad_TV, model.source(probe))) > 2e-2:
            witness = replace(witness, measured=off, noise=noise)
            return found(f"{words} leaves a gradient that is off by {off:.2g} (relative).", off, witness)
    if missing := sorted(set(e.draw.probes) - set(e.draw.outcomes)):
        witness = e.witness("value of the loss", None, None, on=e.draw.probes[missing[0]])
        return found("Logits of ±128 to 2048 make loss or gradient non-finite.", 2048.0, witness)
    if calm is None:
        return passed(
            "A common shift of ±100 leaves loss and gradient finite; there is nothing to compare them with.", 0.0
        )
    return passed("A common shift of ±100 leaves value and gradient correct.", 0.0)


@finding("error", "z numbers")
def filtered_source(e: Evidence) -> Finding:
    """Are small gradient entries, or confident tokens, set to zero and their Z source with them?"""
    ident, model = e.ident, e.ident.model
    if ident.how != "filtered":
        return passed("No entry of the Z source is missing.")
    rows, parts = [], e.draw.parts(*e.draw.outcomes)
    for probe, grad_TV in parts:
        z_TV = model.z_source(probe).abs()
        sigma_T = ident.eps * probe.noise_T * (model.ce_weight(probe) + z_TV.amax(-1))
        gone_TV = (grad_TV == 0) & (model.source(probe).abs() > 30 * sigma_T.unsqueeze(-1))
        rows.append((gone_TV, grad_TV != 0, z_TV, (probe.p_TV - probe.onehot_TV).abs(), probe.p_TV))
    gone_TV, kept_TV, z_TV, off_TV, p_TV = (torch.cat(column) for column in zip(*rows, strict=True))
    if not bool(gone_TV.any()):
        return passed("No entry of the Z source is missing.")
    worst = next(probe for (probe, _), (gone, *_) in zip(parts, rows, strict=True) if bool(gone.any()))
    share, cause = float(z_TV[gone_TV].sum() / z_TV.sum()), "what they have in common was not found"
    for key, value_TV, drops in (("p", p_TV, ""), ("|p − y|", off_TV, " This drops the Z of confident tokens")):
        highest, lowest = float(value_TV[gone_TV].max()), float(value_TV[kept_TV].min())
        if highest <= lowest:
            cause = f"entries with {key} up to {highest:.3g} are dropped, those from {lowest:.3g} on are kept.{drops}"
    if not bool(kept_TV.any(-1)[gone_TV.any(-1)].any()):
        cause = "whole rows are dropped"
    return found(
        f"Gradient entries come back exactly 0 where the Z source is not ({int(gone_TV.any(-1).sum())} probe tokens, "
        f"{share:.1%} of its mass): {cause}.",
        share,
        e.witness("share of the Z source whose entries are exactly 0", share, on=worst),
    )


@finding("error")
def padding_in_log_z(e: Evidence) -> Finding:
    """Do padding rows of the vocabulary enter log Z? Fill them differently, and cut them off: nothing may change.

    The whole batch is also moved down to −40, where lanes masked before a softcap come back above the real ones.
    """
    ident, lanes, width = e.ident, e.ident.space.lanes, e.ident.space.width
    if lanes == width:
        return not_applicable("If the vocabulary is padded, pass the number of real rows as `valid_vocab=`.")
    base, sizes = draw("continuous", ident.space, e.draw.seed), [(0.0, "")]
    for moved in (base, base.shifted(-40.0)):
        plain = e.box(moved)
        inside = plain.grad_TV[:, :lanes]
        others = {"lanes cut off": replace(moved, logits_TV=moved.inside_TV)}
        for fill in (0.0, 50.0):
            logits = moved.logits_TV.clone()
            logits[:, lanes:] = fill
            others[f"lanes at {fill:+.0f}"] = replace(moved, logits_TV=logits)
        for words, probe in others.items():
            try:
                outcome = e.box(probe)
            except LossCallError:
                continue
            value = abs(plain.value - outcome.value) / max(abs(plain.value), 1e-12)
            sizes.append((max(value, relative_error(outcome.grad_TV[:, :lanes], inside)), words))
            beyond = float(outcome.grad_TV[:, lanes:].norm()) / max(float(outcome.grad_TV.norm()), 1e-300)
            sizes.append((beyond, f"{words}, which receive a gradient"))
    # NaN counts as the largest.
    worst, where = max(sizes, key=lambda one: math.inf if math.isnan(one[0]) else one[0])
    if not worst <= max(1e-4, 16 * ident.eps):
        return found(
            f"Padding rows enter log Z: value or gradient moves by {worst:.3g} ({where}).",
            worst,
            e.witness(f"relative change of value or gradient ({where})", worst, on=base, noise=16 * ident.eps),
        )
    if len(sizes) == 1:
        return not_applicable("The loss accepts no other values in its padding rows, so nothing could be compared.")
    return passed(f"The {width - lanes} padding rows stay outside log Z.", worst)


# What the objective is.

WEIGHTS = {
    "class": "with class weights",
    "position": "with per-position weights",
    "token": "with a separate weight on each token",
    "groups": "averaged over groups of tokens first",
}


@finding("warning", repeat=False)
def unexplained_source(e: Evidence) -> Finding:
    """Is all of the gradient explained by CE and a known, correct penalty? If so, the objective in one sentence."""
    ident, got = e.ident, e.ident.identified
    if ident.how == "rounded":
        return not_applicable("What is left over behaves like rounding: see low_precision_source.")
    if not e.stable or ident.kept_state is not None:
        return not_applicable(
            "The same inputs give different results, which no objective explains: see not_repeatable."
        )
    share = ident.fit.worst if ident.fit is not None else float((~ident.rows.inside_T).double().mean())
    witness = e.witness("share of the gradient that no known objective explains", share or 1.0, noise=1e-3)
    if got.has_z is None:
        return found(f"What the loss applies could not be determined. {got.reason}", None, witness)
    if got.reason is not None:
        return found(
            f"There is a Z, but its numbers could not be determined. {got.reason}", None, _curve_witness(e) or witness
        )
    if NOT_SQUARED in ident.quantities:
        return not_applicable("The gradient is explained; its penalty is not squared: see not_squared.")
    if set(ident.quantities) & set(PROBABILITIES):
        return not_applicable(
            "The gradient is explained; Z is computed from probabilities: see probabilities_not_logits."
        )
    if unlike := [one for one in ident.special if not one.shares and one.z is not None and abs(one.z - 1) >= 1e-2]:
        witness = e.witness(f"Z of class {unlike[0].index} relative to the others", unlike[0].z, 1.0, noise=1e-3)
        return found(f"{_objective(ident)}, but {'; '.join(one.words for one in unlike)}.", None, witness)
    if "centered_coef" in got.extra:
        return found(
            f"There are two penalties: λ = {got.coef or 0.0:.5g} on log Z and λ = {got.extra['centered_coef']:.5g} on log Z − μ "
            "(row-centered). Together they act on log Z and on the shift μ with different strengths.",
            None,
            e.witness("λ on log Z − μ next to the one on log Z", got.extra["centered_coef"], 0.0),
        )
    if got.coordinate == "other" and not got.extra.keys() & {"shift_coef", "beta"}:
        words = f"The penalty is not one of the known correct ones: it acts on {got.penalty}."
        return found(words, None, e.witness("λ of that penalty", got.coef, 0.0))
    if got.target_rule == "other":
        witness = e.witness(f"c at V = {got.vocab}, against log V", got.target, math.log(got.vocab or 1))
        return found("c changes with the vocabulary, but not as log V plus a constant.", None, witness)
    note = " The loss takes its weight as [D, V]." if e.box.transposed else ""
    if ident.targets_unused:
        note = (
            " The function does not read its targets: if it is the Z-loss of a router, `zloss.audit_router(model, batches)` "
            "audits the routers of a model."
        )
    return passed(f"{_objective(ident)} explains the gradient.{note}", share)


def _curve_witness(e: Evidence) -> Witness | None:
    """The point of the measured curve that is furthest from the best line through it."""
    if not e.ident.identified.curve:
        return None
    v, s = torch.tensor(e.ident.identified.curve, dtype=torch.float64).unbind(-1)
    slope, level = straight_line(v, s, torch.ones_like(v))
    line = slope * v + level
    at = int((s - line).abs().argmax())
    words = f"coefficient of p at log Z = {float(v[at]):.5g}, against the best line"
    return e.witness(words, float(s[at]), float(line[at]))


def _objective(ident: Identification) -> str:
    got = ident.identified
    if got.ce_denominator == "none":
        return f"A penalty on {got.penalty} alone"
    words = ["Cross-entropy"]
    words += [f" of logits with {key} {got.extra[key]:.5g}" for key in ("logit_scale", "softcap") if key in got.extra]
    if got.label_smoothing:
        words.append(f" with label smoothing {got.label_smoothing:.4g}")
    if got.ce_weights in WEIGHTS:
        words.append(f" {WEIGHTS[got.ce_weights]}")
        words += [f" ({'; '.join(one.words for one in ident.special)})"] if ident.special else []
    elif got.ce_denominator != "other" and got.ce_scale is not None and abs(got.ce_scale - 1) > 1e-3:
        words.append(f", scaled by {got.ce_scale:.5g}")
    if got.has_z:
        shared = ", which shares these weights," if got.z_weights == "shared" else ""
        words.append(f" plus a penalty on {got.penalty}{shared}")
    return "".join(words)


@finding("error", "z numbers")
def not_squared(e: Evidence) -> Finding:
    """Is the square missing, λ·mean(log Z) instead of λ·mean((log Z − c)²)?"""
    if NOT_SQUARED not in e.ident.quantities:
        return passed("The penalty depends on log Z as it should: its source is not constant.")
    got, (probe, outcome) = e.ident.identified, e.loudest
    k_T = decompose([(probe, outcome.grad_TV)], e.ident.eps).k_T
    spread = float((k_T.max() - k_T.min()) / k_T.abs().max())
    return found(
        f"The penalty is {got.penalty}, with λ = {got.coef or 0.0:.5g}. Its source is the same at every log Z, so it "
        "drives log Z down without bound and has no target: square it.",
        got.coef,
        e.witness("relative spread of the Z source over tokens of different log Z", spread, 1.0, on=probe),
    )


@finding("error", "known")
def size_dependent(e: Evidence) -> Finding:
    """Does the loss apply the same objective to many tokens and to a large vocabulary?"""
    if not e.reach:
        return not_applicable(
            "Other sizes were not tried: the gradient is filtered, is in 16 bits, or has another form."
        )
    differs, same, refused, left_out = (
        [one for one in e.reach if one.verdict == verdict] for verdict in ("differs", "same", "refused", "left_out")
    )
    if differs:
        first, others = differs[0], len(differs) - 1
        more = f" The same happens at {others} other size{'s' * (others > 1)}." if others else ""
        witness = e.witness("largest relative error of a token's source", first.figure, shape=first.shape)
        witness = replace(witness, seed=e.draw.seed + 5)
        return found(f"At {first.words}: {first.sentence}.{more}", first.figure, witness)
    if not same:
        untried = "No other size was tried, to save time (`thorough=True` tries them)."
        return not_applicable("The loss accepts no other size." if refused else untried)
    notes = f" It rejects {len(refused)} sizes." if refused else ""
    if left_out:
        notes += f" Not tried, to save time: {'; '.join(one.words for one in left_out)} (`thorough=True`)."
    tokens, vocab = (max(one.shape[i] for one in same) for i in (0, 1))
    return passed(f"The same objective at {len(same)} other sizes, up to T = {tokens:,} and V = {vocab:,}.{notes}")


@finding("error", repeat=False)
def targets_moved(e: Evidence) -> Finding:
    """Is row t trained on its own target? Labels shifted inside are usual in models; rolled ones train the last row wrongly."""
    if e.box.targets == "rolled":
        tokens = float(e.ident.space.tokens)
        return found(
            "Targets look rolled by one: row t is trained on target t + 1 and the last row on target 0. Everything else was "
            "audited with the targets rolled back.",
            None,
            e.witness("rows that are trained on the target of the next row", tokens, 0.0, noise=0.0),
        )
    if e.box.targets == "shifted":
        return passed(
            "Targets look shifted by one: row t is trained on target t + 1 inside the loss, the last row on none. "
            "Everything else was audited with the targets moved accordingly."
        )
    if not e.ident.known:
        return not_applicable(CANNOT_TELL)
    if e.ident.identified.ce_denominator == "none":
        return not_applicable("There is no cross-entropy, so rows are not trained on targets.")
    return passed("Each row is trained on its own target.")


@finding("note")
def returned_values(e: Evidence) -> Finding:
    """What does the function return in addition to the loss? A Z that the caller has to add is worth a note."""
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


@finding("error", "z")
def negative_coefficient(e: Evidence) -> Finding:
    """Does the Z push log Z away from its target?"""
    coef = e.ident.identified.coef
    if coef is None:
        return not_applicable("The penalty was not identified, so its sign is unknown.")
    if NOT_SQUARED in e.ident.quantities:
        return not_applicable("The penalty is not squared: see not_squared.")
    if coef < 0:
        witness = e.witness("λ", coef, abs(coef), noise=e.ident.identified.uncertainty.coef)
        return found(f"λ = {coef:.4g} is negative: log Z is driven away from c.", coef, witness)
    return passed("λ is positive.", coef)


@finding("error")
def ignored_tokens_leak(e: Evidence) -> Finding:
    """Do ignored tokens receive a gradient?"""
    if e.ident.targets_unused:
        return not_applicable("The function does not read its targets, so no token is ignored: see unexplained_source.")
    probe = draw("half ignored", e.ident.space, e.draw.seed)
    keep, outcome = probe.valid_T, e.box(probe)
    quantity = "gradient norm on ignored tokens relative to valid ones"
    if not outcome.finite:
        words = "A batch with ignored tokens gives a non-finite loss or gradient."
        return found(words, None, e.witness(quantity, None))
    beyond = outcome.beyond / max(float(outcome.grad_TV.norm()), 1e-300)
    if beyond > 1e-7:
        return found(
            f"The last row, which has no target, receives a gradient ({beyond:.3g} of the norm on all others).",
            beyond,
            e.witness("gradient norm on the last row relative to the others", beyond, on=probe),
        )
    # Where hidden and weight are changed before their product, the columns of dW mix tokens; the rows of dh never do.
    norm_T = (outcome.grad_TV if outcome.hidden_grad_TT is None else outcome.hidden_grad_TT).norm(dim=-1)
    inside = float(norm_T[keep].norm())
    share = float(norm_T[~keep].norm()) / (inside or max(float(norm_T.norm()), 1e-300))
    if share > 1e-7:
        silent = int((norm_T[keep] == 0).sum())
        shifted = f", and {silent} of {int(keep.sum())} valid ones receive none (is the mask shifted?)"
        return found(
            f"Ignored tokens receive a gradient ({share:.3g} of the norm on valid ones){shifted if silent > 2 else ''}: "
            "padding trains the model.",
            share,
            e.witness(quantity, share, on=probe),
        )
    if not inside:
        return not_applicable("With some tokens ignored no token receives a gradient, so nothing can leak.")
    return passed("Ignored tokens receive no gradient.", share)


@finding("error")
def differs_from_expected(e: Evidence) -> Finding:
    """Does the loss apply what its user believes, within 1e-3 or the stated uncertainty?

    What another finding already reports is not reported again, but does not count as a pass.
    """
    expect, got, ident = e.expect, e.ident.identified, e.ident
    if not expect:
        return not_applicable("Pass `expect={'coef': λ, 'target': c}`: what you believe the loss applies.")
    if not ident.known:
        return not_applicable(CANNOT_TELL)
    if not {"coef", "target", "coordinate", "label_smoothing"} & expect.keys():
        return not_applicable("Only denominators were expected: see denominator_mismatch.")
    differences: list[tuple[str, Witness]] = []
    elsewhere: list[str] = []
    wanted, applied = float(expect.get("coef") or 0.0), (got.coef or 0.0) if got.has_z else 0.0
    ratio = applied / wanted if wanted else None
    # Noise of 16 bits moves the fitted λ by up to its share of the gradient; low_precision_source reports it.
    blurred = (got.uncertainty.unexplained or 0.0) * wanted if ident.how == "rounded" else 0.0
    if "coef" in expect and abs(applied - wanted) > max(1e-3 * wanted, got.uncertainty.coef or 0.0, blurred):
        if wanted and not got.has_z and ident.trusted:
            elsewhere.append("The gradient contains no Z to compare: see zero_gradient_z.")
        elif ratio is not None and _whole_multiple(ratio):
            elsewhere.append("λ is a whole multiple of the expected one: see counted_twice.")
        else:
            witness = e.witness("λ", applied, wanted, noise=got.uncertainty.coef)
            differences.append((f"λ is {applied:.5g}, not {wanted:.5g}", witness))
    if not got.has_z and "coef" not in expect and {"target", "coordinate"} & expect.keys():
        elsewhere.append(
            "The gradient contains no Z to compare. Pass `expect={'coef': λ}` if you believe there is one."
        )
    if "target" in expect and got.has_z and got.target is None:
        elsewhere.append("The penalty has no c to compare.")
    elif "target" in expect and got.has_z:
        differences += _another_target(e, expect["target"])
    if "coordinate" in expect and got.has_z and got.coordinate != expect["coordinate"]:
        words = f"the coordinate is {got.coordinate!r}, not {expect['coordinate']!r}"
        differences.append((words, e.witness("λ in the expected coordinate", 0.0, got.coef)))
    smoothing, believed = got.label_smoothing or 0.0, float(expect.get("label_smoothing") or 0.0)
    if "label_smoothing" in expect and abs(smoothing - believed) > 1e-3:
        witness = e.witness("label smoothing", smoothing, believed)
        differences.append((f"label smoothing is {smoothing:.4g}, not {expect['label_smoothing']}", witness))
    if differences:
        return found(f"Not as expected: {'; '.join(words for words, _ in differences)}.", ratio, differences[0][1])
    if elsewhere:
        return not_applicable(" ".join(elsewhere), ratio)
    return passed("The loss applies what was expected.", ratio)


def _another_target(e: Evidence, expected: float | None) -> list[tuple[str, Witness]]:
    """What c is instead of the expected one, for which None is log V; empty where they agree."""
    got = e.ident.identified
    assert got.target is not None
    assert got.vocab is not None
    c = math.log(got.vocab) if expected is None else float(expected)
    witness = e.witness(f"c at V = {got.vocab}", got.target, c, noise=got.uncertainty.target)
    if abs(got.target - c) > max(1e-3, got.uncertainty.target or 0.0):
        # A c that follows V was measured at the V of the probe, which is not the user's.
        hint = (
            f" (it follows log V, and V is {got.vocab} here: where log V is meant, pass `expect={{'target': 'log_v'}}`)"
        )
        hint = hint if expected is not None and got.target_rule == "log_v" else ""
        return [(f"c is {got.target:.5g}, not {c:.5g}{hint}", witness)]
    moves_otherwise = expected is None and got.target_rule not in (None, "log_v")
    return [("c does not follow log V", witness)] if moves_otherwise else []


REPEATS = 32
"""Calls on one batch, each with a different random seed: anything that happens on every n-th call is caught up to n = 32."""


@finding("warning", repeat=False)
def not_repeatable(e: Evidence) -> Finding:
    """Does the same call give the same result, regardless of the random state and of earlier calls?

    Runs last, so that it also checks whether the calls in between left any state behind.
    """
    tolerance, (loud, _) = max(1e-5, 8 * e.ident.eps), e.loudest
    quantity = "relative change between two calls with the same inputs"
    if e.ident.kept_state is not None:
        return found(e.ident.kept_state, None, e.witness(quantity, None, noise=tolerance, on=loud))
    seeds = [e.draw.seed + 1000 + k for k in range(REPEATS)]
    for (probe, first), tried in ((e.mixed, seeds[:1]), (e.loudest, seeds)):
        seen = unrepeatable(e.box, probe, first, (None, *tried), tolerance)
        if seen is not None:
            sentence, change = seen
            return found(sentence, change, e.witness(quantity, change, noise=tolerance, on=probe))
    return passed(f"The same inputs give the same value and gradient in {REPEATS} calls.", 0.0)
