"""Hostile texts: files of every kind, cut and overwritten, read as an audit reads them."""

from __future__ import annotations

import json
import traceback
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet

from tests.fuzz.contract import BrokenContractError
from tests.fuzz.damage import HOSTILE_TEXT, damaged_bytes
from zloss.errors import ZlossError
from zloss.text import make_blocks, open_corpus

PIECES = (
    *("words and more words ", "\u2028", "\u0085", "\x00", "\ufeff", "𝒳", "é", "\n\n", "\x1b[2J"),
    *(" " * 50, HOSTILE_TEXT),
)
VALUES: tuple[Any, ...] = (None, 1, 2.5, True, ["a", "b"], {"text": "x"}, b"\xff\xfe", "")


class Letters:
    """A tokenizer whose ids are bytes; text that is not text is an error in it, as in a real one."""

    def __call__(self, text: str, **options: Any) -> Any:
        ids = list(text.encode("utf-8"))
        return type("Encoded", (), {"input_ids": ids})()


def case(random: Random, folder: Path) -> None:
    """One to three files; they give whole blocks of text, or an error of ours."""
    files = [_file(random, folder, number) for number in range(random.choice((1, 1, 2, 3)))]
    count = random.choice((None, 1, 5))
    try:
        corpus = open_corpus([str(file) for file in files], None, random.choice(("text", "text", "other", "")))
        blocks = make_blocks(corpus, Letters(), size=random.choice((1, 16)), count=count, bos_id=None)
    except ZlossError:
        return
    except Exception as error:
        content = [file.read_bytes()[:200] if file.is_file() else None for file in files]
        raise BrokenContractError(f"{[f.name for f in files]} {content}\n{traceback.format_exc()}") from error
    if count is not None and blocks.count != count:
        raise BrokenContractError(f"{blocks.count} blocks instead of {count}")


def _file(random: Random, folder: Path, number: int) -> Path:
    kind = random.choice(("txt", "jsonl", "jsonl", "parquet", "parquet", "missing", "folder"))
    file = folder / f"text{number}.{kind}"
    if kind == "missing":
        return file
    if kind == "folder":
        file.mkdir()
        return file
    if kind == "txt":
        file.write_bytes(_text(random).encode("utf-8", errors="surrogatepass"))
    elif kind == "jsonl":
        lines = [_line(random) for _ in range(random.randrange(0, 5))]
        file.write_bytes(random.choice(("\n", "\r\n", "\n\n")).join(lines).encode("utf-8", errors="surrogatepass"))
    else:
        _write_parquet(file, random)
    if random.random() < 0.3:
        file.write_bytes(damaged_bytes(file.read_bytes(), random))
    return file


def _text(random: Random) -> str:
    return "".join(random.choice(PIECES) for _ in range(random.randrange(0, 30)))


def _line(random: Random) -> str:
    if random.random() < 0.1:
        return random.choice(("", "{", "[" * 50_000, "null", '"text"', '{"text": NaN}', "[1]"))
    value = _text(random) if random.random() < 0.8 else random.choice((None, 1, 2.5, ["a"], {"b": "c"}))
    return json.dumps({random.choice(("text", "text", "other", "x")): value}, ensure_ascii=random.random() < 0.5)


def _write_parquet(file: Path, random: Random) -> None:
    name = random.choice(("text", "text", "other"))
    if random.random() < 0.6:
        values: list[Any] = [_text(random).replace("\ud800", "") for _ in range(random.randrange(0, 4))]
        column = pa.array(values, type=random.choice((pa.string(), pa.large_string())))
        column = column.dictionary_encode() if random.random() < 0.3 else column
    else:
        column = pa.array([random.choice(VALUES)] * random.randrange(0, 3))
    parquet.write_table(pa.table({name: column}), file)
