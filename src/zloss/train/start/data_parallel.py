"""A run on several processes: each has a copy of the model, and DDP averages the gradients of a step over them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from zloss.distributed import Job
from zloss.errors import InputError
from zloss.results.train_config import TrainConfig
from zloss.train.data.blocks import TrainData
from zloss.train.data.micro_batches import MicroBatch, divides_blocks, micro_batches


def prepared(
    accelerator: Any, model: nn.Module, optimizer: torch.optim.Optimizer, job: Job, config: TrainConfig, data: TrainData
) -> tuple[Any, Any]:
    """Model and optimizer on the device of this process, the model wrapped in DDP where there are several.

    The accelerator holds the model without the wrapper, so that its checkpoints do not depend on the number of processes.
    """
    if job.ranks == 1:
        one_model, one_optimizer = accelerator.prepare(model, optimizer)
        return one_model, one_optimizer
    placed, device = accelerator.prepare_model(model, evaluation_mode=True), accelerator.device
    probe = _probe(placed, next(micro_batches(config, data, 1, job)), device)
    if divides_blocks(config, job):
        job.together(_check_draws_nothing, probe)
    wrapped = DistributedDataParallel(
        placed,
        device_ids=None if device.type == "cpu" else [device],
        find_unused_parameters=probe.leaves_out_parameters,
    )
    return wrapped, accelerator.prepare_optimizer(optimizer)


@contextmanager
def backward_pass(model: Any, *, last: bool) -> Iterator[None]:
    """The gradients of the ranks are averaged in the backward pass of the last micro-batch of a step."""
    if last or not isinstance(model, DistributedDataParallel):
        yield
        return
    with model.no_sync():
        yield


@dataclass(frozen=True)
class _Probe:
    """What one forward pass of a model does."""

    draws: bool
    """It draws random numbers."""
    leaves_out_parameters: bool
    """Its loss does not depend on every trained parameter."""


def _probe(model: nn.Module, batch: MicroBatch, device: torch.device) -> _Probe:
    """One forward pass in training mode; no gradient is computed, and random states stay as they were."""
    model.train()
    with torch.random.fork_rng():
        torch.manual_seed(batch.seed)
        before = _random_states(device)
        out = model(batch.inputs_BT.to(device), batch.targets_BT.to(device), 1)
        draws = not all(map(torch.equal, before, _random_states(device)))
    reached = _leaves(out.loss)
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    return _Probe(draws, leaves_out_parameters=not trained <= reached)


def _leaves(loss: Tensor) -> set[int]:
    """The ids of the leaf tensors that a loss depends on."""
    pending: list[Any] = [loss.grad_fn]
    seen, leaves = set(pending), set()
    while pending:
        node = pending.pop()
        if hasattr(node, "variable"):
            leaves.add(id(node.variable))
        before = {function for function, _ in node.next_functions if function is not None} - seen
        seen |= before
        pending.extend(before)
    return leaves


def _random_states(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


def _check_draws_nothing(probe: _Probe) -> None:
    """Dropout masks of a micro-batch would depend on how its blocks are divided."""
    if probe.draws:
        raise InputError(
            "the model draws random numbers (dropout) in its forward pass, so the blocks of a micro-batch cannot lie on "
            "several processes: give `accumulate` at least as many micro-batches as there are processes."
        )
