"""text:reporting: the paper's reporting recommendations as a checklist over results.

    zloss reproduce text:reporting --report zloss-audit --report comparison.json

It says for each item whether the given results state it and where, else which command states it. Without --report it
reads the audit of the profile. The items are data (`data/reporting.json`): what to report, the places in results of zloss that
cover it, the first one that has a value counts, and the command that writes it. An audit's own `router.coef` and
`router.convention` are the defaults it diagnoses with, not what a loss applies: of an audit only the scale measured from the
model's own loss counts.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from zloss.results.files import load_results
from zloss.results.io import read_object
from zloss_paper.engine.audited_models import AuditTableConfig, audit_table, paper_target
from zloss_paper.engine.inputs import WIKITEXT
from zloss_paper.engine.recipe import Overrides, Profile, Recipe, RecipeResult
from zloss_paper.engine.table import Line, Table
from zloss_paper.engine.workbench import Workbench

LABEL = "text:reporting"
Kind = str
"""A kind of result, or the metrics.json of one run."""
Scope = Literal["every model", "tied head", "router"]
Status = Literal["covered", "not covered", "does not apply"]
TARGETS = (paper_target("GPT-2", WIKITEXT, 64, gradient_blocks=8),)
IN_SEVERAL: dict[str, tuple[tuple[Kind, str], ...]] = {
    "metric": (("metrics", "{}"), ("comparison", "methods.*.metrics.{}"), ("comparison", "methods.*.{}")),
    "router loss": (("metrics", "router.{}"), ("comparison", "router.conventions.*.{}")),
    "router": (("metrics", "router.{}"), ("comparison", "router.{}")),
}
"""What a run states alone or inside a comparison: a metric, a setting of one router loss, one that all router losses share."""


@dataclass(frozen=True)
class Item:
    """One thing to report."""

    id: str
    group: str
    text: str
    places: tuple[tuple[Kind, str], ...]
    """Kinds of results and dotted paths in them; `*` stands for every member of a list."""
    command: str
    """What to run where it is missing."""
    scope: Scope = "every model"


def _items() -> tuple[Item, ...]:
    data = json.loads(resources.files("zloss_paper").joinpath("data/reporting.json").read_text(encoding="utf-8"))
    for record in data:
        record["places"] = tuple(
            (kind, pattern.format(path))
            for name, paths in record["places"].items()
            for path in paths
            for kind, pattern in IN_SEVERAL.get(name, ((name, "{}"),))
        )
    return tuple(Item(**record) for record in data)


ITEMS = _items()


@dataclass(frozen=True)
class Given:
    """A result to look into."""

    name: str
    kind: Kind
    data: Mapping[str, Any]


@dataclass(frozen=True)
class ReportingConfig:
    """Results to check, or the audit to make first."""

    reports: tuple[str, ...]
    audits: AuditTableConfig | None


def checklist(given: Sequence[Given]) -> dict[str, tuple[Status, str]]:
    """Every item by its id: whether the given results cover it, and where or why not."""
    return {item.id: _status(item, given) for item in ITEMS}


def _status(item: Item, given: Sequence[Given]) -> tuple[Status, str]:
    for kind, path in item.places:
        for result in given:
            if result.kind == kind and any(value is not None for value in _lookup(result.data, path.split("."))):
                return "covered", f"{result.name}: {path}"
    if (why := _outside(item.scope, given)) is not None:
        return "does not apply", why
    return "not covered", f"`{item.command}`"


def _outside(scope: Scope, given: Sequence[Given]) -> str | None:
    """Why a scope is empty here; None if it is not, or cannot be known."""
    audits = [result.data for result in given if result.kind == "audit"]
    if scope == "tied head" and audits and not any(audit["model"]["tied"] for audit in audits):
        return "the head is untied"
    routed = any(result.data.get("router") is not None for result in given)
    if scope == "router" and audits and not routed:
        return "the model has no router"
    return None


def _lookup(data: Any, path: Sequence[str]) -> Iterator[Any]:
    """All values at a dotted path."""
    if not path:
        yield data
    elif path[0] == "*":
        members = data.values() if isinstance(data, dict) else data if isinstance(data, list) else ()
        for member in members:
            yield from _lookup(member, path[1:])
    elif isinstance(data, Mapping) and path[0] in data:
        yield from _lookup(data[path[0]], path[1:])


def read_results(paths: Sequence[str]) -> tuple[Given, ...]:
    """Audits, loss and implementation audits, comparisons, and the metrics.json of single runs."""
    found: list[Given] = []
    for name in paths:
        path = Path(name)
        if path.name == "metrics.json" and path.is_file():
            found.append(Given(path.name, "metrics", read_object(path, advice="make that run again")))
        else:
            found += [Given(result.path.name, result.kind, result.record.to_dict()) for result in load_results([path])]
    return tuple(found)


def configure(profile: Profile, overrides: Overrides) -> ReportingConfig:
    """The given results, else the audit of the profile."""
    if overrides.reports:
        return ReportingConfig(overrides.reports, None)
    return ReportingConfig((), audit_table(LABEL, TARGETS, profile, overrides))


def run(config: ReportingConfig, bench: Workbench) -> RecipeResult:
    """One line per item."""
    given = read_results(config.reports)
    if config.audits is not None:
        for model in config.audits.rows:
            report = bench.audit(model.audit)
            given += (Given(f"audit of {model.model}", "audit", report.to_dict()),)
    found = checklist(given)
    stated = {id: {"status": status, "where": where} for id, (status, where) in found.items()}
    lines = tuple(Line({"group": item.group, "item": item.text, **stated[item.id]}, {}) for item in ITEMS)
    counts = Counter(status for status, _ in found.values())
    applicable = counts["covered"] + counts["not covered"]
    note = f"{', '.join(result.name for result in given)}: {counts['covered']} of {applicable} applicable items covered"
    details = {"items": stated}
    texts = () if config.audits is None else config.audits.texts
    return RecipeResult(Table(lines), notes=(note,), texts=texts, details=details)


RECIPES = (Recipe(LABEL, "Reporting recommendations: which items a report covers", (), configure, run),)
