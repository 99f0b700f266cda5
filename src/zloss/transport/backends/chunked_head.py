"""The chunked head loss: one [chunk, V] buffer, every objective at the cost of cross-entropy, on any device.

Per chunk of tokens three products: logits h Wᵀ, E W (for dh and the gain) and Eᵀh (for dW). What is done to a chunk of
logits between the products is a `RowWork`: plain PyTorch here, Triton kernels on a GPU.

Axes: T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zloss.errors import CoordinateError
from zloss.transport.backends.chunked_autograd import Operands, chunked_loss
from zloss.transport.backends.chunks import ChunkedRun
from zloss.transport.backends.gradient_accumulators import GradientAccumulators
from zloss.transport.backends.head_chunks import iterate_head_chunks
from zloss.transport.backends.loss_parts import LossParts
from zloss.transport.backends.row_work import RowWork
from zloss.transport.gradient_buffer import is_main_grad
from zloss.transport.head_problem import HeadProblem


def chunked_head_loss(problem: HeadProblem, work: RowWork) -> LossParts:
    """The loss in chunks, with gradient to hidden, weight and bias."""
    rest = problem.without_operands()

    def run(operands: Operands, wanted: tuple[bool, ...], weight_T: Tensor) -> ChunkedRun:
        hidden_TD, weight_VD, bias_V = operands
        assert hidden_TD is not None
        assert weight_VD is not None
        return run_head_chunks(rest.with_operands(hidden_TD, weight_VD, bias_V), work, wanted, weight_T)

    return chunked_loss(
        problem.operands,
        problem.targets,
        problem.shard.total,
        run,
        grad_enabled=problem.grad_enabled,
        added_elsewhere=problem.weight_grad_buffer is not None,
        in_main_grad=is_main_grad(problem.weight_grad_buffer, problem.weight_VD),
    )


def run_head_chunks(problem: HeadProblem, work: RowWork, wanted: tuple[bool, ...], weight_T: Tensor) -> ChunkedRun:
    """One pass: values, statistics, and the wanted gradients (hidden, weight, bias) of Σ_t weight_t·(CE_t + aux_t)."""
    _refuse_capped_smoothing(problem)
    run = ChunkedRun(problem.targets, problem.plan)
    gradients = GradientAccumulators(problem, wanted, weight_T) if any(wanted) else None
    # Operands were rounded to the autocast dtype where asked; from there on nothing may be rounded again.
    with torch.autocast(problem.products.device_type, enabled=False):
        _pass_over_chunks(problem, work, wanted[0], run, gradients)
        run.gradients = (None, None, None) if gradients is None else gradients.finish()
    return run


def _pass_over_chunks(
    problem: HeadProblem, work: RowWork, back_projection: bool, run: ChunkedRun, gradients: GradientAccumulators | None
) -> None:
    """Every chunk once. The V-wide buffers are gone when this returns, before a gradient is copied to 16 bits."""
    for chunk in iterate_head_chunks(problem, back_projection=back_projection, work=work):
        run.keep(chunk)
        if gradients is not None:
            gradients.add(chunk)


def _refuse_capped_smoothing(problem: HeadProblem) -> None:
    if problem.options.softcap is not None and problem.options.label_smoothing:
        raise CoordinateError(
            "`label_smoothing` with `softcap` needs the slope of every logit in a second V-wide product, which this "
            "backend does not form: use backend='dense'."
        )
