"""What could still be wrong with a loss: one comparison, many batches.

A check calls the loss on batches that a correct loss treats alike (other sizes, masks, precisions, shifts, paddings) and compares
each with what was identified (`fit.measure`). Values are compared through their differences, scales relative to the weight on CE.
Each check carries its remedy, what its finding means for training, and a loss that has it next to one that has not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from zloss.audit.loss.calls import LossCallError, dtype_name
from zloss.audit.loss.evidence import TOLERANCE, Evidence, identify, relative, unrepeatable
from zloss.audit.loss.probes import Probe, draw, seeded
from zloss.audit.loss.sixteen_bits import HeadCall, accumulated, filtered, inconsistent, stored
from zloss.results.loss_audit import Finding, Severity, Witness

Need = Literal["calls", "fit", "z"]
"""What a check requires: calls that repeat; an explained gradient; an explained gradient with a penalty."""
Found = Finding | None


class NotSuppliedError(Exception):
    """A check needs something that was not passed; the message says what to pass."""


@dataclass(frozen=True)
class Check:
    """A registered check. `has` and `misses` are losses as similar as possible, one with the finding and one without."""

    id: str
    question: str
    severity: Severity
    needs: Need
    remedy: str
    consequence: str
    measure: Callable[[Evidence], Found]
    has: Callable[..., Any]
    misses: Callable[..., Any]
    options: dict[str, Any]
    repeat: bool

    def answer(self, e: Evidence) -> Finding:
        """The finding, or that there is none, or why the check does not apply."""
        lacking = self._lacking(e)
        try:
            found = None if lacking else self.measure(e)
        except NotSuppliedError as error:
            lacking, found = str(error), None
        except LossCallError as error:
            lacking, found = f"This could not be tried: {error}", None
        if found is None:
            return Finding(self.id, "not_applicable" if lacking else "pass", lacking or f"{self.question} No.")
        severity = found.severity or self.severity
        return replace(found, id=self.id, severity=severity, remedy=self.remedy, consequence=self.consequence)

    def _lacking(self, e: Evidence) -> str:
        if e.changing and self.id != "not_repeatable":
            return "The same inputs give different results, so calls cannot be compared: see not_repeatable."
        if self.needs != "calls" and e.fitted is None:
            return "What the loss applies could not be identified: see unexplained_source."
        return "The loss has no Z." if self.needs == "z" and not e.identified.has_z else ""


CHECKS: dict[str, Check] = {}
"""In the order in which to apply their remedies: what makes the trained objective wrong comes first."""


def check(
    severity: Severity,
    needs: Need,
    remedy: str,
    consequence: str,
    *,
    has: Callable[..., Any],
    misses: Callable[..., Any],
    options: dict[str, Any] | None = None,
    repeat: bool = True,
) -> Callable[[Callable[[Evidence], Found]], Callable[[Evidence], Found]]:
    """Register the decorated function under its name; its docstring is the question that it asks."""

    def register(function: Callable[[Evidence], Found]) -> Callable[[Evidence], Found]:
        id, question = function.__name__, (function.__doc__ or "").splitlines()[0]
        CHECKS[id] = Check(
            id, question, severity, needs, remedy, consequence, function, has, misses, options or {}, repeat
        )
        return function

    return register


def found(
    e: Evidence,
    sentence: str,
    measured: float | None,
    expected: float | None = 0.0,
    *,
    quantity: str,
    on: Probe | None = None,
    dtype: torch.dtype | None = None,
    noise: float | None = None,
    severity: Severity | None = None,
) -> Finding:
    """A finding with its witness; the noise is by default the rounding of the larger number."""
    probe = on or e.mixed[0]
    finite = [abs(x) for x in (measured, expected) if x is not None and math.isfinite(x)]
    measured = None if measured is None or not math.isfinite(measured) else measured
    noise = 2.0**-24 * max(finite, default=0.0) if noise is None else noise
    shape, name = (len(probe.target_T), probe.logits_TV.shape[-1]), dtype_name(dtype or e.loss.dtype)
    witness = Witness(shape, name, probe.seed, expected, measured, noise, probe.name, quantity)
    return Finding("", "finding", sentence, measured, severity, witness)


# Losses of the examples.


def _count(y: Tensor) -> Tensor:
    return (y != -100).sum().clamp(min=1)


def _ce(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, y, reduction="sum") / _count(y)


def _mean(rows: Tensor, y: Tensor) -> Tensor:
    """The mean over valid tokens."""
    return torch.where(y != -100, rows, 0.0).sum() / _count(y)


def _z(z: Tensor, y: Tensor, coef: float = 1e-3, target: float = 0.0) -> Tensor:
    return coef * _mean((z.logsumexp(-1) - target).square(), y)


def _plain(z: Tensor, y: Tensor, coef: float = 1e-3) -> Tensor:
    return _ce(z, y) + _z(z, y, coef)


class _Kernel(torch.autograd.Function):
    """A value with a gradient that was formed by hand in the forward pass."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, grad: Tensor, scaled: bool, _: Tensor) -> Tensor:
        ctx.grad, ctx.scaled = grad, scaled
        return value.detach().clone()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[None, None, None, Tensor]:
        return None, None, None, ctx.grad * (upstream[0] if ctx.scaled else 1.0)


def _kernel(change: Callable[[Tensor], Tensor] = lambda grad: grad, *, scaled: bool = True) -> Callable[..., Tensor]:
    """CE + Z with `change` applied to its gradient; `scaled`: multiplied by the upstream gradient."""

    def loss(z: Tensor, y: Tensor) -> Tensor:
        leaf = z.detach().requires_grad_()
        value = _plain(leaf, y)
        (grad,) = torch.autograd.grad(value, leaf)
        out: Tensor = _Kernel.apply(value.detach(), change(grad), scaled, z)  # type: ignore[no-untyped-call]
        return out

    return loss


# Does it train the intended penalty?


