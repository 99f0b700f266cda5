"""Raw and centered on the same bars: exact regrouping of nested equal bins.

The streamed histograms have bins [i, i+1)·2^e with an e of their own, so the wider bins of one are unions of the narrower
ones of the other, and adding neighbours up loses nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

from zloss.results.figure_data import DrawnHistogram

MOST = 80
"""Bars of a panel."""


def equal_width(edges: Sequence[float]) -> float | None:
    """The common width of the bins, or None where they differ."""
    widths = [right - left for left, right in itertools.pairwise(edges)]
    if not widths or min(widths) <= 0 or max(widths) > min(widths) * (1 + 1e-6):
        return None
    return (edges[-1] - edges[0]) / len(widths)


def share_bins(histograms: Sequence[DrawnHistogram], most: int = MOST) -> list[DrawnHistogram]:
    """The same counts on common bins, at most `most`; histograms whose bins do not nest come back unchanged."""
    widths = [equal_width(histogram.edges) for histogram in histograms]
    width = max((w for w in widths if w is not None), default=None)
    if width is None or not all(_nests(h.edges[0], w, width) for h, w in zip(histograms, widths, strict=True)):
        return list(histograms)
    low, high = min(h.edges[0] for h in histograms), max(h.edges[-1] for h in histograms)
    while _last(high, width) - math.floor(low / width + 1e-6) > most:
        width *= 2
    first = math.floor(low / width + 1e-6)
    bins = max(_last(high, width) - first, 1)
    edges = tuple((first + i) * width for i in range(bins + 1))
    return [replace(h, edges=edges, counts=_regroup(h, width, first, bins)) for h in histograms]


def _nests(start: float, narrow: float | None, wide: float) -> bool:
    """Whether bins of width `narrow` from `start` fill bins of width `wide` counted from 0, without a rest."""
    if narrow is None:
        return False
    return all(abs(ratio - round(ratio)) < 1e-6 * max(abs(ratio), 1) for ratio in (wide / narrow, start / narrow))


def _last(high: float, width: float) -> int:
    return math.ceil(high / width - 1e-6)


def _regroup(histogram: DrawnHistogram, width: float, first: int, bins: int) -> tuple[int, ...]:
    counts = [0] * bins
    for (left, right), count in zip(itertools.pairwise(histogram.edges), histogram.counts, strict=True):
        counts[math.floor((left + right) / 2 / width) - first] += count
    return tuple(counts)
