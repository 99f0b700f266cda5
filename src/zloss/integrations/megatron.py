"""Megatron-core: `apply(model, objective)` in `model_provider`, and a `GPTModel` trains with CE + Z.

The model returns the loss of every token, [b, s], so that masks, division by tokens and scaling stay Megatron's.
`handle.report(loss_mask)` has CE and Z separately. In evaluation the model computes its own cross-entropy.

Axes: b sequences of s tokens, D width, V vocabulary. Megatron has hidden states as [s, b, D], or [s/tp, b, D] with
sequence parallelism, logits as [s, b, V/tp], and labels as [b, s].
"""

from __future__ import annotations

from dataclasses import replace
from importlib import metadata
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from zloss.errors import InputError, MissingInputError, ShapeError, TargetRangeError, UnsupportedModelError
from zloss.head.loss import HeadLossOutput, head_loss, logits_loss
from zloss.integrations.moe import HookHandle, named_arguments
from zloss.objectives import CrossEntropy, Objective, require_target


def apply(
    model: nn.Module,
    objective: Objective,
    *,
    reduction: Literal["none", "sum"] = "none",
    fused: bool = True,
    mtp: bool = False,
    **options: Any,
) -> ZLossHandle:
    """From now on `model(..., labels=labels)` in training mode returns CE + Z of every token, [b, s].

    `model`: a `GPTModel`, or another `LanguageModule` with its `output_layer`, on any pipeline stage, before or after it is
    wrapped. `fused` computes the loss from hidden states and the weight of the output layer, and adds dW to `main_grad`;
    with `fused=False` Megatron computes the logits. `reduction="sum"` returns Σ loss_mask·loss instead, which saves
    recomputing the logits in the backward pass; it needs `loss_mask` in the call of the model and `handle.loss_func`.
    `mtp`: the depths of multi-token prediction get Z too. `options` are those of `zloss.head_loss`.
    """
    if isinstance(model, (list, tuple)):
        raise InputError("`model` is expected to be one model, but got a list: call apply for each model of the list.")
    if not isinstance(objective, Objective):
        raise InputError(
            "`objective` is expected to be an objective such as zloss.StandardZLoss(1e-4, target=0.0), but got "
            f"{objective!r}."
        )
    require_target(objective)
    if reduction not in ("none", "sum"):
        raise InputError(f'`reduction` is expected to be "none" or "sum", but got {reduction!r}.')
    while not hasattr(model, "compute_language_model_loss") and isinstance(getattr(model, "module", None), nn.Module):
        model = model.module  # type: ignore[assignment]
    return ZLossHandle(model, objective, reduction, fused, mtp, options)


