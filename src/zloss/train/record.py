"""`zloss.record_run`: the folder of a run of `zloss train`, recorded from another training loop.

    with zloss.record_run("runs", model, objective, seed=1, validation=rows, optimizer=optimizer, clip=1.0) as run:
        for batch in batches:
            out = zloss.head_loss(hidden_of(batch), model.head.weight, batch.target, objective)
            out.loss.backward()
            run.micro_batch(out)
            with run.step() as step:
                step.clip_()
                optimizer.step()
            optimizer.zero_grad()

`runs/<method>-<λ>-s<seed>/` then holds config.json, steps.jsonl, metrics.json and provenance.json, and `zloss compare runs`
evaluates the methods. The validation blocks are measured once, at the end.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zloss.console import Progress, Silent
from zloss.distributed import first_rank, world_size
from zloss.errors import InputError
from zloss.head.loss import HeadLossOutput
from zloss.jobs import Job
from zloss.models.checkpoint import Checkpoint, weight_fingerprint
from zloss.models.in_memory import checkpoint_in_memory, evaluating, refuse_shards
from zloss.models.output_head import OutputHead, check_head, find_head
from zloss.objectives import Objective
from zloss.optimizer.endpoints import SPIKE, THRESHOLDS
from zloss.optimizer.recorder import OpenStep, Recorder, StatefulOptimizer
from zloss.results.folder import locked_folder
from zloss.results.options import check_counts, check_measured_coef, check_optional_counts
from zloss.results.provenance import write_run_provenance
from zloss.results.run_config import RecordedData, RecordedRun
from zloss.results.run_metrics import METRICS_FILE, RunMetrics
from zloss.results.steps import StepRecord
from zloss.telemetry.window import StepWindow, TokenTotals, micro_batch
from zloss.text import Blocks, make_blocks, open_corpus, rows_as_blocks
from zloss.train.data import text_part
from zloss.train.folder import STEPS_FILE, append_step, claim_settings, read_steps, run_provenance, write_steps

TOKENS = "tokens"
"""Key of a step's telemetry: predicted tokens of the step, on all ranks."""
GAIN_BETA = 1e-2
"""β of what is measured if the objective has none."""


@dataclass(frozen=True)
class RecordOptions:
    """What is measured of a recorded run, in addition to its steps and validation blocks."""

    adam_every: int | None = 50
    """Steps between two samples of the Adam state; None takes none."""
    gradient_blocks: int = 8
    """Validation blocks of the gradient section; 0 skips it."""
    diag_coef: float = 1e-4
    """λ_diag, the coefficient at which Diag Z and the gradients are measured."""
    thresholds: tuple[float, ...] = THRESHOLDS
    """Thresholds τ of the event rates Φ_τ."""
    spike: float = SPIKE
    """Rise of the loss from one step to the next that counts as a spike, in nats."""
    tokens_available: int | None = None
    """Tokens of the training text, if they are known."""

    def __post_init__(self) -> None:
        check_counts(self, ("gradient_blocks",), least=0)
        check_measured_coef("diag_coef", self.diag_coef)
        check_optional_counts(self, ("adam_every", "tokens_available"))


