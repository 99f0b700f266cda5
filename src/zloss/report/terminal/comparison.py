"""A comparison on the terminal: mean ± std, paired differences, verdicts, tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zloss.report.tables.comparison import told_columns
from zloss.results.quantities import symbol, titled

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

ROUTERS = {
    "Quality and routing": titled(("ce", "ppl", "entropy", "load_cv", "s_rel", "router_absolute")),
    "Routers and optimizer": titled(
        (
            "load_balance",
            "router_z",
            "router_log_z_p999",
            "router_correction_norm",
            "dropped_routes",
            "grad_norm_p99",
            "grad_norm_max",
        )
    ),
}
"""In place of TABLES where the runs have experts."""
TABLES = {
    "Quality and transport, deployed coordinate": titled(("ppl", "p_z_999", "a_p_99", "r_aux")),
    "Optimizer, before clipping": titled(("grad_norm_p99", "grad_norm_max", "clip_rate", "phi_10")),
}


def print_comparison(data: dict[str, Any]) -> None:
    """One line per method; differences are target minus baseline, tails in the same coordinate."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    seeds = data["seeds"]
    matched = f"{len(seeds)} matched seed{'s' if len(seeds) != 1 else ''}, mean ± std"
    for title, stated in (ROUTERS if "router" in data else TABLES).items():
        columns = told_columns(stated, data)
        table = Table(title=f"{title}: {matched}")
        table.add_column("method", no_wrap=True)
        for _, heading in columns:
            table.add_column(heading, justify="right")
        for method in data["methods"]:
            table.add_row(_name(method), *(_cell(method["metrics"].get(key)) for key, _ in columns))
        _print_whole(console, table)
    if "router" in data:
        _print_routers(console, data)
        _print_tokens(console, data)
        return
    verdicts = Table(title=f"against {data['baseline']}: paired differences, tails in the same coordinate")
    changes = (f"Δ {symbol(key)}" for key in ("ppl", "p_z_999", "a_p_99"))
    for title in ("method", *changes, "coordinate", "verdict"):
        verdicts.add_column(title, justify="right" if "Δ" in title else "left", no_wrap=title == "method")
    differences = [method["paired"] for method in data["methods"] if method["paired"] is not None]
    for record, paired in zip(data["quality"]["methods"], differences, strict=True):
        side = paired["same_coordinate"].get(record.get("coordinate") or "raw", {})
        word = {True: "accepted", False: "rejected", None: "—"}[record["accepted"]]
        verdicts.add_row(
            _name(record),
            _signed(paired["deployed"].get("ppl")),
            _signed(side.get("p_z_999")),
            _signed(side.get("a_p_99")),
            str(record.get("coordinate") or "—"),
            word,
        )
    if differences:
        _print_whole(console, verdicts)
        for record in data["quality"]["methods"]:
            console.print(f"{_name(record)}: {record['reason']}", highlight=False, soft_wrap=True)
    for method in data["methods"]:
        if method["paired"] is not None and not method["coef"]:
            console.print(_trajectories(method, data["baseline"]), highlight=False, soft_wrap=True)
    _print_tokens(console, data)


def _print_routers(console: Console, data: dict[str, Any]) -> None:
    """Seed by seed against the baseline: entropy, load, PPL, and the largest difference of the training loss."""
    from rich.table import Table

    table = Table(title=f"against {data['baseline']}: paired differences")
    compared = ("ce", "ppl", "entropy", "load_cv")
    changes = (f"Δ {symbol(key)}" for key in compared)
    for title in ("router loss", *changes, symbol("max_loss_difference")):
        table.add_column(title, justify="left" if title == "router loss" else "right", no_wrap=title == "router loss")
    for method in data["methods"]:
        if method["paired"] is None:
            continue
        deployed = method["paired"]["deployed"]
        gaps = [part["max_loss_difference"] for part in method["paired"]["trajectory"]]
        largest = max((gap for gap in gaps if gap is not None), default=None)
        shown = "—" if largest is None else "0" if largest == 0 else f"{largest:.2g}"
        table.add_row(_name(method), *(_signed(deployed.get(k)) for k in compared), shown)
    if table.row_count:
        _print_whole(console, table)
    console.print(
        "max |ΔL|: largest difference of the training loss over all steps and seeds; the balancing term is the model's own "
        "and about k at balance",
        highlight=False,
        soft_wrap=True,
    )


def _print_whole(console: Console, table: Table) -> None:
    """Numbers are never cut: a table wider than the terminal runs over its edge."""
    width = console.width
    console.width = max(width, console.measure(table, options=console.options.update(width=10_000)).maximum)
    console.print(table, crop=False)
    console.width = width


def _print_tokens(console: Console, data: dict[str, Any]) -> None:
    quality, tokens = data["quality"], data["tokens"]
    console.print(f"tolerance {quality['tolerance_ppl']:.4g} PPL ({quality['tolerance']})", highlight=False)
    if tokens["available"]:
        console.print(
            f"tokens per run: {tokens['consumed']:,} consumed of {tokens['available']:,} available, "
            f"reuse factor {tokens['reuse']:.3g}",
            highlight=False,
        )
    for key, what in (("unfinished", "not finished, left out"), ("unpaired", "without a baseline run of their seed")):
        if data[key]:
            console.print(f"{what}: {', '.join(data[key])}", highlight=False)


def _trajectories(method: dict[str, Any], baseline: str) -> str:
    """Where a method without a penalty leaves the baseline's training, which in exact arithmetic it never does."""
    parts = []
    for part in method["paired"]["trajectory"]:
        if part["first_difference"] is None:
            parts.append(f"seed {part['seed']} equal bit for bit")
        else:
            parts.append(
                f"seed {part['seed']} apart from step {part['first_difference']} on, "
                f"CE by {part['max_ce_difference']:.2g} at most and {part['mean_ce_difference']:.2g} on average"
            )
    return f"{_name(method)} trained against {baseline}: {'; '.join(parts)}"


def _name(record: dict[str, Any]) -> str:
    return f"{record['method']} {record['coef']:g}" if record["coef"] else str(record["method"])


def _cell(summary: dict[str, Any] | None) -> str:
    if summary is None:
        return "—"
    spread = "" if summary["std"] is None else f" ± {summary['std']:.2g}"
    return f"{summary['mean']:.4g}{spread}"


def _signed(difference: dict[str, Any] | None) -> str:
    if difference is None:
        return "—"
    spread = "" if difference["std"] is None else f" ± {difference['std']:.2g}"
    return f"{difference['mean']:+.4g}{spread}"
