"""The gradients of any objectives beside that of cross-entropy, on one diagnostic batch.

R = ‖g‖/‖g_CE‖ and C = cos(g, g_CE) at the output-head tensor, over the whole model where asked for, and the two paths of a
tied table. The logit sources are those of `Objective.source`. No gradient of the model is kept: body gradients are reduced
to numbers as they appear, and head gradients are formed a block of rows at a time.

Scaling: gradients are mean-reduced over the predictions of the batch, coefficients included.
Axes: T tokens of the batch, V vocabulary, D width.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import chain

import torch
from torch import nn

from zloss.console import Progress, Silent
from zloss.measure.body_gradients import all_parameters_on, body_gradients
from zloss.measure.diagnostic_batch import DiagnosticBatch, MadeForward
from zloss.measure.gradient_products import AgainstCe, ObjectiveGradient
from zloss.measure.gradient_seeds import CE, gradient_seeds
from zloss.measure.head_gradient_products import InputPath, head_gradient_products
from zloss.measure.hidden_source import shaped_tokens
from zloss.measure.layer_cuts import cut_forward
from zloss.measure.measurement import Measurement
from zloss.measure.recomputed_layers import decoder_layers
from zloss.models.checkpoint import Checkpoint
from zloss.models.output_head import hidden_states
from zloss.objectives import Objective


def objective_gradients(
    checkpoint: Checkpoint,
    measurement: Measurement,
    batch: DiagnosticBatch,
    objectives: Mapping[str, Objective],
    *,
    whole_model: Collection[str] = (),
    progress: Progress | None = None,
) -> dict[str, ObjectiveGradient]:
    """The gradient of every objective by name; of those in `whole_model` also over all parameters."""
    head, model = measurement.head, checkpoint.model
    used_rows_U = torch.unique(batch.inputs_BN)
    # Below an untied head only the whole-model numbers need a way back.
    below = (CE, *objectives) if head.tied else (CE, *whole_model) if whole_model else ()
    pairs = [(CE, name) for name in whole_model]
    with (
        (progress or Silent()).step("gradients", len(decoder_layers(model)) + 1, "layers") as step,
        all_parameters_on(model),
    ):
        with torch.enable_grad(), hidden_states(checkpoint, head) as hidden_of:
            made = [made or MadeForward(cut_forward(model, hidden_of, ids_BN)) for ids_BN, made in batch.forwards()]
            forwards = [(each.cut, batch.flat(each.cut.hidden_BND)) for each in made]
        problem = measurement.problem(torch.cat([hidden_TD.detach() for _, hidden_TD in forwards]), batch.targets_T)
        # Chunk by chunk of each forward pass, as the pass over the text has them, so that a resumed audit has equal bits.
        parts = [measurement.problem(*part) for part in batch.parts([hidden_TD.detach() for _, hidden_TD in forwards])]
        tokens = [each.tokens or shaped_tokens(part) for each, part in zip(made, parts, strict=True)]
        seeds, log_z_T = gradient_seeds(measurement, problem, chain.from_iterable(tokens), objectives)
        body = body_gradients(
            model,
            head,
            forwards if below else (),
            {name: seeds[name].grad_hidden_TD for name in below},
            pairs,
            used_rows_U,
            after_layer=lambda: step.advance(1),
        )
        entering = InputPath(used_rows_U, body.table_UD) if head.tied else None
        products = head_gradient_products(problem, log_z_T, seeds, entering)
        step.advance(1)

    def over_all_parameters(name: str) -> AgainstCe | None:
        if name not in whole_model:
            return None
        whole = products.weight[name] + AgainstCe(body.squares[name], body.squares[CE], body.dots[CE, name])
        # A bias that is a buffer is no parameter of the model.
        return whole + products.bias[name] if isinstance(head.bias_V, nn.Parameter) else whole

    return {
        name: ObjectiveGradient(products.weight[name], over_all_parameters(name), products.paths.get(name))
        for name in objectives
    }
