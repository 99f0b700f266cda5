"""The terms that we add to an optimizer step have one gradient, however a training loop splits the step.

Each loop makes one step on the same sequences, on one or two processes with one or several micro-batches. The gradient of
a term is that of a step with it less that of a step without it, and is compared with one forward pass over everything.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
from collections.abc import Callable
from typing import Any

import accelerate
import pytest
import torch
import transformers
from torch import Tensor

import zloss
from tests.integrations.ranks import on_ranks
from tests.integrations.transformers.small_models import VOCAB, small
from tests.integrations.transformers.trainers import arguments, padded
from zloss.integrations.moe import attach_router_loss
from zloss.integrations.transformers import RouterZLoss, apply, attach

MODEL = "OlmoeForCausalLM"
ROUTER, HEAD = RouterZLoss("token_layer_mean", coef=10.0), zloss.StandardZLoss(1.0)
OFF = RouterZLoss("token_layer_mean", coef=0.0), zloss.CrossEntropy()
SEQUENCES = 8
SPLITS = {
    # name: processes, micro-batches
    "1 process": (1, 1),
    "1 process, 4 micro-batches": (1, 4),
    "2 processes": (2, 1),
    "2 processes, 2 micro-batches": (2, 2),
}
TRAINER_SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "average_tokens_across_devices off": {"average_tokens_across_devices": False},
    "a model without loss arguments": {"accepts_loss_kwargs": False},
}


def rows(longer: int) -> list[dict[str, Tensor]]:
    """Each sequence has `longer` more tokens than the one before."""
    g = torch.Generator().manual_seed(1)
    return [{"x": torch.randint(3, VOCAB, (4 + longer * place,), generator=g)} for place in range(SEQUENCES)]


def flat_gradient(model: Any) -> Tensor:
    return torch.cat([p.new_zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in model.parameters()])


class _Gradients(transformers.TrainerCallback):
    """The gradient that the optimizer receives."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.flat = flat_gradient(model)


def trainer_arguments(kind: type, batch: int, micro_batches: int, **settings: Any) -> Any:
    size = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": micro_batches, "max_steps": 1}
    return arguments(kind, **size, max_grad_norm=0, ddp_backend="gloo" if "RANK" in os.environ else None, **settings)


def in_trainer(
    router: RouterZLoss | None, head: Any, batch: int, micro_batches: int, *, longer: int = 0, **settings: Any
) -> Tensor:
    model, seen = small(MODEL), _Gradients()
    model.accepts_loss_kwargs = settings.pop("accepts_loss_kwargs", True)
    options = trainer_arguments(
        transformers.TrainingArguments, batch, micro_batches, remove_unused_columns=False, **settings
    )
    trainer = transformers.Trainer(model, options, padded, rows(longer), callbacks=[seen])
    attach(trainer, head, router=router)
    trainer.train()
    return seen.flat


def in_sft_trainer(router: None, head: Any, batch: int, micro_batches: int, **settings: Any) -> Tensor:
    trl = pytest.importorskip("trl", minversion="1.16")
    import datasets

    from tests.integrations.transformers.test_trl import tokenizer

    model, seen = small(MODEL), _Gradients()
    data = datasets.Dataset.from_dict({"input_ids": [row["x"].tolist() for row in rows(0)]})
    settings |= {"bf16": False, "gradient_checkpointing": False, "router_aux_loss_coef": 0.0}
    options = trainer_arguments(trl.SFTConfig, batch, micro_batches, **settings)
    trainer = trl.SFTTrainer(model, options, train_dataset=data, processing_class=tokenizer(), callbacks=[seen])
    attach(trainer, head)
    trainer.train()
    return seen.flat


def own_batches(batch: int) -> list[dict[str, Tensor]]:
    """The micro-batches of this process, with every label counted."""
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    own = [row["x"] for row in rows(0)][rank::ranks]
    ids = [torch.stack(own[start : start + batch]) for start in range(0, len(own), batch)]
    return [{"input_ids": x, "labels": x} for x in ids]


def in_accelerate(router: RouterZLoss | None, head: Any, batch: int, micro_batches: int) -> Tensor:
    # A step may leave experts without a token.
    unused = accelerate.DistributedDataParallelKwargs(find_unused_parameters=True)
    engine = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=micro_batches, kwargs_handlers=[unused])
    bare = small(MODEL)
    apply(bare, head, router=router)
    model = engine.prepare(bare)
    for inputs in own_batches(batch):
        with engine.accumulate(model):
            engine.backward(model(**inputs).loss)
    return flat_gradient(bare)


