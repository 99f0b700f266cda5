"""The tables of docs/evidence.md: every claim of the paper with its verdict here, from the committed reproductions."""

from __future__ import annotations

import collections
from pathlib import Path

from tools.docs.markdown import table
from zloss.errors import InputError
from zloss.results.files import read_record
from zloss.results.reproduction import ReproductionRecord

RESULTS = Path(__file__).parents[2] / "docs" / "results"
HOLDS, FAILS, UNTESTED = "holds", "does not hold", "cannot be tested here"
MARKS = {HOLDS: "✓ holds", FAILS: "✗ does not hold", UNTESTED: "○ not testable here"}


def reproductions() -> list[tuple[str, ReproductionRecord]]:
    """(name of the page, record) of every committed reproduction."""
    found = []
    for path in sorted(RESULTS.glob("*.json")):
        try:
            found.append((path.stem, read_record(path, ReproductionRecord)))
        except InputError:  # a comparison, or another kind of result
            continue
    return found


def summary() -> str:
    """Verdicts by table of the paper."""
    total: collections.Counter[str] = collections.Counter()
    lines = []
    for page, record in reproductions():
        if not record.claims:
            continue
        counts = collections.Counter(claim.verdict for claim in record.claims)
        total += counts
        link = f"[`{record.label}`](results/{page}.md)"
        lines.append((link, record.title, *(str(counts[verdict] or "") for verdict in (HOLDS, FAILS, UNTESTED))))
    lines.append(("**all**", "", *(f"**{total[verdict]}**" for verdict in (HOLDS, FAILS, UNTESTED))))
    return table(("label", "about", "holds:", "does not hold:", "cannot be tested here:"), lines)


def claims() -> str:
    """Every claim, by label."""
    parts = []
    for page, record in reproductions():
        if not record.claims:
            continue
        lines = [
            (
                claim.statement,
                MARKS[claim.verdict].replace(" ", "\N{NO-BREAK SPACE}"),
                claim.evidence.replace("_", "\\_"),
            )
            for claim in record.claims
        ]
        parts += [f"### {record.label}", f"{record.title}. [Numbers, settings and deviations](results/{page}.md)."]
        parts.append(table(("the paper", "here", "our numbers, or the reason"), lines))
    return "\n\n".join(parts)
