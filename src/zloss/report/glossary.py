"""The glossary as a document: letters, words, stages of the decision map, and every quantity under its key."""

from __future__ import annotations

from zloss.decide.stages import STAGES
from zloss.errors import InputError
from zloss.report.document import Document, Terms
from zloss.results.quantities import HEAD, LETTERS, QUANTITIES, WORDS, Definition

Entry = tuple[str, str]
"""What is explained, and the explanation."""
STAGE_NAMES: tuple[Entry, ...] = tuple(
    (stage.name, f"stage of the decision map. {stage.risk}. It looks at: {stage.trigger}.") for stage in STAGES
)


def glossary_document(words: tuple[str, ...] = ()) -> Document:
    """The entries that `words` name; without words the letters, the words and the numbers of an output head."""
    return [Terms(tuple(entries(words)))]


def entries(words: tuple[str, ...] = ()) -> list[Entry]:
    """The entries that each word names exactly, else those that have it in their name; an unknown word is an error."""
    if not words:
        return [*LETTERS, *WORDS, *map(_entry, HEAD)]
    found: list[Entry] = []
    for word in words:
        named = _exact(word) or _containing(word)
        if not named:
            raise InputError(
                f"the glossary has no {word!r}: give a symbol (μ, A_p^99), a key (p_z_999) or part of one."
            )
        # A quantity that two files hold under two keys is explained once.
        for entry in named:
            if entry[1] not in {meaning for _, meaning in found}:
                found.append(entry)
    return found


def _exact(word: str) -> list[Entry]:
    plain = [entry for entry in (*LETTERS, *WORDS, *STAGE_NAMES) if word in entry[0].replace(" or ", ", ").split(", ")]
    return plain + [_entry(quantity) for quantity in QUANTITIES if word in (quantity.key, quantity.symbol)]


def _containing(word: str) -> list[Entry]:
    part = word.lower()
    plain = [entry for entry in (*LETTERS, *WORDS, *STAGE_NAMES) if part in entry[0].lower()]
    return plain + [_entry(q) for q in QUANTITIES if part in q.key.lower() or part in q.symbol.lower()]


def _entry(quantity: Definition) -> Entry:
    name = quantity.symbol if quantity.symbol == quantity.key else f"{quantity.symbol} ({quantity.key})"
    unit = f", in {quantity.unit}" if quantity.unit else ""
    return name, f"{quantity.hint}{unit}"
