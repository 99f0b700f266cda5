"""`logits_loss` on the device, from stored logits of every dtype, equals the dense backend in fp64 on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import zloss
from benchmarks.gpu.agreement import Way, compared
from benchmarks.gpu.every_option import OBJECTIVES, Sweep, make
from benchmarks.gpu.record import Checked
from zloss.head.options import Backend

LOGIT_OPTIONS: dict[str, dict[str, Any]] = {
    "mean": {},
    "none, smoothed, scaled": {"reduction": "none", "label_smoothing": 0.1, "logit_scale": -1.75},
    "sum, softcap": {"reduction": "sum", "softcap": 3.0},
}


def logits(device: torch.device, sweep: Sweep, backends: tuple[Backend, ...]) -> Iterator[Checked]:
    """Every objective, option, dtype of the logits and backend."""
    for dtype in sweep.dtypes:
        for objective in sweep.objectives:
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
