"""What an audit of a loss found, in words: the identified objective, the error of its source, the count of findings."""

from __future__ import annotations

import math

from zloss.decide.remedies import remedies_for
from zloss.results.loss_audit import Finding, Identified, LossAudit


def bottom_line(audit: LossAudit) -> tuple[str, str]:
    """How many errors, warnings and notes there are and their ids, with a style."""
    counted = []
    for word in ("error", "warning", "note"):
        ids = [finding.id for finding in audit.findings if severity(finding) == word]
        if ids:
            counted.append(f"{len(ids)} {word}{'s' * (len(ids) != 1)}: {', '.join(ids)}")
    if not counted:
        return "No finding.", "bold green"
    return "; ".join(counted) + ".", "bold red" if counted[0].split()[1].startswith("error") else "bold yellow"


def other_answers(audit: LossAudit) -> str:
    """How many questions passed and how many were not applicable; empty where every answer is a finding."""
    verdicts = [finding.verdict for finding in audit.findings]
    counts = ((verdicts.count("pass"), "passed"), (verdicts.count("not_applicable"), "not applicable"))
    return ", ".join(f"{count} {word}" for count, word in counts if count)


def what_to_do(audit: LossAudit) -> str:
    """The remedy of every finding in one sentence; empty where there is none."""
    remedy = remedies_for([finding.id for finding in audit.found])
    return f"What to do: {remedy[0].lower()}{remedy[1:]}." if remedy else ""


def severity(finding: Finding) -> str:
    """Findings written before severities existed count as errors."""
    if finding.verdict != "finding":
        return finding.verdict
    return finding.severity or "error"


def headline(audit: LossAudit) -> str:
    """The identified objective in one line."""
    got = audit.identified
    if got.has_z is None:
        return f"It cannot be told what this loss applies. {got.reason or ''}".rstrip()
    ce = _cross_entropy(got)
    if not got.has_z:
        return f"{ce}; {'no Z' if got.coordinate is None else 'no Z, but a gradient that is not cross-entropy'}."
    if got.coef is None:
        return f"{ce}; a Z whose numbers cannot be told: {got.penalty}."
    error = got.uncertainty
    coef = f"λ = {got.coef:.6g}" + _plus_minus(error.coef)
    target = "" if got.target is None else f", c = {_target(got.target, error.target)}" + _plus_minus(error.target)
    rule = _rule(got)
    extra = "".join(f", {key} = {value:.6g}" for key, value in got.extra.items())
    shared = " with the weights of CE" if got.z_weights == "shared" else ""
    where = f"Z on {got.penalty} [{got.coordinate}]{shared}"
    return f"{ce}; {where}: {coef}{target}{rule}{extra}, over {_tokens(got.z_denominator)}."


def _cross_entropy(got: Identified) -> str:
    """Denominator, smoothing, token weights and moved targets of the CE part."""
    if got.ce_denominator == "unknown":
        return "CE with unknown weights"
    ce = f"CE over {_tokens(got.ce_denominator)}"
    weights = {"class": "class weights", "position": "weights by position", "token": "token weights"}
    notes = [f"label smoothing {got.label_smoothing:.4g}"] if got.label_smoothing else []
    notes += [weights[got.ce_weights]] if got.ce_weights is not None and got.ce_weights in weights else []
    notes += ["means of groups"] if got.ce_weights == "groups" else []
    notes += [f"targets {got.targets} by one"] if got.targets != "given" else []
    return f"{ce} ({', '.join(notes)})" if notes else ce


def _tokens(denominator: str | None) -> str:
    """The denominators that count tokens, in words; the others by their name."""
    return {"valid": "valid tokens", "all": "all tokens"}.get(denominator or "", str(denominator))


def _target(c: float, error: float | None) -> str:
    """c, as 0 where it differs from 0 by less than its uncertainty and by rounding alone."""
    return "0" if error is not None and abs(c) < min(error, 1e-6) else f"{c:.6g}"


def _rule(got: Identified) -> str:
    """c as log V, or log V plus a constant, where it follows the vocabulary."""
    if got.target_rule != "log_v" or not got.vocab or got.target is None:
        return ""
    constant = got.target - math.log(got.vocab)
    return " (log V)" if abs(constant) < 1e-3 else f" (log V {constant:+.4g})"


def _plus_minus(error: float | None) -> str:
    return "" if error is None else f" ± {error:.1g}"


def source_line(audit: LossAudit) -> str:
    """Forward error, Δ_src and cosine in one line."""
    source = audit.source
    if source.delta_src is None:
        return f"Source against fp64: not measured ({source.reason})."
    what = "Z source" if source.of == "z" else "total gradient"
    return (
        f"Against fp64 on {source.tokens} {source.dtype} tokens: "
        f"forward {_number(source.forward_rel_error)}, {what} Δ_src {_number(source.delta_src)}, "
        f"1 − cosine {_number(_one_minus(source.cosine))}."
    )


def target_model_lines(audit: LossAudit) -> list[str]:
    """The source on a model's own logits; nothing where no model was given."""
    found = audit.target_model
    if found is None:
        return []
    if found.delta_src is None:
        return [f"On the logits of {found.model}: not measured ({found.reason})."]
    what = "Z source" if found.of == "z" else "total gradient"
    where = f"On {found.tokens} {found.dtype} tokens of {found.model} ({found.text}), at the {_place(found.at)}: "
    floor = "" if found.beyond_rounding else f" (rounding alone can cause {_number(found.rounding_floor)})"
    weight = "" if found.delta_weight is None else f", dW {_number(found.delta_weight)}"
    assumed = [] if found.assumed is None else [f"The fp64 source there is that of {found.assumed}."]
    return [
        f"{where}forward {_number(found.forward_rel_error)}, {what} Δ_src {_number(found.delta_src)}{floor}{weight}, "
        f"1 − cosine {_number(_one_minus(found.cosine))}.",
        f"Relative error of a token's source: mean {_number(found.token_mean)}, p99 {_number(found.token_p99)}, "
        f"max {_number(found.token_max)}.",
        *assumed,
    ]


def _place(at: str) -> str:
    return "hidden states" if at == "hidden" else "logits"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def _one_minus(cosine: float | None) -> float | None:
    return None if cosine is None else max(1.0 - cosine, 0.0)
