"""Probe batches, chosen so that rounding cannot hide the penalty, and their fp64 softmax. Axes: T tokens, V vocabulary.

Identification probes lie on a grid that bf16 and fp16 hold exactly, so a loss that rounds its logits still shows its λ
and c. Their workhorse is the saturated token: one logit L, the rest lower by a margin M > 104. There p is a one-hot
vector without any rounding, log Z = L exactly, and the Z source 2λ(L − c) can be read off one entry; with L and M up to 2048
it rises far above the rounding of fused kernels that add it to p − y. L moves log Z, M moves log Z − μ.
Targets are never the most likely class, so that p, onehot(y) and 1/V are independent; the batch `confident` is the exception.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

TOKENS, VOCAB = 64, 96
FEW_TOKENS = 16
"""Rows of a probe whose vocabulary is large: enough for every kind of row."""
MARGIN, LEAST_MARGIN = 128.0, 104.0
"""exp(−128) is 0 in fp32 and 3e-56 in fp64; beyond 104 fp32 has no number left."""
PADDING = -8192.0


def hidden_scales(tokens: int) -> Tensor:
    """s_t of a linear probe: 32, 64 and 128 in turn, which brings the gain of the probe head into the range in which
    gain-aware losses act."""
    return 2.0 ** (5 + torch.arange(tokens, dtype=torch.float64) % 3)


def seeded(seed: int) -> torch.Generator:
    """A generator of random numbers for one seed."""
    return torch.Generator().manual_seed(seed)


@dataclass(frozen=True)
class Probe:
    """A batch for the loss, and the statistics of its fp64 logits over the first `lanes` columns.

    The columns beyond are padding, with p = 0.
    """

    logits_TV: Tensor
    target_T: Tensor
    """Class indices; a negative entry is an ignored token."""
    lanes: int
    weight_VD: Tensor | None = None
    """The head behind the logits; None for a probe, whose head is its logits over `hidden_scales`."""
    name: str = ""
    seed: int = 0

    @cached_property
    def valid_T(self) -> Tensor:
        return self.target_T >= 0

    @cached_property
    def inside_TV(self) -> Tensor:
        return self.logits_TV[:, : self.lanes]

    @cached_property
    def log_z_T(self) -> Tensor:
        return torch.logsumexp(self.inside_TV, dim=-1)

    @cached_property
    def mu_T(self) -> Tensor:
        return self.inside_TV.mean(dim=-1)

    @cached_property
    def max_T(self) -> Tensor:
        return self.inside_TV.amax(dim=-1)

    @cached_property
    def p_TV(self) -> Tensor:
        return self.widen(torch.softmax(self.inside_TV, dim=-1))

    @cached_property
    def uniform_TV(self) -> Tensor:
        """1/V on the lanes inside log Z."""
        return self.widen(torch.full_like(self.inside_TV, 1.0 / self.lanes))

    @cached_property
    def onehot_TV(self) -> Tensor:
        """onehot(y); a zero row at ignored tokens."""
        onehot = torch.zeros_like(self.logits_TV)
        rows = self.valid_T.nonzero().squeeze(-1)
        onehot[rows, self.target_T[rows]] = 1.0
        return onehot

    @cached_property
    def cross_entropy_T(self) -> Tensor:
        """log Z − z_y; 0 at ignored tokens."""
        picked = (self.logits_TV * self.onehot_TV).sum(-1)
        return torch.where(self.valid_T, self.log_z_T - picked, torch.zeros_like(picked))

    @cached_property
    def gain_squared_T(self) -> Tensor:
        """A_p² = ‖Wᵀp‖²/‖p‖² of the head behind the logits."""
        p = self.p_TV[:, : self.lanes]
        if self.weight_VD is None:
            moved = p @ (self.inside_TV.T / hidden_scales(len(self.target_T)))
        else:
            moved = times_weight(self.p_TV, self.weight_VD)
        return moved.square().sum(-1) / p.square().sum(-1)

    def widen(self, inside: Tensor) -> Tensor:
        """Append zero columns for the padding lanes."""
        missing = self.logits_TV.shape[-1] - self.lanes
        return torch.nn.functional.pad(inside, (0, missing)) if missing else inside

    def argmax_TV(self, *, split: bool) -> Tensor:
        """onehot(argmax z): the first maximum, or shared evenly between tied maxima (`amax` against `max`)."""
        top = (self.inside_TV == self.max_T.unsqueeze(-1)).to(self.logits_TV.dtype)
        if not split:
            top = top * (top.cumsum(-1) == 1)
        return self.widen(top / top.sum(-1, keepdim=True))

    @cached_property
    def saturated_T(self) -> Tensor:
        """bool: p is one-hot, hence free of rounding."""
        top = self.inside_TV.topk(2, dim=-1).values
        return top[:, 0] - top[:, 1] >= LEAST_MARGIN

    @property
    def noise_T(self) -> Tensor:
        """Relative rounding of p in units of eps: exp(z − log Z) inherits the rounding of log Z."""
        size = 1.0 + self.max_T.abs()
        return torch.where(self.saturated_T, torch.ones_like(size), size)

    def shifted(self, by: float) -> Probe:
        """The same batch with `by` added to every logit that is not padding."""
        logits = self.logits_TV.clone()
        logits[:, : self.lanes] += by
        return replace(self, logits_TV=logits)

    def take(self, rows: Tensor) -> Probe:
        return replace(self, logits_TV=self.logits_TV[rows], target_T=self.target_T[rows])

    def masked(self, keep_T: Tensor) -> Probe:
        """Ignore the tokens outside `keep_T`; here −1 marks them, the caller's index goes in at the call."""
        return replace(self, target_T=torch.where(keep_T, self.target_T, torch.full_like(self.target_T, -1)))


