"""The audit of a loss as a document: what it applies, its findings, and the error of its source."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from zloss.report.document import (
    Cell,
    Column,
    Columns,
    Document,
    Group,
    Heading,
    Item,
    Items,
    Plain,
    Table,
    Text,
    Tone,
    cell,
    table,
    terms,
)
from zloss.report.figures import axis, color_of, curve, linear_domain, lines, panel
from zloss.report.numbers import MISSING, number
from zloss.results.loss_audit import Finding, Identified, LossAudit, SourceError, TargetModelSource

SEVERITIES: dict[str, tuple[Tone, str]] = {
    "error": ("error", "✗"),
    "warning": ("warning", "!"),
    "note": ("note", "i"),
    "pass": ("pass", "✓"),
    "not_applicable": ("open", "·"),
}
"""Severity of a finding, else its verdict → tone and mark, in the order of a table."""
WEIGHTS = {
    "class": "class weights",
    "position": "per-position weights",
    "token": "token weights",
    "groups": "means of groups",
}
"""How the weight on CE differs between tokens, in words."""
EXPLAINED_BY = {"forward_backward_mismatch": "zero_gradient_z"}
"""Finding → the one that explains it where both fire: a Z without a gradient is why value and gradient disagree."""
SECTIONS = {
    "identified": "Identified",
    "source": "Source against fp64",
    "target_model": "Source on the model's own logits",
    "provenance": "Provenance",
}


def loss_audit_document(audit: LossAudit) -> Document:
    """Everything about one loss."""
    plain = audit.to_dict()
    plain["identified"].pop("curve", None)
    sections = [terms(title, plain[key]) for key, title in SECTIONS.items() if plain[key] is not None]
    rest = terms("Further", plain, skip=("schema", "findings", *SECTIONS))
    return [
        Heading(f"`{audit.provenance.get('loss', 'loss')}`", 3),
        Group(
            "verdict",
            (
                Text(bottom_line(audit)[0], "answer"),
                *_what_to_do(audit),
                Text(f"It applies: {headline(audit)}"),
            ),
        ),
        *([findings_table(audit.found)] if audit.found else []),
        *_others(audit),
        *_curve(audit.identified),
        Group("columns", tuple(section for section in (*sections, rest) if section.items)),
    ]


def loss_audit_summary(
    audit: LossAudit,
    *,
    whole: bool = False,
    elsewhere: str = "the JSON file lists them",
    function: str = "",
    options: Mapping[str, Any] | None = None,
) -> Document:
    """What a terminal shows: identified objective, source error, the findings, and how many other questions there were.

    `whole` lists every question with its answer; `elsewhere` says where they are otherwise. `function` (MODULE:FUNCTION) is the
    loss, and `options` how it is called (`Witness.code`), for the code that reproduces a finding.
    """
    bottom, tone = bottom_line(audit)
    others = _counts(audit)
    code = [
        f"# {one.id}\n{one.witness.code(function=function, **options or {})}"
        for one in (audit.found if whole else ())
        if one.witness is not None
    ]
    return [
        Heading(Plain(audit.provenance.get("loss", "loss")), 1),
        Text(bottom, "strong", tone),
        *_what_to_do(audit),
        Text(f"It applies: {headline(audit)}"),
        Text(source_line(audit), "soft"),
        *(Text(sentence, "soft") for sentence in target_model_lines(audit)),
        *([findings_table(audit.findings if whole else audit.found, witnessed=whole)] if whole or audit.found else []),
        *(Text(text, "code") for text in code),
        *([Text(f"{others}; {elsewhere}.", "soft")] if others and not whole else []),
    ]


def _counts(audit: LossAudit) -> str:
    """How many checks passed and did not apply."""
    verdicts = [finding.verdict for finding in audit.findings]
    counts = ((verdicts.count("pass"), "passed"), (verdicts.count("not_applicable"), "not applicable"))
    return ", ".join(f"{count} {word}" for count, word in counts if count)


def _others(audit: LossAudit) -> Document:
    """The checks without a finding, in one line that opens."""
    rest = [finding for finding in audit.findings if finding.verdict != "finding"]
    said = "Only errors fire a stage of the decision map."
    item = Item("Other checks", "", "quiet", f"{_counts(audit)}.", body=(findings_table(rest), Text(said, "soft")))
    return [Items((item,))] if rest else []


def findings_table(findings: Sequence[Finding], *, witnessed: bool = True) -> Table:
    """One line per check, with its witness: errors, warnings and notes first, then passes and what did not apply."""
    order = list(SEVERITIES)

    def verdict(finding: Finding) -> Cell:
        found = severity(finding)
        tone, mark = SEVERITIES[found]
        return Cell(f"{mark} {found.replace('_', ' ')}", order.index(found), tone)

    def seen(finding: Finding) -> Cell:
        text = f"{finding.sentence} Consequence: {finding.consequence}." if finding.consequence else finding.sentence
        return Cell(text, note=finding.witness.line if finding.witness is not None and witnessed else "")

    def figure(finding: Finding) -> Cell:
        return Cell("" if finding.figure is None else number(finding.figure), finding.figure)

    columns: Columns = (
        (Column("verdict", "text"), verdict),
        (Column("check", "text"), lambda finding: Cell(finding.id, finding.id, "code")),
        (Column("what was seen", "prose"), seen),
        (Column("measured", wide=True), figure),
    )
    return table(sorted(findings, key=lambda one: order.index(severity(one))), columns, name="findings")


def _curve(got: Identified) -> Document:
    """The measured source of a penalty that is not a square, against the penalized quantity v."""
    if not got.curve:
        return []
    title = "Measured points of the penalty"
    quantity, amount = "v, the penalized quantity (nat)", "coefficient of ∂v/∂z"
    xs, ys = zip(*got.curve, strict=True)
    if find_spec("vl_convert") is None:  # a loss audit needs the base install only
        columns = (Column(quantity), Column(amount))
        return [Heading(title, 4), Table(columns, tuple((cell(x), cell(y)) for x, y in got.curve))]
    axes = (
        axis(quantity, linear_domain(xs)),
        axis(f"{amount}, relative to the weight on CE", linear_domain(ys)),
    )
    caption = f"The penalty is on {got.penalty}. λ(v − c)² would give the line 2λ(v − c)."
    drawn = [lines([curve("measured", xs, ys)], points=30)]
    return [panel("loss_curve", title, axes, (("measured", color_of(0)),), drawn, caption)]


def bottom_line(audit: LossAudit) -> tuple[str, Tone]:
    """The verdict on the loss in one sentence, with the ids of its findings, and a tone."""
    counted: dict[Tone, str] = {}
    words: tuple[Tone, ...] = ("error", "warning", "note")
    for word in words:
        ids = [finding.id for finding in audit.findings if severity(finding) == word]
        if ids:
            counted[word] = f"{len(ids)} {word}{'s' * (len(ids) != 1)} ({', '.join(ids)})"
    listed = ", ".join(counted.values())
    if "error" in counted:
        return f"Fix this loss before you train with it: {listed}.", "error"
    if counted:
        return f"No errors in what this loss trains; {listed}.", "warning"
    if audit.identified.has_z is None:
        return "No finding, but what this loss applies could not be identified.", "open"
    return "No finding: the gradient of this loss matches its value.", "pass"


def what_to_do(audit: LossAudit) -> list[str]:
    """One fix per finding, with its id: errors first, and in the order of the record among those of one severity.

    A finding that another one explains has no separate fix; it is named with the other one.
    """
    order, ids = list(SEVERITIES), {finding.id for finding in audit.found}
    fixes = []
    for finding in sorted(audit.found, key=lambda one: order.index(severity(one))):
        if EXPLAINED_BY.get(finding.id) not in ids:
            also = (other for other, cause in EXPLAINED_BY.items() if cause == finding.id and other in ids)
            fixes.append(f"{', '.join((finding.id, *also))}: {finding.remedy}.")
    return fixes


def _what_to_do(audit: LossAudit) -> list[Text]:
    fixes = what_to_do(audit)
    return [Text("What to do:"), *(Text(fix, "item") for fix in fixes)] if fixes else []


def severity(finding: Finding) -> str:
    """The severity of a finding, else the verdict."""
    return finding.severity or ("note" if finding.verdict == "finding" else finding.verdict)


def headline(audit: LossAudit) -> str:
    """The identified objective in one line."""
    got = audit.identified
    if got.has_z is None:
        return f"What this loss applies could not be determined. {got.reason or ''}".rstrip()
    ce = _cross_entropy(got)
    if not got.has_z:
        return f"{ce}; {'no Z' if got.coordinate is None else 'no Z, but a gradient that is not cross-entropy'}."
    if got.curve:
        return f"{ce}; a penalty on {got.penalty}, without λ and c: the points are measured."
    if got.coef is None:
        return f"{ce}; a Z whose numbers could not be determined: {got.penalty}."
    error = got.uncertainty
    target = ""
    if got.target is not None:
        # 0 where c differs from 0 by less than its uncertainty and by rounding alone.
        zero = error.target is not None and abs(got.target) < min(error.target, 1e-6)
        target = f", c = {'0' if zero else f'{got.target:.6g}'}{_plus_minus(error.target)}"
        if got.target_rule == "log_v" and got.vocab:
            constant = got.target - math.log(got.vocab)
            target += " (log V)" if abs(constant) < 1e-3 else f" (log V {constant:+.4g})"
    extra = "".join(f", {key} = {value:.6g}" for key, value in got.extra.items() if not key.startswith("or_"))
    relative = f" ({got.coef_relative_to_ce:.6g} relative to CE)" if got.coef_relative_to_ce != got.coef else ""
    shared = " with the weights of CE" if got.z_weights == "shared" else ""
    return (
        f"{ce}; Z on {got.penalty} [{got.coordinate}]{shared}: λ = {got.coef:.6g}{_plus_minus(error.coef)}{relative}{target}"
        f"{extra}, over {_tokens(got.z_denominator)}.{_same_gradient(got)}"
    )


def _same_gradient(got: Identified) -> str:
    """The other objective with this gradient, where a scaled CE next to a centered Z is one of two."""
    if "or_label_smoothing" not in got.extra:
        return ""
    smoothing, target = got.extra["or_label_smoothing"], got.extra["or_target"]
    return f" Label smoothing {smoothing:.4g} with c = {target:.6g} has the same gradient."


def _cross_entropy(got: Identified) -> str:
    """Denominator, smoothing, token weights and moved targets of the CE part."""
    if got.ce_denominator == "unknown":
        return "CE with unknown weights"
    if got.ce_denominator == "none":
        return "no CE"
    scaled = got.ce_scale is not None and got.ce_weights == "uniform" and abs(got.ce_scale - 1) > 1e-6
    notes = (
        f"scaled by {got.ce_scale:.6g}" if scaled else "",
        f"label smoothing {got.label_smoothing:.4g}" if got.label_smoothing else "",
        WEIGHTS.get(got.ce_weights or "", ""),
        f"targets {got.targets} by one" if got.targets != "given" else "",
    )
    said = ", ".join(filter(None, notes))
    return f"CE over {_tokens(got.ce_denominator)}" + (f" ({said})" if said else "")


def _tokens(denominator: str | None) -> str:
    """The denominators that count tokens, in words; the others by their name."""
    return {"valid": "valid tokens", "all": "all tokens"}.get(denominator or "", str(denominator))


def _plus_minus(error: float | None) -> str:
    return "" if error is None else f" ± {error:.1g}"


def source_line(audit: LossAudit) -> str:
    """Forward error, Δ_src and cosine in one line."""
    source = audit.source
    if source.delta_src is None:
        return f"Source against fp64: not measured ({source.reason})."
    return f"Against fp64 on {source.tokens} {source.dtype} tokens: {_errors(source)}."


def target_model_lines(audit: LossAudit) -> list[str]:
    """The source on a model's own logits; nothing if no model was given."""
    found = audit.target_model
    if found is None:
        return []
    if found.delta_src is None:
        return [f"On the logits of {found.model}: not measured ({found.reason})."]
    place = "hidden states" if found.at == "hidden" else "logits"
    floor = "" if found.beyond_rounding else f" (rounding alone can cause {_number(found.rounding_floor)})"
    weight = "" if found.delta_weight is None else f", dW {_number(found.delta_weight)}"
    return [
        f"On {found.tokens} {found.dtype} tokens of {found.model} ({found.text}), at the {place}: "
        f"{_errors(found, floor + weight)}.",
        f"Relative error of a token's source: mean {_number(found.token_mean)}, p99 {_number(found.token_p99)}, "
        f"max {_number(found.token_max)}.",
    ]


def _errors(source: SourceError | TargetModelSource, more: str = "") -> str:
    what = "Z source" if source.of == "z" else "total gradient"
    distance = None if source.cosine is None else max(1.0 - source.cosine, 0.0)
    return (
        f"forward {_number(source.forward_rel_error)}, {what} Δ_src {_number(source.delta_src)}{more}, "
        f"1 − cosine {_number(distance)}"
    )


def _number(value: float | None) -> str:
    return MISSING if value is None else f"{value:.3g}"
