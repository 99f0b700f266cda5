"""Probe logits, chosen so that rounding cannot hide the penalty. Axes: T tokens, V vocabulary.

Identification probes lie on a grid that bf16 and fp16 hold exactly, so a loss that rounds its logits still shows its λ
and c. Their workhorse is the saturated token: one logit L, the rest lower by a margin M > 104. There p is a one-hot
vector without any rounding, cross-entropy contributes exactly 0 or ±1, log Z = L exactly, and the Z source 2λ(L − c)
stands alone; with L and M up to 2048 it rises far above the rounding of fused kernels that add it to p − y. L moves
log Z, M moves log Z − μ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zloss.audit.loss.reference import Reference

TOKENS = 64
VOCAB = 96
MARGIN = 128.0
"""exp(−128) is 0 in fp32 and 3e-56 in fp64."""
PADDING = -8192.0


@dataclass(frozen=True)
class Space:
    """Where the probes live: `lanes` columns inside log Z, `width` columns in all, `tokens` rows, classes to avoid."""

    lanes: int
    width: int
    tokens: int = TOKENS
    avoid: frozenset[int] = frozenset()

    @property
    def padded(self) -> bool:
        return self.lanes != self.width

    def sizes(self, tokens: int | None = None) -> dict[str, Any]:
        """The arguments of every probe."""
        return {"lanes": self.lanes, "width": self.width, "tokens": tokens or self.tokens, "avoid": self.avoid}


@dataclass(frozen=True)
class Probe:
    """A batch for the loss: logits, targets, and what we know of the rounding its tokens suffer."""

    name: str
    reference: Reference
    saturated_T: Tensor
    """True where p is one-hot, hence free of rounding."""

    @property
    def logits_TV(self) -> Tensor:
        return self.reference.logits_TV

    @property
    def target_T(self) -> Tensor:
        return self.reference.target_T

    @property
    def noise_T(self) -> Tensor:
        """Relative rounding of p in units of eps: exp(z − log Z) inherits the rounding of log Z."""
        size = 1.0 + self.reference.max_T.abs()
        return torch.where(self.saturated_T, torch.ones_like(size), size)

    def shifted(self, by: float) -> Probe:
        """The same batch with `by` added to every logit that is not padding."""
        logits = self.logits_TV.clone()
        logits[:, : self.reference.lanes] += by
        return self.with_logits(logits)

    def with_logits(self, logits_TV: Tensor) -> Probe:
        return Probe(self.name, Reference(logits_TV, self.target_T, self.reference.lanes), self.saturated_T)

    def take(self, rows: Tensor) -> Probe:
        r = self.reference
        return Probe(self.name, Reference(r.logits_TV[rows], r.target_T[rows], r.lanes), self.saturated_T[rows])

    def masked(self, keep_T: Tensor) -> Probe:
        """Ignore the tokens outside `keep_T`; here −1 marks them, the caller's index goes in at the call."""
        target = torch.where(keep_T, self.target_T, torch.full_like(self.target_T, -1))
        return Probe(self.name, Reference(self.logits_TV, target, self.reference.lanes), self.saturated_T)


