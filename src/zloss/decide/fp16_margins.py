"""The fp16 margins of implementation audits: how far each method lowers the largest safe loss scale below that of CE."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from zloss.decide.thresholds import Thresholds
from zloss.decide.verdicts.endpoints import EndpointLimit
from zloss.results.decision import Effect
from zloss.results.implementation_audit import CE, ImplementationAudit
from zloss.results.method_label import method_label


@dataclass(frozen=True)
class JudgedMargin:
    """κ_min of one method beside that of CE on the same batches."""

    model: str
    method: str
    before: float
    """κ_min of CE."""
    after: float
    """κ_min of the method; 0 where one of its gradients is not finite."""
    limit: EndpointLimit

    @property
    def fall(self) -> float:
        """CE's κ_min over the method's."""
        return self.before / self.after if self.after > 0 else math.inf

    @property
    def passed(self) -> bool:
        """Whether the margin falls beyond its limit."""
        return bool(self.limit.passed(self.before, self.after))

    @property
    def sentence(self) -> str:
        return f"{self.method} on {self.model}: {self.limit.sentence(self.before, self.after)}"

    @property
    def effect(self) -> Effect:
        return Effect("kappa_min", self.before, self.after, note=f"ce → {self.method}, gradients of {self.model}")


def judged_margins(audits: Sequence[ImplementationAudit], thresholds: Thresholds) -> list[JudgedMargin]:
    """Every method but CE, where the audit has both margins."""
    limit = EndpointLimit("kappa_min", "smallest safe fp16 scale κ", "falls", thresholds.fp16_margin_ratio)
    judged = []
    for audit in audits:
        base = next((line.kappa_min for line in audit.overflow if line.method == CE), None)
        for line in audit.overflow:
            # A zero gradient has no largest scale, so its margin is infinite and nothing compares with it.
            if base is not None and math.isfinite(base) and line.method != CE and line.kappa_min is not None:
                method = method_label(line.method, line.coef)
                judged.append(JudgedMargin(audit.model.name, method, base, line.kappa_min, limit))
    return judged
