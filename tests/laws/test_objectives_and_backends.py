"""One property for all objectives and backends: loss, parts, gradients and statistics equal the fp64 definition."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import zloss
from tests.laws.definitions import OBJECTIVES, Case, assert_close, make_case, measured, reference, relative_error

BACKENDS = ("dense", "chunked")
FP64, FP32 = 1e-12, 2e-6


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_every_option_against_fp64_definition(name: str, backend: str, reduction: str, with_bias: bool) -> None:
    for ignored, weights, smoothing in itertools.product([False, True], [False, True], [0.0, 0.1]):
        flags = {"with_bias": with_bias, "with_ignored": ignored, "with_weights": weights}
        case = make_case(OBJECTIVES[name], reduction=reduction, label_smoothing=smoothing, **flags)
        truth = reference(case)
        for chunk_size in (None, 8) if backend == "chunked" else (None,):
            assert_close(measured(case, backend, chunk_size), truth, FP64)
            assert_close(measured(case, backend, chunk_size, torch.float32), truth, FP32)


def test_several_uneven_chunks_at_a_larger_size() -> None:
    case = make_case(OBJECTIVES["factorized"], tokens=1031, width=48, vocab=1009, with_bias=True, with_ignored=True)
    truth = reference(case)
    for chunk_size in (None, 64, 100, 1030, 5000):
        assert_close(measured(case, "chunked", chunk_size), truth, FP64)
        assert_close(measured(case, "chunked", chunk_size, torch.float32), truth, FP32)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", [n for n, o in OBJECTIVES.items() if o.active])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_z_alone_is_the_difference_to_no_z(name: str, backend: str, dtype: torch.dtype) -> None:
    """With a large λ the difference with and without Z is the auxiliary itself, in value and in gradient."""
    objective = OBJECTIVES[name]
    big = {f.name: 50.0 for f in dataclasses.fields(objective) if f.name.endswith("coef")}
    capped = [] if objective.needs_mu else [{"softcap": 3.0, "label_smoothing": 0.1}]
    for options in ({}, *capped):
        on = make_case(dataclasses.replace(objective, **big), with_bias=True, with_ignored=True, **options)
        off = dataclasses.replace(on, objective=zloss.CrossEntropy())
        truth_on, truth_off = reference(on), reference(off)
        got_on, got_off = measured(on, backend, 8, dtype), measured(off, backend, 8, dtype)
        for key in ("loss", "hidden.grad", "weight.grad", "bias.grad"):
            error = relative_error(got_on[key] - got_off[key], truth_on[key] - truth_off[key])
            assert error <= (FP64 if dtype == torch.float64 else FP32), f"{key}: {error:.2e}"


@pytest.mark.parametrize("backend", BACKENDS)
def test_leading_dimensions_keep_their_shape(backend: str) -> None:
    flat = make_case(OBJECTIVES["centered"], tokens=24, with_ignored=True, reduction="none")
    cube = dataclasses.replace(flat, hidden=flat.hidden.reshape(2, 3, 4, -1), target=flat.target.reshape(2, 3, 4))
    assert_close(measured(cube, backend, 5), reference(cube), FP64)
    out = zloss.head_loss(cube.hidden, cube.weight, cube.target, cube.objective, backend=backend)
    assert out.stats.gain is not None
    assert out.stats.gain.shape == out.stats.valid.shape == (2, 3, 4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["ce", "standard", "gain-aware"])
def test_softcap_with_its_derivative(name: str, backend: str) -> None:
    """With label smoothing the slope of every logit is in the source along 1/V."""
    for reduction, smoothing in itertools.product(("mean", "none"), (0.0, 0.1)):
        options = {"softcap": 3.0, "logit_scale": 2.0, "reduction": reduction, "label_smoothing": smoothing}
        case = make_case(OBJECTIVES[name], with_bias=True, with_ignored=True, valid_vocab=41, **options)
        for chunk_size in (8, None):
            assert_close(measured(case, backend, chunk_size), reference(case), FP64)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_logit_scale_and_padded_vocabulary(name: str, backend: str) -> None:
    case = make_case(OBJECTIVES[name], valid_vocab=41, logit_scale=-1.7, with_bias=True, with_ignored=True)
    got = measured(case, backend, 8)
    assert_close(got, reference(case), FP64)
    assert torch.equal(got["weight.grad"][41:], torch.zeros_like(got["weight.grad"][41:]))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_source_is_the_gradient_at_the_logits(name: str, backend: str) -> None:
    """head_source in total equals ∂loss/∂z, and its Z part is total with minus total without Z."""
    cap = None if OBJECTIVES[name].needs_mu else 3.0
    flags = dict.fromkeys(("with_bias", "with_ignored", "with_weights"), True)
    case = make_case(OBJECTIVES[name], label_smoothing=0.1, softcap=cap, **flags)
    options = case.options()
    total, part = (
        zloss.head_source(
            case.hidden, case.weight, case.target, case.objective, part=p, backend=backend, chunk_size=8, **options
        )
        for p in ("total", "z")
    )
    assert relative_error(total, reference(case)["source"]) <= FP64
    without = zloss.head_source(
        case.hidden, case.weight, case.target, zloss.CrossEntropy(), part="total", backend=backend, **options
    )
    if case.objective.active:
        assert relative_error(part, total - without) <= 1e-11
    else:
        assert not part.any()


@given(
    shape=st.tuples(st.integers(1, 40), st.integers(1, 9), st.integers(1, 70)),
    name=st.sampled_from(list(OBJECTIVES)),
    backend=st.sampled_from(BACKENDS),
    chunk_size=st.one_of(st.none(), st.integers(1, 50)),
    normalizer=st.one_of(st.none(), st.floats(0.5, 500)),
    options=st.fixed_dictionaries(
        {
            "reduction": st.sampled_from(["mean", "sum", "none"]),
            **dict.fromkeys(("with_bias", "with_ignored", "with_weights"), st.booleans()),
            "label_smoothing": st.sampled_from([0.0, 0.05, 1.0]),
            "logit_scale": st.sampled_from([1.0, 0.3, -2.0]),
            "softcap": st.sampled_from([None, 3.0]),
            "seed": st.integers(0, 10_000),
        }
    ),
)
def test_random_shapes_and_options(
    shape: tuple[int, int, int],
    name: str,
    backend: str,
    chunk_size: int | None,
    normalizer: float | None,
    options: dict[str, Any],
) -> None:
    sizes = dict(zip(("tokens", "width", "vocab"), shape, strict=True))
    divisor = normalizer if options["reduction"] == "mean" else None
    if OBJECTIVES[name].needs_mu:
        options["softcap"] = None
    case = make_case(OBJECTIVES[name], **sizes, **options, normalizer=divisor)
    if not bool((case.target != -100).any()):
        case.target[0] = 0
    got, truth = measured(case, backend, chunk_size), reference(case)
    for key in truth.keys() & got.keys():
        # A single token's loss or gradient may vanish by cancellation (V = 1): compare against the natural scale 1.
        difference = float((got[key] - truth[key]).norm())
        assert difference <= 1e-11 * max(1.0, float(truth[key].norm())), key


MUTATIONS = {
    "wrong sign of g": lambda case: _mutate_source(case, sign=-1.0),
    "missing bias": lambda case: dataclasses.replace(case, bias=torch.zeros_like(case.bias)),
    "mean for sum": lambda case: dataclasses.replace(case, reduction="sum"),
    "dropped ignore mask": lambda case: dataclasses.replace(case, target=case.target.clamp_min(0)),
}


def _mutate_source(case: Case, sign: float) -> Case:
    @dataclasses.dataclass(frozen=True)
    class WrongSign(zloss.CenteredZLoss):
        def source(self, stats):  # type: ignore[no-untyped-def]
            value, right = super().source(stats)
            return value, dataclasses.replace(right, g=sign * right.g)

    return dataclasses.replace(case, objective=WrongSign(0.7))


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_comparison_fails_on_a_mutation(mutation: str) -> None:
    """The oracle can fail: each deliberate mistake breaks at least one quantity by far more than the tolerance."""
    case = make_case(OBJECTIVES["centered"], with_bias=True, with_ignored=True)
    with pytest.raises(AssertionError):
        assert_close(measured(MUTATIONS[mutation](case), "chunked", 8), reference(case), 1e-4)
