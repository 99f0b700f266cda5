"""Gradients of Z-losses next to the gradient of cross-entropy, on the first blocks of a text: R, C, and tied paths.

R = ‖g‖/‖g_CE‖ and C = cos(g, g_CE) at the output-head tensor (a tied table with both paths, or the untied projection), and
over the whole model on request. No gradient of the model is kept, and `.grad` is never written:

1. A forward pass, cut at the decoder layers: a layer runs without a graph, and what it returns is a leaf of the graph above
   it. The outputs of the layers (L·T·D numbers) and the small graphs between them are kept.
2. The seeds Wᵀδ of all losses, from Wᵀp and the coefficients of `Objective.source`.
3. From the last layer to the first: recompute the layer, backpropagate each seed, add the parameter gradients of all forward
   passes, reduce them to inner products in fp64, and drop them.
4. The gradients of the head itself, a block of vocabulary rows at a time.

Cost below the head, in forward passes: 1 for the pass, 1 for the recomputation, 2 for each seed, 1 for a seed that only needs
the input path of a tied table.
Scaling: gradients are mean-reduced over the T predictions (w = 1/T), coefficients included.
Axes: B blocks, N positions, T = B·N predictions, U rows of a tied table that the blocks read, D width, L layers.
"""

from __future__ import annotations

import copy
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, autograd, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.checkpoint import checkpoint as recomputed_in_backward

from zloss.console import Progress, Silent
from zloss.errors import CheckpointError
from zloss.head.arguments import HeadProblem
from zloss.head.products import HeadProducts
from zloss.head.source import head_gradient_rows
from zloss.measure.measurement import Measurement
from zloss.measure.tokens import shaped_chunks
from zloss.models.checkpoint import Checkpoint
from zloss.models.output_head import HiddenStates, OutputHead, all_parameters_on, hidden_states
from zloss.objectives import CenteredZLoss, Coefficients, Objective, StandardZLoss
from zloss.results.audit import GradientInfo, GradientNumbers, PathNumbers
from zloss.statistics import TokenStats
from zloss.text import Blocks

CE, RAW, CENTERED, PLANNED = "ce", "z", "centered_z", "planned_z"
HEAD, MODEL = ("head",), ("head", "bias", "body")
"""Sets of parameters: the output-head tensor, and all parameters."""
Forward = Callable[..., Any]
PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)
"""Arguments of a layer that cannot carry a tensor to another layer."""


def diagnostic_gradients(
    checkpoint: Checkpoint,
    measurement: Measurement,
    blocks: Blocks,
    count: int,
    *,
    target: float | None = None,
    forward_blocks: int | None = None,
    progress: Progress | None = None,
) -> tuple[GradientInfo, dict[str, PathNumbers], dict[str, float | None]]:
    """R_Z and C_Z of λ_diag(log Z − c)² on the first `count` blocks in both coordinates, the tied paths by coordinate, and the
    shares ‖g_Z‖/‖g_CE‖ of λ_diag(log Z − `target`)² on raw logits: of the head, of the model, of the input path to the head.

    The whole model is measured in raw coordinates only. Without μ there are no centered numbers, and an untied head has no
    paths. `target` None is the c of the measurement.
    """
    objectives: dict[str, Objective] = {RAW: StandardZLoss(measurement.coef, measurement.target)}
    if measurement.lacks_centered is None:
        objectives[CENTERED] = CenteredZLoss(measurement.coef, measurement.target)
    planned = RAW
    if target is not None and target != measurement.target:
        planned = PLANNED
        objectives[PLANNED] = StandardZLoss(measurement.coef, target)
    products = objective_gradients(
        checkpoint, measurement, blocks, count, objectives,
        whole_model=tuple(dict.fromkeys((RAW, planned))), forward_blocks=forward_blocks, progress=progress,
    )  # fmt: skip
    norms = {name: products.norm(name) for name in (CE, RAW, CENTERED) if name == CE or name in objectives}
    info = GradientInfo(
        coef=measurement.coef,
        blocks=count,
        raw=products.against_ce(RAW),
        centered=products.against_ce(CENTERED) if CENTERED in objectives else GradientNumbers(),
        whole_model=products.against_ce(RAW, MODEL),
        extra={"norms": norms | {f"{name}_model": products.norm(name, MODEL) for name in (CE, RAW)}},
    )
    paths = {coordinate: products.paths(name) for coordinate, name in (("raw", RAW), ("centered", CENTERED))}
    tied, ce = products.paths(planned), products.norm(CE)
    into = None if tied is None or tied.input_norm is None or not ce else tied.input_norm / ce
    r_z, r_z_model = (products.against_ce(planned, parts).r_z for parts in (HEAD, MODEL))
    shares = {"r_z": r_z, "r_z_model": r_z_model, "input_path": into}
    return info, {coordinate: found for coordinate, found in paths.items() if found is not None}, shares


