"""Options of configurations: their choices, how the command line spells them, and the checks of their values.

A configuration is a frozen dataclass; every field is an option named like the field, and the sentence below it is the
help. Where the command line needs more, the type is annotated:

    texts: Annotated[tuple[str, ...], Option(flag="text", metavar="FILE", repeated=True)] = ()

`zloss.cli.options` reads the annotations; a configuration itself needs no command line to be imported.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, get_args

from zloss.errors import InputError, UnknownNameError

SMOLLM2 = "smollm2"
"""The default model of every command."""

BosPolicy = Literal["auto", "yes", "no"]
"""A BOS token at the start of every block: if the tokenizer itself would add one, always, or never."""
DtypeName = Literal["fp32", "fp64", "bf16"]
"""Precision of a model's weights and activations."""
LogitStorage = Literal["bf16", "fp16", "fp32"]
"""Precision in which a training stack stores its logits."""
DeviceMap = Literal["auto"]
"""How the layers of a model are placed: by accelerate, on all devices of the machine, its memory and its disk."""
CorpusName = Literal["pydoc", "wikitext-103", "fineweb-edu"]
"""Corpora that are known by name; `zloss.text` opens them."""
SvdMethod = Literal["exact", "randomized"]
"""How the spectrum of a head is computed: from its Gram matrix, or by the paper's randomized SVD."""
Precision = Literal["fp32", "bf16"]
"""Precision of a training step: fp32, or bf16 autocast over fp32 weights."""
HeadKind = Literal["fused", "paper"]
"""How a training step computes its loss: logits chunk by chunk, or materialized as in the paper."""
Decay = Literal["matrices", "all"]
"""Which parameters decay: tensors of two dimensions and more, or all."""


Coordinate = Literal["raw", "centered"]
"""Logits as the head gives them, or minus their mean over the vocabulary."""


@dataclass(frozen=True)
class Option:
    """The spelling of one option."""

    flag: str | None = None
    """Name of the flag without its dashes; None: the name of the field."""
    metavar: str | None = None
    """Placeholder of the value in the help; None: from the type."""
    positional: bool = False
    """The value is positional."""
    repeated: bool = False
    """For a tuple: every use of the flag appends one value."""
    comma_separated: bool = False
    """For a tuple of numbers: all values in one argument, `10,50,100`."""
    zero_is_none: bool = False
    """For a count that may be None: 0 on the command line is None."""
    switch: str | None = None
    """For a nested configuration that may be None: the flag turns it on, its fields are options alongside the others, and
    this phrase says in errors what they are for."""


class NotAnOption:
    """Marks a field that the command line does not set, because the runs of one command differ in it."""


TextFiles = Annotated[tuple[str, ...], Option(flag="text", metavar="FILE", repeated=True)]
ValidTextFiles = Annotated[tuple[str, ...], Option(flag="valid-text", metavar="FILE", repeated=True)]
BlockCount = Annotated[int | None, Option(metavar="INT", zero_is_none=True)]


@dataclass(frozen=True)
class TextChoice:
    """A text."""

    texts: TextFiles = ()
    """Text to read: plain text, .jsonl or .parquet; repeat to append. Default: the corpus `pydoc`."""
    corpus: CorpusName | None = None
    """A named corpus instead of `texts`; pydoc is embedded, the others are fetched."""


@dataclass(frozen=True)
class TextOptions(TextChoice):
    """A text, and the blocks of tokens that are read from it.

    A configuration redeclares a field to change its default; the field keeps its place.
    """

    text_field: str = "text"
    """Field or column that holds the text in .jsonl and .parquet files."""
    blocks: BlockCount = 64
    """Number of blocks; 0 uses the whole text."""
    block_size: int | None = None
    """Predictions per block, in tokens. Default: 256, or fewer if the model has fewer positions."""
    bos: BosPolicy = "auto"
    """Put a BOS token at the start of every block: if the tokenizer itself would, always, or never."""
    tokenizer: Annotated[str | None, Option(metavar="PATH")] = None
    """Folder or Hugging Face id whose tokenizer is used instead of the model's, such as for a checkpoint saved without one."""

    def text_options(self, **changes: Any) -> dict[str, Any]:
        """The fields of this class by name, with `changes`, for another configuration that reads the same text."""
        return {field.name: getattr(self, field.name) for field in fields(TextOptions)} | changes


def refuse(*cases: tuple[object, str]) -> None:
    """Raise an error with the sentence of the first case that is true."""
    for wrong, sentence in cases:
        if wrong:
            raise InputError(sentence)


def check_counts(config: object, names: Iterable[str], *, least: int = 1) -> None:
    """Whole numbers of at least `least`."""
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InputError(f"`{name}` is expected to be a whole number ≥ {least}, but got {value!r}.")
        if value >= 2**62:
            raise InputError(f"`{name}` is expected to be a whole number below 2^62, but got {value!r}.")


def check_optional_counts(config: object, names: Iterable[str]) -> None:
    """Whole numbers of at least 1, where they are not None."""
    check_counts(config, [name for name in names if getattr(config, name) is not None])


def check_numbers(config: object, names: Iterable[str], *, positive: bool = False) -> None:
    """Finite numbers ≥ 0, or > 0."""
    for name in names:
        value = getattr(config, name)
        if not (math.isfinite(value) and (value > 0 or (value == 0 and not positive))):
            raise InputError(
                f"`{name}` is expected to be a finite number {'>' if positive else '≥'} 0, but got {value!r}."
            )


def check_measured_coef(name: str, value: float, *, zero: bool = False) -> None:
    """A λ whose gradients, squared and added, neither overflow nor vanish in fp32."""
    if not (1e-10 <= value <= 1e10 or (zero and value == 0)):
        raise InputError(f"`{name}` is expected to be {'0 or ' * zero}between 1e-10 and 1e10, but got {value!r}.")


def check_seed(seed: int) -> None:
    """A seed that every random generator takes, also with a small number added."""
    if not -(2**62) < seed < 2**62:
        raise InputError(f"`seed` is expected to be a whole number between −2^62 and 2^62, but got {seed!r}.")


def check_choices(config: object, choices: dict[str, Any]) -> None:
    """Values of a `Literal` type, by field."""
    for name, literal in choices.items():
        value = getattr(config, name)
        if value not in get_args(literal):
            raise UnknownNameError(f"`{name}`", value, get_args(literal))


def check_columns(record: object, names: tuple[str, ...]) -> None:
    """Require the columns of a table, given by field name, to have the same length."""
    lengths = [len(getattr(record, name)) for name in names]
    if len(set(lengths)) > 1:
        said = ", ".join(f"{length} in `{name}`" for name, length in zip(names, lengths, strict=True))
        raise InputError(
            f"{' and '.join(f'`{name}`' for name in names)} are expected to have the same length, but have {said}."
        )
