"""Comparisons from before the schema: they are known by their `quality` section and lifted to "zloss.comparison/1".

Such a file may have plain numbers as metrics, the metrics beside the method's name instead of under `metrics`, methods as
an object by name, one verdict without a list, and one router record without a list.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LIFTED = ("baseline", "methods", "quality", "router", "tolerance_ppl", "seeds", "schema")
NOT_METRICS = ("method", "coef", "seeds", "coordinate", "paired", "heads")


def is_unversioned(data: Any) -> bool:
    """Whether parsed JSON is a comparison without a schema."""
    return isinstance(data, dict) and "schema" not in data and "quality" in data


def lift_unversioned(data: Mapping[str, Any], schema: str) -> dict[str, Any]:
    """The same comparison in the keys of `schema`; keys it does not know stay as they are."""
    stated = data.get("baseline")
    baseline = str((stated.get("method") if isinstance(stated, dict) else stated) or "ce")
    router = data.get("router")
    return {
        "schema": schema,
        **{key: value for key, value in data.items() if key not in LIFTED},
        "baseline": baseline,
        "seeds": data.get("seeds", []),
        "methods": [_method(record) for record in _records(data.get("methods"))],
        "quality": _quality(data, baseline),
        **({"router": _router(router, baseline)} if isinstance(router, dict) else {}),
    }


def _records(section: Any) -> list[dict[str, Any]]:
    """A list of records, or an object from name to record."""
    if isinstance(section, dict):
        return [{"method": name, **record} for name, record in section.items() if isinstance(record, dict)]
    return [record for record in section if isinstance(record, dict)] if isinstance(section, list) else []


def _method(record: Mapping[str, Any]) -> dict[str, Any]:
    nested = record.get("metrics")
    flat = nested if isinstance(nested, dict) else {k: v for k, v in record.items() if k not in NOT_METRICS}
    metrics = {key: summary for key, value in flat.items() if (summary := _summary(value)) is not None}
    kept = {key: record[key] for key in ("coordinate", "seeds", "paired", "heads") if record.get(key) is not None}
    return (
        {"method": str(record.get("method", "unnamed")), "coef": _number(record.get("coef")) or 0.0}
        | kept
        | {"metrics": metrics}
    )


def _summary(value: Any) -> dict[str, Any] | None:
    mean = _number(value)
    if mean is None:
        return None
    return {"std": None, "n": 1} | (dict(value) if isinstance(value, dict) else {}) | {"mean": mean}


def _quality(data: Mapping[str, Any], baseline: str) -> dict[str, Any]:
    section = data["quality"] if isinstance(data["quality"], dict) else {}
    verdicts = [record for record in _records(section.get("methods")) if record.get("method") != baseline]
    if not verdicts and (isinstance(section.get("accepted"), bool) or _number(section.get("delta_ppl")) is not None):
        verdicts = [{"method": "the compared method", **section}]
    tolerance = _number(section.get("tolerance_ppl"))
    return {
        "tolerance_ppl": _number(data.get("tolerance_ppl")) if tolerance is None else tolerance,
        "methods": [
            {
                "method": str(record.get("method", "unnamed")),
                "coef": _number(record.get("coef")) or 0.0,
                "delta_ppl": _number(record.get("delta_ppl")),
                "accepted": record.get("accepted"),
                "reason": str(record.get("reason") or ""),
            }
            for record in verdicts
        ],
    }


def _router(section: dict[str, Any], baseline: str) -> dict[str, Any]:
    records = _records(section.get("conventions")) or _records(section.get("methods")) or [section]
    return {
        "baseline": str(section.get("baseline") or baseline),
        "conventions": [
            {
                "convention": str(record.get("convention") or record.get("method") or "this convention"),
                "coef": _number(record.get("coef")),
                "s_rel": _number(record.get("relative" if record.get("s_rel") is None else "s_rel")),
            }
            for record in records
        ],
    }


def _number(value: Any) -> float | None:
    """A number, or the `mean` of an object; anything else is None."""
    if isinstance(value, dict):
        value = value.get("mean")
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    try:
        return float(value)
    except OverflowError:  # an integer beyond the range of a float
        return None
