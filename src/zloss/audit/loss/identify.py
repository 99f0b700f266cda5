"""Identification: from the gradients of a few probe batches to λ, c, coordinate and denominators, with uncertainty.

The amounts of every token (`source.decompose`) are fitted by a penalty; batches of other sizes and masks show the denominators,
a second vocabulary how c follows V. Then everything has to hold on fresh batches (`_confirm`), or it is not reported. The module
is long because all of it is one argument: what is fitted, what it is called, and what could still refute it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from zloss.audit.loss import probes
from zloss.audit.loss.calls import BlackBox, LossCallError, Outcome
from zloss.audit.loss.probes import Probe, Space, draw, seeded
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
    relative_error,
    token_count,
)
from zloss.results.loss_audit import Identified, Uncertainty

How = Literal["none", "explained", "filtered", "rounded", "other", "unexplained"]
"""`none`: cross-entropy alone explains everything. `explained`: a penalty does. `filtered`: it does, except for entries that
were set to exactly 0. `rounded`: it does up to noise of low precision. `other`: a function of log Z that is not a square."""
UNLIKELY = ("mixed", "saturated", "wide", "crowded")
"""The batches whose targets are never the most likely class: their amounts are fitted."""
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
    """One class against the median of all: the weight on its CE, and its Z source (None if no Z shows)."""

    index: int
    ce: float
    z: float | None

    @property
    def shares(self) -> bool:
        """Whether its Z carries the weight of its CE."""
        return self.z is not None and abs(self.z - self.ce) < 1e-2 * max(abs(self.ce), abs(self.z), 1e-2)

    @property
    def words(self) -> str:
        weights = [
            f"no {part}" if abs(factor) < 1e-3 else f"{factor:.4g} times the {part} of the others"
            for part, factor, least in (("cross-entropy", self.ce, 1e-3), ("Z", self.z, 1e-2))
            if factor is not None and abs(factor - 1) >= least
        ]
        return f"class {self.index} has {' and '.join(weights)}"


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
    """Classes with a separate weight, which no probe has as a target; of a loss that treats all others alike."""
    second: Draw | None = None
    kept_state: str | None = None
    """In one sentence, what the loss keeps between calls, where that was seen."""
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
    def masks_predicted(self) -> bool:
        """Whether the model predicts batches with ignored tokens: a count without a name is not known there."""
        names = {self.model.ce_denominator, self.model.z_denominator or "none"}
        return self.trusted and self.masks_accepted and names <= NAMED and self.identified.ce_weights != "groups"

    @property
    def quantities(self) -> tuple[Quantity, ...]:
        """What the fitted penalties are on; empty without a fit."""
        return () if self.fit is None else self.fit.quantities

    @property
    def coarse(self) -> bool:
        return self.eps > COARSE

    @property
    def rounding(self) -> float:
        """Unit roundoff of the part in the fewest bits; where 16-bit noise shows next to a finer part, that of bf16."""
        return UNIT["bfloat16"] if self.how == "rounded" else self.eps

    @property
    def damped(self) -> bool:
        return self.fit is not None and self.fit.damping is not None

    def decompose(self, parts: list[tuple[Probe, Tensor]]) -> Rows:
        """The amounts of other tokens, in the shapes that explained those of the first draw."""
        of, filtered = self.rows, self.how == "filtered"
        return decompose(parts, of.eps, warp=of.warp, fourth=of.fourth, nonzero_only=filtered)


def unexplained(
    ident: Identification, reason: str, *, has_z: bool | None = None, seen: str = "unknown"
) -> Identification:
    """The same where numbers cannot be given, for `reason`; `has_z` and `seen` where the kind of penalty is known."""
    got = ident.identified
    record = Identified(
        has_z, None, None, "other" if has_z else None, "unknown", "unknown" if has_z else None, Uncertainty(),
        penalty=seen, vocab=ident.space.lanes, ce_scale=None, label_smoothing=None, ce_weights=None,
        computes_in=got.computes_in, targets=got.targets, reason=reason,
    )  # fmt: skip
    return replace(ident, identified=record, how="unexplained", model=Model(probe_vocab=ident.space.lanes))


def take_draw(box: BlackBox, space: Space, seed: int, names: tuple[str, ...] = (*UNLIKELY, "confident")) -> Draw:
    """The batches of one seed and the finite answers to them."""
    made = {name: draw(name, space, seed) for name in names}
    outcomes = {name: box(probe) for name, probe in made.items()}
    return Draw(seed, made, {name: outcome for name, outcome in outcomes.items() if outcome.finite})


def identify(box: BlackBox, space: Space, seed: int) -> Identification:
    """Probe one loss, name what it applies, and confirm that on a second draw.

    `box` is left with the calling convention of the loss: `dtype`, `targets` and `added` are set on it.
    """
    space, special = _special_classes(box, space)
    _choose_dtype(box, space, seed)
    ident = _identify(box, space, seed)
    if not ident.known and ident.kept_state is None and (moved := _moved_targets(ident)) is not None:
        box.targets = moved
        again = _identify(box, space, seed)
        ident, box.targets = (again, moved) if again.known else (ident, "given")
    if ident.known and ident.how == "none":
        ident = _with_added(box, space, seed, ident)
    if ident.known and ident.identified.ce_denominator == "none":
        ident = replace(ident, targets_unused=_targets_unused(box, ident))
    return _confirm(box, _with_special(ident, special), seed)


def _choose_dtype(box: BlackBox, space: Space, seed: int) -> None:
    """fp64 where the loss takes it, else fp32; an error where an ordinary batch gets no finite answer or no gradient."""
    probe, box.dtype = draw("mixed", space, seed), torch.float64
    try:
        outcome = box(probe)
    except LossCallError:
        box.dtype = torch.float32
        outcome = box(probe)
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


def _identify(box: BlackBox, space: Space, seed: int) -> Identification:
    """The answer to one draw, with denominators and the rule of c."""
    precision = computes_in(box, draw("continuous", space, seed))
    eps = UNIT[precision]
    first = take_draw(box, space, seed)
    if "mixed" not in first.outcomes:
        raise LossCallError(f"{box.name} gave a non-finite loss or gradient on a batch on which it was finite before.")
    parts = first.parts(*UNLIKELY)
    empty = Identified(
        None, None, None, None, "unknown", None, Uncertainty(), computes_in=precision, targets=box.targets
    )
    bare = Identification(space, eps, first, "unexplained", decompose(parts, eps), None, empty)
    name = "wide" if "wide" in first.outcomes else "mixed"
    seeds, limit = (None, seed + 12345), max(1e-6, 8 * eps)
    if (changing := unrepeatable(box, first.probes[name], first.outcomes[name], seeds, limit)) is not None:
        return replace(unexplained(bare, changing[0]), kept_state=changing[0])
    how, rows, chosen = _explain(box, bare, seed)
    if chosen is not None and rows.warp.identity and eps > UNIT["float64"]:
        chosen = _refined(chosen, first, eps)
    ident = replace(bare, how=how, rows=rows, fit=chosen)
    if chosen is None:
        return _other_form(ident, box)
    ident = _with_denominators(box, ident, seed)
    rule, ident = _second_vocabulary(box, ident, seed)
    return replace(ident, identified=_describe(ident, rule))


# What explains the amounts.


def _explain(box: BlackBox, ident: Identification, seed: int) -> tuple[How, Rows, Fit | None]:
    """Three shapes, then a fourth, then entries that are missing, then 16-bit noise, then scaled or capped logits."""
    rows = ident.rows
    if rows.exact:
        if (bare := nothing_but_ce(rows)) is not None:
            return "none", rows, bare
        if (chosen := best_fit(rows, linear=box.linear)) is not None:
            return "explained", rows, chosen
    fourths = [decompose(rows.parts, rows.eps, fourth=fourth) for fourth in FOURTH]
    fits = [(found, again) for again in fourths if again.exact and (found := best_fit(again)) is not None]
    if fits := [(found, again) for found, again in fits if found.quantities[0].fourth]:
        chosen, again = min(fits, key=lambda one: one[0].chi)
        return "explained", again, chosen
    kept = decompose(rows.parts, rows.eps, nonzero_only=True)
    most = float(kept.solved_T.double().mean()) > 0.7
    whole = rows.exact or not kept.exact or not most or nothing_but_ce(kept) is not None
    if not whole and (chosen := best_fit(kept)) is not None:
        return "filtered", kept, chosen
    if (rough := _rounded(box, ident, seed)) is not None:
        return "rounded", rows, rough
    if not rows.exact:
        for warp in _warps(rows):
            # The search is never finer than this, in any precision of the loss.
            warped = decompose(rows.parts, max(rows.eps, 1e-8), warp=warp)
            found = None if not warped.exact else nothing_but_ce(warped) or best_fit(warped)
            if found is not None and (not found.quantities or found.quantities[0] in (RAW, CENTERED)):
                return ("explained" if found.quantities else "none"), warped, found
    return "unexplained", rows, None


def _rounded(box: BlackBox, ident: Identification, seed: int) -> Fit | None:
    """The nearest correct penalty, if it leaves little unexplained and what it leaves is noise.

    A wrong formula leaves nearly the same residual after a small common shift; rounding leaves an unrelated one.
    """
    rough = min((fit(ident.rows, (q,)) for q in (RAW, CENTERED)), key=lambda one: one.worst)
    b_T = ident.rows.b_T[ident.rows.solved_T]
    if rough.worst > ROUGHLY or bool(((b_T - b_T.median()).abs() > 2e-2 * b_T.median().abs()).any()):
        return None
    left = []
    for shift in (0.0, 0.37):
        probe, lead = draw("continuous", ident.space, seed).shifted(shift), rough.quantities[0]
        source_T = rough.slope[0] * lead.value(probe) - rough.offset[0]
        ce_TV = rough.mean_weight * (probe.p_TV - probe.onehot_TV)
        z_TV = source_T.unsqueeze(-1) * lead.shape(probe)
        left.append((box(probe).grad_TV - ce_TV - z_TV).flatten())
    return rough if float(torch.cosine_similarity(left[0], left[1], dim=0)) < 0.5 else None


def _refined(chosen: Fit, first: Draw, eps: float) -> Fit:
    """λ and c from saturated tokens on their target, where CE is silent: there only s itself is rounded.

    Not where a kernel rounds 1 + s as a whole: it leaves more than the rounding of s.
    """
    parts = first.parts("confident")
    silent = not chosen.smoothing and chosen.damping is None and not chosen.shared
    if chosen.quantities not in ((RAW,), (CENTERED,)) or not silent or not parts:
        return chosen
    ((probe, grad_TV),) = parts
    use, top_TV = probe.saturated_T, probe.argmax_TV(split=False)
    s_T = (grad_TV * top_TV).sum(-1) / (chosen.quantities[0].shape(probe) * top_TV).sum(-1)
    v, s, sigma = chosen.quantities[0].value(probe)[use], s_T[use], eps * s_T[use].abs() + 1e-300
    slope, level = straight_line(v, s, sigma)
    if float(((s - slope * v - level) / sigma).abs().max()) > 3:
        return chosen
    columns = torch.stack([v, torch.ones_like(v)], dim=-1) / sigma.unsqueeze(-1)
    errors = torch.linalg.inv(columns.T @ columns).diagonal().clamp(min=0).sqrt().tolist()
    return replace(chosen, slope=(slope,), offset=(-level,), slope_error=(errors[0],), offset_error=(errors[1],))


def _warps(rows: Rows) -> list[Warp]:
    """The best scale, softcap, and both together, from ordinary rows: Gauss–Newton in the logarithms, from a grid."""
    probe, grad_TV = rows.parts[0]
    some = (~probe.saturated_T).nonzero().flatten()[:20]
    p, q = probe.take(some), grad_TV[some]

    def left(at: Tensor) -> Tensor:
        """What the three shapes leave of every row, relative to it."""
        warp = _warp(at)
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
        found.append((float(left(at).norm()), _warp(at)))
        if found[-1][0] < 1e-5:
            break
    return [warp for misfit, warp in sorted(found, key=lambda one: one[0]) if misfit < 1e-3]


def _warp(at: Tensor) -> Warp:
    """The warp of (log scale, log cap)."""
    scale, cap = at.exp().tolist()
    return Warp(scale, None if cap > 1e4 else cap)


def _gauss_newton(left: Callable[[Tensor], Tensor], at: Tensor, free: tuple[int, ...]) -> Tensor:
    """The minimum of ‖left‖ over the free coordinates, with numeric derivatives and halved steps."""
    for _ in range(60):
        now = left(at)
        steps = 1e-6 * torch.eye(len(at), dtype=at.dtype)[list(free)]
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
            f"on log Z are: the loss changes its {changed} in a way the audit does not recognize, or adds another term.",
        )
    view = source_view(rows)
    if view is None:
        why = "The gradient of each token is along p, onehot(y) and 1/V, but no known objective gives these amounts."
        return unexplained(ident, why)
    quantity, s_T, slack_T = view
    words, v_T, use = quantity.words.split(" (")[0], quantity.value(rows.reference), rows.solved_T
    row_T = torch.cat([torch.arange(len(probe.target_T)) for probe, _ in rows.parts])
    for zeta_T in _token_weights(rows):
        s, v, slack = (s_T / zeta_T)[use], v_T[use], (slack_T / zeta_T.abs())[use]
        if _is_function(v, s, slack):
            open_answer = unexplained(
                ident,
                f"The gradient holds a penalty on {words} whose source is not proportional to {words} − c: "
                "`curve` has it as it was measured.",
                has_z=True,
                seen=f"a function of {words} that is not a square",
            )
            weight = float(rows.b_T[use].mean()) or 1.0
            points = tuple({round(float(v[i]), 9): float(s[i]) / weight for i in v.argsort().tolist()}.items())
            return replace(open_answer, how="other", identified=replace(open_answer.identified, curve=points))
        seen, silent = _squared_in_part(v, s, slack, rows.batch_T[use], row_T[use], words)
        if silent:
            return unexplained(
                ident,
                "Some batches have a Z source and others none (calm logits against large ones): a part of the loss is "
                "switched or clipped by the size of the logits or of the loss, or by the batch.",
            )
        if seen:
            return unexplained(ident, f"The gradient holds {seen}.", has_z=True, seen=seen)
    along = "p − 1/V" if quantity is CENTERED else "p"
    return unexplained(
        ident,
        f"The gradient holds a source along {along} that is not a function of log Z alone: it depends on the target, or on "
        "other tokens.",
    )


def _token_weights(rows: Rows) -> list[Tensor]:
    """The weights that the Z of a token can have: 1, or the weight of its CE."""
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


def _squared_in_part(v: Tensor, s: Tensor, slack: Tensor, batch: Tensor, row: Tensor, words: str) -> tuple[str, bool]:
    """A squared penalty that differs between batches or tokens, in words ("" if s is not one); and whether some batch has
    none at all.

    Within every batch s is linear in v; or it is on those tokens where it is not 0.
    """

    def linear(some: Tensor) -> bool:
        slope, level = straight_line(v[some], s[some], slack[some])
        return bool(((s - slope * v - level).abs() <= slack + 1e-5 * s.abs())[some].all())

    batches = [batch == i for i in sorted(set(batch.tolist()))]
    on = s.abs() > slack
    if all(linear(here) for here in batches):
        seen = (
            f"a source that is linear in {words} within a batch, with a slope or level that changes from batch to batch"
        )
        return seen, any(not bool(on[here].any()) for here in batches)
    slope, level = straight_line(v[on], s[on], slack[on]) if int(on.sum()) > 1 else (0.0, 0.0)
    # Where the line itself passes through 0 a token says nothing.
    missing = ((slope * v + level).abs() > slack) & ~on
    if not linear(on) or not bool(missing.any()):
        return "", False
    if bool(torch.isin(row[missing], row[on]).any()):
        return f"a squared penalty on {words} on some tokens only, chosen by target or logits", False
    places, tokens = sorted(set(row[on].tolist())), int(row.max()) + 1
    named = ", ".join(str(place) for place in places[:4]) + (", …" if len(places) > 4 else "")
    return f"a squared penalty on {words} on {len(places)} of {tokens} tokens only (row {named})", False


def straight_line(v: Tensor, s: Tensor, slack: Tensor) -> tuple[float, float]:
    """Slope and level of the best line through s(v), each point weighted by its 1/slack."""
    columns = torch.stack([v, torch.ones_like(v)], dim=-1) / slack.unsqueeze(-1)
    slope, level = torch.linalg.lstsq(columns, (s / slack).unsqueeze(-1), driver="gelsd").solution.flatten().tolist()
    return slope, level


def _is_function(v: Tensor, s: Tensor, slack: Tensor) -> bool:
    """Whether s hardly jumps when tokens are sorted by v, and depends on nothing but v."""
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
"""A weight on CE below this does not count as CE: a penalty was audited alone."""


def weigh_batches(box: BlackBox, ident: Identification, seed: int) -> tuple[tuple[Weights, ...], bool]:
    """The weights in batches of several sizes and masks, and whether masks are accepted."""
    pool, generator = probes.joined([probe for probe, _ in ident.rows.parts]), seeded(seed)
    pool, tokens = pool.take(ident.rows.solved_T.nonzero().flatten()), ident.space.tokens
    seen: list[Weights] = []
    masks_accepted = True
    sizes = [(tokens // part, max(round(share * (tokens // part)), 1)) for part, share in BATCHES if tokens >= part]
    for count, valid in dict.fromkeys(sizes):
        batch = pool.take(torch.randperm(len(pool.target_T), generator=generator)[:count])
        keep = torch.zeros(len(batch.target_T), dtype=torch.bool)
        keep[torch.randperm(len(keep), generator=generator)[:valid]] = True
        try:
            outcome = box(batch.masked(keep))
        except LossCallError:
            # A loss may reject a batch size, or ignored targets.
            masks_accepted = masks_accepted and valid == count
            continue
        if outcome.finite:
            seen.append(weigh(ident, batch, keep, outcome.grad_TV))
    return tuple(seen), masks_accepted and any(one.valid < one.tokens for one in seen)


def weigh(ident: Identification, batch: Probe, keep: Tensor, grad_TV: Tensor) -> Weights:
    """The weights of one batch in which only the tokens of `keep` are valid."""
    chosen, at = ident.fit, keep.nonzero().flatten()
    assert chosen is not None
    rows = ident.decompose([(batch.take(at), grad_TV[at])])
    use, b_T = rows.solved_T, rows.b_T
    mean = float(b_T[use].mean()) if bool(use.any()) else 0.0
    spread = not rows.uniform
    leaks = float(grad_TV[~keep].norm()) > 1e-6 * float(grad_TV.norm())
    ce = mean * (1 + chosen.smoothing)
    silent = bool(((b_T.abs() < 1e-3 * abs(mean)) & use & (abs(mean) > NO_CE)).any())
    if not chosen.quantities:
        return Weights(len(keep), len(at), ce, 0.0, 0.0, spread, True, leaks and silent)
    unit = _unit_amounts(chosen, rows.reference, 0.0 if chosen.damping is None else batch.gain_squared_T[at])
    seen, sigma = rows.amounts(chosen.smoothing), rows.sigmas
    ways = []
    for shared in (False, True) if spread else (False,):
        column = unit * (b_T / mean) if shared and mean else unit
        size = float((column / sigma)[:, use].square().sum())
        z = float((column * seen / sigma**2)[:, use].sum()) / max(size, 1e-300)
        ways.append((float(((seen - z * column) / sigma)[:, use].norm()), shared, z, size))
    left, shared, z, size = min(ways)
    missing = (unit.norm(dim=0) > 20 * rows.tolerance_T) & (seen.norm(dim=0) <= rows.tolerance_T) & use
    slack = left / max(math.sqrt(3 * int(use.sum())), 1.0) / max(math.sqrt(size), 1e-300) / max(abs(z), 1e-300)
    return Weights(len(keep), len(at), ce, z, slack, spread, shared, leaks and (silent or bool(missing.any())))


def _unit_amounts(chosen: Fit, r: Probe, gain_T: Tensor | float) -> Tensor:
    """(k, g, m) [3, T] of the penalties at λ = w = 1 of the first one, the others in proportion."""
    total = torch.zeros(3, len(r.target_T), dtype=torch.float64)
    for quantity, slope, offset in zip(chosen.quantities, chosen.slope, chosen.offset, strict=True):
        source_T = chosen.quantities[0].factor * (slope * quantity.value(r) - offset) / chosen.slope[0]
        source_T = source_T / (1 + (chosen.damping or 0.0) * gain_T)
        total = total + torch.tensor(quantity.amounts, dtype=torch.float64).unsqueeze(-1) * source_T
    return total


def _with_denominators(box: BlackBox, ident: Identification, seed: int) -> Identification:
    """Name the counts that make the weights constant, and build the model from them."""
    everything, accepted = weigh_batches(box, ident, seed)
    whole, seen = [w for w in everything if w.valid == w.tokens], list(everything)
    if any(w.misplaced for w in seen) and whole:
        # A mask that falls on other tokens says nothing about counts: only the sizes do.
        seen, accepted = whole, False
    # Tokens share the rounding of λ/N, and no residual shows it.
    tolerance = max(CONSTANT, 8 * ident.rounding)
    ce_name, z_name = "unknown", None
    if seen:
        ce_name = _name_count([(w.valid, w.tokens, w.ce) for w in seen], accepted, tolerance)
        if all(abs(w.ce) < NO_CE for w in seen):
            ce_name = "none"
        if ident.quantities:
            slack = max(tolerance, *(8 * w.slack for w in seen))
            z_name = _name_count([(w.valid, w.tokens, w.z) for w in seen], accepted, slack)
    return replace(ident, weights=everything, masks_accepted=accepted, model=_model(ident, ce_name, z_name))


def _name_count(seen: list[tuple[int, int, float]], accepted: bool, tolerance: float) -> str:
    """The count whose product with the weight stays constant."""
    best, smallest = "other", math.inf
    for name, count in COUNTS.items():
        if "all" in name and not accepted:
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
    ce_count, z_count = (token_count(name or "sum", tokens, tokens) for name in (ce_name, z_name))
    ce_scale = 0.0 if ce_name == "none" else chosen.mean_weight * (1 + chosen.smoothing) * ce_count
    smoothing = chosen.smoothing / (1 + chosen.smoothing)
    # Centered: a weight below 1 on onehot(y) is label smoothing, and its 1/V part must not be read as c.
    hidden = 0.0
    if CENTERED in chosen.quantities and not smoothing and ce_name != "sum" and 0.5 < ce_scale < 1 - 1e-3:
        smoothing = hidden = 1 - ce_scale
        ce_scale = 1.0
    penalties = []
    for quantity, slope, offset in zip(chosen.quantities, chosen.slope, chosen.offset, strict=True):
        offset = offset + (hidden / ce_count if quantity is CENTERED else 0.0)
        target = offset / slope if slope else 0.0
        penalties.append(Penalty(quantity, slope * z_count / quantity.factor, target, chosen.damping))
    return Model(tuple(penalties), ce_name, z_name, ce_scale, smoothing, ident.rows.warp, ident.space.lanes)


def _second_vocabulary(box: BlackBox, ident: Identification, seed: int) -> tuple[str | None, Identification]:
    """How c and label smoothing depend on V, from a second vocabulary; None if the loss accepts only its own.

    c: "constant", "log_v" for log V plus a constant, or "other". Smoothing: ε/V or, as t5x has it, ε/(V − 1).
    """
    space, chosen, model = ident.space, ident.fit, ident.model
    assert chosen is not None
    skip = space.padded or space.lanes >= SECOND_VOCAB or ident.coarse or ident.how not in ("none", "explained")
    if skip or not ident.rows.uniform:
        return None, ident
    try:
        parts = take_draw(box, space.with_vocab(SECOND_VOCAB), seed, UNLIKELY).parts(*UNLIKELY)
    except LossCallError:
        return None, ident
    if not parts:
        return None, ident
    again = chosen.again(ident.decompose(parts))
    if chosen.smoothing:
        here, there = (one.smoothing / (1 + one.smoothing) for one in (chosen, again))
        t5x = (SECOND_VOCAB / (SECOND_VOCAB - 1)) / (space.lanes / (space.lanes - 1))
        model = replace(model, smoothing_over_others=abs(there / here / t5x - 1) < 1e-6 < abs(there / here - 1))
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


def _describe(ident: Identification, rule: str | None) -> Identified:
    chosen, model = ident.fit, ident.model
    assert chosen is not None
    smoothing = model.smoothing if abs(model.smoothing) > 1e-6 else 0.0
    if model.smoothing_over_others:
        smoothing *= (ident.space.lanes - 1) / ident.space.lanes
    whole, spread = [w for w in ident.weights if w.valid == w.tokens], [w for w in ident.weights if w.spread]
    ce_weights = "uniform" if ident.rows.uniform or ident.how == "rounded" else _pattern(ident.rows)
    if ce_weights == "uniform" and not any(w.spread for w in whole) and any(not w.misplaced for w in spread):
        # A mask alone makes the weights of tokens differ, as a mean of means of groups does.
        ce_weights = "groups"
    record = replace(
        ident.identified,
        has_z=bool(chosen.quantities),
        ce_denominator=model.ce_denominator,
        uncertainty=Uncertainty(unexplained=chosen.worst),
        vocab=ident.space.lanes,
        ce_scale=model.ce_scale,
        label_smoothing=smoothing,
        ce_weights=ce_weights,
        extra=model.warp.named(),
    )
    if not chosen.quantities:
        return record
    lead, slope, eps, fixed = model.penalties[0], chosen.slope[0], ident.rounding, model.penalties[0].quantity.fixed
    relative = COVERAGE * chosen.slope_error[0] / abs(slope) + 8 * eps
    if fixed:
        # One source for all tokens: w + s is rounded alike on every saturated one, and no residual shows it.
        relative += 2 * eps * (abs(chosen.mean_weight) + abs(slope)) / abs(slope)
    # c = β/α; the rounding floor is that of fused kernels, which round 1 + 2λ(log Z − c) as a whole.
    error = math.hypot(chosen.offset_error[0], chosen.offset[0] / slope * chosen.slope_error[0]) / abs(slope)
    about = COVERAGE * error + 8 * eps * max(1.0, abs(lead.target))
    words, coordinate, extra = lead.quantity.words, lead.quantity.coordinate, {}
    if chosen.damping is not None:
        words, coordinate, extra = "log Z, damped by 1 + βA_p² (gain-aware)", "other", {"beta": chosen.damping}
    elif len(model.penalties) == 2:
        name, words = "centered", "log Z and log Z − μ (row-centered), two penalties"
        if chosen.quantities == SUMS[0]:
            name, words = "shift", "log Z − μ and μ, penalized separately (factorized)"
        second, coordinate = model.penalties[1], "other"
        extra = {f"{name}_coef": second.coef, f"{name}_target": second.target}
    shared = chosen.shared or (ce_weights == "groups" and all(w.shared for w in spread))
    return replace(
        record,
        coef=lead.coef,
        target=None if fixed else lead.target,
        coordinate=coordinate,
        z_denominator=model.z_denominator,
        uncertainty=Uncertainty(abs(lead.coef) * relative, relative, None if fixed else about, chosen.worst),
        penalty=words,
        target_rule=rule,
        z_weights="shared" if shared else "uniform",
        extra={**extra, **record.extra},
    )


def _pattern(rows: Rows) -> str:
    """What the weights follow: position, class, or neither; each batch may have a separate factor."""
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


# Classes that the loss treats separately, moved targets, returned parts.

MOST_CLASSES, MOST_SPECIAL = 4096, 4
"""Vocabulary up to which every class is tried as a target; more classes that differ are class weights in general."""


def _special_classes(box: BlackBox, space: Space) -> tuple[Space, tuple[SpecialClass, ...]]:
    """Leave out the class that marks ignored tokens, specified or found, and the few classes with a separate weight.

    Every class is the target of one and the same row of logits, in two batches with the classes in opposite order. What differs
    then follows the class and nothing else.
    """
    given = frozenset({box.ignore_index}) if box.ignore_index >= 0 else frozenset()
    if space.lanes > MOST_CLASSES:
        return replace(space, avoid=given), ()
    first, second = (_differing_classes(box, space, backwards) for backwards in (False, True))
    if first is None or second is None:
        return replace(space, avoid=given), ()
    # None is a class without a gradient.
    silent = {k for k, one in first.items() if one is None and k in second and second[k] is None}
    special = tuple(one for k, one in sorted(first.items()) if one is not None and second.get(k) and k not in given)
    special = special if len(special) <= min(MOST_SPECIAL, space.lanes // 8) else ()
    found = silent if len(silent) == 1 and not any(index < space.lanes for index in given) else frozenset()
    return replace(space, avoid=given | found | {one.index for one in special}), special


def _differing_classes(box: BlackBox, space: Space, backwards: bool) -> dict[int, SpecialClass | None] | None:
    """The classes that differ from most, None for one whose rows have no gradient; None altogether where none can be tried."""
    row = torch.randn(1, space.lanes, generator=seeded(1), dtype=torch.float64).round()
    row = torch.nn.functional.pad(row, (0, space.width - space.lanes), value=probes.PADDING)
    order = torch.arange(space.lanes)
    order = (order.flip(0) if backwards else order).repeat(2 + space.tokens // space.lanes)
    differing: dict[int, SpecialClass | None] = {}
    for start in range(0, space.lanes, space.tokens):
        target_T = order[start : start + space.tokens]
        probe = Probe(row.expand(len(target_T), -1), target_T, space.lanes)
        outcome = box.attempt(probe, torch.float32)
        if outcome is None or not bool(outcome.grad_TV.any()):
            return None
        loud_T = outcome.grad_TV.norm(dim=-1) > 0
        differing |= {int(index): None for index in target_T[~loud_T]}
        rows = decompose([(probe, outcome.grad_TV)], UNIT["float32"])
        w_T, s_T, slack_T = rows.b_T + rows.g_T, rows.k_T, 4 * rows.tolerance_T
        w, s, slack = (float(x[loud_T].median()) for x in (w_T, s_T, slack_T))
        if not rows.exact or abs(w) <= slack:
            continue
        differs_T = ((w_T - w).abs() > slack_T + 1e-3 * abs(w)) | ((s_T - s).abs() > slack_T + slack + 1e-2 * abs(s))
        for t in (differs_T & loud_T).nonzero().flatten().tolist():
            z = float(s_T[t]) / s if abs(s) > 20 * slack else None
            differing[int(target_T[t])] = SpecialClass(int(target_T[t]), float(w_T[t]) / w, z)
    return differing


def _with_special(ident: Identification, special: tuple[SpecialClass, ...]) -> Identification:
    """State the weights of classes that the probes left out, where all other tokens have one weight."""
    got = ident.identified
    if not special or not ident.known or got.ce_weights != "uniform":
        return ident
    shared = "shared" if got.has_z and all(one.shares for one in special) else got.z_weights
    weights = "class" if any(abs(one.ce - 1) >= 1e-3 for one in special) else got.ce_weights
    return replace(ident, special=special, identified=replace(got, ce_weights=weights, z_weights=shared))


def _moved_targets(ident: Identification) -> Literal["shifted", "rolled"] | None:
    """Whether row t is trained on target t + 1. "shifted": the last row on none; "rolled": on target 0."""
    ((probe, grad_TV),) = ident.first.parts("mixed")
    own = decompose([(probe, grad_TV)], ident.eps)
    rows = decompose([(replace(probe, target_T=probe.target_T.roll(-1)), grad_TV)], ident.eps)
    inner, b_T = rows.solved_T & (torch.arange(len(rows.b_T)) < len(rows.b_T) - 1), rows.b_T
    if not bool(inner.any()) or not bool((rows.inside_T & (b_T > 10 * rows.tolerance_T))[inner].all()):
        return None
    # Ties of all classes aside, a row that is inside the three shapes of its own target says nothing.
    if bool(own.inside_T[inner].all()) and float(own.b_T[inner].abs().max()) > float(b_T[inner].abs().max()) / 2:
        return None
    trained = bool(rows.inside_T[-1]) and float(b_T[-1]) > 0.1 * float(b_T[inner].median())
    return "rolled" if trained else "shifted"


def _with_added(box: BlackBox, space: Space, seed: int, plain: Identification) -> Identification:
    """Where the loss is CE alone and a Z with a gradient is returned next to it: what the caller's sum applies."""
    for name, item in plain.first.outcomes["mixed"].reported.items():
        if not item.requires_grad or item.value is None:
            continue
        box.added = name
        try:
            both = _identify(box, space, seed)
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
    others = [box.attempt(one) for one in (probes.likely(probe, ident.space.avoid), probe.masked(keep))]
    return all(one and one.value == first.value and torch.equal(one.grad_TV, first.grad_TV) for one in others)


