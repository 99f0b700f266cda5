"""DDP and FSDP2 with uneven valid counts against one process; launched once by `test_data_parallel.py`.

Each rank has two micro-batches per step. Counts of valid tokens differ between ranks and micro-batches, and in one step a
rank has none at all.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import zloss
from tests.ranks.leave import leave

VOCAB, WIDTH, TOKENS, STEPS, MICRO = 61, 8, 12, 5, 2
OBJECTIVE = zloss.CenteredZLoss(0.1)


class Model(nn.Module):
    """An embedding, a layer and a head; the loss is inside, as wrappers want it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.layer = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor, target: Tensor, normalizer: Tensor) -> Tensor:
        hidden = torch.tanh(self.layer(self.embed(tokens)))
        return zloss.head_loss(hidden, self.head.weight, target, OBJECTIVE, normalizer=normalizer).loss


def micro_batch(step: int, rank: int, micro: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    tokens = torch.randint(VOCAB, (TOKENS,), generator=generator)
    target = torch.randint(VOCAB, (TOKENS,), generator=generator)
    target[: 3 + 4 * rank + micro] = -100
    if step == 2 and rank == 1:
        target[:] = -100
    return tokens, target


def train(
    model: Any, optimizer: torch.optim.Optimizer, ranks: list[int], normalizer: Callable[[list[Tensor]], Tensor]
) -> None:
    for step in range(STEPS):
        batches = [micro_batch(step, rank, micro) for rank in ranks for micro in range(MICRO)]
        count = normalizer([target for _, target in batches])
        for position, (tokens, target) in enumerate(batches):
            last = position == len(batches) - 1
            quiet = model.no_sync() if isinstance(model, DistributedDataParallel) and not last else nullcontext()
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(last)
            with quiet:
                model(tokens, target, count).backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def wrapped(how: str) -> tuple[Any, nn.Module]:
    model = Model()
    if how == "ddp":
        return DistributedDataParallel(model), model
    fully_shard(model.layer)
    fully_shard(model)
    return model, model


def difference(how: str, kind: str, normalizer: Callable[[list[Tensor]], Tensor]) -> float:
    """Largest relative difference of a parameter after five steps."""
    make: Any = {"adamw": lambda p: torch.optim.AdamW(p, lr=1e-2), "sgd": lambda p: torch.optim.SGD(p, lr=0.5)}[kind]
    alone = Model()
    everyone = list(range(dist.get_world_size()))
    train(alone, make(alone.parameters()), everyone, lambda targets: zloss.global_normalizer(targets, groups=[]))
    model, inner = wrapped(how)
    train(model, make(inner.parameters()), [dist.get_rank()], normalizer)
    pairs = zip(alone.parameters(), inner.parameters(), strict=True)
    return max(float((whole(got) - want.detach()).abs().max() / want.detach().abs().max()) for want, got in pairs)


def main() -> None:
    dist.init_process_group("gloo")
    found = {
        f"{how}, {kind}": difference(how, kind, zloss.global_normalizer)
        for how in ("ddp", "fsdp2")
        for kind in ("adamw", "sgd")
    }
    # The denominator that forgets that DDP averages: gradients are half of what they should be, and AdamW hides it.
    forgotten = lambda targets: zloss.global_normalizer(targets, gradients="summed")  # noqa: E731
    found["forgotten, sgd"] = difference("ddp", "sgd", forgotten)
    if dist.get_rank() == 0:
        print(json.dumps(found))
    leave()


if __name__ == "__main__":
    main()
