"""Classes that a loss treats apart: the one that marks ignored tokens, and a few with a weight of their own.

Every class is the target of one and the same row of logits, in two batches with the classes in opposite order. What differs
then follows the class and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from zloss.audit.loss import probes
from zloss.audit.loss.callable import BlackBox
from zloss.audit.loss.decompose import decompose
from zloss.audit.loss.measured import measure
from zloss.audit.loss.output import LossCallError
from zloss.audit.loss.precision import UNIT
from zloss.audit.loss.probes import Probe, Space
from zloss.audit.loss.reference import Reference

MOST_CLASSES = 4096
"""Vocabulary up to which every class is tried as a target."""
MOST_SPECIAL = 4
"""More classes that differ are class weights in general, which the fit of token weights names."""


@dataclass(frozen=True)
class SpecialClass:
    """One class against the median of all: the weight on its CE, and its Z source (None where no Z shows)."""

    index: int
    ce: float
    z: float | None

    @property
    def shares(self) -> bool:
        """Whether its Z carries the weight of its CE."""
        return self.z is not None and abs(self.z - self.ce) < 1e-2 * max(abs(self.ce), abs(self.z), 1e-2)

    @property
    def words(self) -> str:
        weights = [] if abs(self.ce - 1) < 1e-3 else [_times(self.ce, "cross-entropy")]
        if self.z is not None and abs(self.z - 1) >= 1e-2:
            weights.append(_times(self.z, "Z"))
        return f"class {self.index} has {' and '.join(weights)}"


def _times(factor: float, part: str) -> str:
    return f"no {part}" if abs(factor) < 1e-3 else f"{factor:.4g} times the {part} of the others"


def without_special(box: BlackBox, space: Space) -> tuple[Space, tuple[SpecialClass, ...]]:
    """Leave out the class that marks ignored tokens, told or found, and the few classes with a weight of their own."""
    told = frozenset({box.ignore_index}) if 0 <= box.ignore_index < space.lanes else frozenset()
    special: tuple[SpecialClass, ...] = ()
    avoid = told
    if space.lanes <= MOST_CLASSES:
        silent, special = _classes_apart(box, space)
        special = tuple(one for one in special if one.index not in told)
        if not told and len(silent) == 1:
            avoid = silent
    box.avoid = avoid | ({box.ignore_index} if box.ignore_index >= 0 else set()) | {one.index for one in special}
    return replace(space, avoid=box.avoid), special


def _classes_apart(box: BlackBox, space: Space) -> tuple[frozenset[int], tuple[SpecialClass, ...]]:
    """(classes whose rows have no gradient, other classes whose weights are not those of most), in both orders."""
    generator = torch.Generator().manual_seed(1)
    row = torch.randn(1, space.lanes, generator=generator, dtype=torch.float64).round()
    row = torch.nn.functional.pad(row, (0, space.width - space.lanes), value=probes.PADDING)
    silent: list[set[int]] = []
    apart: list[dict[int, SpecialClass]] = []
    for order in (torch.arange(space.lanes), torch.arange(space.lanes).flip(0)):
        quiet: set[int] = set()
        other: dict[int, SpecialClass] = {}
        for start in range(0, space.lanes, space.tokens):
            target = order[start : start + space.tokens]
            target = torch.cat([target, order[: space.tokens - len(target)]])
            if len(target) < space.tokens:
                target = target.repeat(-(-space.tokens // len(target)))[: space.tokens]
            logits = row.expand(len(target), -1)
            try:
                outcome = box(logits, target, dtype=torch.float32)
            except LossCallError:
                return frozenset(), ()
            norms = outcome.grad_TV.norm(dim=-1)
            if not outcome.finite or not bool((norms > 0).any()):
                return frozenset(), ()
            quiet |= set(target[norms == 0].tolist())
            other |= _weights_apart(logits, target, outcome.grad_TV, space.lanes, norms > 0)
        silent.append(quiet)
        apart.append(other)
    both = tuple(apart[0][k] for k in sorted(apart[0].keys() & apart[1].keys()))
    few = len(both) <= min(MOST_SPECIAL, space.lanes // 8)
    return frozenset(silent[0] & silent[1]), both if few else ()


def _weights_apart(
    logits_TV: Tensor, target_T: Tensor, grad_TV: Tensor, lanes: int, use_T: Tensor
) -> dict[int, SpecialClass]:
    """The classes of one batch whose CE weight or Z source is not the median; none where rows are not p, onehot(y) and 1/V."""
    no_rounding = torch.zeros(len(target_T), dtype=torch.bool)
    probe = Probe("classes", Reference(logits_TV, target_T, lanes), no_rounding)
    rows = decompose(measure([(probe, grad_TV)], UNIT["float32"]))
    if not rows.exact:
        return {}
    w_T, s_T, slack_T = rows.b_T + rows.u_T, rows.a_T - rows.b_T - rows.u_T, 4 * rows.tolerance_T
    w, s, slack = (float(x[use_T].median()) for x in (w_T, s_T, slack_T))
    if abs(w) <= slack:
        return {}
    differs_T = ((w_T - w).abs() > slack_T + 1e-3 * abs(w)) | ((s_T - s).abs() > slack_T + slack + 1e-2 * abs(s))
    return {
        int(target_T[t]): SpecialClass(
            int(target_T[t]), float(w_T[t]) / w, float(s_T[t]) / s if abs(s) > 20 * slack else None
        )
        for t in (differs_T & use_T).nonzero().flatten().tolist()
    }