class InnerProducts:
    """⟨g_a, g_b⟩ of the gradients of two losses over a set of parameters, in fp64."""

    def __init__(self) -> None:
        self._sums: defaultdict[tuple[str, str, str], float] = defaultdict(float)

    def add(self, part: str, gradients: Mapping[str, Tensor]) -> None:
        """Add the products over parameters in the set `part`: of every loss with itself and with CE."""
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
        return math.sqrt(self.inner(name, name, parts))

    def against_ce(self, name: str, parts: Sequence[str] = HEAD) -> GradientNumbers:
        """R and C; None if a gradient vanishes."""
        norm, ce = self.norm(name, parts), self.norm(CE, parts)
        cosine = self.inner(name, CE, parts) / (norm * ce) if norm * ce > 0 else None
        return GradientNumbers(norm / ce if ce > 0 else None, cosine)

    def paths(self, name: str) -> PathNumbers | None:
        """The two paths to a tied table (paper eq:tied_decomp); None for an untied head."""
        if ("output", name, name) not in self._sums:
            return None
        output, into = self.norm(name, ("output",)), self.norm(name, ("input",))
        dot = self.inner(name, name, ("output·input",))
        return PathNumbers(output, into, dot / (output * into) if output * into > 0 else None)


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
        # Below the head, losses outside `whole_model` have only the input path of a tied table.
        whole = (CE, *whole_model) if whole_model else ()
        below = (CE, *objectives) if head.tied else whole
        used_TD = {name: seeds_TD[name] for name in below}
        body = BodyGradients(model, head, rows_U, products, whole)
        table_UD = body.add_all(forwards, used_TD, after_layer=lambda: step.advance(1)) if below else {}
        add_head_gradients(products, problem, log_z_T, sources, table_UD, rows_U if head.tied else None)
        step.advance(1)
    return products


@torch.no_grad()
def gradient_seeds(
    measurement: Measurement, problem: HeadProblem, objectives: Mapping[str, Objective]
) -> tuple[dict[str, Coefficients], dict[str, Tensor], Tensor]:
    """(logit sources δ of CE and of every objective, their gradients Wᵀδ [T, D] at the hidden states, log Z [T]).

    CE has δ = w·(p − onehot(y)), an objective has δ = w·(a·p − g/V).
    """
    chunks = [(chunk.stats, chunk.target_slope_C, shape_CD) for chunk, shape_CD in shaped_chunks(problem)]
    columns: dict[str, Any] = {f.name: [getattr(part, f.name) for part, _, _ in chunks] for f in fields(TokenStats)}
    columns = {name: torch.cat(v) if isinstance(v[0], Tensor) else v[0] for name, v in columns.items()}
    stats = TokenStats(**columns)
    shape_TD = torch.cat([shape for _, _, shape in chunks])
    slopes = [slope for _, slope, _ in chunks if slope is not None]
    weight = 1.0 / max(1, len(shape_TD))
    one_T = torch.full_like(stats.log_s, weight)
    target_T = measurement.head.logit_scale * (one_T * torch.cat(slopes) if slopes else one_T)
    head = HeadProducts(problem.weight_VD[: problem.local_rows], problem.dtype, problem.rounding)
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
        if bias_is_parameter:
            products.add("bias", {name: each.bias_R for name, each in gradients.items() if each.bias_R is not None})


