"""One training forward of a model without logits: supported operations before its loss are recorded, others rejected.

While a model trains, its output head returns a `LazyLogits` instead of a tensor (`TrainingCall`). Slices, views and casts
act on the hidden states; products with a number, a tanh and a constant bias become the logit scale, the softcap and the
bias of `head_loss`; a slice of the vocabulary becomes `valid_vocab`. `F.cross_entropy`, where the losses of transformers
end, becomes a call of `head_loss`. An operation that is not listed here raises, so no result can be silently different.
In the output that the model returns, `NoLogits` replaces them.

Axes: [..., D] hidden states represent [..., V] logits.
"""

from __future__ import annotations

import builtins
import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import EllipsisType
from typing import Any, NoReturn, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from zloss.errors import MissingLogitsError, UnsupportedModelError
from zloss.head.loss import HeadLossOutput, head_loss
from zloss.head.options import HeadOptions, Reduction, check_reduction
from zloss.integrations.moe import HookHandle


class TrainingCall(HookHandle):
    """One call of a model, during which the forward of its head is replaced; `remove()` restores it.

    The loss is evaluated inside a second call of the head module, so that the head's hooks (FSDP2, accelerate) gather its
    weight for it. `output` is what `head_loss` returned. `per_token`: losses are not reduced, as TRL's fused head expects.
    """

    def __init__(self, model: nn.Module, options: HeadOptions, *, per_token: bool) -> None:
        self.model_name = type(model).__name__
        self.per_token = per_token
        self.output: HeadLossOutput | None = None
        self.reduction: Reduction = "mean"
        self._options = options
        self._head = output_head(model)
        self._losses = 0
        self._loss: Callable[[nn.Module], Tensor] | None = None
        """Computes the loss in the second call of the head."""
        # accelerate's device hooks wrap `forward` and keep the original under this name.
        attribute = "_old_forward" if hasattr(self._head, "_hf_hook") else "forward"
        super().__init__()
        self.replace(self._head, attribute, types.MethodType(self._head_forward, self._head))

    def _head_forward(self, head: Any, hidden: Tensor, *_args: Any, **_kwargs: Any) -> Any:
        if self._loss is not None:
            return self._loss(head)
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        return LazyLogits(self, hidden, dtype, getattr(head, "base_layer", head).out_features)

    def cross_entropy(
        self,
        logits: LazyLogits,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Tensor:
        """What the model's `F.cross_entropy(logits, target, ...)` returns: CE + Z. The signature is the same."""
        if weight is not None or size_average is not None or reduce is not None:
            logits.refuse("a cross-entropy with class weights or a deprecated reduction")
        if target.is_floating_point():
            logits.refuse("a cross-entropy with probabilities as the target")
        if logits.softcap is not None and logits.softcap <= 0:
            logits.refuse("a tanh with a factor that is not positive")
        self._losses += 1
        if self._losses > 1:
            raise UnsupportedModelError(
                f"{self.model_name} computes more than one cross-entropy from its output head in one training step "
                "(multi-token prediction?); which of them should include Z cannot be determined."
            )
        check_reduction(reduction)
        self.reduction = "none" if self.per_token else cast(Reduction, reduction)

        def loss_of(head: nn.Module) -> Tensor:
            hidden, weight_VD, bias_V = head_operands(head, logits.hidden)
            if logits.bias_V is not None:
                extra_V = logits.bias_V.to(weight_VD)
                bias_V = extra_V if bias_V is None else bias_V + extra_V
            self.output = head_loss(
                hidden,
                weight_VD,
                target.to(hidden.device),
                self._options.objective,
                bias=bias_V,
                ignore_index=ignore_index,
                reduction=self.reduction,
                valid_vocab=None if logits.vocab == weight_VD.shape[0] else logits.vocab,
                logit_scale=logits.scale,
                softcap=logits.softcap,
                label_smoothing=label_smoothing or self._options.label_smoothing,
                statistics=self._options.statistics,
                backend=self._options.backend,
            )
            return self.output.loss

        self._loss = loss_of
        try:
            loss: Tensor = self._head(logits.hidden)
        finally:
            self._loss = None
        return loss.sum() if self.per_token else loss


def _layout(name: str) -> Any:
    """A method of tensors that changes the layout of the tokens; the vocabulary has to stay the last axis."""

    def method(self: LazyLogits, *args: Any, **kwargs: Any) -> LazyLogits:
        if any(isinstance(value, torch.dtype) for value in (*args, *kwargs.values())):
            self.refuse(f"{name}{args}, which reads the bits of logits as another dtype")
        shape = getattr(torch.empty(self.shape, device="meta"), name)(*args, **kwargs).shape
        if not shape or shape[-1] != self.vocab:
            self.refuse(f"{name}{args} of logits {list(self.shape)}")
        return replace(self, hidden=self.hidden.reshape(*shape[:-1], self.hidden.shape[-1]))

    return method


@dataclass(frozen=True, eq=False)
class LazyLogits:
    """The logits of a head, represented by their hidden states and by what was done to them since.

    z = cap·tanh(s·(Wu + b + bias)/cap) with a softcap, else s·(Wu + b + bias); the first `vocab` entries of it.
    """

    call: TrainingCall
    hidden: Tensor
    dtype: torch.dtype
    vocab: int
    scale: builtins.float = 1.0
    softcap: builtins.float | None = None
    bias_V: Tensor | None = None

    def refuse(self, what: str) -> NoReturn:
        raise UnsupportedModelError(
            f"{self.call.model_name} applies {what} to its logits while it trains, which cannot be computed without them."
        )

    # What can be read.

    requires_grad = True

    @property
    def shape(self) -> torch.Size:
        return torch.Size([*self.hidden.shape[:-1], self.vocab])

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    # What changes nothing, or only the layout of the tokens.

    contiguous, view, reshape, flatten, unsqueeze, squeeze = map(
        _layout, ("contiguous", "view", "reshape", "flatten", "unsqueeze", "squeeze")
    )

    def float(self) -> Self:
        return replace(self, dtype=torch.float32)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """A cast or a move. A cast to fewer bits rounds the logits, which is rejected."""
        wanted = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.dtype)]
        wanted += [value.dtype for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        dtype = wanted[-1] if wanted else self.dtype
        if dtype.itemsize < self.dtype.itemsize or not dtype.is_floating_point:
            self.refuse(f"a cast from {self.dtype} to {dtype}")
        return replace(self, dtype=dtype)

    type = to

    def __getitem__(self, index: Any) -> Self:
        """Selects tokens; on the vocabulary only a cut [:n] is possible."""
        items = index if isinstance(index, tuple) else (index,)
        if not any(item is ... for item in items):
            items = (*items, ...)
        left = self.hidden.ndim - sum(_axes_of(item) for item in items)
        *tokens, last = [one for item in items for one in ([slice(None)] * left if item is ... else [item])]
        if not isinstance(last, slice) or last.start not in (None, 0) or last.step not in (None, 1):
            self.refuse(f"the index {last!r} of the vocabulary")
        return replace(self, hidden=self.hidden[(*tokens, slice(None))], vocab=len(range(self.vocab)[last]))

    # What becomes the logit scale, the softcap or the bias.

    def __mul__(self, factor: Any) -> Self:
        number = self._constant(factor)
        cap = None if self.softcap is None else self.softcap * number
        return replace(self, scale=self.scale * number, softcap=cap)

    __rmul__ = mul = multiply = __mul__

    def __truediv__(self, divisor: Any) -> Self:
        return self * (1.0 / self._constant(divisor))

    div = __truediv__

    def _constant(self, value: Any) -> builtins.float:
        if isinstance(value, Tensor) and value.numel() == 1 and not value.requires_grad:
            value = value.item()
        if not isinstance(value, (int, builtins.float)) or isinstance(value, bool):
            self.refuse("a product with something that is not a constant number")
        return builtins.float(value)

    def __add__(self, bias: Any) -> Self:
        """A constant bias per vocabulary entry, such as Bart's `final_logits_bias`."""
        fits = isinstance(bias, Tensor) and not bias.requires_grad and bias.numel() == self.vocab
        if not fits or self.softcap is not None or bias.shape[-1] != self.vocab:
            self.refuse("a sum with something that is not a constant bias of every vocabulary entry")
        bias_V = bias.reshape(-1) / self.scale
        return replace(self, bias_V=bias_V if self.bias_V is None else self.bias_V + bias_V)

    __radd__ = add = __add__

    def tanh(self) -> Self:
        if self.softcap is not None:
            self.refuse("a second tanh")
        return replace(self, softcap=1.0)

    # Everything else.

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in ("ndim", "dim", "size", "numel"):
            self.refuse(f"`.{name}`")
        return getattr(torch.empty(self.shape, device="meta"), name)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        lazy = next(value for value in (*args, *kwargs.values()) if isinstance(value, cls))
        if func is F.cross_entropy:
            if args[0] is not lazy:
                lazy.refuse("a cross-entropy with the logits as the target")
            return lazy.call.cross_entropy(*args, **kwargs)
        if func is torch.tanh or func is F.tanh:
            return lazy.tanh()
        return lazy.refuse(f"`{getattr(func, '__name__', func)}`")


def _axes_of(item: Any) -> int:
    """How many axes one item of an index consumes."""
    if item is None or isinstance(item, EllipsisType):
        return 0
    return item.ndim if isinstance(item, Tensor) and item.dtype == torch.bool else 1


class NoLogits:
    """`outputs.logits` of a training call: any use raises one sentence.

    It can be passed on, copied, pickled and printed, and code that looks for tensors in an output does not mistake it for one.
    """

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name

    def __repr__(self) -> str:
        return "NoLogits()"

    def _refuse(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise MissingLogitsError(
            f"the output of {self._model_name} has no logits: in training mode its loss is computed without them (zloss). Read "
            "them from a call in evaluation mode or under torch.no_grad(); statistics per token are in `handle.last.stats`."
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_model_name":  # protocols of Python, which probe for attributes
            raise AttributeError(name)
        self._refuse()

    @classmethod
    def __torch_function__(
        cls, _func: Callable[..., Any], _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, cls):
                value._refuse()


# Python looks these up on the class.
for _operator in (
    *("getitem", "setitem", "len", "iter", "bool", "float", "int", "array", "neg", "abs", "matmul", "rmatmul", "pow"),
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "lt", "le", "gt", "ge"),
):
    setattr(NoLogits, f"__{_operator}__", NoLogits._refuse)


def output_head(model: Any) -> nn.Module:
    """The module whose forward multiplies by the head's weight, looked up at every call: PEFT and FSDP may replace it."""
    name = type(model).__name__
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is None:
        raise UnsupportedModelError(
            f"{name} has no output head (`get_output_embeddings()` returns None), so its loss cannot be replaced."
        )
    if type(head).__name__ == "ModulesToSaveWrapper":
        head = head.original_module if head.disable_adapters else head.modules_to_save[head.active_adapters[0]]
    base = getattr(head, "base_layer", head)
    if base is not head and not hasattr(head, "lora_A"):
        raise UnsupportedModelError(
            f"{name} has a {type(head).__name__} on its output head; only plain LoRA is supported there."
        )
    if any(getattr(head, "use_dora", {}).values()) or getattr(head, "lora_variant", None):
        raise UnsupportedModelError(
            f"{name} has DoRA or another LoRA variant on its output head, whose logits are not one matrix product: "
            "leave the head out of `target_modules`, or use plain LoRA there."
        )
    if not isinstance(base, nn.Linear) or type(base).forward is not nn.Linear.forward:
        raise UnsupportedModelError(
            f"the output head of {name} is a {type(base).__name__}, whose logits may be more than W u + b: "
            "only an nn.Linear is supported."
        )
    return head  # type: ignore[no-any-return]


def head_operands(head: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """u, W and b of the logits W u + b that the head would compute for these hidden states.

    LoRA on the head adds r columns: W u + s·B A u = [W, s·B] [u; A u].
    """
    base = getattr(head, "base_layer", head)
    hiddens, weights = [hidden], [base.weight]
    if base is not head and not head.disable_adapters and not head.merged:
        for name in head.active_adapters:
            if name in head.lora_A:
                down, up = head.lora_A[name], head.lora_B[name]
                narrow = down(head.lora_dropout[name](hidden.to(down.weight.dtype)))
                hiddens.append(narrow.to(hidden.dtype))
                weights.append((up.weight * head.scaling[name]).to(base.weight.dtype))
    if len(hiddens) == 1:
        return hidden, base.weight, base.bias
    return torch.cat(hiddens, dim=-1), torch.cat(weights, dim=-1), base.bias
