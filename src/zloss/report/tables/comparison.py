"""Tables of a comparison: paired differences, and the scales of router variants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zloss.report.text.numbers import MISSING, number
from zloss.results.comparison import ComparedMethod, Comparison
from zloss.results.quantities import symbol, titled

PAIRED = titled(
    (
        "ppl",
        "p_z_999",
        "a_p_99",
        "diag_z",
        "mu_abs_99",
        "grad_norm_p99",
        "grad_norm_max",
        "clip_rate",
        "phi_10",
        "adam_v_max",
    )
)
PAIRED_ROUTED = titled(
    (
        "ce",
        "ppl",
        "entropy",
        "load_cv",
        "load_balance",
        "router_z",
        "router_log_z_p999",
        "router_correction_norm",
        "grad_norm_p99",
        "clip_rate",
    )
)
ROUTERS = (
    symbol("router.coef"),
    symbol("applied_coef"),
    symbol("s_rel"),
    f"{symbol('absolute')} per decision",
    f"{symbol('entropy')} by seed",
    f"{symbol('load_cv')} by seed",
    symbol("max_loss_difference"),
)


Cell = tuple[str, float | None]
"""Text, and the value to sort by where there is one."""


def estimable_columns(columns: Sequence[tuple[str, str]], comparison: Comparison) -> tuple[tuple[str, str], ...]:
    """The columns without the p99 over steps where the runs have fewer than 100 steps."""
    short = comparison.has_few_steps
    return tuple((key, title) for key, title in columns if not (short and key == "grad_norm_p99"))


@dataclass(frozen=True)
class ShownTable:
    """A table with its numbers as text."""

    columns: tuple[str, ...]
    """Headings, without that of the names."""
    lines: tuple[tuple[str, tuple[Cell, ...]], ...]
    """(name, cells) from top to bottom."""


def paired_table(comparison: Comparison) -> ShownTable | None:
    """Method minus baseline; quantities of the head in the coordinate the method deploys, for both."""
    if all(method.paired is None for method in comparison.methods):
        return None
    columns = estimable_columns(PAIRED if comparison.router is None else PAIRED_ROUTED, comparison)
    keys = [key for key, _ in columns]
    lines = tuple((m.label, _differences(m, keys)) for m in comparison.methods if m.paired is not None)
    return ShownTable(tuple(title for _, title in columns), lines)


def router_table(comparison: Comparison) -> ShownTable | None:
    """Scale and routing of every router variant, seed by seed."""
    routers = comparison.router
    if routers is None:
        return None
    lines = []
    for variant in (*routers.off, *routers.conventions):
        largest = max((gap for gap in variant.max_loss_difference if gap is not None), default=None)
        plain = (variant.coef, variant.applied_coef, variant.s_rel, variant.absolute)
        cells = (
            *((number(value), value) for value in plain),
            (_by_seed(variant.entropy, 4), None),
            (_by_seed(variant.load_cv, 3), None),
            (number(largest), largest),
        )
        lines.append((variant.convention, cells))
    return ShownTable(ROUTERS, tuple(lines))


def _differences(method: ComparedMethod, keys: Sequence[str]) -> tuple[Cell, ...]:
    assert method.paired is not None
    head, deployed = method.paired.same_coordinate.of(method.coordinate), method.paired.deployed
    cells: list[Cell] = []
    for key in keys:
        difference = head.get(key) or deployed.get(key)
        if difference is None:
            cells.append((MISSING, None))
            continue
        spread = "" if difference.std is None else f" ± {number(difference.std, 2)}"
        cells.append((f"{number(difference.mean)}{spread}", difference.mean))
    return tuple(cells)


def _by_seed(values: Sequence[float | None], digits: int) -> str:
    return " ".join(f"{value:.{digits}f}" for value in values if value is not None)
