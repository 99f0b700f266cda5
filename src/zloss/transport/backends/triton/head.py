"""The head loss through Triton: chunked matrix products around the row kernels.

For scalar reductions the gradients are formed in the forward pass, chunk by chunk, and handed to autograd by an op, so
that torch.compile can trace the whole loss; reduction="none" recomputes the chunks in backward, outside any trace, and a
buffer for dW is changed outside any trace, and so are sums over ranks.
"""

from __future__ import annotations

import torch

from zloss.transport.backends.chunked_autograd import narrow, wanted_gradients
from zloss.transport.backends.chunked_head import chunked_head_loss, run_head_chunks
from zloss.transport.backends.loss_parts import LossParts, parts_of, reduced
from zloss.transport.backends.triton.gradient_ops import with_gradients
from zloss.transport.backends.triton.rows import TritonRows
from zloss.transport.head_problem import HeadProblem


def triton_head_loss(problem: HeadProblem) -> LossParts:
    """The loss in chunks, with gradient to hidden, weight and bias."""
    work = TritonRows(problem.options.softcap, plan=problem.products, keep_logits=False)
    if problem.options.reduction == "none" or problem.weight_grad_buffer is not None or not problem.shard.whole:
        return chunked_head_loss(problem, work)
    targets, operands = problem.targets, problem.operands
    with torch.no_grad():
        wanted = wanted_gradients(operands, grad_enabled=problem.grad_enabled)
        run = run_head_chunks(problem, work, wanted, targets.weights.per_token)
        value = reduced(targets, run.cross_entropy_T + run.auxiliary_T)
    grads = [narrow(grad, like) for grad, like in zip(run.gradients, operands, strict=True)]
    return parts_of(with_gradients(value, *operands, *grads), run, targets, problem.vocab)
