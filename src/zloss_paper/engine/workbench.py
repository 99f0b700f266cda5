"""What the recipes of one call share: audits and training runs by their setting, the loaded model, progress.

With a folder, an audit is kept in OUT/audits and a run in OUT/runs under the fingerprint of its settings, its text and its
weights; a pretrained model that other runs start from is kept in OUT/models. What is finished is read, what was interrupted
resumes. Equal fingerprints mean equal numbers.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

import zloss
from zloss.audit.checkpoint.run import run_audit
from zloss.audit.config import AuditConfig
from zloss.console import Progress, Silent, Step
from zloss.decide.decision_map import with_decisions
from zloss.errors import InputError
from zloss.measure.bf16_products import make_bf16_safe
from zloss.measure.measurement import model_blocks
from zloss.models.checkpoint import Checkpoint, load_checkpoint
from zloss.models.output_head import find_head, hidden_states
from zloss.results.audit import AuditReport
from zloss.results.files import read_record
from zloss.results.run_config import TrainConfig
from zloss.results.steps import StepRecord
from zloss.text import Blocks, open_corpus
from zloss.train.finished import FinishedRun, read_run
from zloss.train.folder import is_finished
from zloss.train.options import RunOptions
from zloss.train.run import run_training
from zloss.train.start import Start, prepare_start
from zloss_paper.engine.inputs import file_sha256

PER_RUN = ("method", "coef", "target", "gain_beta", "seed", "steps", "warmup", "lr", "clip", "untie", "head_shift")
"""Fields that change neither the tokens nor the weights that are loaded: runs that differ in them alone share a start."""
PER_MOE_RUN = ("router", "router_coef", "router_target")
"""The same among the fields of a run with experts."""
Extra = Callable[[], Mapping[str, Any]]
"""A further measurement, as plain JSON values."""
Result = TypeVar("Result")


class Workbench:
    """One call of `zloss reproduce`: what two recipes request is made once."""

    def __init__(
        self, folder: Path | None = None, *, progress: Progress | None = None, command: str = "zloss reproduce"
    ) -> None:
        self.folder = folder
        self.progress = progress or Silent()
        self.command = command
        """The command line that provenance names; it changes from recipe to recipe."""
        self.audits_made = 0
        """Audits that were run, not read."""
        self.runs_trained = 0
        """Runs that were trained, not read."""
        self._results: dict[tuple[Any, ...], Any] = {}
        self._latest: dict[str, tuple[str, Any]] = {}
        self._scratch: tempfile.TemporaryDirectory[str] | None = None

    def once(self, key: tuple[Any, ...], make: Callable[[], Result]) -> Result:
        """What `make` returns, kept in memory the first time `key` is requested."""
        if key not in self._results:
            self._results[key] = make()
        result: Result = self._results[key]
        return result

    def audit(self, config: AuditConfig, extras: Mapping[str, Extra] | None = None) -> AuditReport:
        """The report of `config`. `extras` are measured once, and kept under their names in the report's `extra`.

        Ctrl-C leaves what is finished in the folder.
        """
        key = ("audit", audit_fingerprint(config))
        place = None if self.folder is None else self.folder / "audits" / key[1]
        before: AuditReport | None = self._results.get(key)
        if before is None and place is not None:
            before = _kept(partial(read_record, place / "report.json", AuditReport))
        report = before
        if report is None:
            progress, command, checkpoint = self.progress, self.command, self.checkpoint(config)
            report = run_audit(
                config, folder=place, resume=True, progress=progress, command=command, checkpoint=checkpoint
            )
            self.audits_made += 1
            if report.status == "partial":
                raise KeyboardInterrupt
            report = with_decisions(report)
        for name, measure in (extras or {}).items():
            if name not in report.extra:
                report = replace(report, extra={**report.extra, name: dict(measure())})
        self._results[key] = report
        if place is not None and report is not before:
            report.write(place / "report.json")
        return report

    def run(self, config: TrainConfig, base: TrainConfig | None = None) -> FinishedRun:
        """The finished training run of `config`; with `base`, it starts from the model which that run gives."""
        key = run_fingerprint(config, base)
        return self.once(("run", key), lambda: self._kept_or_trained(config, base, self._place("runs") / key))

    def pretrained(self, base: TrainConfig) -> FinishedRun:
        """The run that trains a start from scratch; its model is in `model/` of its folder."""
        key = run_fingerprint(base)
        place = self._place("models") / key
        return self.once(("model", key), lambda: self._kept_or_trained(base, None, place, keep_model=True))

    def _kept_or_trained(
        self, config: TrainConfig, base: TrainConfig | None, place: Path, *, keep_model: bool = False
    ) -> FinishedRun:
        if is_finished(place) and (not keep_model or (place / "model").is_dir()):
            kept = _kept(partial(read_run, place))
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
            options=RunOptions(save_model=keep_model, command=self.command),
            view=_RunView(self.progress),
            progress=self.progress,
        )
        self.runs_trained += 1
        return read_run(place)

    def _shared_start(self, config: TrainConfig) -> Start:
        """Model and tokens of the run; the most recent ones stay loaded."""
        settings = asdict(config)
        for name in PER_RUN if config.from_config is None else ():
            del settings[name]
        for name in PER_MOE_RUN if config.moe is not None else ():
            del settings["moe"][name]
        return self._keep_latest("start", json.dumps(settings), "tokens and weights", lambda: prepare_start(config))

    def _place(self, kind: str) -> Path:
        if self.folder is not None:
            return self.folder / kind
        self._scratch = self._scratch or tempfile.TemporaryDirectory(prefix="zloss-runs-")
        return Path(self._scratch.name) / kind

    def checkpoint(self, config: AuditConfig) -> Checkpoint:
        """The model of `config`; only one stays loaded at a time."""
        options = {name: getattr(config, name) for name in ("dtype", "trust_remote_code", "allow_pickle", "tokenizer")}
        key, shown = json.dumps([config.model, options]), f"loading {Path(config.model).name}"
        return self._keep_latest("checkpoint", key, shown, lambda: load_checkpoint(config.model, **options))

    def _keep_latest(self, kind: str, key: str, shown: str, make: Callable[[], Result]) -> Result:
        """What `make` returns; only the latest of a kind stays in memory."""
        if self._latest.get(kind, ("", None))[0] != key:
            self._latest.pop(kind, None)
            with self.progress.step(shown, None):
                self._latest[kind] = (key, make())
        result: Result = self._latest[kind][1]
        return result

    def hidden(self, config: AuditConfig) -> Tensor:
        """What the output head receives, for every prediction of the audit's text: [T, D]."""
        checkpoint = self.checkpoint(config)
        blocks = text_blocks(config, checkpoint)
        parts = []
        with (
            torch.no_grad(),
            hidden_states(checkpoint, find_head(checkpoint)) as hidden_of,
            self.progress.step("hidden states", blocks.predictions) as step,
        ):
            for start in range(0, blocks.count, config.batch_blocks):
                stop = min(start + config.batch_blocks, blocks.count)
                parts.append(blocks.counted(hidden_of(blocks.inputs(start, stop))).flatten(0, 1))
                step.advance((stop - start) * blocks.size)
        return torch.cat(parts)


