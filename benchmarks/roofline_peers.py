"""What the peers issue on CUDA, counted from their source: bytes that every kernel reads and writes, operations of products.

Versions read: liger-kernel 0.8.5 `ops/fused_linear_cross_entropy.py`, torch 2.13.0 `nn/modules/linear_cross_entropy.py`.
Bytes are counted once per pass over a tensor, as if every cache were perfect within a pass.
"""

from __future__ import annotations

import torch
from traced_operations import Operation, Trace


class _Count:
    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self.operations: list[Operation] = []

    def product(self, name: str, rows: int, inner: int, columns: int, moved: int, times: int = 1) -> None:
        one = Operation(name, 2 * rows * inner * columns, self._dtype, moved, (rows, inner, columns))
        self.operations += [one] * times

    def passes(self, name: str, moved: int, times: int = 1) -> None:
        self.operations += [Operation(name, 0, None, moved)] * times


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def three_products(tokens: int, width: int, vocab: int, dtype: torch.dtype) -> Trace:
    """The bound: the operations of three 16-bit products, without any traffic."""
    count = _Count(dtype)
    count.product("bound", tokens, width, vocab, 0, times=3)
    return Trace(tuple(count.operations), 0, 0)


def liger(tokens: int, width: int, vocab: int, dtype: torch.dtype, *, accumulator: int) -> Trace:
    """Fused linear cross-entropy: 16-bit logits, overwritten by their gradient; dW in `accumulator` bytes per entry."""
    chunk = min(tokens, _power_of_two(-(-tokens // -(-vocab // width))))
    chunks = -(-tokens // chunk)
    count = _Count(dtype)
    wide, head = chunk * vocab, vocab * width
    count.passes("zeros of dW and dh", accumulator * head + 2 * tokens * width)
    count.product("logits", chunk, width, vocab, 2 * (chunk * width + head + wide), chunks)
    count.passes("kernel: read for the softmax, read and write for the gradient", 6 * wide, chunks)
    count.product("dh", chunk, vocab, width, 2 * (wide + head + chunk * width), chunks)
    count.product("dW", vocab, chunk, width, 2 * (wide + chunk * width) + 2 * accumulator * head, chunks)
    if accumulator != 2:
        count.passes("dW to the dtype of W", (accumulator + 2) * head)
    # An upstream gradient of 1 is recognised (one synchronisation), and nothing is multiplied.
    beyond, gradients = 2 * wide, accumulator * head + 2 * tokens * width
    peak = max(beyond + gradients, gradients + (2 * head if accumulator != 2 else 0))
    return Trace(tuple(count.operations), peak, beyond)


def torch_linear(tokens: int, width: int, vocab: int, dtype: torch.dtype) -> Trace:
    """torch.nn.functional.linear_cross_entropy with its automatic options for bf16 on CUDA: "compact", "aspect_ratio:2".

    fp32 logits in place through maximum, difference, exp, sum and weight, then one 16-bit copy; dW in 16 bits. No Z.
    """
    chunk = min(tokens, max(1, _power_of_two(-(-tokens // -(-vocab // width))) // 2))
    chunks = -(-tokens // chunk)
    count = _Count(dtype)
    wide, head = chunk * vocab, vocab * width
    count.passes("zeros of dW", 2 * head)
    count.product("logits", chunk, width, vocab, 2 * (chunk * width + head) + 4 * wide, chunks)
    count.passes("maximum and sum: one read each", 4 * wide, 2 * chunks)
    count.passes("difference, exp, weight: read and write each", 8 * wide, 3 * chunks)
    count.passes("16-bit copy", 6 * wide, chunks)
    count.product("dh", chunk, vocab, width, 2 * (wide + head + 2 * chunk * width), chunks)
    count.product("dW", vocab, chunk, width, 2 * (wide + chunk * width) + 4 * head, chunks)
    count.passes("upstream gradient", 4 * (head + tokens * width))
    beyond = 6 * wide + 4 * chunk * width
    return Trace(tuple(count.operations), beyond + 2 * head + 2 * tokens * width, beyond)


def eager(tokens: int, width: int, vocab: int, dtype: torch.dtype) -> Trace:
    """F.linear in 16 bits, `.float()`, F.cross_entropy and λ·logsumexp², backward: every tensor [T, V] is written out.

    Forward: log_softmax reads and writes, logsumexp reads for the maximum, writes exp and reads it for the sum. Backward:
    the one-hot gradient of nll (write), log_softmax (two reads, one write), logsumexp (difference, exp and product: five
    accesses), their sum (two reads, one write), the 16-bit copy.
    """
    count = _Count(dtype)
    wide, head, small = tokens * vocab, vocab * width, tokens * width
    count.product("logits", tokens, width, vocab, 2 * (small + head + wide))
    count.passes(".float()", 6 * wide)
    count.passes("log_softmax", 8 * wide)
    count.passes("logsumexp", (4 + 8 + 4) * wide)
    count.passes("backward of nll and log_softmax", (4 + 12) * wide)
    count.passes("backward of logsumexp", 5 * 4 * wide)
    count.passes("sum of both gradients", 12 * wide)
    count.passes("16-bit copy", 6 * wide)
    count.product("dh", tokens, vocab, width, 2 * (wide + head + small))
    count.product("dW", vocab, tokens, width, 2 * (wide + small + head))
    # At the sum of the gradients: 16-bit and fp32 logits, log-probabilities, both gradients and their sum.
    beyond = (2 + 4 + 4 + 4 + 4 + 4) * wide
    return Trace(tuple(count.operations), beyond + 2 * (head + small), beyond)
