"""`zloss`: dispatch to one subcommand, and turn every expected error into one sentence and an exit code.

Nothing here imports torch, so that help answers at once.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from typing import Any, Protocol, cast

from zloss.errors import UnknownNameError, ZlossError

DONE, FAILED_CHECK, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130


class Command(Protocol):
    """A subcommand: a frozen dataclass whose fields are its options."""

    def run(self) -> int: ...


@dataclass(frozen=True)
class Entry:
    """Where a subcommand lives; its module is imported only when it is asked for."""

    module: str
    type_name: str
    summary: str


COMMANDS = {
    "audit": Entry("audit", "Audit", "What Z-loss would do to a checkpoint: the main job."),
    "audit-loss": Entry("audit_loss", "AuditLoss", "What a loss really injects: λ, c, coordinate, denominators."),
    "router-scale": Entry("router_scale", "RouterScale", "What a router coefficient means under every convention."),
    "train": Entry("train", "Train", "The same training under several methods, everything else equal."),
    "compare": Entry("compare", "Compare", "Matched runs side by side: paired differences, accepted or rejected."),
    "center": Entry("center", "Center", "The row-centered head as a checkpoint that anyone can load."),
    "report": Entry("report", "Report", "Tables, page and figures from results; several audits side by side."),
    "reproduce": Entry("reproduce", "Reproduce", "A table of the paper: ours beside its own, its claims judged."),
    "demo": Entry("demo", "Demo", "A short demonstration of the head loss."),
}


def usage() -> str:
    """The top-level help."""
    width = max(map(len, COMMANDS))
    lines = "\n".join(f"  {name:<{width}}  {entry.summary}" for name, entry in COMMANDS.items())
    return (
        "zloss: measure, report and intervene on Z-loss.\n\n"
        "usage: zloss COMMAND [options]\n\n"
        f"commands:\n{lines}\n\n"
        "`zloss COMMAND --help` lists the options of a command; `zloss --version` prints the version.\n"
    )


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand and return its exit code."""
    words = sys.argv[1:] if argv is None else argv
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage(), end="")
        return DONE
    if words[0] == "--version":
        from zloss import __version__

        print(f"zloss {__version__}")
        return DONE
    try:
        return _load(words[0], words[1:]).run()
    except ZlossError as error:
        print(f"zloss {words[0]}: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print(f"zloss {words[0]}: interrupted", file=sys.stderr)
        return INTERRUPTED


def _load(name: str, words: list[str]) -> Command:
    if name not in COMMANDS:
        raise UnknownNameError("command", name, COMMANDS)
    import tyro

    entry = COMMANDS[name]
    command_type: Any = getattr(importlib.import_module(f"zloss.cli.{entry.module}"), entry.type_name)
    return cast(Command, tyro.cli(command_type, prog=f"zloss {name}", args=words))


if __name__ == "__main__":
    sys.exit(main())
