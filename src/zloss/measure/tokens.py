"""The token table: about twenty numbers of every predicted token as columns, and everything that is read from them.

A pass over the blocks of a text gives the columns batch by batch. Quantiles, means, histograms, extreme tokens, samples and
values by block are numpy over whole columns: always exact, whatever the batches and whichever rank had which block. NaN and
infinite values are counted and kept out of every number.

Columns are numpy arrays of equal length by name. `block`, `position`, `token`, `target` are int32; the others have compute
precision (fp32, fp64 for an fp64 model). A quantity of the row-centered head has the suffix `_centered`; those and `mu` are
missing for a head without μ. Scaling: per token, before any reduction; λ_diag is included in `delta_u`.

Axes: T tokens, C tokens of a chunk, S sampled tokens, D width.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from zloss.head.arguments import HeadProblem
from zloss.head.chunked import Chunk, chunks
from zloss.head.products import HeadProducts
from zloss.head.spectrum import leading_part
from zloss.measure.measurement import Measurement
from zloss.models.output_head import HiddenStates
from zloss.results.audit import MAX_SAMPLE, DrawnHistogram, GeometrySample, HeadNumbers, Nonfinite, Quantity
from zloss.results.options import Coordinate
from zloss.results.run_metrics import (
    DELTA_U,
    DELTA_U_GAIN_AWARE,
    GAIN,
    LOG_Z,
    MINUS_LOG_Z,
    SHIFT,
    SHIFT_SQUARED,
    VIOLATION,
    VIOLATION_SQUARED,
    ValidationBlocks,
    kept_values,
)
from zloss.text import Blocks

Array = NDArray[Any]
Columns = Mapping[str, Array]
INTEGERS = ("block", "position", "token", "target")
FLOATS = (
    *("ce", "log_z", "log_z_centered", "mu", "mu_centered", "gain", "gain_centered", "p_norm", "row_max"),
    *("row_max_centered", "delta_u", "delta_u_centered", "delta_u_ce", "rank16", "rank16_centered"),
)
"""The names of all columns, in the order of tokens.parquet."""
HISTOGRAMS: tuple[Quantity, ...] = ("violation", "gain", "shift", "delta_u")
EXTREMES: tuple[Quantity, ...] = ("violation", "gain")
"""Sort keys of the tables of extreme tokens."""
RUN_TAILS = (VIOLATION, LOG_Z, MINUS_LOG_Z, SHIFT, DELTA_U, DELTA_U_GAIN_AWARE)
DRIFT_TAILS = (VIOLATION, SHIFT, GAIN)
"""The quantities whose largest values are kept by block: for runs, and for checkpoints of one run."""
BINS = 256


# The pass over a text


@torch.no_grad()
def token_batches(
    measurement: Measurement,
    blocks: Blocks,
    hidden_of: HiddenStates,
    batch_blocks: int,
    span: range,
    sample: TokenSample | None = None,
) -> Iterator[tuple[int, Columns]]:
    """(end of the batch, its columns), batch by batch over the blocks of `span`; `sample` takes those that are drawn.

    A batch ends at a multiple of `batch_blocks`; the numbers depend on batches by rounding only.
    """
    device, start = measurement.head.weight_VD.device, span.start
    while start < span.stop:
        stop = min((start // batch_blocks + 1) * batch_blocks, span.stop)
        inputs_BN, targets_BN = blocks.batch(slice(start, stop))
        hidden_TD = blocks.counted(hidden_of(inputs_BN.to(device))).flatten(0, 1)
        target_T = targets_BN.flatten()
        columns: dict[str, list[Array]] = {}
        for tokens, chunk, shape_CD in token_chunks(measurement, hidden_TD, target_T.to(device)):
            for name, column_C in chunk.items():
                columns.setdefault(name, []).append(column_C)
            if sample is not None:
                rows = np.flatnonzero(drawable(chunk))
                sample.add(start * blocks.size + tokens.start + rows, shape_CD[rows])
        places = np.arange(start * blocks.size, stop * blocks.size)
        whole: dict[str, Array] = {
            "block": places // blocks.size + blocks.offset,
            "position": places % blocks.size,
            "token": blocks.counted(inputs_BN).flatten().numpy(),
            "target": target_T.numpy(),
        }
        whole = {name: column.astype(np.int32) for name, column in whole.items()}
        yield stop, whole | {name: np.concatenate(parts) for name, parts in columns.items()}
        start = stop


def token_chunks(
    measurement: Measurement, hidden_TD: Tensor, target_T: Tensor
) -> Iterator[tuple[slice, dict[str, Array], Tensor]]:
    """(which tokens, their float columns, Wᵀp [C, D]), chunk by chunk, from two products with the head."""
    problem = measurement.problem(hidden_TD, target_T)
    head = HeadProducts(problem.weight_VD[: problem.local_rows], problem.dtype, problem.rounding)
    mean_row_D, scale = measurement.mean_row_D, measurement.head.logit_scale
    for chunk, shape_CD in shaped_chunks(problem):
        assert isinstance(chunk.tokens, slice)  # a measurement holds all its tokens
        stats, target_CD = chunk.stats, scale * head.select(chunk.index_C)
        if chunk.target_slope_C is not None:
            target_CD = target_CD * chunk.target_slope_C.unsqueeze(1)
        assert stats.p_norm is not None
        assert stats.gain is not None
        columns = {
            "ce": chunk.loss.cross_entropy,
            "log_z": stats.log_z,
            "mu": stats.mu,
            "gain": stats.gain,
            "p_norm": stats.p_norm,
            "row_max": stats.row_max,
            "delta_u": _delta_u(measurement, stats.log_z, stats.p_norm, stats.gain),
            "delta_u_ce": (shape_CD - target_CD).norm(dim=1),
            "rank16": leading_part(shape_CD, stats.gain, measurement.spectrum("raw")),
        }
        if stats.mu is not None and stats.gain_centered is not None:
            shape_centered_CD = shape_CD - mean_row_D.to(shape_CD)
            columns |= {
                "log_z_centered": stats.log_z_centered,
                "mu_centered": stats.mu_residual,
                "gain_centered": stats.gain_centered,
                "row_max_centered": stats.row_max - stats.mu,
                "delta_u_centered": _delta_u(measurement, stats.log_z_centered, stats.p_norm, stats.gain_centered),
                "rank16_centered": leading_part(
                    shape_centered_CD, stats.gain_centered, measurement.spectrum("centered")
                ),
            }
        present = {name: columns[name] for name in FLOATS if columns.get(name) is not None}
        yield chunk.tokens, {name: column.cpu().numpy() for name, column in present.items()}, shape_CD


def _delta_u(measurement: Measurement, log_z_C: Tensor | None, p_norm_C: Tensor, gain_C: Tensor | None) -> Tensor:
    """‖δ_u‖ = A_p·‖δ_z‖ with ‖δ_z‖ = 2λ_diag·|log Z − c|·‖p‖."""
    assert log_z_C is not None
    assert gain_C is not None
    return gain_C * (2 * measurement.coef * (log_z_C - measurement.target).abs() * p_norm_C)


def shaped_chunks(problem: HeadProblem) -> Iterator[tuple[Chunk, Tensor]]:
    """(chunk, Wᵀp [C, D] of the scaled head) of all tokens in order; with a softcap WᵀCp, C the slope of the cap."""
    for chunk in chunks(problem, back_projection=True):
        assert chunk.projected_CD is not None
        yield chunk, chunk.projected_CD * (problem.options.logit_scale / chunk.sums.sum_C).unsqueeze(1)


def concatenated(parts: Sequence[Columns]) -> dict[str, Array]:
    """The rows of all parts, in order; without parts there are no columns."""
    return {name: np.concatenate([part[name] for part in parts]) for name in (parts[0] if parts else {})}


# The numbers of a table


# Nonfinite values may give nonfinite values, silently: they are counted and left out.
_quietly = np.errstate(over="ignore", invalid="ignore", divide="ignore")


_STORED = {
    "shift": "mu",
    "violation": "log_z",
    "minus_log_z": "log_z",
    "delta_z": "log_z",
    "delta_u_gain_aware": "delta_u",
}
"""The column that a quantity follows from."""


@_quietly
def quantity(columns: Columns, name: str, coordinate: Coordinate, measurement: Measurement) -> Array | None:
    """A column in one coordinate, or a quantity that follows from columns; None if it needs a μ that does not exist."""

    suffix = "" if coordinate == "raw" else "_centered"
    stored = _STORED.get(name, name)
    column = columns.get(f"{stored}{suffix}")
    if column is None or stored == name:
        return column
    if name == "shift":
        return np.abs(column)
    if name == "delta_u_gain_aware":
        return np.asarray(column / (1 + measurement.gain_beta * columns[f"gain{suffix}"] ** 2))
    if name == "minus_log_z":
        return np.negative(column)
    violation = np.abs(column - measurement.target)
    return np.asarray(violation if name == "violation" else 2 * measurement.coef * violation * columns["p_norm"])


@_quietly
def head_numbers(columns: Columns, measurement: Measurement, coordinate: Coordinate) -> HeadNumbers:
    """The numbers of the tokens and of the head's spectrum; all None in a coordinate that does not exist."""
    if coordinate not in measurement.coordinates:
        return HeadNumbers()

    def of(name: str) -> Array:
        found = quantity(columns, name, coordinate, measurement)
        return np.empty(0) if found is None else found

    def squared(name: str) -> Array:
        return np.square(of(name), dtype=np.float64)

    diag_z, mu_square = mean(squared("violation")), mean(squared("shift"))
    spectrum = measurement.spectrum(coordinate)
    return HeadNumbers(
        diag_z=None if diag_z is None else measurement.coef * diag_z,
        p_z_999=quantile(of("violation"), 0.999),
        a_p_mean=mean(of("gain")),
        a_p_99=quantile(of("gain"), 0.99),
        log_z_mean=mean(of("log_z")),
        mu_abs_99=quantile(of("shift"), 0.99),
        mu_rms=None if mu_square is None else math.sqrt(mu_square),
        delta_u_99=quantile(of("delta_u"), 0.99),
        delta_u_99_gain_aware=quantile(of("delta_u_gain_aware"), 0.99),
        row_max_999=quantile(of("row_max"), 0.999),
        sigma_1=spectrum.sigma_1,
        e_1=spectrum.share(1),
        e_16=spectrum.share(16),
        f_16=mean(of("rank16") / squared("gain")),
        rho_16=correlation(squared("gain"), of("rank16")),
    )


