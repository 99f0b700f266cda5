"""docs/reference/files.md: every file that zloss writes, key by key, from the records that read and write it."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import zloss.results
from tools.docs.markdown import WRITTEN_BY, table
from tools.docs.sentences import sentences_of
from zloss.results.provenance import RunProvenance
from zloss.results.quantities import define
from zloss.results.record import range_of
from zloss.results.steps import StepRecord

WRITTEN = {
    # schema: (file, what writes it)
    "zloss.audit/1": ("report.json", "`zloss audit`, and `zloss drift` for each checkpoint"),
    "zloss.decisions/1": ("decisions.json", "`zloss report`"),
    "zloss.loss-audit/2": ("report.json", "`zloss audit-loss --out`"),
    "zloss.implementation-audit/1": ("implementation_audit.json", "`zloss audit-implementation`"),
    "zloss.router-scale/1": ("router_scale.json", "`zloss router-scale --out`"),
    "zloss.measured-router-scale/1": ("measured_router_scale.json", "`zloss.measure_router_scale(...).write(...)`"),
    "zloss.train-config/1": ("config.json", "`zloss train`, one per run"),
    "zloss.recorded-run/1": ("config.json", "`zloss.record_run` and `attach(..., record=...)`, one per run"),
    "zloss.run/1": ("metrics.json", "`zloss train`, `zloss.record_run`, `attach(..., record=...)`"),
    "zloss.comparison/1": ("comparison.json", "`zloss compare`"),
    "zloss.centering/1": ("centering.json", "`zloss center`"),
    "zloss.drift/1": ("drift.json", "`zloss drift`"),
    "zloss.drift-checkpoint/1": ("kept.json", "`zloss drift`, one per checkpoint"),
    "zloss.recommend-plan/1": ("plan.json", "`zloss recommend`"),
    "zloss.recommendation/1": ("recommendation.json", "`zloss recommend`"),
    "zloss.reproduction/1": ("LABEL.json", "`zloss reproduce LABEL`"),
}
NAMES = {float: "number", int: "integer", str: "text", bool: "true or false", Any: "any value", type(None): "null"}


def records() -> dict[str, Any]:
    """Schema → record of every file, in the order of `WRITTEN`."""
    found: dict[str, Any] = {}
    for module in pkgutil.iter_modules(zloss.results.__path__, "zloss.results."):
        for value in vars(importlib.import_module(module.name)).values():
            if dataclasses.is_dataclass(value) and isinstance(getattr(value, "SCHEMA", None), str):
                found[value.SCHEMA] = value
    assert found.keys() == WRITTEN.keys(), f"not in both: {sorted(found.keys() ^ WRITTEN.keys())}"
    return {schema: found[schema] for schema in WRITTEN}


def files() -> str:
    """The whole page."""
    parts = [
        WRITTEN_BY,
        "# Files",
        "Every file that zloss writes, with every key. A file is one JSON object; its `schema` names the kind and the version. "
        "Numbers are finite or null, and a null comes with its reason. Keys that a version does not know are kept. "
        "The meaning of measured numbers is in the [glossary](../glossary.md).",
        "`zloss.results.files.read_record` rejects another schema, a missing key, a wrong type and a number out of range, and "
        "names the key. `zloss report` joins files of different kinds on one page.",
        _overview(),
    ]
    for schema, record in records().items():
        name, command = WRITTEN[schema]
        parts += [f"## {schema}", _lead(name, command, record), *_tables(record)]
    parts += [
        "## steps.jsonl",
        _lead("steps.jsonl", "`zloss train`, `zloss.record_run`, `attach(..., record=...)`", StepRecord),
        "One line per optimizer step. Telemetry adds further keys.",
        *_tables(StepRecord),
        "## provenance.json",
        _lead("provenance.json", "the same, one per run", RunProvenance),
        *_tables(RunProvenance),
    ]
    return "\n\n".join(parts) + "\n"


def _overview() -> str:
    lines = (
        (f"`{name}`", f"[`{schema}`](#{schema.replace('.', '').replace('/', '')})", command)
        for schema, (name, command) in WRITTEN.items()
    )
    return table(("file", "schema", "written by"), lines)


def _lead(name: str, command: str, record: Any) -> str:
    return f"`{name}`, written by {command}. Record: `{record.__module__}.{record.__qualname__}`. {_summary(record)}"


def _summary(record: Any) -> str:
    """The first paragraph of its docstring."""
    return " ".join((record.__doc__ or "").strip().split("\n\n")[0].split())


def _tables(record: Any) -> list[str]:
    """The table of a record, then those of the records inside it that are written in the same file."""
    parts, found = [], [record]
    for current in found:  # more are found on the way
        hints = get_type_hints(current, include_extras=False)
        said = sentences_of(current)
        lines = []
        for field in dataclasses.fields(current):
            if field.name == "extra" and hints["extra"] == dict[str, Any]:
                continue
            bounds = range_of(field)
            kind = type_name(hints[field.name]) + ("" if bounds is None else f", {bounds}")
            lines.append((f"`{field.name}`", kind, _sentence(field.name, said)))
            for inner in _records_in(hints[field.name]):
                if inner not in found:
                    found.append(inner)
        if current is not record:
            parts.append(f"**{current.__qualname__}**: {_summary(current)}")
        parts.append(table(("key", "type", "meaning"), lines))
    return parts


def _sentence(name: str, said: dict[str, str]) -> str:
    if name in said:
        return said[name]
    quantity = define(name)
    return "" if quantity is None else f"{quantity.symbol.replace('_', chr(92) + '_')}: {quantity.meaning}."


def type_name(hint: Any) -> str:
    """A type in words, as JSON has it.

    >>> type_name(tuple[float, ...]), type_name(int | None)
    ('list of number', 'integer or null')
    """
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return type_name(inner[0])
    if origin in (Union, types.UnionType):
        return " or ".join(type_name(arg) for arg in inner)
    if origin is Literal:
        return " or ".join(f'"{arg}"' for arg in inner)
    if origin is tuple:
        return f"list of {type_name(inner[0])}"
    if origin is dict:
        return f"object: name → {type_name(inner[1])}"
    return NAMES.get(hint, f"**{getattr(hint, '__qualname__', hint)}**")


def _records_in(hint: Any) -> list[Any]:
    if dataclasses.is_dataclass(hint):
        return [hint]
    return [found for arg in get_args(hint) for found in _records_in(arg)]
