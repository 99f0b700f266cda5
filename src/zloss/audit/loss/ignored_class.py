"""The class that marks ignored tokens, where it lies inside the vocabulary: told, or found by its silence."""

from __future__ import annotations

from dataclasses import replace

import torch

from zloss.audit.loss import probes
from zloss.audit.loss.callable import BlackBox
from zloss.audit.loss.output import LossCallError
from zloss.audit.loss.probes import Space

MOST_CLASSES = 4096
"""Vocabulary up to which every class is tried as a target."""


def without_ignored(box: BlackBox, space: Space) -> Space:
    """Leave out the class that marks ignored tokens, told or found: one whose rows are silent wherever it stands."""
    avoid = frozenset({box.ignore_index}) if 0 <= box.ignore_index < space.lanes else frozenset()
    if not avoid and space.lanes <= MOST_CLASSES:
        avoid = _silent_classes(box, space)
        if len(avoid) > 1:
            avoid = frozenset()
    box.avoid = avoid | ({box.ignore_index} if box.ignore_index >= 0 else set())
    return replace(space, avoid=box.avoid)


def _silent_classes(box: BlackBox, space: Space) -> frozenset[int]:
    """Classes whose rows have no gradient in two batches with the classes in opposite order."""
    generator, silent = torch.Generator().manual_seed(1), []
    row = torch.randn(1, space.lanes, generator=generator, dtype=torch.float64).round()
    for order in (torch.arange(space.lanes), torch.arange(space.lanes).flip(0)):
        quiet: set[int] = set()
        for start in range(0, space.lanes, space.tokens):
            target = order[start : start + space.tokens]
            target = torch.cat([target, order[: space.tokens - len(target)]])
            if len(target) < space.tokens:
                target = target.repeat(-(-space.tokens // len(target)))[: space.tokens]
            logits = torch.nn.functional.pad(
                row.expand(len(target), -1), (0, space.width - space.lanes), value=probes.PADDING
            )
            try:
                outcome = box(logits, target, dtype=torch.float32)
            except LossCallError:
                return frozenset()
            norms = outcome.grad_TV.norm(dim=-1)
            if not outcome.finite or not bool((norms > 0).any()):
                return frozenset()
            quiet |= set(target[norms == 0].tolist())
        silent.append(quiet)
    return frozenset(silent[0] & silent[1])
