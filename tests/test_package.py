"""Import cost and public names."""

from __future__ import annotations

import subprocess
import sys

import pytest

import zloss

HEAVY = {"transformers", "triton", "datasets", "pyarrow", "vl_convert", "plotly", "accelerate", "gguf"}


IMPORTS = """
import gc, sys, time
gc.disable()
clock = time.process_time
start = clock()
import torch
middle, before = clock(), set(sys.modules)
import zloss
[getattr(zloss, name) for name in zloss.__all__]
print(middle - start, clock() - middle, *sorted(set(sys.modules) - before))
"""
"""Seconds of torch, seconds of zloss, and the modules that zloss loads after torch. The collector is off, because its pauses
fall on whichever module crosses a threshold."""


@pytest.fixture(scope="module")
def imports() -> list[list[str]]:
    """What four fresh processes print."""
    argv = [sys.executable, "-c", IMPORTS]
    return [subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split() for _ in range(4)]


def test_every_public_name_resolves_and_is_listed() -> None:
    for name in zloss.__all__:
        assert getattr(zloss, name) is not None
    assert set(dir(zloss)) == set(zloss.__all__)
    with pytest.raises(AttributeError, match="no attribute"):
        _ = zloss.nothing_of_the_kind  # type: ignore[attr-defined]


def test_importing_the_package_loads_nothing_heavy(imports: list[list[str]]) -> None:
    # Modules that torch itself loads when it is imported alone are not ours.
    ours = {name.partition(".")[0] for name in imports[0][2:]}
    assert "zloss" in ours
    assert not HEAVY & ours


def test_import_takes_at_most_a_third_longer_than_torch(imports: list[list[str]]) -> None:
    # Both in one process, in processor time, the least of each over the rounds: other jobs on the machine only ever add.
    rounds = [(float(of_torch), float(of_zloss)) for of_torch, of_zloss, *_ in imports]
    of_torch, of_zloss = (min(times) for times in zip(*rounds, strict=True))
    assert of_zloss <= of_torch / 3, rounds
