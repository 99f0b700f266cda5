"""Identification: how a loss is called, what explains its gradient, and the numbers of that, confirmed on a second draw."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from zloss.audit.loss.calls import Loss, LossCallError, Outcome, find_call
from zloss.audit.loss.fit import (
    CENTERED,
    RAW,
    ROUNDING,
    Curve,
    Fitted,
    Form,
    Measured,
    Parts,
    amounts,
    explain,
    fit,
    line,
    measure,
    measure_curve,
)
from zloss.audit.loss.probes import KINDS, Probe, Space, Warp, draw, joined, seeded
from zloss.results.loss_audit import Identified, Uncertainty

SIZES = ((1, 0.25), (1, 1.0), (1, 0.625), (2, 0.375), (2, 1.0), (4, 1.0))
"""(divisor of the probe's rows, share that is valid); half the rows with a mask first, for losses that remember."""
OFFSET = 101
"""Between the seeds of the two draws."""
SECOND_VOCAB = 1000
TOLERANCE = 1e-2
"""Relative change of a weight that is not rounding."""
COUNTS: dict[str, Callable[[int, int], float]] = {
    "valid": lambda valid, tokens: valid,
    "all": lambda valid, tokens: tokens,
    "sum": lambda valid, tokens: 1.0,
    "valid+1": lambda valid, tokens: valid + 1,
    "sqrt_valid": lambda valid, tokens: math.sqrt(valid),
}
"""Denominator → count. The last two are slips that have been seen."""


@dataclass
class Evidence:
    """What is known of a loss: the inputs of every check."""

    loss: Loss
    space: Space
    seed: int
    base: dict[str, tuple[Probe, Outcome]]
    """The batches of the identification in `loss.dtype`; one that gave NaN or Inf is missing."""
    identified: Identified
    fitted: Fitted | None = None
    curve: Curve | None = None
    fine: torch.dtype = torch.float32
    """The precision in which the numbers were read: fp64 where the loss trains the same there."""
    expect: dict[str, Any] = field(default_factory=dict)
    off: Loss | None = None
    per_token: Loss | None = None
    batches: list[Measured] = field(default_factory=list)
    """Batches of several sizes and masks."""
    masks: bool = True
    """The loss takes ignored targets."""
    other_dtype: str = ""
    """In words, how fp64 logits train something else than fp32 ones."""
    given_ignore: int | None = None
    """The ignore index that was given, where the loss has another one."""
    given_trained: bool = False
    """Whether the loss trains tokens with the given index; else it rejects them."""
    moves: bool = True
    """Whether c of a penalty changes with the vocabulary, or that is not known."""
    heads: dict[Any, Any] = field(default_factory=dict)
    """Calls on 16-bit heads, by what was asked (`sixteen_bits.call_head`)."""
    changing: str = ""
    """In words, how a repeated call gave something else."""

    @property
    def mixed(self) -> tuple[Probe, Outcome]:
        return self.base["mixed"]

    @property
    def has_ce(self) -> bool:
        return self.identified.ce_denominator != "none"

    @property
    def plain(self) -> bool:
        """Every token has the same weight, so that the gradient on new logits is known."""
        return self.fitted is not None and self.fitted.uniform

    def again(self) -> Evidence:
        """The same on a second, independent draw."""
        seed = self.seed + OFFSET
        base = take(self.loss, self.space, seed)
        return replace(self, seed=seed, base=base) if "mixed" in base else self

    def count(self, part: str, valid: int, tokens: int) -> float:
        """The count by which a part is divided, relative to that of the batches where its weight was identified."""
        name = self.identified.ce_denominator if part == "CE" else self.identified.z_denominator
        of, here = COUNTS.get(name or "valid", COUNTS["valid"]), self.space.tokens
        return max(of(valid, self.rows(tokens)), 1.0) / of(here, self.rows(here))

    def rows(self, tokens: int) -> int:
        """The rows that the loss is given for so many tokens: one more per sequence if it shifts its targets."""
        return tokens + self.loss.shift * max(self.loss.sequences, 1)

    def at(self, vocab: int) -> Fitted | None:
        """The fit at another vocabulary, which c may follow; None if it is not known there."""
        fitted = self.fitted
        if fitted is None or vocab == self.space.lanes or not fitted.slopes or not self.moves:
            return fitted
        if self.identified.target_rule != "log_v" or len(fitted.slopes) > 1:
            return None
        moved = fitted.levels[0] + fitted.slopes[0] * math.log(vocab / self.space.lanes)
        return replace(fitted, levels=(moved,))

    def wanted(self, probe: Probe) -> tuple[torch.Tensor, torch.Tensor]:
        """(whole gradient, its Z part) of the identified objective on a batch, in fp64."""
        fitted = self.at(probe.lanes)
        assert fitted is not None
        valid, tokens = int(probe.valid_T.sum()), len(probe.target_T)
        z_TV = fitted.source(probe, 0.0, 1 / self.count("Z", valid, tokens))
        return fitted.source(probe, fitted.ce / self.count("CE", valid, tokens), 0.0) + z_TV, z_TV

    def value(self, probe: Probe) -> float | None:
        """The scalar of the identified objective on a batch, up to a constant; None where it is not known."""
        fitted = self.at(probe.lanes)
        if (
            fitted is None
            or not fitted.uniform
            or fitted.beta
            or not self.has_ce
            or self.identified.curve
            or self.loss.shift
        ):
            return None
        z_TV, valid, tokens = probe.seen_TV, int(probe.valid_T.sum()), len(probe.target_T)
        picked_T = z_TV.gather(1, probe.target_T.clamp(min=0).unsqueeze(1)).squeeze(1)
        epsilon = fitted.epsilon(probe.lanes)
        ce_T = z_TV.logsumexp(-1) - (1 - epsilon) * picked_T - epsilon * z_TV.mean(-1)
        rows_T = fitted.ce / self.count("CE", valid, tokens) * ce_T
        for penalty, slope, level in zip(fitted.form.penalties, fitted.slopes, fitted.levels, strict=True):
            if slope:
                z_T = slope / 2 * (penalty.value(z_TV) - level / slope).square()
                rows_T = rows_T + z_T / self.count("Z", valid, tokens)
        return float(rows_T[probe.valid_T].sum())

    def z_value(self, probe: Probe) -> float | None:
        """The penalty in the scalar of the identified objective."""
        if self.fitted is None or (whole := self.value(probe)) is None:
            return None
        plain = replace(self.fitted, form=Form(smoothing=self.fitted.form.smoothing), slopes=(), levels=())
        ce = replace(self, fitted=plain).value(probe)
        return None if ce is None else whole - ce

    def differs(self, seen: Measured, tolerance: float = TOLERANCE) -> str:
        """In words, how a batch differs from what was identified; "" where it does not."""
        if self.fitted is None:
            return ""
        words, got = [], self.identified
        for part, factor, name in (("CE", seen.ce, got.ce_denominator), ("Z", seen.z, got.z_denominator)):
            count = self.count(part, seen.valid, seen.tokens)
            exact = factor * count
            # Means of groups weigh tokens unevenly under a mask.
            known = (self.fitted.uniform or part == "Z") and not seen.uneven
            known = known and (name in COUNTS or name == "mean") and (part == "CE" or bool(self.fitted.slopes))
            if known and abs(exact - 1) > tolerance + seen.slack * count * (part == "Z"):
                words.append(f"the weight on {part} is {exact:.4g} times the expected one")
        if seen.left > tolerance and not words:
            words.append(f"{min(seen.left, 1.0):.1%} of the source of a token is not what was identified")
        if seen.silent_T.any() and self.fitted.uniform and self.has_ce:
            rows = seen.silent_T.nonzero().flatten().tolist()
            one = f"token {rows[0]} gets" if len(rows) == 1 else f"{len(rows)} of {seen.valid} tokens get"
            words.append(f"{one} no gradient")
        return " and ".join(words)

    def measured(self, probe: Probe, dtype: torch.dtype | None = None, *, eps: float | None = None) -> Measured | None:
        """The loss on a batch; None if it rejects it or is not finite."""
        outcome = self.loss.attempt(probe, dtype)
        if outcome is None or self.fitted is None:
            return None
        fitted = self.at(probe.lanes) or self.fitted
        return measure(fitted, probe, outcome.grad_TV, self.unit(dtype) if eps is None else eps)

    def unit(self, dtype: torch.dtype | None = None) -> float:
        """The unit roundoff of a call in `dtype`, by default that of the loss."""
        return max(self.fitted.eps if self.fitted else 0.0, torch.finfo(dtype or self.loss.dtype).eps / 2)


def take(loss: Loss, space: Space, seed: int, dtype: torch.dtype | None = None) -> dict[str, tuple[Probe, Outcome]]:
    """The batches of one draw with the finite answers to them."""
    probes = [draw(kind, space, seed) for kind in (KINDS if space.warp.cap is None else ("mixed", "calm"))]
    return {probe.name: (probe, outcome) for probe in probes if (outcome := loss.attempt(probe, dtype)) is not None}


def identify(loss: Loss, space: Space, seed: int) -> Evidence:
    """Find how the loss is called, explain its gradient, name its denominators, and confirm on a second draw."""
    find_call(loss, space)
    given = loss.ignore_index
    space, masks, trained = _find_ignored(loss, space)
    base = take(loss, space, seed)
    empty = Identified(
        None, None, None, None, "unknown", None, Uncertainty(), vocab=space.lanes, targets=loss.targets,
        computes_in="float32", ce_scale=None, label_smoothing=None, ce_weights=None,
    )  # fmt: skip
    e = Evidence(loss, space, seed, base, empty, fine=loss.dtype, masks=masks)
    e.given_ignore, e.given_trained = (given if given != loss.ignore_index else None), trained
    if "mixed" not in base:
        raise LossCallError(f"{loss.name} gave a loss that is not finite on a batch on which it was finite before.")
    if words := unrepeatable(loss, [base["mixed"]], [None, seed + 12345]):
        e.changing = words
        return _open(e, words)
    _explain(e)
    if e.fitted is None:
        return _other_form(e)
    _describe(e)
    for kind in (*base, "calm"):
        probe = draw(kind, e.space, seed + OFFSET)
        seen = e.measured(probe, e.fine)
        words = "it is not finite there" if seen is None else e.differs(seen, TOLERANCE if e.fitted.slopes else 1e-4)
        if words:
            e.fitted = None
            return _open(e, f"A second draw of the probes ({kind} logits) shows something else: {words}.")
    return e


def _open(e: Evidence, reason: str, **known: Any) -> Evidence:
    """Nothing is claimed but what `known` says."""
    blank = {"has_z": None, "coef": None, "target": None, "coordinate": None, "z_denominator": None}
    unknown: dict[str, Any] = {
        "ce_denominator": "unknown",
        "ce_scale": None,
        "label_smoothing": None,
        "ce_weights": None,
    }
    e.identified = replace(e.identified, **{**blank, **unknown, **known}, reason=reason)
    return e


def _find_ignored(loss: Loss, space: Space) -> tuple[Space, bool, bool]:
    """(the space without classes that get no gradient, whether masks are accepted, whether the given index is trained).

    The ignore index is set on `loss` where another one than the given one is at work.
    """
    half = draw("half ignored", space, loss.seed)

    def clean(index: int) -> bool | None:
        """Whether ignored tokens get no gradient; None if such a batch is rejected."""
        other = replace(loss, ignore_index=index)
        try:
            grad_TV = other(half).grad_TV
        except LossCallError:
            return None
        rows = grad_TV.isfinite().all(-1) & (grad_TV.norm(dim=-1) > 1e-7 * float(grad_TV[half.valid_T].norm()))
        return not bool(rows[~half.valid_T].any())

    given = clean(loss.ignore_index)
    if not given:
        others = [index for index in (-100, -1, 0, space.lanes - 1) if index != loss.ignore_index]
        loss.ignore_index = next((index for index in others if clean(index)), loss.ignore_index)
    avoid = space.avoid | ({loss.ignore_index} if 0 <= loss.ignore_index < space.lanes else frozenset())
    # Every class is a target once, the first and the last of a large vocabulary: one without a gradient is ignored too.
    classes = torch.arange(space.lanes)
    classes = torch.cat([classes, classes[:5]]) if space.lanes <= 512 else torch.cat([classes[:64], classes[-64:]])
    probe = draw("mixed", replace(space, tokens=len(classes)), loss.seed)
    outcome = loss.attempt(replace(probe, target_T=classes))
    if outcome is not None:
        silent = set(classes[outcome.grad_TV.norm(dim=-1) == 0].tolist())
        avoid |= frozenset(silent if len(silent) <= 2 else ())
    return replace(space, avoid=avoid), given is not None or clean(loss.ignore_index) is not None, given is False


def _explain(e: Evidence) -> None:
    """fp32, in which losses train, decides what is there; fp64 gives the digits where it trains the same."""
    loss = e.loss
    parts = [(probe, outcome.grad_TV) for probe, outcome in e.base.values()]
    own = ("float32",) if loss.dtype == torch.float32 else ("float64", "float32")
    e.fitted = explain(parts, own, linear=loss.linear)
    fine = take(loss, e.space, e.seed, torch.float64)
    if loss.dtype == torch.float64 or fine.keys() != e.base.keys():
        return
    # A small penalty may hide in the rounding of fp32, or be amplified by it: what explains fp64 is taken if fp32 agrees.
    fine_parts = [(probe, outcome.grad_TV) for probe, outcome in fine.values()]
    again = explain(fine_parts, ("float64", "float32"), linear=loss.linear)
    if again is not None and not _unlike(again, parts):
        e.fine, e.fitted = torch.float64, _refined(e, again, torch.float64)
    elif e.fitted is not None and (words := _unlike(e.fitted, fine_parts)):
        e.other_dtype = words


def _unlike(fitted: Fitted, parts: Parts) -> str:
    """In words, how batches differ from a fit beyond fp32 rounding; "" if they do not."""
    for probe, grad_TV in parts:
        seen = measure(fitted, probe, grad_TV, 2.0**-24)
        if fitted.uniform and abs(fitted.ce) > 1e-9 and abs(seen.ce - 1) > TOLERANCE:
            return f"the weight on CE is {seen.ce:.4g} times that with fp32"
        if seen.left > 0.2 or abs(seen.z - 1) > 5e-2 + seen.slack:
            return (
                f"λ is {seen.z:.4g} times that with fp32, and {min(seen.left, 1.0):.1%} of a source is something else"
            )
    return ""


def _refined(e: Evidence, fitted: Fitted, dtype: torch.dtype) -> Fitted:
    """λ and c of a loss that computes in fp32, from confident tokens: CE is silent there, so that only s itself is rounded."""
    probe = draw("confident", e.space, e.seed)
    plain = fitted.form in (Form((RAW,)), Form((CENTERED,))) and fitted.uniform and e.space.warp == Warp()
    if fitted.precision != "float32" or not plain or (outcome := e.loss.attempt(probe, dtype)) is None:
        return fitted
    penalty, shape_TV = fitted.form.penalties[0], fitted.form.shapes(probe)[1]
    s_T = (outcome.grad_TV * shape_TV).sum(-1) / shape_TV.square().sum(-1)
    sigma_T = fitted.eps * s_T.abs() + 1e-300
    (slope, level), errors, left = line(penalty.value(probe.seen_TV), s_T, sigma_T)
    near = abs(slope - fitted.slopes[0]) < max(1e-2 * abs(slope), 10 * fitted.errors[0][0])
    # A kernel that rounds 1 + s as a whole leaves more than the rounding of s.
    if not near or float(left.norm()) > ROUNDING * float(sigma_T.norm()):
        return fitted
    return replace(fitted, slopes=(slope,), levels=(level,), errors=((errors[0], errors[1]),))


def _other_form(e: Evidence) -> Evidence:
    """What can be said of a gradient that no form explains: rounding, a penalty of another form, or nothing."""
    parts = [(probe, outcome.grad_TV) for probe, outcome in e.base.values()]
    if (rounding := _rounding(e)) is not None:
        share, coordinate = rounding
        e.identified = replace(e.identified, computes_in="bfloat16", uncertainty=Uncertainty(unexplained=share))
        reason = f"16-bit rounding hides the numbers: {share:.1%} of the gradient beyond CE is noise."
        return _open(e, reason, **({"has_z": True, "coordinate": coordinate} if coordinate else {}))
    e.curve = measure_curve(parts, "float32")
    if e.curve is not None:
        seen, rows = e.curve.penalty, e.curve.rows.nonzero().flatten().tolist()
        known: dict[str, Any] = {"has_z": True, "coordinate": "other", "z_denominator": "unknown"}
        if e.curve.function:
            e.identified = replace(
                e.identified, penalty=f"a function of {seen.words} that is not a square", curve=e.curve.points
            )
            return _open(
                e,
                f"The penalty is a function of {seen.words}, but not λ(v − c)²: its measured points are given.",
                **known,
            )
        few = f"{', '.join(map(str, rows[:4]))}{', …' if len(rows) > 4 else ''}"
        total = int(e.mixed[0].valid_T.sum())
        where = (
            f"on {len(rows)} of {total} tokens only (row {few})"
            if 0 < len(rows) < total
            else "with an amount that is no function of it"
        )
        e.identified = replace(e.identified, penalty=f"{seen.words} {where}")
        return _open(
            e, f"There is a penalty on {seen.words} {where}: it depends on the batch or on the token.", **known
        )
    return _open(
        e,
        "The gradient of a token is not made of cross-entropy, label smoothing and one of the known penalties. If the loss caps "
        "or scales its logits, pass `softcap=` or `logit_scale=`; if it takes part of the vocabulary, `valid_vocab=`.",
    )


def _rounding(e: Evidence) -> tuple[float, str | None] | None:
    """(share of the gradient beyond CE that behaves like rounding, coordinate of what is left); None if it does not.

    What a wrong formula leaves is nearly the same after a small common shift; what rounding leaves is unrelated.
    """
    best: tuple[float, str | None] | None = None
    for penalty in (RAW, CENTERED):
        left, share, loud = [], 0.0, False
        for shift in (0.0, 0.37):
            probe = draw("continuous", e.space, e.seed).shifted(shift)
            outcome = e.loss.attempt(probe)
            if outcome is None:
                return None
            got = amounts(Form((penalty,)), probe, outcome.grad_TV, 2.0**-8)
            v_T = penalty.value(got.probe.seen_TV)
            w, slope = got.w_T.median(), float((v_T * got.s_KT[0]).sum() / v_T.square().sum())
            ce_TV, z_TV = Form((penalty,)).shapes(probe)
            z_TV = (slope * penalty.value(probe.seen_TV)).unsqueeze(-1) * z_TV
            left.append((outcome.grad_TV - w * ce_TV - z_TV)[probe.valid_T].flatten())
            share = float(left[-1].norm() / (outcome.grad_TV - w * ce_TV).norm().clamp(min=1e-300))
            loud = float(z_TV.norm()) > 3 * float(left[-1].norm())
        noise = abs(float(torch.cosine_similarity(left[0], left[1], dim=0))) < 0.5
        if noise and 1e-3 < share < 0.5 and (best is None or share < best[0]):
            best = share, penalty.coordinate if loud else None
    return best


def _describe(e: Evidence) -> None:
    """Denominators from batches of several sizes and masks, c at a second vocabulary, and the record."""
    fitted, space, loss = e.fitted, e.space, e.loss
    assert fitted is not None
    pool, generator = joined([probe for probe, _ in e.base.values()]), seeded(e.seed)
    for part, share in SIZES:
        rows = torch.randperm(len(pool.target_T), generator=generator)[: space.tokens // part]
        keep_T = torch.randperm(len(rows), generator=generator) < max(round(share * len(rows)), 1)
        probe = pool.take(rows).masked(keep_T)
        outcome = loss.attempt(probe) if share == 1.0 or e.masks else None
        if outcome is not None:
            # With token weights, the same rows are compared with themselves.
            alone = None if fitted.uniform else fitted.weights_T[rows][keep_T]
            e.batches.append(measure(fitted, probe, outcome.grad_TV, e.unit(), alone))
    weights = [(one.valid, e.rows(one.tokens), one.ce) for one in e.batches]
    ce_name = _count_name(weights, e.masks) if float(fitted.weights_T.abs().max()) > 1e-9 else "none"
    z_name = (
        _count_name([(one.valid, e.rows(one.tokens), one.z) for one in e.batches], e.masks) if fitted.slopes else None
    )
    if (
        ce_name == "other"
        and e.masks
        and fitted.uniform
        and len(weights) > 4
        and all(math.isclose(weights[i][2], weights[i + 1][2], rel_tol=1e-4) for i in (0, 3))
    ):
        e.changing = "The weight of a batch depends on earlier batches of its shape: a count or mask is kept by shape."
    names = (ce_name, z_name)
    counts = [COUNTS.get(name or "valid", COUNTS["valid"])(space.tokens, e.rows(space.tokens)) for name in names]
    rule = _second_vocabulary(e)
    fitted = e.fitted
    assert fitted is not None
    smoothing = fitted.smoothing
    if fitted.others_only:
        smoothing *= (fitted.others_only - 1) / fitted.others_only
    got = replace(
        e.identified,
        has_z=bool(fitted.slopes),
        ce_denominator=ce_name,
        z_denominator=z_name,
        ce_scale=(fitted.ce if fitted.uniform else float(fitted.weights_T.mean())) * counts[0],
        label_smoothing=smoothing,
        ce_weights=_weights(e),
        computes_in=fitted.precision,
        uncertainty=Uncertainty(unexplained=fitted.left),
        reason=None,
    )
    e.identified = _penalty(e, got, counts, rule) if fitted.slopes else got


def _penalty(e: Evidence, got: Identified, counts: list[float], rule: str | None) -> Identified:
    """The record with λ, c and coordinate."""
    fitted = e.fitted
    assert fitted is not None
    first, (slope, level), (ds, dl) = fitted.form.penalties[0], (fitted.slopes[0], fitted.levels[0]), fitted.errors[0]
    v_T = first.value(joined([probe for probe, _ in e.base.values()]).seen_TV)
    words = " and ".join(one.words for one in fitted.form.penalties)
    shared = fitted.shared or (got.ce_weights == "groups" and all(one.shared for one in e.batches if one.uneven))
    got = replace(got, penalty=words, z_weights="shared" if shared else "uniform")
    if not first.finding and abs(slope) * float(v_T.std()) < 1e-3 * abs(slope * float(v_T.mean()) - level):
        points = ((float(v_T.min()), -level / (fitted.ce or 1.0)), (float(v_T.max()), -level / (fitted.ce or 1.0)))
        return replace(
            got,
            coordinate="other",
            penalty=f"{words} without a square",
            curve=points,
            extra={"linear_coef": -level * counts[1]},
            reason=f"The penalty is linear in {words}: its source is the same everywhere, and there is no λ(v − c)² to name.",
        )
    coef, target = slope / 2 * counts[1], level / slope
    relative = 10 * ds / abs(slope) + 16 * fitted.eps
    extra = {"beta": fitted.beta} if fitted.beta else {}
    if fitted.form.penalties == (CENTERED, _second(fitted)) or fitted.form.penalties == (RAW, CENTERED):
        other = "shift" if fitted.form.penalties[0] is CENTERED else "centered"
        extra |= {
            f"{other}_coef": fitted.slopes[1] / 2 * counts[1],
            f"{other}_target": fitted.levels[1] / fitted.slopes[1],
        }
    scale = got.ce_scale or 1.0
    if first is CENTERED and len(fitted.slopes) == 1 and got.ce_denominator != "none" and abs(scale - 1) > 1e-6:
        # The same gradient: label smoothing ε = 1 − scale, with the c that this leaves.
        extra |= {"or_label_smoothing": 1 - scale, "or_target": (level + (1 - scale) / counts[0]) / slope}
    return replace(
        got,
        coef=coef,
        target=target,
        coordinate="other" if len(fitted.slopes) > 1 or fitted.beta else first.coordinate,
        target_rule=rule,
        extra=extra,
        uncertainty=Uncertainty(
            abs(coef) * relative, relative, 10 * (dl + abs(target) * ds) / abs(slope) + 1e-9, fitted.left
        ),
    )


def _second(fitted: Fitted) -> Any:
    return fitted.form.penalties[1] if len(fitted.form.penalties) > 1 else None


def _count_name(seen: list[tuple[int, int, float]], masks: bool) -> str:
    """The count whose product with the weight is constant."""
    for name, count in COUNTS.items():
        products = [weight * count(valid, tokens) for valid, tokens, weight in seen]
        if products and max(products) - min(products) < 5e-3 * abs(products[0]):
            return name if masks or name == "sum" else "mean"
    return "other"


def _weights(e: Evidence) -> str:
    """How the weight on CE differs between tokens: not, by group, by target class, by position, or by token."""
    fitted = e.fitted
    assert fitted is not None
    if fitted.uniform:
        return "groups" if any(one.uneven for one in e.batches) else "uniform"
    probes = [probe for probe, _ in e.base.values()]
    places = torch.cat([torch.arange(len(probe.target_T)) for probe in probes])
    groups = [fitted.weights_T[places == one] for one in torch.unique(places)]
    if all(float(one.max() - one.min()) <= 1e-3 * float(fitted.weights_T.abs().max()) for one in groups):
        return "position"
    parts = torch.split(fitted.weights_T, [len(probe.target_T) for probe in probes])
    weights = [
        dict(zip(one.target_T.tolist(), w_T.tolist(), strict=True)) for one, w_T in zip(probes, parts, strict=True)
    ]
    for one, other in itertools.combinations(weights, 2):
        # A sum of class weights that divides them differs between batches: only ratios are alike.
        ratios = [one[c] / other[c] if other[c] else math.nan for c in one.keys() & other.keys()]
        if ratios and not max(ratios) - min(ratios) <= 1e-3 * abs(ratios[0]):
            return "token"
    return "class"


def _second_vocabulary(e: Evidence) -> str | None:
    """How c follows V, and whether label smoothing is over the other classes only."""
    fitted, space = e.fitted, e.space
    if space.padded or fitted is None or not (fitted.slopes or fitted.smoothing):
        return None
    vocab = SECOND_VOCAB if space.lanes != SECOND_VOCAB else 2 * SECOND_VOCAB
    base = take(e.loss, space.sized(space.tokens, vocab), e.seed, e.fine)
    parts = [(probe, outcome.grad_TV) for probe, outcome in base.values()]
    again = fit(fitted.form, parts, fitted.precision) if parts else None
    if again is None:
        return None
    if fitted.smoothing:
        expected = (vocab / (vocab - 1)) / (space.lanes / (space.lanes - 1))
        if abs(again.smoothing / fitted.smoothing - expected) < 0.1 * abs(expected - 1):
            e.fitted = replace(fitted, others_only=space.lanes)
    if not again.slopes or not again.slopes[0] or not fitted.slopes[0]:
        return None
    moved = again.levels[0] / again.slopes[0] - fitted.levels[0] / fitted.slopes[0]
    others = zip(fitted.slopes[1:], fitted.levels[1:], again.slopes[1:], again.levels[1:], strict=True)
    target = abs(fitted.levels[0] / fitted.slopes[0])
    slack = 20 * sum((one.errors[0][1] + target * one.errors[0][0]) / abs(one.slopes[0]) for one in (fitted, again))
    slack = max(1e-2, slack)
    e.moves = abs(moved) >= slack or any(abs(d / (c or 1e-300) - b / (a or 1e-300)) >= slack for a, b, c, d in others)
    if abs(moved) < slack:
        return "constant"
    return "log_v" if abs(moved - math.log(vocab / space.lanes)) < slack else "other"


def relative(seen: torch.Tensor, wanted: torch.Tensor) -> float:
    """‖seen − wanted‖/‖wanted‖."""
    return float((seen - wanted).norm() / wanted.norm().clamp(min=1e-300))


def unrepeatable(loss: Loss, pairs: Iterable[tuple[Probe, Outcome]], seeds: list[int | None]) -> str:
    """How the same inputs gave another result; "" if they did not."""
    for probe, first in pairs:
        for seed in seeds:
            try:
                now = loss(probe, seed=seed)
            except LossCallError as error:
                return f"A call that worked fails when it is repeated: {error}"
            off = max(relative(now.grad_TV, first.grad_TV), abs(now.value - first.value) / max(abs(first.value), 1e-12))
            if not off < 1e-5:
                why = "random numbers" if seed is not None else "a state that it keeps"
                changed = f"The same inputs give a different result when called again (relative change {off:.2g})"
                return f"{changed}: the loss uses {why}."
    return ""
