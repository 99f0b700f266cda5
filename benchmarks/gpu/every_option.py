"""Every objective with every option, dtype, backend and kind of products equals the fp64 definition."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import zloss
from benchmarks.gpu.agreement import ROUNDING, Way, compared, on_device, rounded
from benchmarks.gpu.record import Checked
from tests.laws.definitions import Case, make_case, reference
from zloss.head.options import Backend, Products

OBJECTIVES: dict[str, zloss.Objective] = {
    "ce": zloss.CrossEntropy(),
    "centered-head": zloss.CenteredHead(),
    "standard": zloss.StandardZLoss(0.7),
    "standard c=0": zloss.StandardZLoss(0.7, target=0.0),
    "centered": zloss.CenteredZLoss(0.7),
    "factorized": zloss.FactorizedZLoss(0.5, 0.9, shift_target=0.4, relative_target=2.0),
    "gain-aware": zloss.GainAwareZLoss(0.7, beta=0.3),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"with_bias": True},
    "ignored": {"with_ignored": True},
    "padded": {"valid_vocab": 41, "logit_scale": -1.75, "with_bias": True},
    "softcap": {"softcap": 3.0, "logit_scale": 2.0, "with_bias": True, "with_ignored": True},
    "smoothed": {"label_smoothing": 0.1},
    "sum": {"reduction": "sum", "with_weights": True, "with_ignored": True},
    "none": {"reduction": "none", "with_weights": True, "with_ignored": True, "with_bias": True},
    "normalizer": {"normalizer": 1000.0, "with_ignored": True},
    "all": {
        "with_bias": True,
        "with_ignored": True,
        "with_weights": True,
        "label_smoothing": 0.1,
        "valid_vocab": 41,
        "logit_scale": 1.5,
    },
}
DTYPES = tuple(ROUNDING)


@dataclass(frozen=True)
class Sweep:
    """What is swept over, and at which shape."""

    objectives: tuple[str, ...] = tuple(OBJECTIVES)
    options: tuple[str, ...] = tuple(OPTIONS)
    dtypes: tuple[torch.dtype, ...] = DTYPES
    products: tuple[Products, ...] = ("auto", "operand", "fp32")
    tokens: int = 257
    width: int = 64
    vocab: int = 1009
    chunk_size: int = 100
    compiled: int | None = None
    """How many of the objectives are compiled; None: all."""


QUICK = Sweep(
    objectives=("gain-aware", "centered"),
    options=("softcap", "all"),
    dtypes=(torch.float32, torch.bfloat16),
    products=("operand", "fp32"),
    tokens=5,
    width=12,
    vocab=53,
    chunk_size=3,
    compiled=1,
)
"""For a run without a GPU: an interpreted kernel takes milliseconds per token."""


def ways(sweep: Sweep, dtype: torch.dtype, backends: tuple[Backend, ...], objective: str = "ce") -> Iterator[Way]:
    """Every backend with every kind of products that makes a difference to it."""
    gain_in_value = OBJECTIVES[objective].needs_gain
    for backend in backends:
        kinds: tuple[Products, ...] = ("auto",) if dtype == torch.float32 or backend == "dense" else sweep.products
        for products in kinds:
            yield Way(dtype, backend, products, gain_in_value=gain_in_value)


def has(objective: zloss.Objective, option: str) -> bool:
    """Whether the package takes this option: it refuses a softcap where μ is needed."""
    return option != "softcap" or not objective.needs_mu


def make(sweep: Sweep, objective: str, option: str, dtype: torch.dtype) -> Case:
    options = dict(OPTIONS[option])
    if "valid_vocab" in options:
        options["valid_vocab"] = sweep.vocab - sweep.vocab // 5
    shape = {"tokens": sweep.tokens, "width": sweep.width, "vocab": sweep.vocab}
    return rounded(make_case(OBJECTIVES[objective], **shape, **options), dtype)


def every_option(device: torch.device, sweep: Sweep, backends: tuple[Backend, ...]) -> Iterator[Checked]:
    """All cases; the definition is computed once for all ways of a case."""
    for dtype in sweep.dtypes:
        for objective in sweep.objectives:
            for option in sweep.options:
                if not has(OBJECTIVES[objective], option):
                    continue
                case = make(sweep, objective, option, dtype)
                wanted = reference(case)
                for way in ways(sweep, dtype, backends, objective):
                    run = partial(pair, case, way, device, sweep.chunk_size, wanted)
                    yield compared("every option", f"{objective}, {option}", way, device, run)


def pair(
    case: Case, way: Way, device: torch.device, chunk_size: int, wanted: dict[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(found on the device, wanted)."""
    return on_device(case, way, device, chunk_size), wanted
