"""Damaged result files, read by `zloss report`: each is shown or refused by one sentence."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.contract import run_command
from tests.fuzz.mutation import damaged_bytes, damaged_json
from tests.laws.example_results import example_results
from zloss.results.files import RECORDS


@cache
def examples() -> tuple[dict[str, Any], ...]:
    """The plain form of one filled result of every kind that `zloss report` reads."""
    return tuple(record.to_dict() for schema, record in example_results().items() if schema in RECORDS)


def case(random: Random, folder: Path) -> None:
    """One damaged result, alone or beside a sound one."""
    damaged, sound = random.choice(examples()), random.choice(examples())
    file = folder / "report.json"
    if random.random() < 0.8:
        file.write_text(damaged_json(damaged, random), encoding="utf-8")
    else:
        file.write_bytes(damaged_bytes(json.dumps(damaged).encode(), random))
    words = ["report", str(folder if random.random() < 0.5 else file), "--out", str(folder / "page")]
    if random.random() < 0.2:
        (folder / "beside").mkdir()
        (folder / "beside" / "sound.json").write_text(json.dumps(sound), encoding="utf-8")
        words.insert(2, str(folder / "beside"))
    run_command(words, codes=(0, 2))
