"""Errors of an audited loss in one sentence, with what its author probably forgot."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

HEAD_NAMES = ("hidden", "hidden_states", "weight", "lm_head", "lm_head_weight", "head")
"""What the first two parameters of a loss of (hidden, weight, target) are called."""


def named_error(error: BaseException) -> str:
    """The kind of an error and the first line of its text.

    Backticks become quotes: names between backticks are printed as flags, and these are not arguments of the audit.
    """
    text = str(error).replace("`", "'").strip().splitlines()
    return f"{type(error).__name__}: {text[0][:300]}" if text else type(error).__name__


def statement(error: BaseException) -> str:
    """The line of an error that has no words of its own, such as a bare assert."""
    frames = traceback.extract_tb(error.__traceback__)
    if str(error).strip() or not frames or not frames[-1].line:
        return ""
    return f" at `{frames[-1].line[:120]}` (line {frames[-1].lineno} of {Path(frames[-1].filename).name})"


def arguments_hint(function: Callable[..., Any], linear: bool, error: BaseException) -> str:
    """A forgotten or superfluous `linear`, read from the signature.

    A third parameter with a default lets the wrong call begin: then torch complains of shapes or dtypes.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return ""
    free = inspect.Parameter.empty
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    places = [p for p in parameters if p.kind in kinds]
    needed = sum(1 for p in places if p.default is free)
    of_a_head = any(p.name.lower() in HEAD_NAMES for p in places[:2])
    if isinstance(error, TypeError) and not linear and needed == 3:
        return " It needs three arguments: a loss of (hidden, weight, target) is audited with `linear=True`."
    if isinstance(error, TypeError) and linear and needed == len(places) == 2:
        return " It takes two arguments: a loss of (logits, target) is audited without `linear`."
    if linear and needed < 3 and len(places) > 1 and not of_a_head:
        return " Does it take (logits, target)? Then leave out `linear=True`."
    if not linear and len(places) >= 3 and of_a_head:
        return " Does it take (hidden, weight, target)? Then pass `linear=True`."
    return ""


def coefficient_in_place_of_targets(function: Callable[..., Any]) -> str | None:
    """The first two parameters in words where the second is a coefficient and none is a target, as in Megatron's
    `z_loss_func(logits, z_loss_coeff)`.
    """
    try:
        names = [name.lower() for name in inspect.signature(function).parameters]
    except (TypeError, ValueError):
        return None
    targets = any(word in name for name in names for word in ("target", "label"))
    if len(names) < 2 or targets or not any(word in names[1] for word in ("coef", "lambda")):
        return None
    return f"({names[0]}, {names[1]})"


def gpu_hint(error: BaseException, device: torch.device) -> str:
    """A sentence where the loss seems to want a GPU and the probes ran without one."""
    text = f"{type(error).__name__} {error}".lower()
    wants_gpu = any(word in text for word in ("cuda", "gpu", "triton", "nvidia", "active drivers"))
    if device.type == "cpu" and wants_gpu:
        return " The probes ran on the CPU, and this loss seems to want a GPU: run the audit on a machine that has one."
    return ""
