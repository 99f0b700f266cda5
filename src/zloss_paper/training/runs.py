"""Training runs by their setting: each is made once, in this call or an earlier one, and shared by all tables.

A run lies in OUT/runs under the fingerprint of its setting, its text and the model it starts from; a pretrained start lies
in OUT/models in the same way. A finished run is read, an interrupted one goes on from its last checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zloss
from zloss.console.progress import Progress, Step
from zloss.errors import CorpusError
from zloss.results.step_record import StepRecord
from zloss.results.train_config import TrainConfig
from zloss.train.bf16_probe import make_bf16_safe
from zloss.train.compare.finished_run import FinishedRun
from zloss.train.live import Shown
from zloss.train.run import is_finished, run_training
from zloss.train.run_options import RunOptions
from zloss.train.start import Start, prepare_start

if TYPE_CHECKING:
    from zloss_paper.engine.workbench import Workbench

PER_RUN = ("method", "coef", "target", "gain_beta", "seed", "steps", "warmup", "lr", "clip", "untie", "head_shift")
"""Fields that change neither the tokens nor the weights that are loaded: runs that differ in them alone share a start."""


class TrainingRuns:
    """The training runs of one workbench."""

    def __init__(self, bench: Workbench) -> None:
        self._bench = bench
        self._finished: dict[str, FinishedRun] = {}
        self._start: tuple[str, Start] | None = None
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self.trained = 0
        """Runs that were trained, not read."""

    def run(self, config: TrainConfig, base: TrainConfig | None = None) -> FinishedRun:
        """The finished run of `config`; with `base`, it starts from the model which that run gives."""
        key = fingerprint(config, base)
        if key not in self._finished:
            self._finished[key] = self._kept_or_trained(config, base, self._folder("runs") / key, keep_model=False)
        return self._finished[key]

    def pretrained(self, base: TrainConfig) -> FinishedRun:
        """The run that trains a start from scratch; its model is in `model/` of its folder."""
        key = fingerprint(base, None)
        if key not in self._finished:
            self._finished[key] = self._kept_or_trained(base, None, self._folder("models") / key, keep_model=True)
        return self._finished[key]

    def _kept_or_trained(
        self, config: TrainConfig, base: TrainConfig | None, place: Path, *, keep_model: bool
    ) -> FinishedRun:
        kept = _read(place) if is_finished(place) and (not keep_model or (place / "model").is_dir()) else None
        if kept is not None:
            return kept
        if base is not None:
            config = replace(config, model=str(self.pretrained(base).folder / "model"))
        if config.precision == "bf16":
            make_bf16_safe()
        bench = self._bench
        run_training(
            config,
            self._shared_start(config),
            place,
            options=RunOptions(save_model=keep_model, command=bench.command),
            view=_ProgressView(bench.progress),
            progress=bench.progress,
        )
        self.trained += 1
        made = _read(place)
        assert made is not None  # written a moment ago
        return made

    def _shared_start(self, config: TrainConfig) -> Start:
        """Model and tokens of the run; those of the last one stay loaded."""
        # A model from scratch draws its weights from the seed.
        free = PER_RUN if config.from_config is None else ()
        key = json.dumps({name: value for name, value in asdict(config).items() if name not in free})
        if self._start is None or self._start[0] != key:
            self._start = None
            with self._bench.progress.step("tokens and weights", None):
                self._start = (key, prepare_start(config))
        return self._start[1]

    def _folder(self, kind: str) -> Path:
        if self._bench.folder is not None:
            return self._bench.folder / kind
        self._scratch = self._scratch or tempfile.TemporaryDirectory(prefix="zloss-runs-")
        return Path(self._scratch.name) / kind


def fingerprint(config: TrainConfig, base: TrainConfig | None) -> str:
    """Identity of a run's numbers: every setting that is set, the texts by content, the start, the code's version."""
    settings: dict[str, Any] = {name: value for name, value in asdict(config).items() if value is not None}
    for name in ("texts", "valid_texts"):
        settings[name] = [_text_sha256(text) for text in settings[name]]
    settings["model"] = _model_identity(config.model) if base is None else f"trained {fingerprint(base, None)}"
    if config.from_config is not None and Path(config.from_config).is_file():
        settings["from_config"] = json.loads(Path(config.from_config).read_text(encoding="utf-8"))
    content = json.dumps([zloss.__version__, settings], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _text_sha256(text: str) -> str:
    try:
        with Path(text).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CorpusError(f"cannot read the text {text}: {error.strerror}.") from error


def _model_identity(model: str) -> str:
    """A name on the hub, or a folder by the names, sizes and times of its files."""
    place = Path(model)
    if not place.exists():
        return model
    files = [place] if place.is_file() else sorted(file for file in place.iterdir() if file.is_file())
    return " ".join(f"{file.name}:{file.stat().st_size}:{file.stat().st_mtime_ns}" for file in files)


def _read(place: Path) -> FinishedRun | None:
    """The run of a folder; None where a file was cut off, so that it is made again."""
    try:
        config, metrics = (
            json.loads((place / name).read_text(encoding="utf-8")) for name in ("config.json", "metrics.json")
        )
    except (OSError, ValueError):
        return None
    return FinishedRun(place, config, metrics)


class _ShownStep:
    def __init__(self, step: Step) -> None:
        self._step = step

    def show(self, record: StepRecord, tokens: int) -> None:
        self._step.advance(1)


class _ProgressView:
    """Runs on the workbench's own progress display."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    @contextmanager
    def run(self, name: str, steps: int, done: int) -> Iterator[Shown]:
        with self._progress.step(name, steps - done, "steps") as step:
            yield _ShownStep(step)
