"""Tables of matched training runs: one engine for all of them.

A table is a set of arms (method and coefficient), each run at the same seeds with everything else equal, and columns that
are means over the seeds. Which runs a profile makes, and in what they deviate from the paper's, is said in the config.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zloss.errors import InputError
from zloss.report.text.numbers import number
from zloss.train.compare.finished_run import FinishedRun, check_pair
from zloss.train.config import TrainConfig
from zloss.train.step_log import read_steps
from zloss_paper.engine.profile import Overrides, Profile
from zloss_paper.engine.recipe import Measured
from zloss_paper.engine.table import Key, Row, Table, measured
from zloss_paper.engine.texts import CORPUS_NAMES, TextSource, training_sources
from zloss_paper.engine.workbench import Workbench
from zloss_paper.heads.audit_rows import MODEL_IDS, paper_name
from zloss_paper.training.base_model import base_config
from zloss_paper.training.figure import draw_steps
from zloss_paper.training.seed_means import Unavailable, column_value
from zloss_paper.training.small_training import SCALES, SEEDS, SmallSetting, small_config

CE, CENTERED_HEAD, STANDARD = "CE baseline", "Centered head", "Standard Z-loss"
FACTORIZED, GAIN_AWARE, CENTERED = "Factorized Z-loss", "Gain-aware Z-loss", "Centered Z-loss"
METHODS = {
    CE: "ce",
    CENTERED_HEAD: "centered-head",
    STANDARD: "standard",
    FACTORIZED: "factorized",
    GAIN_AWARE: "gain-aware",
    CENTERED: "centered",
}
"""The paper's names of the methods, and ours."""


@dataclass(frozen=True)
class Arm:
    """One line of a table."""

    method: str
    """By the paper's name."""
    coef: float = 0.0
    key: tuple[tuple[str, Key], ...] = ()
    """Key of its line where the method alone is not."""

    def of(self, shared: TrainConfig, seed: int) -> TrainConfig:
        """Its run at a seed."""
        return replace(shared, method=METHODS[self.method], coef=self.coef, seed=seed)


BASELINE = Arm(CE)


def low_coefficient_arms(coef: float = 1e-4) -> tuple[Arm, ...]:
    """CE, Centered head, Standard, Centered."""
    return (BASELINE, Arm(CENTERED_HEAD), Arm(STANDARD, coef), Arm(CENTERED, coef))


def stress_arms(coef: float) -> tuple[Arm, ...]:
    """All six methods in the order of the stress tables."""
    raw = (Arm(method, coef) for method in (STANDARD, FACTORIZED, GAIN_AWARE))
    return (BASELINE, Arm(CENTERED_HEAD), *raw, Arm(CENTERED, coef))


@dataclass(frozen=True)
class TrainingTable:
    """What defines a table: the paper's setting, and which small setting stands for it."""

    label: str
    model: str
    """The paper's name of its model."""
    corpus: str
    """The paper's name of its corpus."""
    columns: tuple[str, ...]
    arms: tuple[Arm, ...]
    paper: TrainConfig
    """The run that all methods share at the paper's scale."""
    seeds: tuple[int, ...]
    small: SmallSetting
    figure: bool = False
    """Whether the steps of its runs are drawn."""

    def configure(self, profile: Profile, overrides: Overrides) -> TrainingTableConfig:
        """The complete setting at a profile."""
        texts = tuple(overrides.texts)
        if profile == "paper":
            shared, base, seeds = self.paper, None, self.seeds
            if texts:
                shared = replace(shared, texts=texts, corpus=None)
        else:
            shared, seeds = small_config(profile, self.small, texts), SEEDS
            base = base_config(SCALES[profile], texts)
        given = _own_model(overrides.models, self.model)
        if given is not None:
            shared, base = replace(shared, model=given[1]), None
        if overrides.blocks is not None:
            shared = replace(shared, blocks=overrides.blocks or None)
        if overrides.block_size is not None:
            shared = replace(shared, block_size=overrides.block_size)
        sources = training_sources(texts, shared.corpus, overrides.text_source)
        config = TrainingTableConfig(self.label, profile, shared, base, self.arms, seeds, sources, ())
        return replace(config, deviations=_deviations(self, config, None if given is None else given[0]))

    def run(self, config: TrainingTableConfig, bench: Workbench) -> Measured:
        """Make the runs that are not there yet, and the rows."""
        runs = matched_runs(config, bench)

        def draw(folder: Path) -> Sequence[Path]:
            lines = {arm.method: runs[arm] for arm in config.arms}
            return [draw_steps(folder / f"{self.label.partition(':')[2]}.svg", lines)]

        return Measured(
            table_of(self, config, runs),
            notes=run_notes(config, runs, bench),
            texts=config.texts,
            details={
                "runs": [run_record(run) for arm in config.arms for run in runs[arm]],
                "training_seconds": training_seconds([run for arm in config.arms for run in runs[arm]]),
            },
            draw=draw if self.figure else None,
        )


