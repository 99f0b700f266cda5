"""The public border of the head loss: every argument checked once, tokens flattened to one axis.

Axes: T tokens, V vocabulary rows inside log Z, D width. Checks that must read tensor values (targets in range, bias
entries) run on the CPU only: on an accelerator they would stall the stream, and a compiler has no values to read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from zloss.errors import (
    CoordinateError,
    DeviceError,
    DtypeError,
    InputError,
    ShapeError,
    TargetRangeError,
    UnknownNameError,
)
from zloss.source.objective import Objective
from zloss.source.reduction import Reduction, TokenWeights, check_reduction, reduction_weights

Statistics = Literal["full", "light", "audit"]
""""full": every field of TokenStats that costs nothing; "light": only what the loss itself needs (log Z, target logit);
"audit": full, and the residual mean of the logits, which costs one more pass over them."""


@dataclass(frozen=True)
class Options:
    """What the loss computes, apart from its tensors."""

    objective: Objective
    ignore_index: int = -100
    reduction: Reduction = "mean"
    logit_scale: float = 1.0
    softcap: float | None = None
    label_smoothing: float = 0.0
    statistics: Statistics = "full"
    chunk_size: int | None = None


@dataclass(frozen=True)
class Targets:
    """Flattened targets with their reduction weights."""

    index_T: Tensor
    """int64, with 0 in place of `ignore_index`."""
    valid_T: Tensor
    weights: TokenWeights


@dataclass(frozen=True)
class HeadProblem:
    """A validated head loss: z = logit_scale·(W[:vocab] u + b[:vocab]), softcapped where asked."""

    hidden_TD: Tensor
    weight_VD: Tensor
    """All rows, padding included; the first `vocab` are inside log Z."""
    bias_V: Tensor | None
    targets: Targets
    vocab: int
    shape: torch.Size
    """The shape of `target`."""
    dtype: torch.dtype
    """In which everything is computed: fp64 for fp64 inputs, else fp32."""
    rounding: torch.dtype | None
    """Autocast dtype to which the operands of the projection are rounded, as F.linear would; else None."""
    poisoned_T: Tensor | None
    """Ignored tokens whose hidden state is not finite; they are zeroed so that no NaN reaches a gradient."""
    has_mu: bool
    """Whether the mean logit exists: not under softcap or with a -inf bias."""
    grad_enabled: bool
    """Grad mode at the border; inside an autograd.Function it reads as off."""
    options: Options


def prepare_head(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    options: Options,
    *,
    token_weight: Tensor | None = None,
    normalizer: float | Tensor | None = None,
    valid_vocab: int | None = None,
) -> HeadProblem:
    """Check everything the user passed and flatten the leading dimensions."""
    check_options(options)
    check_tensors(hidden=hidden, weight=weight, target=target, bias=bias, token_weight=token_weight)
    _check_float("hidden", hidden)
    _check_float("weight", weight)
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
        _check_float("bias", bias)
        if bias.shape != (weight.shape[0],):
            raise ShapeError(f"`bias` is expected to be [V] = [{weight.shape[0]}], but got {list(bias.shape)}.")
    if width == 0:
        raise ShapeError("the width is zero: `hidden` is [..., 0], so there is nothing to project.")
    check_same_device(hidden=hidden, weight=weight, target=target, bias=bias, token_weight=token_weight)
    dtype = compute_dtype(hidden, weight, bias)
    vocab = check_vocab(valid_vocab, weight.shape[0])
    targets = prepare_targets(
        target, hidden.shape[:-1], vocab, options, dtype, token_weight=token_weight, normalizer=normalizer
    )
    has_mu = options.softcap is None and not (bias is not None and _has_minus_inf(bias[:vocab]))
    check_mu_need(options, has_mu)
    flat = hidden.reshape(-1, width)
    poisoned = _poisoned_tokens(flat, targets.valid_T)
    if poisoned is not None:
        flat = torch.where(poisoned.unsqueeze(1), flat.new_zeros(()), flat)
    return HeadProblem(
        hidden_TD=flat,
        weight_VD=weight,
        bias_V=bias,
        targets=targets,
        vocab=vocab,
        shape=target.shape,
        dtype=dtype,
        rounding=_autocast_dtype(hidden.device.type, dtype),
        poisoned_T=poisoned,
        has_mu=has_mu,
        grad_enabled=torch.is_grad_enabled(),
        options=options,
    )


def prepare_targets(
    target: Tensor,
    leading: torch.Size,
    vocab: int,
    options: Options,
    dtype: torch.dtype,
    *,
    token_weight: Tensor | None,
    normalizer: float | Tensor | None,
) -> Targets:
    """Targets and token weights, checked against the leading shape and the vocabulary."""
    if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
        raise DtypeError(
            f"`target` is expected to hold integer class indices, but got {target.dtype}: pass `target.long()`."
        )
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
    valid = flat != options.ignore_index
    index = torch.where(valid, flat, flat.new_zeros(()))
    if may_read(index) and index.numel():
        low, high = int(index.min()), int(index.max())
        if low < 0 or high >= vocab:
            raise TargetRangeError(
                f"`target` holds the index {low if low < 0 else high}, but the vocabulary has {vocab} rows (0 to {vocab - 1}). "
                f"Mark tokens that do not count with ignore_index={options.ignore_index}."
            )
    weights = reduction_weights(
        valid,
        options.reduction,
        dtype=dtype,
        token_weight=None if token_weight is None else token_weight.reshape(-1),
        normalizer=normalizer,
    )
    return Targets(index, valid, weights)


def check_tensors(**tensors: object) -> None:
    """Every given argument is a tensor that holds values."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            raise DtypeError(f"`{name}` is expected to be a tensor, but got {type(tensor).__name__}.")
    devices = {tensor.device.type for tensor in tensors.values() if isinstance(tensor, Tensor)}
    if devices == {"meta"}:
        raise DeviceError("all tensors are on the meta device, which holds no values: move them to a real device.")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_options(options: Options) -> None:
    """Options that can be judged without any tensor."""
    for name in ("label_smoothing", "logit_scale", "softcap", "chunk_size", "ignore_index"):
        value = getattr(options, name)
        optional = name in ("softcap", "chunk_size")
        whole = name in ("chunk_size", "ignore_index")
        if not (value is None and optional) and not (_is_number(value) and (isinstance(value, int) or not whole)):
            kind = "a whole number" if whole else "a number"
            raise InputError(f"`{name}` is expected to be {kind}{' or None' if optional else ''}, but got {value!r}.")
    if not isinstance(options.objective, Objective):
        raise InputError(
            f"`objective` is expected to be an Objective such as zloss.CenteredZLoss(1e-4), but got {options.objective!r}."
        )
    check_reduction(options.reduction)
    if options.statistics not in get_args(Statistics):
        raise UnknownNameError("statistics", options.statistics, get_args(Statistics))
    if not 0 <= options.label_smoothing <= 1:
        raise InputError(f"`label_smoothing` is expected to lie in [0, 1], but got {options.label_smoothing!r}.")
    # Written as comparisons, which a compiler can turn into guards where the number is symbolic to it.
    if not -math.inf < options.logit_scale < math.inf or options.logit_scale == 0:
        raise InputError(
            f"`logit_scale` is expected to be a finite number other than 0, but got {options.logit_scale!r}."
        )
    if options.softcap is not None and not 0 < options.softcap < math.inf:
        raise InputError(f"`softcap` is expected to be None or a finite number > 0, but got {options.softcap!r}.")
    if options.chunk_size is not None and options.chunk_size < 1:
        raise InputError(f"`chunk_size` is expected to be a number of tokens ≥ 1, but got {options.chunk_size!r}.")


