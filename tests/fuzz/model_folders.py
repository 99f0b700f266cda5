"""Damaged model folders, audited: each is audited or refused by one sentence."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from random import Random

from tests.fuzz.contract import BrokenContractError, lasting_folder, run_command
from tests.fuzz.mutation import damaged_bytes, damaged_json
from tests.tiny_models import save_model
from tests.train.tiny_run import some_text

MODELS = ("gpt2", "phi", "gemma2", "mixtral")
LARGEST = 600
"""Of a number in config.json: a model with a million layers is no damage, it is only slow."""


@cache
def sound_models() -> Path:
    """One folder per architecture, and a text."""
    folder = lasting_folder("models")
    for name in MODELS:
        save_model(name, folder / name)
    (folder / "text.txt").write_text(some_text()[:4000], encoding="utf-8")
    return folder


def case(random: Random, folder: Path) -> None:
    """One damaged file of a model; a quarter of the cases lose a file instead."""
    model = folder / "model"
    shutil.copytree(sound_models() / random.choice(MODELS), model)
    file = random.choice(sorted(path for path in model.iterdir()))
    kind = random.random()
    if kind < 0.2:
        file.unlink()
    elif file.suffix == ".json" and kind < 0.7 and file.name != "tokenizer.json":
        file.write_text(damaged_json(json.loads(file.read_text()), random, largest=LARGEST))
    else:
        file.write_bytes(damaged_bytes(file.read_bytes(), random))
    out = folder / "audit"
    words = ["audit", str(model), "--text", str(sound_models() / "text.txt"), "--blocks", "2", "--block-size", "8"]
    ended = run_command([*words, "--gradient-blocks", "1", "--no-figures", "--quiet", "--out", str(out)], codes=(0, 2))
    if (ended.code == 0) != (out / "report.json").exists():
        raise BrokenContractError(
            f"{file.name}: exit code {ended.code}, but report.json is {(out / 'report.json').exists()}"
        )
