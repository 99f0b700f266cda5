"""A comparison as a Markdown page: how it was made, mean ± std, paired differences, verdicts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from zloss.report.formatting import MISSING, number
from zloss.report.tables.comparison import ShownTable, paired_table, router_table, told_columns
from zloss.results.comparison_view import label
from zloss.results.quantities import titled

MEANS = titled(
    ("ppl", "p_z_999", "a_p_99", "mu_abs_99", "r_aux", "c_aux", "grad_norm_p99", "grad_norm_max", "clip_rate")
)
MEANS_ROUTED = titled(("ce", "ppl", "s_rel", "entropy", "load_cv", "router_absolute", "grad_norm_p99", "grad_norm_max"))


def comparison_markdown(data: dict[str, Any]) -> str:
    """The page; it holds nothing that comparison.json does not."""
    seeds = ", ".join(str(seed) for seed in data["seeds"])
    parts = ["# Matched training runs", *_made(data.get("provenance") or {})]
    parts.append(f"Mean ± standard deviation (of a sample) over seeds {seeds}, in the coordinate each method deploys:")
    parts.append(_means(data, told_columns(MEANS_ROUTED if "router" in data else MEANS, data)))
    paired, routers = paired_table(data), router_table(data)
    if paired is not None:
        parts += [
            f"Paired differences, method minus {data['baseline']}; quantities of the head in one coordinate for both:",
            _shown(paired, "method"),
        ]
    if routers is not None:
        parts.append(_shown(routers, "router loss"))
    quality = data["quality"]
    verdicts = [f"- {label(record['method'], record['coef'])}: {_verdict(record)}" for record in quality["methods"]]
    parts.append(f"Quality gate: PPL may rise by {number(quality['tolerance_ppl'])} ({quality['tolerance']}).")
    parts.append("\n".join(verdicts))
    tokens = data["tokens"]
    parts.append(
        f"Tokens per run: {number(tokens['consumed'])} consumed of {number(tokens['available'])} available, reuse "
        f"{number(tokens['reuse'])}."
    )
    return "\n\n".join(part for part in parts if part) + "\n"


def _made(provenance: dict[str, Any]) -> list[str]:
    if not provenance:
        return []
    commands = "\n".join(f"    {command}" for command in provenance["commands"])
    return [
        commands,
        f"{provenance['runs']} runs in {provenance['seconds'] / 60:.0f} minutes, training and validation, on "
        f"{provenance['threads']} thread{'' if provenance['threads'] == 1 else 's'}; zloss {provenance['zloss']}, "
        f"torch {provenance['torch']}.",
    ]


def _means(data: dict[str, Any], columns: Sequence[tuple[str, str]]) -> str:
    rows = [
        (label(method["method"], method["coef"]), *(_mean(method["metrics"].get(key)) for key, _ in columns))
        for method in data["methods"]
    ]
    return _table(("method", *(title for _, title in columns)), rows)


def _mean(summary: dict[str, Any] | None) -> str:
    if summary is None:
        return MISSING
    spread = "" if not summary["std"] else f" ± {number(summary['std'], 2)}"
    return f"{number(summary['mean'])}{spread}"


def _shown(table: ShownTable, first: str) -> str:
    rows = [(name, *(text for text, _ in cells)) for name, cells in table.rows]
    return _table((first, *table.columns), rows)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _verdict(record: dict[str, Any]) -> str:
    word = {True: "**accepted**", False: "**rejected**", None: "no verdict"}[record["accepted"]]
    return f"{word}; {record['reason']}"
