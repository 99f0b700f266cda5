"""Processes that a test launches with torchrun or accelerate, and how a rank exits."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

FSDP2_SUMS = torch.__version__.startswith("2.8.")
"""Whether gradients of `fully_shard` are sums over gloo ranks: torch 2.8 leaves out the division, with any loss."""
needs_fsdp2_means = pytest.mark.skipif(FSDP2_SUMS, reason="torch 2.8 sums the gradients of FSDP2 over gloo ranks")


def torchrun(ranks: int, *options: str) -> list[str]:
    """The command line of a launch on this machine."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *options]


def accelerate(ranks: int) -> list[str]:
    """The same through `accelerate launch`; on a machine without GPUs `--multi_gpu` is what starts several processes."""
    fixed = ["--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"]
    return [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", f"--num_processes={ranks}", *fixed]


def rank_of(launcher: int, rank: int) -> int | None:
    """The process id of a rank among the children of a launcher."""
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        try:
            settings = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        except FileNotFoundError:  # it has just ended
            continue
        if f"RANK={rank}".encode() in settings:
            return int(child)
    return None


def leave() -> None:
    """Exit together with the other ranks: threads of DDP may outlive their group and then sometimes abort an orderly exit."""
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)
