"""`zloss.audit_loss`: treat a loss as a black box and say what it injects."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import zloss
from zloss.audit.loss import probes
from zloss.audit.loss.bf16_inputs import bf16_input_error
from zloss.audit.loss.callable import BlackBox, LossFunction
from zloss.audit.loss.describe import cannot_tell
from zloss.audit.loss.evidence import Evidence
from zloss.audit.loss.findings import CHECKS
from zloss.audit.loss.identify import Identification, identify
from zloss.audit.loss.probes import Space
from zloss.audit.loss.reach import try_sizes
from zloss.audit.loss.settle import settle
from zloss.audit.loss.source_error import audited_probe, measure_source
from zloss.audit.loss.time_limit import TIME_LIMIT
from zloss.console.progress import Progress, Silent
from zloss.errors import InputError, UnknownNameError
from zloss.results.loss_audit import LossAudit, SourceError
from zloss.source.number_kind import is_number

if TYPE_CHECKING:
    from zloss.audit.loss.model_tokens import ModelTokens

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
    (`coef`, `target`, `coordinate`, `denominator`, ...). `logits` and `target` are where Δ_src is measured;
    `name` is what the report calls the loss; `thorough` also tries many tokens and a large vocabulary at once;
    `model_tokens` (`open_model_tokens`) are tokens of a model on a text, on whose own logits Δ_src is measured too;
    `time_limit` is how many seconds one call may take (None or 0: no limit; the main thread only).

    >>> import torch.nn.functional as F
    >>> audit_loss(lambda z, y: F.cross_entropy(z, y) + 1e-3 * z.logsumexp(-1).square().mean()).identified.coordinate
    'raw'
    """
    started = time.perf_counter()
    wanted = _check_options(fn, off, per_token, expect, valid_vocab)
    space, device = _space(valid_vocab), torch.device("cpu") if logits is None else logits.device
    box = BlackBox(fn, name or _name(fn), linear, device, seed, ignore_index, time_limit=time_limit)
    if ignore_index >= 0:
        space = replace(space, avoid=frozenset({ignore_index}))
    with (progress or Silent()).step("audit of the loss", None) as step:
        space = settle(box, space, logits)
        ident = identify(box, space, seed, lambda: step.advance(1))
        off_box = None if off is None else box.like(off, _name(off))
        token_box = None if per_token is None else box.like(per_token, _name(per_token))
        probe, dtype = audited_probe(ident, logits, target, ignore_index, seed)
        ident = _at_vocabulary(ident, probe.reference.lanes)
        source, floor = measure_source(box, off_box, ident, probe, dtype)
        source = replace(source, bf16_inputs=bf16_input_error(box, ident, seed))
    with (progress or Silent()).step("sizes", None) as step:
        reach = try_sizes(box, ident, seed, thorough=thorough, advance=lambda: step.advance(1))
    evidence = Evidence(box, off_box, token_box, wanted, ident, source, floor, seed, reach)
    findings = tuple(check(evidence) for check in CHECKS)
    drifted = next((f for f in findings if f.id == "not_repeatable" and f.verdict == "finding"), None)
    if drifted is not None:
        # State may show only after many calls: nothing that was identified before holds.
        told = cannot_tell(drifted.sentence, ident.identified.computes_in, ident.space, targets=box.targets)
        ident = replace(ident, identified=told, selection=replace(ident.selection, how="unexplained"))
        source = SourceError(None, None, None, reason="the loss is not repeatable")
        evidence = replace(evidence, ident=ident, source=source, reach=(), stable=False)
        findings = tuple(drifted if f.id == drifted.id else f for f in (check(evidence) for check in CHECKS))
    on_model = None
    if model_tokens is not None:
        from zloss.audit.loss.on_model import source_on_model

        on_model = source_on_model(box, off_box, ident, model_tokens, progress or Silent())
    provenance = {
        "loss": box.name,
        "linear": linear,
        "device": str(box.device),
        "probe_dtype": str(ident.dtype).removeprefix("torch."),
        "probe_tokens": ident.space.tokens,
        "probe_vocab": space.lanes,
        "sizes": [one.words for one in reach],
        "thorough": thorough,
        "calls": box.calls,
        "seed": seed,
        "zloss": zloss.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "seconds": round(time.perf_counter() - started, 3),
    }
    return LossAudit(ident.identified, findings, source, provenance, target_model=on_model)


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
    if valid_vocab is not None and (isinstance(valid_vocab, bool) or valid_vocab < 2):
        raise InputError(f"`valid_vocab` is expected to be a number of rows ≥ 2, but got {valid_vocab!r}.")
    wanted = dict(expect or {})
    for key, value in wanted.items():
        if key not in EXPECTABLE:
            raise UnknownNameError("key of `expect`", key, EXPECTABLE)
        number = key in ("coef", "target", "label_smoothing")
        if number and value is not None and not (is_number(value) and math.isfinite(value)):
            raise InputError(f"`expect[{key!r}]` is expected to be a finite number or None, but got {value!r}.")
    return wanted


def _space(valid_vocab: int | None) -> Space:
    if valid_vocab is None:
        return Space(probes.VOCAB, probes.VOCAB)
    return Space(valid_vocab, (valid_vocab // 64 + 1) * 64)


def _name(function: Callable[..., Any]) -> str:
    name = getattr(function, "__qualname__", None) or type(function).__name__
    return f"the loss {name!r}"
