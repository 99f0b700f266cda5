"""How a field of a configuration is written on the command line, as plain data.

A configuration is a frozen dataclass; every field is an option named like the field, and the sentence below it is the
help. Where the command line needs more, the type is annotated:

    texts: Annotated[tuple[str, ...], Option(flag="text", metavar="FILE", repeated=True)] = ()

`zloss.cli.options` reads the annotations; a configuration itself needs no command line to be imported.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Option:
    """The spelling of one option."""

    flag: str | None = None
    """Name of the flag without its dashes; None: the name of the field."""
    metavar: str | None = None
    """Placeholder of the value in the help; None: from the type."""
    positional: bool = False
    """The value stands without a flag."""
    repeated: bool = False
    """For a tuple: every use of the flag appends one value."""
    comma_separated: bool = False
    """For a tuple of numbers: all values in one word, `10,50,100`."""
    zero_is_none: bool = False
    """For a count that may be None: 0 on the command line is None."""
    switch: str | None = None
    """For a nested configuration that may be None: the flag turns it on, its fields are options beside the others, and
    this phrase says in errors what they are for."""


class NotAnOption:
    """Marks a field that the command line does not set, because the runs of one command differ in it."""
