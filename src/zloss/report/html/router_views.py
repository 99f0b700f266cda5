"""What the page shows of router scales, stated and measured."""

from __future__ import annotations

from dataclasses import dataclass

from zloss.report.tables.router import NamedLine, scale_lines
from zloss.report.tables.router_scale import router_scale_legend
from zloss.results.router import MeasuredScale
from zloss.results.router_scale import RouterScaleTable


@dataclass(frozen=True)
class RouterScaleView:
    """A coefficient under every convention."""

    table: RouterScaleTable
    legend: list[tuple[str, str]]


@dataclass(frozen=True)
class MeasuredView:
    """A measured router scale."""

    scale: MeasuredScale
    title: str
    lines: tuple[NamedLine, ...]


def router_scale_view(table: RouterScaleTable) -> RouterScaleView:
    """The table with its legend."""
    return RouterScaleView(table, router_scale_legend(table))


def measured_view(scale: MeasuredScale) -> MeasuredView:
    """The numbers under their names."""
    return MeasuredView(scale, "Measured from gradients", scale_lines(scale))
