"""The lines to paste: a plain loop, transformers, and the nearest settings of other frameworks."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace

from zloss.head.source import explain
from zloss.objectives import CenteredHead, Objective, StandardZLoss, make_objective
from zloss.results.recommendation import Paste

SHOWN = ("Liger", "flash-attn", "t5x / MaxText", "Megatron-LM")
HEAD_LOSS_NOTE = (
    "hidden [B, N, D] before the head, labels [B, N] already shifted; −100 is ignored; mean over valid tokens"
)


def paste_lines(method: str, coef: float, *, vocab: int, model: str) -> tuple[Paste, ...]:
    """How this objective is written in each stack, for a head of `vocab` rows."""
    objective = make_objective(method, coef)
    own = [_centering(model)] if isinstance(objective, CenteredHead) else [_plain(objective), _transformers(objective)]
    return (*own, *_frameworks(objective, coef, vocab))


def with_model_as_given(pastes: Sequence[Paste], recorded: str, given: str) -> tuple[Paste, ...]:
    """The lines with the model as the user gave it: a record names no folders, so its line finds the model only beside it."""
    old, new = _center_command(recorded), _center_command(given)
    return tuple(replace(paste, lines=paste.lines.replace(old, new)) for paste in pastes)


def code(objective: Objective) -> str:
    """The objective as a Python expression.

    >>> code(StandardZLoss(1e-4))
    'zloss.StandardZLoss(coef=0.0001)'
    """
    text = repr(objective)
    for unset in (", target=None", ", relative_target=None", ", shift_target=0.0"):
        text = text.replace(unset, "")
    return f"zloss.{text}"


def _plain(objective: Objective) -> Paste:
    if not objective.active:
        return Paste("plain loop", "loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())", "no Z in the loss")
    lines = (
        "import zloss\n\n"
        f"objective = {code(objective)}\n"
        "out = zloss.head_loss(hidden, model.lm_head.weight, labels, objective)\n"
        "out.loss.backward()  # out.cross_entropy and out.auxiliary for the log"
    )
    return Paste("plain loop", lines, HEAD_LOSS_NOTE)


def _transformers(objective: Objective) -> Paste:
    if not objective.active:
        return Paste("transformers", "trainer.train()", "the model's own loss is CE")
    lines = (
        "import zloss\nfrom zloss.integrations.transformers import attach\n\n"
        f"attach(trainer, {code(objective)})\n"
        "trainer.train()"
    )
    return Paste("transformers", lines, "loss and telemetry of a Trainer; `apply(model, objective)` for any other loop")


def _centering(model: str) -> Paste:
    lines = (
        f"{_center_command(model)}  # a checkpoint folder, from the command line\n"
        "zloss.center_head_(model.lm_head)  # or in place, on an untied head"
    )
    return Paste("any stack", lines, "training stays on plain CE; softmax and PPL do not change")


def _center_command(model: str) -> str:
    return f"zloss center {shlex.quote(model)} --out centered"


def _frameworks(objective: Objective, coef: float, vocab: int) -> list[Paste]:
    """Their own settings; where the objective has none, λ(log Z)² of raw logits is the nearest."""
    nearest = explain(StandardZLoss(coef, target=0.0), vocab=vocab) if coef else None
    found = []
    for recipe in explain(objective, vocab=vocab).recipes:
        if recipe.framework not in SHOWN:
            continue
        if recipe.setting is not None:
            found.append(Paste(recipe.framework, recipe.setting, recipe.note))
            continue
        near = None if nearest is None else nearest[recipe.framework].setting
        found.append(Paste(recipe.framework, near or "", f"cannot be expressed: {recipe.note}", exact=False))
    return found