def check_mu_need(options: Options, has_mu: bool) -> None:
    """Refuse a method that needs the mean logit where there is none."""
    if has_mu:
        return
    method = type(options.objective).__name__
    if options.objective.active and options.objective.needs_mu:
        if options.softcap is not None:
            raise CoordinateError(
                f"{method} needs the mean logit μ, but `softcap` is not shift-invariant: centering would change the model. "
                "Use StandardZLoss or GainAwareZLoss with softcap."
            )
        raise CoordinateError(
            f"{method} needs the mean logit μ, but `bias` holds -inf. "
            "Exclude those rows with `valid_vocab`, or use StandardZLoss."
        )
    if options.label_smoothing and options.softcap is None:
        raise CoordinateError(
            "`label_smoothing` needs the mean logit μ, but `bias` holds -inf. Exclude those rows with `valid_vocab`."
        )


def check_vocab(valid_vocab: int | None, rows: int) -> int:
    """The number of vocabulary rows inside log Z."""
    if rows == 0:
        raise ShapeError("the vocabulary is empty: `weight` or `logits` has V = 0.")
    if valid_vocab is None:
        return rows
    if not isinstance(valid_vocab, int):
        raise InputError(f"`valid_vocab` is expected to be a whole number of rows, but got {valid_vocab!r}.")
    if not 1 <= valid_vocab <= rows:
        raise InputError(
            f"`valid_vocab` is expected to lie in 1..{rows} (the rows of the head), but got {valid_vocab!r}."
        )
    return valid_vocab


def check_same_device(**tensors: Tensor | None) -> None:
    """All tensors that meet must live on one device."""
    devices = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    if len(set(devices.values())) > 1:
        listing = ", ".join(f"`{name}` on {device}" for name, device in devices.items())
        raise DeviceError(f"all tensors are expected on one device, but got {listing}.")


def may_read(tensor: Tensor) -> bool:
    """Whether looking at values is free: on the CPU, and not while a compiler traces, when there are none."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """fp64 where any operand is fp64, otherwise fp32: never a 16-bit statistic."""
    double = any(tensor is not None and tensor.dtype == torch.float64 for tensor in tensors)
    return torch.float64 if double else torch.float32


def _check_float(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise DtypeError(f"`{name}` is expected to be a tensor, but got {type(tensor).__name__}.")
    if tensor.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise DtypeError(f"`{name}` is expected to be fp64, fp32, bf16 or fp16, but got {tensor.dtype}.")


def _autocast_dtype(device_type: str, dtype: torch.dtype) -> torch.dtype | None:
    """The dtype to which autocast would round the operands of F.linear; fp64 operands it leaves alone."""
    if dtype == torch.float64 or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def _has_minus_inf(bias: Tensor) -> bool:
    return may_read(bias) and bool(torch.isneginf(bias.detach()).any())


def _poisoned_tokens(hidden_TD: Tensor, valid_T: Tensor) -> Tensor | None:
    poisoned = ~valid_T & ~torch.isfinite(hidden_TD.detach().sum(dim=1, dtype=torch.float32))
    if may_read(poisoned) and not bool(poisoned.any()):
        return None
    return poisoned
