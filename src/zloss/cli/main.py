"""`zloss`: run one subcommand, and turn every expected error into one sentence and an exit code.

Nothing here imports torch, so that `--help` is fast.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from importlib import import_module
from typing import Any

from zloss.console import ClosedPipeError, guarded_output, printable
from zloss.errors import (
    MissingDependencyError,
    UnknownNameError,
    UnwritableFolderError,
    ZlossError,
    extra_of,
    first_line,
)

DONE, FAILED_CHECK, BAD_INPUT, INTERRUPTED, CLOSED_PIPE = 0, 1, 2, 130, 141


COMMANDS = {
    "audit": ("audit", "What Z-loss would do to a checkpoint: the main job."),
    "audit-loss": ("audit_loss", "What a loss really trains: its λ, c, coordinate and denominators."),
    "audit-implementation": ("audit", "What 16-bit logits, kernels and fp16 do to CE + Z on a model."),
    "router-scale": ("audit", "What a router coefficient means under every convention."),
    "train": ("train", "Train one model under several methods, everything else equal."),
    "compare": ("train", "Matched runs side by side: paired differences, accepted or rejected."),
    "recommend": ("protocol", "Which Z-loss, if any, helps a model: audit, matched runs, answer."),
    "center": ("protocol", "Remove the common shift from a checkpoint's output head."),
    "drift": ("protocol", "Checkpoints of one run: what moved while cross-entropy did not."),
    "report": ("report", "Tables, page and figures of results; several audits side by side."),
    "reproduce": ("reproduce", "Rerun a table of the paper and check the paper's claims about it."),
    "glossary": ("report", "What a symbol or a key means."),
}
"""Name → module and summary."""
ON_RANKS = ("audit", "train", "recommend")
"""Commands that divide their work over the processes of a launcher."""


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand and return its exit code."""
    with guarded_output():
        try:
            code = _main(sys.argv[1:] if argv is None else argv)
        except ClosedPipeError:
            code = CLOSED_PIPE
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (ClosedPipeError, OSError):
                # The reader has exited, or the disk is full. Discard what Python still buffers: flushing it at exit would
                # raise again.
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return code


def _main(argv: list[str]) -> int:
    name = argv[0] if argv else "--help"
    try:
        if name in ("-h", "--help", "help", "--version"):
            print(f"zloss {_version()}\n" if name == "--version" else usage(), end="", flush=True)
            return DONE
        if launched() and name not in ON_RANKS:
            # Every process would do all of the work, in the same folder.
            raise ZlossError(
                f"runs on one process, but a launcher started {os.environ['WORLD_SIZE']}: run it without torchrun. "
                f"Commands that support several processes: {', '.join(ON_RANKS)}."
            )
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()  # here, where an error becomes a sentence
    except ZlossError as error:
        if launched():
            from zloss.jobs import StoppedError

            if isinstance(error, StoppedError) or isinstance(error.__cause__, StoppedError):
                return BAD_INPUT  # the first rank prints the error of all of them
        return _print_error(name, str(error))
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0" or not launched():
            print(f"zloss {name}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except ModuleNotFoundError as error:
        # Most callers name the extra themselves; here an optional package was imported by another package.
        package = (error.name or "").partition(".")[0]
        if package in ("", "zloss", "zloss_paper"):
            raise
        return _print_error(name, str(MissingDependencyError(package, "This command", extra_of(package))))
    except OSError as error:
        # A file operation that was not checked in advance.
        where = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
        return _print_error(name, f"{where}{error.strerror or first_line(error)}.")


def _version() -> str:
    from zloss import __version__

    return __version__


def usage() -> str:
    """The top-level help."""
    width = shutil.get_terminal_size().columns
    first = max(map(len, COMMANDS)) + 4
    lines = "\n".join(
        textwrap.fill(summary, width, initial_indent=f"  {name}".ljust(first), subsequent_indent=" " * first)
        for name, (_, summary) in COMMANDS.items()
    )
    closing = "`zloss COMMAND --help` lists the options of a command; `zloss --version` prints the version."
    return (
        "zloss: measure, report and intervene on Z-loss.\n\n"
        "usage: zloss COMMAND [options]\n\n"
        f"commands:\n{lines}\n\n"
        f"{textwrap.fill(closing, width)}\n"
    )


def _run(argv: list[str]) -> int:
    """Parse and run a subcommand. In its errors, names of arguments become flags."""
    name, *options = argv
    if name not in COMMANDS:
        raise UnknownNameError("command", name, COMMANDS)
    from zloss.cli.options import flags_of, parse, with_flags

    found = command_type(name)
    try:
        command: Any = parse(found, options, prog=f"zloss {name}")
        if getattr(command, "quiet", False):
            os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # the hub client reads it when it is imported
        code: int = command.run(argv)
        return code
    except ZlossError as error:
        flags = flags_of(found)
        how = f" Set it with {flags['out']}." if isinstance(error, UnwritableFolderError) and "out" in flags else ""
        raise ZlossError(with_flags(str(error), flags) + how) from error


def command_type(name: str) -> Any:
    """The frozen dataclass of a subcommand, whose fields are its options; its module is imported only when it runs.

    `run(argv)` does the work and returns the exit code; `argv`, with the name of the subcommand, is for the record.
    """
    return getattr(import_module(f"zloss.cli.{COMMANDS[name][0]}"), name.title().replace("-", ""))


def _print_error(name: str, sentence: str) -> int:
    line = printable(f"zloss {name}: {sentence}")
    if sys.stderr.isatty():  # a terminal would break the line inside words; a pipe gets one line
        width = shutil.get_terminal_size().columns
        line = textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False)
    print(line, file=sys.stderr)
    return BAD_INPUT


def launched() -> bool:
    """Whether this process is one of several that a launcher started."""
    ranks = os.environ.get("WORLD_SIZE", "1")
    return "RANK" in os.environ and ranks.isdecimal() and int(ranks) > 1


if __name__ == "__main__":
    sys.exit(main())
