"""`zloss.audit_loss`: treat a loss as a black box and say what it injects."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zloss.audit.loss.call_errors import coefficient_in_place_of_targets
from zloss.audit.loss.callable import BlackBox, LossFunction, loss_name
from zloss.audit.loss.time_limit import TIME_LIMIT
from zloss.errors import InputError, UnknownNameError
from zloss.results.loss_audit import LossAudit
from zloss.tensors import is_number

if TYPE_CHECKING:
    from zloss.audit.loss.model_tokens import ModelTokens
    from zloss.console import Progress

LOG_V = ("log_v", "log V", "logV")
"""Words for c = log V in `expect`; the first is that of `target_rule`."""
EXPECTABLE = (
    "coef",
    "target",
    "coordinate",
    "denominator",
    "ce_denominator",
    "z_denominator",
    "label_smoothing",
)


def audit_loss(
    fn: LossFunction,
    *,
    off: LossFunction | None = None,
    expect: Mapping[str, Any] | None = None,
    linear: bool = False,
    per_token: LossFunction | None = None,
    logits: Tensor | None = None,
    target: Tensor | None = None,
    ignore_index: int = -100,
    valid_vocab: int | None = None,
    seed: int = 0,
    name: str | None = None,
    thorough: bool = False,
    model_tokens: ModelTokens | None = None,
    time_limit: float | None = TIME_LIMIT,
    progress: Progress | None = None,
) -> LossAudit:
    """Identify λ, c, coordinate and denominators of `fn` from its gradients, and put every question of the audit to it.

    `fn(logits, target)`, or with `linear` `fn(hidden, weight, target)`, returns a scalar, a tuple whose first item is
    the loss, or an object with `.loss`; a second item, `.z_loss` or `.auxiliary` is the Z it reports. `off` is the same
    loss with its Z switched off, `per_token` its reduction="none" variant, `expect` what the user believes
    (`coef`, `target`, `coordinate`, `denominator`, ...; a `target` of "log_v" or None is c = log V).
    `logits` and `target` are where Δ_src is measured;
    `name` is what the report calls the loss; `thorough` also tries many tokens and a large vocabulary at once;
    `model_tokens` (`open_model_tokens`) are tokens of a model on a text, on whose own logits Δ_src is measured too;
    `time_limit` is how many seconds one call may take (None or 0: no limit; the main thread only).

    >>> import torch.nn.functional as F
    >>> audit_loss(lambda z, y: F.cross_entropy(z, y) + 1e-3 * z.logsumexp(-1).square().mean()).identified.coordinate
    'raw'
    """
    # The questions are many modules; a program that only names this function does not load them.
    from zloss.audit.loss.question import question

    wanted = _check_options(fn, off, per_token, expect, valid_vocab)
    device = torch.device("cpu") if logits is None else logits.device
    box = BlackBox(fn, name or loss_name(fn), linear, device, seed, ignore_index, time_limit=time_limit)
    return question(
        box,
        off,
        per_token,
        wanted,
        valid_vocab=valid_vocab,
        logits=logits,
        target=target,
        thorough=thorough,
        model_tokens=model_tokens,
        progress=progress,
    )


def _check_options(
    fn: object, off: object, per_token: object, expect: Mapping[str, Any] | None, valid_vocab: int | None
) -> dict[str, Any]:
    for name, given in (("fn", fn), ("off", off), ("per_token", per_token)):
        if (given is not None and not callable(given)) or (name == "fn" and given is None):
            raise InputError(f"`{name}` is expected to be a callable, but got {type(given).__name__}.")
    if callable(fn) and (taken := coefficient_in_place_of_targets(fn)) is not None:
        raise InputError(
            f"{loss_name(fn)} takes {taken} and no targets: it looks like the Z-loss of a router. Audit the routers of a model "
            "with `zloss.audit_router(model, batches)`, or bind the coefficient and pass a function of (logits, target)."
        )
    if valid_vocab is not None and (isinstance(valid_vocab, bool) or valid_vocab < 2):
        raise InputError(f"`valid_vocab` is expected to be a number of rows ≥ 2, but got {valid_vocab!r}.")
    wanted = dict(expect or {})
    if isinstance(word := wanted.get("target"), str) and word in LOG_V:
        wanted["target"] = None
    for key, value in wanted.items():
        if key not in EXPECTABLE:
            raise UnknownNameError("key of `expect`", key, EXPECTABLE)
        number = key in ("coef", "target", "label_smoothing")
        if number and value is not None and not (is_number(value) and math.isfinite(value)):
            or_word = f", {LOG_V[0]!r} (c = log V)" if key == "target" else ""
            raise InputError(
                f"`expect[{key!r}]` is expected to be a finite number{or_word} or None, but got {value!r}."
            )
    return wanted
