"""Identification: from the gradients of a few probe batches to λ, c, coordinate and denominators, with uncertainty.

The amounts of every token (`source.decompose`) are fitted by a penalty; batches of other sizes and masks show the denominators,
a second vocabulary how c follows V. Then everything has to hold on fresh batches (`_confirm`), or it is not reported.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from zloss.audit.loss import probes
from zloss.audit.loss.calls import BlackBox, LossCallError, Outcome, probe_width
from zloss.audit.loss.probes import Probe, Reference, Space, draw, seeded
from zloss.audit.loss.source import (
    CENTERED,
    COARSE,
    COUNTS,
    FOURTH,
    NAMED,
    RAW,
    ROUNDING,
    SUMS,
    UNIT,
    UNMASKED,
    Fit,
    Model,
    Penalty,
    Quantity,
    Rows,
    Warp,
    best_fit,
    decompose,
    fit,
    nothing_but_ce,
    token_count,
)
from zloss.results.loss_audit import Identified, Uncertainty

How = Literal["none", "explained", "filtered", "rounded", "other", "unexplained"]
"""`none`: cross-entropy alone explains everything. `explained`: a penalty does. `filtered`: it does, except for entries that
were set to exactly 0. `rounded`: it does up to noise of low precision. `other`: a function of log Z that is not a square."""
APART = ("mixed", "saturated", "wide", "crowded")
OFFSET = 101
"""Between the seeds of the two draws."""
COVERAGE = 10.0
"""Standard errors in a stated uncertainty: rounding is not Gaussian, and tokens of one batch share some of it."""
ROUGHLY = 0.3
"""The share of the non-CE gradient that low precision may leave unexplained."""
SHARE = 1e-2
"""What may be left of the Z source (of the CE where there is no Z) on fresh batches, beyond rounding."""
SECOND_VOCAB = 1000
DENSE_TOKENS, DENSE_WIDTH = 40, 72
POWERS = {"1/√D": -0.5, "1/D": -1.0, "√D": 0.5}
"""Rules by which a factor on the logits follows the width, and their exponents."""


@dataclass(frozen=True)
class Draw:
    """One draw of the probes and what the loss answered; a probe missing among the outcomes gave NaN or Inf."""

    seed: int
    probes: dict[str, Probe]
    outcomes: dict[str, Outcome]

    def parts(self, *names: str) -> list[tuple[Probe, Tensor]]:
        return [(self.probes[name], self.outcomes[name].grad_TV) for name in names if name in self.outcomes]


@dataclass(frozen=True)
class SpecialClass:
    """One class against the median of all: the weight on its CE, and its Z source (None where no Z shows)."""

    index: int
    ce: float
    z: float | None

    @property
    def shares(self) -> bool:
        """Whether its Z carries the weight of its CE."""
        return self.z is not None and abs(self.z - self.ce) < 1e-2 * max(abs(self.ce), abs(self.z), 1e-2)

    @property
    def words(self) -> str:
        weights = [] if abs(self.ce - 1) < 1e-3 else [_times(self.ce, "cross-entropy")]
        if self.z is not None and abs(self.z - 1) >= 1e-2:
            weights.append(_times(self.z, "Z"))
        return f"class {self.index} has {' and '.join(weights)}"


def _times(factor: float, part: str) -> str:
    return f"no {part}" if abs(factor) < 1e-3 else f"{factor:.4g} times the {part} of the others"


@dataclass(frozen=True)
class Weights:
    """What one batch showed: the weight on each CE and on each λ(v − c)²."""

    tokens: int
    valid: int
    ce: float
    z: float
    """λ·w_z; 0 where the loss has no Z."""
    slack: float
    """Relative error of `z`."""
    spread: bool
    """Whether the weights of the valid tokens differ; then `ce` is their mean."""
    shared: bool
    """Whether the Z of a token carries the weight of its CE."""
    misplaced: bool
    """Whether ignored tokens have a gradient and some valid ones none: the mask is not where the targets are."""


@dataclass(frozen=True)
class Identification:
    """Everything the findings need: the draws, what explains them, and the model built from it."""

    space: Space
    dtype: torch.dtype
    eps: float
    first: Draw
    how: How
    rows: Rows
    fit: Fit | None
    identified: Identified
    model: Model = field(default_factory=Model)
    weights: tuple[Weights, ...] = ()
    masks_accepted: bool = True
    special: tuple[SpecialClass, ...] = ()
    """Classes with a weight of their own, which no probe has as a target; of a loss that treats all others alike."""
    second: Draw | None = None
    kept_state: str | None = None
    """In one sentence, what the loss keeps between calls, where that was seen."""
    scale_power: float = 0.0
    """k of a linear loss whose logit scale follows D^k; the model holds it for the width of the probes."""
    targets_unused: bool = False
    """Whether the loss is a function of the logits alone."""

    @property
    def known(self) -> bool:
        """Whether the numbers of what the loss applies are known."""
        return self.identified.has_z is not None and self.identified.reason is None

    @property
    def trusted(self) -> bool:
        """Whether the model predicts gradients on new logits: token weights are not known there."""
        alike = self.identified.ce_weights in ("uniform", "groups") or bool(self.special)
        return self.known and self.how in ("none", "explained", "filtered") and alike

    @property
    def plain(self) -> bool:
        """Whether the model holds for every head: trusted, whole, in more than 16 bits, and without a gain."""
        return self.trusted and self.how != "filtered" and not self.coarse and not self.damped

    @property
    def coarse(self) -> bool:
        return self.eps > COARSE

    @property
    def damped(self) -> bool:
        return self.fit is not None and self.fit.damping is not None

    def model_at(self, width: int) -> Model:
        """The model of a linear loss at another width D of its head."""
        if self.scale_power == 0.0:
            return self.model
        factor = (width / probe_width(self.space.tokens, self.space.width)) ** self.scale_power
        return replace(self.model, warp=replace(self.model.warp, scale=self.model.warp.scale * factor))


def unexplained(
    ident: Identification, reason: str, *, targets: str = "given", has_z: bool | None = None, seen: str = "unknown"
) -> Identification:
    """The same where numbers cannot be given, for `reason`; `has_z` and `seen` where the kind of penalty is known."""
    record = Identified(
        has_z=has_z,
        coef=None,
        target=None,
        coordinate="other" if has_z else None,
        ce_denominator="unknown",
        z_denominator="unknown" if has_z else None,
        uncertainty=Uncertainty(),
        penalty=seen,
        vocab=ident.space.lanes,
        ce_scale=None,
        label_smoothing=None,
        ce_weights=None,
        computes_in=ident.identified.computes_in,
        targets=targets,
        reason=reason,
    )
    return replace(ident, identified=record, how="unexplained", model=Model(probe_vocab=ident.space.lanes))


def take_draw(box: BlackBox, space: Space, seed: int, dtype: torch.dtype, names: tuple[str, ...] = ()) -> Draw:
    """The batches of one seed and the finite answers to them."""
    made = {name: draw(name, space, seed) for name in names or (*APART, "confident")}
    outcomes = {name: box(probe, dtype) for name, probe in made.items()}
    return Draw(seed, made, {name: outcome for name, outcome in outcomes.items() if outcome.finite})


def identify(box: BlackBox, space: Space, seed: int, advance: Callable[[], None] = lambda: None) -> Identification:
    """Probe one loss, name what it applies, and confirm that on a second draw.

    `box` is left as the loss wants to be called: `targets` and `added` are set on it.
    """
    space, special = _special_classes(box, space)
    dtype = accepted_dtype(box, space, seed)
    advance()
    ident = _identify(box, space, seed, dtype)
    advance()
    if not ident.known and ident.kept_state is None and (moved := _moved_targets(box, ident)) is not None:
        box.targets = moved
        again = _identify(box, space, seed, dtype)
        if again.known:
            ident = again
        else:
            box.targets = "given"
    if ident.known and ident.how == "none":
        ident = _with_added(box, space, seed, ident)
    if ident.known and ident.identified.ce_denominator == "none":
        ident = replace(ident, targets_unused=_targets_unused(box, ident))
    advance()
    return _confirm(box, _with_special(ident, special), seed)


def accepted_dtype(box: BlackBox, space: Space, seed: int) -> torch.dtype:
    """fp64 where the loss takes it, else fp32; an error where an ordinary batch gets no finite answer or no gradient."""
    probe = draw("mixed", space, seed)
    try:
        dtype, outcome = torch.float64, box(probe, torch.float64)
    except LossCallError:
        dtype, outcome = torch.float32, box(probe, torch.float32)
    if not outcome.finite:
        where = "loss" if not math.isfinite(outcome.value) else "gradient"
        raise LossCallError(
            f"{box.name} gave a non-finite {where} on ordinary finite logits with valid targets: "
            "there is nothing to identify. Check it on `torch.randn(64, 96)` first."
        )
    if not outcome.has_gradient:
        raise LossCallError(
            f"{box.name} returned a loss without a gradient (`requires_grad` is False): it cannot train anything. "
            "Return the loss before `.detach()`, and do not call it under `torch.no_grad()`."
        )
    return dtype


def _identify(box: BlackBox, space: Space, seed: int, dtype: torch.dtype) -> Identification:
    """The answer to one draw, with denominators and the rule of c."""
    precision = computes_in(box, draw("continuous", space, seed), dtype)
    eps = UNIT[precision]
    first = take_draw(box, space, seed, dtype)
    if "mixed" not in first.outcomes:
        raise LossCallError(f"{box.name} gave a non-finite loss or gradient on a batch on which it was finite before.")
    parts = first.parts(*APART)
    empty = Identified(None, None, None, None, "unknown", None, Uncertainty(), computes_in=precision)
    bare = Identification(space, dtype, eps, first, "unexplained", decompose(parts, eps), None, empty)
    if (changing := _unrepeatable(box, first, dtype, eps, seed)) is not None:
        return replace(unexplained(bare, changing, targets=box.targets), kept_state=changing)
    gain = torch.cat([probe.reference.gain_squared_T for probe, _ in parts]) if box.linear else None
    how, rows, chosen = _explain(box, bare.rows, gain, space, seed, dtype)
    if chosen is not None and bare.coarse:
        chosen = _refined(chosen, first, eps)
    ident = replace(bare, how=how, rows=rows, fit=chosen)
    if chosen is None:
        return _other_form(ident, box)
    ident = _with_denominators(box, ident, seed)
    rule, ident = _second_vocabulary(box, ident, seed)
    return replace(ident, identified=_describe(ident, precision, rule, box.targets))


# What explains the amounts.


def _explain(
    box: BlackBox, rows: Rows, gain: Tensor | None, space: Space, seed: int, dtype: torch.dtype
) -> tuple[How, Rows, Fit | None]:
    """Three shapes, then a fourth, then entries that are missing, then 16-bit noise, then scaled or capped logits."""
    if rows.exact:
        if (bare := nothing_but_ce(rows)) is not None:
            return "none", rows, bare
        if (chosen := best_fit(rows, gain)) is not None:
            return "explained", rows, chosen
    fourths = [decompose(rows.parts, rows.eps, fourth=fourth) for fourth in FOURTH]
    fits = [(found, again) for again in fourths if again.exact and (found := best_fit(again)) is not None]
    if fits := [(found, again) for found, again in fits if found.quantities[0].fourth]:
        chosen, again = min(fits, key=lambda one: one[0].chi)
        return "explained", again, chosen
    kept = decompose(rows.parts, rows.eps, nonzero_only=True)
    most = float(kept.solved_T.double().mean()) > 0.7
    if (
        not rows.exact
        and kept.exact
        and most
        and nothing_but_ce(kept) is None
        and (chosen := best_fit(kept)) is not None
    ):
        return "filtered", kept, chosen
    if (rough := _rounded(box, rows, space, seed, dtype)) is not None:
        return "rounded", rows, rough
    if not rows.exact:
        for warp in _warps(rows):
            # The search is no finer than this, whatever the arithmetic of the loss.
            warped = decompose(rows.parts, max(rows.eps, 1e-8), warp=warp)
            chosen = None if not warped.exact else nothing_but_ce(warped) or best_fit(warped)
            if chosen is not None and (not chosen.quantities or chosen.quantities[0] in (RAW, CENTERED)):
                return ("explained" if chosen.quantities else "none"), warped, chosen
    return "unexplained", rows, None


def _rounded(box: BlackBox, rows: Rows, space: Space, seed: int, dtype: torch.dtype) -> Fit | None:
    """The nearest right penalty if it leaves little, and what it leaves is noise.

    A wrong formula leaves nearly the same residual after a small common shift; rounding leaves an unrelated one.
    """
    rough, b_T = nearest(rows), rows.b_T[rows.solved_T]
    if rough.worst > ROUGHLY or bool(((b_T - b_T.median()).abs() > 2e-2 * b_T.median().abs()).any()):
        return None
    left = []
    for shift in (0.0, 0.37):
        probe = draw("continuous", space, seed).shifted(shift)
        outcome = box(probe, dtype)
        if not outcome.finite:
            return None
        r, lead = probe.reference, rough.quantities[0]
        source_T = rough.slope[0] * lead.value(r) - rough.offset[0]
        ce_TV = rough.mean_weight * (r.p_TV - r.onehot_TV)
        left.append(outcome.grad_TV - ce_TV - source_T.unsqueeze(-1) * lead.shape(r))
    return rough if _cosine(*left) < 0.5 else None


def _refined(chosen: Fit, first: Draw, eps: float) -> Fit:
    """λ and c of a 16-bit loss from saturated tokens on their target, where CE is silent: there only s itself is rounded."""
    parts = first.parts("confident")
    if chosen.quantities not in ((RAW,), (CENTERED,)) or chosen.shared or not parts:
        return chosen
    ((probe, grad_TV),) = parts
    r, use = probe.reference, probe.saturated_T
    along = (chosen.quantities[0].shape(r) * r.argmax_TV(split=False)).sum(-1)
    s_T = (grad_TV * r.argmax_TV(split=False)).sum(-1) / along
    v, s, sigma = chosen.quantities[0].value(r)[use], s_T[use], eps * s_T[use].abs() + 1e-300
    slope, level = _line(v, s, sigma)
    if float(((s - slope * v - level) / sigma).abs().max()) > 3:
        return chosen
    columns = torch.stack([v, torch.ones_like(v)], dim=-1) / sigma.unsqueeze(-1)
    errors = torch.linalg.inv(columns.T @ columns).diagonal().clamp(min=0).sqrt().tolist()
    return replace(chosen, slope=(slope,), offset=(-level,), slope_error=(errors[0],), offset_error=(errors[1],))


def nearest(rows: Rows) -> Fit:
    """The right penalty that leaves less, whether or not that is little enough."""
    return min((fit(rows, (q,)) for q in (RAW, CENTERED)), key=lambda one: one.worst)


def _warps(rows: Rows) -> list[Warp]:
    """The best scale, softcap, and both together, from ordinary rows: Gauss–Newton in the logarithms, from a grid."""
    probe, grad_TV = rows.parts[0]
    some = (~probe.saturated_T).nonzero().flatten()[:20]
    ordinary = [(probe.take(some), grad_TV[some])]
    p, q = ordinary[0][0].reference, ordinary[0][1]

    def left(at: Tensor) -> Tensor:
        """What the three shapes leave of every row, relative to it."""
        scale, cap = (math.exp(x) for x in at.tolist())
        warp = Warp(scale, None if cap > 1e4 else cap)
        r = warp.reference(p)
        basis = torch.stack([warp.transport(p, x) for x in (r.p_TV, r.onehot_TV, r.uniform_TV)], dim=-1)
        size = basis.norm(dim=1, keepdim=True).clamp(min=1e-300)
        x = torch.linalg.lstsq(basis / size, q.unsqueeze(-1)).solution
        left_TV: Tensor = (q - (basis / size @ x).squeeze(-1)) / q.norm(dim=-1, keepdim=True).clamp(min=1e-300)
        return left_TV.flatten()

    none = math.log(1e5)
    scales, caps = torch.linspace(-4.0, 4.0, 25).tolist(), torch.linspace(math.log(2), math.log(512), 13).tolist()
    found = []
    for free, grid in (
        ((0,), [(s, none) for s in scales]),
        ((1,), [(0.0, c) for c in caps]),
        ((0, 1), [(s, c) for s in scales[::2] for c in caps]),
    ):
        start = min((torch.tensor(at, dtype=torch.float64) for at in grid), key=lambda at: float(left(at).norm()))
        at = _gauss_newton(left, start, free)
        scale, cap = (math.exp(x) for x in at.tolist())
        found.append((float(left(at).norm()), Warp(scale if 0 in free else 1.0, cap if 1 in free else None)))
        if found[-1][0] < 1e-5:
            break
    return [warp for misfit, warp in sorted(found, key=lambda one: one[0]) if misfit < 1e-3]


def _gauss_newton(left: Callable[[Tensor], Tensor], at: Tensor, free: tuple[int, ...]) -> Tensor:
    """The minimum of ‖left‖ over the free coordinates, with numeric derivatives and halved steps."""
    for _ in range(60):
        now = left(at)
        steps = [torch.zeros_like(at).index_fill(0, torch.tensor(i), 1e-6) for i in free]
        slopes = torch.stack([(left(at + step) - left(at - step)) / 2e-6 for step in steps], dim=-1)
        move = torch.zeros_like(at)
        move[list(free)] = torch.linalg.lstsq(slopes, -now.unsqueeze(-1)).solution.flatten()
        move = move.clamp(-1.0, 1.0)
        while float(move.abs().max()) > 1e-13 and float(left(at + move).norm()) > float(now.norm()):
            move = move / 2
        at = at + move
        if float(move.abs().max()) < 1e-12:
            break
    return at


def _other_form(ident: Identification, box: BlackBox) -> Identification:
    """What can be said where no penalty fits: on which tokens it acts, its curve against log Z, or nothing."""
    rows = ident.rows
    if not rows.exact:
        changed = "hidden states, weight, logits or targets" if box.linear else "logits or targets"
        return unexplained(
            ident,
            "The gradient of a token is not made of p, onehot(y) and 1/V alone, as those of cross-entropy and of penalties "
            f"on log Z are: the loss changes its {changed} in a way the audit does not know, or adds another term.",
            targets=box.targets,
        )
    view = source_view(rows)
    if view is None:
        return unexplained(
            ident,
            "The gradient of each token is along p, onehot(y) and 1/V, but no known objective gives these amounts.",
            targets=box.targets,
        )
    quantity, s_T, slack_T = view
    words, v_T = quantity.words.split(" (")[0], quantity.value(rows.reference)
    mean, use = float(rows.b_T[rows.solved_T].mean()), rows.solved_T
    for zeta_T in _token_weights(rows):
        s, v, slack = (s_T / zeta_T)[use], v_T[use], (slack_T / zeta_T.abs())[use]
        if _is_function(v, s, slack):
            seen = f"a function of {words} that is not a square"
            told = unexplained(
                ident,
                f"The gradient holds a penalty on {words} whose source is not proportional to {words} − c: "
                "`curve` has it as it was measured.",
                targets=box.targets,
                has_z=True,
                seen=seen,
            )
            order, weight = v.argsort(), mean or 1.0
            points = tuple({round(float(v[i]), 9): float(s[i]) / weight for i in order.tolist()}.items())
            return replace(told, how="other", identified=replace(told.identified, curve=points))
        seen, silent = _line_per_batch(v, s, slack, rows.batch_T[use], words)
        if silent:
            return unexplained(
                ident,
                "Some batches have a Z source and others none (calm logits against large ones): a part of the loss is "
                "switched or clipped by the size of the logits or of the loss, or by the batch.",
                targets=box.targets,
            )
        if seen or (seen := _some_tokens(v, s, slack, rows.batch_T[use], words)):
            return unexplained(ident, f"The gradient holds {seen}.", targets=box.targets, has_z=True, seen=seen)
    along = "p − 1/V" if quantity is CENTERED else "p"
    what = "is not a function of log Z alone"
    probe = probes.apart(ident.first.probes["mixed"], ident.space.avoid, seeded(7))
    other = source_view(decompose([(probe, box(probe, ident.dtype).grad_TV)], ident.eps))
    if other is not None:
        here, again = rows.batch_T == 0, decompose([(probe, box(probe, ident.dtype).grad_TV)], ident.eps).b_T
        slack = other[2] + slack_T[here] + 1e-3 * s_T[here].abs()
        ratio = rows.b_T[here] / torch.where(again == 0, torch.ones_like(again), again)
        if all(bool(((s - s_T[here]).abs() > slack).any()) for s in (other[1], other[1] * ratio)):
            what = "depends on the target, as no penalty on log Z does"
    return unexplained(ident, f"The gradient holds a source along {along} that {what}.", targets=box.targets)


def _token_weights(rows: Rows) -> list[Tensor]:
    """The weights that the Z of a token can carry: none of its own, or that of its CE."""
    mean = float(rows.b_T[rows.solved_T].mean())
    shared = not rows.uniform and mean and bool((rows.b_T.abs() > 1e-3 * abs(mean)).all())
    return [torch.ones_like(rows.b_T), *([rows.b_T / mean] if shared else [])]


def source_view(rows: Rows) -> tuple[Quantity, Tensor, Tensor] | None:
    """(quantity, s, tolerance) where all but cross-entropy lies along p (log Z) or along p − 1/V (log Z − μ)."""
    use, slack_T = rows.solved_T, rows.tolerance_T
    slack_g_T = slack_T * (rows.sigma_g_T / rows.sigma_T)
    loud = use & (rows.b_T.abs() > 10 * slack_T)
    kappa = float((rows.g_T[loud] / rows.b_T[loud]).median()) if bool(loud.any()) else 0.0
    if bool(((rows.g_T - kappa * rows.b_T).abs() <= 2 * slack_g_T + 1e-7 * rows.b_T.abs())[use].all()):
        return RAW, rows.k_T, slack_T
    if bool((rows.k_T.abs() <= slack_T)[use].all()):
        return CENTERED, rows.g_T, slack_g_T
    return None


def _some_tokens(v: Tensor, s: Tensor, slack: Tensor, batch: Tensor, words: str) -> str:
    """In words, on which tokens a squared penalty acts, where it acts on some only."""
    on = s.abs() > slack
    if int(on.sum()) < 2 or bool(on.all()):
        return ""
    line = _line(v[on], s[on], slack[on])
    expected = (line[0] * v + line[1]).abs()
    if bool(((s - line[0] * v - line[1]).abs() > slack + 1e-5 * s.abs())[on].any()) or bool(
        (expected[~on] <= slack[~on]).all()
    ):
        return ""
    batches = [(on[batch == i], expected[batch == i] <= slack[batch == i]) for i in sorted(set(batch.tolist()))]
    if len({len(one) for one, _ in batches}) > 1:
        return f"a squared penalty on {words} on some tokens only"
    anywhere = torch.stack([one for one, _ in batches]).any(0)
    if not all(bool(((one == anywhere) | silent).all()) for one, silent in batches):
        return f"a squared penalty on {words} on some tokens only, chosen by target or logits"
    places, tokens = anywhere.nonzero().flatten().tolist(), len(anywhere)
    steps = {b - a for a, b in pairwise(places)}
    if places == [tokens - 1]:
        where = "the last token"
    elif len(places) > 2 and len(steps) == 1 and (step := min(steps)) > 1:
        where = f"every {step}{'nd' if step == 2 else 'rd' if step == 3 else 'th'} token"
    else:
        where = f"{len(places)} of {tokens} tokens"
    return f"a squared penalty on {words} on {where} only"


def _line_per_batch(v: Tensor, s: Tensor, slack: Tensor, batch: Tensor, words: str) -> tuple[str, bool]:
    """In words, that s is linear in v within every batch, each with a line of its own; and whether some batch has none."""
    silent = False
    for i in sorted(set(batch.tolist())):
        here = batch == i
        silent = silent or bool((s.abs() <= slack)[here].all())
        line = _line(v[here], s[here], slack[here])
        if bool(((s - line[0] * v - line[1]).abs() > slack + 1e-5 * s.abs())[here].any()):
            return "", False
    return (
        f"a source that is linear in {words} within a batch, with a slope or level that changes from batch to batch",
        silent,
    )


def _line(v: Tensor, s: Tensor, slack: Tensor) -> tuple[float, float]:
    columns = torch.stack([v, torch.ones_like(v)], dim=-1) / slack.unsqueeze(-1)
    slope, level = torch.linalg.lstsq(columns, (s / slack).unsqueeze(-1), driver="gelsd").solution.flatten().tolist()
    return slope, level


def _is_function(v: Tensor, s: Tensor, slack: Tensor) -> bool:
    """Whether s hardly jumps when tokens are sorted by v, and is one number at one v whatever else differs."""
    order = v.argsort()
    v, s, slack = v[order], s[order], slack[order]
    spread = float(s.max() - s.min())
    alike = (v[1:] - v[:-1]).abs() < 1e-9
    same = not bool(((s[1:] - s[:-1]).abs() > slack[1:] + slack[:-1] + 1e-6 * s[1:].abs())[alike].any())
    return spread > 0 and same and float((s[1:] - s[:-1]).abs().sum()) < 6 * spread


# Denominators, and how c follows the vocabulary.

BATCHES = ((1, 1.0), (1, 0.25), (1, 0.625), (2, 1.0), (2, 0.375), (4, 1.0))
"""(divisor of the probe's rows, share that is valid): size and mask vary independently."""
CONSTANT = 2e-3
"""Relative spread below which weight × denominator counts as constant; N and N + 1 differ by 6 % at 16 tokens."""
NO_CE = 1e-9
"""A weight on CE below this is no CE: a penalty was audited alone."""


def weigh_batches(box: BlackBox, ident: Identification, seed: int) -> tuple[tuple[Weights, ...], bool]:
    """The weights in batches of several sizes and masks, and whether masks are accepted."""
    pool, generator = probes.joined([probe for probe, _ in ident.rows.parts]), seeded(seed)
    pool, tokens = pool.take(ident.rows.solved_T.nonzero().flatten()), ident.space.tokens
    seen: list[Weights] = []
    masks_accepted = True
    for count, valid in dict.fromkeys(
        (tokens // part, max(round(share * (tokens // part)), 1)) for part, share in BATCHES
    ):
        if count < 1:
            continue
        batch = pool.take(torch.randperm(len(pool.target_T), generator=generator)[:count])
        keep = torch.zeros(len(batch.target_T), dtype=torch.bool)
        keep[torch.randperm(len(keep), generator=generator)[:valid]] = True
        try:
            outcome = box(batch.masked(keep), ident.dtype)
        except LossCallError:
            # A loss may refuse a size, or ignored targets.
            masks_accepted = masks_accepted and valid == count
            continue
        if outcome.finite:
            seen.append(weigh(ident, batch, keep, outcome.grad_TV))
    return tuple(seen), masks_accepted and any(one.valid < one.tokens for one in seen)


def weigh(ident: Identification, batch: Probe, keep: Tensor, grad_TV: Tensor) -> Weights:
    """The weights of one batch of which the tokens of `keep` are valid."""
    chosen, at = ident.fit, keep.nonzero().flatten()
    assert chosen is not None
    rows = decompose(
        [(batch.take(at), grad_TV[at])],
        ident.rows.eps,
        warp=ident.rows.warp,
        fourth=ident.rows.fourth,
        nonzero_only=ident.how == "filtered",
    )
    use, b_T = rows.solved_T, rows.b_T
    mean = float(b_T[use].mean()) if bool(use.any()) else 0.0
    spread = not rows.uniform
    leaks = float(grad_TV[~keep].norm()) > 1e-6 * float(grad_TV.norm())
    ce = mean * (1 + chosen.smoothing)
    silent = (b_T.abs() < 1e-3 * abs(mean)) & use & (abs(mean) > NO_CE)
    if not chosen.quantities:
        return Weights(len(keep), len(at), ce, 0.0, 0.0, spread, True, leaks and bool(silent.any()))
    gain_T = batch.reference.gain_squared_T[at] if chosen.damping is not None else None
    unit = unit_amounts(chosen, rows.reference, gain_T)
    seen = torch.stack([rows.k_T, rows.g_T - chosen.smoothing * b_T, rows.m_T])
    sigma = torch.stack([rows.sigma_T, rows.sigma_g_T, rows.sigma_T])
    ways = []
    for shared in (False, True):
        column = unit * (b_T / mean) if shared and mean else unit
        size = float((column / sigma)[:, use].square().sum())
        z = float((column * seen / sigma**2)[:, use].sum()) / max(size, 1e-300)
        ways.append((float(((seen - z * column) / sigma)[:, use].norm()), z, shared, size))
    first = ways[0] if not spread or ways[0][0] <= ways[1][0] else ways[1]
    left, z, shared, size = first
    missing = (unit.norm(dim=0) > 20 * rows.tolerance_T) & (seen.norm(dim=0) <= rows.tolerance_T) & use
    misplaced = leaks and (bool(silent.any()) or bool(missing.any()))
    slack = left / max(math.sqrt(3 * int(use.sum())), 1.0) / max(math.sqrt(size), 1e-300) / max(abs(z), 1e-300)
    return Weights(len(keep), len(at), ce, z, slack, spread, shared, misplaced)


def unit_amounts(chosen: Fit, r: Reference, gain_T: Tensor | None) -> Tensor:
    """(k, g, m) [3, T] of the penalties at λ = w = 1 of the first one, the others in proportion."""
    total = torch.zeros(3, len(r.target_T), dtype=torch.float64)
    for quantity, slope, offset in zip(chosen.quantities, chosen.slope, chosen.offset, strict=True):
        source_T = chosen.quantities[0].factor * (slope * quantity.value(r) - offset) / chosen.slope[0]
        if chosen.damping is not None and gain_T is not None:
            source_T = source_T / (1 + chosen.damping * gain_T)
        total = total + torch.tensor(quantity.amounts, dtype=torch.float64).unsqueeze(-1) * source_T
    return total


def _with_denominators(box: BlackBox, ident: Identification, seed: int) -> Identification:
    """Name the counts that make the weights constant, and build the model from them."""
    chosen = ident.fit
    assert chosen is not None
    everything, accepted = weigh_batches(box, ident, seed)
    whole = [w for w in everything if w.valid == w.tokens]
    seen = list(everything)
    if any(w.misplaced for w in seen) and whole:
        # A mask that falls on other tokens says nothing about counts: only the sizes do.
        seen, accepted = whole, False
    tolerance = max(CONSTANT, 8 * ident.eps)
    ce_name, z_name = "unknown", None
    if seen:
        ce_name = _name_count([(w.valid, w.tokens, w.ce) for w in seen], accepted, tolerance)
        if all(abs(w.ce) < NO_CE for w in seen):
            ce_name = "none"
        if chosen.quantities:
            slack = max(tolerance, *(8 * w.slack for w in seen))
            z_name = _name_count([(w.valid, w.tokens, w.z) for w in seen], accepted, slack)
    model = _model(ident, ce_name, z_name)
    return replace(ident, weights=everything, masks_accepted=accepted, model=model)


def _name_count(seen: list[tuple[int, int, float]], accepted: bool, tolerance: float) -> str:
    """The count whose product with the weight stays constant."""
    best, smallest = "other", math.inf
    for name, count in COUNTS.items():
        if name in ("all", "all+1", "sqrt_all") and not accepted:
            continue
        products = torch.tensor([weight * count(valid, tokens) for valid, tokens, weight in seen], dtype=torch.float64)
        middle = float(products.median())
        spread = float((products.max() - products.min()) / abs(middle)) if middle else math.inf
        # An unusual count is named only where it is clearly the better one.
        usual = name in ("valid", "all", "sum")
        if spread < (smallest if usual else min(0.1 * smallest, smallest - 1e-12)):
            best, smallest = name, spread
    if smallest > tolerance:
        return "other"
    return best if accepted else UNMASKED.get(best, best)


def _model(ident: Identification, ce_name: str, z_name: str | None) -> Model:
    chosen, tokens = ident.fit, ident.space.tokens
    assert chosen is not None
    ce_count = token_count(ce_name, tokens, tokens)
    ce_scale = 0.0 if ce_name == "none" else chosen.mean_weight * (1 + chosen.smoothing) * ce_count
    smoothing = chosen.smoothing / (1 + chosen.smoothing)
    # Centered: a weight below 1 on onehot(y) is label smoothing, and its 1/V part must not be read as c.
    hidden = 0.0
    if CENTERED in chosen.quantities and not smoothing and ce_name != "sum" and 0.5 < ce_scale < 1 - 1e-3:
        smoothing = hidden = 1 - ce_scale
        ce_scale = 1.0
    z_count = token_count(z_name or "sum", tokens, tokens)
    penalties = []
    for quantity, slope, offset in zip(chosen.quantities, chosen.slope, chosen.offset, strict=True):
        offset = offset + (hidden / ce_count if quantity is CENTERED else 0.0)
        target = offset / slope if slope else 0.0
        penalties.append(Penalty(quantity, slope * z_count / quantity.factor, target, chosen.damping))
    return Model(tuple(penalties), ce_name, z_name, ce_scale, smoothing, ident.rows.warp, ident.space.lanes)


def _second_vocabulary(box: BlackBox, ident: Identification, seed: int) -> tuple[str | None, Identification]:
    """How c and label smoothing follow the vocabulary, from a second one; None where the loss wants its own.

    c: "constant", "log_v" for log V plus a constant, or "other". Smoothing: ε/V or, as t5x has it, ε/(V − 1).
    """
    space, chosen, model = ident.space, ident.fit, ident.model
    assert chosen is not None
    skip = space.padded or space.lanes >= SECOND_VOCAB or ident.coarse or ident.how not in ("none", "explained")
    if skip or not ident.rows.uniform:
        return None, ident
    try:
        second = take_draw(box, space.with_vocab(SECOND_VOCAB), seed, ident.dtype, APART)
    except LossCallError:
        return None, ident
    parts = second.parts(*APART)
    if not parts:
        return None, ident
    rows = decompose(parts, ident.rows.eps, warp=ident.rows.warp, fourth=ident.rows.fourth)
    gain = torch.cat([probe.reference.gain_squared_T for probe, _ in parts]) if chosen.damping is not None else None
    again = fit(rows, chosen.quantities, smoothing=chosen.smoothing != 0.0, gain_squared_T=gain)
    if chosen.smoothing:
        epsilon = [one.smoothing / (1 + one.smoothing) for one in (again, chosen)]
        t5x = (SECOND_VOCAB / (SECOND_VOCAB - 1)) / (space.lanes / (space.lanes - 1))
        ratio = epsilon[0] / epsilon[1]
        model = replace(model, smoothing_over_others=abs(ratio / t5x - 1) < 1e-6 < abs(ratio - 1))
    ident = replace(ident, model=model)
    if not chosen.quantities or chosen.quantities[0].fixed or not again.slope[0] or not again.good:
        return None, ident
    moved = again.offset[0] / again.slope[0] - chosen.offset[0] / chosen.slope[0]
    expected = math.log(SECOND_VOCAB / space.lanes)
    near = max(1e-3, 4 * COVERAGE * (again.offset_error[0] + chosen.offset_error[0]) / abs(chosen.slope[0]))
    near = min(near, 0.1 * expected)
    if abs(moved - expected) < near:
        return "log_v", replace(ident, model=replace(model, log_v_target=True))
    return ("constant" if abs(moved) < near else "other"), ident


# The record.


def _describe(ident: Identification, precision: str, rule: str | None, targets: str) -> Identified:
    chosen, model = ident.fit, ident.model
    assert chosen is not None
    smoothing = model.smoothing if abs(model.smoothing) > 1e-6 else 0.0
    if model.smoothing_over_others:
        smoothing *= (ident.space.lanes - 1) / ident.space.lanes
    whole = [w for w in ident.weights if w.valid == w.tokens]
    ce_weights = "uniform" if ident.rows.uniform or ident.how == "rounded" else _pattern(ident.rows)
    if (
        ce_weights == "uniform"
        and not any(w.spread for w in whole)
        and any(w.spread and not w.misplaced for w in ident.weights)
    ):
        # A mask alone makes the weights of tokens differ, as a mean of means of groups does.
        ce_weights = "groups"
    record = Identified(
        has_z=bool(chosen.quantities),
        coef=None,
        target=None,
        coordinate=None,
        ce_denominator=model.ce_denominator,
        z_denominator=None,
        uncertainty=Uncertainty(unexplained=chosen.worst),
        vocab=ident.space.lanes,
        ce_scale=model.ce_scale,
        label_smoothing=smoothing,
        ce_weights=ce_weights,
        computes_in=precision,
        targets=targets,
        extra=model.warp.named(),
    )
    if not chosen.quantities:
        return record
    lead, slope, eps = model.penalties[0], chosen.slope[0], ident.eps
    relative = COVERAGE * chosen.slope_error[0] / abs(slope) + 8 * eps
    # c = β/α; the rounding floor is that of fused kernels, which round 1 + 2λ(log Z − c) as a whole.
    spread = math.hypot(chosen.offset_error[0], chosen.offset[0] / slope * chosen.slope_error[0]) / abs(slope)
    about = COVERAGE * spread + 8 * eps * max(1.0, abs(lead.target))
    single = len(chosen.quantities) == 1 and chosen.damping is None
    words, extra = _words(chosen, model)
    shared = chosen.shared or (ce_weights == "groups" and all(w.shared for w in ident.weights if w.spread))
    fixed = lead.quantity.fixed
    return replace(
        record,
        coef=lead.coef,
        target=None if fixed else lead.target,
        coordinate=lead.quantity.coordinate if single else "other",
        z_denominator=model.z_denominator,
        uncertainty=Uncertainty(abs(lead.coef) * relative, relative, None if fixed else about, chosen.worst),
        penalty=words,
        target_rule=rule,
        z_weights="shared" if shared else "uniform",
        extra={**extra, **model.warp.named()},
    )


def _words(chosen: Fit, model: Model) -> tuple[str, dict[str, float]]:
    """The penalised quantity in words, and further coefficients."""
    if chosen.damping is not None:
        return "log Z, damped by 1 + βA_p² (gain-aware)", {"beta": chosen.damping}
    if len(chosen.quantities) == 1:
        return chosen.quantities[0].words, {}
    second = model.penalties[1]
    if chosen.quantities == SUMS[0]:
        return "log Z − μ and μ, penalised apart (factorized)", {
            "shift_coef": second.coef,
            "shift_target": second.target,
        }
    return "log Z and log Z − μ (row-centered), two penalties", {
        "centered_coef": second.coef,
        "centered_target": second.target,
    }


def _pattern(rows: Rows) -> str:
    """What the weights follow: position, class, or neither; each batch may have a factor of its own."""
    parts = [(rows.batch_T == i).nonzero().flatten() for i in range(len(rows.parts))]
    b_T, target_T = rows.b_T, rows.reference.target_T
    table = torch.stack([b_T[at] / b_T[at].mean() for at in parts])
    if bool(((table - table[0]).abs() <= 1e-4 * table[0].abs().clamp(min=1e-6)).all()):
        return "position"
    first = {int(target_T[t]): float(b_T[t]) for t in parts[0].tolist()}
    known: dict[int, float] = {}
    for at in parts:
        # The factor of a batch, from the classes that it shares with the first one.
        ratios = [float(b_T[t]) / first[int(target_T[t])] for t in at.tolist() if first.get(int(target_T[t]))]
        scale = (float(torch.tensor(ratios).median()) if ratios else 1.0) or 1.0
        for t in at.tolist():
            value = float(b_T[t]) / scale
            if abs(value - known.setdefault(int(target_T[t]), value)) > 1e-4 * abs(value):
                return "token"
    return "class"


# Classes that the loss treats apart, moved targets, returned parts.

MOST_CLASSES, MOST_SPECIAL = 4096, 4
"""Vocabulary up to which every class is tried as a target; more classes that differ are class weights in general."""


def _special_classes(box: BlackBox, space: Space) -> tuple[Space, tuple[SpecialClass, ...]]:
    """Leave out the class that marks ignored tokens, specified or found, and the few classes with a weight of their own.

    Every class is the target of one and the same row of logits, in two batches with the classes in opposite order. What differs
    then follows the class and nothing else.
    """
    given = frozenset({box.ignore_index}) if box.ignore_index >= 0 else frozenset()
    avoid, special = given, tuple[SpecialClass, ...]()
    if space.lanes <= MOST_CLASSES:
        silent, special = _classes_apart(box, space)
        special = tuple(one for one in special if one.index not in given)
        if not any(index < space.lanes for index in given) and len(silent) == 1:
            avoid = given | silent
    return replace(space, avoid=avoid | {one.index for one in special}), special


def _classes_apart(box: BlackBox, space: Space) -> tuple[frozenset[int], tuple[SpecialClass, ...]]:
    """(classes whose rows have no gradient, other classes whose weights are not those of most), in both orders."""
    row = torch.randn(1, space.lanes, generator=seeded(1), dtype=torch.float64).round()
    row = torch.nn.functional.pad(row, (0, space.width - space.lanes), value=probes.PADDING)
    ways: list[tuple[set[int], dict[int, SpecialClass]]] = []
    for order in (torch.arange(space.lanes), torch.arange(space.lanes).flip(0)):
        quiet: set[int] = set()
        other: dict[int, SpecialClass] = {}
        for start in range(0, space.lanes, space.tokens):
            target = order.repeat(2 + space.tokens // space.lanes)[start : start + space.tokens]
            logits, flat = row.expand(len(target), -1), torch.zeros(len(target), dtype=torch.bool)
            probe = Probe("classes", Reference(logits, target, space.lanes), flat)
            try:
                outcome = box(probe, torch.float32)
            except LossCallError:
                return frozenset(), ()
            loud_T = outcome.grad_TV.norm(dim=-1) > 0
            if not outcome.finite or not bool(loud_T.any()):
                return frozenset(), ()
            quiet |= set(target[~loud_T].tolist())
            other |= _weights_apart(probe, outcome.grad_TV, loud_T)
        ways.append((quiet, other))
    both = tuple(ways[0][1][k] for k in sorted(ways[0][1].keys() & ways[1][1].keys()))
    few = len(both) <= min(MOST_SPECIAL, space.lanes // 8)
    return frozenset(ways[0][0] & ways[1][0]), both if few else ()


def _weights_apart(probe: Probe, grad_TV: Tensor, use_T: Tensor) -> dict[int, SpecialClass]:
    """The classes of one batch whose CE weight or Z source is not the median; none where rows are not p, onehot(y) and 1/V."""
    rows = decompose([(probe, grad_TV)], UNIT["float32"])
    if not rows.exact:
        return {}
    w_T, s_T, slack_T = rows.b_T + rows.g_T, rows.k_T, 4 * rows.tolerance_T
    w, s, slack = (float(x[use_T].median()) for x in (w_T, s_T, slack_T))
    if abs(w) <= slack:
        return {}
    differs_T = ((w_T - w).abs() > slack_T + 1e-3 * abs(w)) | ((s_T - s).abs() > slack_T + slack + 1e-2 * abs(s))
    target_T = probe.target_T
    return {
        int(target_T[t]): SpecialClass(
            int(target_T[t]), float(w_T[t]) / w, float(s_T[t]) / s if abs(s) > 20 * slack else None
        )
        for t in (differs_T & use_T).nonzero().flatten().tolist()
    }


def _with_special(ident: Identification, special: tuple[SpecialClass, ...]) -> Identification:
    """State the weights of classes that the probes left out, where all other tokens have one weight."""
    got = ident.identified
    if not special or not ident.known or got.ce_weights != "uniform":
        return ident
    shared = "shared" if got.has_z and all(one.shares for one in special) else got.z_weights
    weights = "class" if any(abs(one.ce - 1) >= 1e-3 for one in special) else got.ce_weights
    return replace(ident, special=special, identified=replace(got, ce_weights=weights, z_weights=shared))


def _moved_targets(box: BlackBox, ident: Identification) -> Literal["shifted", "rolled"] | None:
    """Whether row t is trained on target t + 1. "shifted": the last row on none; "rolled": on target 0."""
    (probe, grad_TV), *_ = ident.first.parts("mixed")
    own = decompose([(probe, grad_TV)], ident.eps)
    rows = decompose([(probe.with_targets(probe.target_T.roll(-1)), grad_TV)], ident.eps)
    last = len(rows.b_T) - 1
    inner = rows.solved_T.clone()
    inner[last] = False
    if box.targets != "given" or not bool(inner.any()) or not bool(rows.inside_T[inner].all()):
        return None
    if not bool((rows.b_T[inner] > 10 * rows.tolerance_T[inner]).all()):
        return None
    # Ties of all classes aside, a row that is inside the three shapes of its own target says nothing.
    if bool(own.inside_T[inner].all()) and float(own.b_T[inner].abs().max()) > float(rows.b_T[inner].abs().max()) / 2:
        return None
    trained = bool(rows.inside_T[last]) and float(rows.b_T[last]) > 0.1 * float(rows.b_T[inner].median())
    return "rolled" if trained else "shifted"


def _with_added(box: BlackBox, space: Space, seed: int, plain: Identification) -> Identification:
    """Where the loss is CE alone and a Z with a gradient is returned next to it: what the caller's sum applies."""
    for item in plain.first.outcomes["mixed"].reported:
        if not item.requires_grad or item.value is None:
            continue
        box.added = item.name
        try:
            both = _identify(box, space, seed, plain.dtype)
        except LossCallError:
            both = plain
        scale = plain.identified.ce_scale
        same = scale and abs((both.identified.ce_scale or 0.0) / scale - 1) < 1e-3
        if same and both.known and both.identified.has_z:
            return both
        box.added = None
    return plain


def _targets_unused(box: BlackBox, ident: Identification) -> bool:
    """Whether other targets, and ignored ones, leave value and gradient as they were: a function of the logits alone."""
    probe, first = ident.first.probes["mixed"], ident.first.outcomes["mixed"]
    keep = torch.arange(len(probe.target_T)) % 3 == 0
    for other in (probes.likely(probe, ident.space.avoid), probe.masked(keep)):
        try:
            outcome = box(other, ident.dtype)
        except LossCallError:
            return False
        if outcome.value != first.value or not torch.equal(outcome.grad_TV, first.grad_TV):
            return False
    return True


# Precision and repeatability.

STEP = 2.0**-22
"""Relative step in the logits: four fp32 roundings, so that fp32 moves, but unevenly."""
SMOOTH = 3e-8
"""Roughness that fp64 stays below, and a part in fp32 exceeds unless its noise is lost in the rounding of fp64."""


def computes_in(box: BlackBox, probe: Probe, dtype: torch.dtype) -> str:
    """The name of the format the gradients betray, a key of `UNIT`; of a mix of fp64 and fp32, fp32.

    16-bit arithmetic leaves gradients that 16-bit formats hold exactly. Along a line of steps a few fp32 roundings long
    fp64 gradients are smooth; where any part of the loss passes through fp32 they take the values of the fp32 grid.
    """
    base = box(probe, dtype).grad_TV
    # Tiny entries are left out: fp16 flushes them, whatever the arithmetic was.
    seen = base[base.abs() > 1e-4 * base.abs().max()]
    readable = seen.numel() >= 32 and bool(torch.isfinite(seen).all())
    for name, narrow in (("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        # Random fp32 numbers survive a 16-bit format once in 2^13 to 2^16.
        if readable and float((seen.to(narrow).double() == seen).double().mean()) > 0.98:
            return name
    if dtype != torch.float64:
        return "float32"
    direction = torch.randn(probe.logits_TV.shape, generator=seeded(1), dtype=torch.float64)
    step = STEP * direction * (1 + probe.logits_TV.abs())
    g1, g2, g3 = (box(probe.with_logits(probe.logits_TV + k * step)).grad_TV for k in (1, 2, 3))
    # The third difference of a smooth gradient is O(step²) of the first: what fp64 rounding leaves is about 1e-9. A part in
    # fp32 that makes up the share σ of the slope leaves about σ u₃₂/STEP, be it the CE or a small penalty.
    moved = float((g3 - base).norm())
    rough = float((g3 - 3 * g2 + 3 * g1 - base).norm()) / moved if moved > 0 else 1.0
    return "float64" if rough < SMOOTH else "float32"


def _unrepeatable(box: BlackBox, first: Draw, dtype: torch.dtype, eps: float, seed: int) -> str | None:
    """A sentence where the same inputs give another answer, at once or under another random seed."""
    name = "wide" if "wide" in first.outcomes else "mixed"
    probe, limit = first.probes[name], max(1e-6, 8 * eps)
    for words, option in (("again", None), ("under another random seed", seed + 12345)):
        try:
            change = difference(first.outcomes[name], box(probe, dtype, seed=option))
        except LossCallError:
            return f"The same call fails when it is made {words}."
        if change <= limit:
            continue
        # Only chance brings the first answer back under the first seed.
        if option is not None and difference(first.outcomes[name], box(probe, dtype)) <= limit:
            return f"The same inputs give another gradient {words} (relative change {change:.3g}): the loss draws random numbers."
        return f"The same inputs give another gradient when called again (relative change {change:.3g}): the loss keeps state."
    return None


def difference(a: Outcome, b: Outcome) -> float:
    """Relative change of gradient or value between two calls."""
    grad = float((a.grad_TV - b.grad_TV).norm()) / max(float(a.grad_TV.norm()), 1e-300)
    return max(grad, abs(a.value - b.value) / max(abs(a.value), 1e-12))


# Fresh batches.


def _confirm(box: BlackBox, ident: Identification, seed: int) -> Identification:
    """The identification with its second draw; one that cannot be told where fresh batches contradict it."""
    try:
        second = take_draw(box, ident.space, seed + OFFSET, ident.dtype)
    except LossCallError as error:
        return unexplained(ident, f"The same call on a second draw of the probes fails: {error}", targets=box.targets)
    ident = replace(ident, second=second)
    if lost := sorted(ident.first.outcomes.keys() - second.outcomes.keys()):
        once = f"Loss or gradient is finite on one draw of the probes, and not on a second ({lost[0]})."
        return unexplained(ident, once, targets=box.targets) if ident.known else ident
    if ident.how == "other":
        return ident if _same_curve(ident) else unexplained(
            ident, "A second draw of the probes shows another source at the same log Z.", targets=box.targets
        )  # fmt: skip
    if not ident.known:
        return ident
    reason: str | None = None
    if box.linear and ident.plain:
        ident, reason = _on_dense_head(box, ident, seed)
    if reason is None:
        ident, reason = _on_confident_tokens(ident)
    if reason is None:
        reason = _contradicted(ident)
    if reason is None and ident.trusted and not ident.coarse and ident.how in ("none", "explained"):
        reason = _other_on_calm_logits(box, ident, seed)
    if reason is None and ident.trusted and not ident.coarse and ident.how in ("none", "explained"):
        ident, reason = _on_fresh_mask(box, ident, seed)
    return ident if reason is None else unexplained(ident, reason, targets=box.targets)


def _same_curve(ident: Identification) -> bool:
    """Whether tokens of both draws with the same log Z have the same source."""
    assert ident.second is not None
    rows = decompose([*ident.first.parts(*APART), *ident.second.parts(*APART)], ident.eps)
    view = source_view(rows) if rows.exact else None
    if view is None:
        return False
    quantity, s_T, slack_T = view
    v_T = quantity.value(rows.reference)
    return any(_is_function(v_T, s_T / zeta_T, slack_T / zeta_T.abs()) for zeta_T in _token_weights(rows))


def _on_confident_tokens(ident: Identification) -> tuple[Identification, str | None]:
    """Tokens whose target is the most likely class: the same source, unless entries are missing or it depends on the target."""
    if not ident.trusted or "confident" not in ident.first.outcomes or ident.how == "filtered":
        return ident, None
    ((probe, grad_TV),) = ident.first.parts("confident")
    if left_over(ident, [(probe, grad_TV)]) <= SHARE:
        return ident, None
    wanted_TV, model = ident.model.source(probe.reference), ident.model
    sigma_T = (
        ident.eps
        * probe.noise_T
        * (abs(model.ce_scale) / model.count(model.ce_denominator, probe.reference) + wanted_TV.norm(dim=-1))
    )
    off = (grad_TV - wanted_TV).abs() > (ROUNDING * sigma_T).unsqueeze(-1)
    if ident.identified.has_z and not bool((off & (grad_TV != 0)).any()):
        return replace(ident, how="filtered"), None
    return ident, (
        "On tokens whose target is the most likely class the gradient is another one: it depends on the target as neither "
        "cross-entropy nor a penalty on log Z does."
    )


def left_over(ident: Identification, parts: list[tuple[Probe, Tensor]]) -> float:
    """The largest share, over groups of tokens, that the model leaves of its own Z source (or CE) beyond rounding."""
    unit = ident.eps if ident.model.warp.identity else max(ident.eps, 1e-7)
    worst = 0.0
    for probe, grad_TV in parts:
        r, model = probe.reference, ident.model
        ce_TV, z_TV = model.ce_source(r), model.z_source(r)
        scale_T = abs(model.ce_scale) / model.count(model.ce_denominator, r) + z_TV.norm(dim=-1)
        rounding_T = ROUNDING * unit * probe.noise_T * scale_T
        for rows in (probe.saturated_T, ~probe.saturated_T):
            left = float((grad_TV - ce_TV - z_TV)[rows].norm()) if bool(rows.any()) else 0.0
            whole = float((z_TV if ident.identified.has_z else ce_TV)[rows].norm())
            if left > float(rounding_T[rows].norm()) and whole > 0:
                worst = max(worst, left / whole)
    return worst


def _contradicted(ident: Identification) -> str | None:
    """In one sentence with its figure, how the second draw differs from what the first one showed."""
    assert ident.second is not None
    assert ident.fit is not None
    parts, chosen = ident.second.parts(*APART), ident.fit
    if ident.how == "rounded":
        worst = nearest(decompose(parts, ident.eps)).worst
        share = worst if worst > ROUGHLY else 0.0
    elif ident.how == "filtered":
        rows = decompose(parts, ident.eps, nonzero_only=True)
        again = best_fit(rows)
        share = 0.0 if rows.exact and again is not None and again.quantities == chosen.quantities else 1.0
    elif ident.trusted:
        share = left_over(ident, ident.second.parts(*ident.second.outcomes))
    else:
        share = _left_of_amounts(ident, [*parts, *ident.second.parts("confident"), *ident.first.parts("confident")])
    if share <= SHARE:
        return None
    has_z = ident.identified.has_z
    by, of = (f"a penalty on {ident.identified.penalty}", "its source") if has_z else ("cross-entropy", "the gradient")
    return f"One draw of the probes is explained by {by}, but on a second draw {share:.2g} of {of} is left over."


def _left_of_amounts(ident: Identification, parts: list[tuple[Probe, Tensor]]) -> float:
    """The same where token weights are not known beforehand: of the amounts next to each token's own CE."""
    chosen = ident.fit
    assert chosen is not None
    rows = decompose(parts, ident.rows.eps, warp=ident.rows.warp, fourth=ident.rows.fourth)
    if not rows.exact or chosen.damping is not None:
        return 0.0 if rows.exact else 1.0
    wanted = torch.zeros(3, len(rows.b_T), dtype=torch.float64)
    if chosen.quantities:
        wanted = unit_amounts(chosen, rows.reference, None) * (chosen.slope[0] / chosen.quantities[0].factor)
        wanted = wanted * (rows.b_T / chosen.mean_weight) if chosen.shared else wanted
    seen = torch.stack([rows.k_T, rows.g_T - chosen.smoothing * rows.b_T, rows.m_T])
    slack = torch.stack([rows.tolerance_T, rows.tolerance_T * rows.sigma_g_T / rows.sigma_T, rows.tolerance_T])
    beyond = ((seen - wanted).abs() - 4 * slack).clamp(min=0)[:, rows.solved_T]
    whole = max(float(wanted[:, rows.solved_T].norm()), float(rows.b_T[rows.solved_T].norm()) * 1e-6, 1e-300)
    return float(beyond.norm()) / whole


def _other_on_calm_logits(box: BlackBox, ident: Identification, seed: int) -> str | None:
    """A sentence where batches of calm logits, whose losses are small, follow another objective than the one identified.

    Low precision deviates there too, but not in the same way after a small common shift.
    """
    for kind in ("continuous", "calm"):
        base, left = draw(kind, ident.space, seed), []
        for shift in (0.0, 0.37):
            probe = base.shifted(shift)
            outcome = box(probe, ident.dtype)
            if not outcome.finite:
                return None
            left.append(outcome.grad_TV - ident.model.source(probe.reference))
        z, ce = (float(x.norm()) for x in (ident.model.z_source(base.reference), ident.model.ce_source(base.reference)))
        rounding = ROUNDING * ident.eps * float(base.noise_T.max()) * (ce + z)
        if min(float(x.norm()) for x in left) > max(rounding, 1e-2 * z, 1e-5 * ce) and _cosine(*left) > 0.5:
            return (
                "On calm logits the loss applies another gradient than on large ones: a part of it is switched or clipped by "
                "the size of the loss or by the batch."
            )
    return None


def _on_dense_head(box: BlackBox, ident: Identification, seed: int) -> tuple[Identification, str | None]:
    """A dense hidden and another width: is it hidden @ weightᵀ that enters, and does a factor follow the width?"""
    wide = DENSE_WIDTH + 16 * (ident.space.width == DENSE_WIDTH)
    hidden, weight, target = probes.dense_head(DENSE_TOKENS, wide, ident.space, seed + OFFSET)
    try:
        _, _, grad_weight = box.on_head(hidden, weight, target, ident.dtype)
    except LossCallError as error:
        return ident, f"A dense hidden state of {wide} columns fails: {error}"
    r = Reference(hidden @ weight.T, target, ident.space.lanes)
    deviation = 0.0
    for power in (0.0, *POWERS.values()):
        wanted = replace(ident, scale_power=power).model_at(wide).source(r).T @ hidden
        error_now = float((grad_weight - wanted).norm() / wanted.norm().clamp(min=1e-300))
        if error_now <= max(1e-5, 1e3 * ident.eps):
            return replace(ident, scale_power=power), None
        deviation = deviation or error_now
    return ident, (
        f"On dense hidden states (T = {DENSE_TOKENS}, D = {wide}) the gradient at the weight is off by {deviation:.2g} from what "
        "one-hot hidden states show: the loss changes hidden or weight before their product."
    )


def _on_fresh_mask(box: BlackBox, ident: Identification, seed: int) -> tuple[Identification, str | None]:
    """A masked batch of a size that was never seen, then the same size without a mask.

    A loss that keeps a count divides the second batch by the count of the first.
    """
    names = {ident.model.ce_denominator, ident.model.z_denominator or "none"}
    if not ident.masks_accepted or not names <= NAMED or ident.identified.ce_weights == "groups":
        return ident, None
    assert ident.second is not None
    tokens, generator = 3 * ident.space.tokens // 4, seeded(seed + OFFSET)
    pool = probes.joined([probe for probe, _ in ident.second.parts("mixed", "saturated", "crowded")])
    probe = pool.take(torch.randperm(len(pool.target_T), generator=generator)[:tokens])
    keep = torch.rand(tokens, generator=generator) < 0.4
    keep[:2] = True
    seen: list[tuple[float, float]] = []
    for one in (probe.masked(keep), probe):
        try:
            outcome = box(one, ident.dtype)
        except LossCallError:
            return ident, None
        if not outcome.finite:
            return ident, None
        seen.append(factors(ident, one, outcome.grad_TV))
    off = [max(abs(f - 1) for f in pair) > SHARE for pair in seen]
    if not any(off):
        return ident, None
    valid, name = int(keep.sum()), ident.model.ce_denominator
    name = name if name != "none" else ident.model.z_denominator or "sum"
    shown = [
        token_count(name, n, tokens) / (pair[0] or math.inf) for n, pair in zip((valid, tokens), seen, strict=True)
    ]
    if off[1] and math.isclose(shown[0], shown[1], rel_tol=1e-3):
        kept = (
            f"A first batch of {tokens} tokens with {valid} valid ones is divided by {shown[0]:.4g}, and so is the next batch "
            f"of this shape, with {tokens} valid: the loss keeps a count for each shape."
        )
        return replace(ident, kept_state=kept), kept
    return ident, (
        f"The denominators of the first batches ({name!r} for CE) do not hold on a second draw: with {valid} of {tokens} "
        f"tokens valid the weights are {seen[0][0]:.4g} (CE) and {seen[0][1]:.4g} (Z) times the expected ones."
    )


def factors(ident: Identification, probe: Probe, grad_TV: Tensor) -> tuple[float, float]:
    """The factors on CE and on Z that make the model fit this batch; 1 for a part that is not there."""
    r, keep_T = probe.reference, probe.reference.valid_T
    inverse = (1 / probe.noise_T[keep_T]).unsqueeze(-1)
    columns = [(part[keep_T] * inverse).flatten() for part in (ident.model.ce_source(r), ident.model.z_source(r))]
    loud = [i for i, column in enumerate(columns) if float(column.norm()) > 0]
    stacked = torch.stack([columns[i] / columns[i].norm() for i in loud], dim=-1)
    x = torch.linalg.lstsq(stacked, (grad_TV[keep_T] * inverse).flatten().unsqueeze(-1)).solution.flatten()
    found = {i: float(x[k] / columns[i].norm()) for k, i in enumerate(loud)}
    return found.get(0, 1.0), found.get(1, 1.0)


def _cosine(a: Tensor, b: Tensor) -> float:
    return float((a * b).sum()) / max(float(a.norm()) * float(b.norm()), 1e-300)
