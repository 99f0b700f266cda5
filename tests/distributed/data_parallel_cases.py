"""DDP and FSDP2 with uneven valid counts against one process; run once by `test_data_parallel.py`.

Each rank has two micro-batches per step. Counts of valid tokens differ between ranks and micro-batches, and in one step a
rank has none at all.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import zloss
from tests.distributed.launch import leave
from tests.distributed.recipe_cases import (
    TOKENS,
    VOCAB,
    WIDTH,
    Model,
    head_recipes,
    parameters,
    pipeline_recipe,
    token_recipes,
    worst,
)
from zloss.audit.checkpoint.token_files import TokenParts, gathered_parts
from zloss.jobs import Job
from zloss.measure.tokens import TokenSample, concatenated

STEPS, MICRO = 5, 2


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
    return parameters(inner, alone)


LAYERS, EXPERTS, TOP_K = 3, 5, 2
CONVENTIONS = ("token_layer_mean", "active_route_mean", "megatron", "flaxformer", "olmoe")


def routed(rank: int) -> tuple[Tensor, Tensor]:
    """Inputs [T, D] of the routers and a mask [L, T] whose counts differ between ranks and layers."""
    generator = torch.Generator().manual_seed(rank)
    inputs = torch.randn(TOKENS + 3 * rank, WIDTH, generator=generator, dtype=torch.float64)
    mask = torch.rand(LAYERS, len(inputs), generator=generator) < 0.5 + 0.3 * rank
    return inputs, mask


def router_differences(convention: str, gradients: str, *, counted: bool = True) -> dict[str, float]:
    """The router Z-loss of two ranks against that of all decisions on one: loss, gradient, and what a decision gets."""
    weight = torch.randn(LAYERS, EXPERTS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    options: dict[str, Any] = {"coef": 0.1, "convention": convention, "top_k": TOP_K}
    parts = [routed(rank) for rank in range(dist.get_world_size())]
    everything = weight.clone().requires_grad_()
    inputs, mask = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts], dim=1)
    want = zloss.router_loss(inputs @ everything.mT, mask=mask, **options)
    want.loss.backward()

    own, (mine, own_mask) = weight.clone().requires_grad_(), parts[dist.get_rank()]
    more: dict[str, Any] = {"groups": dist.group.WORLD, "gradients": gradients} if counted else {}
    got = zloss.router_loss(mine @ own.mT, mask=own_mask, **options, **more)
    got.loss.backward()
    assert own.grad is not None
    assert everything.grad is not None
    divisor = dist.get_world_size() if gradients == "averaged" else 1
    loss, gradient = got.loss.detach().clone(), own.grad
    for value in (loss, gradient):
        dist.all_reduce(value)
        value.div_(divisor)
    return {
        "loss": abs(float(loss / want.loss.detach()) - 1),
        "gradient": float((gradient - everything.grad).abs().max() / everything.grad.abs().max()),
        "absolute": float((got.absolute_per_layer / want.absolute_per_layer - 1).abs().max()),
        "relative": float((got.relative_per_layer - want.relative_per_layer).abs().max()),
    }


def routers() -> dict[str, float]:
    found = {
        f"{convention}, {gradients}": max(router_differences(convention, gradients).values())
        for convention in CONVENTIONS
        for gradients in ("averaged", "summed")
    }
    found["own counts"] = router_differences("token_layer_mean", "averaged", counted=False)["gradient"]
    return found


def token_parts() -> dict[str, bool]:
    """Parts of a token table on two ranks, one of which has more of them, against the table of one process."""
    rank = dist.get_rank()
    job, spans = Job(rank, 2), ([(0, 2)], [(2, 3), (3, 5), (5, 6)])

    def columns(start: int, stop: int) -> dict[str, Any]:
        block = np.repeat(np.arange(start, stop), 4)
        return {"block": block, "ce": np.sin(block + np.tile(np.arange(4), stop - start))}

    def vectors(*blocks: tuple[int, int]) -> TokenSample:
        sample = TokenSample(2, seed=0, limit=9)
        for start, stop in blocks:
            index = np.arange(4 * start, 4 * stop)
            sample.add(index, np.stack([index, -index], axis=1).astype(np.float32))
        return sample

    parts = TokenParts(None, "pass", lambda: "model", vectors(*spans[rank]), job)
    for start, stop in spans[rank]:
        parts.add(start, stop, columns(start, stop))
    found, whole = concatenated(list(gathered_parts(job, parts))), vectors((0, 6))
    if rank != 0:
        assert found == {}
        return {}
    return {
        "columns": all(np.array_equal(found[name], column) for name, column in columns(0, 6).items()),
        "index": np.array_equal(parts.sample.index_S, whole.index_S),
        "vectors": np.array_equal(parts.sample.vectors_SD, whole.vectors_SD),
    }


def without_a_batch(how: str) -> float:
    """Rank 1 runs out of batches after the first step; the parameters of all steps against one process."""
    alone, model = Model(), Model()
    wrapped_model = DistributedDataParallel(model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (alone, model)]
    rank = dist.get_rank()
    for step in range(STEPS):
        batches = [micro_batch(step, 0, 0)] + ([micro_batch(step, 1, 0)] if step == 0 else [])
        alone_count = zloss.global_normalizer([target for _, target in batches], groups=[])
        for tokens, target in batches:
            alone(tokens, target, alone_count).backward()
        own = batches[rank : rank + 1]
        if how == "empty batch" and not own:
            # One token whose target is ignored: the loss and all gradients are 0, and the rank takes part in every collective.
            own = [(torch.zeros(1, dtype=torch.long), torch.full((1,), -100))]
        count = zloss.global_normalizer([target for _, target in own] if own else 0)
        # `Join` takes part in the collectives for a rank without a batch; the average is still over all ranks.
        joined = Join([wrapped_model], throw_on_early_termination=False) if how == "join" else nullcontext()
        with joined:
            for tokens, target in own:
                wrapped_model(tokens, target, count).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return parameters(model, alone)


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
    answer = {
        "training": found,
        "routers": routers(),
        "token parts": token_parts(),
        "without a batch": {how: without_a_batch(how) for how in ("empty batch", "join")},
        "recipes": worst({**head_recipes(), **token_recipes(), **pipeline_recipe()}),
    }
    if dist.get_rank() == 0:
        print(json.dumps(answer))
    leave()
