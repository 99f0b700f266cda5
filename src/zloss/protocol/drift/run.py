"""Drift over the checkpoints of one run: find them, measure each once, judge what moved."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from zloss.console import Progress, Silent
from zloss.decide.drift.judge import judge_drift
from zloss.decide.drift.limits import DriftLimits
from zloss.errors import InputError
from zloss.protocol.drift.config import DriftConfig
from zloss.protocol.drift.measure_checkpoint import measure_checkpoint
from zloss.protocol.drift.one_run import check_one_run
from zloss.protocol.drift.places import find_places, run_name
from zloss.results.drift import Drift, KeptCheckpoint
from zloss.results.folder import check_folder
from zloss.results.folder_owner import Owner, refuse_other, text_name
from zloss.results.provenance import Provenance, shared_keys
from zloss.text import open_corpus


def run_drift(
    config: DriftConfig,
    folder: Path,
    *,
    limits: DriftLimits | None = None,
    force: bool = False,
    progress: Progress | None = None,
    say: Callable[[str], None] = lambda text: None,
    command: str = "zloss.protocol.drift.run.run_drift",
) -> Drift:
    """The record of the run; every finished checkpoint is kept in `folder` and not measured again.

    `force`: replace the result of something else that `folder` holds.
    What can be refused is refused before the first model is loaded; too short a text, before the first audit.
    """
    progress, limits = progress or Silent(), limits or DriftLimits()
    started, begin = datetime.now(UTC), time.perf_counter()
    places = find_places(config)
    check_folder(folder)
    name = run_name(config, places)
    refuse_other(folder, Owner("drift", name, text_name(config.texts, config.corpus)), force=force)
    open_corpus(config.texts, config.corpus, config.text_field)
    check_one_run(places, config)
    kept: list[KeptCheckpoint] = []
    for number, place in enumerate(places, start=1):
        one, known = measure_checkpoint(place, config, folder, progress=progress, command=command)
        if kept and one.tokens != kept[0].tokens:
            raise InputError(
                f"`checkpoints` are not of one run: {place.name} reads the text as other tokens than {places[0].name}."
            )
        kept.append(one)
        say(f"{place.name}: {'kept from before' if known else 'measured'} ({number} of {len(places)})")
    judgement = judge_drift(kept, limits)
    return Drift(
        model=name,
        corpus=kept[0].corpus,
        blocks=len(kept[0].blocks.tokens),
        block_size=max(kept[0].blocks.tokens),
        checkpoints=tuple(each.checkpoint for each in kept),
        ce_changes=judgement.ce_changes,
        movements=judgement.movements,
        finding=judgement.finding,
        began=judgement.began,
        limits=limits.to_dict(),
        notes=kept[0].notes,
        provenance=Provenance(**shared_keys(command, started, time.perf_counter() - begin)),
    )
