"""`head_source` on the device is the gradient at the logits, in total, and what the objective adds to it, alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

import zloss
from benchmarks.gpu.agreement import Way, compared
from benchmarks.gpu.every_option import OBJECTIVES, Sweep, has, make, ways
from benchmarks.gpu.record import Checked
from tests.laws.definitions import Case, reference
from zloss.head.options import Backend

SOURCE_OPTIONS = ("all", "softcap")


def source(device: torch.device, sweep: Sweep, backends: tuple[Backend, ...]) -> Iterator[Checked]:
    """Total and Z source of every objective, dtype, backend and kind of products."""
    for dtype in sweep.dtypes:
        for objective in sweep.objectives:
            for option in SOURCE_OPTIONS:
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
            hidden,
            weight,
            case.target.to(device),
            case.objective,
            part=part,
            backend=way.backend,
            **options,
        )
        found[name] = full_TV.double().cpu()[:, : wanted[name].shape[1]]
    return found, wanted
