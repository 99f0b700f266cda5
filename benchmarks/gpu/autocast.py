"""Under autocast the operands are rounded as F.linear would round them, and gradients come in fp32."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.agreement import Way, compared, on_device
from benchmarks.gpu.every_option import Sweep, make, ways
from benchmarks.gpu.record import Checked
from tests.laws.definitions import Case, reference


def autocast(device: torch.device, sweep: Sweep, backends: tuple[str, ...]) -> Iterator[Checked]:
    """Every objective with all options, in bf16 and fp16."""
    for dtype in (one for one in sweep.dtypes if one != torch.float32):
        for objective in sweep.objectives:
            case = make(sweep, objective, "all", dtype)
            wanted = reference(case)
            for narrow in ways(sweep, dtype, backends, objective):
                way = dataclasses.replace(narrow, autocast=True)
                yield compared("autocast", objective, way, device, partial(_pair, case, way, device, sweep, wanted))


def _pair(
    case: Case, way: Way, device: torch.device, sweep: Sweep, wanted: dict[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    return on_device(case, way, device, sweep.chunk_size), wanted
