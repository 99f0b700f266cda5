"""Penalties on log Z that are no squares: read from the source s_t as a function of v_t = log Z (or log Z − μ).

    λ|v − c|^k    s = λk |v − c|^(k−1) sign(v − c)
    one-sided     s = 2λ max(v − c, 0)
    Huber         s = 2λ clip(v − c, ±width)
    clipped       s = 2λ(v − c) between two levels of v, 0 outside

All but the first are piecewise linear in v, so the corners are found first and named after.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from zloss.audit.loss.candidates import Candidate

FEWEST = 4
"""Tokens on a piece of a line."""


@dataclass(frozen=True)
class Piece:
    """s = slope · v + level between two values of v."""

    low: float
    high: float
    slope: float
    level: float

    @property
    def flat(self) -> bool:
        return self.slope == 0.0

    @property
    def silent(self) -> bool:
        return self.flat and self.level == 0.0

    @property
    def root(self) -> float:
        return -self.level / self.slope


def name_form(of: Candidate, v_T: Tensor, s_T: Tensor, tolerance_T: Tensor) -> Candidate | None:
    """The form as a candidate whose value is f'(v)/factor; None where no known form fits."""
    order = v_T.argsort()
    v, s, tolerance = v_T[order], s_T[order], tolerance_T[order]
    pieces = _pieces(v, s, tolerance)
    if pieces is not None and (named := _piecewise(of, pieces)) is not None:
        return named
    return _power(of, v, s, tolerance)


def is_function(v_T: Tensor, s_T: Tensor) -> bool:
    """Whether s hardly jumps when tokens are sorted by v: its total variation is that of a curve with few turns."""
    s = s_T[v_T.argsort()]
    spread = float(s.max() - s.min())
    return spread > 0 and float((s[1:] - s[:-1]).abs().sum()) < 6 * spread


def _pieces(v: Tensor, s: Tensor, tolerance: Tensor) -> list[Piece] | None:
    """At most four lines through the sorted points, from left to right; None where it takes more."""
    out: list[Piece] = []
    start, n = 0, len(v)
    while start < n:
        end = min(start + FEWEST, n)
        line = _line(v[start:end], s[start:end], tolerance[start:end])
        if line is None:
            # The corner may lie inside these few points: let one point go.
            start += 1
            if start > FEWEST * (len(out) + 2) and not out:
                return None
            continue
        while end < n and (longer := _line(v[start : end + 1], s[start : end + 1], tolerance[start : end + 1])):
            line, end = longer, end + 1
        out.append(Piece(float(v[start]), float(v[end - 1]), *line))
        if len(out) > 4:
            return None
        start = end
    skipped = n - sum(int(((v >= p.low) & (v <= p.high)).sum()) for p in out)
    return _joined(out) if skipped <= FEWEST * len(out) else None


def _joined(pieces: list[Piece]) -> list[Piece]:
    return [p for p in pieces if p.high > p.low or len(pieces) == 1]


def _line(v: Tensor, s: Tensor, tolerance: Tensor) -> tuple[float, float] | None:
    """Slope and level within the tolerance of every point; a slope that does not show is 0, a level too."""
    if bool((s.abs() <= tolerance).all()):
        return 0.0, 0.0
    middle = s.mean()
    if bool(((s - middle).abs() <= tolerance).all()):
        return 0.0, float(middle)
    weight = 1 / tolerance
    columns = torch.stack([v * weight, weight], dim=-1)
    slope, level = torch.linalg.lstsq(columns, (s * weight).unsqueeze(-1)).solution.squeeze(-1).tolist()
    left = (s - slope * v - level).abs()
    return (slope, level) if bool((left <= tolerance + 1e-6 * s.abs()).all()) else None


def _piecewise(of: Candidate, pieces: list[Piece]) -> Candidate | None:
    words = of.words.split(" (")[0]
    sloped = [p for p in pieces if not p.flat]
    if len(pieces) == 2 and not sloped:
        left, right = pieces
        if math.isclose(left.level, -right.level, rel_tol=1e-3):
            c = 0.0 if left.high < 0 < right.low else (left.high + right.low) / 2
            where = f"with c between {left.high:.3g} and {right.low:.3g}"
            return _form(of, f"|{words} − c| {where}", lambda v: torch.sign(v - c), 1.0, None, {})
        return None
    if len(sloped) == 1:
        return _one_slope(of, words, pieces, sloped[0])
    if (
        len(pieces) == 3
        and len(sloped) == 2
        and pieces[1].silent
        and math.isclose(pieces[0].slope, pieces[2].slope, rel_tol=1e-3)
    ):
        low, high = pieces[0].root, pieces[2].root
        zone = {"zone_low": low, "zone_high": high}
        f = lambda v: (v - high).clamp(min=0) - (low - v).clamp(min=0)  # noqa: E731
        return _form(of, f"the excess of {words} outside a band", f, 2.0, None, zone)
    return None


