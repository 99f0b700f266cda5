"""A loss from hidden states and a head: its arguments checked once, its tokens flattened to one axis.

Axes: T tokens, V vocabulary rows inside log Z, D width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from zloss.errors import CoordinateError, ShapeError
from zloss.ranks.token_shard import TokenShard
from zloss.ranks.vocabulary_shard import VocabularyShard, whole_vocabulary
from zloss.source.tensor_kind import check_float, check_same_device
from zloss.transport.backends.product_plan import ProductPlan, fp32_plan, plan_products
from zloss.transport.gradient_buffer import check_gradient_buffer
from zloss.transport.options import HeadOptions
from zloss.transport.sharded_arguments import agree_on_shards
from zloss.transport.statistics_plan import StatisticsPlan, plan_statistics
from zloss.transport.targets import Targets, prepare_targets
from zloss.transport.tensor_arguments import autocast_dtype, check_tensors, compute_dtype, may_read

Operands = tuple[Tensor, Tensor, Tensor | None]


@dataclass(frozen=True)
class HeadProblem:
    """A validated head loss: z = logit_scale·(W[:vocab] u + b[:vocab]), softcapped where asked."""

    hidden_TD: Tensor
    weight_VD: Tensor
    """All own rows, padding included; the first `vocab` are inside log Z."""
    bias_V: Tensor | None
    targets: Targets
    shard: VocabularyShard
    """The rows of the vocabulary on this process: all of them, or a rank's part."""
    masked: bool
    """Whether a bias of -inf takes vocabulary entries out of log Z, on any rank."""
    dtype: torch.dtype
    """In which everything is computed: fp64 for fp64 inputs, else fp32."""
    rounding: torch.dtype | None
    """Autocast dtype to which the operands of the projection are rounded, as F.linear would; else None."""
    poisoned_T: Tensor | None
    """Ignored tokens whose hidden state is not finite; they are zeroed so that no NaN reaches a gradient."""
    plan: StatisticsPlan
    """The statistics to return."""
    products: ProductPlan
    """In which dtype the matrix products run."""
    grad_enabled: bool
    """Grad mode of the caller; inside an autograd.Function it reads as off."""
    options: HeadOptions
    weight_grad_buffer: Tensor | None = None
    """Where dW is added, in place of a gradient of its own."""
    tokens: TokenShard | None = None
    """Whose tokens `hidden_TD` has, where each rank holds its own; None where this process holds all of them."""

    @property
    def vocab(self) -> int:
        """Own rows inside log Z."""
        return self.shard.rows

    @property
    def operands(self) -> Operands:
        """What the loss is differentiated by."""
        return self.hidden_TD, self.weight_VD, self.bias_V

    def largest_hidden(self) -> Tensor:
        """max |u| over all tokens."""
        own_TD = self.hidden_TD.detach().abs()
        largest = own_TD.amax() if own_TD.numel() else own_TD.new_zeros(())
        return largest if self.tokens is None else self.shard.max_(largest)

    def scaled_bias(self) -> Tensor | None:
        """s·b of the rows inside log Z in compute precision, rounded first where autocast would; detached."""
        if self.bias_V is None:
            return None
        bias_V = self.bias_V.detach()[: self.vocab]
        bias_V = (bias_V if self.rounding is None else bias_V.to(self.rounding)).to(self.dtype)
        return bias_V * self.options.logit_scale

    def with_operands(self, hidden_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> HeadProblem:
        return replace(self, hidden_TD=hidden_TD, weight_VD=weight_VD, bias_V=bias_V)

    def without_operands(self) -> HeadProblem:
        """The rest, which an autograd graph may keep: the operands are kept by autograd itself."""
        empty = self.hidden_TD.new_empty(0)
        return self.with_operands(empty, empty, None)


def prepare_head(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    options: HeadOptions,
    *,
    token_weight: Tensor | None = None,
    normalizer: float | Tensor | None = None,
    weight_grad_buffer: Tensor | None = None,
    group: ProcessGroup | None = None,
    tokens: TokenShard | None = None,
) -> HeadProblem:
    """Check the tensors against each other and the options, and flatten the leading dimensions.

    With a `group`, `weight` and `bias` are this rank's rows, in rank order; with `tokens`, `hidden` has own tokens only.
    """
    _check_shapes(hidden, weight, target, bias, token_weight)
    check_gradient_buffer(weight_grad_buffer, weight, options)
    dtype = compute_dtype(hidden, weight, bias)
    leading = tuple(hidden.shape[:-1]) if tokens is None else tokens.leading
    first_masked = None if bias is None else _first_minus_inf(bias)
    if group is None:
        shard = whole_vocabulary(options.vocab_of(weight.shape[0]))
        masked = first_masked is not None and first_masked < shard.total
    else:
        shard, masked = agree_on_shards(
            hidden, weight, target, options, group, bias=bias, first_masked=first_masked, leading=leading
        )
    targets = prepare_targets(
        target, torch.Size(leading), shard.total, options, dtype, token_weight=token_weight, normalizer=normalizer
    )
    if masked:
        _refuse_mean_of_masked(options)
    flat_TD = hidden.reshape(-1, hidden.shape[-1])
    poisoned_T = _poisoned_tokens(flat_TD, targets.valid_T, tokens)
    rounding = autocast_dtype(hidden.device.type, dtype)
    if poisoned_T is not None:
        own_T = poisoned_T if tokens is None else poisoned_T[tokens.own]
        flat_TD = torch.where(own_T.unsqueeze(1), flat_TD.new_zeros(()), flat_TD)
    return HeadProblem(
        hidden_TD=flat_TD,
        weight_VD=weight,
        bias_V=bias,
        targets=targets,
        shard=shard,
        masked=masked,
        dtype=dtype,
        rounding=rounding,
        poisoned_T=poisoned_T,
        plan=plan_statistics(
            options.objective,
            options.statistics,
            label_smoothing=options.label_smoothing,
            has_mu=options.softcap is None and not masked,
            has_head=True,
            has_hidden=True,
        ),
        products=plan_products(
            options.products,
            device_type=hidden.device.type,
            hidden=hidden.dtype,
            weight=weight.dtype,
            rounding=rounding,
        )
        if dtype == torch.float32
        else fp32_plan(dtype, hidden.device.type),
        grad_enabled=torch.is_grad_enabled(),
        options=options,
        weight_grad_buffer=weight_grad_buffer,
        tokens=tokens,
    )


def _check_shapes(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, token_weight: Tensor | None
) -> None:
    check_tensors(hidden=hidden, weight=weight, target=target, optional={"bias": bias, "token_weight": token_weight})
    check_float("hidden", hidden)
    check_float("weight", weight)
    if hidden.dim() < 1:
        raise ShapeError("`hidden` is expected to be [..., D], but got a 0-d tensor.")
    if weight.dim() != 2:
        raise ShapeError(f"`weight` is expected to be [V, D], but got {list(weight.shape)}.")
    width = hidden.shape[-1]
    if weight.shape[1] != width:
        advice = " This looks like [D, V]: pass `weight.T`." if weight.shape[0] == width else ""
        raise ShapeError(
            f"`weight` is expected to be [V, D] with D = {width} (the width of `hidden`), "
            f"but got {list(weight.shape)}.{advice}"
        )
    if bias is not None:
        check_float("bias", bias)
        if bias.shape != (weight.shape[0],):
            raise ShapeError(f"`bias` is expected to be [V] = [{weight.shape[0]}], but got {list(bias.shape)}.")
    if width == 0:
        raise ShapeError("the width is zero: `hidden` is [..., 0], so there is nothing to project.")
    check_same_device(hidden=hidden, weight=weight, target=target, bias=bias, token_weight=token_weight)


def _first_minus_inf(bias: Tensor) -> int | None:
    """The first row whose bias is -inf; None without one, and where values cannot be read."""
    if not may_read(bias):
        return None
    rows = torch.isneginf(bias.detach()).nonzero()
    return int(rows[0, 0]) if rows.numel() else None


def _refuse_mean_of_masked(options: HeadOptions) -> None:
    """A bias of -inf takes vocabulary entries out of log Z and leaves no finite mean logit."""
    if options.objective.active and options.objective.needs_mu:
        raise CoordinateError(
            f"{type(options.objective).__name__} needs the mean logit μ, but `bias` holds -inf. "
            "Exclude those rows with `valid_vocab`, or use StandardZLoss."
        )
    if options.label_smoothing and options.softcap is None:
        raise CoordinateError(
            "`label_smoothing` needs the mean logit μ, but `bias` holds -inf. Exclude those rows with `valid_vocab`."
        )


def _poisoned_tokens(hidden_TD: Tensor, valid_T: Tensor, tokens: TokenShard | None) -> Tensor | None:
    own_valid_T = valid_T if tokens is None else valid_T[tokens.own]
    poisoned_T = ~own_valid_T & ~torch.isfinite(hidden_TD.detach().sum(dim=1, dtype=torch.float32))
    if tokens is not None:
        poisoned_T = tokens.whole(poisoned_T)
    if may_read(poisoned_T) and not bool(poisoned_T.any()):
        return None
    return poisoned_T
