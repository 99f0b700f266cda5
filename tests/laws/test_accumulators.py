"""Laws of all accumulators: a split and merged stream answers as the whole one, on hostile streams.

Every law is a function that fails by assertion, so the last section can show that deliberately broken accumulators
break it.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from tests.streaming.broken_accumulators import (
    AddedVariances,
    DropsTheCross,
    FirstComeSample,
    FirstComeTop,
    ForgetsTheKind,
    LosesThePart,
    MeanOfMeans,
    OffByOne,
    OneSided,
    SharingHistogram,
    SinglePrecisionMoments,
    TruncatingHistogram,
)
from tests.streaming.hostile_streams import SHAPES, Split, shaped, splits, streams
from zloss.errors import InputError
from zloss.streaming import (
    Accumulator,
    CoMoments,
    Count,
    HashSample,
    Histogram,
    Moments,
    Quantiles,
    TopTokens,
    batch,
)

LAW = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(autouse=True, scope="module")
def _small_slices():
    """Streams of a few hundred values shall cross slice borders too."""
    before, batch.SLICE = batch.SLICE, 64
    yield
    batch.SLICE = before


# Accumulators


@dataclass(frozen=True)
class Case:
    """An accumulator, how a stream is fed to it, and what "equal" means for it."""

    make: Callable[[], Any]
    feed: Callable[[Any, np.ndarray, slice], None]
    same: Callable[[Any, Any, np.ndarray], None]

    def whole(self, x: np.ndarray) -> Any:
        accumulator = self.make()
        self.feed(accumulator, x, slice(0, x.size))
        return accumulator

    def merged(self, x: np.ndarray, split: Split) -> Any:
        parts = []
        for part in split.parts(x.size):
            parts.append(self.make())
            self.feed(parts[-1], x, part)
        if split.backwards:
            parts.reverse()
        while len(parts) > 1:
            if split.tree:
                pairs = [parts[i : i + 2] for i in range(0, len(parts), 2)]
                parts = [pair[0].merge(pair[1]) if len(pair) == 2 else pair[0] for pair in pairs]
            else:
                parts = [parts[0].merge(parts[1]), *parts[2:]]
        return parts[0]


def feed_values(accumulator: Any, x: np.ndarray, part: slice) -> None:
    accumulator.update(x[part])


def second(x: np.ndarray) -> np.ndarray:
    """A second stream that depends on the first."""
    return np.roll(x, 1) + np.arange(x.size) % 7


def feed_pairs(accumulator: Any, x: np.ndarray, part: slice) -> None:
    accumulator.update(x[part], second(x)[part])


def feed_tokens(accumulator: Any, x: np.ndarray, part: slice) -> None:
    position = np.arange(x.size)
    accumulator.update(x[part], position=position[part], target=(position * 31 % 17)[part], log_z=second(x)[part])


def feed_items(accumulator: Any, x: np.ndarray, part: slice) -> None:
    position = np.arange(x.size)
    columns = {"x": x[part], "y": second(x)[part], "target": (position * 31 % 17)[part]}
    accumulator.update(position[part], **columns, place=np.stack([np.sign(x), position], axis=1)[part])


def same_bits(a: Accumulator, b: Accumulator, x: np.ndarray) -> None:
    """Equal states, dtypes included, bit for bit."""
    left, right = a.state_dict(), b.state_dict()
    assert left.keys() == right.keys()
    for key in left:
        p, q = np.asarray(left[key]), np.asarray(right[key])
        assert p.dtype == q.dtype, key
        assert p.shape == q.shape, key
        assert p.tobytes() == q.tobytes(), key


def same_numbers(a: Moments | CoMoments, b: Moments | CoMoments, x: np.ndarray) -> None:
    """Equal counts; floats equal to a few roundings of the largest magnitude that enters them."""
    assert a.counts.to_array().tolist() == b.counts.to_array().tolist()
    finite = [v[np.isfinite(v)].astype(np.float64) for v in (x, second(x))]
    scale = max([np.abs(v).max(initial=0.0) for v in finite])
    spread = max([np.ptp(v) if v.size else 0.0 for v in finite])
    eps = 64 * np.finfo(np.float64).eps

    def close(p: float | None, q: float | None, tolerance: float) -> None:
        assert (p is None) == (q is None)
        assert p is None or q is None or abs(p - q) <= tolerance

    if isinstance(a, Moments) and isinstance(b, Moments):
        assert (a.count, a.minimum, a.maximum) == (b.count, b.minimum, b.maximum)
        close(a.mean, b.mean, eps * scale)
        close(a.variance, b.variance, eps * spread * (spread + scale))
    elif isinstance(a, CoMoments) and isinstance(b, CoMoments):
        assert a.count == b.count
        close(a.covariance, b.covariance, eps * spread * (spread + scale))
        for p, q in zip(a.means or (), b.means or (), strict=True):
            close(p, q, eps * scale)
        for p, q in zip(a.variances or (), b.variances or (), strict=True):
            close(p, q, eps * spread * (spread + scale))
    else:
        raise AssertionError("different kinds")


def counts_of(accumulator: Any) -> Count:
    return accumulator if isinstance(accumulator, Count) else accumulator.counts


CASES = {
    "Count": Case(Count, feed_values, same_bits),
    "Moments": Case(Moments, feed_values, same_numbers),
    "CoMoments": Case(CoMoments, feed_pairs, same_numbers),
    "Quantiles": Case(Quantiles, feed_values, same_bits),
    "Histogram": Case(lambda: Histogram(16), feed_values, same_bits),
    "TopTokens": Case(lambda: TopTokens(7, integers=["target"], floats=["log_z"]), feed_tokens, same_bits),
    "HashSample": Case(
        lambda: HashSample(7, floats=["x", "y"], integers=["target"], vectors={"place": 2}), feed_items, same_bits
    ),
}
SKETCHING = Case(lambda: Quantiles(exact_limit=50, k=12), feed_values, same_bits)

every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
every_state = pytest.mark.parametrize("case", [*CASES.values(), SKETCHING], ids=[*CASES.keys(), "Quantiles, sketch"])


# The laws


def check_split_and_merge(case: Case, x: np.ndarray, split: Split) -> None:
    case.same(case.merged(x, split), case.whole(x), x)


def check_resume(case: Case, x: np.ndarray, split: Split) -> None:
    """Saved without pickle, loaded, equal bit for bit, and able to go on."""
    accumulator = case.make()
    for part in split.parts(x.size):
        case.feed(accumulator, x, part)
        file = io.BytesIO()
        np.savez(file, **accumulator.state_dict())
        file.seek(0)
        loaded = type(accumulator).from_state_dict(dict(np.load(file, allow_pickle=False)))
        same_bits(accumulator, loaded, x)
        accumulator = loaded
    if counts_of(accumulator).finite <= getattr(accumulator, "exact_limit", math.inf):
        case.same(accumulator, case.whole(x), x)


def check_argument_left_alone(case: Case, x: np.ndarray, split: Split) -> None:
    first, *rest = split.parts(x.size)
    accumulator, other, untouched = case.make(), case.make(), case.make()
    case.feed(accumulator, x, first)
    for part in rest:
        case.feed(other, x, part)
    untouched = type(other).from_state_dict(other.state_dict())
    assert accumulator.merge(other) is accumulator
    same_bits(other, untouched, x)
    case.feed(accumulator, x, slice(0, x.size))  # nothing may be shared between the two afterwards either
    same_bits(other, untouched, x)


def check_nonfinite_counted(case: Case, x: np.ndarray, split: Split) -> None:
    counts = counts_of(case.merged(x, split))
    columns = [x, second(x)] if case.feed in (feed_pairs, feed_items) else [x]
    nan = np.any([np.isnan(c) for c in columns], axis=0)
    positive = ~nan & np.any([c == np.inf for c in columns], axis=0)
    negative = ~nan & ~positive & np.any([c == -np.inf for c in columns], axis=0)
    kinds = [int(kind.sum()) for kind in (nan, positive, negative)]
    assert counts.to_array().tolist() == [x.size - sum(kinds), *kinds]
    assert (counts.total, counts.nonfinite) == (x.size, sum(kinds))


RANKS = [0.0, 1e-3, 0.1, 0.5, 0.9, 0.99, 0.999, 1.0]


def check_quantile_bounds(case: Case, x: np.ndarray, split: Split) -> None:
    """The exact quantile of the finite values lies in [lower, upper], value too."""
    accumulator = case.merged(x, split)
    finite = np.sort(x[np.isfinite(x)].astype(np.float64))
    for q in RANKS:
        estimate = accumulator.quantile(q)
        if not finite.size:
            assert estimate is None
            continue
        truth = float(np.quantile(finite, q))
        assert estimate.lower <= truth <= estimate.upper, (q, truth, estimate)
        assert estimate.lower <= estimate.value <= estimate.upper, (q, estimate)
        if estimate.exact:
            assert estimate.lower == estimate.value == estimate.upper == truth
        else:
            assert finite.size > accumulator.exact_limit


@every_case
@LAW
@given(x=streams(), split=splits)
def test_any_split_and_merge_equals_one_stream(case, x, split):
    check_split_and_merge(case, x, split)


@every_state
@LAW
@given(x=streams(), split=splits)
def test_state_goes_through_a_file_and_goes_on(case, x, split):
    check_resume(case, x, split)


@every_state
@LAW
@given(x=streams(), split=splits)
def test_merge_leaves_its_argument_alone(case, x, split):
    check_argument_left_alone(case, x, split)


@every_state
@LAW
@given(x=streams(), split=splits)
def test_nonfinite_values_are_counted_apart(case, x, split):
    check_nonfinite_counted(case, x, split)


@pytest.mark.parametrize("case", [CASES["Quantiles"], SKETCHING], ids=["exact", "sketch"])
@settings(LAW, max_examples=150)
@given(x=streams(max_size=3000), split=splits)
def test_the_true_quantile_lies_within_the_bounds(case, x, split):
    check_quantile_bounds(case, x, split)


LONG = {"whole": Split(()), "two": Split((0.3,)), "tree of 300": Split(tuple(np.arange(1, 300) / 300), tree=True)}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("split", LONG.values(), ids=LONG.keys())
def test_the_true_quantile_lies_within_the_bounds_of_a_long_stream(shape, split):
    x = shaped(shape, 60_000, np.random.default_rng(5))
    for k in (12, 254):
        check_quantile_bounds(replace(SKETCHING, make=lambda k=k: Quantiles(exact_limit=50, k=k)), x, split)


@every_state
@LAW
@given(x=streams(max_size=100))
def test_merging_with_itself_doubles_the_counts(case, x):
    accumulator = case.whole(x)
    before = counts_of(accumulator).to_array()
    accumulator.merge(accumulator)
    assert counts_of(accumulator).to_array().tolist() == (2 * before).tolist()


@every_state
def test_another_kind_is_refused(case):
    other = Moments() if not isinstance(case.make(), Moments) else Count()
    with pytest.raises(InputError, match="takes another"):
        case.make().merge(other)
    with pytest.raises(InputError, match="is expected to be of"):
        type(case.make()).from_state_dict(other.state_dict())


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (Quantiles(k=12), Quantiles(k=14)),
        (Quantiles(exact_limit=5), Quantiles(exact_limit=6)),
        (Histogram(16), Histogram(32)),
        (TopTokens(3), TopTokens(4)),
        (TopTokens(3, floats=["a"]), TopTokens(3, floats=["b"])),
        (HashSample(3, floats=["a"]), HashSample(3, floats=["a"], seed=1)),
        (HashSample(3, floats=["a"], vectors={"b": 2}), HashSample(3, floats=["a"], vectors={"b": 3})),
    ],
)
def test_other_settings_are_refused(a, b):
    with pytest.raises(InputError, match="the same"):
        a.merge(b)


# The laws can fail: accumulators with one deliberate mistake each

RNG = np.random.default_rng(0)
STREAM = RNG.standard_normal(300)
TIES = np.repeat([1.0, 2.0], 150)
TWO = Split((0.3,))


def broken(law, kind, *options, x=STREAM, split=TWO, feed=feed_values, same=same_bits, **named):
    """A law, the broken case, and the sound one that differs from it in the mistake alone."""
    mistaken = Case(lambda: kind(*options, **named), feed, same)
    sound = replace(mistaken, make=lambda: kind.__mro__[1](*options, **named))
    return pytest.param(law, mistaken, sound, x, split, id=kind.__name__)


TOKENS = {"integers": ["target"], "floats": ["log_z"]}
ITEMS = {"integers": ["target"], "floats": ["x", "y"], "vectors": {"place": 2}}
BROKEN = [
    broken(check_split_and_merge, MeanOfMeans, same=same_numbers),
    broken(check_split_and_merge, AddedVariances, same=same_numbers),
    broken(check_split_and_merge, DropsTheCross, feed=feed_pairs, same=same_numbers),
    broken(check_quantile_bounds, OffByOne),
    broken(check_quantile_bounds, LosesThePart, x=np.sort(STREAM), exact_limit=50, k=12),
    broken(check_quantile_bounds, OneSided, x=np.random.default_rng(1).standard_normal(3000), exact_limit=50, k=12),
    broken(check_split_and_merge, TruncatingHistogram, 16, x=np.exp(STREAM) - 2),
    broken(
        check_split_and_merge, FirstComeTop, 7, x=TIES, split=Split((0.75,), backwards=True), feed=feed_tokens, **TOKENS
    ),
    broken(check_split_and_merge, FirstComeSample, 7, split=Split((0.1,)), feed=feed_items, **ITEMS),
    broken(check_argument_left_alone, SharingHistogram, 16, split=Split((0.0,))),
    broken(check_resume, SinglePrecisionMoments, same=same_numbers),
    broken(check_nonfinite_counted, ForgetsTheKind, x=np.array([1.0, -np.inf, np.inf])),
]


@pytest.mark.parametrize(("law", "mistaken", "sound", "x", "split"), BROKEN)
def test_a_broken_accumulator_breaks_its_law(law, mistaken, sound, x, split):
    law(sound, x, split)
    with pytest.raises(AssertionError):
        law(mistaken, x, split)