def _one_slope(of: Candidate, words: str, pieces: list[Piece], line: Piece) -> Candidate | None:
    """One sloping piece with flat pieces beside it: one-sided, clipped, or Huber."""
    c, index = line.root, pieces.index(line)
    before, after = pieces[:index], pieces[index + 1 :]
    if len(before) > 1 or len(after) > 1:
        return None
    low = before[0] if before else None
    high = after[0] if after else None
    silent = [p for p in (low, high) if p is not None and p.silent]
    near_low = low is not None and low.silent and low.high - 1e-6 <= c <= line.low + 1e-6
    near_high = high is not None and high.silent and line.high - 1e-6 <= c <= high.low + 1e-6
    if near_low and high is None:
        return _form(of, f"max({words} − c, 0), one-sided", lambda v: (v - c).clamp(min=0), 2.0, c, {})
    if near_high and low is None:
        return _form(of, f"min({words} − c, 0), one-sided", lambda v: (v - c).clamp(max=0), 2.0, c, {})
    if silent and len(silent) == len(before) + len(after):
        left = -math.inf if low is None else (low.high + line.low) / 2
        right = math.inf if high is None else (line.high + high.low) / 2
        ends = [] if low is None else [f"below {low.high:.3g} to {line.low:.3g}"]
        ends += [] if high is None else [f"above {line.high:.3g} to {high.low:.3g}"]
        f = lambda v: torch.where((v > left) & (v < right), v - c, torch.zeros_like(v))  # noqa: E731
        return _form(of, f"{words}, clipped {' and '.join(ends)} before it is squared", f, 2.0, c, {})
    levels = [p.level / line.slope for p in (low, high) if p is not None]
    if low is not None and high is not None and math.isclose(levels[0], -levels[1], rel_tol=1e-3):
        width = abs(levels[1])
        return _form(
            of, f"Huber's function of {words} − c", lambda v: (v - c).clamp(-width, width), 2.0, c, {"width": width}
        )
    return None


def _power(of: Candidate, v: Tensor, s: Tensor, tolerance: Tensor) -> Candidate | None:
    """λ|v − c|^k with c = 0, or where s changes its sign."""
    words = of.words.split(" (")[0]
    turns = ((s[1:] > 0) & (s[:-1] < 0)).nonzero().flatten().tolist()
    loud = s.abs() > 10 * tolerance
    guesses = [0.0] + [float(v[i] + v[i + 1]) / 2 for i in turns[:3]]
    for c in guesses:
        use = loud & ((v - c).abs() > 1e-6)
        if int(use.sum()) < 12:
            continue
        x, y = (v[use] - c).abs().log(), s[use].abs().log()
        slope, level = (
            torch.linalg.lstsq(torch.stack([x, torch.ones_like(x)], dim=-1), y.unsqueeze(-1))
            .solution.flatten()
            .tolist()
        )
        k = slope + 1
        signs = torch.sign(v[use] - c) * torch.sign(s[use])
        if k > 1.05 and float((y - slope * x - level).abs().max()) < 1e-3 and bool((signs == signs[0]).all()):
            k = round(k) if abs(k - round(k)) < 1e-3 else k
            f = lambda v, c=c, k=k: torch.sign(v - c) * (v - c).abs() ** (k - 1)  # noqa: E731
            return _form(of, f"|{words} − c| to the power {k:.4g}", f, float(k), c, {"power": float(k)})
    return None


def _form(
    of: Candidate,
    words: str,
    f: Callable[[Tensor], Tensor],
    factor: float,
    c: float | None,
    extra: dict[str, float],
) -> Candidate:
    return Candidate(
        "form", "other", words, lambda r: f(of.value(r)), of.shape, fixed=True, factor=factor, target=c,
        extra=tuple(extra.items()),
    )  # fmt: skip
