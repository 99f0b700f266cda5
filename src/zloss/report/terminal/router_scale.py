"""A router coefficient under every convention, as a table on the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zloss.report.tables.router_scale import router_scale_legend
from zloss.report.terminal.fitting import print_sentence
from zloss.results.router_scale import RouterScaleTable

if TYPE_CHECKING:
    from rich.console import Console


def print_router_scale(
    scales: RouterScaleTable, *, bold: tuple[str, ...] = (), cited: bool = False, console: Console | None = None
) -> None:
    """One line per convention, then the legend; those named in `bold` are printed bold.

    With `cited` the place where each convention was read follows.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = console or Console(markup=False)
    table = Table(
        title=f"router Z-loss, λ_R = {scales.coef:g}, L = {scales.layers}, k = {scales.top_k}, T = {scales.tokens}",
    )
    table.add_column("convention", no_wrap=True)
    for name in ("s_rel", "λα", "equal λ_R"):
        table.add_column(name, justify="right", no_wrap=True)
    for scale in scales.conventions:
        table.add_row(
            Text(scale.convention),  # not markup: a name may hold square brackets
            f"{scale.relative:.6g}{'' if scale.uniform else ' (mean)'}",
            f"{scale.absolute:.4g}",
            "none" if scale.equal_coef is None else f"{scale.equal_coef:.6g}",
            style="bold" if scale.convention in bold else None,
        )
    console.print(table)
    for name, meaning in router_scale_legend(scales):
        print_sentence(console, meaning, first=f"{name}: ")
    if cited:
        console.print("read from:", markup=False)
        for scale in scales.conventions:
            print_sentence(console, scale.cited, first=f"  {scale.convention}: ")


def print_match(coef: float, source: str, matched: float, target: str) -> None:
    """The coefficient under `source` and the equal one under `target`."""
    from rich.console import Console

    Console(markup=False).print(
        f"{coef:g} under {source} = {matched:.6g} under {target}", highlight=False, soft_wrap=True
    )
