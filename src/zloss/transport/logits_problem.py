"""A loss from logits: its arguments checked once, its tokens flattened to one axis.

Axes: T tokens, V vocabulary, D width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from zloss.errors import MissingInputError, ShapeError
from zloss.ranks.vocabulary_shard import VocabularyShard, whole_vocabulary
from zloss.source.tensor_kind import check_same_device
from zloss.transport.backends.product_plan import ProductPlan, fp32_plan, plan_products
from zloss.transport.options import HeadOptions
from zloss.transport.sharded_arguments import agree_on_shards
from zloss.transport.statistics_plan import StatisticsPlan, plan_statistics
from zloss.transport.targets import Targets, prepare_targets
from zloss.transport.tensor_arguments import check_tensors, compute_dtype


@dataclass(frozen=True)
class LogitsProblem:
    """A validated loss of logits: z = logit_scale·logits[:, :vocab], softcapped where asked."""

    logits_TV: Tensor
    """Padding columns included; the first `vocab` are inside log Z."""
    weight_VD: Tensor | None
    """The head, for the gain; it gets no gradient."""
    targets: Targets
    shard: VocabularyShard
    """The columns of the vocabulary on this process: all of them, or a rank's part."""
    dtype: torch.dtype
    """In which everything is computed: fp64 for fp64 inputs, else fp32."""
    plan: StatisticsPlan
    """The statistics to return."""
    products: ProductPlan
    """How E W runs, which the gain needs."""
    grad_enabled: bool
    """Grad mode of the caller; inside an autograd.Function it reads as off."""
    options: HeadOptions

    @property
    def vocab(self) -> int:
        """Own columns inside log Z."""
        return self.shard.rows

    def with_logits(self, logits_TV: Tensor) -> LogitsProblem:
        return replace(self, logits_TV=logits_TV)


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
    if logits.dim() < 1 or not logits.is_floating_point():
        raise ShapeError(
            f"`logits` is expected to be a float tensor [..., V], but got {logits.dtype} {list(logits.shape)}."
        )
    rows = logits.shape[-1]
    if weight is not None and (weight.dim() != 2 or weight.shape[0] != rows):
        raise ShapeError(
            f"`weight` is expected to be [V, D] with V = {rows} (the logits), but got {list(weight.shape)}."
        )
    if options.objective.active and options.objective.needs_gain and weight is None:
        raise MissingInputError(
            f"{type(options.objective).__name__} needs the output-to-hidden gain: pass `weight`, the [V, D] output head."
        )
    check_same_device(logits=logits, target=target, weight=weight, token_weight=token_weight)
    if group is None:
        shard = whole_vocabulary(options.vocab_of(rows))
    else:
        shard, _ = agree_on_shards(logits, logits, target, options, group, dim=-1)
    dtype = compute_dtype(logits, weight)
    targets = prepare_targets(
        target, logits.shape[:-1], shard.total, options, dtype, token_weight=token_weight, normalizer=normalizer
    )
    plan = plan_statistics(
        options.objective,
        options.statistics,
        label_smoothing=options.label_smoothing,
        has_mu=options.softcap is None,
        has_head=weight is not None,
        has_hidden=False,
    )
    # The gradient at the logits is no product: only the gain is, and its factors are E and W.
    products = fp32_plan(dtype, logits.device.type)
    if weight is not None and dtype == torch.float32:
        products = plan_products(
            options.products, device_type=logits.device.type, hidden=weight.dtype, weight=weight.dtype
        )
    return LogitsProblem(_flat(logits), weight, targets, shard, dtype, plan, products, torch.is_grad_enabled(), options)


def _flat(logits: Tensor) -> Tensor:
    """[..., V] as [T, V]; written out because a rank may hold no column, and then -1 is ambiguous."""
    return logits.reshape(logits.shape[:-1].numel(), logits.shape[-1])