class ZLossHandle(HookHandle):
    """A Z-loss on a model of Megatron-core until `remove()`.

    `last` is the output of the main head in the last training forward pass, [s, b]; None after one in evaluation, and on
    pipeline stages without a head, where a handle does nothing.
    """

    def __init__(
        self, model: Any, objective: Objective, reduction: str, fused: bool, mtp: bool, options: dict[str, Any]
    ) -> None:
        _check_model(model, fused)
        if isinstance(getattr(model.compute_language_model_loss, "__self__", None), ZLossHandle):
            raise InputError(f"this {type(model).__name__} already has a Z-loss: call `remove()` on its handle first.")
        self.model, self.objective, self.reduction, self.mtp = model, objective, reduction, mtp
        self.options = {"statistics": "light", **options}
        self.last: HeadLossOutput | None = None
        self._labels: Tensor | None = None  # of the running forward pass, if it is one of training
        self._loss_mask: Tensor | None = None
        self._weight: Tensor | None = None  # of the output layer, if its product was skipped
        self._layout_checked = False
        super().__init__()
        if model.post_process:
            self._hooks = [model.register_forward_pre_hook(self._begin, with_kwargs=True)]
            self._own_loss = self.replace(model, "compute_language_model_loss", self._loss)
            if fused:
                self._project = self.replace(model.output_layer, "forward", self._skip_product)

    def loss_func(self, loss_mask: Tensor, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """A loss function for Megatron's schedules: Σ loss_mask·loss, the number of tokens, and the report."""
        if output.dim() == 2:
            _check_size(loss_mask, *output.shape)
        mask = loss_mask.reshape(-1).float()
        loss = output.clone() if output.dim() == 0 else (output.reshape(-1).float() * mask).sum()
        tokens = mask.sum()
        report = {"lm loss": torch.stack([loss.detach(), tokens])} | self._report(loss_mask)
        return loss, tokens.to(torch.int), report

    def report(self, loss_mask: Tensor) -> dict[str, Tensor]:
        """CE, Z and log Z of the last training forward pass as [sum, tokens], as Megatron's training loop expects; {} after
        one in evaluation. CE is named "lm loss", so it replaces the CE + Z of another loss function.

        Raises with reduction="sum", where a loss function that multiplies by the mask would scale all gradients."""
        if self.reduction == "sum":
            raise InputError('with reduction="sum", the model already returns Σ loss_mask·loss: use handle.loss_func.')
        return self._report(loss_mask)

    def _report(self, loss_mask: Tensor) -> dict[str, Tensor]:
        if self.last is None:
            return {}
        s, b = self.last.stats.log_z.shape
        _check_size(loss_mask, b, s)
        mask = loss_mask.reshape(b, s).transpose(0, 1).float()  # many loss functions flatten it
        parts = {"lm loss": self.last.cross_entropy, "zloss/z": self.last.auxiliary}
        if self.reduction == "none":
            parts = {name: (part * mask).sum() for name, part in parts.items()}
        parts["zloss/log_z"] = torch.where(mask != 0, self.last.stats.log_z * mask, 0).sum()
        return {name: torch.stack([part.float(), mask.sum()]) for name, part in parts.items()}

    def _begin(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = named_arguments(model, args, kwargs)
        self.last, self._weight = None, None
        self._labels = given.get("labels") if model.training else None
        self._loss_mask = given.get("loss_mask")
        if self._labels is None:
            return
        if self.reduction == "sum" and self._loss_mask is None:
            raise MissingInputError(
                'with reduction="sum", pass `loss_mask` to the model: model(..., loss_mask=loss_mask).'
            )
        if not self._layout_checked:
            self._layout_checked = True
            _refuse_transposed(self._labels, given.get("input_ids"))

    def _skip_product(self, input_: Tensor, weight: Tensor | None = None, **kwargs: Any) -> Any:
        """Replaces the output layer's forward pass: hidden states instead of logits, if `_loss` is what gets them."""
        if self._labels is None:
            return self._project(input_, weight=weight, **kwargs)
        self._weight = self.model.output_layer.weight if weight is None else weight
        return input_, None

    def _loss(self, labels: Tensor, logits: Tensor) -> Any:
        """Replaces `compute_language_model_loss`; `logits` are hidden states where the product was skipped."""
        main = labels is self._labels
        objective = self.objective if main or self.mtp else CrossEntropy()
        if self._labels is None or (self._weight is None and not objective.active and not main):
            return self._own_loss(labels, logits)
        group: Any = self.model.tp_group if self.model.tp_group.size() > 1 else None
        sharded = group is not None and self._weight is not None and self.model.output_layer.sequence_parallel
        s, b = logits.shape[0] * (group.size() if sharded else 1), logits.shape[1]
        target = _transposed("labels", labels, b, s)
        given: dict[str, Any] = {"reduction": self.reduction if main else "none", "group": group, **self.options}
        if main and self._loss_mask is not None:
            mask = _transposed("loss_mask", self._loss_mask, b, s)
            target = target.masked_fill(mask == 0, self.options.get("ignore_index", -100))
            if self.reduction == "sum":
                given["token_weight"] = mask.float()
        try:
            out = self._from(logits, target, objective, sharded, given)
        except TargetRangeError as error:
            raise TargetRangeError(str(error).replace("`target`", "`labels`")) from None
        if main:
            self.last = replace(out, loss=out.loss.detach())
        return out.loss if out.loss.dim() == 0 else out.loss.transpose(0, 1).contiguous()

    def _from(self, given: Tensor, target: Tensor, objective: Objective, sharded: bool, options: Any) -> HeadLossOutput:
        """The loss from logits, or from hidden states where the product was skipped."""
        if self._weight is None:
            return logits_loss(given, target, objective, **options)
        if sharded:  # [s/tp, b, D] of this rank
            given = DTensor.from_local(given, DeviceMesh.from_group(options["group"], given.device.type), [Shard(0)])
        buffer = self._main_grad(options["reduction"])
        return head_loss(given, self._weight, target, objective, weight_grad_buffer=buffer, **options)

    def _main_grad(self, reduction: str) -> Tensor | None:
        """Where dW goes; None if Megatron adds the gradient itself. A summed loss adds dW in the forward pass, but Megatron
        divides it by tokens later unless `calculate_per_token_loss`, and multiplies it by a loss scale in fp16."""
        config, buffer = self.model.config, getattr(self._weight, "main_grad", None)
        scaled_later = reduction == "sum" and (not config.calculate_per_token_loss or config.fp16)
        return None if buffer is None or buffer.dtype != torch.float32 or scaled_later else buffer


def _check_model(model: Any, fused: bool) -> None:
    missing = [n for n in ("compute_language_model_loss", "post_process", "tp_group") if not hasattr(model, n)]
    if missing:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no `{missing[0]}`: a LanguageModule of megatron-core 0.16 (GPTModel) is expected, and "
            f"{_installed()} is installed."
        )
    if getattr(model.config, "overlap_moe_expert_parallel_comm", False):
        raise UnsupportedModelError(
            "`overlap_moe_expert_parallel_comm` runs the layers of the model without calling its `forward`: turn it off."
        )
    if fused and model.post_process:
        found, deferred = type(model.output_layer).__name__, model.config.defer_embedding_wgrad_compute
        if getattr(model.output_layer, "bias", None) is not None:
            raise UnsupportedModelError("the fused loss expects an output layer without a bias: pass fused=False.")
        if found != "ColumnParallelLinear" or deferred:
            raise UnsupportedModelError(
                f"the fused loss expects an output layer of class ColumnParallelLinear, but got {found} with "
                f"defer_embedding_wgrad_compute={deferred}: pass fused=False."
            )


def _installed() -> str:
    try:
        return f"megatron-core {metadata.version('megatron-core')}"
    except metadata.PackageNotFoundError:
        return "no megatron-core"


def _check_size(loss_mask: Tensor, b: int, s: int) -> None:
    if loss_mask.numel() != b * s:
        raise ShapeError(
            f"`loss_mask` is expected to have b·s = {b}·{s} = {b * s} entries, like `labels`, but has {loss_mask.numel()}."
        )


def _transposed(name: str, tensor: Tensor, b: int, s: int) -> Tensor:
    """[s, b] from [b, s], checked."""
    if tensor.shape == (b, s):
        return tensor.transpose(0, 1)
    hint = f": pass `{name}.transpose(0, 1)`" if tensor.shape == (s, b) else ""
    raise ShapeError(
        f"`{name}` is expected to be [b, s] = [{b}, {s}], like `input_ids`, but got {list(tensor.shape)}{hint}."
    )


def _refuse_transposed(labels: Tensor, input_ids: Tensor | None) -> None:
    """Where b = s, shapes cannot tell [b, s] from [s, b]; the tokens can, since labels are the next inputs."""
    if input_ids is None or labels.shape != input_ids.shape or labels.shape[0] != labels.shape[1] or len(labels) < 2:
        return
    as_given, transposed = ((each[:, :-1] == input_ids[:, 1:]).float().mean() for each in (labels, labels.T))
    if transposed > max(0.5, float(as_given)):
        raise ShapeError(
            "`labels` is expected to be [b, s], like `input_ids`, but its transpose holds the next tokens of `input_ids`: pass "
            "`labels.transpose(0, 1)`."
        )
