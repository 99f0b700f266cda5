"""The scale of a router coefficient under every convention, as a table."""

from __future__ import annotations

from zloss.results.router_scale import RouterScaleTable


def print_router_scale(scales: RouterScaleTable, *, bold: tuple[str, ...] = ()) -> None:
    """One line per convention; those named in `bold` are printed bold."""
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"router Z-loss, λ = {scales.coef:g}, L = {scales.layers}, k = {scales.top_k}, T = {scales.tokens}",
        caption=f"equal: the coefficient that applies what {scales.coef:g} applies under {scales.source}",
    )
    table.add_column("convention", no_wrap=True)
    table.add_column("s_rel", justify="right", no_wrap=True)
    table.add_column("λα per decision", justify="right", no_wrap=True)
    table.add_column("equal", justify="right", no_wrap=True)
    table.add_column("read from", overflow="fold")
    for scale in scales.conventions:
        table.add_row(
            scale.convention,
            f"{scale.relative:.6g}{'' if scale.uniform else ' (mean)'}",
            f"{scale.absolute:.4g}",
            "none" if scale.equal_coef is None else f"{scale.equal_coef:.6g}",
            scale.cited,
            style="bold" if scale.convention in bold else None,
        )
    Console().print(table)


def print_match(coef: float, source: str, matched: float, target: str) -> None:
    """The coefficient under `source` and the equal one under `target`."""
    from rich.console import Console

    Console().print(f"{coef:g} under {source} = {matched:.6g} under {target}", highlight=False, soft_wrap=True)
