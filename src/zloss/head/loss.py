"""`head_loss` and `logits_loss`: cross-entropy plus any Z-loss of the paper, from hidden states and the output head, or
from logits you already have.

A call goes through four steps: the options check themselves (`options.py`), the tensors become a validated problem
(`arguments.py`), a backend computes the loss and its gradients (`chunked.py` on the CPU, `triton.py` on a GPU,
`reference.py` for the definition), and the parts are returned in the shape of `target`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, ParamSpec, TypeVar, Unpack

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from zloss.distributed import is_dtensor
from zloss.head.arguments import (
    DenominatorName,
    HeadProblem,
    LogitsProblem,
    LossParts,
    Targets,
    prepare_head,
    prepare_logits,
)
from zloss.head.chunked import chunked_loss
from zloss.head.options import ChosenBackend, HeadKeywords, HeadOptions, prefers_triton, resolve_backend, shows_options
from zloss.head.reference import dense_loss
from zloss.head.sharded import TokenLayout
from zloss.objectives import Objective
from zloss.statistics import TokenStats
from zloss.tensors import compute_dtype

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, repr=False)
class HeadLossOutput:
    """What a loss returns: the differentiable sum, its two parts separately, and the statistics of every token.

    >>> import torch, zloss
    >>> zloss.logits_loss(torch.zeros(3, 8), torch.tensor([1, 2, -100]), zloss.StandardZLoss(0.1, target=0.0))
    HeadLossOutput(loss=2.51185, cross_entropy=2.07944, auxiliary=0.432408, tokens=2 of 3)
    """

    loss: Tensor
    """CE + auxiliary, reduced; differentiable; fp32 (fp64 for fp64 inputs)."""
    cross_entropy: Tensor
    """The CE part, detached; loss = cross_entropy + auxiliary."""
    auxiliary: Tensor
    """The Z part, detached."""
    stats: TokenStats
    denominator: Tensor
    """N, by which both parts were divided (1 for "sum" and "none"). If it is 0, both parts are 0."""
    denominator_name: DenominatorName
    """What N counts."""

    def __repr__(self) -> str:
        parts = [f"{name}={_shown(getattr(self, name))}" for name in ("loss", "cross_entropy", "auxiliary")]
        valid = self.stats.valid
        return f"HeadLossOutput({', '.join(parts)}, tokens={_shown(valid.sum())} of {valid.numel()})"


def _shown(tensor: Tensor) -> str:
    """The number of a 0-d tensor, else its shape; also without values, as on the meta device or while a compiler traces."""
    try:
        return f"{tensor.item():.6g}"
    except RuntimeError:
        return str(list(tensor.shape))


@shows_options(HeadKeywords)
def head_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    objective: Objective,
    *,
    bias: Tensor | None = None,
    normalizer: float | Tensor | None = None,
    token_weight: Tensor | None = None,
    weight_grad_buffer: Tensor | None = None,
    group: ProcessGroup | None = None,
    **options: Unpack[HeadKeywords],
) -> HeadLossOutput:
    """Σ_t w_t (CE_t + aux_t) / N for z = logit_scale·(W u + b), without keeping the logits.

    `hidden` [..., D], `weight` [V, D], `target` [...]. If the head has a bias, as `nn.Linear` has by default, pass
    `bias=head.bias`: a bias that is left out is not trained, although the model adds it. w is `token_weight`, 1 without
    it; N is Σ w over valid tokens, or the global `normalizer` (`zloss.global_normalizer`). A batch without valid tokens
    has loss 0 and zero gradients. Further keywords:

    - `ignore_index`: the target of tokens that do not count
    - `reduction`: "mean", "sum", or "none" for w_t·ℓ_t in the shape of `target`
    - `valid_vocab`: rows of the head from there on are padding, outside log Z, the mean logit μ and w̄, the mean row of
      the head; None: no padding
    - `logit_scale`, `softcap`, `label_smoothing`: s, cap in cap·tanh(z/cap), and ε of (1 − ε)·onehot(y) + ε/V
    - `statistics`: "full", or "light" to skip what the loss itself does not need
    - `backend`: "auto" (Triton on a GPU, "chunked" elsewhere), "chunked", "triton", or "dense", the slow reference
    - `products`: dtype of the matrix products, "operand" (16 bits) or "fp32"; "auto" is "operand" on a GPU for 16-bit
      operands
    - `chunk_size`, `memory_budget`: tokens per chunk, and bytes of the V-wide buffers that limit it

    If `weight_grad_buffer` (fp32 [V, D], e.g. Megatron's `main_grad`) is given, dW is accumulated into it. For a
    vocabulary-parallel head pass a DTensor with Shard(0), or the local rows and `group=`; every rank returns
    full-vocabulary results.

    >>> import torch, zloss
    >>> hidden, weight = torch.randn(4, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
    >>> out = zloss.head_loss(hidden, weight, torch.tensor([1, 2, -100, 10]), zloss.CenteredZLoss(coef=1e-4))
    >>> out.loss.backward()
    >>> int(out.denominator), out.stats.gain.shape
    (3, torch.Size([4]))
    """
    checked = HeadOptions(objective, **options)
    return _head_loss(hidden, weight, target, bias, checked, normalizer, token_weight, weight_grad_buffer, group)


class HeadLoss(nn.Module):
    """`head_loss` with its options fixed: the module form for training code.

    >>> import torch, zloss
    >>> loss_fn = zloss.HeadLoss(zloss.StandardZLoss(1e-4), ignore_index=0)
    >>> out = loss_fn(torch.randn(2, 3, 8), torch.randn(11, 8), torch.randint(11, (2, 3)))
    """

    @shows_options(HeadKeywords)
    def __init__(
        self, objective: Objective, *, group: ProcessGroup | None = None, **options: Unpack[HeadKeywords]
    ) -> None:
        super().__init__()
        self.group = group
        self.options = HeadOptions(objective, **options)

    @property
    def objective(self) -> Objective:
        return self.options.objective

    def forward(
        self,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        *,
        bias: Tensor | None = None,
        normalizer: float | Tensor | None = None,
        token_weight: Tensor | None = None,
        weight_grad_buffer: Tensor | None = None,
        group: ProcessGroup | None = None,
    ) -> HeadLossOutput:
        """The loss of these tensors; the arguments are the same as for `head_loss`. `group` overrides the module's `group`."""
        group = self.group if group is None else group
        return _head_loss(
            hidden, weight, target, bias, self.options, normalizer, token_weight, weight_grad_buffer, group
        )

    def extra_repr(self) -> str:
        named = (field.name for field in fields(self.options) if field.name != "objective")
        return ", ".join([str(self.objective), *(f"{name}={getattr(self.options, name)!r}" for name in named)])


@shows_options(HeadKeywords)
def logits_loss(
    logits: Tensor,
    target: Tensor,
    objective: Objective,
    *,
    weight: Tensor | None = None,
    normalizer: float | Tensor | None = None,
    token_weight: Tensor | None = None,
    group: ProcessGroup | None = None,
    **options: Unpack[HeadKeywords],
) -> HeadLossOutput:
    """The loss of `head_loss` from `logits` [..., V]; `weight` [V, D] is needed only for the gain (and gain-aware Z-loss).

    `logit_scale` and `softcap` are applied to `logits` here: leave both at their defaults if the model has already applied them.
    For vocabulary-parallel logits pass a DTensor with Shard(-1), or the local columns and `group=`. Logits may also be a
    DTensor that is sharded over tokens, with the targets of all of them: every rank returns the loss of all tokens, and
    the gradient is sharded like the logits. The caller's logits are never overwritten. 16-bit logits are read in fp32;
    what their storage has lost cannot be recovered (paper sec:precision_link).

    >>> import torch, zloss
    >>> logits = torch.randn(3, 11, requires_grad=True)
    >>> zloss.logits_loss(logits, torch.tensor([1, 2, 3]), zloss.StandardZLoss(1e-4)).loss.backward()
    """
    return _logits_loss(logits, target, weight, HeadOptions(objective, **options), normalizer, token_weight, group)


def _compute_head_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    options: HeadOptions,
    normalizer: float | Tensor | None,
    token_weight: Tensor | None,
    weight_grad_buffer: Tensor | None,
    group: ProcessGroup | None,
) -> HeadLossOutput:
    problem = prepare_head(
        hidden,
        weight,
        target,
        bias,
        options,
        token_weight=token_weight,
        normalizer=normalizer,
        weight_grad_buffer=weight_grad_buffer,
        group=group,
    )
    backend = resolve_backend(options.backend, hidden.device, problem.dtype)
    if options.reduction == "none" and torch.compiler.is_compiling():
        backend = "dense"
    loss, cross_entropy, auxiliary, stats = _parts(problem, backend)
    if problem.nonfinite_mask_T is not None:
        stats = replace(stats, row_max=stats.row_max.masked_fill(problem.nonfinite_mask_T, torch.nan))
    return _output(problem.targets, loss, cross_entropy, auxiliary, stats)


def _compute_logits_loss(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    options: HeadOptions,
    normalizer: float | Tensor | None,
    token_weight: Tensor | None,
    group: ProcessGroup | None,
) -> HeadLossOutput:
    problem = prepare_logits(
        logits, target, weight, options, token_weight=token_weight, normalizer=normalizer, group=group
    )
    # Triton's row kernels need complete rows, so a rank that holds only some columns uses the chunked backend anywhere.
    whole = problem.shard.whole
    backend = resolve_backend(options.backend, logits.device, problem.dtype) if whole else "chunked"
    parts = _parts(problem, backend)
    if problem.layout is not None:
        parts = _of_all_tokens(problem, problem.layout, *parts)
    return _output(problem.targets, *parts)


def _parts(problem: HeadProblem | LogitsProblem, backend: ChosenBackend) -> LossParts:
    """Run the backend on the problem."""
    if backend == "dense":
        return dense_loss(problem)
    if backend == "triton":
        from zloss.head.triton import triton_loss

        return triton_loss(problem)
    return chunked_loss(problem)


def _of_all_tokens(
    problem: LogitsProblem,
    layout: TokenLayout,
    loss: Tensor,
    cross_entropy: Tensor,
    auxiliary: Tensor,
    stats: TokenStats,
) -> LossParts:
    """The parts of a backend for the tokens of all ranks, from those of the local tokens."""
    join = layout.gather if loss.dim() else layout.sum
    gathered: dict[str, Any] = {name: layout.gather(getattr(stats, name)) for name in problem.plan.present}
    return join(loss), join(cross_entropy), join(auxiliary), replace(stats, valid=problem.valid_T, **gathered)


def _output(
    targets: Targets, loss: Tensor, cross_entropy: Tensor, auxiliary: Tensor, stats: TokenStats
) -> HeadLossOutput:
    """The parts of a backend in the shape of `target`, with their denominator."""
    if targets.reduction == "none":
        loss, cross_entropy, auxiliary = (part.reshape(targets.shape) for part in (loss, cross_entropy, auxiliary))
    return HeadLossOutput(
        loss, cross_entropy, auxiliary, stats.reshape(targets.shape), targets.denominator, targets.denominator_name
    )


# --- under torch.compile --------------------------------------------------------------------------------------------------


def outside_compile(function: Callable[P, R], unless: Callable[P, bool] | None = None) -> Callable[P, R]:
    """Keep a function out of torch.compile's trace: compiled code around it breaks its graph there and continues after it.

    Checks that read values and buffers that are written in place cannot be traced. `unless` returns True for calls that can
    be traced; these join the compiled graph. `torch.compiler.disable` imports torch._dynamo when it decorates, which takes
    seconds, so it is called only once torch._dynamo has been imported by the code that compiles.
    """
    untraced: list[Callable[P, R]] = []

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if unless is not None and torch.compiler.is_compiling() and unless(*args, **kwargs):
            return function(*args, **kwargs)
        if not untraced:
            untraced.append(torch.compiler.disable(function))  # type: ignore[no-untyped-call]
        return untraced[0](*args, **kwargs)

    return call


def _is_traceable(*tensors: Tensor | None) -> bool:
    """True if a compiler may trace a loss of these tensors: not with DTensors, whose ranks compare their arguments."""
    return not any(is_dtensor(tensor) for tensor in tensors)


# Two cases cannot be traced: a buffer for dW, which is written in forward, and ranks, which compare their arguments. Per-token
# losses from hidden states keep the logits [T, V] in a compiled graph; in Triton they break it instead, because the
# backward pass that recomputes the chunks cannot be traced.
_head_loss = outside_compile(
    _compute_head_loss,
    unless=lambda hidden, weight, target, bias, options, normalizer, token_weight, weight_grad_buffer, group: (
        group is None
        and weight_grad_buffer is None
        and not (options.reduction == "none" and _runs_triton(options, hidden, weight, bias))
        and _is_traceable(hidden, weight, bias)
    ),
)
_logits_loss = outside_compile(
    _compute_logits_loss,
    unless=lambda logits, target, weight, options, normalizer, token_weight, group: (
        group is None and _is_traceable(logits, weight)
    ),
)


def _runs_triton(options: HeadOptions, hidden: Tensor, *others: Tensor | None) -> bool:
    if options.backend != "auto":
        return options.backend == "triton"
    return prefers_triton(hidden.device, compute_dtype(hidden, *others))
