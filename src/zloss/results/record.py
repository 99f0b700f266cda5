"""Frozen dataclasses to plain JSON values and back, driven by their type hints; what every result file has in common.

The metadata of a field say what its type cannot: `within` the range of its numbers, `written_with` when its key is left out,
`flat` that its members are keys of its owner. A field `extra: dict[str, Any]` holds the keys that the schema does not name.
They are written next to the named keys and collected again on reading, so a file of a newer version survives a round trip.
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeVar, Union, get_args, get_origin, get_type_hints

from zloss.errors import InputError
from zloss.results.io import write_json

Record = TypeVar("Record")
ROUNDING = 1e-4
"""Slack for numbers that rounding can carry past a bound, such as the CE of a memorized text."""
_RANGE, _WRITTEN_WITH, _FLAT = "range", "written_with", "flat"


@dataclasses.dataclass(frozen=True)
class Range:
    """The numbers that a field can hold."""

    least: float
    most: float = math.inf
    rounding: float = 0.0
    """How far beyond either bound a number may lie."""

    def __contains__(self, value: float) -> bool:
        """True for NaN as well, which stands for a number that does not exist."""
        return not (value < self.least - self.rounding or value > self.most + self.rounding)

    def __str__(self) -> str:
        return f"at least {self.least:g}" if self.most == math.inf else f"from {self.least:g} to {self.most:g}"


def within(least: float, most: float = math.inf, *, rounding: float = 0.0) -> Mapping[str, Range]:
    """Metadata of a field whose numbers lie in this range, those inside its lists and dicts too."""
    return {_RANGE: Range(least, most, rounding)}


NOT_NEGATIVE, SHARE = within(0), within(0, 1)
COMPUTED_SHARE, COSINE = within(0, 1, rounding=ROUNDING), within(-1, 1, rounding=ROUNDING)
NATS = within(0, rounding=ROUNDING)
"""A cross-entropy or an entropy."""


def range_of(field: dataclasses.Field[Any]) -> Range | None:
    """The range that the metadata of a field states; None if it states none."""
    return field.metadata.get(_RANGE)


def written_with(name: str) -> Mapping[str, str]:
    """Metadata of a field whose key is left out of the file where the field `name` is None.

    A field that names itself is left out where it is None itself.
    """
    return {_WRITTEN_WITH: name}


def flat(prefix: str = "") -> Mapping[str, str]:
    """Metadata of a record, or of a dict whose keys begin with `prefix`, whose keys are among those of its owner.

    A record that may be None is None if the file has none of its keys.
    """
    return {_FLAT: prefix}


def to_plain(value: Any, *, reasons: dict[str, str] | None = None, path: str = "") -> Any:
    """`value` as dicts, lists and JSON scalars. NaN and ±inf become None, which `reasons` explains by dotted path."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        out: dict[str, Any] = {}
        for field, hint in _fields(type(value)):
            item = getattr(value, field.name)
            if getattr(value, field.metadata.get(_WRITTEN_WITH, ""), ...) is None:
                continue
            if _FLAT not in field.metadata and not _is_extra(field, hint):
                out[field.name] = to_plain(item, reasons=reasons, path=_join(path, field.name))
            elif item is not None:
                out |= to_plain(item, reasons=reasons, path=path)
        return out
    if isinstance(value, dict):
        return {str(k): to_plain(v, reasons=reasons, path=_join(path, str(k))) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(v, reasons=reasons, path=_join(path, str(i))) for i, v in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        if reasons is not None:
            reasons.setdefault(path, f"the value was {value}")
        return None
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if hasattr(value, "tolist"):  # arrays and tensors
        return to_plain(value.tolist(), reasons=reasons, path=path)
    raise InputError(
        f"`{path}` holds a {type(value).__name__}, which a result cannot contain: use numbers, text, lists or dicts."
    )


def from_plain(record_type: type[Record], data: Any, *, path: str = "") -> Record:
    """The dataclass `record_type` from its plain form. A missing key or one of the wrong type is named by its path."""
    if not isinstance(data, dict):
        raise _mismatch(path, "an object", data)
    found: Record = _take(record_type, dict(data), path)
    return found


def _take(record_type: Any, data: dict[str, Any], path: str) -> Any:
    """The record of the keys that it names, which are removed from `data`; its `extra` has the others."""
    values: dict[str, Any] = {}
    for field, hint in _fields(record_type):
        name, where, prefix = field.name, _join(path, field.name), field.metadata.get(_FLAT)
        if prefix:
            members = {key: data.pop(key) for key in tuple(data) if key.startswith(prefix)}
            values[name] = _read(hint, members, path, range_of(field))
        elif prefix is not None:
            part: Any = next(one for one in (hint, *get_args(hint)) if dataclasses.is_dataclass(one))
            absent = part is not hint and data.keys().isdisjoint(one.name for one, _ in _fields(part))
            values[name] = None if absent else _take(part, data, path)
        elif name in data and not _is_extra(field, hint):
            values[name] = _read(hint, data.pop(name), where, range_of(field))
        elif field.default is field.default_factory is dataclasses.MISSING:
            raise InputError(f"`{where}` is missing: this is not a complete {record_type.__name__}.")
    if any(_is_extra(field, hint) for field, hint in _fields(record_type)):
        values["extra"] = data
    return record_type(**values)


@cache
def _fields(record_type: Any) -> tuple[tuple[dataclasses.Field[Any], Any], ...]:
    """Every field with its type."""
    hints = get_type_hints(record_type)
    return tuple((field, hints[field.name]) for field in dataclasses.fields(record_type))


def _is_extra(field: dataclasses.Field[Any], hint: Any) -> bool:
    """Whether a field holds the keys that the schema does not name; `extra` of another type is a key like the others."""
    return field.name == "extra" and hint == dict[str, Any]


def _read(hint: Any, value: Any, path: str, bounds: Range | None = None) -> Any:
    """`value` as the type `hint`, its numbers within `bounds`; otherwise an error that names its path."""
    if hint in (float, int):
        return _number(hint, value, path, bounds)
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        (inner,) = (arg for arg in args if arg is not types.NoneType)
        return None if value is None else _read(inner, value, path, bounds)
    if dataclasses.is_dataclass(hint):
        return from_plain(hint, value, path=path)  # type: ignore[arg-type]
    if origin is tuple and isinstance(value, (list, tuple)):
        if args[-1] is not Ellipsis and len(value) != len(args):
            raise _mismatch(path, f"a list of {len(args)} values", value)
        return tuple(_read(args[0], item, _join(path, str(i)), bounds) for i, item in enumerate(value))
    if origin is dict and isinstance(value, dict):
        return {name: _read(args[1], item, _join(path, name), bounds) for name, item in value.items()}
    if hint is Any or (origin is Literal and value in args) or (origin is None and isinstance(value, hint)):
        return value
    expected = {tuple: "a list", dict: "an object", Literal: f"one of {list(args)}", str: "text", bool: "true or false"}
    raise _mismatch(path, expected[origin or hint], value)


def _number(kind: type[int] | type[float], value: Any, path: str, bounds: Range | None) -> float:
    """A number of a file; an integer beyond the range of a float is not one."""
    try:
        found = kind(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
    except (OverflowError, ValueError):
        found = None
    if found is None or (kind is int and found != value):
        raise _mismatch(path, "a whole number" if kind is int else "a number", value)
    if bounds is not None and found not in bounds:
        raise InputError(f"`{path}` is expected to be {bounds}, but is {found!r}.")
    return found


def _mismatch(path: str, expected: str, value: Any) -> InputError:
    return InputError(f"`{path or 'the result'}` is expected to be {expected}, but is {str(value)[:80]!r}.")


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


class ResultRecord:
    """Base of a frozen dataclass that is one file: its schema, its reader, its writer and its plain form."""

    SCHEMA: ClassVar[str]
    """ "zloss.KIND/VERSION", the key `schema` of the file."""
    FILE: ClassVar[str]
    """Name of the file."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, `schema` first; a nonfinite number is None, with its reason where the record has `reasons`."""
        reasons: dict[str, str] = dict(getattr(self, "reasons", {}))
        plain = {"schema": self.SCHEMA, **to_plain(self, reasons=reasons)}
        return plain | {"reasons": reasons} if "reasons" in plain else plain

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        """The record of a parsed file; a file that does not match the schema raises an error that names the key."""
        if not isinstance(data, dict):
            raise InputError(f"a result is expected to be an object with a `schema`, but is {str(data)[:80]!r}.")
        if data.get("schema") != cls.SCHEMA:
            raise InputError(f"`schema` is expected to be {cls.SCHEMA!r}, but is {data.get('schema')!r}.")
        return from_plain(cls, {key: value for key, value in data.items() if key != "schema"})

    def finite(self) -> Self:
        """This record as its file has it: a nonfinite number is None with its reason."""
        return self.from_dict(self.to_dict())

    @classmethod
    def file_in(cls, out: str | Path) -> Path:
        """The file `out` where it is named NAME.json, else `FILE` in the folder `out`."""
        return Path(out) if Path(out).suffix == ".json" else Path(out) / cls.FILE

    def write(self, out: str | Path) -> Path:
        """Write `file_in(out)` atomically, and return its path."""
        path = self.file_in(out)
        write_json(path, self.to_dict())
        return path

    def _repr_html_(self) -> str | None:
        """What a notebook shows of the result; None for a record without a page."""
        # By its name: results are below the package that shows them and import nothing of it.
        shown: str | None = import_module("zloss.report.files").notebook_html(self)
        return shown
