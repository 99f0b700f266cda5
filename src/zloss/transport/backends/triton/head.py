"""The head loss through Triton: chunked matrix products around the row kernels.

For scalar reductions the gradients are formed in the forward pass, chunk by chunk, and handed to autograd by an op, so
that torch.compile can trace the whole loss; reduction="none" recomputes the chunks in backward, outside any trace.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zloss.source.statistics import TokenStats
from zloss.transport.backends.chunked import (
    chunked_loss,
    narrow,
    parts_and_stats,
    run_chunks,
    wanted_gradients,
    weighted_losses,
)
from zloss.transport.backends.triton.ops import with_gradients
from zloss.transport.backends.triton.rows import TritonRows
from zloss.transport.problem import HeadProblem


def triton_head_loss(problem: HeadProblem) -> tuple[Tensor, Tensor, Tensor, TokenStats]:
    """(loss, cross-entropy, auxiliary, statistics), reduced; the loss carries gradient to hidden, weight and bias."""
    work = TritonRows(problem.options.softcap, keep_logits=False)
    if problem.options.reduction == "none":
        return chunked_loss(problem, work)
    with torch.no_grad():
        run = run_chunks(problem, work, wanted_gradients(problem), problem.targets.weights.per_token)
        value = weighted_losses(problem, run).sum()
    operands = problem.hidden_TD, problem.weight_VD, problem.bias_V
    grads = [
        None if grad is None or like is None else narrow(grad, like)
        for grad, like in zip((run.grad_hidden, run.grad_weight, run.grad_bias), operands, strict=True)
    ]
    return with_gradients(value, *operands, *grads), *parts_and_stats(problem, run)
