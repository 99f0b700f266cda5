"""The kernels against their definitions in fp64; each mutation of their text is caught."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from tests.laws.definitions import relative_error
from zloss.head import triton as ops
from zloss.head import triton_kernels as kernels

FP32 = 1e-6


@dataclass(frozen=True)
class Rows:
    """Logits with padding columns and ignored rows, both full of what must never be read, and coefficients."""

    logits: Tensor
    index: Tensor
    coefficients: tuple[Tensor, Tensor, Tensor]
    vocab: int
    scale: float
    softcap: float | None

    @property
    def counted(self) -> Tensor:
        return self.index >= 0


def make_rows(
    vocab: int,
    *,
    padding: int = 3,
    tokens: int = 3,
    dtype: torch.dtype = torch.float32,
    scale: float = 1.0,
    softcap: float | None = None,
    spread: float = 3.0,
) -> Rows:
    g = torch.Generator().manual_seed(vocab)
    logits = (spread * torch.randn(tokens, vocab + padding, generator=g) + 1.0).to(dtype)
    logits[0, vocab - 1] = 4 * spread  # a maximum that only the last block knows
    logits[2, 0] = 4 * spread  # and one that it must not forget
    logits[:, vocab:] = 1e4
    index = torch.randint(vocab, (tokens,), generator=g)
    index[1] = -1
    p, target, uniform = (torch.rand(tokens, generator=g) + 0.5 for _ in range(3))
    return Rows(logits, index, (p, target, uniform), vocab, scale, softcap)


def final_logits(rows: Rows) -> Tensor:
    z = rows.scale * rows.logits[:, : rows.vocab].double()
    return z if rows.softcap is None else rows.softcap * torch.tanh(z / rows.softcap)


def statistics(rows: Rows) -> dict[str, Tensor]:
    """log Z, ‖p‖², the mean logit and z_y: quantities that do not depend on where a row was anchored."""
    z = final_logits(rows)
    picked = z.gather(1, rows.index.clamp_min(0).unsqueeze(1)).squeeze(1)
    return {
        "m": z.amax(1),
        "log Z": z.logsumexp(1),
        "‖p‖²": z.softmax(1).square().sum(1),
        "μ": z.mean(1),
        "z_y": torch.where(rows.counted, picked, 0.0),
        "H": torch.special.entr(z.softmax(1)).sum(1),
    }


def source(rows: Rows, *, slope: bool) -> Tensor:
    z = final_logits(rows)
    p, target, uniform = (coefficient.double().unsqueeze(1) for coefficient in rows.coefficients)
    out = torch.zeros(rows.logits.shape, dtype=torch.float64)
    inside = p * (z - z.amax(1, keepdim=True)).exp() - uniform
    inside -= target * torch.nn.functional.one_hot(rows.index.clamp_min(0), rows.vocab)
    if slope and rows.softcap is not None:
        inside *= 1 - (z / rows.softcap) ** 2
    out[:, : rows.vocab] = torch.where(rows.counted.unsqueeze(1), inside, 0.0)
    return out


def errors(rows: Rows) -> Iterator[float]:
    """Relative error of everything the ops return, op by op."""
    shape = rows.vocab, rows.scale, rows.softcap
    numbers = ops.row_statistics(rows.logits, rows.index, *shape).double()
    row_max, total, square, logit_sum, target, drop = numbers.unbind()
    got = {
        "m": row_max,
        "log Z": row_max + total.log(),
        "‖p‖²": square / total**2,
        "μ": logit_sum / rows.vocab,
        "z_y": target,
        "H": total.log() + drop / total,
    }
    yield from (relative_error(got[name], truth) for name, truth in statistics(rows).items())
    for slope in (False, True):
        out = ops.row_source(rows.logits, row_max.float(), rows.index, *rows.coefficients, *shape, slope, torch.float32)
        yield relative_error(out, source(rows, slope=slope))
    if not rows.counted.all():
        counted = rows.logits[rows.counted][:, : rows.vocab], row_max[rows.counted].float()
        yield from exp_errors(*counted, rows)


def exp_errors(logits: Tensor, row_max: Tensor, rows: Rows) -> tuple[float, float]:
    """E in 16 bits is the fp64 result to a rounding, and the maximum is found."""
    z = rows.scale * logits.double()
    slope = torch.ones_like(z)
    if rows.softcap is not None:
        z = rows.softcap * torch.tanh(z / rows.softcap)
        slope = 1 - (z / rows.softcap) ** 2
    truth = 4 * (z - z.amax(1, keepdim=True)).exp() * slope
    out = torch.full(logits.shape, torch.nan, dtype=torch.float16)
    index = ops.narrow_exp_(logits, out, row_max, 4.0, rows.scale, rows.softcap)
    # All errors are held to 1e-6; an fp16 E may be off by 2⁻¹¹.
    rounded = relative_error(out, truth) * 1e-6 / 2**-11
    return rounded, float((z.gather(1, index[:, None])[:, 0] - z.amax(1)).abs().max())


@pytest.fixture(autouse=True)
def narrow_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks per row at a small size."""
    monkeypatch.setattr(ops, "STATISTICS_BLOCK", 64)
    monkeypatch.setattr(ops, "SOURCE_BLOCK", 32)


