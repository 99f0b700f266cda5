"""A reproduction as lines of text, for the terminal and for the page: ours, the paper's beside it, and the ratio."""

from __future__ import annotations

from dataclasses import dataclass

from zloss.report.text.numbers import MISSING, factor, number
from zloss.results.quantities import BY_KEY
from zloss_paper.engine.claim import FAILS, HOLDS, OPEN
from zloss_paper.engine.reproduction import Reproduction, ratio_of
from zloss_paper.engine.table import Cell, Line

SYMBOLS = {
    "ppl": "PPL",
    "r_z": "R_Z",
    "aux_ce_cosine": "C_Z",
    "output_path_norm": "output path",
    "input_path_norm": "input path",
    "input_output_cosine": "cos(in, out)",
    "translation_error": "translation error",
    "identity_error": "identity error",
    "s_rel": "s_rel",
    "delta_h_norm_mean": "mean ‖δ_h‖",
    "ce": "CE",
    "ce_std": "CE std",
    "entropy_std": "entropy std",
    "load_cv": "load CV",
    "router_absolute": "λα",
    "max_loss_difference": "max |ΔL|",
    "rel_forward_error": "forward error",
    "delta_src": "Δ_src",
    "delta_src_p99": "Δ_src p99",
    "delta_src_max": "Δ_src max",
    "backward_cosine": "cosine",
    "split_residual": "split residual",
    "delta_total": "Δ_tot",
    "delta_z": "Δ_Z",
    "z_cosine": "Z cosine",
    "kernel_delta_z": "kernel Δ_Z",
    "delta_weight": "Δ_tot at W",
    "grad_rel_error": "gradient error",
    "grad_cosine": "gradient cosine",
    "adam_dir_rel_error": "Adam direction error",
    "z_grad_rel_error": "Δ_θ of Z",
    "grad_rel_error_min": "least error",
    "grad_rel_error_max": "largest error",
    "grad_rel_error_max_bf16": "largest, bf16",
    "grad_norm_mean": "mean ‖g‖_2",
    "grad_inf_mean": "mean ‖g‖_∞",
    "kappa_min": "κ_min",
    **{f"psi_{scale}": f"Ψ_{scale}" for scale in (256, 1024, 4096, 16384, 65536)},
    "lambda_aux": "λ_aux",
    "ppl_std": "PPL std",
    "delta_ppl": "ΔPPL",
    "delta_a_p_99": "ΔA_p^99",
    "grad_norm_p99": "p99 ‖g‖_2",
    "grad_norm_max": "max ‖g‖_2",
    "clip_rate": "clip rate",
    **{f"phi_{threshold}": f"Φ_{threshold}" for threshold in (10, 50, 100)},
    "r_aux": "R_aux",
    "c_aux": "C_aux",
    "v_max_ratio_to_ce": "max v / CE",
    "d_inf_p99": "p99 ‖d‖_∞",
}
NOT_COMPARABLE = (
    "The numbers are not comparable with the paper's (see the deviations); its claims may still be tested on ours."
)


@dataclass(frozen=True)
class PrintedLine:
    """One printed line; `style` says what it is."""

    cells: tuple[str, ...]
    style: str
    """ "ours", "paper" or "ratio"."""


def header(result: Reproduction) -> tuple[str, ...]:
    """Key columns, a column that says ours or paper, then the numbers."""
    numbers = tuple(symbol(column) for column in result.recipe.columns)
    return (*_keys(result), *(("",) if numbers else ()), *numbers)


def symbol(column: str) -> str:
    """How a column is written."""
    return SYMBOLS.get(column) or (BY_KEY[column].symbol if column in BY_KEY else column)


def printed_lines(result: Reproduction) -> list[PrintedLine]:
    """Ours, then the paper's line beside it and the ratio where there is one."""
    out: list[PrintedLine] = []
    for line in result.table:
        keys = tuple(str(line.key.get(column, "")) for column in _keys(result))
        if not result.recipe.columns:
            out.append(PrintedLine(keys, "ours"))
            continue
        out.append(PrintedLine((*keys, "ours", *(_cell(line.cells.get(c)) for c in result.recipe.columns)), "ours"))
        other = result.beside(line)
        if other is None:
            continue
        blank = ("",) * len(keys)
        name = _beside_name(line, other)
        out.append(PrintedLine((*blank, name, *(_cell(other.cells.get(c)) for c in result.recipe.columns)), "paper"))
        ratios = (ratio_of(line.cells.get(c), other.cells.get(c)) for c in result.recipe.columns)
        out.append(PrintedLine((*blank, "ours / paper", *(factor(r) for r in ratios)), "ratio"))
    return out


def tally(result: Reproduction) -> str:
    """ "3 hold, 0 do not hold, 8 cannot be tested here"."""
    return f"{result.count(HOLDS)} hold, {result.count(FAILS)} do not hold, {result.count(OPEN)} cannot be tested here"


def missing(result: Reproduction) -> list[str]:
    """Why numbers of ours do not exist, one sentence per line and reason."""
    found: dict[tuple[str, str], list[str]] = {}
    for line in result.table:
        for column, why in line.reasons.items():
            found.setdefault((line.name(), why), []).append(symbol(column))
    return [f"{name}: no {', '.join(columns)}: {why}" for (name, why), columns in found.items()]


def deviations(result: Reproduction) -> list[str]:
    """In what our lines differ from the paper's setting, each once."""
    found: dict[str, list[str]] = {}
    for line in result.table:
        for deviation in line.deviations:
            found.setdefault(deviation, []).append(str(line.key.get("model", "")))
    every = len({str(line.key.get("model", "")) for line in result.table})
    return [
        why if len(set(models)) == every else f"{', '.join(dict.fromkeys(models))}: {why}"
        for why, models in found.items()
    ]


def _keys(result: Reproduction) -> tuple[str, ...]:
    return tuple(result.table.lines[0].key) if result.table.lines else ()


def _beside_name(line: Line, other: Line) -> str:
    """The paper's line by what differs from ours."""
    differing = [str(value) for column, value in other.key.items() if line.key.get(column, value) != value]
    return f"paper, {', '.join(differing)}" if differing else "paper"


def _cell(cell: Cell | None) -> str:
    if cell is None:
        return MISSING
    # As printed, zeros included, unless it is a power of ten.
    return cell.printed if cell.printed and abs(cell.value) >= 1e-4 else number(cell.value)
