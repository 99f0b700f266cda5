"""The options record: what the public functions take by keyword, checked when it is made."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest
import torch

import zloss
from zloss import errors
from zloss.head.options import HeadOptions

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