def perplexity(columns: Columns) -> float | None:
    """exp of the mean cross-entropy over finite tokens; None without any, or where it overflows."""
    ce = mean(columns.get("ce"))
    return None if ce is None or ce > 700 else math.exp(ce)


def nonfinite_tokens(columns: Columns) -> Nonfinite:
    """Number of tokens with a NaN, and of other tokens with an infinity, in their CE, log Z or gain."""
    parts = [columns[name] for name in ("ce", "log_z", "gain") if name in columns]
    nan_T, inf_T = (np.any([test(part) for part in parts], axis=0) for test in (np.isnan, np.isinf))
    return Nonfinite(nan=int(np.sum(nan_T)), inf=int(np.sum(inf_T & ~nan_T)))


def finite(values: Array | None) -> Array:
    """The finite values; empty for None."""
    if values is None:
        return np.empty(0)
    keep = np.isfinite(values)
    return values if keep.all() else values[keep]


def mean(values: Array | None) -> float | None:
    """Mean of the finite values in fp64; None without any."""
    values = finite(values)
    return float(values.mean(dtype=np.float64)) if values.size else None


def quantile(values: Array | None, q: float) -> float | None:
    """The q-quantile of the finite values, by linear interpolation as numpy's default; None without any."""
    values = finite(values)
    # In fp64, because numpy rounds q to the precision of the values.
    return float(np.quantile(values.astype(np.float64), q, overwrite_input=True)) if values.size else None


