"""What every result file has in common: a schema with a version, a reader and a writer."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol, Self

from zloss.errors import InputError


class ResultRecord(Protocol):
    """A record that is one file."""

    SCHEMA: ClassVar[str]
    """ "zloss.KIND/VERSION", the key `schema` of the file."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, `schema` first."""
        ...

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        """The record of a parsed file; a file that is not of the schema is refused by the name of its key."""
        ...


def without_schema(data: Any, schema: str) -> dict[str, Any]:
    """The keys of a parsed file beside `schema`; an error where it is of another schema."""
    if not isinstance(data, dict):
        raise InputError(f"a result is expected to be an object with a `schema`, but is {str(data)[:80]!r}.")
    if data.get("schema") != schema:
        raise InputError(f"`schema` is expected to be {schema!r}, but is {data.get('schema')!r}.")
    return {key: value for key, value in data.items() if key != "schema"}
