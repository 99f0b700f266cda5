"""Under autocast the operands are rounded as F.linear would round them, and gradients come in fp32."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.gpu.agreement import compared
from benchmarks.gpu.every_option import Sweep, make, pair, ways
from benchmarks.gpu.record import Checked
from tests.laws.definitions import reference
from zloss.head.options import Backend


def autocast(device: torch.device, sweep: Sweep, backends: tuple[Backend, ...]) -> Iterator[Checked]:
    """Every objective with all options, in bf16 and fp16."""
    for dtype in (one for one in sweep.dtypes if one != torch.float32):
        for objective in sweep.objectives:
            case = make(sweep, objective, "all", dtype)
            wanted = reference(case)
            for narrow in ways(sweep, dtype, backends, objective):
                way = dataclasses.replace(narrow, autocast=True)
                yield compared(
                    "autocast", objective, way, device, partial(pair, case, way, device, sweep.chunk_size, wanted)
                )
