"""Probe batches, chosen so that rounding cannot hide a penalty. Axes: T tokens, V vocabulary.

Most logits lie on a grid that 16-bit formats hold exactly. A saturated row has one logit L and the others a margin below it: p is
one-hot without rounding and log Z = L, so that with |L| up to 2048 even a small λ rises above the rounding of fused kernels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

TOKENS, VOCAB = 64, 96
MARGIN = 128.0
"""exp(−128) is 0 in fp32 and 3e-56 in fp64."""
KINDS = ("mixed", "saturated", "wide")
"""The batches of an identification."""
PADDING = -8192.0
"""The logits of columns that do not count."""


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@dataclass(frozen=True)
class Warp:
    """What the loss does to its logits before the softmax, as its user states it: cap · tanh(scale · z / cap)."""

    scale: float = 1.0
    cap: float | None = None

    def __call__(self, z: Tensor) -> Tensor:
        return self.scale * z if self.cap is None else self.cap * torch.tanh(self.scale * z / self.cap)

    def inverse(self, seen: Tensor) -> Tensor:
        """Logits that the loss sees as `seen`; a cap has none beyond itself, so that those end at 0.9 of it."""
        if self.cap is None:
            return seen / self.scale
        return self.cap * torch.atanh((seen / self.cap).clamp(-0.9, 0.9)) / self.scale


@dataclass(frozen=True)
class Probe:
    """A batch for the loss; columns from `lanes` on are padding, tokens with a negative target are ignored."""

    logits_TV: Tensor
    target_T: Tensor
    lanes: int
    name: str = ""
    seed: int = 0
    warp: Warp = Warp()
    gain_T: Tensor | None = None
    """A² of its sparse head, which depends on the whole batch; only where a damped penalty needs it."""

    @cached_property
    def valid_T(self) -> Tensor:
        return self.target_T >= 0

    @property
    def inside_TV(self) -> Tensor:
        return self.logits_TV[:, : self.lanes]

    @cached_property
    def seen_TV(self) -> Tensor:
        """The logits that the softmax sees."""
        return self.warp(self.inside_TV)

    @cached_property
    def noise_T(self) -> Tensor:
        """Relative rounding of p in units of eps: exp(z − log Z) inherits the rounding of z, unless p is one-hot."""
        top = self.seen_TV.topk(2, dim=-1).values
        noise_T = torch.where(top[:, 0] - top[:, 1] > 104, 1.0, 1.0 + self.seen_TV.abs().amax(-1))
        # Far out on a softcap its derivative is a small difference of large numbers.
        return noise_T if self.warp.cap is None else 8.0 * noise_T

    def widened(self, inside: Tensor) -> Tensor:
        """Zero columns appended for the padding."""
        return pad(inside, (0, self.logits_TV.shape[-1] - self.lanes))

    def shifted(self, by: float) -> Probe:
        """The same batch with `by` added to every logit that is not padding."""
        return replace(self, logits_TV=torch.cat([self.inside_TV + by, self.logits_TV[:, self.lanes :]], dim=-1))

    def take(self, rows: Tensor) -> Probe:
        gain_T = None if self.gain_T is None else self.gain_T[rows]
        return replace(self, logits_TV=self.logits_TV[rows], target_T=self.target_T[rows], gain_T=gain_T)

    def masked(self, keep_T: Tensor) -> Probe:
        """The tokens outside `keep_T` ignored."""
        return replace(self, target_T=torch.where(keep_T, self.target_T, -1))

    def with_gain(self) -> Probe:
        """The same, with A² = ‖Wᵀp‖²/‖p‖² of the sparse head behind it."""
        if self.gain_T is not None:
            return self
        p_TV = self.widened(self.seen_TV.softmax(-1))
        gain_T = (p_TV @ sparse_head(self.logits_TV)[1]).square().sum(-1) / p_TV.square().sum(-1)
        return replace(self, gain_T=gain_T)


@dataclass(frozen=True)
class Space:
    """Where probes live: `lanes` columns inside log Z, `width` in all, `tokens` rows, classes that are never a target."""

    lanes: int = VOCAB
    width: int = VOCAB
    tokens: int = TOKENS
    avoid: frozenset[int] = frozenset()
    warp: Warp = Warp()

    @property
    def padded(self) -> bool:
        return self.lanes != self.width

    def sized(self, tokens: int, vocab: int | None = None) -> Space:
        """Other numbers of tokens and, without padding, of classes."""
        if vocab is None:
            return replace(self, tokens=tokens)
        return replace(self, tokens=tokens, lanes=vocab, width=vocab)


def draw(kind: str, space: Space, seed: int) -> Probe:
    """One batch of a kind.

    "mixed": ordinary rows on a grid of 1/4, some with tied maxima. "saturated", "wide": one-hot rows with |log Z| up to 47, up
    to 2048. "confident": the latter with the largest logit as target. "continuous": fp32 logits as of a language model. "calm":
    the same without scale and shift. "half ignored", "all ignored": "mixed" with tokens ignored. But for "confident" and
    "continuous", the target is never the largest logit, so that p and onehot(y) differ.

    >>> draw("mixed", Space(), seed=0).logits_TV.shape
    torch.Size([64, 96])
    """
    if kind.endswith(" ignored"):
        keep_T = torch.rand(space.tokens, generator=seeded(seed + 7)) < (0.5 if kind == "half ignored" else -1.0)
        keep_T[:1] = kind == "half ignored"  # in no pattern that a shifted mask repeats
        keep_T[-1:] = False
        return replace(draw("mixed", space, seed).masked(keep_T), name=kind)
    generator, lanes = seeded(1009 * seed + len(kind)), space.lanes
    rows_T = torch.arange(space.tokens, dtype=torch.float64)
    if kind in ("saturated", "wide", "confident"):
        level_T = -16 + rows_T * 64 // space.tokens
        if kind != "saturated":
            level_T = torch.where(rows_T % 4 == 3, -1.0, 1.0) * (128 + 64 * (rows_T * 31 // space.tokens).clamp(max=30))
        seen_TV = (level_T - MARGIN - (rows_T * 37) % 64).unsqueeze(1).expand(-1, lanes).clone()
        top_T = allowed(torch.randint(lanes, (space.tokens,), generator=generator), space)
        seen_TV.scatter_(1, top_T.unsqueeze(1), level_T.unsqueeze(1))
    else:
        spread_T = 0.5 + 3.5 * torch.rand(space.tokens, 1, generator=generator, dtype=torch.float64)
        noise_TV = torch.randn(space.tokens, lanes, generator=generator, dtype=torch.float64)
        shift_T = 12 + 14 * torch.randn(space.tokens, 1, generator=generator, dtype=torch.float64)
        seen_TV = noise_TV if kind == "calm" else spread_T * noise_TV + shift_T
        if kind == "mixed":
            seen_TV = ((seen_TV * 4).round() / 4).clamp(-60, 60)
            seen_TV[::4, 0] = seen_TV[::4, 1:].amax(-1)
    target_T = torch.randint(lanes, (space.tokens,), generator=generator)
    if kind in KINDS:  # together they have every class of a small vocabulary as a target
        order = torch.randperm(lanes, generator=seeded(seed))
        target_T = order[(torch.arange(space.tokens) + space.tokens * KINDS.index(kind)) % lanes]
    if kind == "confident":
        target_T = seen_TV.argmax(-1)
    elif kind != "continuous":
        likely_T = seen_TV.gather(1, target_T[:, None])[:, 0] >= seen_TV.amax(-1)
        target_T = torch.where(likely_T, seen_TV.argmin(-1), target_T)
    logits_TV = space.warp.inverse(seen_TV).float().double()
    logits_TV = pad(logits_TV, (0, space.width - lanes), value=PADDING)
    return Probe(logits_TV, allowed(target_T, space), lanes, kind, seed, space.warp)


def allowed(target_T: Tensor, space: Space) -> Tensor:
    """The targets with every avoided class replaced by the next one that is not."""
    for _ in space.avoid:
        for avoided in space.avoid:
            target_T = torch.where(target_T == avoided, (target_T + 1) % space.lanes, target_T)
    return target_T


def joined(parts: list[Probe]) -> Probe:
    """Several probes as one batch."""
    logits_TV, target_T = (torch.cat([getattr(one, key) for one in parts]) for key in ("logits_TV", "target_T"))
    gains = [one.gain_T for one in parts if one.gain_T is not None]
    return replace(parts[0], logits_TV=logits_TV, target_T=target_T, gain_T=torch.cat(gains) if gains else None)


# Heads for losses of (hidden, weight, target): row t of hidden is s_t on one column that no other token uses, so the product is
# the logits without rounding, and dW holds the gradient at every logit. s_t, a power of two, differs between tokens, so that a
# norm taken of hidden shows.


def hidden_scales(tokens: int) -> Tensor:
    return 2.0 ** (5 + torch.arange(tokens, dtype=torch.float64) % 3)


def head_columns(tokens: int) -> tuple[int, Tensor]:
    """(width D, the column of every token); D is neither T nor V of a usual probe, and does not follow T."""
    width = 80 if tokens < 80 else 1200 * -(-(tokens + 1) // 1200)
    return width, torch.randperm(width, generator=seeded(width))[:tokens]


def sparse_head(logits_TV: Tensor) -> tuple[Tensor, Tensor]:
    """(hidden [T, D], weight [V, D]) whose product is the logits, without rounding."""
    tokens, vocab = logits_TV.shape
    width, columns = head_columns(tokens)
    scales = hidden_scales(tokens).to(logits_TV)
    hidden, weight = logits_TV.new_zeros(tokens, width), logits_TV.new_zeros(vocab, width)
    hidden[torch.arange(tokens), columns] = scales
    weight[:, columns] = (logits_TV / scales.unsqueeze(1)).T
    return hidden, weight


def logit_gradients(grad_hidden: Tensor, grad_weight: Tensor) -> tuple[Tensor, Tensor]:
    """From the gradients at a sparse head: δ at the logits [T, V], and δ · logitsᵀ [T, T] read from hidden."""
    tokens = len(grad_hidden)
    _, columns = head_columns(tokens)
    scales = hidden_scales(tokens)
    return grad_weight[:, columns].T / scales.unsqueeze(1), grad_hidden[:, columns] * scales


def dense_head(tokens: int, width: int, space: Space, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """(hidden [T, D], weight [V, D], target [T]) in fp64: rows of hidden differ in length, logits have a spread of about 2.5."""
    generator = seeded(seed)
    lengths_T = torch.linspace(0.5, 2.0, tokens, dtype=torch.float64).unsqueeze(-1)
    hidden = lengths_T * torch.randn(tokens, width, generator=generator, dtype=torch.float64)
    weight = 2.5 / math.sqrt(width) * torch.randn(space.width, width, generator=generator, dtype=torch.float64)
    if space.padded:
        hidden[:, 0], weight[:, 0] = 4.0, 0.0
        weight[space.lanes :] = 0.0
        weight[space.lanes :, 0] = PADDING / 4.0
    return hidden, weight, allowed(torch.randint(space.lanes, (tokens,), generator=generator), space)
