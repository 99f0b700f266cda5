"""The tests that compare a loss with its definition in fp64: objectives × options × dtypes × backends × products.

Besides the sweep over every option: losses under autocast, the source at the logits, losses of logits, and Z of confident tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, Literal

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
    for dtype, objective, option in product(sweep.dtypes, sweep.objectives, sweep.options):
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


# Under autocast the operands are rounded as F.linear would round them, and gradients come in fp32.


def autocast(device: torch.device, sweep: Sweep, backends: tuple[Backend, ...]) -> Iterator[Checked]:
    """Every objective with all options, in bf16 and fp16."""
    for dtype, objective in product(sweep.dtypes, sweep.objectives):
        if dtype == torch.float32:
            continue
        case = make(sweep, objective, "all", dtype)
        wanted = reference(case)
        for narrow in ways(sweep, dtype, backends, objective):
            way = dataclasses.replace(narrow, autocast=True)
            run = partial(pair, case, way, device, sweep.chunk_size, wanted)
            yield compared("autocast", objective, way, device, run)


# `head_source` on the device is the gradient at the logits, in total, and what the objective adds to it, alone.

SOURCE_OPTIONS = ("all", "softcap")


def source(device: torch.device, sweep: Sweep, backends: tuple[Backend, ...]) -> Iterator[Checked]:
    """Total and Z source of every objective, dtype, backend and kind of products."""
    for dtype, objective, option in product(sweep.dtypes, sweep.objectives, SOURCE_OPTIONS):
        if not has(OBJECTIVES[objective], option):
            continue
        case = make(sweep, objective, option, dtype)
        total_TV = reference(case)["source"]
        wanted = {"total source": total_TV}
        if case.objective.active:
            off_TV = reference(dataclasses.replace(case, objective=zloss.CrossEntropy()))["source"]
            wanted["z source"] = total_TV - off_TV
        for way in ways(sweep, dtype, backends):
            run = partial(_sources, case, way, device, sweep.chunk_size, wanted)
            yield compared("source at the logits", f"{objective}, {option}", way, device, run)


def _sources(
    case: Case, way: Way, device: torch.device, chunk_size: int, wanted: dict[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    hidden, weight = (tensor.to(device, way.dtype) for tensor in (case.hidden, case.weight))
    options: dict[str, Any] = dict(case.options())
    options["bias"] = None if case.bias is None else case.bias.to(device, way.dtype)
    options["token_weight"] = None if case.token_weight is None else case.token_weight.to(device, torch.float32)
    if way.backend != "dense":
        options |= {"chunk_size": chunk_size, "products": way.products}
    found = {}
    for name in wanted:
        part: Literal["z", "total"] = "z" if name == "z source" else "total"
        full_TV = zloss.head_source(
            hidden, weight, case.target.to(device), case.objective, part=part, backend=way.backend, **options
        )
        found[name] = full_TV.double().cpu()[:, : wanted[name].shape[1]]
    return found, wanted


# `logits_loss` on the device, from stored logits of every dtype, equals the dense backend in fp64 on the CPU.

LOGIT_OPTIONS: dict[str, dict[str, Any]] = {
    "mean": {},
    "none, smoothed, scaled": {"reduction": "none", "label_smoothing": 0.1, "logit_scale": -1.75},
    "sum, softcap": {"reduction": "sum", "softcap": 3.0},
}


def logits(device: torch.device, sweep: Sweep, backends: tuple[Backend, ...]) -> Iterator[Checked]:
    """Every objective, option, dtype of the logits and backend."""
    for dtype, objective in product(sweep.dtypes, sweep.objectives):
        case = make(sweep, objective, "ignored", torch.float32)
        stored_TV = (case.hidden @ case.weight.T).to(dtype)
        for option, options in LOGIT_OPTIONS.items():
            if "softcap" in options and OBJECTIVES[objective].needs_mu:
                continue
            wanted = _run(stored_TV.double(), case.weight, case.target, case.objective, "dense", options)
            for backend in backends:
                run = partial(
                    _both,
                    stored_TV.to(device),
                    case.weight.to(device, torch.float32),
                    case.target.to(device),
                    case.objective,
                    backend,
                    options,
                    wanted,
                )
                way = Way(dtype, backend, "auto")
                yield compared("losses of logits", f"{objective}, {option}", way, device, run)


def _both(*args: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    *inputs, wanted = args
    return _run(*inputs), wanted


def _run(
    logits_TV: Tensor,
    weight: Tensor,
    target: Tensor,
    objective: zloss.Objective,
    backend: Backend,
    options: dict[str, Any],
) -> dict[str, Tensor]:
    leaf_TV = logits_TV.detach().clone().requires_grad_()
    out = zloss.logits_loss(leaf_TV, target, objective, weight=weight, backend=backend, **options)
    # A loss scale, as fp16 needs it; it is in the gradient before that is rounded.
    scale = 1024.0 if out.loss.dim() == 0 and options.get("reduction") != "sum" else 16.0
    (out.loss.sum() * scale).backward()
    assert leaf_TV.grad is not None
    found = {
        "loss": out.loss,
        "auxiliary": out.auxiliary,
        "log_z": out.stats.log_z,
        "gain": out.stats.gain,
        "logits.grad": leaf_TV.grad.double() / scale,
    }
    return {name: value.detach().double().cpu() for name, value in found.items() if value is not None}


# Z at λ = 1e-4 survives 16-bit products on confident tokens.

TOKENS, WIDTH, VOCAB, PEAK = 256, 96, 16000, 21.0


def confident(device: torch.device, backends: tuple[Backend, ...]) -> Iterator[Checked]:
    """16-bit products, and fp32 products of the same 16-bit operands."""
    problem = confident_tokens(torch.bfloat16)
    exact = [_gradients(problem, objective, torch.float64, torch.device("cpu")) for objective in ON_AND_OFF]
    wanted = {name: exact[0][name] - exact[1][name] for name in exact[0]}
    for backend in (name for name in backends if name != "dense"):
        for products in KINDS:
            way = _Difference(torch.bfloat16, backend, products, autocast=True)
            run = partial(_differences, problem, way, device, wanted)
            yield compared("Z of confident tokens", "standard, λ = 1e-4", way, device, run)


KINDS: tuple[Products, ...] = ("operand", "fp32")
ON_AND_OFF = (zloss.StandardZLoss(1e-4), zloss.CrossEntropy())


class _Difference(Way):
    def bound(self, quantity: str, device: torch.device) -> float:
        return 1e-2


def confident_tokens(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(hidden, weight, target) in `dtype`."""
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=g)
    weight = torch.randn(VOCAB, WIDTH, generator=g) / WIDTH**0.5
    target = torch.randint(VOCAB, (TOKENS,), generator=g)
    rows = weight[target[: TOKENS // 4]]
    hidden[: TOKENS // 4] += PEAK * rows / rows.square().sum(1, keepdim=True)
    return hidden.to(dtype), weight.to(dtype), target


def _differences(
    problem: tuple[Tensor, Tensor, Tensor], way: Way, device: torch.device, wanted: dict[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    with torch.autocast(device.type, way.dtype):
        on, off = (
            _gradients(problem, objective, torch.float32, device, backend=way.backend, products=way.products)
            for objective in ON_AND_OFF
        )
    return {name: on[name] - off[name] for name in on}, wanted


def _gradients(
    problem: tuple[Tensor, Tensor, Tensor],
    objective: zloss.Objective,
    dtype: torch.dtype,
    device: torch.device,
    **options: Any,
) -> dict[str, Tensor]:
    hidden, weight = (tensor.to(device, dtype).requires_grad_() for tensor in problem[:2])
    loss = zloss.head_loss(hidden, weight, problem[2].to(device), objective, **options or {"backend": "dense"}).loss
    grads = torch.autograd.grad(loss, (hidden, weight))
    return {"hidden.grad": grads[0].double().cpu(), "weight.grad": grads[1].double().cpu()}