@_quietly
def correlation(x: Array, y: Array) -> float | None:
    """Pearson's correlation over the pairs with two finite sides; None without variance."""
    keep = np.isfinite(x) & np.isfinite(y)
    if not keep.all():
        x, y = x[keep], y[keep]
    if not x.size or np.ptp(x) == 0 or np.ptp(y) == 0:
        return None
    x, y = (side - side.mean(dtype=np.float64) for side in (x, y))
    scale = math.sqrt(np.dot(x, x)) * math.sqrt(np.dot(y, y))
    found = float(np.dot(x, y)) / scale if 0 < scale < math.inf else math.nan
    return min(max(found, -1.0), 1.0) if math.isfinite(found) else None


# Histograms


def histograms(columns: Columns, measurement: Measurement) -> tuple[DrawnHistogram, ...]:
    """Bars of every quantity that has values, without the centered shift, which is rounding noise."""
    found = []
    for coordinate, name in itertools.product(measurement.coordinates, HISTOGRAMS):
        drawn = bars(finite(quantity(columns, name, coordinate, measurement)))
        if drawn is not None and (coordinate, name) != ("centered", "shift"):
            edges, counts = drawn
            found.append(DrawnHistogram(name, coordinate, tuple(edges.tolist()), tuple(counts.tolist())))
    return tuple(found)


