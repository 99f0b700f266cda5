"""Properties of every result file: it reads back as it was written, and a damaged one is refused by the name of its key."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

import zloss.results
from tests.laws.example_results import DOCUMENTED, example_results
from zloss.errors import InputError
from zloss.results.files import RECORDS, load_results, read_record
from zloss.results.reproduction import ReproductionRecord

KINDS = (
    "audit", "comparison", "decisions", "router-scale", "drift", "drift-checkpoint", "recommendation", "recommend-plan",
    "implementation-audit", "measured-router-scale", "reproduction",
)  # fmt: skip
SCHEMAS = ("zloss.loss-audit/2", *(f"zloss.{kind}/1" for kind in KINDS))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@functools.cache
def text(schema: str) -> str:
    return json.dumps(example_results()[schema].to_dict(), allow_nan=False)


def plain(schema: str) -> Any:
    """The parsed JSON of the example, to be damaged."""
    return json.loads(text(schema))


def read(schema: str, data: Any) -> Any:
    return type(example_results()[schema]).from_dict(data)


class Key(NamedTuple):
    """A key of a file by the record that declares it."""

    path: tuple[str, ...]
    hint: Any
    required: bool


def keys(record_type: type, data: Any, path: tuple[str, ...] = ()) -> Iterator[Key]:
    """Every declared key that the file has; of lists and of objects by name the first member stands for all."""
    hints = get_type_hints(record_type)
    for field in dataclasses.fields(record_type):
        if field.name not in data or (field.name == "extra" and hints["extra"] == dict[str, Any]):
            continue
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        yield Key((*path, field.name), hints[field.name], required)
        yield from _members(hints[field.name], data[field.name], (*path, field.name))


def _members(hint: Any, value: Any, path: tuple[str, ...]) -> Iterator[Key]:
    inner = [arg for arg in get_args(hint) if arg not in (type(None), Ellipsis)]
    if dataclasses.is_dataclass(hint) and value is not None:
        assert isinstance(hint, type)
        yield from keys(hint, value, path)
    elif get_origin(hint) is tuple and value:
        yield from _members(inner[0], value[0], (*path, "0"))
    elif get_origin(hint) is dict and value and inner[1] is not Any:
        first = next(iter(value))
        yield from _members(inner[1], value[first], (*path, first))
    elif type(None) in get_args(hint):
        yield from _members(inner[0], value, path)


def holder(data: Any, path: tuple[str, ...]) -> Any:
    """The object or list that holds the last part of `path`."""
    for part in path[:-1]:
        data = data[int(part)] if isinstance(data, list) else data[part]
    return data


@functools.cache
def all_keys(schema: str) -> list[Key]:
    return [key for key in keys(type(example_results()[schema]), plain(schema)) if key.path != ("schema",)]


def wrong_value(hint: Any) -> Any:
    return 3 if hint is str or set(get_args(hint)) == {str, type(None)} else "of another type"


def test_every_kind_of_result_has_an_example() -> None:
    assert set(example_results()) == set(SCHEMAS) >= set(RECORDS)


@pytest.mark.parametrize("schema", SCHEMAS)
def test_a_record_reads_back_as_it_was_written(schema: str, tmp_path: Path) -> None:
    record = example_results()[schema]
    record.write(tmp_path / "result.json")
    again = read_record(tmp_path / "result.json", type(record))
    assert again.to_dict() == record.to_dict()
    assert plain(schema)["schema"] == schema
    # The example has no nonfinite numbers, so the record itself is the same; an audit adds its reasons.
    if schema != "zloss.audit/1":
        assert again == record


@pytest.mark.parametrize("schema", SCHEMAS)
def test_a_missing_key_without_a_default_and_a_key_of_another_type_are_named(schema: str) -> None:
    found = all_keys(schema)
    assert {key.path[0] for key in found} == set(plain(schema)) - {"schema"}
    for key in found:
        missing, other = plain(schema), plain(schema)
        del holder(missing, key.path)[key.path[-1]]
        holder(other, key.path)[key.path[-1]] = wrong_value(key.hint)
        with pytest.raises(InputError, match=f"`{re.escape('.'.join(key.path))}` is expected to be"):
            read(schema, other)
        if not key.required:
            read(schema, missing)
            continue
        with pytest.raises(InputError, match=f"`{re.escape('.'.join(key.path))}` is missing"):
            read(schema, missing)


@pytest.mark.parametrize("schema", SCHEMAS)
@given(data=st.data())
def test_no_damage_is_answered_with_anything_but_an_input_error(schema: str, data: st.DataObject) -> None:
    key = data.draw(st.sampled_from(all_keys(schema)))
    damaged = plain(schema)
    holder(damaged, key.path)[key.path[-1]] = data.draw(JSON)
    with contextlib.suppress(InputError):
        read(schema, damaged)


@pytest.mark.parametrize("schema", SCHEMAS)
def test_what_is_not_of_the_schema_is_refused(schema: str) -> None:
    for data in (None, 3, "text", [], {}, {"schema": None}, {"schema": "zloss.audit/2"}):
        with pytest.raises(InputError, match="schema"):
            read(schema, data)


def test_the_committed_results_open() -> None:
    files = [path for path in DOCUMENTED.glob("*.json") if json.loads(path.read_text())["schema"] in RECORDS]
    assert files
    reproduced = 0
    for result in load_results(files):
        assert result.record.to_dict() == json.loads(result.path.read_text(encoding="utf-8"))
        if isinstance(record := result.record, ReproductionRecord):
            reproduced += 1
            for line in record.rows:
                numbers = line.numbers(record.columns)
                assert line.key(record.columns)
                assert all(isinstance(number, float) for number in numbers.values())
                assert set(line.ratio) <= set(numbers)
                assert set(line.reasons).isdisjoint(numbers)
    assert reproduced >= 34


RECORD_FILES = (
    *("audit", "centering", "comparison", "decision", "drift", "implementation_audit", "loss_audit", "provenance"),
    *("recommendation", "reproduction", "router", "run_metrics", "steps"),
)


@pytest.mark.parametrize("name", RECORD_FILES)
def test_every_key_is_explained(name: str) -> None:
    """A sentence under each field of a record."""
    tree = ast.parse((Path(zloss.results.__path__[0]) / f"{name}.py").read_text(encoding="utf-8"))
    assert not list(unexplained(tree))
    assert list(unexplained(ast.parse("@dataclass\nclass A:\n    x: int\n    y: int\n    'said'\n"))) == ["A.x"]


def unexplained(tree: ast.Module) -> Iterator[str]:
    for record in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        for node, after in zip(record.body, [*record.body[1:], None], strict=True):
            if not isinstance(node, ast.AnnAssign) or "ClassVar" in ast.unparse(node.annotation):
                continue
            explained = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            if not explained:
                yield f"{record.name}.{ast.unparse(node.target)}"
