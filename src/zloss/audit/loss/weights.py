"""Losses whose weight on a token differs, or whose penalty is no square: solved token by token.

Class weights, token weights, focal factors and Z on some tokens only all keep the gradient of a token inside the three
directions of `decompose`. There the weight of each CE is read off, and the penalty is fitted beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from zloss.audit.loss.candidates import CENTERED, RAW, Candidate
from zloss.audit.loss.decompose import Rows, decompose
from zloss.audit.loss.fit import fit
from zloss.audit.loss.forms import is_function, name_form
from zloss.audit.loss.measured import Measured
from zloss.audit.loss.select import Selection, select


@dataclass(frozen=True)
class Weighted:
    """What was found: an explained selection, or the words for what was seen."""

    data: Measured
    selection: Selection | None
    ce_weights: str
    z_weights: str | None
    seen: str | None = None
    """What is seen where no penalty was named."""
    has_z: bool | None = None
    """Known even where no number is."""


def find_weighted(data: Measured) -> Weighted | None:
    """`data` holds probes whose targets are never the most likely class; None where the three directions do not do."""
    rows = decompose(data)
    if not rows.exact or not bool(rows.solved_T.all()):
        return None
    for centered in (False, True):
        w_T = rows.b_T if centered else rows.b_T + rows.u_T
        s_T = rows.u_T if centered else rows.a_T - rows.b_T - rows.u_T
        tolerance_T = rows.tolerance_T
        if centered and bool(((rows.a_T - rows.b_T - rows.u_T).abs() > 4 * tolerance_T).any()):
            continue
        if not centered and not _one_smoothing(rows, w_T):
            continue
        found = _explain(data, CENTERED if centered else RAW, w_T, s_T, tolerance_T)
        if found is not None:
            return found
    return None


def depends_on_target(unlikely: Measured, likely: Measured, found: Weighted) -> bool:
    """Whether the Z source of the same logits changes with the target, beyond the weight that it shares with CE.

    `unlikely` and `likely` hold the same batch with targets of small and of large probability. A penalty on log Z, or on
    log Z − μ, does not know the target; one on the log-sum-exp of the other classes does.
    """
    first, second = decompose(unlikely), decompose(likely)
    assert found.selection is not None
    centered = any(candidate.name == CENTERED.name for candidate in found.selection.fit.candidates)
    sources, slacks = [], []
    for rows in (first, second):
        w_T = rows.b_T if centered else rows.b_T + rows.u_T
        s_T = rows.u_T if centered else rows.a_T - rows.b_T - rows.u_T
        scale_T = w_T if found.z_weights == "shared" else torch.ones_like(w_T)
        loud = scale_T.abs() > 10 * rows.tolerance_T
        sources.append(torch.where(loud & rows.solved_T, s_T / scale_T, torch.full_like(s_T, torch.nan)))
        slacks.append(4 * rows.tolerance_T / scale_T.abs())
    limit_T = slacks[0] + slacks[1] + 1e-3 * sources[0].abs()
    return bool(((sources[0] - sources[1]).abs() > limit_T).any())


def _one_smoothing(rows: Rows, w_T: Tensor) -> bool:
    """Whether u/w is one ε for all tokens that have a weight."""
    loud = w_T.abs() > 10 * rows.tolerance_T
    if not bool(loud.any()):
        return bool((rows.u_T.abs() <= 4 * rows.tolerance_T).all())
    ratio = rows.u_T[loud] / w_T[loud]
    slack = 8 * (rows.tolerance_T[loud] / w_T[loud].abs()) + 1e-7
    return bool(((ratio - ratio.median()).abs() <= slack).all())


def _explain(data: Measured, of: Candidate, w_T: Tensor, s_T: Tensor, tolerance_T: Tensor) -> Weighted | None:
    mean = float(w_T.mean())
    uniform = bool(((w_T - w_T.median()).abs() <= 4 * tolerance_T + 1e-7 * abs(mean)).all())
    if uniform or mean == 0.0:
        pattern, omega_T = "uniform", None
    else:
        pattern, omega_T = _pattern(data, w_T), w_T / mean
    if bool((s_T.abs() <= 4 * tolerance_T).all()):
        bare = replace(data, ce_weight_T=omega_T)
        plain = select(bare)
        chosen = plain if plain.how == "none" else Selection("none", fit(bare))
        return Weighted(bare, chosen, pattern, None, has_z=False)
    ways: list[tuple[Tensor | None, str]] = [(None, "uniform")]
    if omega_T is not None:
        ways.append((omega_T, "shared"))
    for zeta_T, shared in ways:
        weighted = replace(data, ce_weight_T=omega_T, z_weight_T=zeta_T)
        chosen = select(weighted)
        if chosen.how == "explained":
            return Weighted(weighted, chosen, pattern, shared)
    v_T = of.value(data.reference)
    for zeta_T, shared in ways:
        source_T, slack_T = s_T, 4 * tolerance_T
        if zeta_T is not None:
            loud = zeta_T.abs() > 1e-3
            if not bool(loud.all()):
                continue
            source_T, slack_T = s_T / zeta_T, slack_T / zeta_T.abs()
        form = name_form(of, v_T, source_T, slack_T)
        if form is not None:
            weighted = replace(data, ce_weight_T=omega_T, z_weight_T=zeta_T)
            fitted = fit(weighted, (form,))
            if fitted.worst < 1e-2:
                return Weighted(weighted, Selection("explained", fitted), pattern, shared)
        some = _some_tokens(data, of, v_T, source_T, slack_T)
        if some is not None:
            return Weighted(data, None, pattern, shared, seen=some, has_z=True)
        if _line_per_batch(data, v_T, source_T, slack_T):
            words = of.words.split(" (")[0]
            seen = f"a squared penalty on {words} whose λ or c changes from batch to batch"
            return Weighted(data, None, pattern, shared, seen=seen, has_z=True)
        if is_function(v_T, source_T):
            words = of.words.split(" (")[0]
            seen = (
                f"a penalty on {words} whose form is none of the known ones (square, power, one-sided, Huber, clipped)"
            )
            return Weighted(data, None, pattern, shared, seen=seen, has_z=True)
    return Weighted(
        data, None, pattern, None, seen=f"a source along {_direction(of)} that is not a function of log Z alone"
    )


def _line_per_batch(data: Measured, v_T: Tensor, s_T: Tensor, slack_T: Tensor) -> bool:
    """Whether s is linear in v within every batch, each with a line of its own."""
    for i in sorted(set(data.batch_T.tolist())):
        rows = data.batch_T == i
        v, s, slack = v_T[rows], s_T[rows], slack_T[rows]
        columns = torch.stack([v, torch.ones_like(v)], dim=-1) / slack.unsqueeze(-1)
        line = torch.linalg.lstsq(columns, (s / slack).unsqueeze(-1)).solution.flatten()
        if bool(((s - line[0] * v - line[1]).abs() > slack + 1e-5 * s.abs()).any()):
            return False
    return True


def _direction(of: Candidate) -> str:
    return "p − 1/V" if of is CENTERED else "p"


def _some_tokens(data: Measured, of: Candidate, v_T: Tensor, s_T: Tensor, slack_T: Tensor) -> str | None:
    """In words, on which tokens a squared penalty acts, where it acts on some only."""
    on = s_T.abs() > slack_T
    if int(on.sum()) < 2 or bool(on.all()):
        return None
    columns = torch.stack([v_T[on], torch.ones_like(v_T[on])], dim=-1)
    inverse = (1 / slack_T[on]).unsqueeze(-1)
    line = torch.linalg.lstsq(columns * inverse, s_T[on].unsqueeze(-1) * inverse).solution.flatten()
    left = (s_T[on] - columns @ line).abs()
    expected = (line[0] * v_T + line[1]).abs()
    if bool((left > slack_T[on] + 1e-5 * s_T[on].abs()).any()) or bool((expected[~on] <= slack_T[~on]).all()):
        return None
    words = of.words.split(" (")[0]
    batches = [on[data.batch_T == i] for i in sorted(set(data.batch_T.tolist()))]
    silent = [expected[data.batch_T == i] <= slack_T[data.batch_T == i] for i in sorted(set(data.batch_T.tolist()))]
    anywhere = torch.stack(batches).any(0)
    fixed = all(bool(((b == anywhere) | s).all()) for b, s in zip(batches, silent, strict=True))
    if not fixed:
        return f"a squared penalty on {words} on some tokens only, chosen by target or logits"
    positions = anywhere.nonzero().flatten().tolist()
    return f"a squared penalty on {words} on {_places(positions, len(anywhere))} only"


def _places(positions: list[int], tokens: int) -> str:
    if positions == [tokens - 1]:
        return "the last token"
    steps = {b - a for a, b in pairwise(positions)}
    if len(positions) > 2 and len(steps) == 1 and (step := steps.pop()) > 1:
        return f"every {step}{'nd' if step == 2 else 'rd' if step == 3 else 'th'} token"
    if positions == list(range(positions[0], positions[-1] + 1)):
        return f"tokens {positions[0]} to {positions[-1]} of {tokens}"
    return f"{len(positions)} of {tokens} tokens"


def _pattern(data: Measured, w_T: Tensor) -> str:
    """What the weights follow: position, class, or neither; each batch may have a factor of its own."""
    parts = [(data.batch_T == i).nonzero().flatten() for i in sorted(set(data.batch_T.tolist()))]
    if len({len(rows) for rows in parts}) == 1:
        table = torch.stack([w_T[rows] / w_T[rows].mean() for rows in parts])
        if _alike(table):
            return "position"
    target_T, by_class = data.reference.target_T, True
    anchor: dict[int, float] = {}
    factor = _batch_factors(w_T, target_T, parts)
    for rows, scale in zip(parts, factor, strict=True):
        for t in rows.tolist():
            value = float(w_T[t]) / scale
            known = anchor.setdefault(int(target_T[t]), value)
            by_class = by_class and abs(value - known) <= 1e-4 * max(abs(known), abs(value))
    return "class" if by_class else "token"


def _batch_factors(w_T: Tensor, target_T: Tensor, parts: list[Tensor]) -> list[float]:
    """The factor of each batch, from classes it shares with the first one; 1 where none is shared."""
    first = {int(target_T[t]): float(w_T[t]) for t in parts[0].tolist()}
    factors = [1.0]
    for rows in parts[1:]:
        ratios = [float(w_T[t]) / first[int(target_T[t])] for t in rows.tolist() if first.get(int(target_T[t]))]
        factors.append((float(torch.tensor(ratios).median()) if ratios else 1.0) or 1.0)
    return factors


def _alike(table: Tensor) -> bool:
    return bool(((table - table[0]).abs() <= 1e-4 * table[0].abs().clamp(min=1e-6)).all())
