"""From the arguments of a public call to a validated problem: tensors checked once, tokens flattened to one axis.

Here a loss gets its denominator, which cross-entropy and auxiliary share (`prepare_targets`). `prepare_head` and
`prepare_logits` raise every error that the arguments alone reveal, before anything is computed. Two checks need results:
`check_mean` while the chunks run and `check_rows` after them. Checks that read values run on the CPU only.

Axes: T tokens, V vocabulary rows inside log Z, D width.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from zloss.distributed import check_integers, check_target_range
from zloss.errors import CoordinateError, DtypeError, InputError, MissingInputError, ShapeError
from zloss.head.options import HeadOptions, Reduction, check_vocab
from zloss.head.products import ProductPlan, fp32_plan, plan_products
from zloss.head.sharded import (
    TokenLayout,
    VocabularyShard,
    agree_on_shards,
    agree_on_tokens,
    local_head,
    local_logits,
    whole_vocabulary,
)
from zloss.statistics import StatisticsPlan, TokenStats, plan_statistics
from zloss.tensors import (
    as_denominator,
    autocast_dtype,
    check_float,
    check_same_device,
    check_tensors,
    compute_dtype,
    may_read,
)

DenominatorName = Literal["valid_tokens", "token_weight", "normalizer", "one"]
LossParts = tuple[Tensor, Tensor, Tensor, TokenStats]
"""What a backend returns: (loss with gradient, cross-entropy, auxiliary, statistics), reduced, tokens on one axis."""


@dataclass(frozen=True)
class Targets:
    """Flattened targets with their reduction weights."""

    index_T: Tensor
    """int64, with 0 in place of `ignore_index`."""
    valid_T: Tensor
    """bool; False at ignored tokens."""
    all_valid: bool
    """No token is ignored; False where values cannot be read."""
    weight_T: Tensor
    """w_t / N, 0 at ignored tokens."""
    reduction: Reduction
    denominator: Tensor
    """N, by which both parts of the loss are divided (1 for "sum" and "none"). If it is 0, both parts are 0."""
    denominator_name: DenominatorName
    shape: torch.Size
    """The shape of `target` as the caller passed it."""

    def weighted(self, value_T: Tensor) -> Tensor:
        """w_t·value_t, 0 at ignored tokens, whatever their value."""
        weighted_T = self.weight_T * value_T
        return weighted_T if self.all_valid else torch.where(self.valid_T, weighted_T, 0)

    def reduced(self, value_T: Tensor) -> Tensor:
        """Σ_t w_t·value_t for "mean" and "sum", w_t·value_t for "none"."""
        weighted_T = self.weighted(value_T)
        return weighted_T if self.reduction == "none" else weighted_T.sum()


@dataclass(frozen=True, kw_only=True)
class LossProblem:
    """A validated loss: what losses of hidden states and losses of logits share."""

    operand_names: ClassVar[tuple[str, ...]]
    """The fields by which the loss is differentiated."""
    targets: Targets
    shard: VocabularyShard
    """The rows of the vocabulary on this process: all of them, or a rank's part."""
    dtype: torch.dtype
    """Compute dtype: fp64 for fp64 inputs, else fp32."""
    plan: StatisticsPlan
    products: ProductPlan
    options: HeadOptions
    rounding: torch.dtype | None = None
    """Autocast dtype to which the operands of the projection are rounded, as F.linear would; else None."""
    weight_grad_buffer: Tensor | None = None
    """Accumulates dW, which is then not returned."""

    @property
    def local_rows(self) -> int:
        """Rows of the vocabulary on this process, inside log Z."""
        return self.shard.rows

    @property
    def through_source(self) -> bool:
        """Whether the gradients are formed from the source [C, V] itself."""
        raise NotImplementedError

    @property
    def operands(self) -> tuple[Tensor | None, ...]:
        return tuple(getattr(self, name) for name in self.operand_names)

    def with_operands(self, operands: Iterable[Tensor | None]) -> Self:
        changed = object.__new__(type(self))
        changed.__dict__.update(self.__dict__, **dict(zip(self.operand_names, operands, strict=True)))
        return changed


