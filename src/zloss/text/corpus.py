"""Text for audits and runs: files, two public corpora, and an English text that ships with every CPython.

A corpus is an iterator of documents; blocks.py turns them into one token stream.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zloss.errors import CorpusError, MissingDependencyError, UnknownNameError, first_line
from zloss.results.reading import json_lines

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
    """The files `texts` if there are any, else the named corpus, else the topics of the Python documentation."""
    if texts and corpus:
        raise CorpusError(f"`texts` and `corpus` exclude each other, but both were given ({corpus!r}).")
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
    # Its rows are the lines of one file, with their line breaks.
    return Corpus(WIKITEXT, rows, separator="", provenance={"dataset": "Salesforce/wikitext", "split": split})


def pydoc_topics() -> list[str]:
    """The documentation topics of this Python, in the order of their names."""
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


def _files(paths: Sequence[Path], text_field: str) -> Corpus:
    provenance: dict[str, Any] = {"files": []}
    for path in paths:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise CorpusError(f"cannot read the text {path}: {error.strerror}.") from error
        record = {"name": path.name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        provenance["files"].append(record)
    name = " + ".join(path.name for path in paths)
    return Corpus(name, _read_all(paths, text_field), provenance=provenance)


def _read_all(paths: Sequence[Path], text_field: str) -> Iterator[str]:
    readers = {".jsonl": _read_jsonl, ".parquet": _read_parquet}
    for path in paths:
        reader = readers.get(path.suffix.lower())
        if reader is None:
            yield _decode(path)
        else:
            yield from reader(path, text_field)


def _decode(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CorpusError(
            f"{path} is not UTF-8 text (byte {error.start}): convert it first, e.g. `iconv -f latin1 -t utf-8`."
        ) from error


def _read_jsonl(path: Path, text_field: str) -> Iterator[str]:
    for number, line in enumerate(json_lines(_decode(path)), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise CorpusError(f"{path} line {number} is not JSON: {first_line(error)}.") from error
        if not isinstance(record, dict) or not isinstance(record.get(text_field), str):
            keys = sorted(record) if isinstance(record, dict) else type(record).__name__
            raise CorpusError(
                f"{path} line {number} has no text field {text_field!r} (it has {keys}): set `text_field`."
            )
        text = record[text_field]
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            raise CorpusError(
                f"{path} line {number} holds half of a surrogate pair (an escape such as \\ud83d alone), which is no character: "
                "repair or remove the line."
            )
        yield text


def _read_parquet(path: Path, text_field: str) -> Iterator[str]:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise MissingDependencyError("pyarrow", "reading a parquet file", "audit") from error
    try:
        table = parquet.ParquetFile(path)
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
