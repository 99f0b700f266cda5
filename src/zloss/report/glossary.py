"""The glossary: letters, words, stages of the decision map, and every quantity under its key."""

from __future__ import annotations

from zloss.decide.stages import STAGES
from zloss.errors import InputError
from zloss.results.quantities import BY_KEY, EXPLAINED, HEAD, LETTERS, QUANTITIES, WORDS, Definition

Entry = tuple[str, str]
"""What is explained, and the explanation."""
STAGE_NAMES: tuple[Entry, ...] = tuple(
    (stage.name, f"stage of the decision map. {stage.risk}. It looks at: {stage.trigger}.") for stage in STAGES
)


def entries(words: tuple[str, ...] = ()) -> list[Entry]:
    """The entries that each word names exactly, else those that have it in their name; an unknown word is an error.

    Without words the letters, the words, the numbers of an output head and what pages show with them.
    """
    if not words:
        return [*LETTERS, *WORDS, *map(_entry, (*HEAD, *map(BY_KEY.__getitem__, EXPLAINED)))]
    found: list[Entry] = []
    for word in words:
        named = _named(word, exact=True) or _named(word, exact=False)
        if not named:
            raise InputError(
                f"the glossary has no {word!r}: pass a symbol (μ, A_p^99), a key (p_z_999) or part of one."
            )
        # A quantity that two files hold under two keys is explained once.
        for entry in named:
            if entry[1] not in {meaning for _, meaning in found}:
                found.append(entry)
    return found


def _named(word: str, *, exact: bool) -> list[Entry]:
    """The entries with exactly this name, symbol or key; without `exact`, those that contain it, ignoring case."""

    def matches(name: str) -> bool:
        return name == word if exact else word.lower() in name.lower()

    plain = (*LETTERS, *WORDS, *STAGE_NAMES)
    found = [entry for entry in plain if any(map(matches, (entry[0], *entry[0].replace(" or ", ", ").split(", "))))]
    return found + [_entry(one) for one in QUANTITIES if matches(one.key) or matches(one.symbol)]


def _entry(quantity: Definition) -> Entry:
    name = quantity.symbol if quantity.symbol == quantity.key else f"{quantity.symbol} ({quantity.key})"
    unit = f", {'a share' if quantity.unit == 'share' else f'in {quantity.unit}'}" if quantity.unit else ""
    return name, f"{quantity.hint}{unit}"
