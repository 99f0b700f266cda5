"""Lines of a table, the paper's or ours, in one form: a claim that reads one can read the other.

A printed cell may be off by half a unit of its last digit; a measured one is taken as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal

Key = str | int | float


@dataclass(frozen=True)
class Cell:
    """A number with its rounding: the truth lies in value ± half_unit."""

    value: float
    half_unit: float = 0.0
    printed: str = ""
    """As the paper prints it; empty for a measured number."""

    @classmethod
    def of_print(cls, number: Decimal) -> Cell:
        """28.00 was rounded to hundredths, so its half unit is 0.005."""
        exponent = number.as_tuple().exponent
        assert isinstance(exponent, int)  # tables hold no NaN
        return cls(float(number), 0.5 * 10.0**exponent, str(number))

    @property
    def low(self) -> float:
        return self.value - self.half_unit

    @property
    def high(self) -> float:
        return self.value + self.half_unit


@dataclass(frozen=True)
class Line:
    """One line of a table: its key, and its numbers by column; a number that does not exist is absent, with a reason."""

    key: Mapping[str, Key]
    cells: Mapping[str, Cell]
    reasons: Mapping[str, str] = field(default_factory=dict)
    deviations: tuple[str, ...] = ()
    """What keeps the numbers from being comparable with the paper's, one sentence each; claims may still be tested."""
    beside: Mapping[str, Key] = field(default_factory=dict)
    """Key of the paper's line it is printed beside; empty: the line of the same key."""
    by_seed: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Numbers of the single runs behind the line, in the order of the seeds; for claims about every run."""

    def name(self, *, without: tuple[str, ...] = ()) -> str:
        """ "GPT-2, raw"."""
        return ", ".join(str(value) for column, value in self.key.items() if column not in without)


@dataclass(frozen=True)
class Pair:
    """The raw and the centered line of one model (and corpus)."""

    name: str
    raw: Line
    centered: Line

    @property
    def model(self) -> str:
        return str(self.raw.key.get("model", ""))

    @property
    def deviations(self) -> tuple[str, ...]:
        return self.raw.deviations


@dataclass(frozen=True)
class Table:
    """All lines of one side."""

    lines: tuple[Line, ...]

    def __iter__(self) -> Iterator[Line]:
        return iter(self.lines)

    def __len__(self) -> int:
        return len(self.lines)

    def find(self, **key: Key) -> tuple[Line, ...]:
        """Lines whose key holds all of `key`."""
        return tuple(line for line in self.lines if all(line.key.get(name) == value for name, value in key.items()))

    def pairs(self) -> tuple[Pair, ...]:
        """Raw and centered lines that agree in everything else, in the order of the raw ones."""
        found = []
        for raw in self.find(head="raw"):
            rest = {name: value for name, value in raw.key.items() if name != "head"}
            found += [
                Pair(raw.name(without=("head",)) or "the model", raw, centered)
                for centered in self.find(head="centered")
                if {name: value for name, value in centered.key.items() if name != "head"} == rest
            ]
        return tuple(found)


def cells_of(values: Mapping[str, float | None]) -> dict[str, Cell]:
    """Cells of the numbers that exist."""
    return {column: Cell(float(value)) for column, value in values.items() if value is not None}
