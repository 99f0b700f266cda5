"""`zloss.audit_loss`: treat a loss as a black box and say what it injects."""

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
from zloss.audit.loss import probes
from zloss.audit.loss.calls import BlackBox, dtype_name, find_call, loss_name, router_arguments
from zloss.audit.loss.findings import Evidence, answer_all
from zloss.audit.loss.identify import Identification, identify, unexplained
from zloss.audit.loss.model_tokens import ModelTokens, audited_probe, source_on_model
from zloss.console import Progress, Silent
from zloss.errors import InputError, UnknownNameError, require_version
from zloss.results.loss_audit import LossAudit
from zloss.tensors import is_number

LOG_V = ("log_v", "log V", "logV")
"""Words for c = log V in `expect`; the first is that of `target_rule`."""
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
    seed: int = 0,
    name: str | None = None,
    thorough: bool = False,
    model_tokens: ModelTokens | None = None,
    time_limit: float | None = 300.0,
    progress: Progress | None = None,
) -> LossAudit:
    """Identify λ, c, coordinate and denominators of `fn` from its gradients, and run every check of the audit on it.

    `fn(logits, target)`, or with `linear` `fn(hidden, weight, target)`, returns a scalar, a tuple whose first item is
    the loss, or an object with `.loss`; other values, such as the Z it reports, are recognized by their numbers. `off` is the
    same loss with its Z switched off, `per_token` its reduction="none" variant, `expect` what the user believes
    (`coef`, `target`, `coordinate`, `denominator`, ...; a `target` of "log_v" or None is c = log V).
    With `jax` the functions are of JAX arrays, and their gradients come from `jax.vjp`.
    `logits` and `target` are where Δ_src is measured;
    `name` is what the report calls the loss; `thorough` also tries many tokens and a large vocabulary at once;
    `model_tokens` (`open_model_tokens`) are tokens of a model on a text, on whose own logits Δ_src is measured too;
    `time_limit` is how many seconds one call may take (None or 0: no limit; the main thread only).

    >>> import torch.nn.functional as F
    >>> audit_loss(lambda z, y: F.cross_entropy(z, y) + 1e-3 * z.logsumexp(-1).square().mean()).identified.coordinate
    'raw'
    """
    started = time.perf_counter()
    wanted = _check_options(fn, off, per_token, expect, valid_vocab)
    name = name or loss_name(fn)
    if jax:
        require_version("jax", "0.8", "Auditing a JAX loss", "jax")
        from zloss.audit.loss.jax_loss import from_jax

        fn, off, per_token = from_jax(fn), off and from_jax(off), per_token and from_jax(per_token)
    device = torch.device("cpu") if logits is None else logits.device
    box = BlackBox(fn, name, linear, device, seed, ignore_index, time_limit=time_limit)
    vocab, width = (probes.VOCAB,) * 2 if valid_vocab is None else (valid_vocab, (valid_vocab // 64 + 1) * 64)
    space = probes.Space(vocab, width, probes.TOKENS, frozenset({ignore_index} if ignore_index >= 0 else ()))
    progress = progress or Silent()
    with progress.step("audit of the loss", None):
        ident = identify(box, find_call(box, space, logits), seed)
        ident = _at_vocabulary(ident, audited_probe(ident, logits, target, ignore_index, seed)[0].lanes)
        # The calling convention of the loss is known from here on.
        off_box = None if off is None else box.like(off, loss_name(off))
        token_box = None if per_token is None else box.like(per_token, loss_name(per_token))
        evidence = Evidence(box, off_box, token_box, wanted, ident, ident.first, (logits, target), thorough)
    with progress.step("sizes", None):
        sizes = [one.words for one in evidence.reach]
    findings = answer_all(evidence)
    drifted = next(one for one in findings if one.id == "not_repeatable")
    if drifted.verdict == "finding":
        # State may show only after many calls: nothing that was identified before holds, and every answer is given again.
        ident = unexplained(ident, drifted.sentence)
        evidence, sizes = replace(evidence, ident=ident, stable=False), []
        findings = tuple(drifted if one.id == drifted.id else one for one in answer_all(evidence))
    on_model = None if model_tokens is None else source_on_model(box, off_box, ident, model_tokens, progress)
    provenance = {
        "loss": box.name,
        "linear": linear,
        **({"jax": version("jax")} if jax else {}),
        "device": str(box.device),
        "probe_dtype": dtype_name(box.dtype),
        "probe_tokens": ident.space.tokens,
        "probe_vocab": ident.space.lanes,
        **({"probe_width": probes.probe_width(ident.space.tokens, ident.space.width)} if linear else {}),
        "sizes": sizes,
        "thorough": thorough,
        "calls": box.calls,
        "seed": seed,
        "zloss": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "seconds": round(time.perf_counter() - started, 3),
    }
    return LossAudit(ident.identified, findings, evidence.source[0], provenance, target_model=on_model)


def _at_vocabulary(ident: Identification, lanes: int) -> Identification:
    """State a c that follows log V for the vocabulary of the audited logits, not for that of the probes."""
    got = ident.identified
    if got.target_rule != "log_v" or got.target is None or got.vocab is None or lanes == got.vocab:
        return ident
    moved = replace(got, target=got.target + math.log(lanes / got.vocab), vocab=lanes)
    return replace(ident, identified=moved)


def _check_options(
    fn: object, off: object, per_token: object, expect: Mapping[str, Any] | None, valid_vocab: int | None
) -> dict[str, Any]:
    for name, given in (("fn", fn), ("off", off), ("per_token", per_token)):
        if (given is not None and not callable(given)) or (name == "fn" and given is None):
            raise InputError(f"`{name}` is expected to be a callable, but got {type(given).__name__}.")
    if callable(fn) and (taken := router_arguments(fn)) is not None:
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
