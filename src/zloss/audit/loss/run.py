"""`zloss.audit_loss`: treat a loss as a black box and say what it injects."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import zloss
from zloss.audit.loss import probes
from zloss.audit.loss.bf16_inputs import bf16_input_error
from zloss.audit.loss.callable import BlackBox, LossFunction
from zloss.audit.loss.evidence import Evidence
from zloss.audit.loss.findings import CHECKS
from zloss.audit.loss.identify import Identification, Space, identify
from zloss.audit.loss.output import LossCallError
from zloss.audit.loss.source_error import audited_probe, measure_source
from zloss.errors import InputError, UnknownNameError
from zloss.results.loss_audit import LossAudit

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
) -> LossAudit:
    """Identify λ, c, coordinate and denominators of `fn` from its gradients, and put every question of the audit to it.

    `fn(logits, target)`, or with `linear` `fn(hidden, weight, target)`, returns a scalar, a tuple whose first item is
    the loss, or an object with `.loss`; a second item, `.z_loss` or `.auxiliary` is the Z it reports. `off` is the same
    loss with its Z switched off, `per_token` its reduction="none" variant, `expect` what the user believes
    (`coef`, `target`, `coordinate`, `denominator`, ...). `logits` and `target` are where Δ_src is measured;
    `name` is what the report calls the loss.

    >>> import torch.nn.functional as F
    >>> audit_loss(lambda z, y: F.cross_entropy(z, y) + 1e-3 * z.logsumexp(-1).square().mean()).identified.coordinate
    'raw'
    """
    started = time.perf_counter()
    wanted = _check_options(fn, off, per_token, expect, valid_vocab)
    space, device = _space(valid_vocab), torch.device("cpu") if logits is None else logits.device
    box = BlackBox(fn, name or _name(fn), linear, device, seed, ignore_index)
    space = _settle(box, space, logits)
    off_box = None if off is None else _relative(box, off)
    token_box = None if per_token is None else _relative(box, per_token)
    ident = identify(box, space, seed)
    probe, dtype = audited_probe(ident, logits, target, ignore_index, seed)
    ident = _at_vocabulary(ident, probe.reference.lanes)
    source, floor = measure_source(box, off_box, ident, probe, dtype)
    source = replace(source, bf16_inputs=bf16_input_error(box, ident, seed))
    evidence = Evidence(box, off_box, token_box, wanted, ident, source, floor, seed)
    findings = tuple(check(evidence) for check in CHECKS)
    provenance = {
        "loss": box.name,
        "linear": linear,
        "device": str(box.device),
        "probe_dtype": str(ident.dtype).removeprefix("torch."),
        "probe_tokens": probes.TOKENS,
        "probe_vocab": space.lanes,
        "calls": box.calls,
        "seed": seed,
        "zloss": zloss.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "seconds": round(time.perf_counter() - started, 3),
    }
    return LossAudit(ident.identified, findings, source, provenance)


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
        if key in ("coef", "target", "label_smoothing") and not (value is None or isinstance(value, (int, float))):
            raise InputError(f"`expect[{key!r}]` is expected to be a number or None, but got {value!r}.")
    return wanted


def _space(valid_vocab: int | None) -> Space:
    if valid_vocab is None:
        return Space(probes.VOCAB, probes.VOCAB)
    return Space(valid_vocab, (valid_vocab // 64 + 1) * 64)


def _relative(box: BlackBox, function: LossFunction) -> BlackBox:
    """Another loss, called the way the audited one is."""
    return BlackBox(function, _name(function), box.linear, box.device, box.seed, box.ignore_index, box.batched)


def _name(function: Callable[..., Any]) -> str:
    name = getattr(function, "__qualname__", None) or type(function).__name__
    return f"the loss {name!r}"


def _settle(box: BlackBox, space: Space, logits: Tensor | None) -> Space:
    """Find a layout, vocabulary and device the loss accepts; if none does, the first refusal is the error."""
    spaces = [space]
    if logits is not None and logits.dim() >= 2 and space.lanes == space.width:
        spaces.append(Space(logits.shape[-1], logits.shape[-1]))
    devices = [box.device]
    if box.device.type == "cpu" and torch.cuda.is_available():
        devices.append(torch.device("cuda"))
    refusal: LossCallError | None = None
    for device in devices:
        for tried in spaces:
            probe = probes.mixed(torch.Generator().manual_seed(0), lanes=tried.lanes, width=tried.width)
            for batched in (False, True):
                for dtype in (torch.float32, torch.float64):
                    box.device, box.batched = device, batched
                    try:
                        box(probe.logits_TV, probe.target_T, dtype=dtype)
                        return tried
                    except LossCallError as error:
                        refusal = refusal or error
    assert refusal is not None
    raise refusal
