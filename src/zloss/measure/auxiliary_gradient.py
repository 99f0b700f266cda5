"""R_aux, C_aux and the two paths of a tied table for the objective that was trained, on a diagnostic batch.

R_aux = ‖g_aux‖/‖g_CE‖ and C_aux = cos(g_aux, g_CE) at the output-head tensor (a tied table with both paths), gradients
mean-reduced over the batch. The source comes from the objective itself, so any objective has these numbers.

Axes: T tokens, V vocabulary, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from zloss.measure.measurement import Measurement
from zloss.measure.recomputed_layers import recomputed_layers
from zloss.measure.token_table import shaped_chunks
from zloss.models.checkpoint import Checkpoint
from zloss.models.output_head import hidden_states
from zloss.results.audit import PathNumbers
from zloss.source.objective import Objective
from zloss.transport.backends.head_products import HeadProducts
from zloss.transport.head_gradient import SourceCoefficients, head_gradient_rows
from zloss.transport.head_problem import HeadProblem


@dataclass(frozen=True)
class AuxiliaryGradient:
    """Scaling: mean over the predictions of the batch, the coefficient included."""

    r_aux: float | None
    c_aux: float | None
    paths: PathNumbers | None
    """None for an untied head, or where the objective is off."""


def auxiliary_gradient(
    checkpoint: Checkpoint,
    measurement: Measurement,
    objective: Objective,
    inputs_BN: Tensor,
    targets_T: Tensor,
    counted: Callable[[Tensor], Tensor],
) -> AuxiliaryGradient:
    """The numbers of one batch; an objective that is off has R_aux 0 and no direction."""
    if not objective.active:
        return AuxiliaryGradient(0.0, None, None)
    head = measurement.head
    with recomputed_layers(checkpoint.model), torch.enable_grad(), hidden_states(checkpoint, head) as hidden_of:
        hidden = counted(hidden_of(inputs_BN))
        flat_TD = hidden.reshape(-1, hidden.shape[-1])
        problem = measurement.problem(flat_TD.detach(), targets_T)
        sources, seeds, log_z_T = _seeds(measurement, problem, objective)
        entering: dict[str, Tensor] = {}
        if head.tied:
            for name, seed_TD in seeds.items():
                (entering[name],) = torch.autograd.grad(
                    flat_TD, head.weight_VD, seed_TD.to(flat_TD.dtype), retain_graph=name != "aux"
                )
    return _compare(problem, log_z_T, sources, entering)


@torch.no_grad()
def _seeds(
    measurement: Measurement, problem: HeadProblem, objective: Objective
) -> tuple[dict[str, SourceCoefficients], dict[str, Tensor], Tensor]:
    """Logit sources of CE and of the auxiliary, the hidden gradients they transport to, and log Z."""
    scale, weight = measurement.head.logit_scale, 1.0 / max(1, problem.hidden_TD.shape[0])
    rows = HeadProducts(problem.weight_VD[: problem.vocab], problem.dtype, problem.rounding)
    parts: dict[str, list[Tensor]] = {name: [] for name in ("log_z", "one", "p", "uniform", "ce", "aux")}
    for chunk, shape_CD in shaped_chunks(problem):
        source = objective.source(chunk.stats)
        p_C = weight * source.along_p
        uniform_C = torch.zeros_like(p_C) if source.along_uniform is None else weight * source.along_uniform
        slope_C = 1.0 if chunk.target_slope_C is None else chunk.target_slope_C.unsqueeze(1)
        parts["log_z"].append(chunk.stats.log_z)
        parts["one"].append(torch.full_like(p_C, weight))
        parts["p"].append(p_C)
        parts["uniform"].append(uniform_C)
        parts["ce"].append(weight * (shape_CD - scale * slope_C * rows.select(chunk.index_C)))
        mean_row_D = measurement.mean_row_D.to(shape_CD)
        parts["aux"].append(p_C.unsqueeze(1) * shape_CD - uniform_C.unsqueeze(1) * mean_row_D)
    whole = {name: torch.cat(values) for name, values in parts.items()}
    sources = {
        "ce": SourceCoefficients(whole["one"], whole["one"]),
        "aux": SourceCoefficients(whole["p"], None, whole["uniform"]),
    }
    return sources, {"ce": whole["ce"], "aux": whole["aux"]}, whole["log_z"]


def _compare(
    problem: HeadProblem, log_z_T: Tensor, sources: dict[str, SourceCoefficients], entering: dict[str, Tensor]
) -> AuxiliaryGradient:
    products = dict.fromkeys(("aux·aux", "ce·ce", "aux·ce", "out·out", "in·in", "out·in"), 0.0)

    def add(name: str, a: Tensor, b: Tensor) -> None:
        products[name] += float((a.double() * b.double()).sum())

    for rows, output in head_gradient_rows(problem, log_z_T, sources):
        whole = {name: grad + entering[name][rows].to(grad) for name, grad in output.items()} if entering else output
        add("aux·aux", whole["aux"], whole["aux"])
        add("ce·ce", whole["ce"], whole["ce"])
        add("aux·ce", whole["aux"], whole["ce"])
        if entering:
            path = entering["aux"][rows].to(output["aux"])
            add("out·out", output["aux"], output["aux"])
            add("in·in", path, path)
            add("out·in", output["aux"], path)
    aux, ce = products["aux·aux"] ** 0.5, products["ce·ce"] ** 0.5
    out, into = products["out·out"] ** 0.5, products["in·in"] ** 0.5
    return AuxiliaryGradient(
        r_aux=aux / ce if ce > 0 else None,
        c_aux=products["aux·ce"] / (aux * ce) if aux * ce > 0 else None,
        paths=PathNumbers(out, into, products["out·in"] / (out * into) if out * into > 0 else None)
        if entering
        else None,
    )
