"""Random words on the command line: every command ends with a documented code and without a traceback."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from random import Random

from tests.fuzz.contract import run_command
from tests.train.tiny_run import SCRATCH
from zloss.cli.main import COMMANDS

LEFT_OUT = ("reproduce",)
"""It trains its own models, whatever the arguments."""
VALUES = (
    *("", "0", "1", "-1", "2", "1e-4", "nan", "inf", "-inf", "1e400", "x", "a,b", "1,2", ",", "ce", "standard,ce"),
    *("none", "\x1b[31m[/x]", "é", "n" * 300, "/", ".", "/proc/self/mem", "/root/none", "--", "-", "auto", "fp32"),
    *("True", "None"),
)


@cache
def flags(command: str) -> tuple[str, ...]:
    """The flags that the help of a command lists."""
    return tuple(sorted(set(re.findall(r"--[a-z][a-z-]+", run_command([command, "--help"], codes=(0,)).output))))


def case(random: Random, folder: Path) -> None:
    """Words of a command that has nothing large to do."""
    (folder / "text.txt").write_text("a few words " * 200)
    (folder / "loss.py").write_text("def f(z, y):\n    return z.logsumexp(-1).square().mean()\n")
    command = random.choice([name for name in COMMANDS if name not in LEFT_OUT] + ["no-such", "--help", ""])
    words = [command, *_start(command, folder, random)]
    for _ in range(random.randrange(0, 5)):
        known = flags(command) if command in COMMANDS else ("--x",)
        words.append(random.choice(known) if known and random.random() < 0.6 else _value(random, folder))
    if command in COMMANDS and "--help" not in words and "--out" in flags(command):
        words += ["--out", str(folder / "out")]
    run_command(words)


def _value(random: Random, folder: Path) -> str:
    return random.choice((*VALUES, str(folder), str(folder / "text.txt"), str(folder / "none")))


def _start(command: str, folder: Path, random: Random) -> list[str]:
    """Words with which the command comes to its end soon."""
    text = str(folder / "text.txt")
    if command == "train":
        small = ["--steps", "1", "--methods", "ce", "--trackers", "none", "--gradient-blocks", "0"]
        return [*SCRATCH, "--text", text, *small]
    if command == "audit-loss":
        return [f"{folder / 'loss.py'}:{random.choice('fg')}"]
    if command in ("audit", "audit-implementation", "center", "drift", "recommend"):
        return [str(folder / random.choice(("none", "text.txt", "")))]
    if command in ("compare", "report"):
        return [str(folder)]
    return []