@check(
    "error",
    "calls",
    "take Z from the logits that carry the gradient, neither detached nor log-probabilities",
    "the logged Z trains nothing",
    has=lambda z, y: _ce(z, y) + _z(z.detach(), y),
    misses=lambda z, y: _ce(z, y) + _z(z, y),
)
def zero_gradient_z(e: Evidence) -> Found:
    """Is there a Z in the value, or an expected one, that the gradient does not have?"""
    if e.identified.has_z is not False or e.fitted is None:
        return None
    coef = float(e.expect.get("coef") or 0.0)
    if coef:
        words = f"A Z with λ = {coef:.3g} was expected, but the gradient is cross-entropy alone."
        return found(e, words, 0.0, coef, quantity="λ")
    probe, outcome = e.mixed
    if outcome.hidden_TT is not None and relative(outcome.hidden_TT, outcome.grad_TV @ probe.logits_TV.T) > 1e-2:
        return None  # it trains hidden or weight: see forward_backward_mismatch
    probe = probe.shifted(0.13)
    seen = _slope(e, probe, probe.widened(torch.ones_like(probe.inside_TV)), (4.0, 0.05))
    if seen is None or seen[2] < 3e-3 or not e.plain or not e.has_ce:
        return None
    return found(
        e,
        f"Along a common shift of the logits the value changes by {seen[0]:.4g} per unit, but the gradient is cross-entropy "
        "alone: a Z that trains nothing.",
        seen[1],
        seen[0],
        quantity="derivative along a common shift: the gradient's, against that of the value",
        on=probe,
    )


@check(
    "error",
    "fit",
    "add the row maximum back to log Z before the square",
    "a common shift of the logits grows unseen",
    has=lambda z, y: _ce(z, y) + _z(z - z.amax(-1, True), y),
    misses=lambda z, y: _ce(z, y) + _mean(1e-3 * ((z - z.amax(-1, True)).logsumexp(-1) + z.amax(-1)).square(), y),
)
def max_shifted(e: Evidence) -> Found:
    """Is the penalty on log Z − max z?"""
    return _mistake(e, "max_shifted")


@check(
    "error",
    "fit",
    "take the log-sum-exp of the logits, not of probabilities",
    "the penalty is nearly constant and controls nothing",
    has=lambda z, y: _ce(z, y) + _z(z.softmax(-1), y),
    misses=lambda z, y: _ce(z, y) + _z(z.log_softmax(-1) + z.logsumexp(-1, True), y),
)
def probabilities_not_logits(e: Evidence) -> Found:
    """Is the penalty on the log-sum-exp of probabilities?"""
    return _mistake(e, "probabilities_not_logits")


def _mistake(e: Evidence, id: str) -> Found:
    """The penalty of the fit, if it is the mistake `id` of `fit.MISTAKES`."""
    assert e.fitted is not None
    for penalty in e.fitted.form.penalties:
        if penalty.finding == id:
            words = f"The penalty is on {penalty.words}: {penalty.consequence}."
            return found(e, words, e.identified.coef, quantity="λ of that penalty")
    return None


@check(
    "error",
    "fit",
    "make λ positive",
    "log Z is driven away from its target",
    has=lambda z, y: _ce(z, y) - _z(z, y),
    misses=lambda z, y: _ce(z, y) + _z(z, y),
)
def negative_coefficient(e: Evidence) -> Found:
    """Is λ negative?"""
    coef = e.identified.coef if e.identified.coef is not None else e.identified.extra.get("linear_coef")
    if coef is None or coef >= 0:
        return None
    return found(e, f"λ = {coef:.4g} is negative: log Z is driven away from c.", coef, -coef, quantity="λ")


@check(
    "error",
    "calls",
    "reuse the forward log-sum-exp statistics in the backward pass",
    "the optimizer follows another objective than the one that is logged",
    has=_kernel(lambda grad: 1.5 * grad),
    misses=_kernel(),
)
def forward_backward_mismatch(e: Evidence) -> Found:
    """Is the gradient something else than the derivative of the value?"""
    probe, outcome = e.mixed
    if outcome.hidden_TT is not None and e.fitted is not None and e.plain:
        off = relative(outcome.hidden_TT, outcome.grad_TV @ probe.logits_TV.T)
        if off > 1e-2:
            words = (
                f"The gradients at hidden and at weight belong to different sources (relative difference {off:.2g})."
            )
            return found(e, words, off, quantity="‖dh − δW‖/‖δW‖")
    if e.identified.computes_in not in ("float64", "float32") or (e.fitted is not None and e.fitted.beta):
        return None
    # With ignored tokens, so that the counts of value and gradient show.
    probe = (draw("half ignored", e.space, e.seed) if e.masks else probe).shifted(0.13)
    outcome = e.loss(probe, e.fine)
    ties_T1 = (probe.inside_TV == probe.inside_TV.amax(-1, True)).sum(-1, keepdim=True) > 1
    random = torch.randn(probe.logits_TV.shape, generator=seeded(e.seed + 2), dtype=torch.float64)
    shift = probe.widened(torch.ones_like(probe.inside_TV))
    for words, way in (
        ("its own gradient", outcome.grad_TV),
        ("a random direction", random),
        ("a common shift", shift),
    ):
        way = way if way is shift else torch.where(ties_T1, 0.0, way)  # a maximum has no derivative where it is tied
        quadratic = way is shift and e.plain and e.identified.target is not None
        if (
            not way.any()
            or (seen := _slope(e, probe, way, (4.0, 0.05, 0.003) if quadratic else (0.05, 0.003, 2e-4))) is None
        ):
            continue
        value, gradient, off = seen
        if off > 3e-3:
            sentence = f"Along {words} the value changes by {value:.4g} per unit, but its gradient says {gradient:.4g}."
            # Weights that depend on the logits are detached on purpose: focal factors, importance ratios.
            level: Severity | None = "note" if e.identified.ce_weights == "token" else None
            quantity = f"derivative along {words}"
            return found(e, sentence, gradient, value, quantity=quantity, on=probe, dtype=e.fine, severity=level)
    return None


def _slope(e: Evidence, probe: Probe, way: Tensor, steps: tuple[float, ...]) -> tuple[float, float, float] | None:
    """(derivative of the value along `way`, that of the gradient, relative difference beyond rounding) at the best step.

    None if every step is lost in rounding.
    """
    way = way / way.abs().max()
    outcome = e.loss(probe, e.fine)
    gradient, best = float((outcome.grad_TV * way).sum()), None
    unit = 2.0**-53 if e.fine == torch.float64 and e.identified.computes_in == "float64" else 2.0**-24
    value_unit = max(unit, outcome.unit)
    for step in steps:
        ends = [
            e.loss(replace(probe, logits_TV=probe.logits_TV + k * step * way), e.fine).value for k in (-2, -1, 1, 2)
        ]
        value = (8 * (ends[2] - ends[1]) - (ends[3] - ends[0])) / (12 * step)
        terms = max(float((outcome.grad_TV * probe.logits_TV).abs().sum()), *map(abs, ends))
        rounding = 16 * max(unit * terms, value_unit * max(map(abs, ends))) / step
        rounding += 4 * unit * float((probe.noise_T * (outcome.grad_TV * way).abs().sum(-1)).sum())
        size = max(abs(value), abs(gradient), 1e-300)
        off = max(abs(value - gradient) - rounding, 0.0) / size
        if math.isfinite(value) and rounding < 0.3 * size and (best is None or off < best[2]):
            best = value, gradient, off
    return best


