"""What `zloss reproduce` prints fits the terminal: 80 columns, more where there are more."""

from __future__ import annotations

import io
from functools import cache
from pathlib import Path

import pytest
from rich.console import Console

from zloss_paper.engine.kept_result import rejudge
from zloss_paper.engine.registry import find_recipe, labels
from zloss_paper.engine.reproduction import Reproduction
from zloss_paper.show.layout import header, printed_lines
from zloss_paper.show.terminal import PADDING, column_groups, folded_keys, print_reproduction

RESULTS = Path(__file__).parents[3] / "docs/results"


@cache
def committed(label: str) -> Reproduction:
    return rejudge(RESULTS, find_recipe(label))


def shown(result: Reproduction, width: int) -> list[str]:
    out = io.StringIO()
    print_reproduction(result, Console(file=out, width=width, color_system=None))
    return [line.rstrip() for line in out.getvalue().splitlines()]


@pytest.mark.parametrize("label", labels())
def test_every_committed_result_fits_80_columns_with_all_its_numbers(label: str) -> None:
    """Wide tables ran over the edge: 108 columns."""
    result = committed(label)
    lines = shown(result, 80)
    assert max(map(len, lines)) <= 80
    keys = len(header(result)) - len(result.recipe.columns)
    text = "\n".join(lines)
    for line in printed_lines(result):
        for number in line.cells[keys:] if result.recipe.columns else ():
            assert number in text


def test_a_wider_terminal_shows_the_table_in_one_piece() -> None:
    result = committed("tab:fineweb_update_outlier")
    parts = {width: sum(line.startswith(" method") for line in shown(result, width)) for width in (80, 200)}
    assert parts == {80: 2, 200: 1}


def test_numbers_are_grouped_in_order_and_whole() -> None:
    groups = column_groups([10, 8, 8, 8, 60], [10], 40)
    assert groups == [(1, 2), (3,), (4,)]
    for group in groups[:-1]:
        assert 10 + PADDING + sum([10, 8, 8, 8, 60][i] + PADDING for i in group) <= 40
    assert column_groups([10], [10], 40) == [()]


def test_keys_are_folded_between_words_only_where_they_must_be() -> None:
    assert folded_keys([10, 12], [4, 5], 40) == [10, 12]
    assert folded_keys([10, 60], [4, 30], 50) == [10, 34]
    assert folded_keys([10, 60], [4, 30], 20) == [4, 30]
