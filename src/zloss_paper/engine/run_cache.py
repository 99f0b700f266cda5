"""Training runs by their setting: each is made once, in this call or an earlier one, and shared by all recipes.

A run, dense or with experts, lies in OUT/runs under the fingerprint of its setting. A pretrained model that other runs
start from lies in OUT/models in the same way. A finished run is read; an interrupted one goes on from its last checkpoint.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from zloss.console import Progress, Step
from zloss.errors import InputError
from zloss.measure.bf16_products import make_bf16_safe
from zloss.results.step_record import StepRecord
from zloss.results.train_config import TrainConfig
from zloss.train.compare.finished_run import FinishedRun, read_run
from zloss.train.folder.run_folder import is_finished
from zloss.train.run import run_training
from zloss.train.run_options import RunOptions
from zloss.train.start.run_start import Start, prepare_start
from zloss.train.step.live import Shown
from zloss_paper.engine.fingerprint import fingerprint, texts_by_content, weights_by_files

PER_RUN = ("method", "coef", "target", "gain_beta", "seed", "steps", "warmup", "lr", "clip", "untie", "head_shift")
"""Fields that change neither the tokens nor the weights that are loaded: runs that differ in them alone share a start."""
PER_MOE_RUN = ("router", "router_coef", "router_target")
"""The same among the fields of a run with experts."""


class RunCache:
    """The training runs of one call."""

    def __init__(self, folder: Path | None, progress: Progress, command: Callable[[], str]) -> None:
        self._folder = folder
        self._progress = progress
        self._command = command
        self._finished: dict[str, FinishedRun] = {}
        self._start: tuple[str, Start] | None = None
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self.trained = 0
        """Runs that were trained, not read."""

    def run(self, config: TrainConfig, base: TrainConfig | None = None) -> FinishedRun:
        """The finished run of `config`; with `base`, it starts from the model which that run gives."""
        key = run_fingerprint(config, base)
        if key not in self._finished:
            self._finished[key] = self._kept_or_trained(config, base, self._place("runs") / key, keep_model=False)
        return self._finished[key]

    def pretrained(self, base: TrainConfig) -> FinishedRun:
        """The run that trains a start from scratch; its model is in `model/` of its folder."""
        key = run_fingerprint(base)
        if key not in self._finished:
            self._finished[key] = self._kept_or_trained(base, None, self._place("models") / key, keep_model=True)
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
        run_training(
            config,
            self._shared_start(config),
            place,
            options=RunOptions(save_model=keep_model, command=self._command()),
            view=_ProgressView(self._progress),
            progress=self._progress,
        )
        self.trained += 1
        made = _read(place)
        assert made is not None  # written a moment ago
        return made

    def _shared_start(self, config: TrainConfig) -> Start:
        """Model and tokens of the run; those of the last one stay loaded."""
        key = _start_key(config)
        if self._start is None or self._start[0] != key:
            self._start = None
            with self._progress.step("tokens and weights", None):
                self._start = (key, prepare_start(config))
        return self._start[1]

    def _place(self, kind: str) -> Path:
        if self._folder is not None:
            return self._folder / kind
        self._scratch = self._scratch or tempfile.TemporaryDirectory(prefix="zloss-runs-")
        return Path(self._scratch.name) / kind


def run_fingerprint(config: TrainConfig, base: TrainConfig | None = None) -> str:
    """Identity of a run's numbers: every setting that is set, the texts by content, the start, the version of zloss."""
    settings: dict[str, Any] = {name: value for name, value in asdict(config).items() if value is not None}
    for name in ("texts", "valid_texts"):
        settings[name] = texts_by_content(settings[name])
    if base is not None:
        settings["model"] = f"trained {run_fingerprint(base)}"
    elif config.pretrained:
        settings["model"] = weights_by_files(config.model)
    if config.moe is not None and config.moe.tokenizer is not None:
        settings["moe"]["tokenizer"] = weights_by_files(config.moe.tokenizer)
    if config.from_config is not None and Path(config.from_config).is_file():
        settings["from_config"] = json.loads(Path(config.from_config).read_text(encoding="utf-8"))
    return fingerprint(settings)


def _start_key(config: TrainConfig) -> str:
    """Equal for runs that may share their tokens and the weights that are loaded."""
    settings = asdict(config)
    for name in PER_RUN if config.from_config is None else ():
        del settings[name]
    for name in PER_MOE_RUN if config.moe is not None else ():
        del settings["moe"][name]
    return json.dumps(settings)


def _read(place: Path) -> FinishedRun | None:
    """The run of a folder; None where a file was cut off, so that it is made again."""
    try:
        return read_run(place)
    except InputError:
        return None


class _ShownStep:
    def __init__(self, step: Step) -> None:
        self._step = step

    def show(self, record: StepRecord, tokens: int) -> None:
        self._step.advance(1)


class _ProgressView:
    """Shows the steps of a run on the progress display of the whole call."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    @contextmanager
    def run(self, name: str, steps: int, done: int) -> Iterator[Shown]:
        with self._progress.step(name, steps - done, "steps") as step:
            yield _ShownStep(step)