def worst(**options: object) -> float:
    return max(errors(make_rows(**options)))  # type: ignore[arg-type]


@pytest.mark.parametrize("vocab", [1, 2, 63, 64, 65, 100, 128, 193])
def test_every_length_of_the_last_block(vocab: int) -> None:
    """Block < V < 2·block included, where a tail is easily counted twice."""
    assert worst(vocab=vocab, padding=vocab % 2) <= FP32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("softcap", [None, 0.5, 5.0, 30.0])
def test_dtypes_scale_and_softcap(dtype: torch.dtype, softcap: float | None) -> None:
    assert worst(vocab=100, dtype=dtype, scale=-1.25, softcap=softcap) <= FP32


@pytest.mark.parametrize("spread", [1e-4, 0.1, 100.0])
def test_softcap_from_its_linear_to_its_flat_end(spread: float) -> None:
    assert worst(vocab=100, softcap=8.0, spread=spread) <= FP32


def test_rows_that_lie_apart_and_columns_that_do() -> None:
    rows = make_rows(100, padding=0)
    wide = torch.full((3, 160), torch.nan)
    wide[:, :100] = rows.logits
    for layout in (wide[:, :100], rows.logits.t().contiguous().t()):
        assert not layout.is_contiguous()
        got = ops.row_statistics(layout, rows.index, 100, 1.0, None)
        assert torch.equal(got, ops.row_statistics(rows.logits, rows.index, 100, 1.0, None))


def test_minus_infinity_anywhere_but_everywhere() -> None:
    """A whole first block at -inf must not turn the row into NaN; a whole row at -inf has no maximum."""
    logits = torch.randn(3, 150)
    logits[0, :64] = -torch.inf
    logits[1, 64:] = -torch.inf
    logits[2] = -torch.inf
    row_max, total, square, *_ = ops.row_statistics(logits, torch.zeros(3, dtype=torch.int64), 150, 1.0, None)
    assert torch.allclose((row_max + total.log())[:2], logits[:2].logsumexp(1), rtol=1e-6)
    assert torch.allclose((square / total**2)[:2], logits[:2].softmax(1).square().sum(1), rtol=1e-6)
    assert row_max[2] == -torch.inf


def test_nan_and_infinity_are_not_swallowed() -> None:
    logits = torch.randn(2, 100)
    logits[0, 70], logits[1, 3] = torch.nan, torch.inf
    row_max, total, *_ = ops.row_statistics(logits, torch.zeros(2, dtype=torch.int64), 100, 1.0, None)
    assert not torch.isfinite(row_max + total.log()).any()


def test_an_index_beyond_the_vocabulary_is_answered_with_nan() -> None:
    logits, index = torch.randn(3, 100), torch.tensor([89, 90, 10**9])
    target = ops.row_statistics(logits, index, 90, 1.0, None)[4]
    assert target[0] == logits[0, 89]
    assert target[1:].isnan().all()


