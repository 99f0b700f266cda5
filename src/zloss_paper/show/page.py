"""A reproduction as a Markdown page, and both of its files."""

from __future__ import annotations

import os
from pathlib import Path

from zloss.report.tables.reproduction import NOT_COMPARABLE
from zloss.results.reproduction import write_reproduction_record
from zloss.results.writing import write_text
from zloss_paper.engine.profile import MEANING
from zloss_paper.engine.reproduction import Reproduction
from zloss_paper.show.layout import deviations, header, missing, printed_lines, tally


def write_reproduction(folder: Path, result: Reproduction) -> list[Path]:
    """LABEL.json, LABEL.md and the figures of the recipe, if it has some."""
    record, page = folder / f"{result.recipe.stem}.json", folder / f"{result.recipe.stem}.md"
    figures = list(result.draw(folder / "figures")) if result.draw is not None else []
    write_reproduction_record(record, result.record())
    write_text(page, markdown(result, [Path(os.path.relpath(figure, folder)) for figure in figures]))
    return [record, page, *figures]


def markdown(result: Reproduction, figures: list[Path] | None = None) -> str:
    """The whole page; paths of figures are relative to it."""
    recipe = result.recipe
    provenance = result.provenance
    parts = [
        f"# {recipe.title} ({recipe.label})",
        f"Profile `{result.profile}`: {MEANING[result.profile]}.",
        f"    {provenance.command}",
        "## Numbers" if recipe.columns else "## Checklist",
        _table(result),
    ]
    if recipe.columns and not result.comparable:
        parts.append(NOT_COMPARABLE + "\n\n" + _bullets(deviations(result)))
    if remarks := [*missing(result), *result.notes]:
        parts.append(_bullets(remarks))
    parts += [f"![{recipe.title}]({figure.as_posix()})" for figure in figures or []]
    if result.claims:
        parts += ["## Claims", _claims(result) if result.judged else f"{tally(result)}."]
    if choices := recipe.unstated():
        lines = [f"| {_safe(setting)} | {_safe(ours)} |" for setting, ours in choices.items()]
        parts += [
            "## Not stated by the paper",
            "What the paper leaves open, and our choice at its scale:",
            "\n".join(["| setting | ours |", "|---|---|", *lines]),
        ]
    if result.texts:
        parts += ["## Text", _bullets([_text(text.__dict__) for text in result.texts])]
    versions = ", ".join(f"{name} {getattr(provenance, name)}" for name in ("zloss", "torch", "transformers", "python"))
    parts += ["## Provenance", f"{versions}; {provenance.threads} threads. {_seconds(result)}"]
    return "\n\n".join(parts) + "\n"


def _seconds(result: Reproduction) -> str:
    """Recipes share their audits and training runs, so the time of a recipe alone would mislead."""
    own = f"This recipe took {result.provenance.seconds:g} s"
    audits = [sum(audit["seconds"].values()) for audit in result.details.get("audits", ()) if "seconds" in audit]
    if audits:
        return f"{own}; the audits it reads {sum(audits):.0f} s, once for all recipes of a call."
    runs = result.details.get("training_seconds")
    return (
        f"{own}; the {runs['runs']} runs it reads {runs['seconds']:.0f} s, once for all recipes." if runs else f"{own}."
    )


def _table(result: Reproduction) -> str:
    names = header(result)
    keys = len(names) - len(result.recipe.columns)
    rule = ["---" if i < keys else "---:" for i in range(len(names))]
    lines = [list(names), rule, *(list(line.cells) for line in printed_lines(result))]
    return "\n".join(f"| {' | '.join(cell if line is rule else _safe(cell) for cell in line)} |" for line in lines)


def _claims(result: Reproduction) -> str:
    lines = ["| the paper's statement | on our numbers | evidence | on the paper's own numbers |", "|---|---|---|---|"]
    for judged in result.claims:
        statement = judged.claim.statement + (f" ({judged.claim.reading})" if judged.claim.reading else "")
        own = "–" if judged.paper is None else judged.paper.verdict
        cells = (statement, f"**{judged.ours.verdict}**", judged.ours.evidence, own)
        lines.append(f"| {' | '.join(_safe(cell) for cell in cells)} |")
    return f"{tally(result)}. In brackets: what of the check is ours.\n\n" + "\n".join(lines)


def _text(text: dict[str, str | None]) -> str:
    name = f"`{text['name']}`: {text['title']}" if text["name"] != text["title"] else f"`{text['name']}`"
    digest = f", sha256 `{text['sha256']}`" if text["sha256"] else ""
    return f"{name}; source: {text['source']}; licence: {text['licence']}{digest}"


def _bullets(sentences: list[str]) -> str:
    return "\n".join(f"- {sentence}" for sentence in sentences)


def _safe(text: str) -> str:
    """A bar would end a cell of a Markdown table."""
    return text.replace("|", "\\|").replace("\n", " ")
