"""What every document has in common, and sections of a result as lines."""

from __future__ import annotations

import pytest

from tests.laws.example_results import example_results
from zloss.decide.answer import decide_records
from zloss.report.document import Cell, Column, Group, Heading, Items, Table, Text, flat_lines, to_markdown, walk
from zloss.report.files import page_document, terminal_document
from zloss.results.files import RECORDS, kind_of


def test_nested_values_have_dotted_keys_and_extra_has_no_name() -> None:
    section = {"a": {"b": 1.5, "extra": {"beta": 0.01}}, "list": [{"c": True}, 3], "numbers": [1, 2], "none": None}
    assert flat_lines(section) == [
        ("a.b", "1.5"),
        ("a.beta", "0.01"),
        ("list.0.c", "yes"),
        ("list.1", "3"),
        ("numbers", "1, 2"),
        ("none", "–"),
    ]
    assert flat_lines(section, skip=("a", "list", "numbers")) == [("none", "–")]


@pytest.mark.parametrize("schema", RECORDS)
def test_every_row_has_a_cell_for_every_column(schema: str) -> None:
    record, kind = example_results()[schema], kind_of(schema)
    results = decide_records([record])
    for document in (page_document(results), terminal_document(results, verbose=True)):
        tables = [block for block in walk(document) if isinstance(block, Table)]
        # A terminal shows the verdict of an audit or a recommendation alone; the page has their tables.
        assert tables or kind in ("drift", "audit", "recommendation")
        for table in tables:
            assert table.keys <= len(table.columns)
            assert {len(row) for row in table.rows} <= {len(table.columns)}


def test_links_of_a_page_lead_to_anchors_that_exist_once() -> None:
    results = decide_records(example_results()[schema] for schema in RECORDS)
    blocks = [block for block in walk(page_document(results)) if isinstance(block, (Heading, Group))]
    anchors = [block.anchor for block in blocks if block.anchor]
    assert len(anchors) == len(set(anchors))
    assert all(block.anchor for block in blocks if block.link)
    assert {"Decisions", "Numbers", "Training", "Drift", "Loss", "Routers"} <= {block.link for block in blocks}


def test_markdown_has_headings_sentences_and_tables() -> None:
    table = Table(
        (Column("name", "text"), Column("size\nraw")),
        (("a|b", Cell("1.5", note="about")), (Cell("it fits", tone="pass", mark="holds"), Cell("no", tone="fired"))),
    )
    said = (Text("Said.", "strong"), Text("one", "item"), Text("two", "item"), Text("x = 1", "code"))
    assert (
        to_markdown([Heading("Title", 1), *said, table])
        == """# Title

**Said.**

- one
- two

    x = 1

| name | size raw |
| --- | ---: |
| a\\|b | 1.5 (about) |
| **holds** it fits | **no** |
"""
    )
    with pytest.raises(TypeError, match="no form for a Items"):
        to_markdown([Items(())])
