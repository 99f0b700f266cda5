"""Is all of the gradient explained by CE and a penalty of the known good kind?"""

from __future__ import annotations

from zloss.audit.loss.candidates import NOT_SQUARED
from zloss.audit.loss.evidence import Evidence, found, not_applicable, passed
from zloss.results.loss_audit import Finding, Identified

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
    composite = got.extra.keys() & {"shift_coef", "beta"}
    if got.coordinate == "other" and not composite:
        return found(ID, f"The penalty is none of the known good ones: it acts on {got.penalty}.")
    if got.target_rule == "other":
        return found(ID, "c changes with the vocabulary, but not as log V plus a constant.")
    return passed(ID, f"{_objective(got)} explains the gradient.", ident.selection.fit.worst)


def _objective(got: Identified) -> str:
    before = "".join(f" of logits with {key} {value:.5g}" for key, value in got.extra.items() if key in WARPS)
    smoothing = f" with label smoothing {got.label_smoothing:.4g}" if got.label_smoothing else ""
    weights = WEIGHTS.get(got.ce_weights or "", "")
    scale = got.ce_scale if got.ce_scale is not None else 1.0
    plain = got.ce_weights == "uniform" and got.ce_denominator not in ("other", "none")
    scaled = f", scaled by {scale:.5g}" if plain and abs(scale - 1) > 1e-3 else ""
    shared = ", which shares these weights," if got.z_weights == "shared" else ""
    penalty = f" plus a penalty on {got.penalty}{shared}" if got.has_z else ""
    if got.ce_denominator == "none":
        return f"A penalty on {got.penalty} alone"
    return f"Cross-entropy{before}{smoothing}{' ' + weights if weights else ''}{scaled}{penalty}"


WARPS = ("logit_scale", "softcap", "clamp_low", "clamp_high")
