"""Frozen dataclasses to plain JSON values and back, driven by their type hints; what every result file has in common.

`within` in the metadata of a field states the range of its numbers; a number outside it is refused on reading.
A dataclass field `extra: dict[str, Any]` holds the keys that the schema does not name. They are written next to the named
keys and collected again on reading, so a file of a newer version survives a round trip.
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, ClassVar, Literal, Self, TypeVar, Union, get_args, get_origin, get_type_hints

from zloss.errors import InputError

Record = TypeVar("Record")
OnNonfinite = Callable[[str, float], None]
"""Called with the dotted path and the value of each number that JSON cannot hold."""

EXTRA = "extra"
_HINTS: dict[type, dict[str, Any]] = {}
_WRITTEN_WITH = "written_with"
_RANGE = "range"
ROUNDING = 1e-4
"""Slack for numbers that rounding can carry past a bound, such as the CE of a memorized text."""


def written_with(name: str) -> Mapping[str, str]:
    """Metadata of a field whose key is left out of the file where the field `name` is None.

    A field that names itself is left out where it is None itself.
    """
    return {_WRITTEN_WITH: name}


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
    """The range that the metadata of a field states; None where it states none."""
    return field.metadata.get(_RANGE)


def check_range(bounds: Range, value: Any, path: str) -> None:
    """Refuse a number outside `bounds`, naming its path; None passes."""
    if isinstance(value, dict):
        for key, item in value.items():
            check_range(bounds, item, _join(path, key))
    elif isinstance(value, tuple):
        for i, item in enumerate(value):
            check_range(bounds, item, _join(path, str(i)))
    elif value is not None and value not in bounds:
        raise InputError(f"`{path}` is expected to be {bounds}, but is {value!r}.")


def to_plain(value: Any, *, on_nonfinite: OnNonfinite | None = None, path: str = "") -> Any:
    """`value` as dicts, lists and JSON scalars. NaN and ±inf become None, and `on_nonfinite` is called for each."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        out: dict[str, Any] = {}
        extra = _holds_unnamed_keys(type(value))
        for field in dataclasses.fields(value):
            other = field.metadata.get(_WRITTEN_WITH)
            if other is not None and getattr(value, other) is None:
                continue
            item = getattr(value, field.name)
            if field.name == EXTRA and extra:
                out.update(to_plain(item, on_nonfinite=on_nonfinite, path=path))
            else:
                out[field.name] = to_plain(item, on_nonfinite=on_nonfinite, path=_join(path, field.name))
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
        f"`{path}` holds a {type(value).__name__}, which a result cannot carry: use numbers, text, lists or dicts."
    )


def from_plain(record_type: type[Record], data: Any, *, path: str = "") -> Record:
    """The dataclass `record_type` from its plain form. A missing key or one of the wrong type is named by its path."""
    if not isinstance(data, dict):
        raise _mismatch(path, "an object", data)
    hints = _hints(record_type)
    values: dict[str, Any] = {}
    fields = {field.name: field for field in dataclasses.fields(record_type)}  # type: ignore[arg-type]
    for name, field in fields.items():
        if name == EXTRA and _holds_unnamed_keys(record_type):
            values[name] = {key: item for key, item in data.items() if key not in fields or key == EXTRA}
        elif name in data:
            values[name] = _coerce(hints[name], data[name], _join(path, name))
            if (bounds := range_of(field)) is not None:
                check_range(bounds, values[name], _join(path, name))
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise InputError(f"`{_join(path, name)}` is missing: this is not a complete {record_type.__name__}.")
    return record_type(**values)


def _hints(record_type: Any) -> dict[str, Any]:
    if record_type not in _HINTS:
        _HINTS[record_type] = get_type_hints(record_type)
    return _HINTS[record_type]


def _holds_unnamed_keys(record_type: type) -> bool:
    """Whether `extra` collects unnamed keys; with another type than dict[str, Any] it is a key like the others."""
    return bool(_hints(record_type).get(EXTRA) == dict[str, Any])


def _coerce(hint: Any, value: Any, path: str) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        (inner,) = (arg for arg in args if arg is not type(None))
        return _coerce(inner, value, path)
    if origin is Literal:
        if value not in args:
            raise _mismatch(path, f"one of {list(args)}", value)
        return value
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise _mismatch(path, "a list", value)
        return tuple(_coerce(args[0], item, _join(path, str(i))) for i, item in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            raise _mismatch(path, "an object", value)
        return {key: _coerce(args[1], item, _join(path, key)) for key, item in value.items()}
    if dataclasses.is_dataclass(hint):
        assert isinstance(hint, type)
        # A part that its owner has read already, because its keys lie elsewhere in the file.
        return value if isinstance(value, hint) else from_plain(hint, value, path=path)
    return _scalar(hint, value, path)


def _scalar(hint: Any, value: Any, path: str) -> Any:
    if hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:  # an integer beyond the range of a float
            raise _mismatch(path, "a number", value) from None
    if hint is int and isinstance(value, bool):
        raise _mismatch(path, "a whole number", value)
    if hint is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, hint):
        return value
    raise _mismatch(
        path, {float: "a number", int: "a whole number", str: "text", bool: "true or false"}.get(hint, str(hint)), value
    )


def _mismatch(path: str, expected: str, value: Any) -> InputError:
    return InputError(f"`{path or 'the result'}` is expected to be {expected}, but is {str(value)[:80]!r}.")


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


class ResultRecord:
    """Base of a frozen dataclass that is one file: its schema, its reader and its plain form."""

    SCHEMA: ClassVar[str]
    """ "zloss.KIND/VERSION", the key `schema` of the file."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, `schema` first."""
        return {"schema": self.SCHEMA, **to_plain(self)}

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        """The record of a parsed file; a file that is not of the schema is refused by the name of its key."""
        return from_plain(cls, without_schema(data, cls.SCHEMA))

    def _repr_html_(self) -> str | None:
        """What a notebook shows of the result; None for a record without a page."""
        # By its name: results are below the package that shows them and import nothing of it.
        shown: str | None = import_module("zloss.report.files").notebook_html(self)
        return shown


def without_schema(data: Any, schema: str) -> dict[str, Any]:
    """The keys of a parsed file beside `schema`; an error where it is of another schema."""
    if not isinstance(data, dict):
        raise InputError(f"a result is expected to be an object with a `schema`, but is {str(data)[:80]!r}.")
    if data.get("schema") != schema:
        raise InputError(f"`schema` is expected to be {schema!r}, but is {data.get('schema')!r}.")
    return {key: value for key, value in data.items() if key != "schema"}
