"""Models, methods and texts by the paper's names, and where they come from.

A text file is identified by its sha256. The user states the source of a text that is not known here.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from zloss.errors import InputError
from zloss.results.options import CorpusName
from zloss.results.reproduction import TextSource as TextSource
from zloss.text import text_bytes

CE, CENTERED_HEAD, STANDARD = "CE baseline", "Centered head", "Standard Z-loss"
FACTORIZED, GAIN_AWARE, CENTERED = "Factorized Z-loss", "Gain-aware Z-loss", "Centered Z-loss"
METHODS = {
    CE: "ce",
    CENTERED_HEAD: "centered-head",
    STANDARD: "standard",
    FACTORIZED: "factorized",
    GAIN_AWARE: "gain-aware",
    CENTERED: "centered",
}
RAW_METHODS = (STANDARD, FACTORIZED, GAIN_AWARE)
"""Methods that penalize the log-normalizer of the raw logits."""
MODEL_IDS = {
    "DistilGPT-2": "distilgpt2",
    "GPT-2": "gpt2",
    "GPT-2 Medium": "gpt2-medium",
    "GPT-2 Large": "gpt2-large",
    "Pythia-160M": "EleutherAI/pythia-160m-deduped",
    "Pythia-410M": "EleutherAI/pythia-410m-deduped",
    "Pythia-1B": "EleutherAI/pythia-1b-deduped",
}
"""The paper's names and the checkpoints; it states the ids of the Pythia models only."""


def papers_model(word: str) -> tuple[str | None, str]:
    """(the paper's name of a model that the user names, its folder): NAME=FOLDER, or NAME for the one on the hub.

    The name is None for another model: a folder, a file or an id. An existing path is never a name.
    """
    name, equals, folder = word.partition("=")
    names = {alias.lower(): known for known, identifier in MODEL_IDS.items() for alias in (known, identifier)}
    known = names.get(name.lower()) if equals or not Path(word).exists() else None
    if equals and known is None and not Path(word).exists():
        have = ", ".join(MODEL_IDS)
        raise InputError(f"`models` has {word!r}: {name!r} is not a model of the paper; it has {have}.")
    return known, folder


def printed_name(word: str) -> str:
    """The name in a table of a model that is not one of the paper's."""
    return Path(word).name if Path(word).exists() else word


WIKITEXT, FINEWEB = "WikiText-103", "FineWeb-Edu"
"""The paper's corpora, by its names."""
CORPUS_NAMES: dict[str, CorpusName] = {WIKITEXT: "wikitext-103", FINEWEB: "fineweb-edu"}


WIKITEXT_VALIDATION = TextSource(
    name="wikitext-103",
    title="WikiText-103 raw validation split",
    source="https://huggingface.co/datasets/Salesforce/wikitext, configuration wikitext-103-raw-v1, split validation",
    licence="CC BY-SA",
    corpus=WIKITEXT,
)
WIKITEXT_TRAIN = replace(
    WIKITEXT_VALIDATION,
    title="WikiText-103 raw training split",
    source="https://huggingface.co/datasets/Salesforce/wikitext, configuration wikitext-103-raw-v1, split train",
)
FINEWEB_SAMPLE = TextSource(
    name="fineweb-edu",
    title="FineWeb-Edu sample-10BT, streamed",
    source="https://huggingface.co/datasets/HuggingFaceFW/fineweb-edu, configuration sample-10BT, split train",
    licence="ODC-BY 1.0",
    corpus=FINEWEB,
)
WIKIPEDIA_2006 = TextSource(
    name="wikipedia",
    title="English Wikipedia prose of 2006, markup stripped",
    source="https://en.wikipedia.org, articles as of 2006",
    licence="CC BY-SA",
)
BY_CORPUS = {"wikitext-103": WIKITEXT_VALIDATION, "fineweb-edu": FINEWEB_SAMPLE}
BY_SHA256 = {
    # The articles of the split in one file.
    "4cd0f6876d07a413aa911261ff6d363c72d757d47f0fdd6015702014c89cb9c7": WIKITEXT_VALIDATION,
    # 12 MB to train on, 1.2 MB to validate on.
    "d87636c08f0984e93bf70800520e12defade3e28449a9160b26f5bb55d353fa5": WIKIPEDIA_2006,
    "02c51f8415d87d78a2e9d0e90d256794bad575cc3c2140431b78299b1bfd1ab7": WIKIPEDIA_2006,
}


def text_sources(texts: Sequence[str], corpus: str | None, stated: str = "") -> tuple[TextSource, ...]:
    """The sources of an audit's text; `stated` is what the user says about files that are not known here."""
    if texts:
        return tuple(_file(Path(text), stated) for text in texts)
    return (BY_CORPUS[corpus],) if corpus in BY_CORPUS else (_pydoc(),)


def training_sources(texts: Sequence[str], corpus: str | None, stated: str = "") -> tuple[TextSource, ...]:
    """The sources of a training run: WikiText-103 has a separate split for validation, other texts are cut in two."""
    sources = text_sources(texts, corpus, stated)
    return (WIKITEXT_TRAIN, *sources) if sources == (WIKITEXT_VALIDATION,) else sources


def _file(path: Path, stated: str) -> TextSource:
    digest = file_sha256(path)
    known = BY_SHA256.get(digest)
    if known is not None:
        return TextSource(path.name, known.title, known.source, known.licence, digest, known.corpus)
    source = stated or "not stated: say where it comes from with --text-source"
    return TextSource(path.name, path.name, source, "see its source", digest)


def _pydoc() -> TextSource:
    from zloss.text import pydoc_topics

    return TextSource(
        name="pydoc",
        title=f"documentation topics of CPython {platform.python_version()}",
        source="the module pydoc_data.topics of every CPython; its text changes a little between versions",
        licence="PSF-2.0",
        sha256=hashlib.sha256("\n\n".join(pydoc_topics()).encode()).hexdigest(),
    )


def file_sha256(text: Path) -> str:
    """The checksum of a text file; an error that names it if it cannot be read."""
    return hashlib.sha256(text_bytes(text)).hexdigest()