@dataclass(frozen=True, kw_only=True)
class HeadProblem(LossProblem):
    """A validated head loss: z = logit_scale·(W[:local_rows] u + b[:local_rows]), softcapped if requested."""

    operand_names: ClassVar[tuple[str, ...]] = ("hidden_TD", "weight_VD", "bias_V")
    hidden_TD: Tensor
    weight_VD: Tensor
    """All local rows, padding included; the first `local_rows` are inside log Z."""
    bias_V: Tensor | None
    nonfinite_mask_T: Tensor | None
    """Ignored tokens whose hidden state is not finite; they are zeroed so that no NaN reaches a gradient."""

    @property
    def partial_projection(self) -> bool:
        """Whether a rank keeps the E W of its local rows, so that dh is summed over ranks and not E W: without the gain."""
        return not (self.shard.whole or self.plan.gain)

    @property
    def through_source(self) -> bool:
        """Whether the gradients are products of the source itself: under a softcap the slope of every logit is in the term
        of label smoothing along 1/V."""
        return self.options.softcap is not None and self.options.label_smoothing != 0

    def scaled_bias(self) -> Tensor | None:
        """s·b of the rows inside log Z in compute precision, rounded first where autocast would; detached."""
        if self.bias_V is None:
            return None
        bias_V = self.bias_V.detach()[: self.local_rows]
        bias_V = (bias_V if self.rounding is None else bias_V.to(self.rounding)).to(self.dtype)
        return bias_V * self.options.logit_scale


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
) -> HeadProblem:
    """Check the tensors against each other and the options, and flatten the leading dimensions.

    DTensors become this rank's plain tensors. With a `group`, `weight` and `bias` are this rank's rows, in rank order.
    """
    check_tensors(hidden=hidden, weight=weight, target=target, optional={"bias": bias, "token_weight": token_weight})
    hidden, weight, bias, target, token_weight, group = local_head(hidden, weight, bias, target, token_weight, group)
    _check_shapes(hidden, weight, target, bias, token_weight)
    dtype = compute_dtype(hidden, weight, bias)
    if weight_grad_buffer is not None:
        _check_gradient_buffer(weight_grad_buffer, weight, dtype, options)
    first_masked = None if bias is None else _first_minus_inf(bias)
    if group is None:
        shard = whole_vocabulary(check_vocab(options.valid_vocab, weight.shape[0]))
        masked = first_masked is not None and first_masked < shard.total
    else:
        shard, masked = agree_on_shards(hidden, weight, target, options, group, bias=bias, first_masked=first_masked)
    targets = prepare_targets(
        target, hidden.shape[:-1], shard.total, options, dtype, token_weight=token_weight, normalizer=normalizer
    )
    if masked:
        options.refuse_missing_mean(
            "`bias` holds -inf. Exclude those rows with `valid_vocab`, or use StandardZLoss without label smoothing."
        )
    flat_TD = hidden if hidden.dim() == 2 else hidden.reshape(-1, hidden.shape[-1])
    nonfinite_mask_T = None
    if not targets.all_valid:
        mask_T = ~targets.valid_T & ~torch.isfinite(flat_TD.detach().sum(dim=1, dtype=torch.float32))
        if not may_read(mask_T) or bool(mask_T.any()):
            nonfinite_mask_T = mask_T
            flat_TD = torch.where(mask_T.unsqueeze(1), 0, flat_TD)
    rounding = autocast_dtype(hidden.device.type, dtype)
    return HeadProblem(
        hidden_TD=flat_TD,
        weight_VD=weight,
        bias_V=bias,
        targets=targets,
        shard=shard,
        dtype=dtype,
        rounding=rounding,
        nonfinite_mask_T=nonfinite_mask_T,
        plan=_plan(options, has_mu=options.softcap is None and not masked, has_head=True, has_hidden=True),
        # A source in 16 bits would lose the Z-loss of confident tokens: with smoothing under a softcap products are fp32.
        products=plan_products(
            options.products,
            device_type=hidden.device.type,
            hidden=hidden.dtype,
            weight=weight.dtype,
            rounding=rounding,
        )
        if dtype == torch.float32 and (options.softcap is None or not options.label_smoothing)
        else fp32_plan(dtype, hidden.device.type),
        options=options,
        weight_grad_buffer=weight_grad_buffer,
    )