@dataclass(frozen=True)
class TrainingTableConfig:
    """The complete setting of one table."""

    label: str
    profile: Profile
    train: TrainConfig
    """What all runs share; method, coefficient and seed are those of CE."""
    base: TrainConfig | None
    """The pretraining that gives the start; None: `train.model` is a checkpoint."""
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    texts: tuple[TextSource, ...]
    deviations: tuple[str, ...]


Runs = dict[Arm, tuple[FinishedRun, ...]]


def matched_runs(config: TrainingTableConfig, bench: Workbench) -> Runs:
    """All runs of a table by arm, seed by seed in the same order; pairs are checked to be matched."""
    arms = dict.fromkeys((BASELINE, *config.arms))
    runs = {
        arm: tuple(bench.trainings.run(arm.of(config.train, seed), config.base) for seed in config.seeds)
        for arm in arms
    }
    for arm in arms:
        for baseline, run in zip(runs[BASELINE], runs[arm], strict=True):
            check_pair(baseline, run)
    return runs


def table_of(table: TrainingTable, config: TrainingTableConfig, runs: Runs) -> Table:
    """One row per arm."""
    return Table(tuple(_row(arm, table.columns, runs, config.deviations) for arm in config.arms))


def _row(arm: Arm, columns: Sequence[str], runs: Runs, deviations: tuple[str, ...]) -> Row:
    values: dict[str, float | None] = {}
    reasons: dict[str, str] = {}
    for column in columns:
        try:
            values[column] = arm.coef if column == "lambda_aux" else column_value(column, runs[arm], runs[BASELINE])
        except Unavailable as unavailable:
            reasons[column] = str(unavailable)
    key: dict[str, Key] = dict(arm.key) or {"method": arm.method}
    return Row(key, measured(values), reasons, deviations)


def run_record(run: FinishedRun) -> dict[str, Any]:
    """The numbers of one run for the JSON file."""
    plain = {name: value for name, value in run.metrics.items() if not isinstance(value, (dict, list))}
    return {"run": run.folder.name, **plain, "heads": run.metrics["heads"], "reasons": run.metrics["reasons"]}


def training_seconds(runs: Sequence[FinishedRun]) -> dict[str, float]:
    """How long the runs took when they were made."""
    made = [json.loads((run.folder / "provenance.json").read_text(encoding="utf-8")) for run in runs]
    return {"runs": len(runs), "seconds": sum(one["seconds"] for one in made)}


def run_notes(config: TrainingTableConfig, runs: Runs, bench: Workbench) -> tuple[str, ...]:
    """What a reader of the numbers should know about the runs."""
    first = runs[BASELINE][0].metrics
    notes = [
        f"Each run takes {number(first['tokens_consumed'])} of {number(first['tokens_available'])} training tokens "
        f"(reuse {number(first['reuse'])}) and is validated on {number(first['valid_predictions'])} predictions."
    ]
    if config.base is not None:
        start = bench.trainings.pretrained(config.base)
        notes.append(
            f"All runs start from one model, pretrained for {config.base.steps} steps on "
            f"{number(start.metrics['tokens_consumed'])} tokens to PPL {number(start.metrics['ppl'])} on the same "
            "validation blocks."
        )
        notes.append(
            "At this profile the runs of a table follow from its stress setting alone: tables that differ in the paper's model, "
            "corpus or length read the same runs, and only the paper's side differs between them."
        )
    controls = [arm for arm in config.arms if arm.method == CENTERED_HEAD]
    if controls and config.train.head == "fused":
        notes.append(_control_note(runs[BASELINE], runs[controls[0]]))
    return tuple(notes)


