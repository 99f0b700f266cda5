"""The targets of a loss, flattened to one axis of tokens, with their reduction weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zloss.distributed import check_target_range, counted_targets
from zloss.errors import ShapeError
from zloss.source.reduction import TokenWeights, reduction_weights
from zloss.transport.options import HeadOptions
from zloss.transport.tensor_arguments import may_read


@dataclass(frozen=True)
class Targets:
    """Flattened targets with their reduction weights. Axes: T tokens."""

    index_T: Tensor
    """int64, with 0 in place of `ignore_index`."""
    valid_T: Tensor
    """bool; False at ignored tokens."""
    weights: TokenWeights
    shape: torch.Size
    """The shape of `target` as it was given."""

    def weighted(self, value_T: Tensor) -> Tensor:
        """w_t·value_t, 0 at ignored tokens whatever they hold."""
        weight_T = self.weights.per_token
        return torch.where(self.valid_T, weight_T * value_T, weight_T.new_zeros(()))


def prepare_targets(
    target: Tensor,
    leading: torch.Size,
    vocab: int,
    options: HeadOptions,
    dtype: torch.dtype,
    *,
    token_weight: Tensor | None,
    normalizer: float | Tensor | None,
) -> Targets:
    """Targets and token weights, checked against the leading shape and the vocabulary."""
    valid = counted_targets("target", target, options.ignore_index).reshape(-1)
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
    flat = target.reshape(-1).long()
    index = torch.where(valid, flat, flat.new_zeros(()))
    if may_read(index):
        check_target_range("target", index, options.ignore_index, vocab)
    weights = reduction_weights(
        valid,
        options.reduction,
        dtype=dtype,
        token_weight=None if token_weight is None else token_weight.reshape(-1),
        normalizer=normalizer,
    )
    return Targets(index, valid, weights, target.shape)
