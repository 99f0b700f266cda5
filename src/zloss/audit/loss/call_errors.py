"""Errors of an audited loss in one sentence, with what its author probably forgot."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def named_error(error: BaseException) -> str:
    """The kind of an error and the first line of its text."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:300]}" if text else type(error).__name__


def statement(error: BaseException) -> str:
    """The line of an error that has no words of its own, such as a bare assert."""
    frames = traceback.extract_tb(error.__traceback__)
    if str(error).strip() or not frames or not frames[-1].line:
        return ""
    return f" at `{frames[-1].line[:120]}` (line {frames[-1].lineno} of {Path(frames[-1].filename).name})"


def arguments_hint(function: Callable[..., Any], linear: bool, error: BaseException) -> str:
    """A forgotten or superfluous `linear`, read from the signature."""
    if not isinstance(error, TypeError):
        return ""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return ""
    free = inspect.Parameter.empty
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = sum(1 for p in parameters if p.kind in kinds and p.default is free)
    if not linear and needed == 3:
        return " It needs three arguments: a loss of (hidden, weight, target) is audited with `linear=True`."
    if linear and needed == 2:
        return " It takes two arguments: a loss of (logits, target) is audited without `linear`."
    return ""


def gpu_hint(error: BaseException, device: torch.device) -> str:
    """A sentence where the loss seems to want a GPU and the probes ran without one."""
    text = f"{type(error).__name__} {error}".lower()
    wants_gpu = any(word in text for word in ("cuda", "gpu", "triton", "nvidia", "active drivers"))
    if device.type == "cpu" and wants_gpu:
        return " The probes ran on the CPU, and this loss seems to want a GPU: run the audit on a machine that has one."
    return ""
