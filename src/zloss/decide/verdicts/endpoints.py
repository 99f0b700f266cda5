"""Optimizer-facing endpoints: does a method send the optimizer worse gradients than its baseline?

Each endpoint has a limit; it is passed at a seed where the method's value lies beyond the limit relative to the
baseline's. An endpoint that is passed on every seed fails, on some seeds it is open.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from zloss.results.verdict import State, VerdictPart

Relation = Literal["ratio", "increase", "any", "falls"]


@dataclass(frozen=True)
class EndpointLimit:
    """When one endpoint counts as passed."""

    key: str
    """Key of metrics.json."""
    symbol: str
    relation: Relation
    """"ratio": above `limit` times the baseline; "increase": above the baseline by `limit`; "any": above zero where the
    baseline is zero; "falls": below the baseline divided by `limit`."""
    limit: float

    def passed(self, baseline: float | None, method: float | None) -> bool | None:
        """None where a value is missing."""
        if baseline is None or method is None:
            return None
        if self.relation == "ratio":
            return method > self.limit * baseline if baseline > 0 else method > 0
        if self.relation == "increase":
            return method - baseline > self.limit
        if self.relation == "falls":
            return method < baseline / self.limit
        return method > 0 and method > baseline

    def sentence(self, baseline: float, method: float) -> str:
        """What was measured against which limit."""
        if self.relation == "ratio" and baseline > 0:
            return f"{self.symbol} × {method / baseline:.3g} (limit × {self.limit:g})"
        if self.relation == "increase":
            return f"{self.symbol} {baseline:.3g} → {method:.3g} (limit +{self.limit:g})"
        if self.relation == "falls":
            return f"{self.symbol} {baseline:.3g} → {method:.3g} (limit ÷ {self.limit:g})"
        return f"{self.symbol} {baseline:.3g} → {method:.3g} (limit: none)"


def judge_endpoints(
    limits: Sequence[EndpointLimit],
    pairs_S: Sequence[tuple[Mapping[str, float | None], Mapping[str, float | None]]],
) -> VerdictPart:
    """The state over all endpoints that both runs of every seed hold."""
    failed, partly, checked = list[str](), list[str](), list[str]()
    for limit in limits:
        values = [(base.get(limit.key), run.get(limit.key)) for base, run in pairs_S]
        verdicts = [limit.passed(base, run) for base, run in values]
        if not verdicts or any(verdict is None for verdict in verdicts):
            continue
        checked.append(limit.key)
        base, run = max(values, key=lambda pair: _badness(limit, pair))
        assert base is not None
        assert run is not None
        if all(verdicts):
            failed.append(limit.sentence(base, run))
        elif any(verdicts):
            passed = sum(bool(verdict) for verdict in verdicts)
            partly.append(f"{limit.sentence(base, run)} on {passed} of {len(verdicts)} seeds")
    numbers = {"seeds": len(pairs_S), "endpoints": checked, "passed": failed, "passed_on_some_seeds": partly}
    if not checked:
        return VerdictPart("open", "the runs hold no optimizer-facing endpoint of method and baseline.", numbers)
    state: State = "fails" if failed else "open" if partly else "holds"
    if failed:
        return VerdictPart(state, "; ".join(failed) + ".", numbers)
    if partly:
        return VerdictPart(state, "; ".join(partly) + "; more seeds would settle it.", numbers)
    return VerdictPart(state, f"all {len(checked)} endpoints are within their limits.", numbers)


def _badness(limit: EndpointLimit, pair: tuple[float | None, float | None]) -> float:
    base, run = pair
    assert base is not None
    assert run is not None
    if limit.relation == "falls":
        return -run / base if base else 0.0
    return run - base if limit.relation in ("increase", "any") or base <= 0 else run / base
