"""Damaged folders of finished runs, read by `zloss compare`, and again by `zloss train`."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from random import Random

from tests.fuzz.contract import lasting_folder, run_command
from tests.fuzz.mutation import damaged_bytes, damaged_json
from tests.train.tiny_run import SCRATCH, some_text

STEPS = 6


def train_words(folder: Path) -> list[str]:
    """CE and standard Z-loss on a tiny model."""
    words = ["train", *SCRATCH, "--methods", "ce,standard", "--coef", "1e-2", "--steps", str(STEPS)]
    words += ["--text", str(text_file()), "--trackers", "none", "--checkpoint-every", "0"]
    return [*words, "--gradient-blocks", "0", "--quiet", "--out", str(folder)]


@cache
def text_file() -> Path:
    file = lasting_folder("runs") / "text.txt"
    file.write_text(some_text()[:20_000], encoding="utf-8")
    return file


@cache
def sound_runs() -> Path:
    """Two finished runs of one experiment, trained once."""
    folder = text_file().parent / "runs"
    assert run_command(train_words(folder)).code == 0
    return folder


def case(random: Random, folder: Path) -> None:
    """One or two damaged files in a copy of the runs; `compare`, and sometimes `train`, which repairs or refuses."""
    shutil.copytree(sound_runs(), folder, dirs_exist_ok=True)
    for _ in range(random.choice((1, 1, 2))):
        _damage(random.choice(sorted(path for path in folder.glob("*/*.json*"))), random)
    run_command(["compare", str(folder)], codes=(0, 2))
    if random.random() < 0.1:
        run_command(train_words(folder), codes=(0, 2))


def _is_sound(file: Path) -> bool:
    """Whether every line, or the whole file, is JSON: a file may be damaged twice."""
    try:
        text = file.read_text(encoding="utf-8")
        for part in text.splitlines() if file.suffix == ".jsonl" else [text]:
            json.loads(part)
    except (ValueError, RecursionError):
        return False
    return True


def _damage(file: Path, random: Random) -> None:
    content = file.read_bytes()
    kind = random.random()
    if kind >= 0.3 and not _is_sound(file):  # damaged a moment ago
        kind = 0.2
    if kind < 0.1:
        file.unlink()
    elif kind < 0.3:
        file.write_bytes(damaged_bytes(content, random))
    elif file.suffix == ".jsonl":
        lines = content.decode().splitlines()
        at = random.randrange(len(lines)) if lines else 0
        what = random.randrange(4)
        if what == 0 and lines:
            del lines[at]
        elif what == 1 and lines:
            lines.insert(at, lines[at])
        elif lines:
            lines[at] = damaged_json(json.loads(lines[at]), random)
        file.write_text("\n".join(lines) + "\n")
    else:
        file.write_text(damaged_json(json.loads(content), random))