def _check_shapes(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, token_weight: Tensor | None
) -> None:
    check_float("hidden", hidden)
    check_float("weight", weight)
    if hidden.dim() < 1:
        raise ShapeError("`hidden` is expected to be [..., D], but got a 0-d tensor.")
    if weight.dim() != 2:
        raise ShapeError(f"`weight` is expected to be [V, D], but got {list(weight.shape)}.")
    width = hidden.shape[-1]
    if weight.shape[1] != width:
        advice = ""
        if weight.shape[0] == width:
            advice = " This looks like [D, V]: pass `weight.T`. If `hidden` holds logits, use `zloss.logits_loss`."
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


def _check_gradient_buffer(buffer: Tensor, weight: Tensor, dtype: torch.dtype, options: HeadOptions) -> None:
    """Reject a buffer that could not take dW, or would take it twice.

    For "mean" and "sum" the gradients are formed in the forward pass, so dW is in the buffer as soon as the loss returns,
    and `weight.grad` stays as it was. The upstream gradient must be 1: factors of the loss (a loss scale, 1/micro-batches)
    go into `normalizer` or `token_weight`. For "none" dW is added in the backward pass, with the upstream gradient of every
    token.
    """
    check_tensors(weight=weight, weight_grad_buffer=buffer)
    check_same_device(weight_grad_buffer=buffer, weight=weight)
    training = torch.is_grad_enabled()
    refusals: list[tuple[bool, type[InputError], str]] = [
        (
            buffer.dtype != torch.float32 or dtype == torch.float64,
            DtypeError,
            "is expected to be fp32, and `hidden`, `weight` and `bias` fp32, bf16 or fp16, "
            f"but got {buffer.dtype} for a `weight` of {weight.dtype} and a loss computed in {dtype}.",
        ),
        (
            buffer.shape != weight.shape,
            ShapeError,
            f"is expected to have the shape of `weight`, {list(weight.shape)}, but got {list(buffer.shape)}.",
        ),
        (buffer.requires_grad, InputError, "must not require a gradient: pass `buffer.detach()`."),
        (
            options.backend == "dense",
            InputError,
            "needs a chunked backend: use backend='auto', 'chunked' or 'triton'.",
        ),
        (
            training and not weight.requires_grad,
            InputError,
            "was given for a `weight` that does not require a gradient.",
        ),
        (
            training and options.reduction != "none" and torch._C._current_graph_task_id() != -1,
            InputError,
            "cannot be combined with activation checkpointing of the loss: the recomputation would add dW a second time. "
            "Call the loss outside the checkpointed part, or use reduction='none'.",
        ),
    ]
    for refused, error, reason in refusals:
        if refused:
            raise error(f"`weight_grad_buffer` {reason}")


def _first_minus_inf(bias: Tensor) -> int | None:
    """The first row whose bias is -inf; None without one, or if values cannot be read."""
    if not may_read(bias):
        return None
    rows = torch.isneginf(bias.detach()).nonzero()
    return int(rows[0, 0]) if rows.numel() else None


def _plan(options: HeadOptions, *, has_mu: bool, has_head: bool, has_hidden: bool) -> StatisticsPlan:
    return plan_statistics(
        options.statistics,
        needs_mu=options.objective.needs_mu or options.label_smoothing != 0,
        needs_gain=options.uses_gain,
        has_mu=has_mu,
        has_head=has_head,
        has_hidden=has_hidden,
    )


@dataclass(frozen=True, kw_only=True)
class LogitsProblem(LossProblem):
    """A validated loss of logits: z = logit_scale·logits[:, :local_rows], softcapped if requested. Its only product is E W, for
    the gain."""

    operand_names: ClassVar[tuple[str, ...]] = ("logits_TV",)
    logits_TV: Tensor
    """Padding columns included; the first `local_rows` are inside log Z."""
    weight_VD: Tensor | None
    """The head, for the gain; it gets no gradient."""
    layout: TokenLayout | None = None
    """How the tokens are divided, if each rank has some of them; `targets` then covers local tokens only, weighted by the
    global 1/N."""
    valid_T: Tensor
    """Validity of all tokens; equal to `targets.valid_T` unless tokens are sharded."""

    @property
    def through_source(self) -> bool:
        """The gradient is the source itself."""
        return True


