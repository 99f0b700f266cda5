"""Wide tables in parts: every column once, the keys in every part, nothing cut, nothing wider than the terminal."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from tests.decide.recommend.made_up import made_up_plan, made_up_recommendation
from zloss.report.terminal.fitting import print_sentence, print_table
from zloss.report.terminal.recommendation import print_plan, print_recommendation


def lines(print_to: Callable[[Console], None], width: int) -> list[str]:
    stream = io.StringIO()
    print_to(Console(file=stream, width=width))
    return [line.rstrip() for line in stream.getvalue().splitlines()]


@pytest.mark.parametrize("width", [40, 60, 80, 200])
@pytest.mark.parametrize("together", [1, 2])
def test_every_number_is_printed_once_at_any_width(width: int, together: int) -> None:
    table = Table(title="a title", box=None, pad_edge=False)
    table.add_column("method", no_wrap=True)
    for column in range(8):
        table.add_column(f"column {column}", justify="right", no_wrap=True)
    for row in range(3):
        table.add_row(f"method {row}", *(f"{row}{column}.12345" for column in range(8)))
    found = lines(lambda console: print_table(console, table, together=together), width)
    assert max(map(cell_len, found)) <= width
    text = "\n".join(found)
    for row in range(3):
        for column in range(8):
            assert text.count(f"{row}{column}.12345") == 1
    parts = text.count("column 0")
    assert parts == 1
    assert text.count("method 1") == sum("column" in line for line in found)


def test_a_table_whose_names_can_be_folded_stays_whole() -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("router loss", no_wrap=True)
    for column in range(4):
        table.add_column(f"column {column}", no_wrap=True)
    table.add_row("active_route_mean matched 0.001", *["1.2345"] * 4)
    assert "column 3" in lines(lambda console: print_table(console, table), 60)[0]


def test_sentences_are_broken_between_words_only() -> None:
    path = "a/very/long/path/" + "x" * 60
    found = lines(lambda console: print_sentence(console, f"read from {path} line 7", first="here: "), 40)
    assert any(path in line for line in found)


def test_recommendations_fit() -> None:
    for show in (
        lambda console: print_recommendation(made_up_recommendation(), console),
        lambda console: print_plan(made_up_plan(), console),
    ):
        assert max(map(cell_len, lines(show, 80))) <= 80