def text_blocks(config: AuditConfig, checkpoint: Checkpoint) -> Blocks:
    """The blocks of the audit's text, as the checkpoint's tokenizer cuts it."""
    corpus = open_corpus(config.texts, config.corpus, config.text_field)
    return model_blocks(
        checkpoint, corpus, size=config.block_size, count=config.blocks, bos=config.bos, offset=config.offset
    ).blocks


def audit_fingerprint(config: AuditConfig) -> str:
    """Identity of an audit's numbers: every setting, the texts by content, the weights, the version of zloss."""
    return _fingerprint(
        asdict(config) | {"texts": _texts_by_content(config.texts), "weights": _weights_by_files(config.model)}
    )


def run_fingerprint(config: TrainConfig, base: TrainConfig | None = None) -> str:
    """Identity of a run's numbers: every setting that is set, the texts by content, the start, the version of zloss."""
    settings: dict[str, Any] = {name: value for name, value in asdict(config).items() if value is not None}
    for name in ("texts", "valid_texts"):
        settings[name] = _texts_by_content(settings[name])
    if base is not None:
        settings["model"] = f"trained {run_fingerprint(base)}"
    elif config.pretrained:
        settings["model"] = _weights_by_files(config.model)
    if config.moe is not None and config.moe.tokenizer is not None:
        settings["moe"]["tokenizer"] = _weights_by_files(config.moe.tokenizer)
    if config.from_config is not None and Path(config.from_config).is_file():
        settings["from_config"] = json.loads(Path(config.from_config).read_text(encoding="utf-8"))
    return _fingerprint(settings)


def _fingerprint(settings: Mapping[str, Any]) -> str:
    """Sixteen hexadecimal digits of the settings, which must be plain JSON values, and of the version of zloss."""
    content = json.dumps([zloss.__version__, settings], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _texts_by_content(texts: Sequence[str]) -> list[str]:
    """The sha256 of every file: a moved text is still the same text."""
    return [file_sha256(Path(text)) for text in texts]


def _weights_by_files(model: str) -> str:
    """A folder or file by the names, sizes and times of its files; what is not on this disk by its name."""
    place = Path(model)
    if not place.exists():
        return model
    files = [place] if place.is_file() else sorted(file for file in place.iterdir() if file.is_file())
    return " ".join(f"{file.name}:{file.stat().st_size}:{file.stat().st_mtime_ns}" for file in files)


def _kept(read: Callable[[], Result]) -> Result | None:
    """What a file holds; None if it is missing, truncated or of another version, so that it is computed again."""
    try:
        return read()
    except InputError:
        return None


class _RunView:
    """Shows the steps of a run on the progress display of the whole call."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._step: Step | None = None

    @contextmanager
    def run(self, name: str, steps: int, done: int) -> Iterator[_RunView]:
        with self._progress.step(name, steps - done, "steps") as self._step:
            yield self

    def show(self, record: StepRecord, tokens: int) -> None:
        assert self._step is not None
        self._step.advance(1)
