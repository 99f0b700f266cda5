"""A Trainer with everything that makes losses differ: accumulation, padding, ignored labels, clipping, a partial last step."""

from __future__ import annotations

import contextlib
import io
import tempfile
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from tests.integrations.transformers.small_models import VOCAB

SEQUENCES = 28
"""7 micro-batches of 4: with accumulation 3 the third step of every epoch has one micro-batch."""
STEPS = 5


def sequences() -> list[dict[str, Tensor]]:
    g = torch.Generator().manual_seed(1)
    lengths = torch.randint(5, 24, (SEQUENCES,), generator=g).tolist()
    return [{"x": torch.randint(3, VOCAB, (length,), generator=g)} for length in lengths]


def padded(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Padding at the end, the first two labels of every sequence ignored."""
    length = max(len(row["x"]) for row in rows)
    ids, mask = torch.zeros(len(rows), length, dtype=torch.long), torch.zeros(len(rows), length, dtype=torch.long)
    labels = torch.full((len(rows), length), -100)
    for place, row in enumerate(rows):
        own = len(row["x"])
        ids[place, :own], labels[place, :own], mask[place, :own] = row["x"], row["x"], 1
        labels[place, :2] = -100
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


class EagerTrainer(transformers.Trainer):
    """The same loss the plain way: λ(log Z)² of whole logits in addition to the model's own loss."""

    coef = 1e-2

    def compute_loss(  # type: ignore[override]
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        extra = {"num_items_in_batch": num_items_in_batch} if self.model_accepts_loss_kwargs else {}
        output = model(**inputs, **extra)
        target = F.pad(inputs["labels"], (0, 1), value=-100)[:, 1:]
        penalty = self.coef * output.logits.float().logsumexp(-1).square()[target != -100]
        items = num_items_in_batch if extra and num_items_in_batch is not None else (target != -100).sum()
        loss = output.loss + penalty.sum() / items
        return (loss, output) if return_outputs else loss


def arguments(kind: type = transformers.TrainingArguments, **settings: Any) -> Any:
    """Settings of a short run on the CPU that writes and reports nothing."""
    quiet = {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1}
    constant = {"learning_rate": 1e-3, "lr_scheduler_type": "constant"}
    settings.setdefault("output_dir", tempfile.mkdtemp())
    return kind(**quiet | constant | settings)


def make_trainer(model: Any, kind: type = transformers.Trainer, callbacks: Any = None, **settings: Any) -> Any:
    size = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3, "max_steps": STEPS}
    options = size | {"max_grad_norm": 0.1, "remove_unused_columns": False, "seed": 0} | settings
    return kind(model, arguments(**options), padded, sequences(), callbacks=callbacks)


def train(trainer: Any) -> list[dict[str, float]]:
    """The logs of the training steps."""
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    return [log for log in trainer.state.log_history if "loss" in log]
