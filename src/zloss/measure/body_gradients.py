"""Gradients below the head, reduced to numbers as they appear: no gradient of the model is kept.

Today each seed is one backward pass. ⟨g_a, g_b⟩ of two seeds comes from one more pass, that of their sum, because the
gradients of two passes never exist at the same time. `body_gradients` takes all seeds at once, so one recomputation of
a layer can serve several of them without a change to its callers.

Axes: T tokens of the batch, U rows of a tied table that the batch reads, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zloss.models.output_head import OutputHead

TINY = torch.finfo(torch.float64).tiny


@dataclass(frozen=True)
class BodyGradients:
    """Of every seed, over the parameters other than the head's weight and bias."""

    squares: dict[str, float]
    """Σ ‖g‖² by the name of the seed."""
    dots: dict[tuple[str, str], float]
    """⟨g_a, g_b⟩ of the pairs that were asked for."""
    table_UD: dict[str, Tensor]
    """Gradient of a tied table through the input embedding, at its used rows; empty for an untied head."""


def body_gradients(
    model: nn.Module,
    head: OutputHead,
    hidden_TD: Tensor,
    seeds_TD: Mapping[str, Tensor],
    pairs: Iterable[tuple[str, str]],
    used_rows_U: Tensor,
    after_pass: Callable[[], None] = lambda: None,
) -> BodyGradients:
    """Backward passes from `hidden_TD`; its graph is used up.

    `used_rows_U` are the token ids of the batch: at other rows the gradient of the input table is zero.
    """
    pairs = tuple(pairs)
    squares: dict[str, float] = {}
    dots: dict[tuple[str, str], float] = {}
    table_UD: dict[str, Tensor] = {}
    left = len(seeds_TD) + len(pairs)

    def consume(seed_TD: Tensor) -> tuple[float, Tensor | None]:
        nonlocal left
        left -= 1
        found = _one_pass(model, head, hidden_TD, seed_TD, used_rows_U, retain_graph=left > 0)
        after_pass()
        return found

    for name, seed_TD in seeds_TD.items():
        squares[name], entering = consume(seed_TD)
        if entering is not None:
            table_UD[name] = entering
    for a, b in pairs:
        # ‖g_a + t·g_b‖² = ‖g_a‖² + t²‖g_b‖² + 2t⟨g_a, g_b⟩; t makes the first two terms equal, so rounding stays relative.
        t = (squares[a] / max(squares[b], TINY)) ** 0.5
        mixed, _ = consume(seeds_TD[a] + t * seeds_TD[b])
        dots[a, b] = (mixed - squares[a] - t * t * squares[b]) / (2 * t) if t > 0 else 0.0
    return BodyGradients(squares, dots, table_UD)


def _one_pass(
    model: nn.Module, head: OutputHead, hidden_TD: Tensor, seed_TD: Tensor, used_rows_U: Tensor, *, retain_graph: bool
) -> tuple[float, Tensor | None]:
    """(Σ ‖g‖² over parameters other than the head's weight, gradient of a tied table's used rows)."""
    squares: list[Tensor] = []
    table: list[Tensor] = []

    def take(parameter: Tensor) -> None:
        grad = parameter.grad
        assert grad is not None
        if parameter.data_ptr() == head.weight_VD.data_ptr():
            table.append(grad[used_rows_U].clone())
        else:
            squares.append(torch.linalg.vector_norm(grad, dtype=torch.float64) ** 2)
        parameter.grad = None

    handles = [
        parameter.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]
        for parameter in model.parameters()
        if parameter.requires_grad
    ]
    try:
        torch.autograd.backward(hidden_TD, seed_TD.to(hidden_TD.dtype), retain_graph=retain_graph)
    finally:
        for handle in handles:
            handle.remove()
    return float(sum(squares)), table[0] if table else None


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
