"""metrics.json of a run: the trained model on the validation blocks, and the endpoints of its steps.

`heads.raw` and `heads.centered` are as in an audit, for every method; the flat keys are those of the coordinate that the
method deploys. Evaluation is in fp32 whatever the training precision. Nothing here depends on time or machine, nor on the
loop that trained the model: `zloss train` and `zloss.record_run` share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zloss.console import Progress
from zloss.jobs import Job
from zloss.measure.gradients import diagnostic_gradients, objective_gradients
from zloss.measure.measurement import Measurement, measurement_of
from zloss.measure.tokens import (
    Columns,
    block_values,
    concatenated,
    head_numbers,
    mean,
    nonfinite_tokens,
    perplexity,
    token_batches,
)
from zloss.models.checkpoint import Checkpoint
from zloss.models.output_head import HiddenStates, find_head, hidden_states
from zloss.objectives import Objective
from zloss.optimizer.endpoints import SPIKE, THRESHOLDS, endpoints
from zloss.results.audit import NO_INPUT_PATH, GradientNumbers, Heads
from zloss.results.comparison import FEW_STEPS
from zloss.results.run_config import TrainConfig
from zloss.results.run_metrics import DiagnosticGradient, RoutingMetrics, RunGradients, RunMetrics
from zloss.results.steps import StepRecord
from zloss.text import Blocks
from zloss.train.data import TrainData
from zloss.train.loss import run_objective
from zloss.train.moe import ValidationRouting

EVALUATION_BLOCKS = 4
"""Blocks per forward pass; the numbers do not depend on it beyond rounding."""
NO_GRADIENTS = RunGradients(r_aux=None, c_aux=None, tied_paths=None, gradient=None, diagnostic_tied_paths=None)


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """What the numbers of metrics.json depend on, in addition to the model, the validation blocks and the step records."""

    method: str
    coef: float
    seed: int
    objective: Objective
    clip: float | None
    tokens_consumed: int
    tokens_available: int | None
    """None if the loop did not say it."""
    diag_coef: float = 1e-4
    gradient_blocks: int = 8
    thresholds: tuple[float, ...] = THRESHOLDS
    spike: float = SPIKE
    adam_every: int | None = 50


def run_metrics(
    config: TrainConfig,
    checkpoint: Checkpoint,
    data: TrainData,
    records: list[StepRecord],
    progress: Progress,
    job: Job | None = None,
) -> RunMetrics | None:
    """metrics.json of a run of `zloss train`.

    The ranks of a job share the pass over the validation blocks. The first one has the metrics, the others None.
    """
    job = job or Job()
    checkpoint.model.eval()
    run = MeasuredRun(
        method=config.method,
        coef=config.coef,
        seed=config.seed,
        objective=run_objective(config),
        clip=config.clip,
        tokens_consumed=config.steps * config.tokens_per_step,
        tokens_available=data.train.predictions,
        diag_coef=config.diag_coef,
        gradient_blocks=config.gradient_blocks,
        thresholds=config.thresholds,
        spike=config.spike,
        adam_every=config.adam_every,
    )
    measurement = measurement_of(find_head(checkpoint), coef=config.diag_coef, gain_beta=config.gain_beta)
    routing = None
    with hidden_states(checkpoint, measurement.head) as hidden_of:
        if config.moe is not None:
            routing = ValidationRouting(config.moe, checkpoint.model, data.valid.counted, config.tokens_per_step)
            hidden_of = routing.observed(hidden_of)
        columns = validate(measurement, data.valid, hidden_of, progress, job)
    if routing is not None and job.ranks > 1:
        routing.join(job)
    if not job.first:
        return None
    return assembled_metrics(
        run,
        measurement,
        data.valid,
        columns,
        records,
        run_gradients(run, checkpoint, measurement, data.valid),
        None if routing is None else routing.metrics(),
    )


def validate(
    measurement: Measurement, blocks: Blocks, hidden_of: HiddenStates, progress: Progress, job: Job | None = None
) -> Columns:
    """The columns of all tokens of the validation text.

    On several ranks each passes over its share of the blocks; the first one has the columns of all afterwards.
    """
    job = job or Job()
    share = job.local_range(blocks.count, EVALUATION_BLOCKS)
    parts: list[Columns] = []
    with progress.step("validation", len(share) * blocks.size) as step:
        for _, columns in token_batches(measurement, blocks, hidden_of, EVALUATION_BLOCKS, share):
            parts.append(columns)
            step.advance(len(columns["ce"]))
    return concatenated([part for of_rank in job.gather(parts) for part in of_rank])


def no_gradients(reason: str) -> tuple[RunGradients, dict[str, str]]:
    """The gradients of a run that has none, and why."""
    return NO_GRADIENTS, dict.fromkeys(("r_aux", "c_aux", "tied_paths", "gradient"), reason)


def run_gradients(
    run: MeasuredRun, checkpoint: Checkpoint, measurement: Measurement, blocks: Blocks
) -> tuple[RunGradients, dict[str, str]]:
    """The auxiliary gradient of the method and the diagnostic Z in both coordinates as in an audit, and why one is None."""
    count = min(run.gradient_blocks, blocks.count)
    if not count:
        return no_gradients("gradient_blocks = 0")
    if not bool(measurement.head.weight_VD.detach().isfinite().all()):
        return no_gradients("the weights are not finite")
    auxiliary, paths = GradientNumbers(r_z=0.0), None
    if run.objective.active:
        products = objective_gradients(checkpoint, measurement, blocks, count, {"aux": run.objective})
        auxiliary, paths = products.against_ce("aux"), products.paths("aux")
    found, diagnostic_paths = diagnostic_gradients(checkpoint, measurement, blocks, count)
    reasons: dict[str, str] = {}
    if not run.objective.active:
        reasons["c_aux"] = reasons["tied_paths"] = "this method has no auxiliary gradient"
    elif paths is None:
        reasons["tied_paths"] = NO_INPUT_PATH
    diagnostic = DiagnosticGradient(
        coef=run.diag_coef, blocks=count, raw=found.raw, centered=found.centered, whole_model=found.whole_model
    )
    numbers = RunGradients(
        r_aux=auxiliary.r_z,
        c_aux=auxiliary.c_z,
        tied_paths=paths,
        gradient=diagnostic,
        diagnostic_tied_paths=diagnostic_paths or None,
    )
    return numbers, reasons


def assembled_metrics(
    run: MeasuredRun,
    measurement: Measurement,
    blocks: Blocks,
    columns: Columns,
    records: Sequence[StepRecord],
    gradients: tuple[RunGradients, dict[str, str]],
    routing: RoutingMetrics | None = None,
) -> RunMetrics:
    """Everything of metrics.json, from the columns of the validation tokens; a missing number is None with its reason."""
    coordinate, steps, (gradient_numbers, gradient_reasons) = run.objective.coordinate, len(records), gradients
    heads = Heads(head_numbers(columns, measurement, "raw"), head_numbers(columns, measurement, "centered"))
    reasons: dict[str, str] = {}
    if measurement.lacks_centered is not None:
        reasons["heads.centered"] = measurement.lacks_centered
    reasons |= gradient_reasons
    deployed = heads.raw if coordinate == "raw" else heads.centered
    training = endpoints(records, clip=run.clip, thresholds=run.thresholds, spike=run.spike)
    if not training.adam_samples:
        every = f"every {run.adam_every} steps" if run.adam_every else "never"
        reasons["adam"] = f"the state is sampled {every}, and the run has {steps}"
    if steps < FEW_STEPS:
        reasons["p99"] = f"over {steps} steps a p99 is little else than the maximum: read the max"
    if run.tokens_available is None:
        reasons["tokens_available"] = reasons["reuse"] = "the loop did not say how many training tokens there are"
    return RunMetrics(
        method=run.method,
        coef=run.coef,
        seed=run.seed,
        ppl=perplexity(columns),
        ce=mean(columns["ce"]),
        coordinate=coordinate,
        routing=routing,
        diag_coef=run.diag_coef,
        diag_z=deployed.diag_z,
        p_z_999=deployed.p_z_999,
        a_p_99=deployed.a_p_99,
        mu_abs_99=deployed.mu_abs_99,
        training=training,
        gradients=gradient_numbers,
        tokens_consumed=run.tokens_consumed,
        tokens_available=run.tokens_available,
        reuse=None if run.tokens_available is None else run.tokens_consumed / run.tokens_available,
        valid_predictions=len(columns["ce"]),
        valid_nonfinite=nonfinite_tokens(columns),
        heads=heads,
        validation_blocks=block_values(columns, measurement, blocks),
        reasons=reasons,
    ).finite()