def test_ignored_rows_and_padding_are_zero_whatever_they_hold() -> None:
    rows = make_rows(100)
    rows.logits[1] = torch.nan
    rows.logits[:, 100:] = torch.nan
    bad = tuple(c.index_fill(0, torch.tensor([1]), torch.inf) for c in rows.coefficients)
    out = ops.row_source(rows.logits, torch.zeros(3), rows.index, *bad, 100, 1.0, None, True, torch.float32)
    assert not out[1].any()
    assert not out[:, 100:].any()
    assert torch.isfinite(out).all()


def test_no_rows() -> None:
    empty, index, row = torch.empty(0, 7), torch.empty(0, dtype=torch.int64), torch.empty(0)
    assert ops.row_statistics(empty, index, 7, 1.0, None).shape == (6, 0)
    assert ops.row_source(empty, row, index, row, row, row, 7, 1.0, None, True, torch.float32).shape == (0, 7)


MUTATIONS = {
    "normalizer not carried over": ("row_sum * carry +", "row_sum +"),
    "square carried like a sum": ("row_square * carry * carry", "row_square * carry"),
    "maximum of the last block only": ("tl.maximum(row_max, tl.max(z, axis=0))", "tl.max(z, axis=0)"),
    "one padding column counted": ("inside = first + lanes < vocab", "inside = first + lanes < vocab + 1"),
    "mask forgotten after the softcap": ('z = tl.where(inside, z, -float("inf"))', "z = z * 1.0"),
    "mean without the last block": ("row_total += tl.sum", "row_total = tl.sum"),
    "softcap of the target forgotten": (
        'target = tl.where(target == -float("inf"), target, cap * t)',
        "target = target * 1.0",
    ),
    "derivative of the softcap forgotten": ("source = source * slope", "source = source * 1.0"),
    "derivative of a tanh not capped": ("4.0 * e /", "2.0 * e /"),
    "series of tanh used too far out": ("size < 0.25", "size < 1.0"),
    "target added": ("source - tl.load(along_target_ptr", "source + tl.load(along_target_ptr"),
    "uniform part added": ("- tl.load(along_uniform_ptr", "+ tl.load(along_uniform_ptr"),
    "scale of the logits forgotten": ("other=0.0).to(tl.float32) * scale\n    if", "other=0.0).to(tl.float32)\n    if"),
    "padding columns not zeroed": ("tl.where(inside, source, 0.0)", "source"),
    "E without the slope of the softcap": ("e = e * slope", "e = e * 1.0"),
    "E without its scale": ("e = e * exp_scale", "e = e * 1.0"),
    "E of another maximum": ("e = tl.exp(z - row_max)", "e = tl.exp(z - row_max - 0.01)"),
    "column of the last maximum found": ("inside & (z == row_max), lanes, vocab", "inside & (z == row_max), 0, vocab"),
}


def mutated_kernels(folder: Path, old: str, new: str) -> ModuleType:
    text = Path(kernels.__file__).read_text()
    assert old in text
    path = folder / "mutated_kernels.py"
    path.write_text(text.replace(old, new))
    spec = importlib.util.spec_from_file_location("mutated_kernels", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", MUTATIONS)
def test_each_mutation_is_caught(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle can fail: with one deliberate mistake in the kernels some quantity is wrong by far more than the bar."""
    module = mutated_kernels(tmp_path, *MUTATIONS[name])
    monkeypatch.setattr(ops, "row_statistics_kernel", module.row_statistics_kernel)
    monkeypatch.setattr(ops, "row_source_kernel", module.row_source_kernel)
    monkeypatch.setattr(ops, "row_exp_kernel", module.row_exp_kernel)
    with pytest.raises(AssertionError):  # the first wrong quantity is enough
        assert all(error <= 10 * FP32 for error in errors(make_rows(100, scale=1.25, softcap=5.0)))
