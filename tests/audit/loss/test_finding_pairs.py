"""Both sides of every pair are what they are said to be, by direct calls; the audit is not called."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.audit.loss.faulty import COEF, correct
from tests.audit.loss.finding_pairs import PAIRS
from tests.audit.loss.further import total_of
from tests.audit.loss.observed import OBSERVABLE, batch, observed, value_and_gradient
from tests.audit.loss.zoo import IGNORE, Loss, ce, zl

Options = dict[str, Any]
Check = Callable[[Loss, Options], bool]

DIRECT: dict[str, Check] = {}
"""The checks by direct calls, under the ids of their findings."""


def direct(check: Check) -> Check:
    DIRECT[check.__name__] = check
    return check


def spread(options: Options, *, masked: bool = True) -> tuple[Tensor, Tensor]:
    """A batch whose log Z runs from about 4 to 28."""
    z, y = batch(options)
    return z + torch.linspace(-12, 12, len(y), dtype=z.dtype)[:, None], y if masked else y.clamp(min=1)


def fitted(loss: Loss, options: Options, *, masked: bool = True) -> tuple[float, float, float]:
    """λ and c of (1 + 2λ(log Z − c)) p − onehot(y), and what the straight line leaves of the coefficients of p."""
    z, y = spread(options, masked=masked)
    _, grad = value_and_gradient(loss, z, y)
    at, source = [], []
    for row, label, g in zip(z, y, grad, strict=True):
        if label != IGNORE:
            shapes = torch.stack([torch.softmax(row, 0), torch.eye(len(row), dtype=row.dtype)[label]], 1)
            a, b = torch.linalg.lstsq(shapes, g[:, None]).solution[:, 0]
            at.append(torch.logsumexp(row, 0))
            source.append(-a / b - 1)
    line = torch.stack([torch.stack(at), torch.ones(len(at), dtype=z.dtype)], 1)
    s = torch.stack(source)
    slope, offset = torch.linalg.lstsq(line, s[:, None]).solution[:, 0]
    left = (line @ torch.stack([slope, offset]) - s).norm() / s.norm()
    return float(slope) / 2, float(-offset / slope), float(left)


def same_gradient(one: Loss, other: Loss, options: Options, vocab: int | None = None) -> bool:
    z, y = spread(options)
    if vocab is not None:
        z, y = torch.randn(3, vocab, generator=torch.Generator().manual_seed(1), dtype=z.dtype), torch.tensor([1, 2, 3])
    a, b = (value_and_gradient(loss, z, y)[1] for loss in (one, other))
    return bool((a - b).norm() < 1e-6 * b.norm())


@direct
def zero_gradient_z(loss: Loss, options: Options) -> bool:
    z, y = spread(options)
    return same_gradient(loss, ce, options) and bool(total_of(loss(z, y)) != ce(z, y))


@direct
def low_precision_source(loss: Loss, options: Options) -> bool:
    z, y = spread(options)
    applied, exact = (value_and_gradient(f, z, y)[1] for f in (loss, correct))
    return bool((applied - exact).norm() > 1e-4 * exact.norm())


@direct
def denominator_mismatch(loss: Loss, options: Options) -> bool:
    return abs(fitted(loss, options)[0] / fitted(loss, options, masked=False)[0] - 1) > 1e-6


@direct
def max_shifted(loss: Loss, options: Options) -> bool:
    return same_gradient(loss, lambda z, y: loss(z + 5, y), options)


@direct
def not_off(loss: Loss, options: Options) -> bool:
    return not same_gradient(options["off"], ce, options)


@direct
def counted_twice(loss: Loss, options: Options) -> bool:
    return math.isclose(fitted(loss, options)[0], 2 * options["expect"]["coef"], rel_tol=1e-6)


@direct
def reported_z_dtype(loss: Loss, options: Options) -> bool:
    z, y = spread(options)
    return bool(loss(z.bfloat16(), y)[1].dtype == torch.bfloat16)


@direct
def reported_z_no_gradient(loss: Loss, options: Options) -> bool:
    z, y = spread(options)
    leaf = z.requires_grad_()
    _, reported = loss(leaf, y)
    if not reported.requires_grad:
        return False
    (grad,) = torch.autograd.grad(reported, leaf, allow_unused=True)
    return grad is None or not grad.any()


@direct
def reported_z_value(loss: Loss, options: Options) -> bool:
    z, y = spread(options)
    return not any(math.isclose(loss(z, y)[1], zl(z, y) / scale, rel_tol=1e-6) for scale in (1, COEF))


@direct
def probabilities_not_logits(loss: Loss, options: Options) -> bool:
    z, y = spread(options)
    penalty = total_of(loss(z, y)) - ce(z, y)
    return math.isclose(penalty, zl(torch.softmax(z, -1), y), rel_tol=1e-6)


@direct
def filtered_source(loss: Loss, options: Options) -> bool:
    z, y = spread(options)
    applied, exact = (value_and_gradient(f, z, y)[1] for f in (loss, correct))
    return bool(((applied == 0) & (exact != 0)).any())


@direct
def padding_in_log_z(loss: Loss, options: Options) -> bool:
    z, y = spread(options)
    wider = torch.nn.functional.pad(z, (0, 500))
    return bool(loss(z, y) != loss(z[:, : options["valid_vocab"]], y)) or bool(loss(wider, y) != loss(z, y))


@direct
def unexplained_source(loss: Loss, options: Options) -> bool:
    return fitted(loss, options)[2] > 1e-6


@direct
def not_squared(loss: Loss, options: Options) -> bool:
    coef, c, _ = fitted(loss, options)
    return abs(coef) < 1e-9 and math.isclose(-2 * coef * c, COEF, rel_tol=1e-6)


@direct
def size_dependent(loss: Loss, options: Options) -> bool:
    return not same_gradient(loss, correct, options, vocab=25000)


@direct
def targets_moved(loss: Loss, options: Options) -> bool:
    z, y = spread(options)
    return bool(value_and_gradient(loss, z, y)[1][-1, y[0]] < 0)


@direct
def returned_values(loss: Loss, options: Options) -> bool:
    z, y = spread(options)
    out = loss(z.requires_grad_(), y)
    return same_gradient(loss, ce, options) and out["z_loss"].requires_grad


@direct
def negative_coefficient(loss: Loss, options: Options) -> bool:
    return fitted(loss, options)[0] < 0


@direct
def differs_from_expected(loss: Loss, options: Options) -> bool:
    coef, c, _ = fitted(loss, options)
    return not (
        math.isclose(coef, options["expect"]["coef"], rel_tol=1e-6) and abs(c - options["expect"]["target"]) < 1e-6
    )


def test_every_documented_finding_has_a_pair_and_a_direct_check() -> None:
    text = (Path(__file__).parents[3] / "docs" / "audit_loss.md").read_text(encoding="utf-8")
    table = text.split("### The checks")[1].split("\n#")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == set(PAIRS), (
        "docs/audit_loss.md: every finding has a row under “The checks”"
    )
    assert DIRECT.keys() | OBSERVABLE == PAIRS.keys(), (
        "a finding needs a function of its name with `@direct` in this file, or its id in OBSERVABLE of observed.py"
    )


@pytest.mark.parametrize("name", sorted(OBSERVABLE))
def test_calls_show_the_finding(name: str) -> None:
    pair = PAIRS[name]
    assert name in observed(pair.has, pair.options)


@pytest.mark.parametrize("name", sorted(DIRECT))
def test_the_measured_numbers_show_the_finding_in_one_loss_only(name: str) -> None:
    pair = PAIRS[name]
    assert DIRECT[name](pair.has, pair.options)
    assert not DIRECT[name](pair.misses, pair.options_of_near_miss)


@pytest.mark.parametrize("name", PAIRS)
def test_the_near_miss_trains_its_formula_and_calls_show_nothing(name: str) -> None:
    pair = PAIRS[name]
    shifted = name == "targets_moved"
    assert observed(pair.misses, pair.options_of_near_miss, shifted=shifted) == set()
    z, y = batch(pair.options_of_near_miss)
    applied, exact = (value_and_gradient(loss, z, y) for loss in (pair.misses, pair.trains))
    tolerance = 1e-5 if name == "low_precision_source" else 1e-9
    assert (applied[1] - exact[1]).norm() < tolerance * exact[1].norm()
    assert float(applied[0]) == pytest.approx(float(exact[0]), rel=tolerance)


@pytest.mark.parametrize("name", [name for name in PAIRS if name != "targets_moved"])  # its rows carry other labels
def test_further_findings_of_a_pair_are_declared(name: str) -> None:
    pair = PAIRS[name]
    assert observed(pair.has, pair.options) <= pair.also | {name}
