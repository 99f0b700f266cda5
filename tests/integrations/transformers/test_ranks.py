"""Two ranks equal one process, under DDP and FSDP2 with gloo.

Rank r trains on sequence r of the batch. With the sum over both ranks' tokens as the divisor, the average of the ranks'
gradients times 2 is the gradient of the whole batch.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.integrations.ranks import on_ranks
from tests.integrations.transformers.small_models import GPT2, LLAMA, OBJECTIVE, batch, small, truth
from zloss.integrations.transformers import apply

CASES = {
    # name: class, how it is wrapped, apply before wrapping
    "ddp, apply first": (LLAMA, "ddp", True),
    "ddp, apply last": (LLAMA, "ddp", False),
    "ddp, tied": (GPT2, "ddp", False),
    "fsdp2, head in the root, apply first": (LLAMA, "root", True),
    "fsdp2, head in the root, apply last": (LLAMA, "root", False),
    "fsdp2, head in its own group": (LLAMA, "own", False),
    "fsdp2, tied": (GPT2, "root", True),
}


def wrapped(model: Any, how: str) -> Any:
    if how == "ddp":
        return DistributedDataParallel(model)
    layers = model.transformer.h if hasattr(model, "transformer") else model.model.layers
    for layer in layers:
        fully_shard(layer)
    if how == "own":
        fully_shard(model.lm_head)
    return fully_shard(model)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def run(name: str, how: str, first: bool) -> dict[str, float]:
    """Largest relative difference of the loss and of a parameter's gradient to one process."""
    rank = dist.get_rank()
    inputs = batch()
    items = (inputs["labels"][:, 1:] != -100).sum()
    wanted_loss, wanted = truth(small(name), inputs | {"num_items_in_batch": items})
    model: Any = small(name)
    inner: nn.Module = model
    if first:
        apply(model, OBJECTIVE)
        model = wrapped(model, how)
    else:
        model = wrapped(model, how)
        apply(model, OBJECTIVE)
    mine = {key: value[rank : rank + 1] for key, value in inputs.items()}
    loss = model(**mine, num_items_in_batch=items).loss
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    worst = 0.0
    for parameter, want in zip(inner.parameters(), wanted, strict=True):
        if want is not None:
            got = 2 * whole(parameter.grad)
            worst = max(worst, float((got - want).norm() / want.norm().clamp_min(1e-12)))
    return {"loss": abs(float(total - wanted_loss)) / float(wanted_loss), "gradient": worst}


def all_cases() -> dict[str, dict[str, float]]:
    dist.init_process_group("gloo")
    return {case: run(*how) for case, how in CASES.items()}


@pytest.fixture(scope="module")
def differences() -> Any:
    """One job for all cases."""
    return on_ranks(2, all_cases)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_equal_one_process(case: str, differences: dict[str, dict[str, float]]) -> None:
    assert differences[case]["loss"] <= 1e-5
    assert differences[case]["gradient"] <= 1e-4