def _control_note(baseline: Sequence[FinishedRun], control: Sequence[FinishedRun]) -> str:
    """With the fused head, Centered head and CE take the same gradients; whether they did is read from the steps."""
    same = all(
        [(step.loss, step.grad_norm) for step in read_steps(a.folder)]
        == [(step.loss, step.grad_norm) for step in read_steps(b.folder)]
        for a, b in zip(baseline, control, strict=True)
    )
    if same:
        return (
            "Centered head has the losses and gradient norms of CE at every step, bit for bit: with the fused head it trains "
            "on the same gradients, and only the coordinate it is read in differs. In the paper's bf16 path rounding makes "
            "the two differ."
        )
    return "Centered head left the trajectory of CE, which the fused head should not allow."


def _own_model(given: Sequence[str], model: str) -> tuple[str | None, str] | None:
    """(name of a model that is not the paper's, where to load it) from --model; None where none fits this table."""
    others = []
    for word in given:
        name, equals, folder = word.partition("=")
        known = paper_name(name) if equals else None if Path(word).exists() else paper_name(word)
        if known == model:
            return None, folder or MODEL_IDS[model]
        if equals and known is None:
            raise InputError(f"--model {word}: {name!r} is not a model of the paper; it has {', '.join(MODEL_IDS)}.")
        if known is None:
            others.append(word)
    if not others:
        return None
    return (Path(others[0]).name if Path(others[0]).exists() else others[0]), others[0]


def _deviations(table: TrainingTable, config: TrainingTableConfig, own_model: str | None) -> tuple[str, ...]:
    """In what the runs differ from the paper's, one sentence each."""
    ours, paper = config.train, table.paper
    found = []
    if config.base is not None:
        found.append(f"the model is a small GPT-2 that the recipe pretrains, not {table.model}")
    elif own_model is not None:
        found.append(f"the model is {own_model}, not {table.model}")
    if ours.head_shift:
        found.append(
            f"its head is untied and shifted until p99 |μ| is about {ours.head_shift:g}: a probe of ours that leaves CE as it is"
        )
    if {source.corpus for source in config.texts} != {table.corpus}:
        found.append(f"the text is {' + '.join(source.title for source in config.texts)}, not {table.corpus}")
    if (ours.steps, ours.tokens_per_step) != (paper.steps, paper.tokens_per_step):
        found.append(
            f"{ours.steps} steps of {ours.tokens_per_step} tokens, not {paper.steps} of {paper.tokens_per_step:,}"
        )
    if ours.lr != paper.lr:
        found.append(f"the learning rate is {ours.lr:g} (ours), not {paper.lr:g}")
    if (ours.precision, ours.head) != (paper.precision, paper.head):
        found.append(f"{ours.precision} with the {ours.head} head, not {paper.precision} with materialised logits")
    if len(config.seeds) != len(table.seeds):
        found.append(f"{len(config.seeds)} seeds, not {len(table.seeds)}")
    if not found and (ours.blocks, ours.block_size) != (paper.blocks, paper.block_size):
        found.append(
            f"{ours.blocks or 'all'} blocks of {ours.block_size}, not {paper.blocks or 'all'} of {paper.block_size}"
        )
    return tuple(found)


def paper_run(model: str, corpus: str, **settings: Any) -> TrainConfig:
    """A run at the paper's scale: bf16 autocast, materialised logits, its optimizer; `settings` are the table's own."""
    base = TrainConfig(
        model=MODEL_IDS[model],
        corpus=CORPUS_NAMES[corpus],
        block_size=256,
        lr=5e-5,
        beta1=0.9,
        beta2=0.95,
        weight_decay=0.1,
        clip=1.0,
        precision="bf16",
        head="paper",
        steps=1200,
        warmup=60,
        micro_batch=8,
        accumulate=2,
    )
    return replace(base, **settings)