def prepare_logits(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    options: HeadOptions,
    *,
    token_weight: Tensor | None = None,
    normalizer: float | Tensor | None = None,
    group: ProcessGroup | None = None,
) -> LogitsProblem:
    """Check the tensors against each other and the options, and flatten the leading dimensions.

    With a `group`, `logits` and `weight` are this rank's columns and rows, in rank order.
    """
    check_tensors(logits=logits, target=target, optional={"weight": weight, "token_weight": token_weight})
    logits, weight, target, token_weight, group, layout = local_logits(logits, weight, target, token_weight, group)
    if logits.dim() < 1 or not logits.is_floating_point():
        raise ShapeError(
            f"`logits` is expected to be a float tensor [..., V], but got {logits.dtype} {list(logits.shape)}."
        )
    rows = logits.shape[-1]
    if weight is not None and (weight.dim() != 2 or weight.shape[0] != rows):
        raise ShapeError(
            f"`weight` is expected to be [V, D] with V = {rows} (the logits), but got {list(weight.shape)}."
        )
    if options.uses_gain and weight is None:
        raise MissingInputError(
            f"{type(options.objective).__name__} needs the output-to-hidden gain: pass `weight`, the [V, D] output head."
        )
    check_same_device(logits=logits, target=target, weight=weight, token_weight=token_weight)
    if group is None:
        shard = whole_vocabulary(check_vocab(options.valid_vocab, rows))
    else:
        shard, _ = agree_on_shards(logits, logits, target, options, group, dim=-1)
    dtype = compute_dtype(logits, weight)
    leading = logits.shape[:-1] if layout is None else layout.leading
    targets = prepare_targets(
        target, leading, shard.total, options, dtype, token_weight=token_weight, normalizer=normalizer
    )
    valid_T = targets.valid_T
    if layout is not None:
        agree_on_tokens(target, options, layout.group)
        index_T, local_valid_T, weight_T = (layout.local(x) for x in (targets.index_T, valid_T, targets.weight_T))
        targets = replace(targets, index_T=index_T, valid_T=local_valid_T, weight_T=weight_T)
    # The gradient at the logits is not a product: only the gain is, and its factors are E and W.
    products = fp32_plan(dtype, logits.device.type)
    if weight is not None and dtype == torch.float32:
        products = plan_products(
            options.products, device_type=logits.device.type, hidden=weight.dtype, weight=weight.dtype
        )
    return LogitsProblem(
        # Written out because a rank may hold no column, and then -1 is ambiguous.
        logits_TV=logits if logits.dim() == 2 else logits.reshape(logits.shape[:-1].numel(), rows),
        weight_VD=weight,
        targets=targets,
        shard=shard,
        dtype=dtype,
        plan=_plan(options, has_mu=options.softcap is None, has_head=weight is not None, has_hidden=False),
        products=products,
        options=options,
        layout=layout,
        valid_T=valid_T,
    )


