"""Text for audits and runs: corpora (files, public data sets, text shipped with CPython), tokenized and cut into blocks.

Documents become one token stream without special tokens. Block i reads tokens [i·B, (i+1)·B) and predicts tokens
[i·B+1, (i+1)·B+1), so every prediction is counted exactly once. With a BOS the input of each block has one more token in
front, the BOS, and the prediction at its position is not counted.
"""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zloss.errors import CorpusError, InputError, MissingDependencyError, UnknownNameError, first_line
from zloss.results.io import json_lines

PYDOC, WIKITEXT = "pydoc", "wikitext-103"
CORPORA = {
    PYDOC: "the English of the Python documentation topics that ship with CPython",
    WIKITEXT: "the validation split of WikiText-103 (raw), through `datasets`",
    "fineweb-edu": "FineWeb-Edu sample-10BT, streamed through `datasets`",
}


@dataclass(frozen=True)
class Corpus:
    """Documents in order, the separator between them, and the provenance of the text."""

    name: str
    documents: Iterator[str]
    separator: str = "\n\n"
    provenance: dict[str, Any] = field(default_factory=dict)


def open_corpus(texts: Sequence[str], corpus: str | None, text_field: str = "text") -> Corpus:
    """The files in `texts` if there are any, else the named corpus, else the topics of the Python documentation."""
    if texts and corpus:
        raise CorpusError(f"`texts` and `corpus` cannot be combined, but both were given ({corpus!r}).")
    if texts:
        return _files([Path(text) for text in texts], text_field)
    name = corpus or PYDOC
    if name == PYDOC:
        return Corpus(PYDOC, iter(pydoc_topics()))
    if name == WIKITEXT:
        return wikitext("validation")
    if name == "fineweb-edu":
        documents = _dataset("HuggingFaceFW/fineweb-edu", "sample-10BT", "train")
        return Corpus(name, documents, provenance={"dataset": "HuggingFaceFW/fineweb-edu", "sample": "sample-10BT"})
    raise UnknownNameError("corpus", name, CORPORA)


def wikitext(split: str) -> Corpus:
    """A split of WikiText-103 (raw), streamed."""
    rows = _dataset("Salesforce/wikitext", "wikitext-103-raw-v1", split)
    # The rows are the lines of one file, including line breaks.
    return Corpus(WIKITEXT, rows, separator="", provenance={"dataset": "Salesforce/wikitext", "split": split})


def pydoc_topics() -> list[str]:
    """The documentation topics of this Python, sorted by name."""
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


