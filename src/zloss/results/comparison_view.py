"""What the decision map and the page read from a comparison of training runs ("zloss.comparison/1").

Read keys, all optional: `baseline` (name of the reference method), `methods` [{method, coef, metrics: {...}}] (or the
metrics flat in the record), `quality` {tolerance_ppl, methods: [{method, coef, delta_ppl, accepted}]}, `router`
{conventions: [{convention, s_rel, coef}]}. Everything else is shown as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

FEW_STEPS = 100
"""Over fewer steps a p99 is little else than the maximum, so only the maximum is shown."""


@dataclass(frozen=True)
class MethodView:
    """One method (at one coefficient) with its mean metrics."""

    method: str
    coef: float | None
    metrics: dict[str, float]

    @property
    def label(self) -> str:
        return label(self.method, self.coef)


@dataclass(frozen=True)
class QualityRow:
    """PPL of a method minus that of its matched baseline, and the comparison's own verdict if it states one."""

    label: str
    delta_ppl: float | None
    accepted: bool | None
    reason: str = ""
    """The comparison's own words on its verdict."""


@dataclass(frozen=True)
class ComparisonView:
    """The parts of a comparison the decision map needs."""

    methods: tuple[MethodView, ...]
    baseline: MethodView | None
    quality: tuple[QualityRow, ...]
    tolerance_ppl: float | None
    router: dict[str, Any] | None
    steps: int | None = None


def label(method: str, coef: float | None) -> str:
    """ "standard, λ 0.001"; methods without a coefficient keep their bare name."""
    return f"{method}, λ {coef:g}" if coef else method


def view_comparison(data: dict[str, Any]) -> ComparisonView:
    """Read a parsed comparison.json; what is absent stays empty."""
    quality = data.get("quality")
    quality = quality if isinstance(quality, dict) else {}
    methods = tuple(_method(record) for record in _records(data.get("methods")))
    stated = data.get("baseline")
    name = stated.get("method") if isinstance(stated, dict) else stated
    stated_coef = _float(data.get("baseline_coef"))
    baseline = next(
        (m for m in methods if m.method == (name or "ce") and stated_coef in (None, m.coef or 0.0)),
        None,
    )
    rows = tuple(
        _quality_row(record)
        for record in _records(quality.get("methods"))
        if record.get("method") != (name or "ce") or stated_coef not in (None, _float(record.get("coef")))
    )
    if not rows and (isinstance(quality.get("accepted"), bool) or _float(quality.get("delta_ppl")) is not None):
        rows = (_quality_row({"method": "the compared method", **quality}),)
    tolerance = _float(quality.get("tolerance_ppl"))
    router = data.get("router")
    return ComparisonView(
        methods=methods,
        baseline=baseline,
        quality=rows,
        tolerance_ppl=tolerance if tolerance is not None else _float(data.get("tolerance_ppl")),
        router=router if isinstance(router, dict) else None,
        steps=steps if isinstance(steps := data.get("steps"), int) else None,
    )


def _records(section: Any) -> list[dict[str, Any]]:
    """A list of records, or a mapping from method name to record."""
    if isinstance(section, dict):
        return [{"method": name, **record} for name, record in section.items() if isinstance(record, dict)]
    return [record for record in section if isinstance(record, dict)] if isinstance(section, list) else []


def _method(record: dict[str, Any]) -> MethodView:
    nested = record.get("metrics")
    metrics = nested if isinstance(nested, dict) else record
    numbers = {key: number for key, value in metrics.items() if (number := _float(value)) is not None}
    return MethodView(str(record.get("method", "unnamed")), _float(record.get("coef")), numbers)


def _quality_row(record: dict[str, Any]) -> QualityRow:
    accepted = record.get("accepted")
    return QualityRow(
        label=label(str(record.get("method", "unnamed")), _float(record.get("coef"))),
        delta_ppl=_float(record.get("delta_ppl")),
        accepted=accepted if isinstance(accepted, bool) else None,
        reason=str(record.get("reason") or ""),
    )


def _float(value: Any) -> float | None:
    """A number, or the `mean` of a {mean, std} record; anything else is None."""
    if isinstance(value, dict):
        value = value.get("mean")
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
