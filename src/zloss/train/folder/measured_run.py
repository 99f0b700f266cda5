"""metrics.json of any run: a trained model on validation blocks, and the endpoints of its steps.

`heads.raw` and `heads.centered` are as in an audit, for every method; the flat keys are those of the coordinate that the
method deploys. Nothing here depends on time or machine, nor on the loop that trained the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from zloss.console import Progress
from zloss.distributed import Job
from zloss.measure.auxiliary_gradient import auxiliary_gradient
from zloss.measure.block_values import BlockValues
from zloss.measure.diagnostic_batch import DiagnosticBatch
from zloss.measure.diagnostic_gradients import diagnostic_gradients
from zloss.measure.measurement import Measurement
from zloss.measure.tails import Tails
from zloss.measure.token_pass import TokenPass
from zloss.models.checkpoint import Checkpoint
from zloss.models.output_head import HiddenStates
from zloss.objectives import Objective
from zloss.optimizer.endpoints import SPIKE, THRESHOLDS, endpoints
from zloss.results.audit import Heads
from zloss.results.comparison import FEW_STEPS
from zloss.results.gradient_numbers import NO_INPUT_PATH
from zloss.results.routing_metrics import RoutingMetrics
from zloss.results.run_metrics import DiagnosticGradient, RunGradients, RunMetrics
from zloss.results.step_record import StepRecord
from zloss.text import Blocks

EVALUATION_BLOCKS = 4
"""Blocks per forward pass; the numbers do not depend on it beyond rounding."""
NO_GRADIENTS = RunGradients(r_aux=None, c_aux=None, tied_paths=None, gradient=None, diagnostic_tied_paths=None)
GRADIENT_KEYS = ("r_aux", "c_aux", "tied_paths", "gradient")


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """What the numbers of metrics.json depend on beside the model, the validation blocks and the step records."""

    method: str
    coef: float
    seed: int
    objective: Objective
    clip: float | None
    tokens_consumed: int
    tokens_available: int | None
    """None where the loop did not say it."""
    diag_coef: float = 1e-4
    gradient_blocks: int = 8
    thresholds: tuple[float, ...] = THRESHOLDS
    spike: float = SPIKE
    adam_every: int | None = 50


@dataclass(frozen=True)
class Validated:
    """One pass over the validation blocks."""

    tails: Tails
    by_block: BlockValues


def validate(
    measurement: Measurement, blocks: Blocks, hidden_of: HiddenStates, progress: Progress, job: Job | None = None
) -> Validated:
    """The pass over the validation text, over all tokens and block by block.

    Of several ranks each passes over its own blocks; the first one has those of all afterwards.
    """
    job = job or Job()
    tails, by_block = Tails(measurement), BlockValues(blocks.count, blocks.size)
    own = job.local_range(blocks.count, EVALUATION_BLOCKS)
    with progress.step("validation", len(own) * blocks.size) as step:
        shown = own.start

        def go_on(finished: int) -> bool:
            nonlocal shown
            step.advance((finished - shown) * blocks.size)
            shown = finished
            return True

        token_pass = TokenPass(measurement, blocks, hidden_of, EVALUATION_BLOCKS)
        token_pass.run(tails, go_on, finished=own.start, end=own.stop, by_block=by_block)
    if job.ranks > 1:
        tails.join(job.gather)
        for state in job.gather(by_block.state())[1:]:
            by_block.merge(state)
    return Validated(tails, by_block)


@dataclass
class GradientSection:
    """The gradient keys of metrics.json, and why one of them is None."""

    numbers: RunGradients
    reasons: dict[str, str] = field(default_factory=dict)


def no_gradients(reason: str) -> GradientSection:
    """The section where no gradient was taken."""
    return GradientSection(NO_GRADIENTS, dict.fromkeys(GRADIENT_KEYS, reason))


def run_gradients(
    run: MeasuredRun, checkpoint: Checkpoint, measurement: Measurement, blocks: Blocks
) -> GradientSection:
    """The auxiliary gradient of the method, and the diagnostic Z in both coordinates as in an audit."""
    count = min(run.gradient_blocks, blocks.count)
    if not count:
        return no_gradients("gradient_blocks = 0")
    if not bool(measurement.head.weight_VD.detach().isfinite().all()):
        return no_gradients("the weights are not finite")
    batch = DiagnosticBatch.of_blocks(blocks, count, measurement.head.weight_VD.device)
    own = auxiliary_gradient(checkpoint, measurement, run.objective, batch)
    found = diagnostic_gradients(checkpoint, measurement, batch)
    reasons: dict[str, str] = {}
    if not run.objective.active:
        reasons["c_aux"] = reasons["tied_paths"] = "this method has no auxiliary gradient"
    elif own.paths is None:
        reasons["tied_paths"] = NO_INPUT_PATH
    diagnostic = DiagnosticGradient(
        coef=run.diag_coef, blocks=count, raw=found.raw, centered=found.centered, whole_model=found.whole_model
    )
    numbers = RunGradients(
        r_aux=own.r_aux,
        c_aux=own.c_aux,
        tied_paths=own.paths,
        gradient=diagnostic,
        diagnostic_tied_paths=dict(found.paths) or None,
    )
    return GradientSection(numbers, reasons)


def assembled_metrics(
    run: MeasuredRun,
    measurement: Measurement,
    validated: Validated,
    records: Sequence[StepRecord],
    gradients: GradientSection,
    routing: RoutingMetrics | None = None,
) -> RunMetrics:
    """Everything of metrics.json; a number that does not exist is None with its reason."""
    tails, coordinate, steps = validated.tails, run.objective.coordinate, len(records)
    heads = Heads(tails.numbers("raw"), tails.numbers("centered"))
    reasons: dict[str, str] = {}
    if measurement.lacks_centered is not None:
        reasons["heads.centered"] = measurement.lacks_centered
    reasons |= gradients.reasons
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
        ppl=tails.perplexity(),
        ce=tails.cross_entropy,
        coordinate=coordinate,
        routing=routing,
        diag_coef=run.diag_coef,
        diag_z=deployed.diag_z,
        p_z_999=deployed.p_z_999,
        a_p_99=deployed.a_p_99,
        mu_abs_99=deployed.mu_abs_99,
        training=training,
        gradients=gradients.numbers,
        tokens_consumed=run.tokens_consumed,
        tokens_available=run.tokens_available,
        reuse=None if run.tokens_available is None else run.tokens_consumed / run.tokens_available,
        valid_predictions=tails.count,
        valid_nonfinite=tails.nonfinite(),
        heads=heads,
        validation_blocks=validated.by_block.record(),
        reasons=reasons,
    ).finite()
