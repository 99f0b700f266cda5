"""Drift over the checkpoints of one run: find them, audit each once on the same text, evaluate what moved."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from zloss import __version__
from zloss.audit.checkpoint.run import run_audit_of
from zloss.console import Progress, Silent
from zloss.decide.decision_map import with_decisions
from zloss.decide.drift import SHIFT_KEYS, DriftLimits, evaluate_drift, within_audit_limit
from zloss.decide.intervals import mean_over_tokens
from zloss.errors import CheckpointError, InputError, first_line
from zloss.jobs import Job
from zloss.measure.measurement import ModelBlocks, model_blocks
from zloss.measure.tokens import DRIFT_TAILS, block_values
from zloss.models.checkpoint import (
    Checkpoint,
    check_not_adapter,
    check_not_bare_weights,
    load_checkpoint,
    model_fingerprint,
)
from zloss.protocol.config import LEAST_BLOCKS, LEAST_TOKENS, DriftConfig
from zloss.results.audit import HeadNumbers
from zloss.results.drift import KEPT_FILE, Drift, DriftCheckpoint, DriftNumbers, KeptCheckpoint
from zloss.results.files import read_record
from zloss.results.folder import Owner, check_folder, refuse_other, text_name
from zloss.results.provenance import Provenance, shared_keys
from zloss.text import open_corpus

CHECKPOINTS = "checkpoints"
AUDIT_FILE, CONFIG_FILE = "report.json", "config.json"
_STEP = re.compile(r"(?:step|steps|iter|iteration|checkpoint|ckpt)[-_=]?(\d+)", re.IGNORECASE)
SHAPE = {
    "model_type": "architecture",
    "vocab_size": "vocabulary",
    "hidden_size": "width",
    "num_hidden_layers": "number of layers",
    "tie_word_embeddings": "tie of head and embedding",
}
"""Key of a config → what it is called in an error. A run changes none of them."""


@dataclass(frozen=True)
class Place:
    """Where one checkpoint is."""

    name: str
    """Name of the folder, or the revision."""
    step: int
    model: str
    """Folder or Hugging Face id."""
    revision: str | None = None


def run_drift(
    config: DriftConfig,
    folder: Path,
    *,
    limits: DriftLimits | None = None,
    force: bool = False,
    progress: Progress | None = None,
    say: Callable[[str], None] = lambda text: None,
    command: str = "zloss.protocol.drift.run_drift",
) -> Drift:
    """The record of the run; every finished checkpoint is kept in `folder` and not measured again.

    `force`: replace the results of a different experiment in `folder`.
    Every checkpoint is checked before the first one is measured: config, tokenizer, text, and the headers of local weights.
    """
    started, begin = datetime.now(UTC), time.perf_counter()
    places = find_places(config)
    check_folder(folder)
    name = run_name(config, places)
    refuse_other(folder, Owner("drift", name, text_name(config.texts, config.corpus)), force=force)
    progress = progress or Silent()
    with progress.step("checking the checkpoints", None):
        check_inputs(places, config)
    kept: list[KeptCheckpoint] = []
    for number, place in enumerate(places, start=1):
        one, known = measure_checkpoint(place, config, folder, progress=progress, command=command)
        kept.append(one)
        say(f"{place.name}: {'kept from before' if known else 'measured'} ({number} of {len(places)})")
    provenance = Provenance(**shared_keys(command, started, time.perf_counter() - begin))
    return evaluate_drift(kept, limits, model=name, provenance=provenance)


def measure_checkpoint(
    place: Place, config: DriftConfig, folder: Path, *, progress: Progress, command: str
) -> tuple[KeptCheckpoint, bool]:
    """(the finished checkpoint, whether it was measured already); Ctrl-C during its audit ends the whole command.

    `folder` is the folder of the whole measurement: the audit is kept in `checkpoints/NAME` inside it.
    """
    with progress.step(f"loading {place.name}", None):
        checkpoint, cut = _open(place, config)
        blocks, audit = cut.blocks, replace(config.audit(place.name), block_size=cut.blocks.size)
        weights, tokens = model_fingerprint(checkpoint), blocks.fingerprint()
    identity = f"{weights}-{audit.fingerprint(tokens)}-{audit.gradient_blocks}-{__version__}"
    kept_in = folder / CHECKPOINTS / _folder_name(place.name)
    # An unreadable file is measured again.
    with contextlib.suppress(InputError):
        kept = read_record(kept_in / KEPT_FILE, KeptCheckpoint)
        if kept.identity == identity and kept.checkpoint.step == place.step:
            return kept, True
    found = run_audit_of(Job(), audit, progress=progress, command=command, checkpoint=checkpoint)
    assert found is not None
    if found.report.status == "partial":
        raise KeyboardInterrupt
    report, by_block = found.report.finite(), block_values(found.columns, found.measurement, blocks, DRIFT_TAILS)
    measured = DriftCheckpoint(
        name=place.name,
        step=place.step,
        weights=weights,
        vocab=report.model.vocab,
        width=report.model.width,
        ce=mean_over_tokens(by_block.ce, by_block.tokens),
        ppl=report.ppl,
        raw=_numbers(report.heads.raw, None if report.gradient is None else report.gradient.raw.r_z),
        centered=_numbers(report.heads.centered, None if report.gradient is None else report.gradient.centered.r_z),
    )
    kept = KeptCheckpoint(identity, tokens, report.corpus.name, measured, by_block, cut.notes)
    with_decisions(found.report).write(kept_in / AUDIT_FILE)
    # Last: its presence says that the checkpoint is finished.
    kept.write(kept_in / KEPT_FILE)
    return kept, False


def _folder_name(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name)


def _open(place: Place, config: DriftConfig, *, weights: bool = True) -> tuple[Checkpoint, ModelBlocks]:
    """A checkpoint, with or without its weights, and the blocks of the text that it reads."""
    checkpoint = load_checkpoint(
        place.model,
        dtype=config.dtype,
        trust_remote_code=config.trust_remote_code,
        allow_pickle=config.allow_pickle,
        revision=place.revision,
        tokenizer=config.tokenizer,
        weights=weights,
    )
    corpus = open_corpus(config.texts, config.corpus, config.text_field)
    cut = model_blocks(
        checkpoint, corpus, size=config.block_size, count=config.blocks, bos=config.bos, offset=config.offset
    )
    blocks = cut.blocks
    if blocks.count < LEAST_BLOCKS or blocks.predictions < LEAST_TOKENS:
        raise InputError(
            f"the text {corpus.name!r} gives {blocks.count} blocks of {blocks.size}, but at least {LEAST_BLOCKS} blocks and "
            f"{LEAST_TOKENS} tokens are needed: use a longer text."
        )
    return checkpoint, cut


def _numbers(head: HeadNumbers, r_z: float | None) -> DriftNumbers:
    keys = (field.name for field in fields(DriftNumbers) if field.name != "r_z")
    return DriftNumbers(**{key: getattr(head, key) for key in keys}, r_z=r_z)


def next_command(drift: Drift, config: DriftConfig, folder: Path) -> tuple[str, str]:
    """(the command that follows from the drift in `folder`, what to do and learn with it).

    A common shift that CE cannot see: `zloss center` on the last checkpoint. Anything else that CE cannot see, or that ended
    beyond a limit: its audit. Nothing: the audit of the loss.
    """
    last = find_places(config)[-1]
    text = [word for name in config.texts for word in ("--text", name)]
    text += [] if config.corpus is None or config.texts else ["--corpus", config.corpus]
    moved = [one for one in drift.movements if one.state in ("invisible", "with_ce")]
    invisible, vocab = drift.invisible, drift.checkpoints[-1].vocab
    if all(one.state == "with_ce" and within_audit_limit(one, vocab) for one in moved):
        return "zloss audit-loss MODULE:FUNCTION", (
            "nothing here calls for a change. If you already use a Z-loss, check that it applies the λ, c and denominator "
            "that you believe it does"
        )
    shifted = any(one.quantity in SHIFT_KEYS for one in invisible)
    kept_in = folder / CHECKPOINTS / _folder_name(last.name)
    words, why = ["zloss", "report", str(kept_in)], "read the audit of the last checkpoint, which says what matters"
    if shifted and last.revision is None and not any(one.coordinate == "centered" for one in invisible):
        words = ["zloss", "center", last.model, *text, "--out", "zloss-centered"]
        why = "write a centered copy of the last checkpoint, and see what the shift costs in 16 bits"
    return shlex.join(words), why


# Which checkpoints


def find_places(config: DriftConfig) -> list[Place]:
    """At least two places with distinct steps, sorted by step."""
    if not config.checkpoints:
        raise InputError(
            "`checkpoints` is expected to name folders of checkpoints, or a Hugging Face id with `revisions`."
        )
    if config.revisions:
        model = config.checkpoints[0]
        if len(config.checkpoints) != 1:
            raise InputError(
                f"`revisions` needs exactly one Hugging Face id, but `checkpoints` names {len(config.checkpoints)}."
            )
        if Path(model).is_dir():
            raise InputError(f"`revisions` needs a Hugging Face id, but {model} is a folder.")
        places = [_place(name, model, name) for name in config.revisions]
    else:
        folders = [folder for name in config.checkpoints for folder in _folders(Path(name))]
        places = [_place(folder.absolute().name, str(folder)) for folder in folders]
    places.sort(key=lambda place: place.step)
    for before, after in itertools.pairwise(places):
        if before.step == after.step:
            raise InputError(
                f"`checkpoints` has two checkpoints for step {before.step}, {before.model} and {after.model}: leave one out."
            )
    if len(places) < 2:
        found = f"only {places[0].name} was found" if places else "none was found"
        raise InputError(f"`checkpoints` is expected to name at least two checkpoints of one run, but {found}.")
    return places


def _folders(folder: Path) -> list[Path]:
    """The checkpoints inside a folder where it holds some, else the folder itself."""
    check_not_bare_weights(str(folder))
    if not folder.is_dir():
        raise CheckpointError(f"folder {folder} does not exist: a Hugging Face id needs `revisions`.")
    children = [child for child in sorted(folder.iterdir()) if child.is_dir() and step_of(child.name) is not None]
    found = [child for child in children if (child / CONFIG_FILE).is_file()]
    for place in found or (folder, *children):
        check_not_adapter(str(place))
    found = found or [folder]
    if not (found[0] / CONFIG_FILE).is_file():
        raise CheckpointError(
            f"{folder} is not a checkpoint and contains none: expected {CONFIG_FILE} in it or in folders inside."
        )
    for place in found:
        if not any(place.glob("*.safetensors")) and not any(place.glob("*.bin")):
            raise CheckpointError(f"{place} has no weights: expected .safetensors files in it.")
    return found


def _place(name: str, model: str, revision: str | None = None) -> Place:
    step = step_of(name)
    if step is None:
        raise InputError(
            f"`checkpoints` needs a step in every name, but {name!r} has no number: rename it or leave it out."
        )
    return Place(name, step, model, revision)


def step_of(name: str) -> int | None:
    """The step in a name: the number after `step`, `iter` or `checkpoint`, else the last number; None without one.

    >>> step_of("checkpoint-1000"), step_of("stage1-step500-tokens2B"), step_of("0042"), step_of("final")
    (1000, 500, 42, None)
    """
    numbers = _STEP.findall(name)[:1] or re.findall(r"\d+", name)[-1:]
    return int(numbers[0]) if numbers else None


def run_name(config: DriftConfig, places: list[Place]) -> str:
    """The hub id, or the folder that holds the checkpoints, by its last part."""
    if config.revisions:
        return config.checkpoints[0]
    parents = {Path(place.model).absolute().parent.name for place in places}
    return parents.pop() if len(parents) == 1 else "checkpoints"


def check_inputs(places: Sequence[Place], config: DriftConfig) -> None:
    """Everything that can be wrong with a checkpoint or the text, without reading weights; an error names the first one.

    The weights of a revision on the hub are checked when they are fetched.
    """
    expected: dict[str, Any] = {}
    tokens = ""
    for place in places:
        if place.revision is None:
            _check_weight_files(Path(place.model), allow_pickle=config.allow_pickle)
        checkpoint, cut = _open(place, config, weights=False)
        text = checkpoint.config.get_text_config()
        found, read = {key: getattr(text, key, None) for key in SHAPE}, cut.blocks.fingerprint()
        expected, tokens = expected or found, tokens or read
        for key, value in found.items():
            if value != expected[key]:
                raise InputError(
                    f"`checkpoints` are not from one run: the {SHAPE[key]} of {place.name} is {value!r}, "
                    f"but {expected[key]!r} in {places[0].name}."
                )
        if read != tokens:
            raise InputError(
                f"`checkpoints` are not from one run: {place.name} tokenizes the text differently from {places[0].name}."
            )


def _check_weight_files(folder: Path, *, allow_pickle: bool) -> None:
    """The header of every safetensors file is readable, and no file that an index names is missing."""
    from safetensors import safe_open

    for index in folder.glob("*.safetensors.index.json"):
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{index} cannot be read: {first_line(error)}.") from error
        if missing := sorted(name for name in names if not (folder / str(name)).is_file()):
            raise CheckpointError(f"{folder} lacks {missing[0]}, which its index {index.name} lists.")
    files = sorted(folder.glob("*.safetensors"))
    if not files and not allow_pickle:
        raise CheckpointError(
            f"{folder} has no safetensors weights; pickled weights are read only with `allow_pickle`."
        )
    for file in files:
        try:
            with safe_open(file, framework="pt"):
                pass
        except Exception as error:
            raise CheckpointError(
                f"the weights of {folder} cannot be loaded: {file.name}: {first_line(error)}."
            ) from error
