"""One training run, from its start or from its last checkpoint to its metrics."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zloss.console.interrupt import held_interrupts
from zloss.console.progress import Progress, Silent
from zloss.errors import InputError, MissingDependencyError
from zloss.optimizer.recorder import Recorder
from zloss.results.run_config import CONFIG_FILE, write_run_config
from zloss.results.train_config import TrainConfig
from zloss.results.writing import write_json
from zloss.train.batch import batch_of, gather
from zloss.train.config_record import config_record
from zloss.train.data import TrainData
from zloss.train.live import LiveView, NoView
from zloss.train.loss_model import LossModel
from zloss.train.metrics import run_metrics
from zloss.train.moe.loss import MoeLossModel
from zloss.train.moe.telemetry import router_numbers
from zloss.train.objective import run_objective
from zloss.train.provenance import run_provenance
from zloss.train.run_options import RunOptions
from zloss.train.saved_state import SavedState
from zloss.train.start import Start, initial_checkpoint
from zloss.train.step_log import StepLog
from zloss.train.telemetry import transport_tails


def run_training(
    config: TrainConfig,
    start: Start,
    folder: Path,
    *,
    options: RunOptions | None = None,
    view: LiveView | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Train, evaluate, and leave config.json, steps.jsonl, metrics.json and provenance.json in `folder`; the metrics.

    A folder with unfinished work of the same run goes on from its last checkpoint, with the same losses as a run that
    was never interrupted.
    """
    options, view, progress = options or RunOptions(), view or NoView(), progress or Silent()
    data, began, objective = start.data, time.time(), run_objective(config)
    identity = claim_folder(folder, config, start)
    accelerator = _accelerator(config, options, folder)
    checkpoint = initial_checkpoint(start, config)
    loss_model: Any = (
        LossModel(checkpoint, objective, config.head, data.train.counted)
        if config.moe is None
        else MoeLossModel(checkpoint, objective, config.head, data.train.counted, config.moe)
    )
    optimizer = torch.optim.AdamW(
        _decay_groups(loss_model, config), lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps
    )
    loss_model, optimizer = accelerator.prepare(loss_model, optimizer)
    recorder = Recorder(loss_model.parameters(), optimizer, clip=config.clip, adam_every=config.adam_every)
    saved = SavedState(folder, identity)
    done, recorder.records = saved.load(accelerator)
    loss_model.train()

    with (
        StepLog(folder, recorder.records) as log,
        view.run(config.name, config.steps, done) as shown,
        # The loop seeds the global generators step by step; the caller gets them back as they were.
        torch.random.fork_rng(),
        held_interrupts() as release,
    ):
        try:
            for step in range(done + 1, config.steps + 1):
                clock = time.perf_counter()
                lr = config.lr_at(step)
                for group in optimizer.param_groups:
                    group["lr"] = lr
                stats, routed = [], []
                for micro, (inputs, targets) in enumerate(_micro_batches(config, data, step)):
                    # Dropout draws from a stream that is a function of seed, step and micro-batch: the same for all methods.
                    torch.manual_seed(_stream_seed(config.seed, step, micro))
                    out = loss_model(
                        inputs.to(accelerator.device), targets.to(accelerator.device), config.tokens_per_step
                    )
                    accelerator.backward(out.loss)
                    recorder.micro_batch(out.loss, out.cross_entropy, out.auxiliary)
                    stats.append(out.stats)
                    if config.moe is not None:
                        routed.append(out.router)
                with recorder.step(step) as opened:
                    opened.lr = lr
                    opened.telemetry = transport_tails(stats, objective, deployed=config.head == "paper")
                    if config.moe is not None:
                        opened.telemetry |= router_numbers(routed, config.moe, config.tokens_per_step)
                    if opened.finite:
                        opened.clip_()
                        optimizer.step()
                    else:
                        # A nonfinite gradient would end the run; it is counted, and its update is left out.
                        opened.skip()
                    opened.seconds = time.perf_counter() - clock
                optimizer.zero_grad()
                record = recorder.records[-1]
                log.append(record)
                shown.show(record, config.tokens_per_step)
                if options.trackers:
                    accelerator.log(tracked(record), step=step)
                done = step
                if options.checkpoint_every and (step % options.checkpoint_every == 0 or step == config.steps):
                    saved.save(accelerator, step, recorder.records)
                release()
        except KeyboardInterrupt:
            if options.checkpoint_every and done % options.checkpoint_every:
                saved.save(accelerator, done, recorder.records)
            raise

    metrics = run_metrics(config, checkpoint, data, recorder.records, progress)
    if options.save_model:
        _save_model(checkpoint, folder)
    write_json(folder / "provenance.json", run_provenance(options.command, began, recorder.records))
    write_json(folder / "metrics.json", metrics)
    saved.clear()
    _close(accelerator)
    return metrics