def in_lightning(router: RouterZLoss | None, head: Any, batch: int, micro_batches: int) -> Tensor:
    lightning = pytest.importorskip("lightning")
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch.strategies import DDPStrategy

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = small(MODEL)
            apply(self.model, head, router=router)

        def training_step(self, inputs: Any, _index: int) -> Any:
            return self.model(**inputs).loss

        def on_before_optimizer_step(self, _optimizer: Any) -> None:
            self.flat = flat_gradient(self.model)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    module, several = Module(), "RANK" in os.environ
    trainer = lightning.Trainer(
        max_steps=1,
        accumulate_grad_batches=micro_batches,
        accelerator="cpu",
        devices=int(os.environ.get("WORLD_SIZE", 1)),
        strategy=DDPStrategy(process_group_backend="gloo", find_unused_parameters=True) if several else "auto",
        plugins=[TorchElasticEnvironment()] if several else None,
        logger=False,
        use_distributed_sampler=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader(own_batches(batch), batch_size=None))
    return module.flat


def wanted_gradient(term: str, inputs: dict[str, Tensor]) -> Tensor:
    """The gradient of the term from one forward pass over everything."""
    model = small(MODEL)
    if term == "router":
        with attach_router_loss(model, coef=ROUTER.coef, convention=ROUTER.convention) as handle:
            model(**inputs)
        assert handle.last is not None
        handle.last.loss.backward()
    else:
        log_z = model(input_ids=inputs["input_ids"]).logits[:, :-1].logsumexp(-1)
        (log_z - math.log(VOCAB)).square()[inputs["labels"][:, 1:] != -100].mean().backward()
    return flat_gradient(model)


def check(step: Callable[..., Tensor], term: str, split: str, inputs: dict[str, Tensor], **settings: Any) -> None:
    """The norm of the term's gradient, and its difference from the wanted one relative to that."""
    processes, micro_batches = SPLITS[split]
    wanted = wanted_gradient(term, inputs)
    off_router, off_head = OFF
    pairs = [(ROUTER, off_head), (off_router, off_head)] if term == "router" else [(None, HEAD), (None, off_head)]

    def measure() -> tuple[float, float]:
        torch.set_num_threads(1)
        batch = SEQUENCES // (processes * micro_batches)
        with_term, without = (step(router, head, batch, micro_batches, **settings) for router, head in pairs)
        got = with_term - without
        return float(got.norm()), float((got - wanted).norm() / wanted.norm())

    norm, difference = measure() if processes == 1 else on_ranks(processes, measure)
    assert norm == pytest.approx(float(wanted.norm()), rel=1e-4)
    assert difference <= 1e-4


@pytest.mark.parametrize("settings", TRAINER_SETTINGS)
@pytest.mark.parametrize("split", SPLITS)
def test_a_trainer_trained_the_router_term_once_per_process(split: str, settings: str) -> None:
    """A Trainer multiplies its whole loss by the number of processes, and the router's mean with it. The sequences differ in
    length, so micro-batches and processes have different numbers of tokens."""
    check(in_trainer, "router", split, padded(rows(3)), longer=3, **TRAINER_SETTINGS[settings])


LOOPS = {"Trainer": in_trainer, "SFTTrainer": in_sft_trainer, "accelerate": in_accelerate, "Lightning": in_lightning}


@pytest.mark.parametrize("split", ["1 process, 4 micro-batches", "2 processes, 2 micro-batches"])
@pytest.mark.parametrize(
    ("loop", "term", "settings"),
    [
        *itertools.product(["Trainer", "SFTTrainer"], ["head"], ["default", "average_tokens_across_devices off"]),
        *itertools.product(["accelerate", "Lightning"], ["head", "router"], ["default"]),
    ],
)
def test_a_term_does_not_depend_on_the_split_in_any_loop(loop: str, term: str, settings: str, split: str) -> None:
    """Accelerate and Lightning average losses: there, too, the router's term is trained once."""
    x = torch.stack([row["x"] for row in rows(0)])
    inputs = padded(rows(0)) if loop == "Trainer" else {"input_ids": x, "labels": x}
    check(LOOPS[loop], term, split, inputs, **TRAINER_SETTINGS[settings])
