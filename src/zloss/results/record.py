"""Frozen dataclasses to plain JSON values and back, driven by their type hints; what every result file has in common.

The metadata of a field say what its type cannot: `within` the range of its numbers, `written_with` when its key is left out,
`flat` that its members are keys of its owner. A field `extra: dict[str, Any]` holds the keys that the schema does not name.
They are written next to the named keys and collected again on reading, so a file of a newer version survives a round trip.
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Self, TypeVar, Union, get_args, get_origin, get_type_hints

from zloss.errors import InputError
from zloss.results.io import write_json

Record = TypeVar("Record")
OnNonfinite = Callable[[str, float], object]
"""Called with the dotted path and the value of each number that JSON cannot hold."""
Reader = Callable[[Any, str], Any]
"""From a plain value and its dotted path to the value of a field."""

EXTRA = "extra"
_WRITTEN_WITH, _RANGE, _FLAT = "written_with", "range", "flat"
ROUNDING = 1e-4
"""Slack for numbers that rounding can carry past a bound, such as the CE of a memorized text."""


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


def to_plain(value: Any, *, on_nonfinite: OnNonfinite | None = None, path: str = "") -> Any:
    """`value` as dicts, lists and JSON scalars. NaN and ±inf become None, and `on_nonfinite` is called for each."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        out: dict[str, Any] = {}
        for key in _keys(type(value)):
            item = getattr(value, key.name)
            if key.written_with is not None and getattr(value, key.written_with) is None:
                continue
            if key.flat is None:
                out[key.name] = to_plain(item, on_nonfinite=on_nonfinite, path=_join(path, key.name))
            elif item is not None:
                out.update(to_plain(item, on_nonfinite=on_nonfinite, path=path))
        return out
    if isinstance(value, dict):
        return {str(k): to_plain(v, on_nonfinite=on_nonfinite, path=_join(path, str(k))) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(v, on_nonfinite=on_nonfinite, path=_join(path, str(i))) for i, v in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        if on_nonfinite is not None:
            on_nonfinite(path, value)
        return None
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if hasattr(value, "tolist"):  # arrays and tensors
        return to_plain(value.tolist(), on_nonfinite=on_nonfinite, path=path)
    raise InputError(
        f"`{path}` holds a {type(value).__name__}, which a result cannot contain: use numbers, text, lists or dicts."
    )


def from_plain(record_type: type[Record], data: Any, *, path: str = "") -> Record:
    """The dataclass `record_type` from its plain form. A missing key or one of the wrong type is named by its path."""
    if not isinstance(data, dict):
        raise _mismatch(path, "an object", data)
    values: dict[str, Any] = {}
    for key in _keys(record_type):  # type: ignore[arg-type]
        where = _join(path, key.name)
        if key.flat is not None:
            values[key.name] = _flat_value(record_type, key, data, path)
        elif key.name in data:
            values[key.name] = _reader(key.hint)(data[key.name], where)
        elif key.required:
            raise InputError(f"`{where}` is missing: this is not a complete {record_type.__name__}.")
        else:
            continue
        if key.bounds is not None:
            _check_range(key.bounds, values[key.name], where)
    return record_type(**values)


class _Key(NamedTuple):
    """What reading and writing need to know of a field."""

    name: str
    hint: Any
    bounds: Range | None
    required: bool
    written_with: str | None
    flat: str | None
    """The prefix of the keys of its members where they are keys of its owner; None for a separate key."""


@cache
def _keys(record_type: Any) -> tuple[_Key, ...]:
    hints = get_type_hints(record_type)
    # `extra` of another type than this one is a key like the others.
    prefixes = {EXTRA: ""} if hints.get(EXTRA) == dict[str, Any] else {}
    return tuple(
        _Key(
            field.name,
            hints[field.name],
            range_of(field),
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING,
            field.metadata.get(_WRITTEN_WITH),
            field.metadata.get(_FLAT, prefixes.get(field.name)),
        )
        for field in dataclasses.fields(record_type)
    )


def _flat_value(record_type: Any, key: _Key, data: dict[str, Any], path: str) -> Any:
    """The members of a flat field among the keys of its owner."""
    if key.name == EXTRA:
        return {name: value for name, value in data.items() if not _is_named(record_type, name)}
    part = _record_in(key.hint)
    if part is None:
        return _reader(key.hint)({name: value for name, value in data.items() if name.startswith(key.flat or "")}, path)
    if part is not key.hint and not any(_is_named(part, name) for name in data):
        return None
    return from_plain(part, data, path=path)


def _is_named(record_type: Any, name: str) -> bool:
    """Whether a key of a file belongs to a field other than `extra`."""
    for key in _keys(record_type):
        if key.flat is None:
            found = key.name == name
        elif (part := _record_in(key.hint)) is not None:
            found = _is_named(part, name)
        else:
            found = key.name != EXTRA and name.startswith(key.flat)
        if found:
            return True
    return False


def _record_in(hint: Any) -> Any:
    """The record type of a hint that may be optional; None for other hints."""
    return next((each for each in (hint, *get_args(hint)) if dataclasses.is_dataclass(each)), None)


@cache
def _reader(hint: Any) -> Reader:
    """What turns a plain value into `hint`, or refuses it by its path."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return lambda value, path: value
    if origin in (Union, types.UnionType):
        (inner,) = (_reader(arg) for arg in args if arg is not types.NoneType)
        return lambda value, path: None if value is None else inner(value, path)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return lambda value, path: from_plain(hint, value, path=path)
    if origin is tuple:
        item = _reader(args[0])
        return lambda value, path: tuple(
            item(each, _join(path, str(i))) for i, each in enumerate(_expect(list | tuple, "a list", value, path))
        )
    if origin is dict:
        item = _reader(args[1])
        return lambda value, path: {
            name: item(each, _join(path, name)) for name, each in _expect(dict, "an object", value, path).items()
        }
    if origin is Literal:
        return lambda value, path: value if value in args else _expect((), f"one of {list(args)}", value, path)
    return {float: _number, int: _whole_number}.get(
        hint, lambda value, path: _expect(hint, {str: "text", bool: "true or false"}.get(hint, str(hint)), value, path)
    )


def _expect(kinds: Any, expected: str, value: Any, path: str) -> Any:
    if not isinstance(value, kinds):
        raise _mismatch(path, expected, value)
    return value


def _number(value: Any, path: str) -> float:
    if isinstance(value, bool):
        raise _mismatch(path, "a number", value)
    try:
        return float(_expect((int, float), "a number", value, path))
    except OverflowError:  # an integer beyond the range of a float
        raise _mismatch(path, "a number", value) from None


def _whole_number(value: Any, path: str) -> int:
    if isinstance(value, bool) or not (isinstance(value, int) or (isinstance(value, float) and value.is_integer())):
        raise _mismatch(path, "a whole number", value)
    return int(value)


def _check_range(bounds: Range, value: Any, path: str) -> None:
    """Refuse a number outside `bounds`, naming its path; None passes."""
    if isinstance(value, (dict, tuple)):
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            _check_range(bounds, item, _join(path, str(name)))
    elif value is not None and value not in bounds:
        raise InputError(f"`{path}` is expected to be {bounds}, but is {value!r}.")


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

        def note(path: str, value: float) -> None:
            reasons.setdefault(path, f"the value was {value}")

        plain = {"schema": self.SCHEMA, **to_plain(self, on_nonfinite=note)}
        return plain | {"reasons": reasons} if "reasons" in plain else plain

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        """The record of a parsed file; a file that is not of the schema is refused by the name of its key."""
        if not isinstance(data, dict):
            raise InputError(f"a result is expected to be an object with a `schema`, but is {str(data)[:80]!r}.")
        if data.get("schema") != cls.SCHEMA:
            raise InputError(f"`schema` is expected to be {cls.SCHEMA!r}, but is {data.get('schema')!r}.")
        return from_plain(cls, {key: value for key, value in data.items() if key != "schema"})

    def finite(self) -> Self:
        """This record as its file has it: a nonfinite number is None with its reason."""
        return self.from_dict(self.to_dict())

    def write(self, out: str | Path) -> Path:
        """Write the file `out`, or `FILE` in the folder `out`, atomically, and return its path."""
        path = Path(out) if Path(out).suffix == ".json" else Path(out) / self.FILE
        write_json(path, self.to_dict())
        return path

    def _repr_html_(self) -> str | None:
        """What a notebook shows of the result; None for a record without a page."""
        # By its name: results are below the package that shows them and import nothing of it.
        shown: str | None = import_module("zloss.report.files").notebook_html(self)
        return shown