@check(
    "error",
    "calls",
    "give every counted token its Z source: do not skip small probabilities or confident tokens",
    "confident tokens, where only Z has a gradient, get none",
    has=_kernel(lambda grad: torch.where(grad.abs() > 2.0**-18, grad, 0.0)),
    misses=_kernel(lambda grad: torch.where(grad.abs() > 0, grad, 0.0)),
)
def filtered_source(e: Evidence) -> Found:
    """Is the gradient exactly 0 where the source is not?"""
    for kind in ("continuous", "confident"):
        probe = draw(kind, e.space, e.seed)
        outcome = e.loss.attempt(probe)
        if outcome is None:
            continue
        if e.plain:
            wanted_TV = e.wanted(probe)[0]
        elif kind == "continuous" and e.curve is None:
            wanted_TV = outcome.grad_TV.abs().amax(-1, True) * probe.widened(probe.seen_TV.softmax(-1))
        else:
            continue
        least = 1e-6 * float(wanted_TV.abs().max()) if kind == "continuous" else 1e-6 / len(wanted_TV)
        gone_TV = ((outcome.grad_TV == 0) & (wanted_TV.abs() > least))[:, : probe.lanes]
        large_TV = wanted_TV[:, : probe.lanes] > 0.1 * wanted_TV.amax(-1, True)
        if not e.plain and bool((gone_TV & large_TV).any()):
            continue  # something else than a threshold on small entries
        # Tokens without any gradient are another matter, unless nothing but Z should have trained them.
        gone_TV &= outcome.grad_TV.any(-1, keepdim=True) | torch.tensor(kind == "confident")
        share = float(gone_TV.double().mean())
        if share > (0.0 if kind == "confident" else 2e-3):
            words = (
                f"{int(gone_TV.sum())} entries of the gradient, on {int(gone_TV.any(-1).sum())} {kind} tokens, are exactly 0 "
                "where the source is not."
            )
            return found(e, words, share, quantity="share of the entries", on=probe)
    if (call := filtered(e)) is not None:
        what = (
            f"{int(call.dead_T.sum())} confident tokens get no gradient"
            if call.dead_T.any()
            else "small entries are dropped"
        )
        return _on_head(e, call, f"With {dtype_name(call.dtype)} inputs {what}")
    return None


def _on_head(e: Evidence, call: HeadCall, lead: str) -> Finding:
    """A finding about the row sums of a 16-bit head."""
    wanted = float(call.wanted_T.square().mean().sqrt())
    words = (
        f"{lead}: the row sums of the source are off by {call.rms:.2g} (RMS, relative to CE), where Z has {wanted:.2g}."
    )
    return found(
        e, words, call.rms, 0.0, quantity="RMS of Σδ − Σδ of fp64", on=call.probe, dtype=call.dtype, noise=call.limit
    )


@check(
    "error",
    "fit",
    "reuse the forward log-sum-exp statistics in the backward pass, with the logits they were computed from",
    "a phantom Z of random sign, several times the real one",
    has=lambda h, w, y: _InTwoPrecisions.apply(h, w, y),  # type: ignore[no-untyped-call]
    misses=lambda h, w, y: _plain(h.float() @ w.float().T, y, 0.0),
    options={"linear": True},
)
def inconsistent_softmax(e: Evidence) -> Found:
    """Are the probabilities of the backward pass those of another log Z, with 16-bit inputs?"""
    _require_head(e)
    call = inconsistent(e)
    if call is None:
        return None
    peak = float(call.probe.seen_TV.abs().max())
    return _on_head(e, call, f"With {dtype_name(call.dtype)} inputs and logits up to {peak:.0f} Σp is not 1")


def _require_head(e: Evidence) -> None:
    if not e.loss.linear:
        raise NotSuppliedError(
            "It takes logits: losses of (hidden, weight, target), `linear=True`, are tried with 16-bit inputs."
        )