SLICE = 8192
"""Rows of a head that are widened to fp64 at once."""


def times_weight(source_TV: Tensor, weight_VD: Tensor) -> Tensor:
    """source · W in fp64, [T, D], without a copy of the whole head."""
    out = source_TV.new_zeros(len(source_TV), weight_VD.shape[1])
    for start in range(0, len(weight_VD), SLICE):
        out += source_TV[:, start : start + SLICE] @ weight_VD[start : start + SLICE].double()
    return out


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

    def with_vocab(self, vocab: int) -> Space:
        """Another vocabulary, without padding; a large one has fewer tokens, to save memory."""
        tokens = min(self.tokens, FEW_TOKENS) if vocab > 4096 else self.tokens
        return replace(self, lanes=vocab, width=vocab, tokens=tokens)


def draw(kind: str, space: Space, seed: int) -> Probe:
    """One batch of a kind: "mixed", "saturated", "wide", "crowded", "confident" or "continuous".

    "half ignored" and "all ignored" are "mixed" with tokens ignored, in no pattern that a shifted mask repeats; their target
    is −1.

    >>> draw("mixed", Space(VOCAB, VOCAB), seed=0).logits_TV.shape
    torch.Size([64, 96])
    """
    if kind.endswith(" ignored"):
        probe = draw("mixed", space, seed)
        keep = torch.rand(space.tokens, generator=seeded(seed + 7)) < (0.5 if kind == "half ignored" else -1.0)
        keep[0], keep[-1] = kind == "half ignored", False
        return replace(probe.masked(keep), name=kind)
    generator = seeded(seed * 1009 + list(_DRAWS).index(kind))
    logits = _DRAWS[kind](generator, space)
    if space.padded:
        logits = torch.nn.functional.pad(logits, (0, space.width - space.lanes), value=PADDING)
    probe = Probe(logits, torch.zeros(len(logits), dtype=torch.long), space.lanes, name=kind, seed=seed)
    if kind == "confident":
        return likely(probe, space.avoid)
    if kind == "continuous":
        targets = torch.randint(space.lanes, (len(logits),), generator=generator)
        return replace(probe, target_T=allowed(targets, space.lanes, space.avoid))
    return unlikely(probe, space.avoid, generator)


def joined(parts: list[Probe]) -> Probe:
    """Several probes as one batch."""
    logits, target = (torch.cat([getattr(one, key) for one in parts]) for key in ("logits_TV", "target_T"))
    return Probe(logits, target, parts[0].lanes, name="joined", seed=parts[0].seed)


def unlikely(probe: Probe, avoid: frozenset[int], generator: torch.Generator) -> Probe:
    """The same logits with targets that are never the most likely class, so that p and onehot(y) are independent."""
    tied = probe.inside_TV >= probe.max_T.unsqueeze(-1)
    steps = torch.randint(1, probe.lanes, (len(tied),), generator=generator)
    target = allowed((probe.inside_TV.argmax(-1) + steps) % probe.lanes, probe.lanes, avoid)
    for _ in range(probe.lanes):
        bad = tied[torch.arange(len(target)), target]
        if not bool(bad.any()):
            break
        target = allowed(torch.where(bad, (target + 1) % probe.lanes, target), probe.lanes, avoid)
    return replace(probe, target_T=target)


