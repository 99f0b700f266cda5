"""The measured quantities by key: symbol, unit, one sentence of meaning, scaling, label in the paper.

Pages, terminal tables, Markdown, figures and tooltips take their symbols from here. A quantity is added to the table of its
family; `tests/results/test_quantities.py` fails on a number of a written file that has no entry.
"""

from __future__ import annotations

from collections.abc import Iterable

from zloss.results.quantities.definition import Definition
from zloss.results.quantities.gradient import GRADIENT, TIED_PATHS
from zloss.results.quantities.head import HEAD, HEADLINE, PRECISION, TEXT
from zloss.results.quantities.implementation import OVERFLOWS, SOURCE, UPDATES
from zloss.results.quantities.reproduction import REPRODUCTION
from zloss.results.quantities.router import ROUTER
from zloss.results.quantities.steps import ADAM_SAMPLE, ADAM_STATE, EVENTS, RUN, STEP, TAILS
from zloss.results.quantities.tokens import SPECTRUM, TOKENS

__all__ = ["BY_KEY", "HEAD", "HEADLINE", "QUANTITIES", "Definition", "define", "symbol", "titled"]

QUANTITIES = (
    *HEAD,
    *PRECISION,
    *TEXT,
    *TOKENS,
    *SPECTRUM,
    *GRADIENT,
    *TIED_PATHS,
    *TAILS,
    *EVENTS,
    *ADAM_STATE,
    *RUN,
    *STEP,
    *ADAM_SAMPLE,
    *ROUTER,
    *SOURCE,
    *UPDATES,
    *OVERFLOWS,
    *REPRODUCTION,
)

BY_KEY = {definition.key: definition for definition in QUANTITIES}

_COORDINATES = ("raw", "centered", "whole_model")


def define(path: str) -> Definition | None:
    """The entry of a dotted path in a written file; the coordinate in it does not matter.

    >>> define("heads.raw.a_p_99").symbol, define("gradient.centered.r_z").symbol, define("source.cosine").better
    ('A_p^99', 'R_Z', 'higher')
    """
    parts = [part for part in path.split(".") if part not in _COORDINATES]
    suffixes = (".".join(parts[start:]) for start in range(len(parts)))
    return next((BY_KEY[suffix] for suffix in suffixes if suffix in BY_KEY), None)


def symbol(key: str) -> str:
    """How the quantity is written; a key without an entry stands for itself."""
    found = define(key)
    return key if found is None else found.symbol


def titled(keys: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """(key, symbol) of every key: the columns of a table."""
    return tuple((key, symbol(key)) for key in keys)