def prepare_targets(
    target: Tensor,
    leading: torch.Size,
    vocab: int,
    options: HeadOptions,
    dtype: torch.dtype,
    *,
    token_weight: Tensor | None = None,
    normalizer: float | Tensor | None = None,
) -> Targets:
    """Targets and token weights, checked against the leading shape and the vocabulary.

    w_t / N with N = Σ w_t over valid tokens for "mean", or the explicit global `normalizer`; 1 for "sum" and "none".
    If N = 0 (all tokens ignored, weights that sum to 0, or a normalizer of 0) every weight is 0 instead of 0/0: the loss is
    0 and all gradients are zeros. Values computed at an ignored token stay out of the loss (`Targets.weighted`) and of the
    coefficients (`TokenLoss.exp_coefficients`); nonfinite ones are replaced by 0 in the hidden states (`prepare_head`) and in E
    (`TorchRows.statistics`). The head itself must be finite. There is no early exit: gradients are zero tensors, not None.
    """
    if target.is_floating_point() and target.dim() == len(leading) + 1:
        raise DtypeError(
            f"`target` holds probabilities {list(target.shape)}, but the loss takes one class index per token, {list(leading)}: "
            "use `label_smoothing`, or add the cross-entropy against soft targets as a separate term."
        )
    check_integers("target", target)
    if target.shape != leading:
        raise ShapeError(
            f"`target` is expected to have the leading shape {list(leading)} of the logits or hidden states, "
            f"but got {list(target.shape)}."
        )
    if token_weight is not None and token_weight.shape != target.shape:
        raise ShapeError(
            f"`token_weight` is expected to have the shape of `target`, {list(target.shape)}, "
            f"but got {list(token_weight.shape)}."
        )
    flat_T = (target if target.dim() == 1 else target.reshape(-1)).long()
    ignore_index, readable = options.ignore_index, may_read(target)
    all_valid = False
    if readable and flat_T.numel():
        low, high = (int(bound) for bound in torch.aminmax(flat_T))
        all_valid = low >= 0 and high < vocab and not low <= ignore_index <= high
    if all_valid:  # a copy, because a backward pass that recomputes reads it again
        index_T, valid_T = flat_T.clone(), torch.ones_like(flat_T, dtype=torch.bool)
    else:
        valid_T = flat_T != ignore_index
        index_T = torch.where(valid_T, flat_T, 0)
        if readable:
            check_target_range("target", index_T, ignore_index, vocab)

    if all_valid and token_weight is None and normalizer is None and options.reduction == "mean":
        weight_T = torch.full(flat_T.shape, 1 / flat_T.numel(), dtype=dtype, device=flat_T.device)
        count = torch.full((), flat_T.numel(), dtype=dtype, device=flat_T.device)
        return Targets(index_T, valid_T, True, weight_T, "mean", count, "valid_tokens", target.shape)
    weight_T = valid_T.to(dtype)
    if token_weight is not None:
        # `where`, not a product: an ignored token's weight may be anything, even NaN.
        weight_T = torch.where(valid_T, token_weight.reshape(-1).detach().to(dtype), 0)
    name: DenominatorName
    if options.reduction != "mean":
        if normalizer is not None:
            raise InputError(
                f"`normalizer` replaces the denominator of reduction='mean', but reduction={options.reduction!r}."
            )
        denominator, name = weight_T.new_ones(()), "one"
    else:
        if normalizer is not None:
            denominator, name = as_denominator(normalizer, weight_T), "normalizer"
        else:
            denominator, name = weight_T.sum(), "valid_tokens" if token_weight is None else "token_weight"
        if readable:
            weight_T = weight_T / denominator if float(denominator) else torch.zeros_like(weight_T)
        else:
            empty = denominator == 0
            weight_T = torch.where(empty, 0, weight_T / torch.where(empty, 1, denominator))
    return Targets(index_T, valid_T, all_valid, weight_T, options.reduction, denominator, name, target.shape)


def check_rows(stats: TokenStats) -> None:
    """Reject a valid token whose logits are all -inf: it has no distribution."""
    if not may_read(stats.row_max):
        return
    if not stats.row_max.numel() or float(stats.row_max.min()) > -math.inf:
        return
    # A row of NaN has no maximum either, but it is a diverged model, whose loss is NaN, and not a masking mistake.
    empty = torch.isneginf(stats.row_max) & stats.valid & ~torch.isnan(stats.target_logit)
    if bool(empty.any()):
        count, first = int(empty.sum()), int(empty.nonzero()[0, 0])
        which = f"token {first} has" if count == 1 else f"{count} tokens (the first is {first}) have"
        raise CoordinateError(
            f"{which} only -inf logits, so there is no distribution: "
            "set the target to `ignore_index`, or unmask at least one vocabulary entry."
        )


def check_mean(mean_T: Tensor | None, valid_T: Tensor, options: HeadOptions) -> None:
    """Reject a loss that uses the mean logit if a valid token has logits of -inf."""
    if mean_T is None or not may_read(mean_T) or not options.uses_mean:
        return
    if bool((torch.isneginf(mean_T) & valid_T).any()):
        options.refuse_missing_mean(
            "some logits are -inf. Exclude masked columns with `valid_vocab`, or use StandardZLoss without label smoothing."
        )
