"""`weight_grad_buffer=main_grad` under megatron-core's data parallelism, against eager CE + Z on one process.

Two gloo processes, two steps of three micro-batches each: Megatron starts its overlapped reductions in the second step.
Megatron allocates on `torch.cuda.current_device()`, which is the CPU here; everything else of it is used as it is.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zloss
from tests.distributed.launch import leave
from zloss.errors import InputError

VOCAB, WIDTH, TOKENS, STEPS, MICRO, COEF = 61, 8, 12, 2, 3, 0.1
OBJECTIVE = zloss.StandardZLoss(COEF, target=0.0)
CASES = {
    # name: dtype of the parameters, tied, reduction, losses per micro-batch
    "fp32": (torch.float32, False, "mean", 1),
    "bf16": (torch.bfloat16, False, "mean", 1),
    "per token": (torch.float32, False, "none", 1),
    "two losses in one backward pass": (torch.float32, False, "mean", 2),
    "tied": (torch.float32, True, "mean", 1),
}


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.layer = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.to(dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.tanh(self.layer(self.embed(tokens)))


def batch(step: int, rank: int, micro: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(100 * step + 10 * rank + micro)
    tokens, target = (torch.randint(VOCAB, (TOKENS,), generator=g) for _ in range(2))
    target[: 2 + rank + micro] = -100
    return tokens, target


def wanted(dtype: torch.dtype, tied: bool, step: int) -> list[Tensor]:
    """Mean of CE + λ(log Z)² over all tokens of the step, from whole logits in fp32."""
    model = Model(dtype, tied).float()
    parts = [batch(step, rank, micro) for rank in range(dist.get_world_size()) for micro in range(MICRO)]
    count = sum(int((target != -100).sum()) for _, target in parts)
    for tokens, target in parts:
        logits = model.head(model(tokens))
        penalty = COEF * logits.logsumexp(-1).square()[target != -100].sum()
        ((F.cross_entropy(logits, target, ignore_index=-100, reduction="sum") + penalty) / count).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def run(overlap: bool, dtype: torch.dtype, tied: bool, reduction: Any, losses: int) -> None:
    """The reduced gradients of every step are the wanted ones."""
    module = Model(dtype, tied)
    if tied:
        module.head.weight.zero_out_wgrad = True  # type: ignore[assignment]  # as Megatron's LanguageModule
    model = wrapped(module, grad_reduce_in_fp32=True, overlap_grad_reduce=overlap)
    weight = module.head.weight
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    for step in range(STEPS):
        model.zero_grad_buffer()
        parts = [batch(step, dist.get_rank(), micro) for micro in range(MICRO)]
        count = zloss.global_normalizer([target for _, target in parts])
        for micro, (tokens, target) in enumerate(parts):
            with model.no_sync() if micro < MICRO - 1 else nullcontext():
                hidden = model(tokens)
                options = {"reduction": reduction, "normalizer": count if reduction == "mean" else None}
                found = [
                    zloss.head_loss(h, weight, y, OBJECTIVE, weight_grad_buffer=weight.main_grad, **options).loss
                    for h, y in zip(hidden.chunk(losses), target.chunk(losses), strict=True)
                ]
                loss = torch.stack([part.sum() for part in found]).sum()
                (loss / count if reduction == "none" else loss).backward()
            assert weight.grad_added_to_main_grad
            assert all(p.grad is None for p in module.parameters())
        model.finish_grad_sync()
        for parameter, want in zip(module.parameters(), wanted(dtype, tied, step), strict=True):
            difference = float((parameter.main_grad - want).norm() / want.norm())
            assert difference <= tolerance, f"step {step}: a gradient differs by {difference:.1e}"


def run_tied_without_a_word() -> None:
    """A tied embedding without `zero_out_wgrad`."""
    module = Model(torch.float32, tied=True)
    tokens, target = batch(0, 0, 0)
    hidden, weight = wrapped(module)(tokens), module.head.weight
    zloss.head_loss(hidden, weight, target, OBJECTIVE, weight_grad_buffer=weight.main_grad).loss.backward()


def wrapped(module: Model, **options: bool) -> Any:
    """Under the data parallelism of Megatron."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(num_layers=1, hidden_size=WIDTH, num_attention_heads=1)
    return DistributedDataParallel(config, DistributedDataParallelConfig(**options), module)


def error_of(work: Callable[[], None]) -> str:
    try:
        work()
    except (AssertionError, InputError) as error:
        return str(error) or type(error).__name__
    return ""


def main() -> None:
    from megatron.core import parallel_state

    torch.set_num_threads(1)
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    found = {
        f"{name}, overlap {overlap}": error_of(partial(run, overlap, *case))
        for name, case in CASES.items()
        for overlap in (False, True)
    }
    found["tied without a word"] = error_of(run_tied_without_a_word)
    if dist.get_rank() == 0:
        json.dump(found, sys.stdout)
    leave()
