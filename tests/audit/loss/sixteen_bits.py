"""Linear losses of 16-bit inputs: copies of kernels whose source is not that of their objective, and of harmless ones.

In all of them, as on tensor cores: products of 16-bit operands accumulate in fp32, and the source is rounded to 16 bits
before the two backward products; what they get wrong is more than that. Inconsistency shows at every size of logits and
grows with it; the filter shows on flat heads of many classes (`head_batch(0.5, …, vocab=49152)`), dropped tokens at peaks
of 80; dW in 16 bits with the number of chunks. fp16 has an eighth of the error of bf16.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.audit.loss.corpus import Case, ce, z


@dataclass(frozen=True)
class Kernel:
    """CE + coef · log²Z, mean over valid tokens. The defaults are right; each field is what some kernel does instead."""

    coef: float = 0.0
    round_logits: bool = False  # log Z is that of logits rounded to the dtype of the inputs …
    recompute_logits: bool = True  # … while the backward pass has them in fp32; False: it reads the rounded ones
    round_log_z: bool = False  # the backward pass has log Z in 16 bits
    filter_block: tuple[int, int] | None = None  # tokens × classes, dropped if each |p − y| < eps / 32; 0: all of them
    sort_vocab: bool = False  # blocks are of classes sorted by mean logit
    chunk: int | None = None  # tokens per product into dW …
    accumulate_in_fp32: bool = True  # … which False keeps in the dtype of the inputs in between

    def __call__(self, hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return _Apply.apply(hidden, weight, target, self)

    def logits(self, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Of the forward and of the backward pass."""
        exact = hidden.float() @ weight.float().T
        forward = exact.to(hidden.dtype).float() if self.round_logits else exact
        return forward, exact if self.recompute_logits else forward

    def source(self, hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        """Of each token, undivided, in fp32; `target` has no ignored token."""
        forward, backward = self.logits(hidden, weight)
        log_z = forward.logsumexp(-1, keepdim=True)
        p = (backward - (log_z.to(hidden.dtype).float() if self.round_log_z else log_z)).exp()
        error = p - F.one_hot(target, p.shape[-1])
        source = error + 2 * self.coef * log_z * p
        if self.filter_block is None or len(p) == 0:
            return source
        order = backward.mean(0).argsort() if self.sort_vocab else torch.arange(p.shape[-1])
        rows, columns = self.filter_block[0], self.filter_block[1] or p.shape[-1]
        largest = F.max_pool2d(error[None, :, order].abs(), (rows, columns), ceil_mode=True)[0]
        blocks = (largest >= torch.finfo(hidden.dtype).eps / 32).repeat_interleave(rows, 0)[: len(p)]
        return source * blocks.repeat_interleave(columns, 1)[:, order.argsort()]


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, kernel: Kernel) -> Tensor:
        ctx.save_for_backward(hidden, weight, target)
        ctx.kernel = kernel
        keep = target != -100
        logits, _ = kernel.logits(hidden[keep], weight)
        log_z = logits.logsumexp(-1)
        nll = log_z - logits.gather(-1, target[keep, None])[:, 0]
        return (nll + kernel.coef * log_z**2).sum() / keep.sum().clamp(min=1)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, target = ctx.saved_tensors
        kernel, dtype, keep = ctx.kernel, hidden.dtype, target != -100
        source = kernel.source(hidden[keep], weight, target[keep]).to(dtype).float()
        scale = upstream / keep.sum().clamp(min=1)
        d_hidden = torch.zeros_like(hidden)
        d_hidden[keep] = (scale * source @ weight.float()).to(dtype)
        step = kernel.chunk or len(source)
        d_weight = torch.zeros_like(weight, dtype=torch.float32 if kernel.accumulate_in_fp32 else dtype)
        for rows, h in zip(source.split(step), hidden[keep].split(step), strict=True):
            d_weight += (scale * rows.T @ h.float()).to(d_weight.dtype)
        return d_hidden, d_weight.to(weight.dtype), None, None


KERNELS: dict[str, tuple[Kernel, set[str], set[str]]] = {  # its mistake, and what else is right to say
    "log Z of rounded logits": (Kernel(round_logits=True), {"inconsistent_softmax"}, set()),
    "log Z rounded for the backward pass": (Kernel(round_log_z=True), {"inconsistent_softmax"}, set()),
    "filtered": (Kernel(filter_block=(128, 128)), {"filtered_source"}, set()),
    "filtered and sorted": (Kernel(filter_block=(128, 128), sort_vocab=True), {"filtered_source"}, set()),
    "confident tokens dropped": (Kernel(filter_block=(1, 0)), {"filtered_source"}, set()),
    "dW in 16 bits over chunks": (Kernel(chunk=16, accumulate_in_fp32=False), {"chunk_accumulation"}, set()),
    "dW in fp32 over chunks": (Kernel(chunk=16), set(), set()),
    "fp32 inside": (Kernel(), set(), set()),
    "stored in 16 bits": (Kernel(round_logits=True, recompute_logits=False), set(), {"low_precision_source"}),
}

SIXTEEN_BITS = [
    Case(
        f"{name}, λ = {coef:g}",
        replace(kernel, coef=coef),
        truth=z(coef) if coef else ce(),
        call={"linear": True},
        defects=frozenset(defects),
        also=frozenset(also),
    )
    for coef in (0.0, 1e-4)
    for name, (kernel, defects, also) in KERNELS.items()
    if coef or name != "confident tokens dropped"  # without Z nothing is lost
]


def head_batch(peak: float, dtype: torch.dtype, tokens: int = 512, vocab: int = 1024) -> tuple[Tensor, Tensor, Tensor]:
    """The largest |logit| is `peak`; every other target is the most likely class, every seventh is ignored."""
    rng = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(tokens, 64, generator=rng), torch.randn(vocab, 64, generator=rng)
    weight *= peak / (hidden @ weight.T).abs().max()
    target = torch.randint(vocab, (tokens,), generator=rng)
    target[::2] = (hidden @ weight.T).argmax(-1)[::2]
    target[::7] = -100
    return hidden.to(dtype), weight.to(dtype), target
