"""Is all of the gradient explained by CE and a penalty of the known good kind?"""

from __future__ import annotations

from zloss.audit.loss.callable import probe_width
from zloss.audit.loss.candidates import NOT_SQUARED
from zloss.audit.loss.confirm import POWERS
from zloss.audit.loss.evidence import Evidence, found, not_applicable, passed
from zloss.audit.loss.identification import Identification
from zloss.results.loss_audit import Finding

ID = "unexplained_source"
WEIGHTS = {
    "class": "with class weights",
    "position": "with weights by position",
    "token": "with a weight of its own on each token",
    "groups": "averaged over groups of tokens first",
}


def check(evidence: Evidence) -> Finding:
    """What could not be told, what is unusual, or the whole objective in one sentence."""
    ident = evidence.ident
    got, how = ident.identified, ident.selection.how
    if how == "rounded":
        return not_applicable(ID, "What is left over behaves like rounding: see low_precision_source.")
    if got.has_z is None:
        return found(ID, f"What the loss applies cannot be told. {got.reason}")
    if got.reason is not None:
        return found(ID, f"There is a Z, but its numbers cannot be told. {got.reason}")
    if how == "moderate_only":
        return found(
            ID,
            "The penalty is as identified for ordinary logits (log Z from −16 to 60), but another one beyond: it is "
            "clipped, or saturates.",
        )
    if set(ident.selection.fit.candidates) & set(NOT_SQUARED):
        return not_applicable(ID, "The gradient is explained; its penalty is not squared: see not_squared.")
    if apart := [one for one in ident.special if not one.shares and one.z is not None and abs(one.z - 1) >= 1e-2]:
        return found(ID, f"{_objective(ident)}, but {'; '.join(one.words for one in apart)}.")
    if "centered_coef" in got.extra:
        return found(
            ID,
            f"There are two penalties: λ = {got.coef or 0.0:.5g} on log Z and λ = {got.extra['centered_coef']:.5g} on log Z − μ "
            "(row-centered). Together they act on log Z and on the shift μ with different strengths.",
        )
    composite = got.extra.keys() & {"shift_coef", "beta"}
    if got.coordinate == "other" and not composite:
        return found(ID, f"The penalty is none of the known good ones: it acts on {got.penalty}.")
    if got.target_rule == "other":
        return found(ID, "c changes with the vocabulary, but not as log V plus a constant.")
    if ident.targets_unused:
        return passed(
            ID,
            f"{_objective(ident)} explains the gradient. The function does not read its targets: if it is the Z-loss of a "
            "router, `zloss.audit_router(model, batches)` audits the routers of a model.",
            ident.selection.fit.worst,
        )
    turned = " The loss takes its weight as [D, V]." if evidence.box.transposed else ""
    return passed(ID, f"{_objective(ident)} explains the gradient.{turned}", ident.selection.fit.worst)


def _objective(ident: Identification) -> str:
    got = ident.identified
    before = "".join(
        f" of logits with {key} {value:.5g}{_rule(ident) if key == 'logit_scale' else ''}"
        for key, value in got.extra.items()
        if key in WARPS
    )
    smoothing = f" with label smoothing {got.label_smoothing:.4g}" if got.label_smoothing else ""
    weights = WEIGHTS.get(got.ce_weights or "", "")
    if weights and ident.special:
        weights += f" ({'; '.join(one.words for one in ident.special)})"
    scale = got.ce_scale if got.ce_scale is not None else 1.0
    plain = got.ce_weights == "uniform" and got.ce_denominator not in ("other", "none")
    scaled = f", scaled by {scale:.5g}" if plain and abs(scale - 1) > 1e-3 else ""
    shared = ", which shares these weights," if got.z_weights == "shared" else ""
    penalty = f" plus a penalty on {got.penalty}{shared}" if got.has_z else ""
    if got.ce_denominator == "none":
        return f"A penalty on {got.penalty} alone"
    return f"Cross-entropy{before}{smoothing}{' ' + weights if weights else ''}{scaled}{penalty}"


WARPS = ("logit_scale", "softcap", "clamp_low", "clamp_high")


def _rule(ident: Identification) -> str:
    """How the scale of the logits follows the width, where it does."""
    for rule, power in POWERS.items():
        if ident.scale_power == power:
            width = probe_width(ident.space.tokens, ident.space.width)
            constant = ident.model.warp.scale / width**power
            times = "" if abs(constant - 1) < 1e-6 else f"{constant:.5g} · "
            return f" ({times}{rule} at D = {width})"
    return ""
