"""Errors are help: every message is one line that ends as a sentence, and every error is in docs/errors.md."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from zloss import errors

ROOT = Path(__file__).parents[1]
BUILT_BY_THEIR_CLASS = (
    *("UnknownNameError", "ReductionError", "MissingDependencyError", "OutdatedDependencyError"),
    "RunEndedError",
)
"""Errors whose class makes the sentence from its arguments."""


def homes() -> Iterator[str]:
    """Modules that define an error of ours."""
    source = ROOT / "src"
    ours = {
        name for name, member in inspect.getmembers(errors, inspect.isclass) if issubclass(member, errors.ZlossError)
    }
    for file in sorted(source.rglob("*.py")):
        classes = [
            node for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(node, ast.ClassDef)
        ]
        if any(ast.unparse(base) in ours for node in classes for base in node.bases):
            yield ".".join(file.relative_to(source).with_suffix("").parts)


@cache
def public_errors() -> dict[str, type[Exception]]:
    members = [pair for home in homes() for pair in inspect.getmembers(importlib.import_module(home), inspect.isclass)]
    return {name: member for name, member in members if issubclass(member, errors.ZlossError)}


def template(node: ast.expr) -> str | None:
    """The text of a message with {} for what is filled in; None where it is not written at the place of the raise."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        sides = template(node.left), template(node.right)
        return None if sides == (None, None) else "".join("{}" if side is None else side for side in sides)
    return None


def messages() -> Iterator[tuple[str, str]]:
    """(place, message) of every error that is raised with its message."""
    known = public_errors().keys() - set(BUILT_BY_THEIR_CLASS)
    for file in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                name = ast.unparse(node.exc.func).rpartition(".")[2]
                text = template(node.exc.args[0])
                if name in known and text is not None:
                    yield f"{file.relative_to(ROOT)}:{node.lineno}", text


def faults(text: str) -> list[str]:
    """What does not follow the style of our messages."""
    found = []
    if not text.endswith((".", "{}")):
        found.append("does not end as a sentence")
    if "\n" in text:
        found.append("has more than one line")
    if any(word in text.lower() for word in ("invalid", "oops", "sorry", "something went wrong")):
        found.append("says that it is wrong, not what is expected")
    return found


def test_every_message_is_a_sentence() -> None:
    read = list(messages())
    assert len(read) > 350
    wrong = [f"{place}: {fault}: {text}" for place, text in read for fault in faults(text)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("text", ["invalid value.", "no sentence", "two\nlines."])
def test_what_is_no_sentence_is_seen(text: str) -> None:
    assert faults(text)


def test_every_error_is_in_the_table_with_cause_and_help() -> None:
    lines = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8").splitlines()
    cells_of = [
        [cell.strip(" `") for cell in line.strip("| ").split(" | ")] for line in lines if line.startswith("| `")
    ]
    rows = {cells[0]: cells[1:] for cells in cells_of}
    known = public_errors()
    assert rows.keys() == known.keys()
    for name, (also, cause, fix) in rows.items():
        assert len(cause) > 10, name
        assert len(fix) > 10, name
        built_in = {base.__name__ for base in known[name].__mro__ if base.__module__ == "builtins"}
        assert not also or also in built_in, name