def _files(paths: Sequence[Path], text_field: str) -> Corpus:
    contents = [(path, text_bytes(path)) for path in paths]
    files = [
        {"name": path.name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for path, content in contents
    ]
    name = " + ".join(path.name for path in paths)
    return Corpus(name, _documents(contents, text_field), provenance={"files": files})


_PIPES: dict[tuple[int, int], bytes] = {}
"""What was read from pipes, by device and inode."""


def text_bytes(path: Path) -> bytes:
    """The content of a file. A pipe can be read only once, so what it held is kept for the next run or audit of its text."""
    try:
        status = path.stat()
        if not stat.S_ISFIFO(status.st_mode):
            return path.read_bytes()
        key = status.st_dev, status.st_ino
        if key not in _PIPES:
            _PIPES[key] = path.read_bytes()
        return _PIPES[key]
    except OSError as error:
        raise CorpusError(f"cannot read the text {path}: {error.strerror}.") from error


def _documents(contents: list[tuple[Path, bytes]], text_field: str) -> Iterator[str]:
    """The documents of all files; the content of a file is released once it is decoded."""
    while contents:
        path, content = contents.pop(0)
        kind = path.suffix.lower()
        if kind == ".parquet":
            yield from _read_parquet(path, content, text_field)
            continue
        try:
            # Line ends as in a file that is opened as text.
            text = content.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
        except UnicodeDecodeError as error:
            raise CorpusError(
                f"{path} is not UTF-8 text (byte {error.start}): convert it first, e.g. `iconv -f latin1 -t utf-8`."
            ) from error
        del content
        yield from _read_jsonl(path, text, text_field) if kind == ".jsonl" else (text,)


def _read_jsonl(path: Path, content: str, text_field: str) -> Iterator[str]:
    for number, line in enumerate(json_lines(content), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise CorpusError(f"{path} line {number} is not JSON: {first_line(error)}.") from error
        if not isinstance(record, dict):
            raise CorpusError(
                f"{path} line {number} is {line.strip()[:40]}, but every line is expected to be an object with the text in "
                f'a field: {{"{text_field}": "..."}}.'
            )
        if not isinstance(record.get(text_field), str):
            raise CorpusError(
                f"{path} line {number} has no text field {text_field!r} (it has {sorted(record)}): set `text_field`."
            )
        text = record[text_field]
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            raise CorpusError(
                f"{path} line {number} contains half of a surrogate pair (an escape such as \\ud83d alone), which is not a "
                "character: repair or remove the line."
            )
        yield text


def _read_parquet(path: Path, content: bytes, text_field: str) -> Iterator[str]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise MissingDependencyError("pyarrow", "reading a parquet file", "audit") from error
    try:
        table = parquet.ParquetFile(pa.BufferReader(content))
        columns = table.schema_arrow.names
        if text_field not in columns:
            raise CorpusError(f"{path} has no text column {text_field!r} (it has {columns}): set `text_field`.")
        kind = table.schema_arrow.field(text_field).type
        kind = getattr(kind, "value_type", kind) if str(kind).startswith("dictionary") else kind
        if str(kind) not in ("string", "large_string", "string_view"):
            raise CorpusError(f"the column {text_field!r} of {path} holds {kind}, not text: set `text_field`.")
        for batch in table.iter_batches(columns=[text_field]):
            yield from (text for text in batch.column(0).to_pylist() if text is not None)
    except CorpusError:
        raise
    except Exception as error:
        raise CorpusError(f"{path} cannot be read as parquet: {first_line(error)}.") from error


def _dataset(path: str, name: str, split: str) -> Iterator[str]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise MissingDependencyError("datasets", f"the corpus {path}", "audit") from error
    try:
        for record in load_dataset(path, name, split=split, streaming=True):
            yield record["text"]
    except Exception as error:
        raise CorpusError(
            f"the {split} split of {path} could not be fetched ({first_line(error)}): pass a local file in `texts` instead."
        ) from error


@dataclass(frozen=True)
class Blocks:
    """`count` blocks of `size` predictions over `stream`."""

    stream: Tensor
    """count·size + 1 tokens, or count·(size + 1) if the blocks are separate."""
    size: int
    count: int
    bos_id: int | None
    offset: int
    """Blocks skipped at the start of the text."""
    name: str = "unnamed text"
    """Name of the text."""
    separate: bool = False
    """False: the last target of a block is the first input of the next one. True: blocks share no token."""

    @property
    def predictions(self) -> int:
        return self.count * self.size

    def first(self, count: int) -> Blocks:
        """The first `count` blocks, or all if there are fewer."""
        return self.part(0, min(count, self.count))

    def part(self, start: int, stop: int) -> Blocks:
        """Blocks `start` … `stop` − 1."""
        stride = self.size + self.separate
        stream = self.stream[start * stride : (stop - 1) * stride + self.size + 1].clone()
        return replace(self, stream=stream, count=stop - start, offset=self.offset + start)

    def batch(self, index: slice | Tensor) -> tuple[Tensor, Tensor]:
        """Input ids [B, size (+1 with BOS)] and target ids [B, size] of the blocks with these indices."""
        if not self.count:
            return self.stream.new_zeros(0, self.size + (self.bos_id is not None)), self.stream.new_zeros(0, self.size)
        rows = self.stream.unfold(0, self.size + 1, self.size + self.separate)[index]
        inputs, targets = rows[:, :-1], rows[:, 1:]
        if self.bos_id is not None:
            inputs = torch.cat([inputs.new_full((len(rows), 1), self.bos_id), inputs], dim=1)
        return inputs, targets

    def inputs(self, start: int, stop: int) -> Tensor:
        """Input ids of blocks `start` … `stop` − 1."""
        return self.batch(slice(start, stop))[0]

    def targets(self, start: int, stop: int) -> Tensor:
        """Target ids [stop − start, size]."""
        return self.batch(slice(start, stop))[1]

    def counted(self, hidden: Tensor) -> Tensor:
        """[B, N, …] without the position of the BOS."""
        return hidden if self.bos_id is None else hidden[:, 1:]

    def fingerprint(self) -> str:
        """Identity of the tokens and their blocks; it must match when an audit is resumed."""
        return hashlib.sha256(self.stream.numpy().tobytes() + repr((self.size, self.bos_id)).encode()).hexdigest()[:16]


def rows_as_blocks(rows: Blocks | Tensor | Sequence[Sequence[int]], argument: str) -> Blocks:
    """Blocks as they are, or rows [B, N + 1] of token ids, each one block of N predictions; `argument` is named in errors."""
    if isinstance(rows, Blocks):
        return rows
    try:
        ids = torch.as_tensor(rows).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"`{argument}` is expected to be rows with the same number of token ids ({error}).") from error
    if ids.dim() != 2 or ids.shape[0] < 1 or ids.shape[1] < 2 or ids.is_floating_point():
        raise InputError(
            f"`{argument}` is expected to be token ids [B, N + 1] with B ≥ 1 and N ≥ 1, but has shape "
            f"{list(ids.shape)} and dtype {ids.dtype}: pass `zloss.validation_blocks(file, tokenizer)` for a text."
        )
    if (least := int(ids.min())) < 0:
        raise InputError(
            f"`{argument}` holds the id {least}: every position is read and predicted, so pass rows without padding."
        )
    return Blocks(ids.long().flatten().clone(), ids.shape[1] - 1, ids.shape[0], None, 0, separate=True)


def make_blocks(
    corpus: Corpus,
    tokenizer: Any,
    *,
    size: int,
    count: int | None,
    bos_id: int | None,
    offset: int = 0,
    fewer: str = "use fewer blocks",
) -> Blocks:
    """The first `count` blocks after `offset`, or all; a text that is too short raises an error that states how many it has.

    `fewer`: how to ask for fewer blocks, for that error.
    """
    if size < 1 or offset < 0 or (count is not None and count < 1):
        raise CorpusError(f"blocks need a size ≥ 1, an offset ≥ 0 and a count ≥ 1, but got {size}, {offset}, {count}.")
    needed = None if count is None else (offset + count) * size + 1
    pieces: list[np.ndarray[Any, Any]] = []
    have = 0
    for index, document in enumerate(corpus.documents):
        text = document if index == 0 else corpus.separator + document
        try:
            pieces.append(_encode(text, tokenizer, None if needed is None else needed - have))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of tokenizers, which is written in Rust, is not an `Exception`
            raise CorpusError(
                f"the tokenizer cannot encode the text {corpus.name!r} ({first_line(error)}): use another text, or repair "
                "the tokenizer."
            ) from error
        have += len(pieces[-1])
        if needed is not None and have >= needed:
            break
    if not have:
        raise CorpusError(f"the text {corpus.name!r} is empty: use a text with more than {size} tokens.")
    available = (have - 1) // size
    least = offset + (count or 1)
    if available < least:
        fewer = f"{fewer} (it has {available}), a" if available else "use a"
        raise CorpusError(
            f"the text {corpus.name!r} has {have} tokens, which give {available} blocks of {size}, but {least} are needed: "
            f"{fewer} smaller block size, or a longer text."
        )
    stop = available if count is None else offset + count
    stream = torch.from_numpy(np.concatenate(pieces))[offset * size : stop * size + 1].clone()
    return Blocks(stream, size, stop - offset, bos_id, offset, corpus.name)


def _encode(text: str, tokenizer: Any, needed: int | None) -> np.ndarray[Any, Any]:
    """The first `needed` ids of the text, or all; a long text is tokenized only as far as needed.

    The last tokens of a tokenized prefix are dropped, because they could have merged with the text that follows.
    """
    margin = 256
    length = len(text) if needed is None else 8 * (needed + margin)
    while True:
        ids = tokenizer(text[:length], add_special_tokens=False, verbose=False).input_ids
        if length >= len(text):
            return np.asarray(ids, dtype=np.int64)
        if needed is not None and len(ids) >= needed + margin:
            return np.asarray(ids[:needed], dtype=np.int64)
        length *= 2
