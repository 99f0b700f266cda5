"""Scales and conversions of router coefficients, against the figures known for each codebase."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

import zloss
from zloss.errors import CoefficientError, InputError, UnknownNameError
from zloss.router.conventions import (
    RouterConvention,
    find_convention,
    match_coefficient,
    router_conventions,
    router_scale,
    router_scale_table,
)

SCALES = {
    1.0: ("token_layer_mean", "flaxformer", "openmoe", "marin_grug", "megablocks_mean"),
    16.0: ("megatron", "mesh_tf", "st_moe_pytorch", "levanter", "xtuner", "kempnerforge", "megablocks_sum"),
    64.0: ("megatron_unscaled",),
    0.125: ("active_route_mean", "olmoe"),
    8.0: ("active_route_sum",),
    16 / 32 * 2048 / 256: ("olmo_core",),
    1.6: ("lm_engine",),
    2.0: ("hf_switch",),
    0.0: ("hf_nllb_moe",),
}
"""Conventions by their scale for 16 layers with 8 active experts, in the context of the test."""
WANTED = {name: scale for scale, names in SCALES.items() for name in names}


@pytest.mark.parametrize("name", [convention.name for convention in router_conventions()])
def test_relative_scale_of_each_codebase(name: str) -> None:
    want = WANTED[name]
    context = {"model_layers": 32, "encoder_layers": 8, "valid_tokens": 256, "micro_batches": 4}
    scale = zloss.router_scale(name, layers=16, tokens=2048, top_k=8, coef=1e-3, **context)
    assert scale.relative == want
    assert scale.alpha == pytest.approx(want / (16 * 2048), rel=1e-15)
    assert scale.absolute == pytest.approx(1e-3 * want / (16 * 2048), rel=1e-15)


def test_every_convention_is_cited_and_explained() -> None:
    for convention in router_conventions():
        assert len(convention.cited) > 10
    assert len({convention.name for convention in router_conventions()}) == len(router_conventions())


def test_scales_depend_only_on_what_the_convention_names() -> None:
    base = {"layers": 4, "tokens": 64, "top_k": 2, "coef": 1.0, "model_layers": 12, "encoder_layers": 2}
    base |= {"valid_tokens": 32, "micro_batches": 2}
    changed = {"layers": 8, "top_k": 4, "model_layers": 24, "encoder_layers": None, "valid_tokens": 16}
    changed |= {"micro_batches": 5}
    for convention in router_conventions():
        reference = zloss.router_scale(convention, **base).relative
        for name, value in changed.items():
            moved = zloss.router_scale(convention, **{**base, name: value}).relative != reference
            assert moved == (name in convention.depends_on), (convention.name, name)


def test_the_same_coefficient_differs_128_fold() -> None:
    assert zloss.match_coefficient(1e-3, "megatron", "olmoe", layers=16, top_k=8) == 0.128
    assert zloss.match_coefficient(0.128, "olmoe", "megatron", layers=16, top_k=8) == 1e-3


def test_matching_there_and_back_is_the_identity() -> None:
    for source in router_conventions():
        for target in router_conventions():
            if "hf_nllb_moe" in (source.name, target.name):
                continue
            there = zloss.match_coefficient(1e-3, source, target, layers=12, top_k=6)
            back = zloss.match_coefficient(there, target, source, layers=12, top_k=6)
            assert back == pytest.approx(1e-3, rel=1e-15)


def test_a_convention_that_applies_nothing_cannot_be_matched() -> None:
    assert zloss.match_coefficient(1e-3, "hf_nllb_moe", "megatron", layers=4, top_k=2) == 0.0
    with pytest.raises(CoefficientError, match="applies no router Z-loss"):
        zloss.match_coefficient(1e-3, "megatron", "hf_nllb_moe", layers=4, top_k=2)


@pytest.mark.parametrize(
    ("name", "nearest"), [("megatronn", "megatron"), ("olmo", "olmoe"), ("token-mean", "token_layer_mean")]
)
def test_unknown_convention_suggests_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(UnknownNameError, match=f"Did you mean '{nearest}'"):
        zloss.router_scale(name, layers=1, tokens=1, top_k=1, coef=1.0)


def test_spelling_of_names() -> None:
    assert find_convention("Active-Route-Mean") is find_convention("active_route_mean")
    assert find_convention("st_moe").name == "mesh_tf"


@pytest.mark.parametrize(
    "change", [{"layers": 0}, {"tokens": 0}, {"top_k": 0}, {"layers": True}, {"coef": float("inf")}]
)
def test_bad_counts_are_refused(change: dict[str, object]) -> None:
    arguments = {"layers": 4, "tokens": 16, "top_k": 2, "coef": 1e-3, **change}
    with pytest.raises(InputError):
        zloss.router_scale("megatron", **arguments)


def test_more_labelled_tokens_than_tokens_were_accepted() -> None:
    counts = {"layers": 4, "top_k": 2, "valid_tokens": 200}
    message = r"`valid_tokens` is expected to be at most `tokens`, 100, but got 200"
    with pytest.raises(InputError, match=message):
        zloss.router_scale("olmo_core", coef=1e-3, tokens=100, **counts)
    with pytest.raises(InputError, match=message):
        zloss.match_coefficient(1e-3, "olmo_core", "megatron", tokens=100, **counts)
    assert zloss.router_scale("olmo_core", coef=1e-3, tokens=200, **counts).relative == 1.0


def test_scales_load_no_torch() -> None:
    code = (
        "import sys, zloss; zloss.router_scale('megatron', layers=2, tokens=4, top_k=1, coef=1.0); "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_coefficient_beyond_the_range_of_floats_is_a_raw_overflow() -> None:
    here = {"layers": 16, "top_k": 8}
    with pytest.raises(CoefficientError, match="under 'olmoe' is too large for a float"):
        match_coefficient(1e308, "megatron", "olmoe", **here)
    with pytest.raises(CoefficientError, match="too large for a float"):
        router_scale("active_route_sum", tokens=1, coef=1e308, layers=1, top_k=8)
    with pytest.raises(CoefficientError, match="too large for a float"):
        router_scale_table(1e308, "megatron", tokens=1, **here)


@pytest.mark.parametrize("part", [{"token_count": "tokens"}, {"layer_divisor": "layers"}])
def test_a_convention_with_an_unknown_word_fails_at_its_first_use(part: dict[str, Any]) -> None:
    with pytest.raises(UnknownNameError, match=f"unknown {next(iter(part))}"):
        RouterConvention(**{"name": "mine", "token_count": "decisions", "layer_divisor": "none", "cited": "-"} | part)
