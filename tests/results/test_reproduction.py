"""Every committed reproduction opens with the record, and a damaged one is refused by its key."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zloss.errors import InputError
from zloss.results.files import read_record, write_record
from zloss.results.reproduction import ReproductionRecord

FOLDER = Path(__file__).parents[2] / "docs/results"
FILES = [
    file
    for file in sorted(FOLDER.glob("*.json"))
    if json.loads(file.read_text(encoding="utf-8"))["schema"] == ReproductionRecord.SCHEMA
]


def test_there_are_committed_reproductions() -> None:
    assert len(FILES) >= 34


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_committed_reproductions_survive_a_round_trip(file: Path, tmp_path: Path) -> None:
    record = read_record(file, ReproductionRecord)
    write_record(tmp_path / file.name, record)
    written = json.loads((tmp_path / file.name).read_text(encoding="utf-8"))
    assert written == json.loads(file.read_text(encoding="utf-8"))
    for line in record.rows:
        numbers, key = line.numbers(record.columns), line.key(record.columns)
        assert key
        assert all(isinstance(number, float) for number in numbers.values())
        assert set(line.ratio) <= set(numbers)
        assert set(line.reasons).isdisjoint(numbers)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("schema",), "zloss.reproduction/2"),
        (("label",), 1),
        (("profile",), "huge"),
        (("comparable",), "yes"),
        (("columns",), "ppl"),
        (("rows", 0, "reasons"), []),
        (("rows", 0, "ratio"), {"ppl": "large"}),
        (("claims", 0, "verdict"), "perhaps"),
        (("claims", 0, "on_the_papers_numbers", "evidence"), None),
        (("texts", 0, "licence"), None),
        (("provenance", "threads"), "two"),
    ],
)
def test_a_damaged_reproduction_is_refused_by_its_key(path: tuple[str | int, ...], value: object) -> None:
    data = json.loads((FOLDER / "tab_pretrained.json").read_text(encoding="utf-8"))
    holder = data
    for part in path[:-1]:
        holder = holder[part]
    holder[path[-1]] = value
    with pytest.raises(InputError, match=f"`{'.'.join(map(str, path))}"):
        ReproductionRecord.from_dict(data)


def test_a_missing_key_is_named() -> None:
    data = json.loads((FOLDER / "tab_pretrained.json").read_text(encoding="utf-8"))
    for key in data:
        with pytest.raises(InputError, match=f"`{key}`"):
            ReproductionRecord.from_dict({name: value for name, value in data.items() if name != key})
