"""Everything that is asked of a loss: what it injects, at which sizes it still does, and every finding.

Each question calls the loss as a black box; the answers are one record.
"""

from __future__ import annotations

import math
import platform
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import zloss
from zloss.audit.loss import probes
from zloss.audit.loss.bf16_inputs import bf16_input_error
from zloss.audit.loss.callable import BlackBox, LossFunction, loss_name
from zloss.audit.loss.describe import cannot_tell
from zloss.audit.loss.evidence import Evidence
from zloss.audit.loss.findings import CHECKS
from zloss.audit.loss.identify import Identification, identify
from zloss.audit.loss.probes import Space
from zloss.audit.loss.reach import try_sizes
from zloss.audit.loss.settle import settle
from zloss.audit.loss.source_error import audited_probe, measure_source
from zloss.console import Progress, Silent
from zloss.results.loss_audit import LossAudit, SourceError

if TYPE_CHECKING:
    from zloss.audit.loss.model_tokens import ModelTokens


def question(
    box: BlackBox,
    off: LossFunction | None,
    per_token: LossFunction | None,
    wanted: dict[str, Any],
    *,
    valid_vocab: int | None,
    logits: Tensor | None,
    target: Tensor | None,
    thorough: bool,
    model_tokens: ModelTokens | None,
    progress: Progress | None,
) -> LossAudit:
    """The audit of a loss, of the same loss without its Z, and of its per-token variant; `wanted` is what the user believes."""
    started = time.perf_counter()
    space, seed = _space(valid_vocab), box.seed
    if box.ignore_index >= 0:
        space = replace(space, avoid=frozenset({box.ignore_index}))
    progress = progress or Silent()
    with progress.step("audit of the loss", None) as step:
        space = settle(box, space, logits)
        ident = identify(box, space, seed, lambda: step.advance(1))
        # Now it is known how the loss wants to be called.
        off_box = None if off is None else box.like(off, loss_name(off))
        token_box = None if per_token is None else box.like(per_token, loss_name(per_token))
        probe, dtype = audited_probe(ident, logits, target, box.ignore_index, seed)
        ident = _at_vocabulary(ident, probe.reference.lanes)
        source, floor = measure_source(box, off_box, ident, probe, dtype)
        source = replace(source, bf16_inputs=bf16_input_error(box, ident, seed))
    with progress.step("sizes", None) as step:
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

        on_model = source_on_model(box, off_box, ident, model_tokens, progress)
    provenance = {
        "loss": box.name,
        "linear": box.linear,
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


def _space(valid_vocab: int | None) -> Space:
    if valid_vocab is None:
        return Space(probes.VOCAB, probes.VOCAB)
    return Space(valid_vocab, (valid_vocab // 64 + 1) * 64)
