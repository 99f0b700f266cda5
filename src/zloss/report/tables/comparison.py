"""Tables of a comparison: paired differences, and the scales of router variants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zloss.report.text.numbers import MISSING, number
from zloss.results.comparison import ComparedMethod, Comparison

PAIRED = (
    ("ppl", "PPL"),
    ("p_z_999", "P_Z^99.9"),
    ("a_p_99", "A_p^99"),
    ("diag_z", "Diag Z"),
    ("mu_abs_99", "p99 |μ|"),
    ("grad_norm_p99", "p99 ‖g‖₂"),
    ("grad_norm_max", "max ‖g‖₂"),
    ("clip_rate", "clip rate"),
    ("phi_10", "Φ_10"),
    ("adam_v_max", "max ‖v‖∞"),
)
PAIRED_ROUTED = (
    ("ce", "CE"),
    ("ppl", "PPL"),
    ("entropy", "entropy"),
    ("load_cv", "load CV"),
    ("load_balance", "load balancing"),
    ("router_z", "router Z"),
    ("router_log_z_p999", "p99.9 log Z_R"),
    ("router_correction_norm", "mean ‖δ_h‖"),
    ("grad_norm_p99", "p99 ‖g‖₂"),
    ("clip_rate", "clip rate"),
)
ROUTERS = ("λ_R", "λ_R applied", "s_rel", "λα per decision", "entropy by seed", "load CV by seed", "max |ΔL|")


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
