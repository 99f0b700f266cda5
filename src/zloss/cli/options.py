"""Configurations as options of a command: their fields, sentences and `Option` annotations, handed to tyro.

An option is written once, in the configuration that uses it. A command nests the configuration with
`Annotated[AuditConfig, tyro.conf.arg(name="")]` and adds what belongs to the command line alone.
"""

from __future__ import annotations

import inspect
import shutil
import textwrap
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar, cast, get_args, get_origin

import tyro
from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructFieldSpec, StructTypeInfo

from zloss.cli.arguments import comma_list, zero_is_none
from zloss.cli.flags import flags_of, nested_type, option_hints, option_of, with_flags
from zloss.errors import InputError, ZlossError
from zloss.results.option import Option

Command = TypeVar("Command")
SWITCHED = "_switched"
"""Behind the name of a field with a switch: the configuration that the switch turns on."""


class _RefusedError(Exception):
    """Carries an error of a configuration through tyro, which would print a ValueError in its own way."""

    def __init__(self, error: ZlossError) -> None:
        super().__init__(str(error))
        self.error = error


def parse(command_type: type[Command], words: list[str], *, prog: str, default: Command | None = None) -> Command:
    """The command that `words` stand for; a value that its configuration refuses is that configuration's error."""
    flags = flags_of(command_type)
    registry, inside = ConstructorRegistry(), set[Any]()

    def as_options(info: StructTypeInfo) -> StructConstructorSpec | None:
        if info.type in inside or not hasattr(info.type, "__dataclass_fields__"):
            return None
        inside.add(info.type)
        try:
            found = ConstructorRegistry.get_struct_spec(info)
        finally:
            inside.remove(info.type)
        return _translated(info.type, found, flags) if isinstance(found, StructConstructorSpec) else None

    registry.struct_rule(as_options)
    with registry:
        try:
            command: Any = tyro.cli(
                command_type, prog=prog, args=words, default=default, description=_description(command_type)
            )
        except _RefusedError as refused:
            raise refused.error from None
    return cast(Command, command)


def _translated(config_type: Any, spec: StructConstructorSpec, flags: dict[str, str]) -> StructConstructorSpec:
    """The fields of a configuration as tyro takes them; those that are no option keep their default."""
    hints = option_hints(config_type)
    kept = {field.name: field.default for field in spec.fields if field.name not in hints}
    fields, switches = list[StructFieldSpec](), dict[str, Option]()
    for field in spec.fields:
        if field.name not in hints:
            continue
        hint, notes = hints[field.name]
        option, nested = option_of(notes), nested_type(hint)
        field = replace(field, helptext=_help(field.helptext, flags))
        if option.switch is None:
            fields.append(replace(field, type=_annotated(hint, notes, option, field.default)))
            continue
        switches[field.name] = option
        fields.append(replace(field, type=bool, default=field.default is not None))
        inner = nested() if field.default is None else field.default  # type: ignore[misc]
        flat: Any = Annotated[nested, tyro.conf.arg(name="")]
        fields.append(StructFieldSpec(name=field.name + SWITCHED, type=flat, default=inner))

    def build(**values: Any) -> Any:
        try:
            for name, option in switches.items():
                values[name] = _switched(values.pop(name + SWITCHED), values[name], name, option)
            return config_type(**kept, **values)
        except ZlossError as error:
            raise _RefusedError(error) from error

    build.__doc__ = config_type.__doc__  # the head of the help
    return StructConstructorSpec(instantiate=build, fields=tuple(fields))


def _switched(given: Any, on: bool, name: str, option: Option) -> Any:
    """The nested configuration if it is switched on; what was set of it without its switch is refused."""
    if on:
        return given
    plain = type(given)()
    for field in option_hints(type(given)):
        if getattr(given, field) != getattr(plain, field):
            raise InputError(f"`{field}` is for {option.switch}: give `{name}` as well.")
    return None


def _help(text: Any, flags: dict[str, str]) -> Any:
    """A sentence of a configuration with flags for names; tyro reads docstrings only when help is asked for."""
    return lambda: with_flags(" ".join(((text() if callable(text) else text) or "").split()), flags)


def _description(command_type: Any) -> str:
    """The head of the help, its paragraphs broken to the width of the terminal, which tyro does not do.

    tyro joins lines that begin with a letter, so each begins with a blank, as the titles of its sections do.
    """
    width = shutil.get_terminal_size().columns
    paragraphs = inspect.cleandoc(command_type.__doc__ or "").split("\n\n")
    return "\n\n".join(
        textwrap.fill(" ".join(text.split()), width, initial_indent=" ", subsequent_indent=" ", break_on_hyphens=False)
        for text in paragraphs
    )


def _annotated(hint: Any, notes: tuple[Any, ...], option: Option, default: Any) -> Any:
    """A type as tyro understands it; notes that are tyro's own stay."""
    own = tuple(found for found in notes if not isinstance(found, Option))
    metavar, behind = option.metavar, None
    spec: tuple[Any, ...] = ()
    if option.comma_separated:
        spec, metavar = (comma_list(get_args(hint)[0], metavar or "A,B,..."),), None
    elif option.zero_is_none:
        spec, metavar = (zero_is_none(metavar or "INT"),), None
    elif type(None) in get_args(hint):
        metavar = metavar or _metavar(hint)
        # The sentence of an optional option says what its absence means; "(default: None)" would not.
        behind = "" if default is None else None
    if not own and (option.flag, metavar, behind) != (None, None, None):
        spec += (tyro.conf.arg(name=option.flag, metavar=metavar, help_behavior_hint=behind),)
    made: Any = Annotated[(hint, *own, *spec)] if own or spec else hint
    markers: Any = tyro.conf
    if option.repeated:
        made = markers.UseAppendAction[made]
    return markers.Positional[made] if option.positional else made


def _metavar(hint: Any) -> str | None:
    """The placeholder of an optional option, without the word None, which nobody has to write."""
    inner = [part for part in get_args(hint) if part is not type(None)]
    if len(inner) != 1:
        return None
    if get_origin(inner[0]) is Literal:
        return "{" + ",".join(map(str, get_args(inner[0]))) + "}"
    return str(inner[0].__name__).upper()
