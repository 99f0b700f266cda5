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
from zloss.audit.loss.callable import BlackBox, LossFunction, loss_name, probe_width
from zloss.audit.loss.describe import cannot_tell
from zloss.audit.loss.evidence import Evidence, found, not_applicable
from zloss.audit.loss.findings import CHECKS
from zloss.audit.loss.identification import Identification
from zloss.audit.loss.identify import denominators_again, identify
from zloss.audit.loss.probes import Space
from zloss.audit.loss.reach import try_sizes
from zloss.audit.loss.settle import settle
from zloss.audit.loss.source_error import audited_probe, beyond_rounding, measure_source
from zloss.console import Progress, Silent
from zloss.results.loss_audit import Finding, LossAudit, SourceError

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
    rounded = beyond_rounding(source, floor)
    with progress.step("sizes", None) as step:
        # Where the source is rounded, so it is at every size.
        reach = () if rounded else try_sizes(box, ident, seed, thorough=thorough, advance=lambda: step.advance(1))
    evidence = Evidence(box, off_box, token_box, wanted, ident, source, floor, seed, reach, given=logits is not None)
    findings = _confirmed(evidence, tuple(check(evidence) for check in CHECKS))
    drifted = next((f for f in findings if f.id == "not_repeatable" and f.verdict == "finding"), None)
    if drifted is not None:
        # State may show only after many calls: nothing that was identified before holds.
        told = cannot_tell(drifted.sentence, ident.identified.computes_in, ident.space, targets=box.targets)
        ident = replace(ident, identified=told, selection=replace(ident.selection, how="unexplained"))
        source = SourceError(None, None, None, reason="the loss is not repeatable")
        evidence = replace(evidence, ident=ident, source=source, reach=(), stable=False)
        findings = tuple(drifted if f.id == drifted.id else f for f in (check(evidence) for check in CHECKS))
        findings = _confirmed(evidence, findings)
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
        **({"probe_width": probe_width(ident.space.tokens, ident.space.width)} if box.linear else {}),
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


ALONE = ("unexplained_source", "not_repeatable", "overwrites_input", "targets_moved", "reported_z_dtype")
"""Findings that rest on no draw: open answers, and facts of one call."""


def _confirmed(evidence: Evidence, findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """The findings with every error and warning put a second time, to an independent draw.

    One that the second draw does not show is unexplained: its question has no answer, and its figure is told there.
    """
    doubted = [f for f in findings if f.severity in ("error", "warning") and f.id not in ALONE]
    if not doubted or evidence.ident.second is None or "mixed" not in evidence.ident.second.outcomes:
        return findings
    second = _second_evidence(evidence, {f.id for f in doubted})
    checks = {f.id: check for f, check in zip(findings, CHECKS, strict=True)}
    lost = {f.id: again for f in doubted if (again := checks[f.id](second)).verdict != "finding"}
    if "size_dependent" in {f.id for f in doubted} - lost.keys():
        # Only the sizes that differ on both draws are named.
        twice = {one.words for one in second.reach if one.verdict == "differs"}
        reach = tuple(one for one in evidence.reach if one.verdict != "differs" or one.words in twice)
        narrowed = checks["size_dependent"](replace(evidence, reach=reach))
        findings = tuple(narrowed if f.id == narrowed.id else f for f in findings)
    if not lost:
        return findings
    for f in doubted:
        # The same question on the same draw: another answer now is state, and not the draw.
        if (
            f.id in lost
            and f.id not in ("size_dependent", "denominator_mismatch")
            and checks[f.id](evidence).verdict != "finding"
        ):
            why = f"The same check gives a different result when it is repeated ({f.id}: “{f.sentence}”): the loss keeps state."
            return tuple(found(one.id, why, f.figure) if one.id == "not_repeatable" else one for one in findings)
    seen = "; ".join(
        f"{f.id}: on the first “{f.sentence}”, on the second “{lost[f.id].sentence}”" for f in doubted if f.id in lost
    )
    sentence = f"Two draws of the probes disagree. {seen}"
    kept: dict[str, Finding] = {}
    for f in findings:
        if f.id in lost:
            why = "Seen on one draw of the probes and not on a second: see unexplained_source."
            kept[f.id] = not_applicable(f.id, why, f.figure)
        elif f.id == "unexplained_source":
            said = f"{f.sentence} " if f.verdict == "finding" else ""
            kept[f.id] = found(f.id, f"{said}{sentence}")
        else:
            kept[f.id] = f
    return tuple(kept.values())


def _second_evidence(evidence: Evidence, doubted: set[str]) -> Evidence:
    """The same evidence from the second draw; what is costly is measured again only for the findings in doubt."""
    ident = evidence.ident
    assert ident.second is not None
    draw, box = ident.second, evidence.box
    denominators, source, floor, reach = ident.denominators, evidence.source, evidence.floor, evidence.reach
    if "denominator_mismatch" in doubted and ident.told:
        denominators = denominators_again(box, ident, draw.seed)
    if "low_precision_source" in doubted and source.delta_src is not None and not evidence.given:
        probe, dtype = audited_probe(ident, None, None, box.ignore_index, draw.seed)
        source, floor = measure_source(box, evidence.off, ident, probe, dtype)
    if "size_dependent" in doubted:
        reach = try_sizes(box, ident, draw.seed, thorough=True, advance=lambda: None, again=reach)
    again = replace(ident, probes=draw.probes, outcomes=draw.outcomes, denominators=denominators)
    return replace(evidence, ident=again, source=source, floor=floor, seed=draw.seed, reach=reach)


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
