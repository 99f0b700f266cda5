"""Find sizes, layout and device that a loss accepts: some want a batch axis, their own vocabulary, or a multiple of T.

A loss that refuses the usual sizes mostly says which it wants: in the text of its error, or in the numbers its code
compares with. Those numbers are tried, then common vocabularies and powers of two.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from types import FrameType

import torch
from torch import Tensor

from zloss.audit.loss import probes
from zloss.audit.loss.callable import BlackBox
from zloss.audit.loss.output import LossCallError
from zloss.audit.loss.probes import Space

LARGEST_VOCAB = 300_000
FEW_TOKENS = 16
"""Rows of a probe whose vocabulary is large: enough for every kind of row, and small in memory."""
COMMON_VOCABS = (32000, 50257, 50304, 50265, 32768, 30522, 32128, 49152, 51200, 65536, 100352, 128256, 151936, 256000)
COMMON_TOKENS = (128, 256, 512, 1024, 2048)
MOST_TRIES = 64
SIZE_ERRORS = (AssertionError, RuntimeError, ValueError, IndexError)
"""What a loss raises about shapes. Another error is not about sizes, and no other size is tried."""


def settle(box: BlackBox, space: Space, logits: Tensor | None) -> Space:
    """The space in which the loss runs, with layout and device set on `box`; else the first refusal is the error."""
    devices = [box.device]
    if box.device.type == "cpu" and torch.cuda.is_available():
        devices.append(torch.device("cuda"))
    refusals: list[LossCallError] = []
    for device in devices:
        box.device = device
        for tried in _usual(space, logits):
            refusal = _try(box, tried)
            if refusal is None:
                return tried
            refusals.append(refusal)
    box.device = devices[0]
    if isinstance(refusals[0].__cause__, SIZE_ERRORS):
        for tried in _unusual(space, _numbers(refusals)):
            if _try(box, tried) is None:
                return _grown(box, tried)
    raise refusals[0]


def _usual(space: Space, logits: Tensor | None) -> list[Space]:
    spaces = [space]
    if logits is not None and logits.dim() >= 2 and not space.padded:
        spaces.append(_of_vocabulary(space, logits.shape[-1]))
    return spaces


def _of_vocabulary(space: Space, vocab: int) -> Space:
    tokens = space.tokens if vocab <= 4096 else min(space.tokens, FEW_TOKENS)
    return replace(space, lanes=vocab, width=vocab, tokens=tokens)


def _unusual(space: Space, numbers: list[int]) -> Iterator[Space]:
    """Sizes the loss may want, the ones it names first; at most `MOST_TRIES`."""
    rows = [_multiple(n, space.tokens) for n in numbers if 2 <= n <= 8192]
    tokens = list(dict.fromkeys([space.tokens, *rows]))
    vocabs = [] if space.padded else [n for n in numbers if 2 <= n <= LARGEST_VOCAB]
    wanted = [replace(space, tokens=t) for t in tokens[1:]]
    for vocab in vocabs:
        of_vocab = _of_vocabulary(space, vocab)
        wanted += [replace(of_vocab, tokens=_multiple(n, of_vocab.tokens)) for n in [1, *numbers] if n <= 1024]
    if not space.padded:
        wanted += [_of_vocabulary(space, vocab) for vocab in COMMON_VOCABS]
    wanted += [replace(space, tokens=t) for t in COMMON_TOKENS]
    yield from list(dict.fromkeys(wanted))[:MOST_TRIES]


def _multiple(n: int, at_least: int) -> int:
    return n * -(-at_least // n)


def _grown(box: BlackBox, space: Space) -> Space:
    """Four times the rows where that is accepted: then smaller batches of the same granularity exist."""
    larger = replace(space, tokens=4 * space.tokens)
    small = larger.tokens * larger.width <= 2**21
    if space.tokens != probes.TOKENS and small and _try(box, larger) is None:
        return larger
    return space


def _try(box: BlackBox, space: Space) -> LossCallError | None:
    """None where the loss runs, with or without a batch axis, with weight [V, D] or [D, V], in fp32 or fp64; else its refusal."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, space.width, generator=generator, dtype=torch.float64).expand(space.tokens, -1)
    target = probes.allowed(torch.arange(space.tokens) % space.lanes, space.lanes, space.avoid)
    refusal: LossCallError | None = None
    for transposed in (False, True) if box.linear else (False,):
        for batched in (False, True):
            for dtype in (torch.float32, torch.float64):
                box.batched, box.transposed = batched, transposed
                try:
                    box(logits, target, dtype=dtype)
                    return None
                except LossCallError as error:
                    refusal = refusal or error
    return refusal


def _numbers(refusals: Iterable[LossCallError]) -> list[int]:
    """Whole numbers in the errors and in the code that raised them, in that order."""
    found: list[int] = []
    for refusal in refusals:
        cause = refusal.__cause__
        if cause is None:
            continue
        found += [int(text) for text in re.findall(r"\d+", str(cause)) if len(text) < 8]
        step = cause.__traceback__
        while step is not None:
            if "zloss/audit/loss" not in step.tb_frame.f_code.co_filename and "/torch/" not in (
                step.tb_frame.f_code.co_filename
            ):
                found += _of_frame(step.tb_frame)
            step = step.tb_next
    return [n for n in dict.fromkeys(found) if n > 1]


def _of_frame(frame: FrameType) -> list[int]:
    values: list[object] = [*frame.f_code.co_consts, *frame.f_locals.values()]
    values += [frame.f_globals.get(name) for name in frame.f_code.co_names]
    holder = frame.f_locals.get("self")
    if holder is not None:
        values += list(getattr(holder, "__dict__", {}).values())
    for tensor in [value for value in values if isinstance(value, Tensor)]:
        # A weight or table of the loss shows the size it was made for.
        values += list(tensor.shape)
    return [value for value in values if isinstance(value, int) and not isinstance(value, bool)]