def claim_folder(folder: Path, config: TrainConfig, start: Start) -> str:
    """Write config.json, or see that the one that is there is of the same run; the identity of the run."""
    record = config_record(config, start)
    mine, file = record.to_dict(), folder / CONFIG_FILE
    if file.is_file():
        try:
            before = json.loads(file.read_text(encoding="utf-8"))
        except ValueError:
            before = None
        if before is not None and before != mine:
            names = [key for key in {**before, **mine} if before.get(key) != mine.get(key)]
            raise InputError(
                f"{folder} holds a run with other settings ({', '.join(sorted(names))} differ): "
                "choose another folder, or remove that one."
            )
    write_run_config(folder, record)
    return hashlib.sha256(json.dumps(mine, sort_keys=True).encode()).hexdigest()[:16]


def is_finished(folder: Path) -> bool:
    """Whether the folder holds the metrics of a finished run."""
    return (folder / "metrics.json").is_file()


def tracked(record: Any) -> dict[str, float]:
    """The scalars of a step for a tracker; what is not finite is left out."""
    names = ("loss", "cross_entropy", "auxiliary", "grad_norm", "grad_inf", "param_norm", "lr")
    values = {name: getattr(record, name) for name in names} | record.telemetry
    return {name: value for name, value in values.items() if value is not None and abs(value) < float("inf")}


def _micro_batches(config: TrainConfig, data: TrainData, step: int) -> Iterator[tuple[Tensor, Tensor]]:
    index_B = batch_of(data.train, config.seed, step, config.blocks_per_step)
    for part in index_B.view(config.accumulate, config.micro_batch):
        yield gather(data.train, part)


def _stream_seed(seed: int, step: int, micro: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {step} {micro}".encode()).digest()[:7], "big")


def _decay_groups(model: nn.Module, config: TrainConfig) -> list[dict[str, Any]]:
    """Decoupled decay on matrices (and tables), or on everything."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decayed = [p for p in trained if config.decay == "all" or p.dim() >= 2]
    rest = [p for p in trained if config.decay != "all" and p.dim() < 2]
    groups = ({"params": decayed, "weight_decay": config.weight_decay}, {"params": rest, "weight_decay": 0.0})
    return [group for group in groups if group["params"]]


def _accelerator(config: TrainConfig, options: RunOptions, folder: Path) -> Any:
    try:
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState
    except ImportError as error:
        raise MissingDependencyError("accelerate", "Training", "train") from error
    # Tied weights are stored once, on purpose; accelerate warns of it at every checkpoint.
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    # Precision is a state of the process in accelerate: the next run may have another.
    AcceleratorState._reset_state()
    accelerator = Accelerator(
        mixed_precision="bf16" if config.precision == "bf16" else "no",
        log_with=list(options.trackers) or None,
        project_dir=str(folder),
    )
    if accelerator.num_processes > 1:
        raise InputError(f"zloss train runs in one process, but was started in {accelerator.num_processes}.")
    if options.trackers:
        plain = {key: value for key, value in asdict(config).items() if isinstance(value, (bool, int, float, str))}
        accelerator.init_trackers("tracking", config=plain)
    return accelerator


def _close(accelerator: Any) -> None:
    accelerator.end_training()
    accelerator.free_memory()


def _save_model(checkpoint: Any, folder: Path) -> None:
    checkpoint.model.save_pretrained(folder / "model")
    checkpoint.tokenizer.save_pretrained(folder / "model")