class _InTwoPrecisions(torch.autograd.Function):
    """log Z of logits in the dtype of the inputs, and a backward pass that has them in fp32."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        log_z = (hidden.float() @ weight.float().T).to(hidden.dtype).float().logsumexp(-1)
        ctx.save_for_backward(hidden, weight, target, log_z)
        picked = (hidden.float() * weight[target.clamp(min=0)].float()).sum(-1)
        return _mean(log_z - picked, target)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden, weight, target, log_z = ctx.saved_tensors
        p = (hidden.float() @ weight.float().T - log_z[:, None]).exp()
        delta = p - F.one_hot(target.clamp(min=0), len(weight))
        delta = upstream[0] * torch.where((target != -100)[:, None], delta, 0.0) / _count(target)
        return (delta @ weight.float()).to(hidden.dtype), (delta.T @ hidden.float()).to(weight.dtype), None


@check(
    "error",
    "fit",
    "accumulate dW in fp32 and round it once",
    "the gradient of the head loses digits with every chunk of tokens",
    has=lambda h, w, y: _in_chunks(h, w, y, torch.bfloat16),
    misses=lambda h, w, y: _in_chunks(h, w, y, torch.float32),
    options={"linear": True},
)
def chunk_accumulation(e: Evidence) -> Found:
    """Does the error of dW grow with the number of tokens, with 16-bit inputs?"""
    _require_head(e)
    if (pair := accumulated(e)) is None:
        return None
    few, many = pair
    words = (
        f"With {dtype_name(many.dtype)} inputs dW is off by {few.weight_error:.2g} with {len(few.off_T)} tokens and by "
        f"{many.weight_error:.2g} with {len(many.off_T)}: it is accumulated in 16 bits."
    )
    quantity = "‖dW − fp64‖/‖fp64‖"
    # Autograd adds the parts of a loss in chunks in the dtype of the weight: a few of them cost less than storing the logits.
    level: Severity | None = "note" if many.weight_error < 1e-2 else None
    return found(
        e,
        words,
        many.weight_error,
        many.rounded_once,
        quantity=quantity,
        on=many.probe,
        dtype=many.dtype,
        noise=few.weight_error,
        severity=level,
    )


def _in_chunks(hidden: Tensor, weight: Tensor, target: Tensor, wide: torch.dtype) -> Tensor:
    """CE in chunks of 16 tokens, whose parts of dW are added in `wide` if the inputs have 16 bits."""

    class Chunks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(hidden, weight)
            return _ce(hidden.float() @ weight.float().T, target)

        @staticmethod
        def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor]:
            hidden, weight = ctx.saved_tensors
            z = hidden.float() @ weight.float().T
            delta = z.softmax(-1) - F.one_hot(target.clamp(min=0), len(weight))
            delta = upstream[0] * torch.where((target != -100)[:, None], delta, 0.0) / _count(target)
            grad = torch.zeros_like(weight, dtype=torch.float32 if weight.dtype == torch.float32 else wide)
            for rows, h in zip(torch.split(delta, 16), torch.split(hidden.float(), 16), strict=True):
                grad += (rows.T @ h).to(grad.dtype)
            return (delta @ weight.float()).to(hidden.dtype), grad.to(weight.dtype)

    out: Tensor = Chunks.apply(hidden, weight)  # type: ignore[no-untyped-call]
    return out


@check(
    "error",
    "calls",
    "keep the logits in fp32 on their way to log Z, and reuse the forward log-sum-exp statistics in the backward pass",
    "the Z source of a token is off by more than a percent, most of all for large logits",
    has=lambda z, y: _plain(z.bfloat16().float(), y),
    misses=lambda z, y: _plain(z.float(), y),
)
def low_precision_source(e: Evidence) -> Found:
    """Does the source lose digits with fp32 logits, or change with 16-bit ones?"""
    if e.identified.computes_in == "bfloat16":
        share = e.identified.uncertainty.unexplained or 0.0
        words = f"What no penalty explains, {share:.1%} of the gradient beyond CE, behaves like 16-bit rounding."
        return found(
            e, words, share, quantity="share of the gradient that is noise", on=draw("continuous", e.space, e.seed)
        )
    if not e.plain or e.fitted is None:
        return None
    probe = draw("continuous", e.space, e.seed)
    outcome = e.loss.attempt(probe)
    if outcome is not None:
        total_TV, z_TV = e.wanted(probe)
        size = float((z_TV if e.fitted.slopes else total_TV).norm())
        off = float((outcome.grad_TV - total_TV)[probe.valid_T].norm()) / size
        rows_T = total_TV.norm(dim=-1) + e.fitted.ce
        floor = 2.0**-22 * float((probe.noise_T * rows_T).norm()) / size
        if off > max(1e-2 if e.fitted.slopes else 1e-3, 2 * floor):
            words = f"On fp32 logits the source is off by {off:.2g} from fp64, far beyond rounding ({floor:.1g})."
            return found(e, words, off, quantity="‖applied − fp64‖/‖fp64‖", on=probe, noise=floor)
    if (call := stored(e)) is not None and inconsistent(e) is None and filtered(e) is None:
        off, once = call.weight_error, call.rounded_once
        what = "computes in 16 bits" if call.narrow else "stores 16-bit logits"
        words = f"With bf16 inputs it {what}: dW is off by {off:.2g}, rounding alone by {once:.1g}."
        quantity = "‖dW − fp64‖/‖fp64‖"
        return found(e, words, off, quantity=quantity, on=call.probe, dtype=call.dtype, noise=once, severity="note")
    if not e.fitted.slopes or e.space.warp.cap is not None:
        return None
    for dtype, unit in ((torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)):
        for kind in ("confident", "wide"):
            probe = draw(kind, e.space, e.seed)
            seen = e.measured(probe, dtype, eps=unit)
            if seen is None:
                continue
            s_T = e.wanted(probe)[1].norm(dim=-1)
            loud = float(s_T.norm()) > 40 * unit * abs(e.fitted.ce) * math.sqrt(len(s_T)) * (kind == "wide")
            loud = loud and float(s_T.max()) > 2.0**-16
            if (loud and abs(seen.z - 1) > 5e-2) or (kind == "wide" and e.has_ce and abs(seen.ce - 1) > 5e-2):
                words = f"With {dtype_name(dtype)} logits λ is {seen.z:.3g} times that with fp32, the weight on CE {seen.ce:.3g}."
                return found(e, words, seen.z, 1.0, quantity="λ relative to fp32", on=probe, dtype=dtype, noise=5e-2)
    return None


# Is it the same objective in every batch?


@check(
    "error",
    "calls",
    "mask ignored tokens out of the sum with `where`",
    "padding trains the model",
    has=lambda z, y: _ce(z, y) + 1e-3 * z.logsumexp(-1).square().mean(),
    misses=lambda z, y: _ce(z, y) + _z(z, y),
)
def ignored_tokens_leak(e: Evidence) -> Found:
    """Do ignored tokens receive a gradient?"""
    if not e.has_ce or not e.masks:
        return None
    probe = draw("half ignored", e.space, e.seed)
    outcome = e.loss(probe)
    if not outcome.finite:
        words = "A batch with ignored tokens gives a loss or gradient that is not finite."
        return found(e, words, None, quantity="norm of the gradient", on=probe)
    # Where hidden and weight are changed before their product, the columns of dW mix tokens; the rows of dh never do.
    norm_T = (outcome.grad_TV if outcome.hidden_TT is None else outcome.hidden_TT).norm(dim=-1)
    inside, stray = float(norm_T[probe.valid_T].norm()), float(norm_T[~probe.valid_T].norm())
    share = max(stray, outcome.beyond) / (inside or max(float(norm_T.norm()), 1e-300))
    if share <= 1e-7:
        return None
    who = "Rows without a target" if outcome.beyond > stray else "Ignored tokens"
    words = f"{who} receive a gradient ({share:.3g} of that on valid tokens)."
    return found(e, words, share, quantity="gradient on ignored tokens relative to valid ones", on=probe)


@check(
    "error",
    "fit",
    "divide CE and Z by the same token count, so that λ means the same in every batch",
    "λ changes with the mask and with the size of a batch",
    has=lambda z, y: _ce(z, y) + _z(z, y) * _count(y) / len(y),
    misses=lambda z, y: _ce(z, y) + _z(z, y),
)
def denominator_mismatch(e: Evidence) -> Found:
    """Does λ relative to CE change with batch size or mask?"""
    got = e.identified
    for part, name in (("ce", got.ce_denominator), ("z", got.z_denominator)):
        wanted = e.expect.get(f"{part}_denominator", e.expect.get("denominator"))
        if wanted is not None and name is not None and name != wanted:
            words = f"{part.upper()} is divided by {name!r}, but {wanted!r} was expected."
            return found(e, words, None, None, quantity="denominators")
    assert e.fitted is not None
    if not e.fitted.slopes or not e.fitted.uniform or not e.has_ce:
        return None
    ratios = [(seen.z / seen.ce, seen) for seen in e.batches if seen.ce and not seen.uneven and seen.left < 5e-2]
    if len(ratios) < 2:
        return None
    (low, few), (high, many) = min(ratios, key=lambda x: x[0]), max(ratios, key=lambda x: x[0])
    change = high / low if low > 0 else math.inf
    if change < 1.1 + 4 * max(seen.slack for seen in e.batches):
        return None
    words = (
        f"λ relative to CE changes by a factor of {change:.3g} between batches with {few.valid} of {few.tokens} and {many.valid} "
        f"of {many.tokens} valid tokens: CE is divided by {got.ce_denominator!r}, Z by {got.z_denominator!r}."
    )
    return found(e, words, change, 1.0, quantity="ratio of λ between two batches", noise=0.1)


PRIMES = (1, 5, 251, 1031, 2053)
"""Numbers of tokens: whatever chunks a loss works in, they leave a remainder."""
VOCABS = (5003, 70001)
ENTRIES = 2**20
"""Most logits of a batch: about twenty fp64 copies of them exist at once."""


@check(
    "error",
    "fit",
    "make the loss independent of the number of tokens and of the vocabulary beyond their means",
    "part of a real batch or vocabulary is trained differently, or not at all",
    has=lambda z, y: _plain(z[: len(z) // 48 * 48], y[: len(z) // 48 * 48]),
    misses=lambda z, y: (
        sum(_plain(a, b) * _count(b) for a, b in zip(z.split(48), y.split(48), strict=True)) / _count(y)
    ),
)
def size_dependent(e: Evidence) -> Found:
    """Is it another objective for many tokens, several sequences or a large vocabulary?"""
    assert e.fitted is not None
    if any(penalty.finding for penalty in e.fitted.form.penalties):
        return None
    probe, outcome = e.mixed
    if (tail := _silent_tail(probe, outcome.grad_TV)) is not None:
        return found(
            e,
            f"Of {len(probe.target_T)} tokens the last {tail} get no gradient.",
            tail,
            quantity="tokens without a gradient",
        )
    step = max(e.loss.sequences, 1)
    sizes: list[tuple[int, int, int]] = [
        (tokens, e.space.lanes, e.loss.sequences) for tokens in PRIMES if tokens >= step
    ]
    sizes.append((48, e.space.lanes, 3))
    if not e.space.padded:
        sizes += [(6, vocab, e.loss.sequences) for vocab in VOCABS]
    for tokens, vocab, sequences in sizes:
        if tokens * vocab > ENTRIES:
            continue
        probe = draw("mixed", e.space.sized(tokens, None if vocab == e.space.lanes else vocab), e.seed + 5)
        # The rounding of a sum over a large vocabulary hides a tail that is missing.
        dtype = e.fine if vocab != e.space.lanes else None
        loss = replace(e.loss, sequences=sequences)
        answer, seen = loss.attempt(probe, dtype), replace(e, loss=loss).measured(probe, dtype)
        if answer is None or seen is None:
            continue
        words = _at_size(e, seen, vocab)
        tail = _silent_tail(probe, answer.grad_TV)
        if tail is not None and not words:
            words = f"the last {tail} tokens get no gradient"
        leaks = e.mixed[1].beyond > 1e-7 * float(e.mixed[1].grad_TV.norm())
        if not words and not leaks and answer.beyond > 1e-7 * float(answer.grad_TV.norm()):
            words = "rows without a target receive a gradient"
        if words:
            where = (
                f"[{sequences}, {tokens // sequences}, {vocab:,}]"
                if sequences > 1
                else f"T = {tokens:,}, V = {vocab:,}"
            )
            # A loss that also takes [T, V] was not written for several sequences.
            level: Severity | None = "note" if sequences > 1 and not e.loss.sequences else None
            left = seen.left if seen.left > TOLERANCE else seen.ce
            return found(e, f"At {where}: {words}.", left, quantity="what differs", on=probe, severity=level)
    return None


def _at_size(e: Evidence, seen: Any, vocab: int) -> str:
    """How a batch of another size differs. Where c is not known at a vocabulary, only CE is compared."""
    if e.at(vocab) is None:
        seen = replace(seen, z=1.0 / e.count("Z", seen.valid, seen.tokens), left=0.0)
    return e.differs(seen, 2e-2)


def _silent_tail(probe: Probe, grad_TV: Tensor) -> int | None:
    """How many of the last tokens, and they alone, get no gradient; None if that is not so."""
    silent_T = (grad_TV.norm(dim=-1) == 0) & probe.valid_T
    count = int(silent_T.sum())
    if not 0 < count < len(silent_T):
        return count if count and count == len(silent_T) else None
    return count if bool(silent_T[-count:].all()) else None


@check(
    "error",
    "calls",
    "subtract the row maximum before exp, and add it back to log Z",
    "a run whose logits grow ends in NaN",
    has=lambda z, y: _ce(z, y) + _mean(1e-3 * z.exp().sum(-1).log().square(), y),
    misses=lambda z, y: _ce(z, y) + _mean(1e-3 * ((z - z.amax(-1, True)).exp().sum(-1).log() + z.amax(-1)).square(), y),
)
def overflow(e: Evidence) -> Found:
    """Do large logits or a common shift of ±100 break it in fp32?"""
    quantity = "norm of the gradient"
    for shift in (100.0, -100.0):
        probe = draw("continuous", e.space, e.seed).shifted(shift)
        outcome = e.loss(probe)
        size = float(outcome.grad_TV.norm())
        if not outcome.finite:
            words = f"A common shift of {shift:+.0f} makes loss or gradient non-finite in fp32."
            return found(e, words, None, None, quantity=quantity, on=probe)
        if e.plain and e.identified.target is not None and e.space.warp.cap is None:
            wanted = e.wanted(probe)[0]
            off = relative(outcome.grad_TV, wanted)
            if off > 2e-2:
                words = f"A common shift of {shift:+.0f} leaves a gradient that is off by {off:.2g} (relative)."
                return found(e, words, size, float(wanted.norm()), quantity=quantity, on=probe)
    probe = draw("saturated", e.space, e.seed)
    if e.space.warp.cap is None and not e.loss(probe).finite:
        return found(
            e, "Large logits, down to −200, make loss or gradient non-finite.", None, None, quantity=quantity, on=probe
        )
    return None


@check(
    "error",
    "calls",
    "multiply the stored gradient by the upstream gradient in the backward pass",
    "accumulation, loss scaling and token weights have no effect on it",
    has=_kernel(scaled=False),
    misses=_kernel(),
)
def upstream_ignored(e: Evidence) -> Found:
    """Does k · loss give something else than k · gradient?"""
    probe, plain = e.mixed
    off = max(relative(e.loss(probe, upstream=k).grad_TV, k * plain.grad_TV) for k in (3.0, -0.5))
    if not off <= 2e-2:
        return found(
            e, f"k · loss does not give k · gradient (relative error {off:.3g}).", off, quantity="relative error"
        )
    if e.per_token is not None:
        u_T = 0.25 + torch.rand(len(probe.target_T), generator=seeded(e.seed), dtype=torch.float64)
        ones, given = (e.per_token(probe, upstream=u).grad_TV for u in (torch.ones_like(u_T), u_T))
        off = relative(given, u_T.unsqueeze(-1) * ones)
        if not off <= 1e-3:
            words = f"The upstream gradients of single tokens are not honored (relative error {off:.3g})."
            return found(e, words, off, quantity="relative error of Σ u·loss")
    return None


@check(
    "error",
    "calls",
    "keep padding rows of the vocabulary outside log Z",
    "padding rows take probability and are trained",
    has=lambda z, y: _plain(z, y),
    misses=lambda z, y: _plain(z[:, :80], y),
    options={"valid_vocab": 80},
)
def padding_in_log_z(e: Evidence) -> Found:
    """Do padding rows of the vocabulary enter log Z?"""
    if not e.space.padded:
        raise NotSuppliedError("Pass `valid_vocab=` if rows of the vocabulary are padding that the loss leaves out.")
    for base in (draw("continuous", e.space, e.seed), draw("continuous", e.space, e.seed).shifted(-40.0)):
        plain = e.loss(base).grad_TV
        for fill in (0.0, 50.0):
            filled = torch.full_like(base.logits_TV, fill)
            probe = replace(base, logits_TV=torch.cat([base.inside_TV, filled[:, base.lanes :]], dim=-1))
            outcome = e.loss.attempt(probe)
            if outcome is not None and (off := relative(outcome.grad_TV, plain)) > 1e-4:
                words = f"Padding rows enter log Z: the gradient moves by {off:.3g} when they are filled with {fill:g}."
                return found(e, words, off, quantity="change of the gradient", on=probe)
        outcome = e.loss.attempt(replace(base, logits_TV=base.inside_TV))
        if outcome is not None and (off := relative(outcome.grad_TV, plain[:, : base.lanes])) > 1e-4:
            words = f"Padding rows enter log Z: the gradient moves by {off:.3g} when they are left out."
            return found(e, words, off, quantity="change of the gradient", on=base)
    return None


@check(
    "error",
    "calls",
    "shift the targets once, in the loss or before it",
    "the last row is trained on the first token",
    has=lambda z, y: _plain(z, y.roll(-1)),
    misses=lambda z, y: _plain(z[:-1], y[1:]),
    repeat=False,
)
def targets_moved(e: Evidence) -> Found:
    """Is a row trained on the target of another one than the next?"""
    if e.loss.shift > 1:
        words = f"Row t is trained on target t + {e.loss.shift}: labels are shifted {e.loss.shift} times, unless that is meant."
        return found(e, words, float(e.loss.shift), 1.0, quantity="shift of the targets", severity="warning")
    if not e.loss.rolled:
        return None
    words = "Row t is trained on target t + 1 and the last row on target 0. All else was audited with the targets rolled back."
    return found(e, words, float(e.space.tokens), 0.0, quantity="rows trained on the target of another one")


# Is it what its user believes?


@check(
    "error",
    "fit",
    "set λ, c and coordinate as intended, or document what is applied",
    "the run is not the one that was planned",
    has=lambda z, y: _ce(z, y) + _z(z, y, 1e-4),
    misses=lambda z, y: 8 * (_ce(z, y) + _z(z, y)),
    options={"expect": {"coef": 1e-3}},
)
def differs_from_expected(e: Evidence) -> Found:
    """Is it something else than what was expected?"""
    got, differences, ratio = e.identified, list[str](), _times_expected(e)
    if not {"coef", "target", "coordinate", "label_smoothing"} & e.expect.keys():
        raise NotSuppliedError("Pass `expect={'coef': λ, 'target': c}`: what you believe the loss applies.")
    if "coef" in e.expect and ratio is not None and abs(ratio - 1) > max(1e-3, got.uncertainty.coef_relative or 0.0):
        if not _counted(e) and got.has_z:
            applied = (got.coef or 0.0) / _scale(e)
            relative_to = " relative to CE" if abs(_scale(e) - 1) > 1e-6 else ""
            differences.append(f"λ{relative_to} is {applied:.5g}, not {float(e.expect['coef']):.5g}")
    elif e.expect.get("coef") == 0 and got.has_z:
        differences.append(f"λ is {got.coef or 0.0:.5g}, not 0")
    if "target" in e.expect and got.target is not None and got.has_z:
        told = e.expect["target"]
        wanted = math.log(got.vocab or 1) if told is None else float(told)
        slack = max(1e-3, got.uncertainty.target or 0.0)
        targets = [got.target, got.extra.get("or_target", got.target)]
        if all(abs(one - wanted) > slack for one in targets):
            hint = (
                " (it follows log V: where log V is meant, pass `expect={'target': 'log_v'}`)"
                if got.target_rule == "log_v"
                else ""
            )
            differences.append(f"c is {got.target:.5g}, not {wanted:.5g}{hint if told is not None else ''}")
        elif told is None and got.target_rule == "constant":
            differences.append(f"c = {got.target:.5g} does not follow log V")
    if "coordinate" in e.expect and got.has_z and got.coordinate != e.expect["coordinate"]:
        differences.append(f"the coordinate is {got.coordinate!r}, not {e.expect['coordinate']!r}")
    if "label_smoothing" in e.expect:
        believed = float(e.expect["label_smoothing"] or 0.0)
        seen = [got.label_smoothing or 0.0, got.extra.get("or_label_smoothing", got.label_smoothing or 0.0)]
        if all(abs(one - believed) > 1e-3 for one in seen):
            differences.append(f"label smoothing is {seen[0]:.4g}, not {believed:.4g}")
    if not differences:
        return None
    return found(
        e, f"Not as expected: {'; '.join(differences)}.", ratio, 1.0, quantity="λ relative to the expected one"
    )


def _scale(e: Evidence) -> float:
    """The weight on CE, to which an expected λ is relative; 1 where there is no CE or none that all tokens share."""
    scale = e.identified.ce_scale if e.has_ce and e.plain else 1.0
    # Sums are divided by whoever calls the loss.
    return abs(scale) if scale else 1.0


def _times_expected(e: Evidence) -> float | None:
    """λ relative to CE, in units of the expected one."""
    wanted = float(e.expect.get("coef") or 0.0)
    if not wanted or e.identified.coef is None:
        return None
    return e.identified.coef / _scale(e) / wanted


def _counted(e: Evidence) -> int:
    """How many times the expected λ is applied: a whole number ≥ 2; 0 if CE is scaled instead, or the factor is not whole."""
    ratio = _times_expected(e) or 0.0
    absolute = (e.identified.coef or 0.0) / float(e.expect["coef"]) if ratio else 1.0
    whole = ratio > 1.5 and abs(ratio - round(ratio)) < 2e-3 * ratio and abs(absolute - 1) > 1e-2
    return round(ratio) if whole else 0


@check(
    "error",
    "z",
    "add Z once: it is in the loss already",
    "λ is a multiple of the intended one",
    has=lambda z, y: _plain(z, y) + _z(z, y),
    misses=lambda z, y: _plain(z, y),
    options={"expect": {"coef": 1e-3}},
)
def counted_twice(e: Evidence) -> Found:
    """Is λ a whole multiple of the expected one?"""
    ratio = _times_expected(e)
    if ratio is None:
        raise NotSuppliedError("Pass `expect={'coef': λ}`: the λ you believe it applies.")
    if not (times := _counted(e)):
        return None
    words = f"λ relative to CE is {times} times the expected one: Z is added {times} times."
    return found(e, words, ratio, 1.0, quantity="λ relative to the expected one")


@check(
    "error",
    "calls",
    "return plain CE when λ is 0 or None",
    "a run with Z switched off still trains it",
    has=lambda z, y: _plain(z, y),
    misses=lambda z, y: _plain(z, y),
    options={"off": lambda z, y: _plain(z, y, 1e-4)},
    repeat=False,
)
def not_off(e: Evidence) -> Found:
    """Does `off=` still apply a Z?"""
    if e.off is None:
        raise NotSuppliedError("Pass `off=`: the same loss with its Z switched off.")
    off = identify(replace(e.off), e.space, e.seed).identified
    least = 1e-6 * abs(e.identified.coef or 1.0)
    if not off.has_z or (off.coef is not None and abs(off.coef) <= least):
        return None
    coef = off.coef if off.coef is not None else math.nan
    words = (
        f"With Z switched off the gradient still holds λ = {coef:.3g}." if off.coef else "`off=` still has a penalty."
    )
    return found(e, words, coef, 0.0, quantity="λ of `off=`")


# Facts about calls.


@check(
    "warning",
    "calls",
    "write into a copy, not into the caller's tensors",
    "whatever reads the logits afterwards reads something else",
    has=lambda z, y: _plain(z.mul_(2.0), y),
    misses=lambda z, y: _plain(z * 2.0, y),
    options={"logit_scale": 2.0},
    repeat=False,
)
def overwrites_input(e: Evidence) -> Found:
    """Do the caller's tensors change?"""
    probe = draw("half ignored", e.space, e.seed)
    for dtype in (e.loss.dtype, torch.float32, torch.bfloat16, torch.float16):
        seen = e.loss.attempt(probe, dtype) or e.loss.attempt(e.mixed[0], dtype)
        if seen is not None and seen.overwritten:
            words = f"{' and '.join(seen.overwritten)} no longer held the caller's {dtype_name(dtype)} values after the call."
            return found(e, words, 1.0, quantity="arguments that changed", dtype=dtype)
    return None