def bars(values: Array, bins: int = BINS) -> tuple[Array, Array] | None:
    """Edges [n + 1] and counts [n] of the bins from the smallest to the largest of finite values; None without values.

    Bins are [i, i+1)·2^e, with e the smallest exponent at which the values span at most `bins` of them (never finer than 2^-44
    of the largest magnitude, so that i is exact in fp64): between half of the bins and all of them are in use.
    """
    if not values.size:
        return None
    low, high = float(values.min()), float(values.max())
    exponent = _finest_exponent(low, high, bins)
    first, last = _bin_index(np.array([low, high]), exponent)
    with np.errstate(over="ignore"):
        edges = np.ldexp(np.arange(first, last + 2, dtype=np.float64), exponent)
    # The last edge may be 2^1024, which fp64 does not have.
    edges = np.clip(edges, -sys.float_info.max, sys.float_info.max)
    return edges, np.histogram(values, edges)[0]


def _finest_exponent(low: float, high: float, bins: int) -> int:
    """The smallest e at which [low, high] spans at most `bins` bins of width 2^e."""
    half_span, largest = high / 2 - low / 2, max(abs(low), abs(high))
    # 2^e ≤ half_span / bins is certainly too fine, so the search may start there.
    too_fine = math.frexp(half_span)[1] - 1 - math.ceil(math.log2(bins)) if half_span else -1074
    exponent = max(too_fine, math.frexp(largest)[1] - 1 - 44 if largest else -1074, -1074)
    while np.ptp(_bin_index(np.array([low, high]), exponent)) >= bins:
        exponent += 1
    return exponent


def _bin_index(values: Array, exponent: int) -> NDArray[np.int64]:
    """⌊x / 2^e⌋, exact; a negative x whose quotient underflows still is in bin −1."""
    quotient = np.ldexp(values.astype(np.float64), -exponent)
    index = np.floor(quotient).astype(np.int64)
    index[(quotient == 0) & (values < 0)] = -1
    return index


# Selected tokens


def extreme_rows(scores: Array, count: int) -> list[int]:
    """Rows of the `count` largest finite scores, largest first, the first in the text among equals."""
    known = finite(scores)
    border = -math.inf if len(known) <= count else np.partition(known, len(known) - count)[len(known) - count]
    rows = np.flatnonzero(np.isfinite(scores) & (scores >= border))
    return [int(row) for row in rows[np.argsort(-scores[rows], kind="stable")][:count]]


