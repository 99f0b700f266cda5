"""Damaged files: JSON and bytes changed by a seeded generator, and the commands that read the results.

A damaged result file, run folder or model folder is read or refused with one sentence. The same seed gives the same damage.
"""

from __future__ import annotations

import copy
import json
import math
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.contract import BrokenContractError, lasting_folder, run_command
from tests.laws.example_results import example_results
from tests.tiny_models import save_model
from tests.train.tiny_run import SCRATCH, some_text
from zloss.results.files import RECORDS

MODELS = ("gpt2", "phi", "gemma2", "mixtral")
LARGEST = 600
"""Of a number in config.json: a model with a million layers is not damaged, only slow."""


@cache
def examples() -> tuple[dict[str, Any], ...]:
    """The plain form of one filled result of every kind that `zloss report` reads."""
    return tuple(record.to_dict() for schema, record in example_results().items() if schema in RECORDS)


def result_file(random: Random, folder: Path) -> None:
    """One damaged result, alone or next to an intact one."""
    damaged, sound = random.choice(examples()), random.choice(examples())
    file = folder / "report.json"
    if random.random() < 0.8:
        file.write_text(damaged_json(damaged, random), encoding="utf-8")
    else:
        file.write_bytes(damaged_bytes(json.dumps(damaged).encode(), random))
    words = ["report", str(folder if random.random() < 0.5 else file), "--out", str(folder / "page")]
    if random.random() < 0.2:
        (folder / "intact").mkdir()
        (folder / "intact" / "result.json").write_text(json.dumps(sound), encoding="utf-8")
        words.insert(2, str(folder / "intact"))
    run_command(words, codes=(0, 2))


def train_words(folder: Path) -> list[str]:
    """CE and standard Z-loss on a tiny model."""
    words = ["train", *SCRATCH, "--methods", "ce,standard", "--coef", "1e-2", "--steps", "6"]
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


def run_folder(random: Random, folder: Path) -> None:
    """One or two damaged files in a copy of the runs; `compare`, and sometimes `train`, which repairs or refuses."""
    shutil.copytree(sound_runs(), folder, dirs_exist_ok=True)
    for _ in range(random.choice((1, 1, 2))):
        _damage_run_file(random.choice(sorted(path for path in folder.glob("*/*.json*"))), random)
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


def _damage_run_file(file: Path, random: Random) -> None:
    content = file.read_bytes()
    kind = random.random()
    if kind >= 0.3 and not _is_sound(file):  # already damaged
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


@cache
def sound_models() -> Path:
    """One folder per architecture, and a text."""
    folder = lasting_folder("models")
    for name in MODELS:
        save_model(name, folder / name)
    (folder / "text.txt").write_text(some_text()[:4000], encoding="utf-8")
    return folder


def model_folder(random: Random, folder: Path) -> None:
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


HOSTILE_TEXT = "\x1b[31m[/x]\u2028\u0085\x00</script>" + "\ud800"
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 10**6, 2**63, 10**400, 0.5, -0.0, 1e-320, 1e38, -1e38, 1e200, 1e308, -1e308),
    *(float("nan"), float("inf"), float("-inf")),
    *("", "x", "nan", "1e9", "é" * 300, HOSTILE_TEXT),
    *([], {}, [[]], [None], [0.0], {"": None}, {"a": {"b": [1, "2"]}}),
)
"""What values are replaced with: numbers at the ends of their range, text for numbers, containers for scalars."""


def damaged_json(data: Any, random: Random, *, largest: float = math.inf) -> str:
    """The text of `data` after one to three changes of its values or keys; no new number is beyond `largest`."""
    data = copy.deepcopy(data)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        data = _changed(data, random)
    return json.dumps(_bounded(data, largest))


def damaged_bytes(content: bytes, random: Random) -> bytes:
    """`content` cut, overwritten, repeated, in another encoding, or replaced."""
    kind, at = random.randrange(9), random.randrange(len(content) + 1)
    if kind <= 2:
        return content[:at]
    if kind == 3:
        return content[:at] + bytes([random.randrange(256)]) + content[at + 1 :]
    if kind == 4:
        return content[:at] + random.randbytes(random.randrange(1, 40)) + content[at:]
    if kind == 5:
        return content[:at] + content[random.randrange(len(content) + 1) :]
    if kind == 6:
        return random.choice((b"", b"\x00" * len(content), b"null", b"[]", b"{}", b'""', b"[" * 100_000, b"\xff\xfe"))
    if kind == 7:
        return b"\xef\xbb\xbf" + content
    return content.decode("utf-8", errors="replace").encode("utf-16")


def _changed(data: Any, random: Random) -> Any:
    places = list(_places(data))
    if not places:
        return random.choice(VALUES)
    holder, key = random.choice(places)
    kind = random.randrange(10)
    if kind <= 3:
        holder[key] = _other_value(holder[key], random)
    elif kind == 4:
        del holder[key]
    elif kind == 5 and isinstance(holder, dict):
        holder[random.choice((key + "_", "extra", "", "schema"))] = holder.pop(key)
    elif kind == 6:
        other, name = random.choice(places)
        holder[key], other[name] = other[name], copy.deepcopy(holder[key])
    elif kind == 7 and isinstance(holder, list):
        random.choice((holder.reverse, holder.clear, lambda: holder.insert(key, copy.deepcopy(holder[key]))))()
    elif isinstance(holder[key], (int, float)) and not isinstance(holder[key], bool):
        factor = random.choice((-1, 0, 1e3, 1e-9, 1e30, -1e18))
        holder[key] = holder[key] * factor if abs(holder[key]) < 1e200 else 0
    else:
        holder[key] = copy.deepcopy(random.choice(VALUES))
    return data


def _bounded(data: Any, largest: float) -> Any:
    if isinstance(data, dict):
        return {key: _bounded(value, largest) for key, value in data.items()}
    if isinstance(data, list):
        return [_bounded(value, largest) for value in data]
    return 7 if isinstance(data, (int, float)) and abs(data) > largest else data


def _other_value(value: Any, random: Random) -> Any:
    """Any hostile value; in most cases one of the same type, which passes a type check."""
    same = [other for other in VALUES if _type(other) == _type(value)]
    return copy.deepcopy(random.choice(same if same and random.random() < 0.7 else VALUES))


def _type(value: Any) -> type:
    return float if isinstance(value, int) and not isinstance(value, bool) else type(value)


def _places(data: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of every value; of a long list of plain numbers its ends only, so that other keys are met as well."""
    if isinstance(data, dict):
        for key in data:
            yield data, key
            yield from _places(data[key])
    elif isinstance(data, list):
        plain = len(data) > 6 and not isinstance(data[0], (dict, list))
        for index in (0, len(data) - 1) if plain else range(len(data)):
            yield data, index
            yield from _places(data[index])
