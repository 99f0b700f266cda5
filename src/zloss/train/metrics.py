"""metrics.json of a run: the trained model on the validation blocks, and the endpoints of its steps.

`heads.raw` and `heads.centered` are as in an audit, for every method; the flat keys are those of the coordinate that the
method deploys. Evaluation is in fp32 whatever the training precision. Nothing here depends on time or machine, nor on the
loop that trained the model: `zloss train` and `zloss.record_run` share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from zloss.console import Progress
from zloss.errors import first_line
from zloss.jobs import Job
from zloss.measure.gradients import diagnostic_gradients, has_graph, objective_gradients
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
from zloss.optimizer.endpoints import endpoints
from zloss.results.audit import NO_INPUT_PATH, GradientNumbers, Heads
from zloss.results.comparison import FEW_STEPS
from zloss.results.run_config import RecordedRun, TrainConfig
from zloss.results.run_metrics import DiagnosticGradient, RoutingMetrics, RunGradients, RunMetrics
from zloss.results.steps import StepRecord
from zloss.text import Blocks
from zloss.train.data import TrainData
from zloss.train.loss import run_objective
from zloss.train.moe import RouterTerms, RoutingTap, router_terms, routing_metrics

if TYPE_CHECKING:
    from zloss.train.record import RecordOptions

EVALUATION_BLOCKS = 4
"""Blocks per forward pass; the numbers do not depend on it beyond rounding."""


def run_metrics(
    config: TrainConfig,
    checkpoint: Checkpoint,
    data: TrainData,
    records: list[StepRecord],
    progress: Progress,
    job: Job,
) -> RunMetrics | None:
    """metrics.json of a run of `zloss train`.

    The ranks of a job share the pass over the validation blocks. The first one has the metrics, the others None.
    """
    checkpoint.model.eval()
    moe, head, step_tokens = config.moe, find_head(checkpoint), config.tokens_per_step
    passes: list[RouterTerms] = []

    def observed(hidden_of: HiddenStates) -> HiddenStates:
        """The same hidden states; the routing of each forward pass is kept."""
        if moe is None:
            return hidden_of
        tap = RoutingTap(checkpoint.model, data.valid.counted)

        def run(inputs_BN: Tensor) -> Tensor:
            hidden_BND, routing = tap.observe(lambda: hidden_of(inputs_BN), len(inputs_BN))
            passes.append(router_terms(routing, moe, step_tokens, tap.weights(moe.experts))[2])
            return hidden_BND

        return run

    measurement = measurement_of(head, coef=config.diag_coef, gain_beta=config.gain_beta)
    with hidden_states(checkpoint, head) as hidden_of:
        columns = validate(measurement, data.valid, observed(hidden_of), progress, job)
    of_all_ranks = [part for rank in job.gather(passes) for part in rank]
    if not job.first:
        return None
    return measured_run(
        config,
        config,
        run_objective(config),
        measurement,
        data.valid,
        columns,
        records,
        checkpoint=checkpoint,
        tokens=(config.steps * step_tokens, data.train.predictions),
        routing=None if moe is None else routing_metrics(of_all_ranks, moe, step_tokens),
    )


def validate(
    measurement: Measurement, blocks: Blocks, hidden_of: HiddenStates, progress: Progress, job: Job
) -> Columns:
    """The columns of all tokens of the validation text.

    On several ranks each passes over its share of the blocks; the first one has the columns of all afterwards.
    """
    share = job.local_range(blocks.count, EVALUATION_BLOCKS)
    parts: list[Columns] = []
    with progress.step("validation", len(share) * blocks.size) as step:
        for _, columns in token_batches(measurement, blocks, hidden_of, EVALUATION_BLOCKS, share):
            parts.append(columns)
            step.advance(len(columns["ce"]))
    return concatenated([part for of_rank in job.gather(parts) for part in of_rank])


def measured_run(
    run: TrainConfig | RecordedRun,
    options: TrainConfig | RecordOptions,
    objective: Objective,
    measurement: Measurement,
    blocks: Blocks,
    columns: Columns,
    records: Sequence[StepRecord],
    *,
    checkpoint: Checkpoint,
    tokens: tuple[int, int | None],
    routing: RoutingMetrics | None = None,
) -> RunMetrics:
    """Everything of metrics.json, from the columns of the validation tokens; a missing number is None with its reason.

    `options` say what is measured. `tokens`: those of all steps, and those of the training text if they are known.
    """
    coordinate, steps, (consumed, available) = objective.coordinate, len(records), tokens
    heads = Heads(head_numbers(columns, measurement, "raw"), head_numbers(columns, measurement, "centered"))
    reasons: dict[str, str] = {}
    if measurement.lacks_centered is not None:
        reasons["heads.centered"] = measurement.lacks_centered
    gradients, missing = _gradients(checkpoint, objective, measurement, blocks, options.gradient_blocks)
    reasons |= missing
    deployed = heads.raw if coordinate == "raw" else heads.centered
    training = endpoints(records, clip=run.clip, thresholds=options.thresholds, spike=options.spike)
    if not training.adam_samples:
        every = f"every {options.adam_every} steps" if options.adam_every else "never"
        reasons["adam"] = f"the state is sampled {every}, and the run has {steps}"
    if steps < FEW_STEPS:
        reasons["p99"] = f"over {steps} steps a p99 is little more than the maximum: read the max"
    if available is None:
        reasons["tokens_available"] = reasons["reuse"] = "the loop did not say how many training tokens there are"
    return RunMetrics(
        method=run.method,
        coef=run.coef,
        seed=run.seed,
        ppl=perplexity(columns),
        ce=mean(columns["ce"]),
        coordinate=coordinate,
        routing=routing,
        diag_coef=options.diag_coef,
        diag_z=deployed.diag_z,
        p_z_999=deployed.p_z_999,
        a_p_99=deployed.a_p_99,
        mu_abs_99=deployed.mu_abs_99,
        training=training,
        gradients=gradients,
        tokens_consumed=consumed,
        tokens_available=available,
        reuse=None if available is None else consumed / available,
        valid_predictions=len(columns["ce"]),
        valid_nonfinite=nonfinite_tokens(columns),
        heads=heads,
        validation_blocks=block_values(columns, measurement, blocks),
        reasons=reasons,
    ).finite()


def _gradients(
    checkpoint: Checkpoint, objective: Objective, measurement: Measurement, blocks: Blocks, count: int
) -> tuple[RunGradients, dict[str, str]]:
    """The auxiliary gradient of the method and the diagnostic Z in both coordinates as in an audit, and why one is None."""
    if not count:
        reason = "gradient_blocks = 0"
    elif not bool(measurement.head.weight_VD.detach().isfinite().all()):
        reason = "the weights are not finite"
    elif checkpoint.custom is not None and not has_graph(checkpoint, measurement.head, blocks.inputs(0, 1)[0]):
        reason = "`hidden_of` returns hidden states without a graph (torch.no_grad or detach)"
    else:
        try:
            return _measured_gradients(checkpoint, objective, measurement, blocks, min(count, blocks.count))
        except Exception as error:
            if checkpoint.custom is None:
                raise
            # A finished run is not lost because its model cannot be taken apart.
            reason = f"the backward pass of the model fails ({type(error).__name__}: {first_line(error)})"
    none = RunGradients(r_aux=None, c_aux=None, tied_paths=None, gradient=None, diagnostic_tied_paths=None)
    return none, dict.fromkeys(("r_aux", "c_aux", "tied_paths", "gradient"), reason)


def _measured_gradients(
    checkpoint: Checkpoint, objective: Objective, measurement: Measurement, blocks: Blocks, count: int
) -> tuple[RunGradients, dict[str, str]]:
    auxiliary, paths = GradientNumbers(r_z=0.0), None
    reasons: dict[str, str] = {}
    if objective.active:
        products = objective_gradients(checkpoint, measurement, blocks, count, {"aux": objective})
        auxiliary, paths = products.against_ce("aux"), products.paths("aux")
        if paths is None:
            reasons["tied_paths"] = NO_INPUT_PATH
    else:
        reasons["c_aux"] = reasons["tied_paths"] = "this method has no auxiliary gradient"
    found, diagnostic_paths, _ = diagnostic_gradients(checkpoint, measurement, blocks, count)
    diagnostic = DiagnosticGradient(
        coef=measurement.coef, blocks=count, raw=found.raw, centered=found.centered, whole_model=found.whole_model
    )
    numbers = RunGradients(
        r_aux=auxiliary.r_z,
        c_aux=auxiliary.c_z,
        tied_paths=paths,
        gradient=diagnostic,
        diagnostic_tied_paths=diagnostic_paths or None,
    )
    return numbers, reasons
