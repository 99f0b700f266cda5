"""What the auxiliary loss does to parameter gradients, on a diagnostic batch: R_Z, C_Z and the two paths of a tied table.

R_Z = ‖g_Z‖/‖g_CE‖ and C_Z = cos(g_Z, g_CE) for the output-head tensor (a tied table with both paths) in raw and centered
coordinates, and for the whole model in raw ones. No gradient of the model is kept: body gradients are consumed as they
appear, and the inner product of the two body gradients comes from the norm of their sum; head gradients are formed a
block of rows at a time.

Axes: T tokens of the batch, V vocabulary, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from zloss.measure.measurement import Measurement
from zloss.measure.recomputed_layers import recomputed_layers
from zloss.measure.token_table import shaped_chunks
from zloss.models.checkpoint import Checkpoint
from zloss.models.output_head import OutputHead, hidden_states
from zloss.results.audit import GradientNumbers, PathNumbers
from zloss.transport.backends.head_products import HeadProducts
from zloss.transport.head_gradient import SourceCoefficients, head_gradient_rows
from zloss.transport.head_problem import HeadProblem

TINY = torch.finfo(torch.float64).tiny


@dataclass
class GradientFindings:
    """Ratios and cosines of the diagnostic batch; the paths only for a tied head."""

    raw: GradientNumbers
    centered: GradientNumbers
    whole_model: GradientNumbers
    paths: dict[str, PathNumbers] = field(default_factory=dict)
    norms: dict[str, float] = field(default_factory=dict)
    """Frobenius norms by name, mean-reduced: ce, z, centered_z at the head tensor, ce_model, z_model."""


@dataclass(frozen=True)
class _Seed:
    """One loss: its logit-source coefficients and the hidden gradient they transport to."""

    source: SourceCoefficients
    grad_hidden_TD: Tensor


def gradient_findings(
    checkpoint: Checkpoint,
    measurement: Measurement,
    inputs_BN: Tensor,
    targets_T: Tensor,
    counted: Callable[[Tensor], Tensor],
    progress: Callable[[], None] = lambda: None,
) -> GradientFindings:
    """All gradient numbers on one batch; `progress` is called after each of the passes over the model."""
    head, model = measurement.head, checkpoint.model
    with _all_parameters_on(model), recomputed_layers(model):
        with torch.enable_grad(), hidden_states(checkpoint, head) as hidden_of:
            hidden = counted(hidden_of(inputs_BN))
        flat_TD = hidden.reshape(-1, hidden.shape[-1])
        problem = measurement.problem(flat_TD.detach(), targets_T)
        seeds, log_z_T = _seeds(measurement, problem)
        body = _BodyGradients(model, head, torch.unique(inputs_BN))
        squares, inputs = {}, {}
        for name, seed in seeds.items():
            squares[name], inputs[name] = body.consume(flat_TD, seed.grad_hidden_TD)
            progress()
        # ⟨g_CE, g_Z⟩ from ‖g_CE + t·g_Z‖², t chosen so that both terms weigh the same and rounding stays relative.
        t = (squares["ce"] / max(squares["z"], TINY)) ** 0.5
        mixed, _ = body.consume(flat_TD, seeds["ce"].grad_hidden_TD + t * seeds["z"].grad_hidden_TD, last=True)
        progress()
    body_dot = (mixed - squares["ce"] - t * t * squares["z"]) / (2 * t) if t > 0 else 0.0
    products = _head_products(problem, log_z_T, seeds, inputs, body.rows if head.tied else None)
    progress()
    return _findings(products, squares, body_dot, head.tied)


def _seeds(measurement: Measurement, problem: HeadProblem) -> tuple[dict[str, _Seed], Tensor]:
    """CE, raw Z and (where μ exists) centered Z, mean-reduced, from one pass over the head."""
    scale, coef, c = measurement.head.logit_scale, measurement.coef, measurement.target
    weight = 1.0 / max(1, problem.hidden_TD.shape[0])
    rows = HeadProducts(problem.weight_VD[: problem.vocab], problem.dtype, problem.rounding)
    parts: dict[str, list[Tensor]] = {}
    for chunk, shape_CD in shaped_chunks(problem):
        stats = chunk.stats
        target_C = torch.full_like(stats.log_s, weight)
        slope_C = target_C if chunk.target_slope_C is None else target_C * chunk.target_slope_C
        z_C = 2 * coef * weight * (stats.log_z - c)
        record = {
            "log_z": stats.log_z,
            "target": target_C,
            "z": z_C,
            "ce_hidden": weight * shape_CD - scale * slope_C.unsqueeze(1) * rows.select(chunk.index_C),
            "z_hidden": z_C.unsqueeze(1) * shape_CD,
        }
        if stats.log_z_centered is not None:
            centered_C = 2 * coef * weight * (stats.log_z_centered - c)
            record["centered_z"] = centered_C
            record["centered_hidden"] = centered_C.unsqueeze(1) * (shape_CD - measurement.mean_row_D.to(shape_CD))
        for name, value in record.items():
            parts.setdefault(name, []).append(value)
    whole = {name: torch.cat(values) for name, values in parts.items()}
    seeds = {
        "ce": _Seed(SourceCoefficients(whole["target"], whole["target"]), whole["ce_hidden"]),
        "z": _Seed(SourceCoefficients(whole["z"]), whole["z_hidden"]),
    }
    if "centered_z" in whole:
        source = SourceCoefficients(whole["centered_z"], None, whole["centered_z"])
        seeds["centered_z"] = _Seed(source, whole["centered_hidden"])
    return seeds, whole["log_z"]


@contextmanager
def _all_parameters_on(model: nn.Module) -> Iterator[None]:
    """Every floating parameter asks for a gradient, as in training; the flags and gradients are put back afterwards."""
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    for parameter, _ in before:
        parameter.requires_grad_(parameter.is_floating_point())
    try:
        yield
    finally:
        for parameter, flag in before:
            parameter.requires_grad_(flag)
            parameter.grad = None


class _BodyGradients:
    """Backward passes below the head whose parameter gradients are reduced to numbers as soon as they appear."""

    def __init__(self, model: nn.Module, head: OutputHead, used_ids: Tensor) -> None:
        self._model, self._head = model, head
        self.rows = used_ids
        """Rows of the input table that the batch touches; elsewhere its gradient is zero."""

    def consume(self, hidden_TD: Tensor, seed_TD: Tensor, *, last: bool = False) -> tuple[float, Tensor | None]:
        """(Σ ‖g‖² over parameters other than the head tensor, gradient of a tied table's rows through the input path)."""
        squares: list[Tensor] = []
        table: list[Tensor] = []

        def take(parameter: Tensor) -> None:
            grad = parameter.grad
            assert grad is not None
            if parameter.data_ptr() == self._head.weight_VD.data_ptr():
                table.append(grad[self.rows].clone())
            else:
                squares.append(torch.linalg.vector_norm(grad, dtype=torch.float64) ** 2)
            parameter.grad = None

        handles = [
            parameter.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]
            for parameter in self._model.parameters()
            if parameter.requires_grad
        ]
        try:
            torch.autograd.backward(hidden_TD, seed_TD.to(hidden_TD.dtype), retain_graph=not last)
        finally:
            for handle in handles:
                handle.remove()
        return float(sum(squares)), table[0] if table else None


