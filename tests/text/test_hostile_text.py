"""Texts with characters and types that readers stumble over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from zloss.errors import CorpusError
from zloss.text import open_corpus


def documents(file: Path) -> list[str]:
    return list(open_corpus([str(file)], None).documents)


def test_separators_inside_json_strings_break_no_line(tmp_path: Path) -> None:
    """`splitlines` cut the line inside the string, and the rest was "not JSON"."""
    texts = ["one\u2028two", "three\u0085four", "five\x0bsix\x1cseven", "eight\r"]
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")
    assert documents(tmp_path / "a.jsonl") == texts


def test_half_a_surrogate_pair_is_named_by_its_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "fine \\ud83d\\ude00"}\n{"text": "half \\ud83d"}\n')
    with pytest.raises(CorpusError, match=r"a\.jsonl line 2 contains half of a surrogate pair"):
        documents(tmp_path / "a.jsonl")


def test_deep_nesting_is_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("[" * 100_000)
    with pytest.raises(CorpusError, match="line 1 is not JSON"):
        documents(tmp_path / "a.jsonl")


@pytest.mark.parametrize(
    ("values", "kind"),
    [([1, 2], "int64"), ([[1.0]], "list"), ([b"x"], "binary"), ([{"a": "b"}], "struct"), ([True], "bool")],
)
def test_a_parquet_column_that_is_no_text_is_refused(tmp_path: Path, values: list[Any], kind: str) -> None:
    """Numbers and lists were audited as what Python prints of them."""
    parquet.write_table(pa.table({"text": values}), tmp_path / "a.parquet")
    with pytest.raises(CorpusError, match=f"holds {kind}.*not text: set `text_field`"):
        documents(tmp_path / "a.parquet")


def test_every_kind_of_parquet_text_is_read(tmp_path: Path) -> None:
    plain = pa.array(["a", None, "b"])
    for number, column in enumerate((plain, plain.cast(pa.large_string()), plain.dictionary_encode())):
        file = tmp_path / f"{number}.parquet"
        parquet.write_table(pa.table({"text": column}), file)
        assert documents(file) == ["a", "b"]
