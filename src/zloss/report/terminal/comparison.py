"""A comparison on the terminal: mean ± std, paired differences, verdicts, tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zloss.report.tables.comparison import estimable_columns
from zloss.report.tables.method_verdicts import answer, verdict_line, verdict_notes
from zloss.report.terminal.fitting import print_legend, print_sentence, print_table
from zloss.results.comparison import ComparedMethod, Comparison, PairedDifferences, SeedDifference, SeedSummary
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
"""The tables of mixture-of-experts runs."""
TABLES = {
    "Quality and transport, deployed coordinate": titled(("ppl", "p_z_999", "a_p_99", "r_aux")),
    "Optimizer, before clipping": titled(("grad_norm_p99", "grad_norm_max", "clip_rate", "phi_10")),
}

TWO_COORDINATES = (
    "Tails of raw and of centered logits are not comparable line by line; the paired differences below are in one "
    "coordinate."
)

Paired = list[tuple[ComparedMethod, PairedDifferences]]


def print_comparison(comparison: Comparison) -> None:
    """One line per method; differences are method minus baseline, tails in the same coordinate."""
    from rich.console import Console

    console = Console(markup=False)
    if text := answer(comparison):
        print_sentence(console, text, style="bold")
    seeds = comparison.seeds
    matched = f"{len(seeds)} matched seed{'s' if len(seeds) != 1 else ''}, mean ± std"
    for title, stated in (TABLES if comparison.router is None else ROUTERS).items():
        columns = estimable_columns(stated, comparison)
        table = _table(f"{title}: {matched}", "method", *(heading for _, heading in columns))
        for method in comparison.methods:
            table.add_row(_name(method.method, method.coef), *(_cell(method.metrics.get(key)) for key, _ in columns))
        print_table(console, table)
        print_legend(console, [key for key, _ in columns])
        if "p_z_999" in dict(columns) and len({verdict.coordinate for verdict in comparison.quality.methods}) > 1:
            print_sentence(console, TWO_COORDINATES)
    paired = [(method, method.paired) for method in comparison.methods if method.paired is not None]
    if comparison.router is not None:
        _print_routers(console, comparison.baseline, paired)
    else:
        _print_differences(console, comparison, paired)
    _print_verdicts(console, comparison)
    _print_tokens(console, comparison)


def _print_verdicts(console: Console, comparison: Comparison) -> None:
    """A word for each method, and under it the three parts."""

    def wrapped(text: str, first: str) -> None:
        print_sentence(console, text, first=first, rest=" " * len(first))

    for verdict in comparison.quality.methods:
        line = verdict_line(verdict)
        wrapped(f"{line.word}" + (f" ({line.note})" if line.note else ""), f"{_name(verdict.method, verdict.coef)}: ")
        for part in line.parts:
            wrapped(part.reason, f"  {part.name:<10} {part.state:<5}  ")
    for note in verdict_notes(comparison):
        wrapped(note, "")


def _print_differences(console: Console, comparison: Comparison, paired: Paired) -> None:
    title = f"against {comparison.baseline}: paired differences, tails in the same coordinate"
    table = _table(title, "method", "Δ PPL", "Δ P_Z^99.9", "Δ A_p^99", "tails in")
    coordinates = {(verdict.method, verdict.coef): verdict.coordinate for verdict in comparison.quality.methods}
    for method, differences in paired:
        coordinate = coordinates.get((method.method, method.coef))
        side = differences.same_coordinate.of(coordinate)
        table.add_row(
            _name(method.method, method.coef),
            _signed(differences.deployed.get("ppl")),
            _signed(side.get("p_z_999")),
            _signed(side.get("a_p_99")),
            coordinate or "—",
        )
    if paired:
        print_table(console, table)
    for method, differences in paired:
        if not method.coef:
            print_sentence(console, _trajectories(method, differences, comparison.baseline))


def _print_routers(console: Console, baseline: str, paired: Paired) -> None:
    """Seed by seed against the baseline: entropy, load, PPL, and the largest difference of the training loss."""
    compared = ("ce", "ppl", "entropy", "load_cv")
    changes = (f"Δ {symbol(key)}" for key in compared)
    title = f"against {baseline}: paired differences"
    table = _table(title, "router loss", *changes, symbol("max_loss_difference"))
    for method, differences in paired:
        gaps = [part.max_loss_difference for part in differences.trajectory]
        largest = max((gap for gap in gaps if gap is not None), default=None)
        shown = "—" if largest is None else "0" if largest == 0 else f"{largest:.2g}"
        cells = (_signed(differences.deployed.get(key)) for key in compared)
        table.add_row(_name(method.method, method.coef), *cells, shown)
    if table.row_count:
        print_table(console, table)
    legend = "largest difference of the training loss over all steps and seeds, in nat"
    print_sentence(console, legend, first=f"{symbol('max_loss_difference')}: ")
    print_sentence(console, "the model's own term, about k at balance", first=f"{symbol('load_balance')}: ")


def _print_tokens(console: Console, comparison: Comparison) -> None:
    tokens = comparison.tokens
    if tokens.available and tokens.consumed is not None and tokens.reuse is not None:
        counted = f"{tokens.consumed:,} consumed of {tokens.available:,} available, reuse factor {tokens.reuse:.3g}"
        print_sentence(console, counted, first="tokens per run: ")
    for names, what in (
        (comparison.unfinished, "not finished, left out"),
        (comparison.unpaired, "without a baseline run of their seed"),
    ):
        if names:
            print_sentence(console, ", ".join(names), first=f"{what}: ")


def _trajectories(method: ComparedMethod, differences: PairedDifferences, baseline: str) -> str:
    """Where the training of a method without a penalty departs from the baseline's: in exact arithmetic nowhere."""
    parts = []
    for part in differences.trajectory:
        if part.first_difference is None:
            parts.append(f"seed {part.seed} equal bit for bit")
        else:
            parts.append(
                f"seed {part.seed} apart from step {part.first_difference} on, "
                f"CE by {_short(part.max_ce_difference)} at most and {_short(part.mean_ce_difference)} on average"
            )
    return f"{_name(method.method, method.coef)} trained against {baseline}: {'; '.join(parts)}"


def _table(title: str, *headings: str) -> Table:
    """A table without side borders: four numbers with their spread fit 80 columns."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Column, Table

    columns = (Column(name, justify="left" if i == 0 else "right", no_wrap=True) for i, name in enumerate(headings))
    return Table(*columns, title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))


def _name(method: str, coef: float) -> str:
    return f"{method} {coef:g}" if coef else method


def _cell(summary: SeedSummary | None) -> str:
    return "—" if summary is None else f"{summary.mean:.4g}{_spread(summary.std)}"


def _signed(difference: SeedDifference | None) -> str:
    return "—" if difference is None else f"{difference.mean:+.3g}{_spread(difference.std)}"


def _spread(std: float | None) -> str:
    return "" if std is None else f" ± {std:.2g}"


def _short(value: float | None) -> str:
    return "—" if value is None else f"{value:.2g}"
