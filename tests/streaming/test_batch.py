"""What may be given as values: every float dtype, layout and container, and nothing else."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest
import torch

import zloss.streaming
from zloss.errors import DtypeError, ShapeError
from zloss.streaming import CoMoments, Count, Moments, Quantiles, TopTokens
from zloss.streaming.batch import SLICE

VALUES = [0.5, -1.25, 3.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2])
def test_every_float_dtype_of_torch_is_taken_exactly(dtype):
    quantiles = Quantiles()
    quantiles.update(torch.tensor(VALUES).to(dtype))
    assert quantiles.state_dict()["values"].tolist() == sorted(VALUES)
    assert quantiles.state_dict()["values"].dtype == (np.float64 if dtype == torch.float64 else np.float32)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, np.longdouble])
def test_every_float_dtype_of_numpy_is_taken_exactly(dtype):
    quantiles = Quantiles()
    quantiles.update(np.array(VALUES, dtype=dtype))
    assert quantiles.state_dict()["values"].tolist() == sorted(VALUES)


@pytest.mark.parametrize(
    "values",
    [
        2.0,
        [2.0],
        2,
        np.array([[2]], dtype=np.int32),
        torch.tensor(2.0, requires_grad=True),
        torch.tensor([[1.0, 2.0]]).T[1:],
        np.array([2.0, 1.0])[::-1][1:],
    ],
    ids=lambda v: type(v).__name__,
)
def test_numbers_lists_views_and_leaves_are_taken(values):
    moments = Moments()
    moments.update(values)
    assert (moments.count, moments.mean) == (1, 2.0)


@pytest.mark.parametrize(
    "values", [torch.tensor([True]), np.array([True]), torch.tensor([1j]), np.array([1j]), ["a"], None]
)
def test_what_is_no_real_number_is_refused(values):
    with pytest.raises(DtypeError, match="real numbers"):
        Count().update(values)


def test_a_refused_batch_leaves_no_trace():
    pairs = CoMoments()
    with pytest.raises(ShapeError, match="'x': 2, 'y': 3"):
        pairs.update([1.0, 2.0], [1.0, 2.0, 3.0])
    assert pairs.counts.total == 0


def test_float_positions_are_refused():
    top = TopTokens(1, integers=["block"])
    with pytest.raises(DtypeError, match="`position` is expected to hold integers"):
        top.update([1.0], position=torch.tensor([0.0]), block=[0])
    with pytest.raises(DtypeError, match="`block` is expected to hold integers"):
        top.update([1.0], position=[0], block=[0.5])
    assert top.counts.total == 0
    top.update([], position=[], block=[])
    assert top.rows() == []


def test_the_input_is_neither_changed_nor_kept():
    x = torch.arange(10.0)
    quantiles = Quantiles()
    quantiles.update(x)
    quantiles.quantile(0.5)
    assert torch.equal(x, torch.arange(10.0))
    x.fill_(-1.0)
    assert quantiles.quantile(0.0).value == 0.0


def test_a_batch_of_several_slices_is_taken_whole():
    x = np.arange(2 * SLICE + 17, dtype=np.float64)
    moments = Moments()
    moments.update(x)
    assert (moments.count, moments.minimum, moments.maximum) == (x.size, 0.0, x.size - 1.0)
    assert moments.mean == pytest.approx((x.size - 1) / 2, rel=1e-15)


def test_streaming_imports_nothing_of_ours_but_errors():
    folder = Path(zloss.streaming.__file__).parent
    imported = set()
    for file in folder.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom):
                imported.add(node.module)
            elif isinstance(node, ast.Import):
                imported |= {name.name for name in node.names}
    ours = {name for name in imported if name and name.split(".")[0] == "zloss"}
    assert {name for name in ours if not name.startswith("zloss.streaming")} == {"zloss.errors"}