def likely(probe: Probe, avoid: frozenset[int]) -> Probe:
    """The same logits with the most likely class as every target."""
    return replace(probe, target_T=allowed(probe.inside_TV.argmax(-1), probe.lanes, avoid))


def allowed(target_T: Tensor, lanes: int, avoid: frozenset[int]) -> Tensor:
    """The targets with every class of `avoid` replaced by the next class that is not in it."""
    for _ in avoid:
        for k in avoid:
            target_T = torch.where(target_T == k, (target_T + 1) % lanes, target_T)
    return target_T


def _mixed(generator: torch.Generator, space: Space) -> Tensor:
    """Ordinary rows on the 0.25 grid: every third a tie of k equal logits, log Z between about −16 and 48.

    Beyond 96 rows they repeat, each with its columns rotated and its level shifted, so that no two are alike.
    """
    rows, lanes = [], space.lanes
    for t in range(min(space.tokens, 96)):
        if t % 3 == 0:
            k = min((1, 2, 3, 1, 5, 8, 1, max(lanes // 2, 1))[t // 3 % 8], lanes)
            rows.append(_tie(float(torch.randint(-16, 41, (), generator=generator)), k, lanes, generator))
            continue
        spread = (0.5, 1.5, 4.0)[(t // 3) % 3]
        shift = int(torch.randint(-64, 161, (), generator=generator)) / 4
        noise = torch.randn(lanes, generator=generator, dtype=torch.float64)
        rows.append(shift + ((4 * spread * noise).round() / 4).clamp(-20.0, 20.0))
    logits = torch.stack(rows)
    if space.tokens <= len(rows):
        return logits
    index = torch.arange(space.tokens) % len(rows)
    turns = torch.randint(lanes, (space.tokens, 1), generator=generator)
    moves = torch.randint(-16, 17, (space.tokens, 1), generator=generator) / 4
    return logits[index].gather(1, (torch.arange(lanes) + turns) % lanes) + moves


def _saturated(generator: torch.Generator, space: Space) -> Tensor:
    """One-hot rows: log Z = L from −16 to 47."""
    steps = torch.arange(space.tokens, dtype=torch.float64)
    return _one_hot(-16 + steps * 64 // max(space.tokens, 1), 112 + (steps * 37) % 128, generator, space)


def _wide(generator: torch.Generator, space: Space) -> Tensor:
    """One-hot rows with |L| from 128 to 2048, one in four negative."""
    steps = torch.arange(space.tokens, dtype=torch.float64)
    size = 128 + 64 * (steps * 31 // max(space.tokens, 1)).clamp(max=30)
    levels = torch.where(steps % 4 == 3, -size, size)
    return _one_hot(levels, 128 + 64 * ((steps * 13) % 31), generator, space)


def _one_hot(levels_T: Tensor, margins_T: Tensor, generator: torch.Generator, space: Space) -> Tensor:
    order = torch.randperm(space.tokens, generator=generator)
    pairs = zip(levels_T[order].tolist(), margins_T.tolist(), strict=True)
    return torch.stack([_tie(level, 1, space.lanes, generator, margin) for level, margin in pairs])


def _confident(generator: torch.Generator, space: Space) -> Tensor:
    """Ordinary rows and wide ones in turn; their target is the most likely class."""
    mixed, wide = _mixed(generator, space), _wide(generator, space)
    return torch.where((torch.arange(space.tokens) % 2 == 0).unsqueeze(-1), mixed, wide)


def _crowded(generator: torch.Generator, space: Space) -> Tensor:
    """k − 1 equal logits at 0 and one just above, k from 2 to V/2: log Z − max is as large as it can be, and rounding small.

    A common shift does not increase a penalty on log Z − max, so a small one is detected on these rows.
    """
    rows = []
    for t in range(space.tokens):
        k = max(round(2 * (space.lanes / 4) ** (t / max(space.tokens - 1, 1))), 2)
        row = _tie(0.0, min(k, space.lanes), space.lanes, generator)
        row[row.argmax()] += 0.25
        rows.append(row)
    return torch.stack(rows)


def _continuous(generator: torch.Generator, space: Space) -> Tensor:
    """Unrounded fp32 logits with the spread and offset of a language model's head: where low precision shows."""
    spread = torch.linspace(1.0, 4.0, space.tokens, dtype=torch.float64).unsqueeze(-1)
    noise = torch.randn(space.tokens, space.lanes, generator=generator, dtype=torch.float64)
    shift = 12 + 10 * torch.randn(space.tokens, 1, generator=generator, dtype=torch.float64)
    return (spread * noise + shift).float().double()


def _tie(level: float, k: int, lanes: int, generator: torch.Generator, margin: float = MARGIN) -> Tensor:
    row = torch.full((lanes,), level - margin, dtype=torch.float64)
    row[torch.randperm(lanes, generator=generator)[:k]] = level
    return row


_DRAWS: dict[str, Callable[[torch.Generator, Space], Tensor]] = {
    "mixed": _mixed,
    "saturated": _saturated,
    "wide": _wide,
    "crowded": _crowded,
    "confident": _confident,
    "continuous": _continuous,
}
"""Each kind draws from a separate generator, seeded by its place in this table."""


# Heads for losses of (hidden, weight, target).

WIDTH, LARGE_WIDTH = 80, 1200
"""D of small batches and of large ones."""


def probe_width(tokens: int, vocab: int) -> int:
    """D of a probe head: at least T, never T or V itself, and the same for all small batches and for all large ones."""
    width = WIDTH if tokens < WIDTH else LARGE_WIDTH * -(-(tokens + 1) // LARGE_WIDTH)
    while width in (tokens, vocab):
        width += 16
    return width


def sparse_head(logits_TV: Tensor) -> tuple[Tensor, Tensor]:
    """(hidden [T, D], weight [V, D]) whose product is the logits, without rounding.

    Row t of hidden is s_t on one column and 0 elsewhere, and that column of weight is logits_t/s_t. s_t is a power of two.
    It differs between tokens, so that a norm on hidden shows, and D is neither T nor V, nor does it follow T, so that a
    transposed weight or a factor of √D does.
    """
    tokens, vocab = logits_TV.shape
    width, scale_T = probe_width(tokens, vocab), hidden_scales(tokens).to(logits_TV)
    hidden, weight = logits_TV.new_zeros(tokens, width), logits_TV.new_zeros(vocab, width)
    columns = _columns(tokens, width)
    hidden[torch.arange(tokens), columns] = scale_T
    weight[:, columns] = (logits_TV / scale_T.unsqueeze(-1)).T
    return hidden, weight


def logit_gradients(grads: list[Tensor]) -> tuple[Tensor, Tensor]:
    """From the gradients at a sparse head: the logit gradient δ [T, V], and δ · logitsᵀ [T, T] read from hidden."""
    grad_hidden, grad_weight = grads
    tokens, width = grad_hidden.shape
    scale_T, columns = hidden_scales(tokens), _columns(tokens, width)
    return grad_weight[:, columns].T / scale_T.unsqueeze(-1), grad_hidden[:, columns] * scale_T


def _columns(tokens: int, width: int) -> Tensor:
    """The column of hidden that belongs to each token alone, in random order."""
    return torch.randperm(width, generator=seeded(width))[:tokens]


def dense_head(
    tokens: int, wide: int, space: Space, seed: int, *, offset: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """(hidden [T, D], weight [V, D], target [T]) in fp64; hidden rows differ in length, logits have a spread of about 2.5.

    `offset` is a mean logit, carried by one direction that all tokens share.
    """
    generator = seeded(seed)
    lengths = torch.linspace(0.5, 2.0, tokens, dtype=torch.float64).unsqueeze(-1)
    hidden = lengths * torch.randn(tokens, wide, generator=generator, dtype=torch.float64)
    weight = 2.5 / math.sqrt(wide) * torch.randn(space.width, wide, generator=generator, dtype=torch.float64)
    if space.padded or offset:
        hidden[:, 0], weight[:, 0] = 4.0, offset / 4.0
        weight[space.lanes :] = 0.0
        weight[space.lanes :, 0] = PADDING / 4.0
    target = allowed(torch.randint(space.lanes, (tokens,), generator=generator), space.lanes, space.avoid)
    return hidden, weight, target
