"""Rules of the house that a machine can check: import cost, public names."""

from __future__ import annotations

import subprocess
import sys

import pytest

import zloss

HEAVY = {"transformers", "triton", "datasets", "pyarrow", "vl_convert", "plotly", "accelerate", "gguf"}


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_every_public_name_resolves_and_is_listed() -> None:
    for name in zloss.__all__:
        assert getattr(zloss, name) is not None
    assert set(dir(zloss)) == set(zloss.__all__)
    with pytest.raises(AttributeError, match="no attribute"):
        _ = zloss.nothing_of_the_kind  # type: ignore[attr-defined]


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = "import zloss, sys; [getattr(zloss, n) for n in zloss.__all__]; print(*sys.modules)"
    # Modules that torch itself loads when it is imported alone are not ours.
    ours = set(run(code).split()) - set(run("import torch, sys; print(*sys.modules)").split())
    assert not HEAVY & {name.partition(".")[0] for name in ours}


def test_import_takes_at_most_a_third_longer_than_torch() -> None:
    # Both in one process, in processor time, the least of each over the rounds: other jobs on the machine only ever add.
    # The collector is off, because its pauses fall on whichever module crosses a threshold.
    code = (
        "import gc, time; gc.disable(); clock = time.process_time; start = clock(); import torch; middle = clock()\n"
        "import zloss; [getattr(zloss, name) for name in zloss.__all__]; print(middle - start, clock() - middle)"
    )
    rounds = [tuple(map(float, run(code).split())) for _ in range(6)]
    of_torch, of_zloss = (min(times) for times in zip(*rounds, strict=True))
    assert of_zloss <= 0.3 * of_torch, rounds
