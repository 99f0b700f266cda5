"""From dataclasses to command-line options and back: everything between our configurations and tyro.

An option is written once, in the configuration that uses it; `zloss.results.options.Option` says how it is spelled. A command
nests the configuration with `Annotated[AuditConfig, tyro.conf.arg(name="")]` and adds the options of the command line. An
option that the command declares itself replaces the one of the same name in its configurations.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import shutil
import textwrap
from collections.abc import Callable, Collection
from typing import Annotated, Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

import tyro
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from zloss.errors import InputError, ZlossError
from zloss.results.options import NotAnOption, Option

Command = TypeVar("Command")

POSITIONAL = get_args(tyro.conf.Positional[str])[1]
SWITCHED = "_switched"
"""Suffix of the field that holds the configuration which a switch turns on."""


def parse(command_type: type[Command], argv: list[str], *, prog: str) -> Command:
    """Parse `argv` into a command. A value that a configuration rejects raises that configuration's error.

    A command with `refuse_more` gets the arguments that it does not take, and may raise its own error.
    """
    flags, replaced = flags_of(command_type), plain_options(command_type)
    registry, inside = ConstructorRegistry(), set[Any]()

    def as_options(info: StructTypeInfo) -> StructConstructorSpec | None:
        if info.type in inside or not hasattr(info.type, "__dataclass_fields__"):
            return None
        inside.add(info.type)
        try:
            found = ConstructorRegistry.get_struct_spec(info)
        finally:
            inside.remove(info.type)
        if not isinstance(found, StructConstructorSpec):
            return None
        hints = option_hints(info.type, without=() if info.type is command_type else replaced)
        return _tyro_spec(info.type, found, hints, flags)

    registry.struct_rule(as_options)
    with registry:
        try:
            described = _description(command_type)
            if hasattr(command_type, "refuse_more"):
                partial: Any
                partial, more = tyro.cli(
                    command_type, prog=prog, args=argv, description=described, return_unknown_args=True
                )
                if more:
                    partial.refuse_more(more)
            command: Any = tyro.cli(command_type, prog=prog, args=argv, description=described)
        except _RejectedError as rejected:
            raise rejected.error from None
    return cast(Command, command)


# What the options of a command are.


def option_hints(config_type: Any, *, without: Collection[str] = ()) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Field → (plain type, metadata) of every field that the command line sets, in order."""
    plain, full = get_type_hints(config_type), get_type_hints(config_type, include_extras=True)
    metadata = {field.name: getattr(full[field.name], "__metadata__", ()) for field in dataclasses.fields(config_type)}
    return {
        name: (plain[name], notes)
        for name, notes in metadata.items()
        if name not in without and NotAnOption not in notes
    }


def plain_options(command_type: Any) -> frozenset[str]:
    """The fields of a command that are options themselves, not configurations."""
    return frozenset(name for name, (hint, _) in option_hints(command_type).items() if nested_type(hint) is None)


def option_of(metadata: tuple[Any, ...]) -> Option:
    """The `Option` among the metadata of a field, or the default one."""
    return next((found for found in metadata if isinstance(found, Option)), Option())


def nested_type(hint: Any) -> Any | None:
    """The configuration that a field holds, or None for a plain value."""
    candidates = (hint, *get_args(hint))
    return next((found for found in candidates if dataclasses.is_dataclass(found)), None)


def flags_of(command_type: Any) -> dict[str, str]:
    """Field → its flag or metavar, of a command and the configurations inside it."""
    flags: dict[str, str] = {}
    nested_flags: dict[str, str] = {}
    for name, (hint, metadata) in option_hints(command_type).items():
        option, nested = option_of(metadata), nested_type(hint)
        if nested is None or option.switch is not None:
            flags[name] = _flag(name, option, metadata)
        if nested is not None:
            nested_flags |= flags_of(nested)
    return nested_flags | flags


def with_flags(text: str, flags: dict[str, str]) -> str:
    """`text` with each field name between backticks replaced by its flag: `valid_vocab` becomes --valid-vocab."""
    return re.sub(r"`(\w+)`", lambda match: flags.get(match[1], match[0]), text)


def _flag(name: str, option: Option, metadata: tuple[Any, ...]) -> str:
    if option.positional or POSITIONAL in metadata:
        return option.metavar or name.upper()
    names = [found.name for found in metadata if isinstance(getattr(found, "name", None), str)]
    return "--" + (option.flag or (names[0] if names else name)).replace("_", "-")


# Values that tyro does not read by itself.


def _spec(metavar: str, read: Callable[[str], Any], show: Callable[[Any], str] = str) -> PrimitiveConstructorSpec[Any]:
    """How one argument is read, and shown in the help."""
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda argv: read(argv[0]),
        is_instance=lambda value: True,
        str_from_instance=lambda value: [show(value)],
    )


def comma_list(item: type, metavar: str | None = None) -> PrimitiveConstructorSpec[Any]:
    """`a,b,c` as a tuple of `item`; the default may be None."""
    return _spec(
        metavar or {str: "A,B,...", int: "N,N,...", float: "X,X,..."}[item],
        lambda text: tuple(item(part.strip()) for part in text.split(",") if part.strip()),
        lambda value: ",".join(map(str, value or ())),
    )


