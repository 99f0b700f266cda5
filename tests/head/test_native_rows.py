"""The compiled row pass: the same numbers as tensor operations, the same answers to hostile rows, and a way without it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from tests.laws.definitions import make_case, measured, reference, relative_error
from zloss.head.native import load_rows
from zloss.head.rows import fused_exp_rows_
from zloss.objectives import CenteredZLoss

needs_helper = pytest.mark.skipif(isinstance(load_rows(), str), reason=f"no compiled helper: {load_rows()}")


@needs_helper
@pytest.mark.parametrize(("rows", "columns"), [(1, 16384), (3, 50257), (64, 1025), (257, 100)])
@pytest.mark.parametrize("scale", [0.1, 8.0, 300.0])
def test_fused_rows_against_fp64(rows: int, columns: int, scale: float) -> None:
    z = scale * torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    buffer = z.clone()
    fused = fused_exp_rows_(buffer)
    assert fused is not None
    wide = z.double()
    truth = torch.exp(wide - wide.amax(1, keepdim=True))
    assert torch.equal(fused[0], z.amax(1))
    assert relative_error(fused[1], truth.sum(1)) < 3e-7
    assert relative_error(fused[2], truth.norm(dim=1)) < 3e-7
    # The difference z − m rounds at the size of the logits; the exponential itself adds about one ulp to that.
    tolerance = (2e-7 + 6e-8 * (z - z.amax(1, keepdim=True)).abs()) * truth + 1.2e-38
    assert bool(((buffer - truth).abs() <= tolerance).all())


@needs_helper
def test_padded_rows_are_left_alone() -> None:
    wide = torch.randn(40, 1000)
    kept = wide.clone()
    assert fused_exp_rows_(wide[:, :900]) is not None
    assert torch.equal(wide[:, 900:], kept[:, 900:])
    assert not torch.equal(wide[:, :900], kept[:, :900])


@needs_helper
def test_hostile_rows() -> None:
    z = torch.randn(6, 20000)
    z[0, 7], z[1, 7], z[2, 7], z[3], z[4] = torch.nan, torch.inf, -torch.inf, -torch.inf, 1e30
    buffer = z.clone()
    fused = fused_exp_rows_(buffer)
    assert fused is not None
    row_max, row_sum, _ = fused
    assert row_sum[:2].isnan().all()
    assert torch.isfinite(row_sum[2])
    assert buffer[2, 7] == 0
    assert row_max[3] == -torch.inf
    assert row_sum[4] == 20000
    assert torch.isfinite(row_sum[5])


def test_small_wide_or_foreign_tensors_go_the_plain_way() -> None:
    assert fused_exp_rows_(torch.zeros(2, 10)) is None
    assert fused_exp_rows_(torch.zeros(200, 200, dtype=torch.float64)) is None
    assert fused_exp_rows_(torch.zeros(200, 200).T) is None


DEFAULT_DEVICE = """
import torch, zloss
hidden, weight, target = torch.randn(64, 32), torch.randn(1000, 32), torch.randint(1000, (64,))
objective = zloss.StandardZLoss(1e-3)
want = zloss.head_loss(hidden, weight, target, objective, backend="chunked").loss
torch.set_default_device("meta")
assert float(zloss.head_loss(hidden, weight, target, objective, backend="chunked").loss) == float(want)
"""
FAKE = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from zloss.head.rows import exp_rows_
with FakeTensorMode():
    _, sums, _ = exp_rows_(torch.randn(40, 1000), norm=True)
    assert sums.shape == (40,)
"""


@needs_helper
@pytest.mark.parametrize("code", [DEFAULT_DEVICE, FAKE])
def test_memory_that_is_not_on_the_cpu_is_never_written_to(code: str) -> None:
    """The helper wrote its sums to the default device, or into a tensor without memory: SIGSEGV."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@needs_helper
def test_the_row_pass_in_use_is_named() -> None:
    code = (
        "import torch; from zloss.head import rows\n"
        "assert rows.row_pass_name() == 'torch'\n"
        "rows.fused_exp_rows_(torch.zeros(2, 10)); assert rows.row_pass_name() == 'torch'\n"
        "rows.fused_exp_rows_(torch.zeros(40, 1000)); print(rows.row_pass_name())"
    )
    for switch, name in (("1", "c"), ("0", "torch")):
        environment = os.environ | {"ZLOSS_NATIVE": switch}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
        assert done.stdout.strip() == name


def test_the_head_loss_meets_its_tolerance_with_and_without_the_helper() -> None:
    case = make_case(CenteredZLoss(0.7), tokens=300, width=16, vocab=1009, with_bias=True, with_ignored=True)
    truth = reference(case)
    got = measured(case, "chunked", None, torch.float32)
    for key in truth.keys() & got.keys():
        assert relative_error(got[key], truth[key]) <= 2e-6, key
    # In a process of its own, because the helper is loaded once: the plain way gives the same loss.
    code = (
        "import torch; from tests.laws.definitions import *; from zloss.objectives import CenteredZLoss\n"
        "from zloss.head.native import load_rows; assert 'ZLOSS_NATIVE' in load_rows()\n"
        "case = make_case(CenteredZLoss(0.7), tokens=300, width=16, vocab=1009, with_bias=True, with_ignored=True)\n"
        "print(float(measured(case, 'chunked', None, torch.float32)['loss']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ | {"ZLOSS_NATIVE": "0"}
    )
    assert float(done.stdout) == pytest.approx(float(got["loss"]), rel=1e-6)


def test_without_a_compiler_the_reason_is_said() -> None:
    code = "from zloss.head.native import load_rows; print(load_rows())"
    for environment, words in (({"CC": "no-such-compiler"}, "no C compiler"), ({"CC": "false"}, "failed")):
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | environment | {"ZLOSS_CACHE": "/nonexistent/cache"},
        )
        assert words in done.stdout
