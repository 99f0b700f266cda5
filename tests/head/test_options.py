"""The options of a head loss: what the public functions take by keyword, and how many tokens a chunk has."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest
import torch

import zloss
from zloss import errors
from zloss.head import options as head_options
from zloss.head.options import HeadOptions, chunk_bounds

DEFAULTS = {field.name: field.default for field in fields(HeadOptions) if field.name != "objective"}


@pytest.mark.parametrize("function", [zloss.head_loss, zloss.logits_loss, zloss.head_source, zloss.HeadLoss.__init__])
def test_every_public_signature_has_the_options_with_the_defaults_of_the_record(
    function: Callable[..., object],
) -> None:
    parameters = inspect.signature(function).parameters
    here = {name: parameters[name].default for name in DEFAULTS if name in parameters}
    # The source of a loss is the same whatever statistics it would return.
    assert here == {
        name: value for name, value in DEFAULTS.items() if name != "statistics" or function is not zloss.head_source
    }
    assert all(parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in here)


WRONG = {
    "objective": "centered",
    "ignore_index": 0.5,
    "reduction": "maen",
    "valid_vocab": 5.0,
    "logit_scale": 0.0,
    "softcap": -1.0,
    "label_smoothing": 1.5,
    "statistics": "ful",
    "backend": "dens",
    "products": "bf16",
    "chunk_size": 0,
    "memory_budget": 0.5,
}


WRONG_KIND = {"logit_scale": None, "chunk_size": 1.5, "softcap": "5"}


@pytest.mark.parametrize(("name", "value"), [*WRONG.items(), *WRONG_KIND.items()])
def test_a_wrong_option_is_named_when_the_record_is_made(name: str, value: object) -> None:
    options: dict[str, Any] = {"objective": zloss.CrossEntropy()} | {name: value}
    for make in (HeadOptions, zloss.HeadLoss):
        with pytest.raises(errors.InputError, match=name):
            make(**options)


def test_the_record_is_frozen_and_the_module_shows_it() -> None:
    module = zloss.HeadLoss(zloss.StandardZLoss(1e-3), softcap=30.0, valid_vocab=7)
    with pytest.raises(FrozenInstanceError):
        module.options.softcap = 1.0  # type: ignore[misc]
    shown = repr(module)
    assert "StandardZLoss(coef=0.001, target=None)" in shown
    for name, value in (DEFAULTS | {"softcap": 30.0, "valid_vocab": 7}).items():
        assert f"{name}={value!r}" in shown


def test_a_module_checks_its_options_once(monkeypatch: pytest.MonkeyPatch) -> None:
    module = zloss.HeadLoss(zloss.StandardZLoss(1e-3))
    made = []
    monkeypatch.setattr(HeadOptions, "__post_init__", lambda self: made.append(self))
    tensors = torch.randn(3, 4), torch.randn(5, 4), torch.tensor([0, 1, 2])
    module(*tensors)
    assert not made
    zloss.head_loss(*tensors, zloss.StandardZLoss(1e-3))
    assert len(made) == 1


# Chunk sizes: a cache on the CPU, a memory budget and whole tiles on a GPU


def lengths(*args: int | None, **options: object) -> list[int]:
    bounds = chunk_bounds(*args, **options)  # type: ignore[arg-type]
    assert [start for start, _ in bounds[1:]] == [stop for _, stop in bounds[:-1]]
    return [stop - start for start, stop in bounds]


def test_on_the_cpu_buffers_stay_near_128_mb() -> None:
    assert lengths(0, 4) == []
    assert lengths(1000, 4 * 50257) == [500, 500]
    assert lengths(5000, 4 * 100) == [1000] * 5
    assert max(lengths(5000, 4 * 10**8)) == 32
    assert lengths(10, 4, 4) == [4, 4, 2]


@pytest.mark.parametrize(
    ("tokens", "vocab"), list(itertools.product((100, 1281, 16384, 65536), (32768, 131072, 262144)))
)
def test_on_a_gpu_chunks_are_whole_tiles_and_never_few_tokens(tokens: int, vocab: int) -> None:
    found = lengths(tokens, 6 * vocab, device_type="cuda")
    assert sum(found) == tokens
    assert all(length % 128 == 0 for length in found[:-1])
    budgeted = head_options.GPU_BYTES // (6 * vocab)
    assert found[0] <= max(1280, budgeted)
    # Equal chunks may be shorter than the smallest of the rule, by less than the tokens spread over them.
    assert found[0] >= min(tokens, 1280 * 0.5)
    assert len(found) == -(-tokens // max(1280, budgeted // 128 * 128))


def test_a_budget_and_a_chunk_size_come_first() -> None:
    assert lengths(8192, 1000, device_type="cuda", memory_budget=2048 * 1000) == [2048] * 4
    assert max(lengths(8192, 1000, device_type="cuda", memory_budget=1)) <= 1280
    assert lengths(10, 1000, memory_budget=5000) == [5, 5]
    assert lengths(300, 1000, 100, device_type="cuda", memory_budget=1) == [100, 100, 100]


def test_the_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_options, "_IN_ENVIRONMENT", "5000")
    assert lengths(10, 1000) == [5, 5]
    assert lengths(10, 1000, memory_budget=10000) == [10]
    monkeypatch.setattr(head_options, "_IN_ENVIRONMENT", "many")
    with pytest.raises(errors.InputError, match="ZLOSS_CHUNK_BYTES"):
        chunk_bounds(10, 1000)
