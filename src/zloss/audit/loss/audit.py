"""`zloss.audit_loss`: treat a loss as a black box and say what it trains."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from zloss import __version__
from zloss.audit.loss.calls import Loss, dtype_name, loss_name, router_arguments
from zloss.audit.loss.checks import answer_all
from zloss.audit.loss.evidence import Evidence, identify
from zloss.audit.loss.model_tokens import ModelTokens, source_on_model
from zloss.audit.loss.probes import TOKENS, VOCAB, Space, Warp, head_columns
from zloss.audit.loss.source import measure_source
from zloss.console import Progress, Silent
from zloss.errors import DtypeError, InputError, ShapeError, UnknownNameError, require_version
from zloss.results.loss_audit import Identified, LossAudit
from zloss.tensors import check_holds_values, is_number

LOG_V = ("log_v", "log V", "logV")
"""Words for c = log V in `expect`; the first is that of `target_rule`."""
MOST_ROWS = 2**20
"""Rows of a vocabulary that there is memory for."""
EXPECTABLE = ("coef", "target", "coordinate", "denominator", "ce_denominator", "z_denominator", "label_smoothing")


def audit_loss(
    fn: Callable[..., Any],
    *,
    off: Callable[..., Any] | None = None,
    expect: Mapping[str, Any] | None = None,
    linear: bool = False,
    jax: bool = False,
    per_token: Callable[..., Any] | None = None,
    logits: Tensor | None = None,
    target: Tensor | None = None,
    ignore_index: int = -100,
    valid_vocab: int | None = None,
    vocab: int | None = None,
    tokens: int | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    seed: int = 0,
    name: str | None = None,
    model_tokens: ModelTokens | None = None,
    time_limit: float | None = 300.0,
    progress: Progress | None = None,
) -> LossAudit:
    """Identify λ, c, coordinate and denominators of `fn` from its gradients, and run every check of the audit on it.

    `fn(logits, target)`, or with `linear` `fn(hidden, weight, target)`, returns a scalar, a tuple whose first item is
    the loss, or an object with `.loss`; what it returns next to the loss is not judged. `off` is the same loss with its Z
    switched off, `per_token` its reduction="none" variant, `expect` what the user believes (`coef` relative to the weight on CE,
    `target`, `coordinate`, `denominator`, ...; a `target` of "log_v" or None is c = log V).
    What the loss insists on is stated: `vocab` and `tokens` if it takes one size only, `valid_vocab` if it leaves padding rows
    out, `softcap` and `logit_scale` if it changes the logits it is given.
    With `jax` the functions are of JAX arrays, and their gradients come from `jax.vjp`.
    `logits` and `target` are where Δ_src is measured; `model_tokens` (`open_model_tokens`) are tokens of a model, on whose own
    logits it is measured too; `name` is what the report calls the loss; `time_limit` is how many seconds
    one call may take (None or 0: no limit).

    >>> import torch.nn.functional as F
    >>> audit_loss(lambda z, y: F.cross_entropy(z, y) + 1e-3 * z.logsumexp(-1).square().mean()).identified.coordinate
    'raw'
    """
    started = time.perf_counter()
    for key, given in (("fn", fn), ("off", off), ("per_token", per_token)):
        if (given is not None and not callable(given)) or (key == "fn" and given is None):
            raise InputError(f"`{key}` is expected to be a callable, but got {type(given).__name__}.")
    if (taken := router_arguments(fn)) is not None:
        raise InputError(
            f"{loss_name(fn)} takes {taken} and no targets: it looks like the Z-loss of a router. Audit the routers of a model "
            "with `zloss.audit_router(model, batches)`, or bind the coefficient and pass a function of (logits, target)."
        )
    _check_tensors(logits, target)
    numbers = {"ignore_index": ignore_index, "seed": seed, "valid_vocab": valid_vocab, "vocab": vocab, "tokens": tokens}
    _check_numbers(numbers, softcap, logit_scale, time_limit)
    wanted = _check_expected(expect)
    name = name or loss_name(fn)
    if jax:
        require_version("jax", "0.8", "Auditing a JAX loss", "jax")
        from zloss.audit.loss.jax_loss import from_jax

        fn, off, per_token = from_jax(fn), off and from_jax(off), per_token and from_jax(per_token)
    device = torch.device("cpu") if logits is None else logits.device
    lanes = valid_vocab or vocab or VOCAB
    width = vocab or (lanes if valid_vocab is None else (valid_vocab // 64 + 1) * 64)
    avoid = frozenset({ignore_index} if 0 <= ignore_index < lanes else ())
    rows = tokens or (TOKENS if lanes <= 4096 else TOKENS // 4)
    space = Space(lanes, width, rows, avoid, Warp(logit_scale, softcap))
    loss = Loss(fn, name, linear, ignore_index, seed, device, time_limit)
    with (progress or Silent()).step("audit of the loss", None):
        e = identify(loss, space, seed)
        e.expect = wanted
        e.off = None if off is None else loss.like(off, loss_name(off))
        e.per_token = None if per_token is None else loss.like(per_token, loss_name(per_token))
        findings = answer_all(e)
        source = measure_source(e, logits, target)
    on_model = None if model_tokens is None else source_on_model(e, model_tokens, progress or Silent())
    identified = _at_vocabulary(e, e.space.lanes if logits is None or e.space.padded else logits.shape[-1])
    if e.changing:
        identified = replace(
            identified, has_z=None, coef=None, target=None, coordinate=None, ce_denominator="unknown", z_denominator=None,
            reason=e.changing,
        )  # fmt: skip
    provenance = {
        "loss": name,
        "linear": linear,
        **({"jax": version("jax")} if jax else {}),
        "device": str(loss.device),
        "probe_dtype": dtype_name(e.fine),
        "probe_tokens": space.tokens,
        "probe_vocab": space.lanes,
        **({"probe_width": head_columns(space.tokens)[0]} if linear else {}),
        "ignore_index": loss.ignore_index,
        "calls": loss.calls,
        "seed": seed,
        "zloss": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "seconds": round(time.perf_counter() - started, 3),
    }
    return LossAudit(identified, findings, source, provenance, target_model=on_model)


def _at_vocabulary(e: Evidence, lanes: int) -> Identified:
    """A c that follows log V is stated for the vocabulary of the audited logits, not for that of the probes."""
    got = e.identified
    if got.target_rule != "log_v" or got.target is None or got.vocab is None or lanes == got.vocab:
        return got
    return replace(got, target=got.target + math.log(lanes / got.vocab), vocab=lanes)


def _check_tensors(logits: Any, target: Any) -> None:
    if target is not None and logits is None:
        raise InputError("`target` was given without `logits`: pass both, or neither.")
    for name, given in (("logits", logits), ("target", target)):
        if given is None:
            continue
        if not isinstance(given, Tensor):
            raise DtypeError(
                f"`{name}` is expected to be a tensor, but got {type(given).__name__}: pass `torch.as_tensor(...)`."
            )
        check_holds_values(**{name: given})
    if logits is None:
        return
    if logits.dim() < 2 or not logits.is_floating_point() or logits.shape[-1] < 2 or not logits.numel():
        raise ShapeError(
            f"`logits` is expected to be a floating tensor [..., V] with tokens and V ≥ 2, but got {list(logits.shape)} "
            f"{logits.dtype}."
        )
    if target is not None and (target.is_floating_point() or target.dtype == torch.bool):
        raise DtypeError(f"`target` is expected to hold class indices, but got {target.dtype}.")


def _check_numbers(whole: dict[str, Any], softcap: Any, logit_scale: Any, time_limit: Any) -> None:
    least = {"valid_vocab": 2, "vocab": 2, "tokens": 4, "seed": 0, "ignore_index": -(2**31)}
    for key, value in whole.items():
        if value is None and key in ("valid_vocab", "vocab", "tokens"):
            continue
        most = MOST_ROWS if key in ("valid_vocab", "vocab", "tokens") else 2**31 - 1
        if isinstance(value, bool) or not isinstance(value, int) or not least[key] <= value <= most:
            raise InputError(
                f"`{key}` is expected to be a whole number from {least[key]} to {most}, but got {value!r}."
            )
    if whole["vocab"] is not None and (whole["valid_vocab"] or 0) > whole["vocab"]:
        raise InputError(
            f"`valid_vocab` is expected to be at most `vocab` = {whole['vocab']}, but got {whole['valid_vocab']}."
        )
    for key, value in (("softcap", softcap), ("logit_scale", logit_scale), ("time_limit", time_limit)):
        if value is None and key != "logit_scale":
            continue
        positive = is_number(value) and math.isfinite(value) and (value > 0 or (value == 0 and key == "time_limit"))
        if not positive:
            raise InputError(f"`{key}` is expected to be a positive number, but got {value!r}.")


def _check_expected(expect: Mapping[str, Any] | None) -> dict[str, Any]:
    if not isinstance(expect, Mapping | None):
        raise DtypeError(
            f"`expect` is expected to be a mapping such as {{'coef': 1e-4}}, but got {type(expect).__name__}."
        )
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