def mixed(
    generator: torch.Generator,
    *,
    tokens: int = TOKENS,
    lanes: int = VOCAB,
    width: int = VOCAB,
    avoid: frozenset[int] = frozenset(),
) -> Probe:
    """Ordinary rows on the 0.25 grid: every third a tie of k equal logits, log Z between about −16 and 48."""
    rows, saturated = [], []
    for t in range(tokens):
        kind = t % 3
        if kind == 0:
            k = _tie_size(t // 3, lanes)
            rows.append(_tie(float(_integer(generator, -16, 41)), k, lanes, generator))
            saturated.append(k == 1)
            continue
        spread = (0.5, 1.5, 4.0)[(t // 3) % 3]
        shift = _integer(generator, -64, 161) / 4
        noise = torch.randn(lanes, generator=generator, dtype=torch.float64)
        rows.append(shift + ((4 * spread * noise).round() / 4).clamp(-20.0, 20.0))
        saturated.append(False)
    logits = torch.stack(rows)
    target = _targets(logits, generator, avoid)
    return _probe("mixed", logits, target, torch.tensor(saturated), width)


def many(
    generator: torch.Generator,
    *,
    tokens: int,
    lanes: int = VOCAB,
    width: int = VOCAB,
    avoid: frozenset[int] = frozenset(),
) -> Probe:
    """A large batch of `mixed` rows, each with its columns turned and its level moved, so that no two are alike."""
    base = mixed(generator, tokens=min(tokens, 96), lanes=lanes, width=lanes, avoid=avoid)
    rows = torch.arange(tokens) % len(base.target_T)
    turns = torch.randint(lanes, (tokens, 1), generator=generator)
    moves = torch.randint(-16, 17, (tokens, 1), generator=generator) / 4
    columns = (torch.arange(lanes) + turns) % lanes
    logits = base.logits_TV[rows].gather(1, columns) + moves
    return _probe("mixed", logits, _targets(logits, generator, avoid), base.saturated_T[rows], width)


def saturated(
    generator: torch.Generator,
    *,
    wide: bool,
    tokens: int = TOKENS,
    lanes: int = VOCAB,
    width: int = VOCAB,
    avoid: frozenset[int] = frozenset(),
) -> Probe:
    """One-hot rows: log Z = L from −16 to 47, or (wide) ±128 to 2048; half of the targets are the dominant class."""
    steps = torch.arange(tokens, dtype=torch.float64)
    if wide:
        magnitude = 128 + 64 * (steps * 31 // max(tokens, 1)).clamp(max=30)
        sign = torch.where(steps % 4 == 3, -torch.ones(tokens), torch.ones(tokens))
        levels = magnitude * sign
        margins = 128 + 64 * ((steps * 13) % 31)
    else:
        levels = -16 + (steps * 64 // max(tokens, 1))
        margins = 112 + (steps * 37) % 128
    pairs = zip(levels.tolist(), margins.tolist(), strict=True)
    logits = torch.stack([_tie(level, 1, lanes, generator, margin) for level, margin in pairs])
    target = _targets(logits, generator, avoid)
    return _probe("wide" if wide else "saturated", logits, target, torch.ones(tokens, dtype=torch.bool), width)


def crowded(
    generator: torch.Generator,
    *,
    tokens: int = TOKENS,
    lanes: int = VOCAB,
    width: int = VOCAB,
    avoid: frozenset[int] = frozenset(),
) -> Probe:
    """k − 1 equal logits at 0 and one just above, k from 2 to all: log Z − max is as large as it can be, and rounding small.

    No common shift makes a penalty on log Z − max louder, so this is where a small one is heard.
    """
    rows = []
    for t in range(tokens):
        k = round(2 * (lanes / 2) ** (t / max(tokens - 1, 1)))
        row = _tie(0.0, k, lanes, generator)
        row[row.argmax()] += 0.25
        rows.append(row)
    logits = torch.stack(rows)
    return _probe("crowded", logits, _targets(logits, generator, avoid), torch.zeros(tokens, dtype=torch.bool), width)


def continuous(
    generator: torch.Generator,
    *,
    tokens: int = TOKENS,
    lanes: int = VOCAB,
    width: int = VOCAB,
    avoid: frozenset[int] = frozenset(),
) -> Probe:
    """Unrounded fp32 logits with the spread and offset of a language model's head: where low precision shows."""
    spread = torch.linspace(1.0, 4.0, tokens, dtype=torch.float64).unsqueeze(-1)
    noise = torch.randn(tokens, lanes, generator=generator, dtype=torch.float64)
    shift = 12 + 10 * torch.randn(tokens, 1, generator=generator, dtype=torch.float64)
    logits = (spread * noise + shift).float().double()
    return _probe(
        "continuous", logits, _targets(logits, generator, avoid), torch.zeros(tokens, dtype=torch.bool), width
    )


def _probe(name: str, logits: Tensor, target: Tensor, saturated_T: Tensor, width: int) -> Probe:
    tokens, lanes = logits.shape
    if width > lanes:
        logits = torch.cat([logits, torch.full((tokens, width - lanes), PADDING, dtype=logits.dtype)], dim=-1)
    return Probe(name, Reference(logits, target, lanes), saturated_T)


def _tie_size(index: int, lanes: int) -> int:
    sizes = (1, 2, 3, 1, 5, 8, 1, max(lanes // 2, 1))
    return min(sizes[index % len(sizes)], lanes)


def _tie(level: float, k: int, lanes: int, generator: torch.Generator, margin: float = MARGIN) -> Tensor:
    row = torch.full((lanes,), level - margin, dtype=torch.float64)
    row[torch.randperm(lanes, generator=generator)[:k]] = level
    return row


def _targets(logits: Tensor, generator: torch.Generator, avoid: frozenset[int] = frozenset()) -> Tensor:
    """Alternately the most likely class and a random one; never a class of `avoid`, which the loss may ignore."""
    tokens, lanes = logits.shape
    random = torch.randint(lanes, (tokens,), generator=generator)
    return allowed(torch.where(torch.arange(tokens) % 2 == 0, logits.argmax(-1), random), lanes, avoid)


def allowed(target_T: Tensor, lanes: int, avoid: frozenset[int]) -> Tensor:
    """The targets with every class of `avoid` replaced by the next class that is not in it."""
    for _ in avoid:
        for k in avoid:
            target_T = torch.where(target_T == k, (target_T + 1) % lanes, target_T)
    return target_T


def apart(probe: Probe, avoid: frozenset[int]) -> Probe:
    """The same logits with targets that are never the most likely class, so that p and onehot(y) are independent."""
    r = probe.reference
    highest = r.inside_TV.argmax(-1)
    tied = r.inside_TV >= r.max_T.unsqueeze(-1)
    steps = 1 + (torch.arange(len(highest)) * 7) % (r.lanes - 1)
    target = allowed((highest + steps) % r.lanes, r.lanes, avoid)
    for _ in range(r.lanes):
        bad = tied[torch.arange(len(target)), target]
        if not bool(bad.any()):
            break
        target = allowed(torch.where(bad, (target + 1) % r.lanes, target), r.lanes, avoid)
    return Probe(probe.name, Reference(r.logits_TV, target, r.lanes), probe.saturated_T)


def likely(probe: Probe, avoid: frozenset[int]) -> Probe:
    """The same logits with the most likely class as every target."""
    r = probe.reference
    target = allowed(r.inside_TV.argmax(-1), r.lanes, avoid)
    return Probe(probe.name, Reference(r.logits_TV, target, r.lanes), probe.saturated_T)


def _integer(generator: torch.Generator, low: int, high: int) -> int:
    return int(torch.randint(low, high, (), generator=generator))
