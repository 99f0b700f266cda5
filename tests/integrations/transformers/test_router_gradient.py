"""The router Z-loss of a Trainer's step has one gradient, however the step is split over micro-batches and processes."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor

import zloss
from tests.forked import forked_ranks
from tests.integrations.transformers.small_models import VOCAB, small
from tests.integrations.transformers.trainers import padded
from tests.ranks.leave import leave
from zloss.integrations.moe import attach_router_loss
from zloss.integrations.transformers import RouterZLoss, attach

ROUTER = RouterZLoss("token_layer_mean", coef=10.0)
SEQUENCES = 8
"""One optimizer step: every split below trains on all of them at once."""
SETTINGS = {
    # name: arguments of the Trainer beside the batch size
    "default": {},
    "average_tokens_across_devices off": {"average_tokens_across_devices": False},
    "a model without loss arguments": {"accepts_loss_kwargs": False},
}
SPLITS = {
    # name: processes, micro-batches
    "1 process": (1, 1),
    "1 process, 4 micro-batches": (1, 4),
    "2 processes": (2, 1),
    "2 processes, 2 micro-batches": (2, 2),
}


def rows() -> list[dict[str, Tensor]]:
    """Of different lengths, so that micro-batches and processes have different numbers of tokens."""
    g = torch.Generator().manual_seed(1)
    return [{"x": torch.randint(3, VOCAB, (4 + 3 * place,), generator=g)} for place in range(SEQUENCES)]


class _Gradients(transformers.TrainerCallback):
    """The gradients that the optimizer's step receives."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.flat = torch.cat([p.grad.flatten() if p.grad is not None else p.new_zeros(p.numel()) for p in model.parameters()])


def step_gradient(coef: float, per_device: int, micro_batches: int, settings: dict[str, Any]) -> tuple[Tensor, float]:
    """(gradient of one optimizer step, logged loss), without clipping."""
    settings, model, seen = dict(settings), small("OlmoeForCausalLM"), _Gradients()
    model.accepts_loss_kwargs = settings.pop("accepts_loss_kwargs", True)
    args = transformers.TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=per_device,
        gradient_accumulation_steps=micro_batches,
        max_steps=1,
        logging_steps=1,
        max_grad_norm=0,
        report_to="none",
        use_cpu=True,
        ddp_backend="gloo" if "RANK" in os.environ else None,
        disable_tqdm=True,
        remove_unused_columns=False,
        save_strategy="no",
        **settings,
    )
    trainer = transformers.Trainer(model, args, padded, rows(), callbacks=[seen])
    attach(trainer, zloss.CrossEntropy(), router=RouterZLoss(ROUTER.convention, coef=coef))
    trainer.train()
    return seen.flat, next(log["loss"] for log in trainer.state.log_history if "loss" in log)


def reference() -> tuple[Tensor, float]:
    """(gradient, value) of the router Z-loss alone, from one forward pass over all sequences."""
    model = small("OlmoeForCausalLM")
    with attach_router_loss(model, coef=ROUTER.coef, convention=ROUTER.convention) as handle:
        model(**padded(rows()))
        assert handle.last is not None
        grads = torch.autograd.grad(handle.last.loss, list(model.parameters()), allow_unused=True)
    flat = [p.new_zeros(p.numel()) if g is None else g.flatten() for p, g in zip(model.parameters(), grads, strict=True)]
    return torch.cat(flat), float(handle.last.loss.detach())


def measure(processes: int, micro_batches: int, settings: dict[str, Any]) -> dict[str, float]:
    """The gradient of the router term against the reference: with the term less without it."""
    per_device = SEQUENCES // (processes * micro_batches)
    (with_term, loss), (without, plain) = (
        step_gradient(coef, per_device, micro_batches, settings) for coef in (ROUTER.coef or 0.0, 0.0)
    )
    wanted, value = reference()
    got = with_term - without
    return {
        "norm": float(got.norm()),
        "wanted": float(wanted.norm()),
        "difference": float((got - wanted).norm() / wanted.norm()),
        "loss": loss - plain,
        "value": value,
    }


def ranks_of(processes: int, micro_batches: int, settings: dict[str, Any]) -> Callable[[], None]:
    def main() -> None:
        torch.set_num_threads(1)
        saying, sys.stdout = sys.stdout, sys.stderr  # the Trainer prints its logs
        found = measure(processes, micro_batches, settings)
        sys.stdout = saying
        if dist.get_rank() == 0:
            json.dump(found, sys.stdout)
        leave()

    return main


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("split", SPLITS)
def test_the_router_term_was_trained_once_per_process(split: str, settings: str) -> None:
    """A Trainer multiplies its whole loss by the number of processes, and the router's mean with it."""
    processes, micro_batches = SPLITS[split]
    if processes == 1:
        found = measure(processes, micro_batches, SETTINGS[settings])
    else:
        found = json.loads(forked_ranks(processes, ranks_of(processes, micro_batches, SETTINGS[settings])))
    assert found["norm"] == pytest.approx(found["wanted"], rel=1e-4)
    assert found["difference"] <= 1e-4
    assert found["loss"] == pytest.approx(found["value"], rel=1e-3)