class BodyGradients:
    """Backpropagates every loss through the layers, last to first; a parameter's gradient is reduced after its last use.

    The losses in `whole` have gradients of all parameters, the others only of a tied table.
    """

    def __init__(
        self, model: nn.Module, head: OutputHead, rows_U: Tensor, products: InnerProducts, whole: Collection[str]
    ) -> None:
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        inside = {id(module) for layer in decoder_layers(model) for module in layer.modules()}
        self._outside = {id(p) for m in model.modules() if id(m) not in inside for p in m.parameters(recurse=False)}
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        tied = (p for p in self._parameters if head.tied and p.data_ptr() == head.weight_VD.data_ptr())
        self._table, self._rows_U, self._products, self._whole = next(tied, None), rows_U, products, whole
        self._sums: defaultdict[int, dict[str, Tensor]] = defaultdict(dict)  # by identity of a tensor, then by loss
        self._reduced: set[int] = set()

    def add_all(
        self,
        forwards: Sequence[tuple[Tensor, list[LayerCall]]],
        seeds_TD: Mapping[str, Tensor],
        after_layer: Callable[[], None] = lambda: None,
    ) -> dict[str, Tensor]:
        """Backpropagate every seed through all forward passes, (hidden states [T, D], calls of layers) each; consumes the calls.

        Returns the gradient [U, D] of a tied table through the input embedding, by loss.
        """
        stack = [call.layer for call in forwards[0][1]]
        if any([call.layer for call in calls] != stack for _, calls in forwards):
            raise CheckpointError("gradients of a model whose layers differ from token to token are not supported.")
        uses = Counter(id(parameter) for layer in stack for parameter in layer.parameters())
        parts = {
            name: torch.split(seed, [len(hidden_TD) for hidden_TD, _ in forwards]) for name, seed in seeds_TD.items()
        }
        for place, (hidden_TD, calls) in enumerate(forwards):
            given = {name: part[place].to(hidden_TD.dtype) for name, part in parts.items()}
            self._go_back([(hidden_TD, given)], [x for call in calls for x in call.outputs], keep=bool(calls))
        while stack:
            for _, calls in forwards:
                self._through_last_layer(calls)
            keys = [id(parameter) for parameter in stack.pop().parameters()]
            uses.subtract(keys)
            self._reduce([key for key in keys if not uses[key] and key not in self._outside])
            after_layer()
        table_UD = self._sums.pop(id(self._table), {})
        self._reduce(list(self._sums))
        return table_UD

    def _through_last_layer(self, calls: list[LayerCall]) -> None:
        """Recompute the last call of a forward pass; backpropagate through it and through everything up to the earlier layers."""
        call = calls.pop()
        arrived = [self._sums.pop(id(output), None) for output in call.outputs]
        if not any(arrived):
            return
        leaves, returned = _run(call.layer.forward, call.arguments, call.structure, graph=True)
        pairs = zip(_floating(returned), arrived, strict=True)
        reached = [(output, found) for output, found in pairs if found is not None and output.requires_grad]
        self._go_back(reached, list(leaves.values()))
        for tensor in {id(x): x for x in call.arguments if id(x) in leaves}.values():
            adjoint = self._sums.pop(id(leaves[id(tensor)]), {})
            if adjoint and not tensor.is_leaf:
                self._go_back([(tensor, adjoint)], [x for earlier in calls for x in earlier.outputs], keep=True)
            else:
                for name, grad in adjoint.items():
                    # A parameter may be passed as an argument; what an earlier layer returned always counts.
                    if name in self._whole or tensor is self._table or not isinstance(tensor, nn.Parameter):
                        self.add(tensor, name, grad)

    def _go_back(
        self, outputs: Sequence[tuple[Tensor, Mapping[str, Tensor]]], leaves: Sequence[Tensor], *, keep: bool = False
    ) -> None:
        """Backpropagate every loss from `outputs`, given with their adjoints, to the parameters and to `leaves`."""
        tensors, names = [x for x, _ in outputs], list(outputs[0][1]) if outputs else []
        table = [] if self._table is None else [self._table]
        for name in names:
            wanted = [*leaves, *(self._parameters if name in self._whole else table)]
            given = [adjoint[name] for _, adjoint in outputs]
            found = autograd.grad(tensors, wanted, given, retain_graph=keep or name != names[-1], allow_unused=True)
            for tensor, grad in zip(wanted, found, strict=True):
                if grad is not None:
                    self.add(tensor, name, grad)

    def add(self, tensor: Tensor, name: str, grad: Tensor) -> None:
        """Add a part of the gradient of a loss; 16-bit parts of a parameter's gradient are summed in fp32."""
        if id(tensor) in self._reduced:
            raise CheckpointError(
                f"{self._names[id(tensor)]} is used by several layers, but only one of them has it among its parameters: "
                "gradients of such a model are not supported."
            )
        grad = grad[self._rows_U] if tensor is self._table else grad
        here = self._sums[id(tensor)]
        if name in here and isinstance(tensor, nn.Parameter):
            here[name] = here[name].to(torch.promote_types(grad.dtype, torch.float32))
        here[name] = here[name] + grad if name in here else grad

    def _reduce(self, keys: Collection[int]) -> None:
        """Reduce the gradients of the parameters with these identities to inner products."""
        for key in keys:
            self._products.add("body", self._sums.pop(key, {}))
            self._reduced.add(key)


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The list of modules with the most parameters, each module once: the stack of layers, of which a list of experts is a part.
    Empty if no list has two modules."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) > 1]
    stacks = [list(dict.fromkeys(modules)) for modules in lists]
    return max(stacks, key=lambda stack: sum(p.numel() for layer in stack for p in layer.parameters()), default=[])


