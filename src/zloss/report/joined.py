"""Several results as one: each audit with the eight stages filled from everything that was given."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zloss.decide.decision_map import decide, with_decisions
from zloss.decide.thresholds import Thresholds
from zloss.errors import InputError
from zloss.report.charts.matplotlib_files import FORMATS, write_figures
from zloss.report.html.page import Page, audit_names, write_page
from zloss.report.terminal.audit import print_audit, print_decisions, print_side_by_side
from zloss.results.audit import AuditReport, Decision
from zloss.results.files import Result
from zloss.results.record import to_plain
from zloss.results.writing import write_json

DECISIONS_SCHEMA = "zloss.decisions/1"


@dataclass(frozen=True)
class Joined:
    """The page to draw and the decision map of each audit, or one map where no audit was given."""

    page: Page
    maps: tuple[tuple[str, tuple[Decision, ...]], ...]
    sources: tuple[str, ...]


def join_results(results: Sequence[Result], thresholds: Thresholds | None = None) -> Joined:
    """Sort the results by kind and evaluate the decision map."""
    if not results:
        raise InputError("no result was given: pass a folder that `zloss audit --out` has written.")
    losses = tuple(result.data for result in results if result.kind == "loss-audit")
    comparisons = tuple(result.data for result in results if result.kind == "comparison")
    audits = tuple(
        with_decisions(result.audit(), loss_audits=losses, comparisons=comparisons, thresholds=thresholds)
        for result in results
        if result.kind == "audit"
    )
    maps = tuple((name, audit.decisions) for name, audit in zip(audit_names(audits), audits, strict=True))
    if not audits:
        maps = (("", decide(None, loss_audits=losses, comparisons=comparisons, thresholds=thresholds)),)
    # The last two parts name a result well enough; whole paths would tell about someone's machine.
    sources = tuple("/".join(result.path.absolute().parts[-2:]) for result in results)
    return Joined(Page(audits, losses, comparisons, thresholds), maps, sources)


def write_joined(
    folder: Path, joined: Joined, *, figures: bool = False, formats: Sequence[str] = FORMATS
) -> list[Path]:
    """report.html, decisions.json, and with `figures` the figure files; the paths in order."""
    page, decisions = folder / "report.html", folder / "decisions.json"
    write_page(page, joined.page)
    write_json(decisions, decisions_record(joined))
    written = [page, decisions]
    if figures:
        audits = joined.page.audits
        for name, audit in zip(audit_names(audits), audits, strict=True):
            place = folder / "figures" / _file_name(name) if len(audits) > 1 else folder / "figures"
            written += write_figures(place, audit, formats=formats)
    return written


def decisions_record(joined: Joined) -> dict[str, Any]:
    """The decision maps as JSON."""
    used = [audit.thresholds for audit in joined.page.audits] or [(joined.page.thresholds or Thresholds()).to_dict()]
    maps = [
        {"audit": name or None, "thresholds": limits, "decisions": to_plain(decisions)}
        for (name, decisions), limits in zip(joined.maps, used, strict=True)
    ]
    return {"schema": DECISIONS_SCHEMA, "results": list(joined.sources), "maps": maps}


def print_joined(joined: Joined) -> None:
    """The terminal view: one audit in full, several side by side, or the map alone."""
    audits: tuple[AuditReport, ...] = joined.page.audits
    if len(audits) == 1:
        print_audit(audits[0])
    elif audits:
        print_side_by_side(list(zip(audit_names(audits), audits, strict=True)))
    else:
        print_decisions(joined.maps[0][1])


def _file_name(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name).strip("-.") or "audit"
