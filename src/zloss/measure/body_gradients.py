"""Gradients below the head for several losses at once, reduced to numbers layer by layer: no gradient of the model is kept.

From the last layer to the first, one recomputation builds the graph of a layer, and every seed goes back through it. Then
all gradients of the layer exist at the same time: their squares and inner products are taken, and they are dropped.
Cost, in forward passes of the body: 1 for the recomputation (0 where the graph of the layer was kept), 2 for a seed with
parameter gradients, 1 for a seed that is needed at the input embedding only. An audit of a tied head has CE and Z with
parameters and centered Z without: 1 + 2·2 + 1 = 6. The forward pass before it is that of the pass over the text.

Axes: T tokens of all forward passes, U rows of a tied table that the batch reads, D width.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor, autograd, nn

from zloss.measure.layer_cuts import CutForward, LayerCall
from zloss.measure.parameter_sums import BodyGradients, ParameterSums
from zloss.models.output_head import OutputHead


def body_gradients(
    model: nn.Module,
    head: OutputHead,
    forwards: Sequence[tuple[CutForward, Tensor]],
    seeds_TD: Mapping[str, Tensor],
    pairs: Collection[tuple[str, str]],
    used_rows_U: Tensor,
    after_layer: Callable[[], None] = lambda: None,
) -> BodyGradients:
    """Backward from the hidden states that stand beside each forward pass, together [T, D]; the passes are used up.

    Seeds named in `pairs` get parameter gradients; the others are needed at a tied table only.
    `used_rows_U` are the token ids of the batch: at other rows the gradient of the input table is zero.
    """
    whole = {name for pair in pairs for name in pair}
    # The last seed frees the graph of a layer while it goes back.
    order = sorted(seeds_TD, key=lambda name: name not in whole)
    sums = ParameterSums(model, head, pairs, used_rows_U)
    stacks = [forward.calls for forward, _ in forwards]
    passes = [_Backward(calls, sums, order) for calls in stacks]
    done = 0
    for backward, (_, hidden_TD) in zip(passes, forwards, strict=True):
        part = slice(done, done := done + hidden_TD.shape[0])
        seeds = {name: [seeds_TD[name][part].to(hidden_TD.dtype)] for name in order}
        # The graph above the last layer and the one below the first may have tensors in common.
        backward.through([hidden_TD], seeds, keep=backward.cut)
    while any(stacks):
        layer = next(stack[-1].layer for stack in stacks if stack)
        for backward, stack in zip(passes, stacks, strict=True):
            if stack and stack[-1].layer is layer:
                backward.through_layer(stack.pop())
        if not any(call.layer is layer for stack in stacks for call in stack):
            sums.reduce_layer(layer)
        after_layer()
    return sums.result()


class _Backward:
    """The adjoints of one forward pass, for all seeds, on their way down."""

    def __init__(self, calls: Sequence[LayerCall], sums: ParameterSums, order: Sequence[str]) -> None:
        self.cut = bool(calls)
        self._sums, self._order = sums, order
        self._waiting: dict[int, dict[str, Tensor]] = {}
        """Adjoints of tensors between layers by their identity; a call that is still to come holds the tensor."""
        self._uses = Counter(id(x) for call in calls for x in call.inputs)
        """Calls that are still to add to the adjoint of a tensor."""

    def through_layer(self, call: LayerCall) -> None:
        """Every seed back through one layer, which is recomputed once at most."""
        inputs = call.inputs
        arrived = [self._waiting.pop(id(output), None) for output in call.outputs]
        if any(arrived):
            leaves, outputs = call.recompute()
            reached = [(x, a) for x, a in zip(outputs, arrived, strict=True) if a is not None and x.requires_grad]
            adjoints = {name: [adjoint[name] for _, adjoint in reached] for name in self._order}
            self.through([x for x, _ in reached], adjoints, keep=False)
            for outer, leaf in zip(inputs, leaves, strict=True):
                for name, adjoint in self._waiting.pop(id(leaf), {}).items():
                    self._deliver(outer, name, adjoint)
        for outer in inputs:
            self._uses[id(outer)] -= 1
            if not self._uses[id(outer)] and not outer.is_leaf and (found := self._waiting.pop(id(outer), None)):
                self.through([outer], {name: [found[name]] for name in self._order}, keep=True)

    def through(self, outputs: list[Tensor], adjoints: Mapping[str, list[Tensor]], *, keep: bool) -> None:
        """Back through the graph of `outputs` to its leaves: parameters, and outputs of layers below."""
        leaves = _graph_leaves(outputs)
        for name, given in adjoints.items():
            wanted = [leaf for leaf in leaves if self._sums.wants(leaf, name)]
            if wanted:
                retain = keep or name != self._order[-1]
                found = autograd.grad(outputs, wanted, given, retain_graph=retain, allow_unused=True)
                for leaf, grad in zip(wanted, found, strict=True):
                    if grad is not None:
                        self._deliver(leaf, name, grad)

    def _deliver(self, tensor: Tensor, name: str, adjoint: Tensor) -> None:
        if self._sums.owns(tensor):
            if self._sums.wants(tensor, name):
                self._sums.add(tensor, name, adjoint)
            return
        here = self._waiting.setdefault(id(tensor), {})
        here[name] = here[name] + adjoint if name in here else adjoint


def _graph_leaves(outputs: Iterable[Tensor]) -> list[Tensor]:
    """The leaves of a graph that ask for a gradient, each once."""
    leaves = {id(output): output for output in outputs if output.is_leaf}
    nodes, seen = [output.grad_fn for output in outputs], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(variable := getattr(node, "variable", None), Tensor):
            leaves[id(variable)] = variable
        nodes.extend(below for below, _ in node.next_functions)
    return list(leaves.values())


@contextmanager
def all_parameters_on(model: nn.Module) -> Iterator[None]:
    """Inside, every floating parameter asks for a gradient, as in training.

    Afterwards every parameter has its flag back and no gradient.
    """
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    for parameter, _ in before:
        parameter.requires_grad_(parameter.is_floating_point())
    try:
        yield
    finally:
        for parameter, flag in before:
            parameter.requires_grad_(flag)
            parameter.grad = None