@dataclass(frozen=True, eq=False)
class LayerCall:
    """One call of a layer."""

    layer: nn.Module
    arguments: list[Any]
    """Positional and named arguments, flat."""
    structure: TreeSpec
    outputs: list[Tensor]
    """The floating tensors that the call returned, as leaves of the graph above the layer."""


class _CannotCut(Exception):
    """A layer changed an argument in place, or can hand a tensor to another layer in one of them."""


@torch.enable_grad()
def cut_forward(model: nn.Module, hidden_of: HiddenStates, ids_BN: Tensor) -> tuple[Tensor, list[LayerCall]]:
    """(hidden states [B, N, D], the calls of the layers in order) of one forward pass; parameters require gradients already.

    Layers that hand tensors to one another in a container (the shared keys and values of Gemma 4), or that change their inputs
    in place, are not cut: there are no calls, and torch's checkpointing recomputes each layer in every backward pass.
    """
    calls: list[LayerCall] = []
    try:
        with replaced_forwards(model, lambda layer, forward: _cut(layer, forward, calls)):
            return hidden_of(ids_BN), calls
    except _CannotCut:
        with replaced_forwards(model, lambda layer, forward: _recomputed(forward)):
            return hidden_of(ids_BN), []


def _cut(layer: nn.Module, forward: Forward, calls: list[LayerCall]) -> Forward:
    """The forward of a layer without a graph; what it returns are leaves, and the call is appended to `calls`."""

    def run(*args: Any, **kwargs: Any) -> Any:
        arguments, structure = tree_flatten((args, kwargs))
        if not all(isinstance(x, (Tensor, *PLAIN)) for x in arguments):
            raise _CannotCut
        _, returned = _run(forward, arguments, structure, graph=False)
        # A tensor that is returned twice becomes two leaves, whose gradients are added below.
        floating = {id(x) for x in _floating(returned)}
        returned = tree_map(lambda x: x.detach().requires_grad_() if id(x) in floating else x, returned)
        calls.append(LayerCall(layer, arguments, structure, _floating(returned)))
        return returned

    return run


def _run(forward: Forward, arguments: list[Any], structure: TreeSpec, *, graph: bool) -> tuple[dict[int, Tensor], Any]:
    """(leaves by the identity of the arguments that they replace, what `forward` returned); the graph starts at the leaves."""
    requiring = (x for x in arguments if isinstance(x, Tensor) and x.requires_grad)
    leaves = {id(x): x.detach().requires_grad_(graph) for x in requiring}
    given = [leaves.get(id(x), x) for x in arguments]
    args, kwargs = tree_unflatten(given, structure)
    versions = [x._version for x in given if isinstance(x, Tensor)]
    with torch.set_grad_enabled(graph):
        returned = forward(*args, **kwargs)
    replaced = [id(x) for x in tree_leaves((args, kwargs))] != [id(x) for x in given]
    if replaced or [x._version for x in given if isinstance(x, Tensor)] != versions:
        raise _CannotCut
    return leaves, returned


def _recomputed(forward: Forward) -> Forward:
    """The same function; the backward pass calls it again with its arguments as they were before the first call."""

    def run(*args: Any, **kwargs: Any) -> Any:
        def copied(arguments: Any) -> Any:
            return tree_map(lambda x: x.clone() if isinstance(x, Tensor) else copy.copy(x), arguments)

        def call() -> Any:
            now_args, now_kwargs = next(first, None) or copied(before)
            return forward(*now_args, **now_kwargs)

        before, first = copied((args, kwargs)), iter([(args, kwargs)])  # other layers read what the first call changes
        return recomputed_in_backward(call, use_reentrant=False)

    return run


@contextmanager
def replaced_forwards(model: nn.Module, replace: Callable[[nn.Module, Forward], Forward]) -> Iterator[None]:
    """Inside, the forward of every decoder layer is `replace(layer, forward)`; one of accelerate's hooks is put back after."""
    before = [(layer, vars(layer).get("forward")) for layer in decoder_layers(model)]
    for layer, _ in before:
        layer.forward = replace(layer, layer.forward)
    try:
        yield
    finally:
        for layer, own in before:
            del layer.forward
            if own is not None:
                layer.forward = own


def _floating(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor) and x.is_floating_point()]
