"""metrics.json of a run: the trained model on the validation blocks, and the endpoints of its steps.

`heads.raw` and `heads.centered` are as in an audit, for every method; the flat keys are those of the coordinate that the
method deploys. Evaluation is in fp32 whatever the training precision. Nothing here depends on time or machine, nor on the
loop that trained the model: `zloss train` and `zloss.record_run` share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from zloss.console import Progress
from zloss.errors import first_line
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
from zloss.models.output_head import find_head, has_graph, hidden_states
from zloss.objectives import Objective
from zloss.optimizer.endpoints import endpoints
from zloss.results.audit import NO_INPUT_PATH, DiagnosticGradient, GradientNumbers, Heads
from zloss.results.comparison import FEW_STEPS
from zloss.results.run_config import MU_LOSS, RecordedRun, TrainConfig
from zloss.results.run_metrics import RunGradients, RunMetrics
from zloss.results.steps import StepRecord
from zloss.text import Blocks
from zloss.train.moe import RouterTerms, RoutingTap, router_terms, routing_metrics

if TYPE_CHECKING:
    from zloss.train.record import RecordOptions

EVALUATION_BLOCKS = 4
"""Blocks per forward pass; the numbers do not depend on it beyond rounding."""


def run_metrics(
    run: TrainConfig | RecordedRun,
    options: TrainConfig | RecordOptions,
    objective: Objective,
    checkpoint: Checkpoint,
    blocks: Blocks,
    records: Sequence[StepRecord],
    *,
    tokens: tuple[int, int | None],
    progress: Progress,
    job: Job,
) -> RunMetrics | None:
    """Everything of metrics.json; a missing number is None with its reason.

    `options` say what is measured on the validation `blocks`. `tokens`: those of all steps, and those of the training text
    if they are known. The ranks of a job share the pass over the validation blocks. The first one has the metrics, the
    others None.
    """
    checkpoint.model.eval()
    head = find_head(checkpoint)
    moe, step_tokens = (run.moe, run.tokens_per_step) if isinstance(run, TrainConfig) else (None, 0)
    measurement = measurement_of(head, coef=options.diag_coef, gain_beta=run.gain_beta)
    tap = None if moe is None else RoutingTap(checkpoint.model, blocks.counted)
    share = job.local_range(blocks.count, EVALUATION_BLOCKS)
    passes: list[RouterTerms] = []
    parts: list[Columns] = []
    with hidden_states(checkpoint, head) as hidden_of, progress.step("validation", len(share) * blocks.size) as step:

        def observed(inputs_BN: Tensor) -> Tensor:
            """The hidden states; the routing of the forward pass is kept, if there is any."""
            if moe is None or tap is None:
                return hidden_of(inputs_BN)
            hidden_BND, routing = tap.observe(lambda: hidden_of(inputs_BN), len(inputs_BN))
            passes.append(router_terms(routing, moe, step_tokens, tap.weights(moe.experts))[2])
            return hidden_BND

        for _, part in token_batches(measurement, blocks, observed, EVALUATION_BLOCKS, share):
            parts.append(part)
            step.advance(len(part["ce"]))
    columns = concatenated([part for rank in job.all_gather(parts) for part in rank])
    routed = [terms for rank in job.all_gather(passes) for terms in rank]
    if not job.first:
        return None
    coordinate, steps, (consumed, available) = objective.coordinate, len(records), tokens
    heads = Heads(head_numbers(columns, measurement, "raw"), head_numbers(columns, measurement, "centered"))
    reasons: dict[str, str] = {}
    if measurement.lacks_centered is not None:
        reasons["heads.centered"] = measurement.lacks_centered
    gradients, missing = _gradients(checkpoint, objective, measurement, blocks, options.gradient_blocks)
    reasons |= missing
    if run.method == MU_LOSS:
        gradients = replace(gradients, r_aux=None)
        reasons["r_aux"] = reasons["c_aux"] = reasons["tied_paths"] = "the μ-loss is not a function of tokens"
    deployed = heads.raw if coordinate == "raw" else heads.centered
    training = endpoints(records, clip=run.clip, thresholds=options.thresholds, spike=options.spike)
    if not training.adam_samples:
        every = f"every {options.adam_every} steps" if options.adam_every else "never"
        reasons["adam"] = f"the state is sampled {every}, and the run has {steps}"
    if steps < FEW_STEPS:
        reasons["p99"] = f"over {steps} steps a p99 is little more than the maximum: read the max"
    if available is None:
        reasons["tokens_available"] = reasons["reuse"] = "the loop did not report how many training tokens there are"
    return RunMetrics(
        method=run.method,
        coef=run.coef,
        seed=run.seed,
        ppl=perplexity(columns),
        ce=mean(columns["ce"]),
        coordinate=coordinate,
        routing=None if moe is None else routing_metrics(routed, moe, step_tokens),
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
    reason = None
    if not count:
        reason = "gradient_blocks = 0"
    elif not bool(measurement.head.weight_VD.detach().isfinite().all()):
        reason = "the weights are not finite"
    elif checkpoint.custom is not None and not has_graph(checkpoint, measurement.head, blocks.inputs(0, 1)[0]):
        reason = "`hidden_of` returns hidden states without a graph (torch.no_grad or detach)"
    if reason is not None:
        return _no_gradients(reason)
    count, auxiliary, paths = min(count, blocks.count), GradientNumbers(r_z=0.0), None
    reasons = dict.fromkeys(("c_aux", "tied_paths"), "this method has no auxiliary gradient")
    try:
        if objective.active:
            products = objective_gradients(checkpoint, measurement, blocks, count, {"aux": objective})
            auxiliary, paths = products.against_ce("aux"), products.paths("aux")
            reasons = {} if paths is not None else {"tied_paths": NO_INPUT_PATH}
        found, diagnostic_paths, _ = diagnostic_gradients(checkpoint, measurement, blocks, count)
    except Exception as error:
        if checkpoint.custom is None:
            raise
        # A finished run must not be lost because its model cannot be differentiated.
        return _no_gradients(f"the backward pass of the model fails ({type(error).__name__}: {first_line(error)})")
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


def _no_gradients(reason: str) -> tuple[RunGradients, dict[str, str]]:
    none = RunGradients(r_aux=None, c_aux=None, tied_paths=None, gradient=None, diagnostic_tied_paths=None)
    return none, dict.fromkeys(("r_aux", "c_aux", "tied_paths", "gradient"), reason)
