"""docs/reference/commands.md: every command with its options, exit codes and environment variables."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from tools.docs.markdown import WRITTEN_BY, table
from tools.docs.sentences import sentences_of
from zloss.cli.main import BAD_INPUT, CLOSED_PIPE, COMMANDS, DONE, FAILED_CHECK, INTERRUPTED, command_type
from zloss.cli.options import flags_of, nested_type, option_hints, option_of, plain_options, with_flags

EXIT_CODES = (
    (DONE, "The command succeeded."),
    (FAILED_CHECK, "A check or a verdict failed: a loss audit found an error (`--strict`: any finding), a claim of the paper "
     "does not hold, a centered copy should be discarded."),
    (BAD_INPUT, "The input is wrong, or something required is missing. One sentence on stderr says what; no traceback."),
    (INTERRUPTED, "Ctrl-C. Finished work is saved if the command can resume."),
    (CLOSED_PIPE, "The reader of the output has closed the pipe, as with `| head -1`."),
)  # fmt: skip
VARIABLES = (
    ("ZLOSS_CACHE", "Folder for converted GGUF models; default: `zloss` in `XDG_CACHE_HOME` or `~/.cache`."),
    ("XDG_CACHE_HOME", "See `ZLOSS_CACHE`."),
    ("ZLOSS_CHUNK_BYTES", "Bytes of V-wide buffers that a chunk of tokens may take in `head_loss`. Read once, at import."),
    ("ZLOSS_SAVE_EVERY", "Seconds between two saves of an audit that `--resume` can continue."),
    ("ZLOSS_RANK_TIMEOUT", "Seconds after which a rank stops waiting for the others."),
    ("TRITON_INTERPRET", "`1`, set before the first Triton loss, runs its kernels on Triton's interpreter on the CPU."),
    ("ONEDNN_MAX_CPU_ISA", "`AVX512_CORE_BF16` keeps bf16 products fast on machines that announce AMX and then trap on it."),
    ("HF_HUB_OFFLINE", "`1`: models and datasets come from the local cache only."),
    ("HF_ENDPOINT", "Address of the hub; error messages name it if it does not answer."),
    ("HF_HUB_DISABLE_PROGRESS_BARS", "Set by a command while it loads a model, so that only the bars of zloss show."),
    ("RANK", "Set by `torchrun`; with `WORLD_SIZE` above 1 a command runs on several processes or refuses to."),
    ("WORLD_SIZE", "See `RANK`."),
)  # fmt: skip


def commands() -> str:
    """The whole page."""
    parts = [
        WRITTEN_BY,
        "# Commands",
        "`zloss COMMAND --help` prints the same options. `zloss` without a command lists the commands, `zloss --version` prints "
        "the version. "
        "Lists are separated by commas (`--seeds 1,2`); `--text` may be repeated; MODEL comes before `--text`.",
        table(
            ("command", "what it does"),
            ((f"[`{name}`](#zloss-{name})", summary) for name, (_, summary) in COMMANDS.items()),
        ),
        "## Exit codes",
        table(("code", "meaning"), ((str(code), meaning) for code, meaning in EXIT_CODES)),
        "## Environment variables",
        table(("variable", "meaning"), ((f"`{name}`", meaning) for name, meaning in VARIABLES)),
    ]
    for name in COMMANDS:
        found = command_type(name)
        flags = flags_of(found)
        parts += [f"## zloss {name}", with_flags(" ".join(found.__doc__.split()), flags)]
        lines = list(_options(found, flags))
        if lines:
            parts.append(table(("option", "default", "meaning"), lines))
    return "\n\n".join(parts) + "\n"


def _options(
    command_type: Any, flags: dict[str, str], without: frozenset[str] = frozenset()
) -> Iterator[tuple[str, str, str]]:
    said, defaults = sentences_of(command_type), {field.name: field for field in dataclasses.fields(command_type)}
    hints = option_hints(command_type, without=without)
    # Arguments without a flag come first, wherever the configuration declares them.
    for name in sorted(hints, key=lambda name: not option_of(hints[name][1]).positional):
        hint, notes = hints[name]
        nested = nested_type(hint)
        if nested is None or option_of(notes).switch is not None:
            yield f"`{flags[name]}`", _default(defaults[name]), with_flags(said.get(name, ""), flags)
        if nested is not None:
            yield from _options(nested, flags, without or plain_options(command_type))


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is dataclasses.MISSING or field.default in (None, "", ()):
        return ""
    if isinstance(field.default, bool):
        return "on" if field.default else "off"
    value = ",".join(map(str, field.default)) if isinstance(field.default, tuple) else field.default
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"
