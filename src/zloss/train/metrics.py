"""metrics.json of a run: the trained model on the validation blocks, and the endpoints of its steps.

`heads.raw` and `heads.centered` are as in an audit, for every method; the flat keys are those of the coordinate that the
method deploys. Evaluation is in fp32 whatever the training precision, and nothing here depends on time or machine.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from zloss.console.progress import Progress
from zloss.measure.auxiliary_gradient import auxiliary_gradient
from zloss.measure.gradient import gradient_findings
from zloss.measure.measurement import Measurement, measurement_of
from zloss.measure.tails import Tails
from zloss.measure.token_table import token_tables
from zloss.models.checkpoint import Checkpoint
from zloss.models.output_head import find_head, hidden_states
from zloss.optimizer.endpoints import endpoints
from zloss.results.audit import NO_INPUT_PATH
from zloss.results.record import to_plain
from zloss.results.step_record import StepRecord
from zloss.results.train_config import TrainConfig
from zloss.streaming import Moments
from zloss.train.data import TrainData
from zloss.train.moe.loss import load_balancing, routing_record
from zloss.train.moe.routing import RoutingTap
from zloss.train.moe.telemetry import ValidationRouting
from zloss.train.objective import run_objective

SCHEMA = "zloss.run/1"
DEPLOYED = ("diag_z", "p_z_999", "a_p_99", "mu_abs_99")
EVALUATION_BLOCKS = 4
"""Blocks per forward pass; the numbers do not depend on it beyond rounding."""


def run_metrics(
    config: TrainConfig, checkpoint: Checkpoint, data: TrainData, records: list[StepRecord], progress: Progress
) -> dict[str, Any]:
    """Everything of metrics.json; a number that does not exist is null with its reason."""
    checkpoint.model.eval()
    objective = run_objective(config)
    head = find_head(checkpoint)
    measurement = measurement_of(head, coef=config.diag_coef)
    routing = None if config.moe is None else ValidationRouting(config.moe)
    tails = _validate(checkpoint, measurement, data, config, progress, routing)
    reasons: dict[str, str] = {}
    heads = {side: to_plain(tails.numbers(side, config.diag_coef)) for side in ("raw", "centered")}
    for side, spectrum in zip(("raw", "centered"), measurement.spectra, strict=True):
        if side in tails.sides:
            heads[side] |= {"sigma_1": spectrum.sigma_1, "e_1": spectrum.share(1), "e_16": spectrum.share(16)}
    if "centered" not in tails.sides:
        reasons["heads.centered"] = measurement.lacks_centered or ""
    ce = tails.all["ce"]
    assert isinstance(ce, Moments)
    nonfinite = tails.nonfinite()
    consumed = config.steps * config.tokens_per_step
    metrics: dict[str, Any] = {
        "schema": SCHEMA,
        "method": config.method,
        "coef": config.coef,
        "seed": config.seed,
        "ppl": tails.perplexity(),
        "ce": ce.mean,
        "coordinate": objective.coordinate,
        **({} if routing is None else routing.numbers(config.tokens_per_step)),
        "diag_coef": config.diag_coef,
        **{name: heads[objective.coordinate][name] for name in DEPLOYED},
        **endpoints(records, clip=config.clip, thresholds=config.thresholds, spike=config.spike),
        **_gradients(config, checkpoint, measurement, data, reasons),
        "tokens_consumed": consumed,
        "tokens_available": data.available,
        "reuse": consumed / data.available,
        "valid_predictions": tails.count,
        "valid_nonfinite": {"nan": nonfinite.nan, "inf": nonfinite.inf},
        "heads": heads,
    }
    if not metrics["adam_samples"]:
        reasons["adam"] = f"the state is sampled every {config.adam_every} steps, and the run has {config.steps}"
    if config.steps < 100:
        reasons["p99"] = f"over {config.steps} steps a p99 is little else than the maximum: read the max"

    def note(path: str, value: float) -> None:
        reasons.setdefault(path, f"it is {value}")

    found: dict[str, Any] = to_plain(metrics, on_nonfinite=note)
    return found | {"reasons": reasons}


@torch.no_grad()
def _validate(
    checkpoint: Checkpoint,
    measurement: Measurement,
    data: TrainData,
    config: TrainConfig,
    progress: Progress,
    routing: ValidationRouting | None,
) -> Tails:
    head, blocks = measurement.head, data.valid
    tap = None if routing is None else RoutingTap(checkpoint.model, blocks.counted)
    infinite = head.bias_V is not None and bool(head.bias_V.isneginf().any())
    tails = Tails(centered=head.softcap is None and not infinite, plane=False, beta=config.gain_beta, seed=0)
    with hidden_states(checkpoint, head) as hidden_of, progress.step("validation", blocks.predictions) as step:
        for start in range(0, blocks.count, EVALUATION_BLOCKS):
            stop = min(start + EVALUATION_BLOCKS, blocks.count)
            inputs, targets = _on_device(head.weight_VD, blocks.inputs(start, stop), blocks.targets(start, stop))
            with nullcontext() if tap is None else tap.listening():
                hidden = blocks.counted(hidden_of(inputs))
            if routing is not None and tap is not None and config.moe is not None:
                taken = tap.take(inputs)
                record = routing_record(taken, config.moe, config.tokens_per_step, tap.weights(config.moe.experts))
                routing.update(taken, record, load_balancing(taken, config.moe))
            flat_TD = hidden.reshape(-1, hidden.shape[-1])
            for table in token_tables(measurement, flat_TD, targets.reshape(-1), None):
                tails.update(table, start * blocks.size + table.tokens.start)
            step.advance((stop - start) * blocks.size)
    return tails


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
    inputs, targets = _on_device(measurement.head.weight_VD, blocks.inputs(0, count), blocks.targets(0, count))
    flat = targets.reshape(-1)
    own = auxiliary_gradient(checkpoint, measurement, objective, inputs, flat, blocks.counted)
    found = gradient_findings(checkpoint, measurement, inputs, flat, blocks.counted)
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
        "diagnostic_tied_paths": {side: to_plain(path) for side, path in found.paths.items()} or None,
    }


def _on_device(like: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor.to(like.device) for tensor in tensors)