def record_run(
    directory: str | os.PathLike[str],
    model: nn.Module,
    objective: Objective,
    *,
    seed: int,
    validation: Blocks | Tensor | Sequence[Sequence[int]],
    method: str | None = None,
    coef: float | None = None,
    optimizer: StatefulOptimizer | None = None,
    clip: float | None = None,
    settings: dict[str, Any] | None = None,
    training_data: dict[str, Any] | None = None,
    loop: str = "plain loop",
    head: nn.Module | None = None,
    hidden_of: Callable[[Tensor], Tensor] | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    options: RecordOptions | None = None,
) -> RunRecorder:
    """A recorder that writes `directory/<method>-<λ>-s<seed>/`, which `zloss compare directory` and `zloss report` read.

    `model`: a causal language model of transformers, bare or inside DDP, PEFT or torch.compile; for any other model pass
    `head`, its output layer (weight [V, D]), and `hidden_of`, a function from token ids [B, N] to the hidden states
    [B, N, D] that the head receives, as for `zloss.audit_model`; `logit_scale` and `softcap` if
    z = softcap·tanh(s(Wu + b)/softcap). `seed`: runs of different methods are paired by it, so it must stand for the same
    data order and the same initial weights (the latter are checked by their checksum when runs are compared).
    `validation`: `zloss.validation_blocks(file, tokenizer)`, or rows [B, N + 1] of token ids; measured once, at the end.
    `method`, `coef`: name and coefficient of a method that is not an objective of tokens, such as "mu-loss"; by default those of
    the objective.
    `optimizer`: for the learning rate and samples of Adam's state. `clip`: the threshold at which the loop clips.
    `settings`: everything else that defines the experiment, as JSON values; runs that differ in one are rejected as a pair.

    Scaling: losses of a step are per valid token of all its micro-batches, whatever divisor the loop uses.
    """
    chosen, blocks = options or RecordOptions(), rows_as_blocks(validation, "validation")
    checkpoint = checkpoint_in_memory(model, head=head, hidden_of=hidden_of, logit_scale=logit_scale, softcap=softcap)
    # A model that cannot be validated is rejected before the first step, not after the last.
    output, largest = find_head(checkpoint), int(blocks.stream.max())
    if largest >= output.vocab:
        raise InputError(f"`validation` holds the token id {largest}, but the head has {output.vocab} rows.")
    with evaluating(checkpoint.model):
        check_head(checkpoint, output, blocks.inputs(0, 1)[0])
    for name, value in (settings or {}).items():
        if not isinstance(value, (str, int, float, bool, list, tuple, dict, type(None))):
            raise InputError(
                f"`settings[{name!r}]` is expected to be a number, text, list or dict, but is a {type(value).__name__}."
            )
    made: Any = objective
    numbers = {entry.name: getattr(made, entry.name) for entry in fields(made)}
    config = RecordedRun(
        loop=loop,
        model=type(checkpoint.model).__name__,
        method=method or objective.name,
        # For Factorized, those of its relative part.
        coef=float(numbers.get("coef", numbers.get("relative_coef", coef)) or 0.0),
        target=numbers.get("target", numbers.get("relative_target")),
        gain_beta=float(numbers.get("beta", GAIN_BETA)),
        objective=numbers,
        seed=seed,
        clip=clip,
        settings=dict(settings or {}),
        measured={name: value for name, value in asdict(chosen).items() if name != "tokens_available"},
        data=RecordedData(text_part(blocks, {}), training_data),
        initial_weights=weight_fingerprint(checkpoint.model),
    )
    return RunRecorder(Path(directory) / config.name, config, checkpoint, output, objective, blocks, optimizer, chosen)


