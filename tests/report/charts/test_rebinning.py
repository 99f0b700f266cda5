"""Regrouping keeps every token in a bin that contains its value."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.straight_histogram import count, log_edges
from zloss.report.charts.rebinning import equal_width, share_bins
from zloss.results.coordinate import Coordinate
from zloss.results.figure_data import DrawnHistogram
from zloss.results.record import from_plain
from zloss.streaming.histogram import Histogram as Streamed

values = st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=60)
BOTH: tuple[Coordinate, Coordinate] = ("raw", "centered")


def nested(sample: list[float], coordinate: Coordinate, exponent: int) -> DrawnHistogram:
    """Bins [i, i+1)·2^e, counted by numpy."""
    width = 2.0**exponent
    first, last = np.floor(min(sample) / width), np.floor(max(sample) / width) + 1
    edges = np.arange(first, last + 1) * width
    counts, _ = np.histogram(sample, bins=edges)
    return DrawnHistogram("gain", coordinate, tuple(edges.tolist()), tuple(counts.tolist()))


@given(values, values, st.integers(3, 8), st.integers(3, 8))
def test_shared_bins_are_what_counting_anew_would_give(a: list[float], b: list[float], ea: int, eb: int) -> None:
    pair = share_bins([nested(a, "raw", ea), nested(b, "centered", eb)])
    assert pair[0].edges == pair[1].edges
    assert 1 <= len(pair[0].counts) <= 80
    for sample, histogram in zip((a, b), pair, strict=True):
        anew = [
            sum(left <= value < right for value in sample)
            for left, right in zip(histogram.edges, histogram.edges[1:], strict=False)
        ]
        assert list(histogram.counts) == anew


def test_streamed_histograms_share_their_bins() -> None:
    rng = np.random.default_rng(0)
    pair = []
    for coordinate, scale in zip(BOTH, (30.0, 3.0), strict=True):
        streamed = Streamed()
        streamed.update(np.abs(rng.normal(scale=scale, size=5000)))
        bars = streamed.bars()
        assert bars is not None
        pair.append(DrawnHistogram("gain", coordinate, tuple(bars[0].tolist()), tuple(bars[1].tolist())))
    assert pair[0].edges != pair[1].edges
    shared = share_bins(pair)
    assert shared[0].edges == shared[1].edges
    assert [sum(histogram.counts) for histogram in shared] == [5000, 5000]


def test_logarithmic_bins_stay_as_they_are() -> None:
    sample = np.geomspace(1, 1000, 50)
    histogram = from_plain(DrawnHistogram, count("gain", "raw", sample, log_edges(sample)))
    assert equal_width(histogram.edges) is None
    assert share_bins([histogram, histogram]) == [histogram, histogram]
