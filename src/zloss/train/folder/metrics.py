"""metrics.json of a run: the trained model on the validation blocks, and the endpoints of its steps.

`heads.raw` and `heads.centered` are as in an audit, for every method; the flat keys are those of the coordinate that the
method deploys. Evaluation is in fp32 whatever the training precision, and nothing here depends on time or machine.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from zloss.console.progress import Progress
from zloss.measure.auxiliary_gradient import auxiliary_gradient
from zloss.measure.block_values import BlockValues
from zloss.measure.diagnostic_batch import DiagnosticBatch
from zloss.measure.diagnostic_gradients import diagnostic_gradients
from zloss.measure.measurement import Measurement, measurement_of
from zloss.measure.tails import Tails
from zloss.measure.token_pass import TokenPass
from zloss.models.checkpoint import Checkpoint
from zloss.models.hidden_states import HiddenStates, hidden_states
from zloss.models.output_head import find_head
from zloss.optimizer.endpoints import endpoints
from zloss.results.audit import NO_INPUT_PATH, Heads
from zloss.results.record import from_plain, to_plain
from zloss.results.run_metrics import RunGradients, RunMetrics
from zloss.results.step_record import StepRecord
from zloss.results.train_config import TrainConfig
from zloss.train.data.blocks import TrainData
from zloss.train.moe.loss import load_balancing, routing_record
from zloss.train.moe.routing import RoutingTap
from zloss.train.moe.telemetry import ValidationRouting
from zloss.train.step.objective import run_objective

FEW_STEPS = 100
"""Steps below which a p99 over steps is close to the maximum."""
EVALUATION_BLOCKS = 4
"""Blocks per forward pass; the numbers do not depend on it beyond rounding."""


def run_metrics(
    config: TrainConfig, checkpoint: Checkpoint, data: TrainData, records: list[StepRecord], progress: Progress
) -> RunMetrics:
    """Everything of metrics.json; a number that does not exist is None with its reason."""
    checkpoint.model.eval()
    coordinate = run_objective(config).coordinate
    measurement = measurement_of(find_head(checkpoint), coef=config.diag_coef, gain_beta=config.gain_beta)
    routing = None if config.moe is None else ValidationRouting(config.moe)
    tails, by_block = _validate(checkpoint, measurement, data, config, progress, routing)
    reasons: dict[str, str] = {}
    heads = Heads(tails.numbers("raw"), tails.numbers("centered"))
    if measurement.lacks_centered is not None:
        reasons["heads.centered"] = measurement.lacks_centered
    deployed = heads.raw if coordinate == "raw" else heads.centered
    gradients = from_plain(RunGradients, _gradients(config, checkpoint, measurement, data, reasons))
    training = endpoints(records, clip=config.clip, thresholds=config.thresholds, spike=config.spike)
    if not training.adam_samples:
        reasons["adam"] = f"the state is sampled every {config.adam_every} steps, and the run has {config.steps}"
    if config.steps < FEW_STEPS:
        reasons["p99"] = f"over {config.steps} steps a p99 is little else than the maximum: read the max"
    consumed = config.steps * config.tokens_per_step
    return RunMetrics(
        method=config.method,
        coef=config.coef,
        seed=config.seed,
        ppl=tails.perplexity(),
        ce=tails.cross_entropy,
        coordinate=coordinate,
        routing=None if routing is None else routing.metrics(config.tokens_per_step),
        diag_coef=config.diag_coef,
        diag_z=deployed.diag_z,
        p_z_999=deployed.p_z_999,
        a_p_99=deployed.a_p_99,
        mu_abs_99=deployed.mu_abs_99,
        training=training,
        gradients=gradients,
        tokens_consumed=consumed,
        tokens_available=data.available,
        reuse=consumed / data.available,
        valid_predictions=tails.count,
        valid_nonfinite=tails.nonfinite(),
        heads=heads,
        validation_blocks=by_block.record(),
        reasons=reasons,
    ).finite()


def _validate(
    checkpoint: Checkpoint,
    measurement: Measurement,
    data: TrainData,
    config: TrainConfig,
    progress: Progress,
    routing: ValidationRouting | None,
) -> tuple[Tails, BlockValues]:
    """The pass over the validation text, over all tokens and block by block.

    `routing` takes what the routers decide on the way.
    """
    blocks, tails = data.valid, Tails(measurement)
    by_block = BlockValues(blocks.count, blocks.size)
    with (
        hidden_states(checkpoint, measurement.head) as hidden_of,
        progress.step("validation", blocks.predictions) as step,
    ):
        if routing is not None:
            hidden_of = _with_routing(hidden_of, checkpoint, data, config, routing)
        shown = 0

        def go_on(finished: int) -> bool:
            nonlocal shown
            step.advance((finished - shown) * blocks.size)
            shown = finished
            return True

        TokenPass(measurement, blocks, hidden_of, EVALUATION_BLOCKS).run(tails, go_on, by_block=by_block)
    return tails, by_block


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


def _gradients(
    config: TrainConfig, checkpoint: Checkpoint, measurement: Measurement, data: TrainData, reasons: dict[str, str]
) -> dict[str, Any]:
    """The auxiliary gradient of the method, and the diagnostic Z in both coordinates as in an audit."""
    blocks = data.valid
    count = min(config.gradient_blocks, blocks.count)
    objective = run_objective(config)
    empty = {"r_aux": None, "c_aux": None, "tied_paths": None, "gradient": None, "diagnostic_tied_paths": None}
    if not count:
        reasons["r_aux"] = reasons["c_aux"] = reasons["tied_paths"] = reasons["gradient"] = "gradient_blocks = 0"
        return empty
    if not bool(measurement.head.weight_VD.detach().isfinite().all()):
        reasons["r_aux"] = reasons["c_aux"] = reasons["tied_paths"] = reasons["gradient"] = "the weights are not finite"
        return empty
    batch = DiagnosticBatch.of_blocks(blocks, count, measurement.head.weight_VD.device)
    own = auxiliary_gradient(checkpoint, measurement, objective, batch)
    found = diagnostic_gradients(checkpoint, measurement, batch)
    if not objective.active:
        reasons["c_aux"] = reasons["tied_paths"] = "this method has no auxiliary gradient"
    elif own.paths is None:
        reasons["tied_paths"] = NO_INPUT_PATH
    return {
        "r_aux": own.r_aux,
        "c_aux": own.c_aux,
        "tied_paths": None if own.paths is None else to_plain(own.paths),
        "gradient": {
            "coef": config.diag_coef,
            "blocks": count,
            "raw": to_plain(found.raw),
            "centered": to_plain(found.centered),
            "whole_model": to_plain(found.whole_model),
        },
        "diagnostic_tied_paths": {coordinate: to_plain(path) for coordinate, path in found.paths.items()} or None,
    }