def _head_products(
    problem: HeadProblem,
    log_z_T: Tensor,
    seeds: dict[str, _Seed],
    inputs: dict[str, Tensor | None],
    used_rows: Tensor | None,
) -> dict[str, float]:
    """Inner products of the head gradients: whole (both paths), output path and input path."""
    products: dict[str, float] = {}

    def add(name: str, a: Tensor, b: Tensor) -> None:
        products[name] = products.get(name, 0.0) + float((a.double() * b.double()).sum())

    blocks: Iterable[tuple[slice, dict[str, Tensor]]] = head_gradient_rows(
        problem, log_z_T, {name: seed.source for name, seed in seeds.items()}
    )
    for rows, output in blocks:
        for name, grad_RD in output.items():
            entering = inputs[name]
            if used_rows is None or entering is None:
                continue
            here = (used_rows >= rows.start) & (used_rows < rows.stop)
            local = used_rows[here] - rows.start
            part = entering[here].to(grad_RD)
            if name != "ce":
                add(f"{name}/output", grad_RD, grad_RD)
                add(f"{name}/input", part, part)
                add(f"{name}/cross", grad_RD[local], part)
            grad_RD.index_add_(0, local, part)
        for name, grad_RD in output.items():
            add(f"{name}/whole", grad_RD, grad_RD)
            if name != "ce":
                add(f"{name}/ce", grad_RD, output["ce"])
    return products


def _findings(products: dict[str, float], squares: dict[str, float], body_dot: float, tied: bool) -> GradientFindings:
    def compare(dot: float, z2: float, ce2: float) -> GradientNumbers:
        if ce2 <= 0:
            return GradientNumbers()
        return GradientNumbers(r_z=(z2 / ce2) ** 0.5, c_z=dot / (z2 * ce2) ** 0.5 if z2 > 0 else None)

    ce2 = products["ce/whole"]
    found = {
        name: compare(products[f"{name}/ce"], products[f"{name}/whole"], ce2)
        for name in ("z", "centered_z")
        if f"{name}/whole" in products
    }
    ce_model, z_model = squares["ce"] + ce2, squares["z"] + products["z/whole"]
    paths = {}
    if tied:
        for name, side in (("z", "raw"), ("centered_z", "centered")):
            if f"{name}/output" in products:
                out2, in2 = products[f"{name}/output"], products[f"{name}/input"]
                cosine = products[f"{name}/cross"] / (out2 * in2) ** 0.5 if out2 * in2 > 0 else None
                paths[side] = PathNumbers(out2**0.5, in2**0.5, cosine)
    norms = {"ce": ce2**0.5, "ce_model": ce_model**0.5, "z_model": z_model**0.5}
    norms |= {name: products[f"{name}/whole"] ** 0.5 for name in found}
    return GradientFindings(
        raw=found["z"],
        centered=found.get("centered_z", GradientNumbers()),
        whole_model=compare(body_dot + products["z/ce"], z_model, ce_model),
        paths=paths,
        norms=norms,
    )