def hash_index(index_T: NDArray[np.int64], seed: int) -> NDArray[np.uint64]:
    """SplitMix64's output for counter `index` and start `seed`: a bijection of 64-bit words, so that keys never tie."""
    x_T = index_T.astype(np.uint64) + np.uint64(seed % 2**64)
    x_T = (x_T + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x_T = (x_T ^ (x_T >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x_T = (x_T ^ (x_T >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(x_T ^ (x_T >> np.uint64(31)))


def drawable(columns: Columns) -> NDArray[np.bool_]:
    """Which tokens can be drawn: those whose numbers in the panels of the geometry figure are finite."""
    names = [f"{name}{suffix}" for name in ("log_z", "gain", "delta_u", "rank16") for suffix in ("", "_centered")]
    known = [np.isfinite(columns[name]) for name in ("p_norm", *names) if name in columns]
    return np.asarray(np.all(known, axis=0))


class TokenSample:
    """The (at most) `limit` drawable tokens whose hashed index in the text is smallest, and their Wᵀp in fp32.

    Every token is as likely to be drawn as any other, and the sample does not depend on batches or ranks. It is gathered
    during the pass, because a table has no vectors. `width` 0 keeps none: the figure has no plane.
    """

    def __init__(self, width: int, seed: int, limit: int = MAX_SAMPLE) -> None:
        self.seed, self.limit = seed, limit
        self.index_S: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self.vectors_SD: NDArray[np.float32] = np.empty((0, width), dtype=np.float32)

    def add(self, index_C: NDArray[np.int64], vectors_CD: Tensor | Array) -> None:
        """Add drawable tokens; the ones with the smallest hashes so far are kept."""
        rows = np.arange(len(index_C))
        if len(self.index_S) == self.limit:  # most of a long text ends here
            rows = np.flatnonzero(hash_index(index_C, self.seed) < hash_index(self.index_S, self.seed).max())
        new_SD = torch.as_tensor(vectors_CD)[rows, : self.vectors_SD.shape[1]].float().cpu().numpy()
        index, vectors = np.concatenate([self.index_S, index_C[rows]]), np.concatenate([self.vectors_SD, new_SD])
        kept = np.argsort(hash_index(index, self.seed))[: self.limit]
        kept = kept[np.argsort(index[kept])]
        self.index_S, self.vectors_SD = index[kept], vectors[kept]


def geometry_sample(columns: Columns, measurement: Measurement, blocks: Blocks, sample: TokenSample) -> GeometrySample:
    """The sample of tokens that the gradient-geometry figure draws, with their places in the plane if it has vectors."""
    drawn: dict[str, tuple[float, ...]] = {}
    if len(sample.index_S):
        block_S, position_S = np.divmod(sample.index_S, blocks.size)
        # After an interruption the table has only some of the blocks, but those are whole.
        rows = np.searchsorted(columns["block"], (block_S + blocks.offset).astype(np.int32)) + position_S
        for coordinate, panel in itertools.product(measurement.coordinates, ("a2", "rank16", "delta_z", "delta_u")):
            values = quantity(columns, "gain" if panel == "a2" else panel, coordinate, measurement)
            assert values is not None
            picked = values[rows].astype(np.float64)
            drawn[f"{panel}_{coordinate}"] = tuple((picked**2 if panel == "a2" else picked).tolist())
    if sample.vectors_SD.size:
        mean_row_D, cloud_SD = measurement.mean_row_D.cpu(), torch.from_numpy(sample.vectors_SD).double()
        plane_2D = geometry_plane(cloud_SD, mean_row_D)
        for coordinate in measurement.coordinates:
            x_S, y_S = ((cloud_SD if coordinate == "raw" else cloud_SD - mean_row_D) @ plane_2D.T).unbind(dim=1)
            drawn |= {f"x_{coordinate}": tuple(x_S.tolist()), f"y_{coordinate}": tuple(y_S.tolist())}
    return GeometrySample(
        **drawn,
        mean_row_norm=float(measurement.mean_row_D.norm()),
        drawn_from=int(drawable(columns).sum()) if columns else 0,
        note=f"at most {MAX_SAMPLE} tokens, chosen by a hash of their position in the text",
    )


def has_plane(measurement: Measurement) -> bool:
    """False if the mean row vanishes, which leaves no first axis, and for softcapped logits."""
    mean_row_D = measurement.mean_row_D
    return measurement.head.softcap is None and mean_row_D.numel() > 1 and bool(mean_row_D.norm() > 0)


def geometry_plane(cloud_SD: Tensor, mean_row_D: Tensor) -> Tensor:
    """[2, D] in fp64: w̄/‖w̄‖, and the leading principal direction of the centered cloud of Wᵀp orthogonal to it.

    Paper fig:gradient_geometry, panel a.
    """
    first_D = mean_row_D.double() / mean_row_D.double().norm()
    cloud_SD = cloud_SD.double()
    cloud_SD = cloud_SD - cloud_SD.mean(dim=0)
    cloud_SD = cloud_SD - torch.outer(cloud_SD @ first_D, first_D)
    second_D = torch.linalg.eigh(cloud_SD.T @ cloud_SD).eigenvectors[:, -1]
    # The sign of a singular vector is arbitrary; its largest entry is made positive, so that figures can be compared.
    return torch.stack([first_D, second_D * torch.sign(second_D[second_D.abs().argmax()])])


# Values by block


@_quietly
def block_values(
    columns: Columns, measurement: Measurement, blocks: Blocks, tails: Sequence[str] = RUN_TAILS
) -> ValidationBlocks:
    """Mean cross-entropy and mean squares of every block, and the largest values of the quantities `tails` by block."""
    block_T, kept = columns["block"] - blocks.offset, kept_values(blocks.predictions)
    tokens = np.bincount(block_T, minlength=blocks.count)

    def means(values: Array) -> tuple[float | None, ...]:
        found = np.bincount(block_T, weights=values.astype(np.float64), minlength=blocks.count) / tokens
        return tuple(float(each) if np.isfinite(each) else None for each in found)

    def largest(values: Array) -> tuple[tuple[float, ...], ...]:
        """The `kept` largest finite values of all blocks, by block, largest first, with the 7 digits of fp32."""
        rows = np.flatnonzero(np.isfinite(values))
        if len(rows) > kept:
            rows = rows[np.argpartition(-values[rows], kept - 1)[:kept]]
        rows = rows[np.lexsort((-values[rows], block_T[rows]))]
        ends = np.cumsum(np.bincount(block_T[rows], minlength=blocks.count))
        rounded = [float(f"{value:.7g}") for value in values[rows].tolist()]
        return tuple(tuple(rounded[end - size : end]) for end, size in zip(ends, np.diff(ends, prepend=0), strict=True))

    found = {
        f"{name}.{coordinate}": values
        for coordinate in measurement.coordinates
        for name in dict.fromkeys((*tails, VIOLATION, SHIFT))
        if (values := quantity(columns, name, coordinate, measurement)) is not None
    }
    squares = {f"{SHIFT_SQUARED}.raw": f"{SHIFT}.raw"}  # those of the centered residual are rounding noise
    squares |= {
        f"{VIOLATION_SQUARED}.{coordinate}": f"{VIOLATION}.{coordinate}" for coordinate in measurement.coordinates
    }
    return ValidationBlocks(
        tokens=tuple(tokens.tolist()),
        ce=means(columns["ce"]),
        kept=kept,
        tails={key: largest(values) for key, values in found.items() if key.partition(".")[0] in tails},
        means={key: means(found[of].astype(np.float64) ** 2) for key, of in squares.items() if of in found},
    )
