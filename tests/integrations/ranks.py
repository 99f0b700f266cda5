"""A trainer on several processes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.distributed.launch import leave
from tests.forked import forked_ranks


def on_ranks(ranks: int, work: Callable[[], Any]) -> Any:
    """What `work()` returns on rank 0, as JSON has it, after it ran on every rank; trainers may print meanwhile."""

    def on_rank() -> None:
        torch.set_num_threads(1)
        out, sys.stdout = sys.stdout, sys.stderr
        found = work()
        sys.stdout = out
        if dist.get_rank() == 0:
            json.dump(found, sys.stdout)
        leave()

    return json.loads(forked_ranks(ranks, on_rank))