def zero_is_none(metavar: str) -> PrimitiveConstructorSpec[Any]:
    """A whole number; 0 is None."""
    return _spec(metavar, lambda text: int(text) or None, lambda value: str(value or 0))


def number_or_word(metavar: str) -> PrimitiveConstructorSpec[Any]:
    """A number if it reads as one, else the string itself; `None` is None."""

    def read(text: str) -> float | str | None:
        try:
            return None if text == "None" else float(text)
        except ValueError:
            return text

    return _spec(metavar, read)


# How tyro takes a dataclass.


class _RejectedError(Exception):
    """Carries a configuration error through tyro, which would reformat a ValueError."""

    def __init__(self, error: ZlossError) -> None:
        super().__init__(str(error))
        self.error = error


def _tyro_spec(
    config_type: Any,
    spec: StructConstructorSpec,
    hints: dict[str, tuple[Any, tuple[Any, ...]]],
    flags: dict[str, str],
) -> StructConstructorSpec:
    """`spec` with our spellings and help; fields that are not in `hints` keep their default."""
    kept = {field.name: field.default for field in spec.fields if field.name not in hints}
    fields, switches = list[StructFieldSpec](), dict[str, Option]()
    for field in spec.fields:
        if field.name not in hints:
            continue
        hint, metadata = hints[field.name]
        option, nested = option_of(metadata), nested_type(hint)
        field = dataclasses.replace(field, helptext=_help(field.helptext, flags))
        if option.switch is None:
            fields.append(dataclasses.replace(field, type=_tyro_type(hint, metadata, option, field.default)))
            continue
        switches[field.name] = option
        fields.append(dataclasses.replace(field, type=bool, default=field.default is not None))
        inner = nested() if field.default is None else field.default  # type: ignore[misc]
        flat: Any = Annotated[nested, tyro.conf.arg(name="")]
        fields.append(StructFieldSpec(name=field.name + SWITCHED, type=flat, default=inner))

    def build(**values: Any) -> Any:
        try:
            for name, option in switches.items():
                inner = values.pop(name + SWITCHED)
                if not values[name]:
                    _reject_options_without_switch(inner, name, option)
                values[name] = inner if values[name] else None
            return config_type(**kept, **values)
        except ZlossError as error:
            raise _RejectedError(error) from error

    build.__doc__ = config_type.__doc__  # tyro prints it at the top of the help
    return StructConstructorSpec(instantiate=build, fields=tuple(fields))


def _reject_options_without_switch(config: Any, switch: str, option: Option) -> None:
    default = type(config)()
    for field in option_hints(type(config)):
        if getattr(config, field) != getattr(default, field):
            raise InputError(f"`{field}` is for {option.switch}: pass `{switch}` as well.")


def _tyro_type(hint: Any, metadata: tuple[Any, ...], option: Option, default: Any) -> Any:
    """A type as tyro understands it; tyro's own metadata are kept."""
    kept = tuple(found for found in metadata if not isinstance(found, Option))
    alternatives = [part for part in get_args(hint) if part is not type(None)]
    optional = len(alternatives) < len(get_args(hint))
    metavar, spec = option.metavar, tuple[Any, ...]()
    if option.comma_separated:
        spec, metavar = (comma_list(get_args(alternatives[0] if optional else hint)[0], metavar),), None
    elif option.zero_is_none:
        spec, metavar = (zero_is_none(metavar or "INT"),), None
    elif optional:
        metavar = metavar or _metavar(alternatives)
    # The sentence of an optional option says what its absence means; "(default: None)" would not.
    default_text = "" if optional and default is None and not option.zero_is_none else None
    if not kept and (option.flag, metavar, default_text) != (None, None, None):
        spec += (tyro.conf.arg(name=option.flag, metavar=metavar, help_behavior_hint=default_text),)
    made: Any = Annotated[(hint, *kept, *spec)] if kept or spec else hint
    markers: Any = tyro.conf
    if option.repeated:
        made = markers.UseAppendAction[made]  # `--text a --text b` keeps both; tyro would keep the last
    return markers.Positional[made] if option.positional else made


def _metavar(alternatives: list[Any]) -> str | None:
    """The placeholder of an optional option, without the word None."""
    if len(alternatives) != 1:
        return None
    if get_origin(alternatives[0]) is Literal:
        return "{" + ",".join(map(str, get_args(alternatives[0]))) + "}"
    return str(alternatives[0].__name__).upper()


def _help(text: Any, flags: dict[str, str]) -> Any:
    """The docstring of a field with flags for names, computed on demand: tyro reads docstrings only for --help."""
    return lambda: with_flags(" ".join(((text() if callable(text) else text) or "").split()), flags)


def _description(command_type: Any) -> str:
    """The top of the help, wrapped to the width of the terminal, which tyro does not do.

    tyro joins lines that begin with a letter, so each begins with a space, as the titles of its sections do.
    """
    width = shutil.get_terminal_size().columns
    paragraphs = inspect.cleandoc(command_type.__doc__ or "").split("\n\n")
    return "\n\n".join(
        textwrap.fill(" ".join(text.split()), width, initial_indent=" ", subsequent_indent=" ", break_on_hyphens=False)
        for text in paragraphs
    )
