"""Gradients of Z-losses next to the gradient of cross-entropy, on the first blocks of a text: R, C, and tied paths.

R = ‖g‖/‖g_CE‖ and C = cos(g, g_CE) at the output-head tensor (a tied table with both paths, or the untied projection), and
over the whole model on request. No gradient of the model is kept, and `.grad` is never written:

1. A forward pass, cut at the decoder layers: a layer runs without a graph, and what it returns is a leaf of the graph above
   it. The outputs of the layers (L·T·D numbers) and the small graphs between them are kept.
2. The seeds Wᵀδ of all losses, from Wᵀp and the coefficients of `Objective.source`.
3. From the last layer to the first: recompute the layer, go back once per seed, add the parameter gradients of all forward
   passes, reduce them to inner products in fp64, and drop them.
4. The gradients of the head itself, a block of vocabulary rows at a time.

Cost below the head, in forward passes: 1 for the pass, 1 for the recomputation, 2 for each seed.
Scaling: gradients are mean-reduced over the T predictions (w = 1/T), coefficients included.
Axes: B blocks, N positions, T predictions, U rows of a tied table that the blocks read, D width.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, autograd, nn

from zloss.console import Progress, Silent
from zloss.errors import CheckpointError
from zloss.head.arguments import HeadProblem
from zloss.head.products import HeadProducts
from zloss.head.source import head_gradient_rows
from zloss.measure.measurement import Measurement
from zloss.measure.tokens import shaped_chunks
from zloss.models.checkpoint import Checkpoint
from zloss.models.layers import LayerCall, cut_forward, decoder_layers
from zloss.models.output_head import OutputHead, hidden_states
from zloss.objectives import CenteredZLoss, Coefficients, Objective, StandardZLoss
from zloss.results.audit import GradientInfo, GradientNumbers, PathNumbers
from zloss.statistics import TokenStats
from zloss.text import Blocks

CE, RAW, CENTERED = "ce", "z", "centered_z"
"""Names of the losses."""
HEAD, MODEL = ("head",), ("head", "bias", "body")
"""Sets of parameters: the output-head tensor, and all parameters."""


def diagnostic_gradients(
    checkpoint: Checkpoint,
    measurement: Measurement,
    blocks: Blocks,
    count: int,
    *,
    forward_blocks: int | None = None,
    progress: Progress | None = None,
) -> tuple[GradientInfo, dict[str, PathNumbers]]:
    """R_Z and C_Z of λ_diag(log Z − c)² on the first `count` blocks in both coordinates, and the tied paths by coordinate.

    The whole model is measured in raw coordinates only. Without μ there are no centered numbers, and an untied head has no
    paths.
    """
    objectives: dict[str, Objective] = {RAW: StandardZLoss(measurement.coef, measurement.target)}
    if measurement.lacks_centered is None:
        objectives[CENTERED] = CenteredZLoss(measurement.coef, measurement.target)
    products = objective_gradients(
        checkpoint, measurement, blocks, count, objectives,
        whole_model=(RAW,), forward_blocks=forward_blocks, progress=progress,
    )  # fmt: skip
    norms = {name: products.norm(name) for name in (CE, *objectives)}
    info = GradientInfo(
        coef=measurement.coef,
        blocks=count,
        raw=products.against_ce(RAW),
        centered=products.against_ce(CENTERED) if CENTERED in objectives else GradientNumbers(),
        whole_model=products.against_ce(RAW, MODEL),
        extra={"norms": norms | {f"{name}_model": products.norm(name, MODEL) for name in (CE, RAW)}},
    )
    coordinates = {"raw": RAW, "centered": CENTERED}
    return info, {
        coordinate: paths
        for coordinate, name in coordinates.items()
        if name in objectives and (paths := products.paths(name)) is not None
    }


class InnerProducts:
    """⟨g_a, g_b⟩ of the gradients of two losses over a set of parameters, in fp64."""

    def __init__(self) -> None:
        self._sums: defaultdict[tuple[str, str, str], float] = defaultdict(float)

    def add(self, part: str, gradients: Mapping[str, Tensor]) -> None:
        """Add those of parameters in the set `part`: of every loss with itself and with CE."""
        for name, grad in gradients.items():
            for other in {name, CE} & gradients.keys():
                self.add_pair(part, name, other, grad, gradients[other])

    def add_pair(self, part: str, a: str, b: str, grad_a: Tensor, grad_b: Tensor) -> None:
        """Add ⟨grad_a, grad_b⟩, widened to fp64 a million numbers at a time."""
        slices = zip(torch.split(grad_a.flatten(), 2**20), torch.split(grad_b.flatten(), 2**20), strict=True)
        self._sums[part, a, b] += float(sum(torch.dot(x.double(), y.double()) for x, y in slices))

    def inner(self, a: str, b: str, parts: Sequence[str] = HEAD) -> float:
        """⟨g_a, g_b⟩ over disjoint sets of parameters."""
        return sum(self._sums[part, a, b] for part in parts)

    def norm(self, name: str, parts: Sequence[str] = HEAD) -> float:
        """‖g‖."""
        return math.sqrt(self.inner(name, name, parts))

    def against_ce(self, name: str, parts: Sequence[str] = HEAD) -> GradientNumbers:
        """R and C; None where a gradient vanishes."""
        norm, ce = self.norm(name, parts), self.norm(CE, parts)
        return GradientNumbers(norm / ce if ce > 0 else None, _cosine(self.inner(name, CE, parts), norm, ce))

    def paths(self, name: str) -> PathNumbers | None:
        """The two paths to a tied table (paper eq:tied_decomp); None for an untied head."""
        if ("output", name, name) not in self._sums:
            return None
        output, into = self.norm(name, ("output",)), self.norm(name, ("input",))
        return PathNumbers(output, into, _cosine(self.inner(name, name, ("output·input",)), output, into))


def _cosine(dot: float, a: float, b: float) -> float | None:
    return dot / (a * b) if a * b > 0 else None


def objective_gradients(
    checkpoint: Checkpoint,
    measurement: Measurement,
    blocks: Blocks,
    count: int,
    objectives: Mapping[str, Objective],
    *,
    whole_model: Collection[str] = (),
    forward_blocks: int | None = None,
    progress: Progress | None = None,
) -> InnerProducts:
    """The gradients of CE and of every objective on the first `count` blocks, those in `whole_model` over all parameters.

    `forward_blocks` are the blocks of one forward pass (None: all); the numbers depend on it by rounding only.
    """
    head, model = measurement.head, checkpoint.model
    device = head.weight_VD.device
    inputs_BN, target_T = blocks.inputs(0, count).to(device), blocks.targets(0, count).reshape(-1).to(device)
    products, rows_U = InnerProducts(), torch.unique(inputs_BN)
    with (
        (progress or Silent()).step("gradients", len(decoder_layers(model)) + 1, "layers") as step,
        all_parameters_on(model),
    ):
        with hidden_states(checkpoint, head) as hidden_of:
            split = torch.split(inputs_BN, forward_blocks or max(1, count))
            passes = [cut_forward(model, hidden_of, ids_BN) for ids_BN in split]
            with torch.enable_grad():
                forwards = [(blocks.counted(hidden_BND).flatten(0, 1), calls) for hidden_BND, calls in passes]
        problem = measurement.problem(torch.cat([hidden_TD.detach() for hidden_TD, _ in forwards]), target_T)
        sources, seeds_TD, log_z_T = gradient_seeds(measurement, problem, objectives)
        # Below an untied head only the whole-model numbers need a backward pass.
        below = (CE, *objectives) if head.tied else (CE, *whole_model) if whole_model else ()
        body = ParameterSums(model, head, rows_U, products)
        if below:
            seeds_TD = {name: seeds_TD[name] for name in below}
            add_body_gradients(body, forwards, seeds_TD, after_layer=lambda: step.advance(1))
        add_head_gradients(products, problem, log_z_T, sources, body.finish(), rows_U if head.tied else None)
        step.advance(1)
    return products


# The losses at the hidden states and at the head


@torch.no_grad()
def gradient_seeds(
    measurement: Measurement, problem: HeadProblem, objectives: Mapping[str, Objective]
) -> tuple[dict[str, Coefficients], dict[str, Tensor], Tensor]:
    """(logit sources δ of CE and of every objective, their gradients Wᵀδ [T, D] at the hidden states, log Z [T]).

    CE has δ = w·(p − onehot(y)), an objective has δ = w·(a·p − g/V).
    """
    chunks = [(chunk.stats, chunk.target_slope_C, shape_CD) for chunk, shape_CD in shaped_chunks(problem)]
    columns = {each.name: [getattr(stats, each.name) for stats, _, _ in chunks] for each in fields(TokenStats)}
    whole: dict[str, Any] = {k: torch.cat(v) if isinstance(v[0], Tensor) else v[0] for k, v in columns.items()}
    stats = TokenStats(**whole)
    shape_TD, slopes = torch.cat([shape_CD for _, _, shape_CD in chunks]), [s for _, s, _ in chunks if s is not None]
    weight = 1.0 / max(1, len(shape_TD))
    one_T = torch.full_like(stats.log_s, weight)
    target_T = measurement.head.logit_scale * (one_T * torch.cat(slopes) if slopes else one_T)
    head = HeadProducts(problem.weight_VD[: problem.vocab], problem.dtype, problem.rounding)
    sources = {CE: Coefficients(one_T, one_T)}
    seeds_TD = {CE: weight * shape_TD - target_T.unsqueeze(1) * head.select(problem.targets.index_T)}
    for name, objective in objectives.items():
        _, source = objective.source(stats)
        a_T, g_T = weight * source.a, None
        if source.g is None:
            seeds_TD[name] = a_T.unsqueeze(1) * shape_TD
        else:
            # a·Wᵀp − g·w̄ as a·(Wᵀp − w̄) − (g − a)·w̄: what both terms have in common cancels before it is weighted.
            g_T, mean_D = weight * source.g, measurement.mean_row_D.to(shape_TD)
            seeds_TD[name] = a_T.unsqueeze(1) * (shape_TD - mean_D) - torch.outer(g_T - a_T, mean_D)
        sources[name] = Coefficients(a_T, None, g_T)
    return sources, seeds_TD, stats.log_z


def add_head_gradients(
    products: InnerProducts,
    problem: HeadProblem,
    log_z_T: Tensor,
    sources: Mapping[str, Coefficients],
    table_UD: Mapping[str, Tensor],
    rows_U: Tensor | None,
) -> None:
    """Add the inner products at the head tensor and its bias, a block of vocabulary rows at a time.

    For a tied head `table_UD` is the gradient through the input embedding at the rows `rows_U`, and zero elsewhere: part of the
    gradient of the head tensor, whose two paths are also added separately.
    """
    bias_is_parameter = isinstance(problem.bias_V, nn.Parameter)  # a buffer is not a parameter of the model
    for rows, gradients in head_gradient_rows(problem, log_z_T, sources):
        if rows_U is not None:
            here_U = (rows_U >= rows.start) & (rows_U < rows.stop)
            local = rows_U[here_U] - rows.start
            for name, gradient in gradients.items():
                into = table_UD[name][here_U].to(gradient.weight_RD)
                products.add_pair("output", name, name, gradient.weight_RD, gradient.weight_RD)
                products.add_pair("input", name, name, into, into)
                products.add_pair("output·input", name, name, gradient.weight_RD[local], into)
                gradient.weight_RD.index_add_(0, local, into)
        products.add("head", {name: gradient.weight_RD for name, gradient in gradients.items()})
        biases = {name: each.bias_R for name, each in gradients.items() if each.bias_R is not None}
        if bias_is_parameter:
            products.add("bias", biases)


# The body, from the last layer to the first


class ParameterSums:
    """The gradients of parameters below the head: summed by loss until the last use of a parameter, then reduced."""

    def __init__(self, model: nn.Module, head: OutputHead, rows_U: Tensor, products: InnerProducts) -> None:
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        inside = {id(module) for layer in decoder_layers(model) for module in layer.modules()}
        self.outside = {id(p) for m in model.modules() if id(m) not in inside for p in m.parameters(recurse=False)}
        """Identities of the parameters that modules outside the layers have."""
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        tied = (p for p in self.parameters if head.tied and p.data_ptr() == head.weight_VD.data_ptr())
        self._table, self._rows_U, self._products = next(tied, None), rows_U, products
        self._sums: defaultdict[int, dict[str, Tensor]] = defaultdict(dict)
        self._reduced: set[int] = set()

    def add(self, parameter: Tensor, name: str, grad: Tensor) -> None:
        """Add a part of the gradient of a loss; parts in 16 bits are summed in fp32."""
        if id(parameter) in self._reduced:
            raise CheckpointError(
                f"{self._names[id(parameter)]} is used by several layers, but only one of them has it among its parameters: "
                "gradients of such a model are not supported."
            )
        grad = grad[self._rows_U] if parameter is self._table else grad
        here = self._sums[id(parameter)]
        here[name] = here[name].to(torch.promote_types(grad.dtype, torch.float32)) + grad if name in here else grad

    def reduce(self, keys: Collection[int]) -> None:
        """Reduce the gradients of the parameters with these identities to inner products."""
        for key in keys:
            self._products.add("body", self._sums.pop(key, {}))
            self._reduced.add(key)

    def finish(self) -> dict[str, Tensor]:
        """Reduce what is left; the gradient [U, D] of a tied table through the input embedding, by loss."""
        table_UD = self._sums.pop(id(self._table), {})
        self.reduce(list(self._sums))
        return table_UD


Adjoints = defaultdict[int, dict[str, Tensor]]
"""Identity of a tensor between layers → gradient of every loss there."""


def add_body_gradients(
    sums: ParameterSums,
    forwards: Sequence[tuple[Tensor, list[LayerCall]]],
    seeds_TD: Mapping[str, Tensor],
    after_layer: Callable[[], None] = lambda: None,
) -> None:
    """Every seed back through all forward passes, which are used up; a parameter is reduced after its last use by a layer."""
    stack = [call.layer for call in forwards[0][1]]
    if any([call.layer for call in calls] != stack for _, calls in forwards):
        raise CheckpointError("the model calls other layers for other tokens: its gradients are not supported.")
    uses = Counter(id(parameter) for layer in stack for parameter in layer.parameters())
    waiting: list[Adjoints] = [defaultdict(dict) for _ in forwards]
    parts = {name: torch.split(seed, [len(hidden_TD) for hidden_TD, _ in forwards]) for name, seed in seeds_TD.items()}
    for place, (hidden_TD, calls) in enumerate(forwards):
        given = {name: part[place].to(hidden_TD.dtype) for name, part in parts.items()}
        _go_back(sums, [(hidden_TD, given)], _outputs(calls), waiting[place], keep=bool(calls))
    while stack:
        for (_, calls), adjoints in zip(forwards, waiting, strict=True):
            _through_last_layer(sums, calls, adjoints)
        keys = [id(parameter) for parameter in stack.pop().parameters()]
        uses.subtract(keys)
        sums.reduce([key for key in keys if not uses[key] and key not in sums.outside])
        after_layer()


def _through_last_layer(sums: ParameterSums, calls: list[LayerCall], waiting: Adjoints) -> None:
    """Recompute the last call of a forward pass, and go back through it and through what is between it and earlier layers."""
    call = calls.pop()
    arrived = [waiting.pop(id(output), None) for output in call.outputs]
    if not any(arrived):
        return
    inputs, leaves, outputs = call.recompute()
    reached = [(x, found) for x, found in zip(outputs, arrived, strict=True) if found is not None and x.requires_grad]
    below: Adjoints = defaultdict(dict)
    _go_back(sums, reached, leaves, below, keep=False)
    for tensor, leaf in zip(inputs, leaves, strict=True):
        adjoint = below.pop(id(leaf), {})
        if adjoint and not tensor.is_leaf:
            _go_back(sums, [(tensor, adjoint)], _outputs(calls), waiting, keep=True)
        else:
            for name, grad in adjoint.items():
                _deliver(sums, waiting, tensor, name, grad)


def _go_back(
    sums: ParameterSums,
    outputs: Sequence[tuple[Tensor, Mapping[str, Tensor]]],
    leaves: Sequence[Tensor],
    waiting: Adjoints,
    *,
    keep: bool,
) -> None:
    """Every loss from `outputs` with their adjoints to the parameters and to `leaves`, whose adjoints go into `waiting`."""
    tensors, names = [x for x, _ in outputs], list(outputs[0][1]) if outputs else []
    for name in names:
        wanted, given = [*leaves, *sums.parameters], [adjoint[name] for _, adjoint in outputs]
        retain = keep or name != names[-1]
        found = autograd.grad(tensors, wanted, given, retain_graph=retain, allow_unused=True)
        for tensor, grad in zip(wanted, found, strict=True):
            if grad is not None:
                _deliver(sums, waiting, tensor, name, grad)


def _deliver(sums: ParameterSums, waiting: Adjoints, tensor: Tensor, name: str, grad: Tensor) -> None:
    if isinstance(tensor, nn.Parameter):
        sums.add(tensor, name, grad)
    else:
        here = waiting[id(tensor)]
        here[name] = here[name] + grad if name in here else grad


def _outputs(calls: Sequence[LayerCall]) -> list[Tensor]:
    return [output for call in calls for output in call.outputs]


@contextmanager
def all_parameters_on(model: nn.Module) -> Iterator[None]:
    """Inside, every floating parameter requires a gradient, as in training; afterwards every parameter has its flag back."""
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    for parameter, _ in before:
        parameter.requires_grad_(parameter.is_floating_point())
    try:
        yield
    finally:
        for parameter, flag in before:
            parameter.requires_grad_(flag)