@check(
    "note",
    "calls",
    "divide by at least 1, so that a batch without targets gives 0",
    "a batch without targets gives NaN, as with most cross-entropies",
    has=lambda z, y: F.cross_entropy(z, y),
    misses=lambda z, y: _ce(z, y),
    repeat=False,
)
def all_ignored_nonfinite(e: Evidence) -> Found:
    """Is a batch without targets, or an infinite logit of an ignored token, not finite?"""
    if not e.masks:
        return None
    probe = draw("all ignored", e.space, e.seed)
    outcome = e.loss(probe)
    if not outcome.finite:
        return found(e, "A batch without targets is not finite (0/0).", None, 0.0, quantity="loss", on=probe)
    keep_T = torch.arange(len(probe.target_T)) != 1
    probe = e.mixed[0].masked(keep_T)
    broken = probe.logits_TV.clone()
    broken[1, 0] = math.inf
    if not e.loss.linear and e.loss(probe).finite and not math.isfinite(e.loss(replace(probe, logits_TV=broken)).value):
        words = "An infinite logit of an ignored token makes the loss non-finite: its mask multiplies (inf · 0)."
        return found(e, words, None, 0.0, quantity="loss", on=probe)
    return None


@check(
    "note",
    "calls",
    "detach the reported Z, or give it a gradient",
    "whoever adds the reported Z to a loss trains nothing with it",
    has=lambda z, y: (_plain(z, y), _Kernel.apply(_z(z, y), torch.zeros_like(z), True, z)),  # type: ignore[no-untyped-call]
    misses=lambda z, y: (_plain(z, y), _z(z, y).detach()),
    repeat=False,
)
def reported_z_no_gradient(e: Evidence) -> Found:
    """Does a returned Z claim a gradient that is zero?"""
    probe, outcome = e.mixed
    for name, item in outcome.others.items():
        # What has another value than the trained Z is something else, such as the Z-loss of a router.
        z, number = e.z_value(probe), float(item.detach())
        if item.requires_grad and number and z is not None and abs(number - z) < 5e-2 * abs(z):
            size = float(e.loss(probe, through=name).grad_TV.norm())
            if not size:
                words = f"The returned `{name}` has `requires_grad`, but its gradient at the logits is zero."
                return found(e, words, 0.0, None, quantity="norm of its gradient")
    return None


