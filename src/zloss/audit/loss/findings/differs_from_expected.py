"""Does the loss apply what its user believes: λ, c, coordinate, label smoothing?"""

from __future__ import annotations

import math

from zloss.audit.loss.evidence import CANNOT_TELL, Evidence, found, not_applicable, passed
from zloss.results.loss_audit import Finding, Identified

ID = "differs_from_expected"


def check(evidence: Evidence) -> Finding:
    """Every expected number against the identified one, within 1e-3 or the stated uncertainty.

    What another finding already reports is not reported again, and it is no pass.
    """
    expect, got = evidence.expect, evidence.ident.identified
    if not expect:
        return not_applicable(ID, "Pass `expect={'coef': λ, 'target': c}`: what you believe the loss applies.")
    if not evidence.ident.told:
        return not_applicable(ID, CANNOT_TELL)
    differences: list[str] = []
    elsewhere: list[str] = []
    figure: float | None = None
    if "coef" in expect:
        wanted = float(expect["coef"] or 0.0)
        applied = got.coef if got.has_z and got.coef is not None else 0.0
        figure = applied / wanted if wanted else None
        slack = max(1e-3 * wanted, got.uncertainty.coef or 0.0)
        if evidence.ident.selection.how == "rounded":
            # Noise of 16 bits moves the fitted λ by up to its share of the gradient; low_precision_source reports it.
            slack = max(slack, (got.uncertainty.unexplained or 0.0) * wanted)
        if abs(applied - wanted) > slack:
            if wanted and not got.has_z and evidence.ident.trusted:
                elsewhere.append("The gradient holds no Z to compare: see zero_gradient_z.")
            elif wanted > 0 and round(applied / wanted) >= 2 and _whole(applied / wanted):
                elsewhere.append("λ is a whole multiple of the expected one: see counted_twice.")
            else:
                differences.append(f"λ is {applied:.5g}, not {wanted:.5g}")
    if "target" in expect and got.has_z and got.target is not None and got.vocab:
        # None is log V, as everywhere in this package.
        c = math.log(got.vocab) if expect["target"] is None else float(expect["target"])
        if abs(got.target - c) > max(1e-3, got.uncertainty.target or 0.0):
            differences.append(f"c is {got.target:.5g}, not {c:.5g}{_follows_log_v(got, expect['target'])}")
        elif expect["target"] is None and got.target_rule not in (None, "log_v"):
            differences.append("c does not follow log V")
    if not got.has_z and "coef" not in expect and {"target", "coordinate"} & expect.keys():
        elsewhere.append("The gradient holds no Z to compare. Pass `expect={'coef': λ}` if you believe there is one.")
    if "target" in expect and got.has_z and got.target is None:
        elsewhere.append("The penalty has no c to compare.")
    if "coordinate" in expect and got.has_z and got.coordinate != expect["coordinate"]:
        differences.append(f"the coordinate is {got.coordinate!r}, not {expect['coordinate']!r}")
    if (
        "label_smoothing" in expect
        and abs((got.label_smoothing or 0.0) - float(expect["label_smoothing"] or 0.0)) > 1e-3
    ):
        differences.append(f"label smoothing is {got.label_smoothing or 0.0:.4g}, not {expect['label_smoothing']}")
    if not {"coef", "target", "coordinate", "label_smoothing"} & expect.keys():
        return not_applicable(ID, "Only denominators were expected: see denominator_mismatch.")
    if differences:
        return found(ID, f"Not as expected: {'; '.join(differences)}.", figure)
    if elsewhere:
        return not_applicable(ID, " ".join(elsewhere), figure)
    return passed(ID, "What it applies is what was expected.", figure)


def _follows_log_v(got: Identified, wanted: float | None) -> str:
    """A c that follows V was measured at the V of the probe, which is not the user's."""
    if wanted is None or got.target_rule != "log_v":
        return ""
    return f" (it follows log V, and V is {got.vocab} here: where log V is meant, pass `expect={{'target': 'log_v'}}`)"


def _whole(ratio: float) -> bool:
    return abs(ratio - round(ratio)) < 1e-2 * abs(ratio)
