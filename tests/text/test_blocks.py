"""Blocks: every prediction exactly once, whatever the corpus looks like; characters and types that break careless readers."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch

from tests.tiny_models import save_tokenizer
from zloss.errors import CorpusError, UnknownNameError
from zloss.text import Corpus, make_blocks, open_corpus, pydoc_topics, rows_as_blocks


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


TEXT = "\n\n".join(pydoc_topics()[:6])


def corpus(text: str = TEXT) -> Corpus:
    return Corpus("test", iter([text]))


@pytest.mark.parametrize("size", [1, 7, 64])
def test_tokens_are_predicted_exactly_once(tokenizer: Any, size: int) -> None:
    ids = tokenizer(TEXT, add_special_tokens=False).input_ids
    blocks = make_blocks(corpus(), tokenizer, size=size, count=None, bos_id=None)
    assert blocks.count == (len(ids) - 1) // size
    targets = blocks.targets(0, blocks.count).reshape(-1)
    inputs = blocks.inputs(0, blocks.count).reshape(-1)
    assert targets.tolist() == ids[1 : blocks.predictions + 1]
    assert inputs.tolist() == ids[: blocks.predictions]


def test_a_part_of_rows_has_these_rows() -> None:
    rows = torch.arange(30).view(6, 5)
    part = rows_as_blocks(rows, "rows").part(2, 5)
    inputs, targets = part.batch(slice(None))
    assert (part.count, part.offset) == (3, 2)
    assert torch.equal(inputs, rows[2:5, :-1])
    assert torch.equal(targets, rows[2:5, 1:])


def test_a_long_text_is_tokenized_only_as_far_as_needed_and_no_differently(tokenizer: Any) -> None:
    whole = tokenizer(TEXT * 20, add_special_tokens=False).input_ids
    blocks = make_blocks(corpus(TEXT * 20), tokenizer, size=50, count=11, bos_id=None, offset=3)
    assert blocks.stream.tolist() == whole[150 : 150 + 551]


def test_bos_precedes_every_block_and_is_not_counted(tokenizer: Any) -> None:
    blocks = make_blocks(corpus(), tokenizer, size=16, count=4, bos_id=0)
    assert blocks.inputs(1, 3).shape == (2, 17)
    assert (blocks.inputs(1, 3)[:, 0] == 0).all()
    assert torch.equal(
        blocks.inputs(1, 3)[:, 1:], make_blocks(corpus(), tokenizer, size=16, count=4, bos_id=None).inputs(1, 3)
    )
    hidden = torch.arange(34).view(2, 17, 1)
    assert blocks.counted(hidden).shape == (2, 16, 1)


@pytest.mark.parametrize(
    ("text", "size", "count", "said"),
    [
        ("a few words only " * 30, 64, 50, r"give \d+ blocks of 64"),
        ("a few words", 64, None, r"give 0 blocks of 64, but 1 are needed: use a smaller"),
        ("", 64, None, "is empty"),
        (TEXT, 0, 1, "size ≥ 1"),
    ],
)
def test_too_short_a_text_says_how_many_blocks_it_has(
    tokenizer: Any, text: str, size: int, count: int | None, said: str
) -> None:
    with pytest.raises(CorpusError, match=said):
        make_blocks(corpus(text), tokenizer, size=size, count=count, bos_id=None)


def test_files_of_every_format_hold_the_same_text(tokenizer: Any, tmp_path: Path) -> None:
    topics = pydoc_topics()[:5]
    plain, lines, table = (tmp_path / name for name in ("a.txt", "a.jsonl", "a.parquet"))
    plain.write_text("\n\n".join(topics))
    lines.write_text("\n".join(json.dumps({"body": document}) for document in topics))
    parquet.write_table(pa.table({"body": topics}), table)
    texts = []
    for path in (plain, lines, table):
        opened = open_corpus([str(path)], None, text_field="body")
        texts.append(opened.separator.join(opened.documents))
        assert opened.provenance["files"][0]["name"] == path.name
    assert texts[0] == texts[1] == texts[2]
    both = open_corpus([str(plain), str(lines)], None, text_field="body")
    assert both.separator.join(both.documents) == texts[0] + "\n\n" + texts[0]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", "Käse".encode("latin1"), "UTF-8"),
        ("a.jsonl", b'{"text": "a"}\nnot json\n', "line 2 is not JSON"),
        ("a.jsonl", b"[" * 100_000, "line 1 is not JSON"),
        ("a.jsonl", b'{"body": "a"}\n', "`text_field`"),
        ("a.jsonl", b'{"text": "a"}\n 5\n', 'line 2 is 5, but every line .* an object with the text .*{"text": "..."}'),
        ("a.jsonl", b'{"text": "\\ud83d\\ude00"}\n{"text": "\\ud83d"}\n', "line 2 contains half of a surrogate pair"),
        ("a.parquet", b"PAR1 but not really", "parquet"),
    ],
    ids=[
        "latin1",
        "broken",
        "deep nesting was a traceback",
        "other field",
        "a number was told to set `text_field`",
        "half a surrogate pair",
        "fake parquet",
    ],
)
def test_texts_that_cannot_be_read(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CorpusError, match=said):
        documents(tmp_path / name)


@pytest.mark.parametrize(
    ("values", "kind"),
    [([1, 2], "int64"), ([[1.0]], "list"), ([b"x"], "binary"), ([{"a": "b"}], "struct"), ([True], "bool")],
)
def test_a_parquet_column_without_text_is_refused(tmp_path: Path, values: list[Any], kind: str) -> None:
    """Numbers and lists were audited as what Python prints of them."""
    parquet.write_table(pa.table({"text": values}), tmp_path / "a.parquet")
    with pytest.raises(CorpusError, match=f"holds {kind}.*not text: set `text_field`"):
        documents(tmp_path / "a.parquet")


def test_corpora_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="No such file"):
        open_corpus([str(tmp_path / "missing.txt")], None)
    with pytest.raises(UnknownNameError, match="fineweb-edu"):
        open_corpus([], "fineweb")
    with pytest.raises(CorpusError, match="cannot be combined"):
        open_corpus(["a.txt"], "pydoc")


def documents(file: Path) -> list[str]:
    return list(open_corpus([str(file)], None).documents)


def test_separators_inside_json_strings_do_not_break_lines(tmp_path: Path) -> None:
    """`splitlines` cut the line inside the string, and the rest was "not JSON"."""
    texts = ["one\u2028two", "three\u0085four", "five\x0bsix\x1cseven", "eight\r"]
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")
    assert documents(tmp_path / "a.jsonl") == texts


def test_every_kind_of_parquet_text_is_read(tmp_path: Path) -> None:
    plain = pa.array(["a", None, "b"])
    for number, column in enumerate((plain, plain.cast(pa.large_string()), plain.dictionary_encode())):
        file = tmp_path / f"{number}.parquet"
        parquet.write_table(pa.table({"text": column}), file)
        assert documents(file) == ["a", "b"]


def fed(pipe: Path, text: str) -> Path:
    """A named pipe into which `text` is written once."""
    os.mkfifo(pipe)
    threading.Thread(target=pipe.write_text, args=(text,), daemon=True).start()
    return pipe


def test_a_pipe_is_read_once(tmp_path: Path) -> None:
    """It was read for its checksum, then again for its text: a named pipe waited forever, `<(zcat text.gz)` was empty."""
    pipe = fed(tmp_path / "pipe", "from a pipe")
    opened = open_corpus([str(pipe)], None)
    assert list(opened.documents) == ["from a pipe"]
    assert opened.provenance["files"][0]["sha256"] == hashlib.sha256(b"from a pipe").hexdigest()
    # A tokenizer is trained on the text before the runs read it.
    assert documents(pipe) == ["from a pipe"]
    # The same through a descriptor, as process substitution passes it.
    reader, writer = os.pipe()
    os.write(writer, b"from a process")
    os.close(writer)
    assert documents(Path(f"/dev/fd/{reader}")) == ["from a process"] == documents(Path(f"/dev/fd/{reader}"))
    os.close(reader)


def test_line_ends_of_a_text_are_those_of_a_file_opened_as_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\rthree\n")
    assert documents(tmp_path / "a.txt") == ["one\ntwo\nthree\n"]


def test_a_panic_while_encoding_is_an_error_of_one_sentence(tmp_path: Path) -> None:
    """A panic of tokenizers, here of a regular expression that backtracks too far, is not an `Exception`."""
    from transformers import AutoTokenizer

    save_tokenizer(tmp_path)
    file = tmp_path / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["normalizer"] = {"type": "Replace", "pattern": {"Regex": "(x+x+)+y"}, "content": "z"}
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(
        CorpusError, match=r"the tokenizer cannot encode the text 'test' .*retry-limit.*: use another text"
    ):
        make_blocks(corpus("x" * 500), AutoTokenizer.from_pretrained(tmp_path), size=8, count=1, bos_id=None)