@check(
    "note",
    "fit",
    "subtract the constant if logged values are compared between losses",
    "none: a constant trains nothing",
    has=lambda z, y: _plain(z, y) + 1.0,
    misses=lambda z, y: _plain(z, y),
    repeat=False,
)
def constant_in_value(e: Evidence) -> Found:
    """Does the value hold a constant next to CE and Z?"""
    values = [(outcome.value, e.value(probe)) for kind, (probe, outcome) in e.base.items() if kind != "wide"]
    offsets = [value - stated for value, stated in values if stated is not None]
    if not offsets:
        return None
    worst = max(map(abs, offsets))
    scale = max(abs(outcome.value) for kind, (_, outcome) in e.base.items() if kind != "wide")
    if worst < 1e-4 * scale or max(offsets) - min(offsets) > 1e-2 * worst:
        return None
    words = f"The value is CE and Z and a constant of {offsets[0]:.5g}, which trains nothing."
    return found(e, words, offsets[0], quantity="value − (CE + Z)")


@check(
    "note",
    "calls",
    "pass the index that the loss ignores",
    "tokens marked with the other index are trained, or rejected",
    has=lambda z, y: F.cross_entropy(z, y, ignore_index=-1),
    misses=lambda z, y: F.cross_entropy(z, y, ignore_index=-100),
    repeat=False,
)
def other_ignore_index(e: Evidence) -> Found:
    """Does it ignore another index than the given one?"""
    if e.given_ignore is None:
        return None
    what = "and trains tokens marked with that" if e.given_trained else "which it rejects"
    words = f"It ignores {e.loss.ignore_index}, not {e.given_ignore}, {what}: audited with `ignore_index={e.loss.ignore_index}`."
    level: Severity | None = "error" if e.given_trained else None
    numbers = float(e.loss.ignore_index), float(e.given_ignore)
    return found(e, words, *numbers, quantity="the ignored index", severity=level)


