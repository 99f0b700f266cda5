"""One optimizer step of a run: forward and backward passes of its micro-batches, clipping, the update, and its record."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from zloss.distributed import Job
from zloss.optimizer.recorder import Recorder
from zloss.results.step_record import StepRecord
from zloss.results.train_config import TrainConfig
from zloss.telemetry.window import StepWindow, micro_batch
from zloss.train.data.blocks import TrainData
from zloss.train.data.micro_batches import micro_batches
from zloss.train.moe.telemetry import router_numbers
from zloss.train.start.data_parallel import backward_pass
from zloss.train.step.live_validation import LiveValidation
from zloss.train.step.telemetry import step_tails


@dataclass(frozen=True)
class OptimizerStep:
    """What every step of a run works with."""

    config: TrainConfig
    data: TrainData
    job: Job
    accelerator: Any
    """An `accelerate.Accelerator`."""
    loss_model: Any
    """Token ids and targets to the loss; on several processes inside DDP."""
    optimizer: Any
    recorder: Recorder
    window: StepWindow
    validation: LiveValidation

    def take(self, step: int) -> StepRecord:
        """Take step 1, 2, …; an update with a nonfinite gradient is left out."""
        config, began = self.config, time.perf_counter()
        lr = config.lr_at(step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        routed = self._add_gradients(step)
        with self.recorder.step(step) as opened:
            opened.lr = lr
            self.window.end_step(opened.norm, config.clip)
            opened.telemetry = step_tails(self.window)
            if config.moe is not None:
                passes = [part for rank in self.job.all_gather(routed) for part in rank]
                opened.telemetry |= router_numbers(passes, config.moe, config.tokens_per_step)
            if opened.finite:
                opened.clip_()
                self.optimizer.step()
            else:
                # An update with a nonfinite gradient would make all weights nonfinite: it is counted and left out.
                opened.skip()
            opened.seconds = time.perf_counter() - began
            if self.job.first and self.validation.due(step):
                opened.telemetry |= self.validation.telemetry(self.accelerator.device, self.accelerator.autocast())
        self.optimizer.zero_grad()
        return self.recorder.records[-1]

    def _add_gradients(self, step: int) -> list[Any]:
        """Forward and backward passes of this rank's micro-batches; the routers' part of each, with experts."""
        config, job, device = self.config, self.job, self.accelerator.device
        routed = []
        own = list(micro_batches(config, self.data, step, job))
        for batch in own:
            torch.manual_seed(batch.seed)
            inputs, targets = batch.inputs_BT.to(device), batch.targets_BT.to(device)
            with backward_pass(self.loss_model, last=batch is own[-1]):
                out = self.loss_model(inputs, targets, config.tokens_per_step)
                # Each rank has its part of the step's loss, and DDP averages gradients: the average of ranks·part is the sum
                # of the parts.
                self.accelerator.backward(out.loss * job.ranks)
            self.recorder.micro_batch(*(part * job.ranks for part in (out.loss, out.cross_entropy, out.auxiliary)))
            self.window.add(micro_batch(out, normalizer=config.tokens_per_step))
            if config.moe is not None:
                routed.append(out.router)
        return routed
