"""Finished runs read on half of their validation text: one half selects an arm, the other confirms it.

The blocks are cut into the groups of a verdict (at most 32 contiguous ones). Groups 0, 2, 4, … select; 1, 3, 5, … confirm.
Every number of a run that is read this way is of that half alone; a number that is not kept block by block is None.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

from zloss.decide.verdicts.coordinate import BlockTail
from zloss.decide.verdicts.groups import contiguous_groups
from zloss.decide.verdicts.interval import LARGEST_EXPONENT
from zloss.errors import InputError
from zloss.results.audit import HeadNumbers, Heads
from zloss.results.coordinate import Coordinate
from zloss.results.run_metrics import RunMetrics
from zloss.results.validation_blocks import (
    DELTA_U,
    DELTA_U_GAIN_AWARE,
    SHIFT,
    SHIFT_SQUARED,
    VIOLATION,
    VIOLATION_SQUARED,
    ValidationBlocks,
)
from zloss.train.compare.finished_run import FinishedRun

Half = Literal["selection", "confirmation"]


def on_half(run: FinishedRun, half: Half) -> FinishedRun:
    """The run with the validation numbers of one half."""
    blocks = run.record.validation_blocks
    if blocks is None:
        raise InputError(
            f"{run.folder.name} holds no per-block validation: make the run again with this version of zloss."
        )
    group_B = contiguous_groups(len(blocks.tokens))
    parity = 0 if half == "selection" else 1
    return replace(
        run, record=_on_blocks(run.record, _chosen(blocks, [b for b, g in enumerate(group_B) if g % 2 == parity]))
    )


def _chosen(blocks: ValidationBlocks, indices: list[int]) -> ValidationBlocks:
    return ValidationBlocks(
        tokens=tuple(blocks.tokens[i] for i in indices),
        ce=tuple(blocks.ce[i] for i in indices),
        kept=blocks.kept,
        tails={key: tuple(values[i] for i in indices) for key, values in blocks.tails.items()},
        means={key: tuple(values[i] for i in indices) for key, values in blocks.means.items()},
    )


def _on_blocks(record: RunMetrics, blocks: ValidationBlocks) -> RunMetrics:
    ce = _mean(blocks.ce, blocks.tokens)
    heads = Heads(_head(record, blocks, "raw"), _head(record, blocks, "centered"))
    deployed = heads.centered if record.coordinate == "centered" else heads.raw
    return replace(
        record,
        ce=ce,
        ppl=None if ce is None or ce > LARGEST_EXPONENT else math.exp(ce),
        diag_z=deployed.diag_z,
        p_z_999=deployed.p_z_999,
        a_p_99=None,
        mu_abs_99=deployed.mu_abs_99,
        valid_predictions=sum(blocks.tokens),
        heads=heads,
        validation_blocks=blocks,
    )


def _head(record: RunMetrics, blocks: ValidationBlocks, coordinate: Coordinate) -> HeadNumbers:
    def tail(name: str, level: float) -> float | None:
        values = blocks.tails.get(f"{name}.{coordinate}")
        found = math.nan if values is None else BlockTail(values, blocks.tokens).quantile(level)
        return found if math.isfinite(found) else None

    square = _mean(blocks.means.get(f"{VIOLATION_SQUARED}.{coordinate}", ()), blocks.tokens)
    shift = _mean(blocks.means.get(f"{SHIFT_SQUARED}.{coordinate}", ()), blocks.tokens)
    return HeadNumbers(
        diag_z=None if square is None else record.diag_coef * square,
        p_z_999=tail(VIOLATION, 0.999),
        mu_abs_99=tail(SHIFT, 0.99),
        mu_rms=None if shift is None else math.sqrt(shift),
        delta_u_99=tail(DELTA_U, 0.99),
        delta_u_99_gain_aware=tail(DELTA_U_GAIN_AWARE, 0.99),
    )


def _mean(values: tuple[float | None, ...], tokens: tuple[int, ...]) -> float | None:
    """Mean over tokens of a mean by block; None where one block has none."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(tokens):
        return None
    return sum(value * count for value, count in zip(known, tokens, strict=True)) / sum(tokens)