@check(
    "note",
    "calls",
    "apply the same objective in every precision",
    "tests in fp64 say nothing about training",
    has=lambda z, y: _plain(z, y) if z.dtype != torch.float64 else _ce(z, y),
    misses=lambda z, y: _plain(z.float(), y),
    repeat=False,
)
def depends_on_dtype(e: Evidence) -> Found:
    """Do fp64 logits train something else than fp32 ones?"""
    if not e.other_dtype:
        return None
    words = f"With fp64 logits it trains something else ({e.other_dtype}): the answer is that of fp32."
    return found(e, words, None, None, quantity="source of a token in fp64 against fp32", dtype=torch.float64)


# What cannot be told.


@check(
    "warning",
    "calls",
    "find what else enters the gradient besides CE and Z before choosing λ",
    "λ and c have no meaning for it",
    has=lambda z, y: _ce(z, y) + _mean(1e-3 * z.logsumexp(-1).abs() ** 3, y),
    misses=lambda z, y: _ce(z, y) + _mean(1e-3 * z.logsumexp(-1).abs() ** 2, y),
    repeat=False,
)
def unexplained_source(e: Evidence) -> Found:
    """Is there something in the gradient besides CE and a known penalty?"""
    got = e.identified
    if e.changing:
        return None
    if got.reason:
        return found(
            e, got.reason, got.uncertainty.unexplained, None, quantity="share of the source without an explanation"
        )
    assert e.fitted is not None
    if "centered_coef" in got.extra:
        words = f"There are two penalties: λ = {got.coef:.5g} on log Z and λ = {got.extra['centered_coef']:.5g} on log Z − μ."
        return found(e, words, got.extra["centered_coef"], None, quantity="λ on log Z − μ")
    for penalty in e.fitted.form.penalties:
        if penalty.finding == "unexplained_source":
            words = f"The penalty is on {penalty.words}: {penalty.consequence}."
            return found(e, words, got.coef, None, quantity="λ of that penalty")
    if got.target_rule == "other" and not any(penalty.finding for penalty in e.fitted.form.penalties):
        words = "c changes with the vocabulary, but not as log V plus a constant."
        return found(e, words, got.target, math.log(got.vocab or 1), quantity=f"c at V = {got.vocab}, against log V")
    return None


