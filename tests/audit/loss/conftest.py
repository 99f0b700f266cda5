"""What the audits of these tests share: their probes, and the sizes of those that need few."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator

import pytest

from zloss.audit.loss import findings, identify, model_tokens, probes, sizes
from zloss.audit.loss.probes import Probe, Space

LARGE = 2**20
"""Entries of a probe that is not kept: `thorough` has some of 300 MB."""


@pytest.fixture(scope="package", autouse=True)
def each_probe_is_drawn_once() -> Iterator[None]:
    """An audit draws about thirty, which depend on nothing but their arguments: a seventh of its time."""
    kept = functools.lru_cache(maxsize=64)(probes.draw)

    def draw(kind: str, space: Space, seed: int) -> Probe:
        return (probes.draw if space.tokens * space.width > LARGE else kept)(kind, space, seed)

    with pytest.MonkeyPatch.context() as patch:
        for module in (findings, identify, model_tokens, sizes):
            patch.setattr(module, "draw", draw)
        yield
    kept.cache_clear()
    # What tests/conftest.py keeps of the large tensors goes back: later tests fork, and a fork copies all page tables.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture
def few_vocabularies(monkeypatch: pytest.MonkeyPatch) -> None:
    """For losses that have no blocks of the vocabulary: one of each order of magnitude, the largest not the roundest."""
    monkeypatch.setattr(sizes, "VOCABS", (5000, 33000, 131071))
