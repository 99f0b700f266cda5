"""metrics.json of a run of `zloss train`: the trained model on the validation blocks, and the endpoints of its steps.

Evaluation is in fp32 whatever the training precision.
"""

from __future__ import annotations

from torch import Tensor

from zloss.console import Progress
from zloss.distributed import Job
from zloss.measure.measurement import measurement_of
from zloss.models.checkpoint import Checkpoint
from zloss.models.output_head import HiddenStates, find_head, hidden_states
from zloss.results.run_metrics import RunMetrics
from zloss.results.step_record import StepRecord
from zloss.results.train_config import TrainConfig
from zloss.train.data.blocks import TrainData
from zloss.train.folder.measured_run import MeasuredRun, assembled_metrics, run_gradients, validate
from zloss.train.moe.loss import load_balancing, routing_record
from zloss.train.moe.routing import RoutingTap
from zloss.train.moe.telemetry import ValidationRouting
from zloss.train.step.objective import run_objective


def run_metrics(
    config: TrainConfig,
    checkpoint: Checkpoint,
    data: TrainData,
    records: list[StepRecord],
    progress: Progress,
    job: Job | None = None,
) -> RunMetrics | None:
    """Everything of metrics.json; a number that does not exist is None with its reason.

    The ranks of a job share the pass over the validation blocks. The first one has the metrics, the others None.
    """
    job = job or Job()
    checkpoint.model.eval()
    run = measured_run(config, data)
    measurement = measurement_of(find_head(checkpoint), coef=config.diag_coef, gain_beta=config.gain_beta)
    routing = None if config.moe is None else ValidationRouting(config.moe)
    with hidden_states(checkpoint, measurement.head) as hidden_of:
        if routing is not None:
            hidden_of = _with_routing(hidden_of, checkpoint, data, config, routing)
        validated = validate(measurement, data.valid, hidden_of, progress, job)
    if routing is not None and job.ranks > 1:
        routing.join(job)
    if not job.first:
        return None
    return assembled_metrics(
        run,
        measurement,
        validated,
        records,
        run_gradients(run, checkpoint, measurement, data.valid),
        None if routing is None else routing.metrics(config.tokens_per_step),
    )


def measured_run(config: TrainConfig, data: TrainData) -> MeasuredRun:
    """What its numbers depend on."""
    return MeasuredRun(
        method=config.method,
        coef=config.coef,
        seed=config.seed,
        objective=run_objective(config),
        clip=config.clip,
        tokens_consumed=config.steps * config.tokens_per_step,
        tokens_available=data.available,
        diag_coef=config.diag_coef,
        gradient_blocks=config.gradient_blocks,
        thresholds=config.thresholds,
        spike=config.spike,
        adam_every=config.adam_every,
    )


def _with_routing(
    hidden_of: HiddenStates,
    checkpoint: Checkpoint,
    data: TrainData,
    config: TrainConfig,
    routing: ValidationRouting,
) -> HiddenStates:
    """The same hidden states; the routing of each forward pass goes to `routing`."""
    moe = config.moe
    assert moe is not None
    tap = RoutingTap(checkpoint.model, data.valid.counted)

    def run(inputs_BN: Tensor) -> Tensor:
        with tap.listening():
            hidden_BND = hidden_of(inputs_BN)
        taken = tap.take(inputs_BN)
        record = routing_record(taken, moe, config.tokens_per_step, tap.weights(moe.experts))
        routing.update(taken, record, load_balancing(taken, moe))
        return hidden_BND

    return run