REPEATS = 32
"""Calls on one batch, each with another random seed: whatever happens on every n-th call is seen up to n = 32."""


@check(
    "warning",
    "calls",
    "remove state and random numbers from the loss",
    "no two steps train the same objective",
    has=lambda z, y: _plain(F.dropout(z, 0.1), y),
    misses=lambda z, y: _plain(F.dropout(z, 0.1, training=False), y),
    repeat=False,
)
def not_repeatable(e: Evidence) -> Found:
    """Do the same inputs give different results?

    Runs last, so that it also sees whether the calls in between left a state behind.
    """
    if not e.changing:
        seeds: list[int | None] = [None, *(e.seed + 1000 + k for k in range(REPEATS))]
        loud = e.base.get("wide", e.mixed)
        e.changing = unrepeatable(e.loss, [e.mixed], seeds[:2]) or unrepeatable(e.loss, [loud], seeds)
    if not e.changing:
        return None
    return found(
        e, e.changing, None, 0.0, quantity="relative change between two calls with the same inputs", noise=1e-5
    )


EXPLAINS = {
    "padding_in_log_z": ("unexplained_source", "size_dependent", "low_precision_source"),
    "low_precision_source": ("unexplained_source", "filtered_source", "size_dependent", "overflow"),
    "filtered_source": ("unexplained_source",),
}
"""Findings → those that only restate them: the more specific one is reported."""


def answer_all(e: Evidence) -> tuple[Finding, ...]:
    """Every check; errors and warnings on a second draw too. One that only the first draw shows is not a finding."""
    answers = {id: one.answer(e) for id, one in CHECKS.items()}
    if answers["not_repeatable"].verdict == "finding":
        # Nothing that was measured between calls that differ holds.
        answers = {id: one.answer(e) for id, one in CHECKS.items()}
    for cause, effects in EXPLAINS.items():
        for id in effects if answers[cause].severity in ("error", "warning") else ():
            if answers[id].verdict == "finding":
                answers[id] = Finding(id, "not_applicable", f"Explained by {cause}.")
    doubted = [id for id, one in answers.items() if one.severity in ("error", "warning") and CHECKS[id].repeat]
    if doubted:
        second = e.again()
        for id in doubted:
            if CHECKS[id].answer(second).verdict != "finding":
                seen = answers[id].sentence
                answers[id] = Finding(
                    id, "not_applicable", f"One draw of the probes shows it and a second does not: {seen}"
                )
    return tuple(answers.values())
