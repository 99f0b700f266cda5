"""What the audits of these tests share: their probes, and sizes that take less time."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

from zloss.audit.loss import checks, evidence, fit, model_tokens, probes, sixteen_bits, source
from zloss.audit.loss.probes import Probe, Space

LARGE = 2**17
"""Entries of a batch that is not kept."""


@pytest.fixture(scope="package", autouse=True)
def each_probe_is_drawn_once() -> Iterator[None]:
    """An audit draws about thirty, which depend on nothing but their arguments."""
    kept = functools.lru_cache(maxsize=128)(probes.draw)

    def draw(kind: str, space: Space, seed: int) -> Probe:
        return (probes.draw if space.tokens * space.width > LARGE else kept)(kind, space, seed)

    with pytest.MonkeyPatch.context() as patch:
        for module in (checks, evidence, fit, model_tokens, source):
            if hasattr(module, "draw"):
                patch.setattr(module, "draw", draw)
        yield


@pytest.fixture(autouse=True)
def few_sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large batches, large vocabularies and 32 repetitions take half of an audit; `all_sizes` leaves them in."""
    if "all_sizes" not in request.fixturenames:
        monkeypatch.setattr(checks, "PRIMES", (5, 251))
        monkeypatch.setattr(checks, "VOCABS", (5003,))
        monkeypatch.setattr(checks, "REPEATS", 8)


@pytest.fixture
def all_sizes() -> None:
    """For losses that differ at a size."""


@pytest.fixture
def no_sixteen_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """For losses of heads whose point is elsewhere: 16-bit products take seconds on a CPU."""
    monkeypatch.setattr(sixteen_bits, "call_head", lambda *_: None)


@pytest.fixture
def bf16_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sixteen_bits, "DTYPES", sixteen_bits.DTYPES[:1])
