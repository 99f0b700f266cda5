"""Commands that are disturbed, and what must be true after the same command has run again to its end."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults.child import debris, run
from tests.faults.write_events import count_writes
from tests.tiny_gguf import tiny_tensors, write_gguf
from tests.tiny_models import save_model
from tests.train.tiny_run import SCRATCH, some_text
from zloss.results.folder import LOCK_FILE

STEPS = 12


@dataclass
class Scenario:
    """One command; `place` is the folder that it writes to."""

    name: str
    words: Callable[[Path], list[str]]
    """Its words for a place; the same words run it again after a fault."""
    numbers: Callable[[Path], Any]
    """What it found out, without times and paths."""
    environment: Callable[[Path], dict[str, str]] = lambda place: {}
    partner: Callable[[Path], Path] = lambda place: place
    """Where a second process of a pair writes: by default to the same folder."""
    reference: Any = None
    seconds: float = 0.0
    """Of an undisturbed run."""
    writes: int = 0
    """Writes of an undisturbed run."""

    def start_words(self, place: Path, *, second: bool = False) -> list[str]:
        os.environ.update(self.environment(place))
        return self.words(self.partner(place) if second else place)

    def learn(self, place: Path) -> None:
        """Run once undisturbed: the numbers to compare with, the time it takes, and its writes."""
        counted = place.with_suffix(".writes")
        ended = run(self.start_words(place), count_writes(place, counted)).check_contract()
        assert ended.code == 0, ended.error
        self.reference, self.seconds, self.writes = self.numbers(place), ended.seconds, counted.stat().st_size
        shutil.rmtree(place)

    def check_again(self, place: Path) -> None:
        """The command runs again to its end: the numbers of an undisturbed run, and nothing left over."""
        ended = run(self.start_words(place)).check_contract()
        assert ended.code == 0, ended.error
        assert self.numbers(place) == self.reference
        assert debris(place) == []

    def check_untouched(self, place: Path) -> None:
        """A result that is there is whole: it is read, or refused in one sentence, and never with other numbers."""
        try:
            found = self.numbers(place)
        except FileNotFoundError:
            return
        if not (isinstance(found, dict) and found.get("status") == "partial"):  # an interrupted audit says so itself
            assert found == self.reference


def scenarios(folder: Path) -> dict[str, Scenario]:
    """train, audit, conversion of a GGUF file and center, on tiny models in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    text, model, gguf = folder / "text.txt", folder / "gpt2", folder / "tiny.gguf"
    text.write_text(some_text()[:30_000], encoding="utf-8")
    save_model("gpt2", model)
    write_gguf(gguf, tiny_tensors())
    quick = ["--text", str(text), "--block-size", "24", "--quiet"]
    audit = ["--blocks", "24", "--batch-blocks", "1", "--gradient-blocks", "2", "--no-figures", "--resume"]
    return {
        "train": Scenario("train", lambda place: _train_words(text, place), _run_numbers),
        "audit": Scenario(
            "audit",
            lambda place: ["audit", str(model), *quick, *audit, "--out", str(place)],
            _audit_numbers,
            lambda place: {"ZLOSS_SAVE_EVERY": "0"},
        ),
        "conversion": Scenario(
            "conversion",
            lambda place: ["audit", str(gguf), *quick, *audit, "--out", str(place / "audit")],
            lambda place: _audit_numbers(place / "audit"),
            lambda place: {"ZLOSS_CACHE": str(place / "cache"), "ZLOSS_SAVE_EVERY": "1000"},
            # Two audits of one file share the cache and nothing else.
            lambda place: place / "second",
        ),
        "center": Scenario(
            "center",
            # Without --force a command that has ended well is refused when it runs again.
            lambda place: ["center", str(model), *quick, "--blocks", "4", "--force", "--out", str(place / "copy")],
            lambda place: _center_numbers(place / "copy"),
        ),
    }


def recommendation(folder: Path) -> Scenario:
    """The whole protocol on the model and the text of `scenarios(folder)`: audit, four runs of 100 steps, answer."""
    model, text = folder / "gpt2", folder / "text.txt"
    training = "--steps 100 --seeds 1,2 --max-arms 1 --micro-batch 1 --block-size 24 --blocks 100 --valid-blocks 88"
    words = ["recommend", str(model), "--text", str(text), "--audit-blocks", "8", *training.split(), "--quiet"]
    return Scenario("recommend", lambda place: [*words, "--out", str(place)], _recommendation_numbers)


def _recommendation_numbers(place: Path) -> Any:
    """The answer with all its numbers but times."""
    found = json.loads((place / "recommendation.json").read_text())
    kept = ("objective", "confidence", "why", "arms", "confirmation")
    return _without_times({key: found[key] for key in kept if key in found})


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_times(inner) for key, inner in value.items() if "second" not in key}
    return [_without_times(inner) for inner in value] if isinstance(value, list) else value


def _train_words(text: Path, place: Path) -> list[str]:
    training = f"--methods standard --coef 1e-2 --steps {STEPS} --checkpoint-every 3 --trackers tensorboard"
    saving = "--gradient-blocks 2 --save-model --quiet"
    return ["train", *SCRATCH, *training.split(), *saving.split(), "--text", str(text), "--out", str(place)]


def _run_numbers(place: Path) -> Any:
    folder = place / "standard-0.01-s1"
    lines = (folder / "steps.jsonl").read_text().splitlines()
    steps = [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in lines]
    weights = hashlib.sha256((folder / "model" / "model.safetensors").read_bytes()).hexdigest()
    return json.loads((folder / "metrics.json").read_text()), steps, weights


def _center_numbers(copy: Path) -> Any:
    """What was measured, and the weights; a copy without its measurements is not whole."""
    if not copy.exists() or [path.name for path in copy.iterdir()] in ([], [LOCK_FILE]):
        raise FileNotFoundError(copy)
    assert (copy / "centering.json").is_file(), "a copy that was not measured"
    found = json.loads((copy / "centering.json").read_text())
    del found["provenance"]
    files = [path for path in sorted(copy.iterdir()) if path.name not in ("centering.json", LOCK_FILE)]
    return found, {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _audit_numbers(place: Path) -> Any:
    report = json.loads((place / "report.json").read_text())
    kept = ("model", "corpus", "ppl", "heads", "gradient", "tied_paths", "status", "mu_abs_99", "extreme_tokens")
    return {key: report[key] for key in kept}