# Precision and repeatability.

STEP = 2.0**-22
"""Relative step in the logits: four fp32 roundings, so that fp32 moves, but unevenly."""
SMOOTH = 3e-8
"""Roughness that fp64 stays below, and a part in fp32 exceeds unless its noise is lost in the rounding of fp64."""


def computes_in(box: BlackBox, probe: Probe) -> str:
    """The name of the format the gradients betray, a key of `UNIT`; of a mix of fp64 and fp32, fp32.

    16-bit arithmetic leaves gradients that 16-bit formats hold exactly. Along a line of steps a few fp32 roundings long
    fp64 gradients are smooth; where any part of the loss passes through fp32 they take the values of the fp32 grid.
    """
    base = box(probe).grad_TV
    # Tiny entries are left out: fp16 flushes them, whatever precision the loss computes in.
    seen = base[base.abs() > 1e-4 * base.abs().max()]
    readable = seen.numel() >= 32 and bool(torch.isfinite(seen).all())
    for name, narrow in (("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        # Random fp32 numbers survive a 16-bit format once in 2^13 to 2^16.
        if readable and float((seen.to(narrow).double() == seen).double().mean()) > 0.98:
            return name
    if box.dtype != torch.float64:
        return "float32"
    direction = torch.randn(probe.logits_TV.shape, generator=seeded(1), dtype=torch.float64)
    step = STEP * direction * (1 + probe.logits_TV.abs())
    g1, g2, g3 = (box(replace(probe, logits_TV=probe.logits_TV + k * step)).grad_TV for k in (1, 2, 3))
    # The third difference of a smooth gradient is O(step²) of the first: what fp64 rounding leaves is about 1e-9. A part in
    # fp32 that makes up the share σ of the slope leaves about σ u₃₂/STEP, be it the CE or a small penalty.
    moved = float((g3 - base).norm())
    rough = float((g3 - 3 * g2 + 3 * g1 - base).norm()) / moved if moved > 0 else 1.0
    return "float64" if rough < SMOOTH else "float32"


def unrepeatable(
    box: BlackBox, probe: Probe, first: Outcome, seeds: Sequence[int | None], limit: float
) -> tuple[str, float | None] | None:
    """A sentence and the change if the same inputs give a result other than `first`, immediately or with a random seed."""

    def change(seed: int | None) -> float:
        now = box(probe, seed=seed)
        grad = float((now.grad_TV - first.grad_TV).norm()) / max(float(first.grad_TV.norm()), 1e-300)
        return max(grad, abs(now.value - first.value) / max(abs(first.value), 1e-12))

    for seed in seeds:
        try:
            changed = change(seed)
            if changed <= limit:
                continue
            # Only chance brings the first answer back under the first seed, and the other one under the other.
            back = seed is not None and change(None) <= limit
            random = back and abs(change(seed) - changed) <= limit * max(1.0, changed)
        except LossCallError as error:
            return f"A call that worked at first fails when it is repeated ({box.calls} calls): {error}", None
        why = "the loss draws random numbers" if random else "the loss keeps state"
        when = "with a different random seed" if random else "when called again"
        return f"The same inputs give a different result {when} (relative change {changed:.3g}): {why}.", changed
    return None


# Fresh batches.


def _confirm(box: BlackBox, ident: Identification, seed: int) -> Identification:
    """The identification with its second draw; an undetermined one if fresh batches contradict it."""
    try:
        second = take_draw(box, ident.space, seed + OFFSET)
    except LossCallError as error:
        return unexplained(ident, f"The same call on a second draw of the probes fails: {error}")
    ident = replace(ident, second=second)
    if lost := sorted(ident.first.outcomes.keys() - second.outcomes.keys()):
        once = f"Loss or gradient is finite on one draw of the probes, and not on a second ({lost[0]})."
        return unexplained(ident, once) if ident.known else ident
    if ident.how == "other" and not _same_curve(ident, second):
        return unexplained(ident, "A second draw of the probes shows another source at the same log Z.")
    if not ident.known:
        return ident
    refuted = _on_dense_head(box, ident, second) or _contradicted(ident, second) or _on_fresh_mask(box, ident, second)
    return refuted or ident


def _same_curve(ident: Identification, second: Draw) -> bool:
    """Whether tokens of both draws with the same log Z have the same source."""
    rows = decompose([*ident.first.parts(*UNLIKELY), *second.parts(*UNLIKELY)], ident.eps)
    view = source_view(rows) if rows.exact else None
    if view is None:
        return False
    quantity, s_T, slack_T = view
    v_T = quantity.value(rows.reference)
    return any(_is_function(v_T, s_T / zeta_T, slack_T / zeta_T.abs()) for zeta_T in _token_weights(rows))


def _on_dense_head(box: BlackBox, ident: Identification, second: Draw) -> Identification | None:
    """Refuted if a dense hidden of another width shows that something other than hidden @ weightᵀ enters."""
    if not box.linear or not ident.plain:
        return None
    wide = DENSE_WIDTH + 16 * (ident.space.width == DENSE_WIDTH)
    hidden, weight, target = probes.dense_head(DENSE_TOKENS, wide, ident.space, second.seed)
    try:
        _, _, grad_weight = box.on_head(hidden, weight, target, box.dtype)
    except LossCallError as error:
        return unexplained(ident, f"A dense hidden state of {wide} columns fails: {error}")
    wanted = ident.model.source(Probe(hidden @ weight.T, target, ident.space.lanes)).T @ hidden
    deviation = relative_error(grad_weight, wanted)
    if deviation <= max(1e-5, 1e3 * ident.eps):
        return None
    return unexplained(
        ident,
        f"On dense hidden states (T = {DENSE_TOKENS}, D = {wide}) the gradient at the weight is off by {deviation:.2g} from what "
        "one-hot hidden states show: the loss changes hidden or weight before their product, or its scale follows the width.",
    )


def _contradicted(ident: Identification, second: Draw) -> Identification | None:
    """Refuted if the second draw differs from what the first one showed."""
    assert ident.fit is not None
    has_z, filtered, rough = ident.identified.has_z, ident.how == "filtered", ident.how == "rounded"
    if ident.trusted and not filtered:
        share = left_over(ident, second.parts(*second.outcomes))
    else:
        # Token weights, missing entries and noise cannot be predicted: the same penalty has to fit again.
        parts = second.parts(*UNLIKELY)
        parts += [] if filtered or rough else [*ident.first.parts("confident"), *second.parts("confident")]
        rows = ident.decompose(parts)
        share = ident.fit.again(rows).worst if rows.exact or rough else 1.0
    if share <= (ROUGHLY if rough else SHARE):
        return None
    by, of = (f"a penalty on {ident.identified.penalty}", "its source") if has_z else ("cross-entropy", "the gradient")
    why = f"One draw of the probes is explained by {by}, but on a second draw {share:.2g} of {of} is left over."
    return unexplained(ident, why)


def left_over(ident: Identification, parts: list[tuple[Probe, Tensor]]) -> float:
    """The largest share, over groups of tokens, that the model leaves of its own Z source (or CE) beyond rounding."""
    unit = ident.eps if ident.model.warp.identity else max(ident.eps, 1e-7)
    worst = 0.0
    for probe, grad_TV in parts:
        ce_TV, z_TV = ident.model.ce_source(probe), ident.model.z_source(probe)
        rounding_T = ROUNDING * unit * probe.noise_T * (ident.model.ce_weight(probe) + z_TV.norm(dim=-1))
        for rows in (probe.saturated_T, ~probe.saturated_T):
            left = float((grad_TV - ce_TV - z_TV)[rows].norm())
            whole = float((z_TV if ident.identified.has_z else ce_TV)[rows].norm())
            if left > float(rounding_T[rows].norm()) and whole > 0:
                worst = max(worst, left / whole)
    return worst


def _on_fresh_mask(box: BlackBox, ident: Identification, second: Draw) -> Identification | None:
    """Refuted by a masked batch of a size that was never seen, or by the same size without a mask right after it."""
    if not ident.masks_predicted or ident.coarse or ident.how == "filtered":
        return None
    tokens, generator = 3 * ident.space.tokens // 4, seeded(second.seed)
    pool = probes.joined([probe for probe, _ in second.parts("mixed", "saturated", "crowded")])
    probe = pool.take(torch.randperm(len(pool.target_T), generator=generator)[:tokens])
    keep = torch.rand(tokens, generator=generator) < 0.4
    keep[:2] = True
    on_mask, on_all = (box.attempt(one) for one in (probe.masked(keep), probe))
    if on_mask is None or on_all is None:
        return None
    masked, whole = factors(ident, probe.masked(keep), on_mask.grad_TV)[0], factors(ident, probe, on_all.grad_TV)[0]
    mask = f"{int(keep.sum())} of {tokens} tokens valid"
    if max(abs(factor - 1) for factor in whole) > SHARE:
        kept = (
            f"After a batch with {mask}, CE and Z of the next batch of this shape, with all of them valid, are weighted "
            f"{whole[0]:.4g} and {whole[1]:.4g} times as expected: the loss keeps a count or a mask for each shape."
        )
        return replace(unexplained(ident, kept), kept_state=kept)
    if max(abs(factor - 1) for factor in masked) > SHARE:
        return unexplained(
            ident,
            f"The denominators of the first batches do not hold on a second draw: with {mask} the weights are "
            f"{masked[0]:.4g} (CE) and {masked[1]:.4g} (Z) times the expected ones.",
        )
    return None


def factors(ident: Identification, probe: Probe, grad_TV: Tensor) -> tuple[list[float], list[float]]:
    """The two factors on CE and on Z that make the model fit this batch, and their half-widths.

    A part that is not there has the factor 1 and the half-width 0. The entries of a token share their rounding: the standard
    errors are those of a regression whose noise is independent between tokens only. Tokens with one and the same Z source may
    share it too, which no residual shows: there the half-width is at least what one rounding of each such source can do.
    """
    model, keep_T = ident.model, probe.valid_T
    inverse = (1 / probe.noise_T[keep_T]).unsqueeze(-1)
    ce_TV, z_TV, goal_TV = (x[keep_T] * inverse for x in (model.ce_source(probe), model.z_source(probe), grad_TV))
    sizes = [float(part.norm()) for part in (ce_TV, z_TV)]
    loud = [i for i, size in enumerate(sizes) if size > 0]
    columns = torch.stack([(ce_TV, z_TV)[i] / sizes[i] for i in loud], dim=-1)  # [T, V, 1 or 2]
    x = torch.linalg.lstsq(columns.flatten(0, 1), goal_TV.flatten().unsqueeze(-1)).solution.flatten()
    gram_T = columns.transpose(1, 2) @ columns
    from_gram = torch.linalg.pinv(gram_T.sum(0), hermitian=True)
    left_TV = goal_TV - columns @ x
    error = ((columns.transpose(1, 2) @ left_TV.unsqueeze(-1)).squeeze(-1) @ from_gram).norm(dim=0)
    # What one rounding of a token can move, added up over the tokens with the same source.
    reach_T = (from_gram @ gram_T @ from_gram).diagonal(dim1=1, dim2=2).clamp(min=0).sqrt()
    moved_T = ident.eps * goal_TV.norm(dim=-1, keepdim=True) * reach_T
    source_T = z_TV.norm(dim=-1) / max(sizes[1], 1e-300)
    _, alike_T = source_T.round(decimals=9).unique(return_inverse=True)
    shared = torch.zeros_like(moved_T).index_add_(0, alike_T, moved_T).norm(dim=0)
    half = torch.maximum(COVERAGE * error, shared)
    found, width = [1.0, 1.0], [0.0, 0.0]
    for k, i in enumerate(loud):
        found[i], width[i] = float(x[k]) / sizes[i], float(half[k]) / sizes[i]
    return found, width