class RunRecorder:
    """One run being recorded; `record_run` makes it.

    With several processes, every process calls it and the first one writes. Used as a context manager, it measures the
    validation blocks when the block ends without an error. Without one, call `start` first and `finish` last.
    """

    def __init__(
        self,
        folder: Path,
        config: RecordedRun,
        checkpoint: Checkpoint,
        head: OutputHead,
        objective: Objective,
        blocks: Blocks,
        optimizer: StatefulOptimizer | None,
        options: RecordOptions,
    ) -> None:
        self.folder, self.config = folder, config
        self.metrics: RunMetrics | None = None
        """metrics.json, once the run is finished."""
        self._checkpoint, self._objective, self._blocks, self._options = checkpoint, objective, blocks, options
        self._head = head
        self._optimizer, self._steps_done = optimizer, 0
        self._writes = first_rank()
        self._recorder = Recorder(())
        self._window = StepWindow(1, objective.coordinate, across_ranks=True)
        self._parts: list[TokenTotals] = []
        self._open: OpenStep | None = None
        self._held: ExitStack | None = None
        """Holds the folder while the run is recorded."""
        self._began = self._clock = 0.0

    @property
    def records(self) -> list[StepRecord]:
        """The steps so far."""
        return self._recorder.records

    def start(self, step: int = 0, optimizer: StatefulOptimizer | None = None) -> None:
        """Lock the folder and write config.json. `step`: the last step of the checkpoint that the loop resumes from;
        `optimizer`: if there was none yet when the recorder was made."""
        self._began, self._clock, self._steps_done = time.time(), time.perf_counter(), step
        self._optimizer = self._optimizer if optimizer is None else optimizer
        refuse_shards(self._checkpoint.model)
        self._recorder = Recorder(
            self._checkpoint.model.parameters(),
            self._optimizer,
            clip=self.config.clip,
            adam_every=self._options.adam_every if self._optimizer is not None else None,
        )
        if not self._writes:
            return
        with ExitStack() as held:
            held.enter_context(locked_folder(self.folder))
            claim_settings(self.folder, self.config.to_dict())
            # A resumed run keeps the records of earlier steps.
            known = read_steps(self.folder)[:step] if step and (self.folder / STEPS_FILE).is_file() else []
            if [record.step for record in known] != list(range(1, step + 1)):
                raise InputError(
                    f"the loop resumes after step {step}, but {self.folder / STEPS_FILE} does not have the earlier steps: "
                    "record from the first step on, in the same folder."
                )
            self._recorder.records = known
            (self.folder / METRICS_FILE).unlink(missing_ok=True)
            write_steps(self.folder, self._recorder.records)
            self._held = held.pop_all()

    def micro_batch(self, output: HeadLossOutput | TokenTotals, *, normalizer: float | Tensor | None = None) -> None:
        """One loss that backward was or will be called on, an output of `head_loss`; a step may have several.

        `normalizer`: the one that `head_loss` was given; None for the mean over valid tokens. A handle of `apply` calls it
        by itself: `handle.observers.append(run.micro_batch)`.
        """
        part = output if isinstance(output, TokenTotals) else micro_batch(output, "mean", normalizer)
        self._parts.append(part)
        self._window.add(part)

    @contextmanager
    def step(self) -> Iterator[OpenStep]:
        """Enter after the last backward pass of a step, leave after the optimizer's step."""
        opened = self.begin_step()
        yield opened
        self.end_step()

    @torch.no_grad()
    def begin_step(self, *, clipped_by: float | None = None) -> OpenStep:
        """Read the gradients; `clipped_by` is the factor by which the loop has clipped them already, None if it has not."""
        if not self._parts:
            raise InputError("this step has no loss: call `micro_batch` with every output of `head_loss` first.")
        if self._held is None and self._writes:
            raise InputError("the recorder has not been started: use it as a context manager, or call `start` first.")
        if not self.records:
            _check_bias(self._head)
        sums_N3 = torch.stack([part.loss_sums for part in self._parts])
        if world_size() > 1:
            dist.all_reduce(sums_N3)
        tokens = sums_N3[:, 0].sum().clamp_min(1)
        for _, ce, auxiliary in sums_N3 / tokens:
            self._recorder.micro_batch(ce + auxiliary, ce, auxiliary)
        self._parts = []
        self._open = self._recorder.begin(self._steps_done + 1, clipped_by=clipped_by)
        self._window.end_step(self._open.norm, self.config.clip)
        self._open.telemetry = self._window.step_tails() | {TOKENS: float(tokens)}
        if self._optimizer is not None and self._optimizer.param_groups:
            self._open.lr = float(self._optimizer.param_groups[0]["lr"])
        return self._open

    def end_step(self, *, updated: bool = True) -> StepRecord:
        """Complete the record of the step, after the optimizer's step."""
        opened, self._open = self._open, None
        if opened is None:
            raise InputError("`end_step` without `begin_step`.")
        if not updated:
            opened.skip()
        now = time.perf_counter()
        opened.seconds, self._clock = now - self._clock, now
        record = self._recorder.end(opened)
        self._steps_done += 1
        if self._writes:
            append_step(self.folder, record)
        return record

    def finish(self, progress: Progress | None = None) -> RunMetrics | None:
        """Measure the validation blocks and write metrics.json; None on a process that does not write."""
        # Measuring imports more than everything else here, and `import zloss` has to stay light.
        from zloss.train.metrics import run_metrics

        try:
            if self._writes and not self.records:
                raise InputError("a run without steps has no metrics: record at least one step.")
            if self._writes:
                consumed = int(sum(record.telemetry.get(TOKENS) or 0.0 for record in self.records))
                with evaluating(self._checkpoint.model):
                    self.metrics = run_metrics(
                        self.config,
                        self._options,
                        self._objective,
                        self._checkpoint,
                        self._blocks,
                        self.records,
                        tokens=(consumed, self._options.tokens_available),
                        progress=progress or Silent(),
                        job=Job(),
                    )
                assert self.metrics is not None
                command = f"zloss.record_run ({self.config.loop})"
                write_run_provenance(self.folder, run_provenance(command, self._began, self.records))
                self.metrics.write(self.folder)
        finally:
            self.close()
        return self.metrics

    def close(self) -> None:
        """Release the folder; a run without metrics counts as unfinished."""
        if self._held is not None:
            self._held.close()
            self._held = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None:
            self.finish()
        else:
            self.close()


def _check_bias(head: OutputHead) -> None:
    """Reject a loss without the bias that the model adds to its logits: after the first backward pass it has no gradient."""
    weight, bias = head.weight_VD, head.bias_V
    if bias is None or not bias.requires_grad or bias.grad is not None or weight.grad is None:
        return
    if bool(bias.detach().any()):
        raise InputError(
            "the head has a bias that the recorded loss leaves out, because `head.bias` has no gradient: the loss is not that "
            "of the model, and the bias is not trained. Pass `bias=head.bias` to `head_loss`."
        )


def validation_blocks(
    texts: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    tokenizer: Any,
    *,
    block_size: int = 256,
    blocks: int | None = 64,
    offset: int = 0,
    bos_id: int | None = None,
    text_field: str = "text",
) -> Blocks:
    """Blocks of text files as `zloss train` and `zloss audit` cut them: one token stream without special tokens.

    Block i reads tokens [i·B, (i+1)·B) and predicts tokens [i·B + 1, (i+1)·B + 1), B = `block_size`. `blocks` None takes
    all there are; `bos_id` is put in front of every block where it is given.
    """
    files = [texts] if isinstance(texts, (str, os.PathLike)) else list(texts)
    corpus = open_corpus([os.fspath(file) for file in files], None, text_field)
    return make_blocks(corpus, tokenizer, size=block_size, count=blocks, bos_id=bos_id, offset=offset)
