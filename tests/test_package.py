"""Rules of the house that a machine can check: import cost, public names."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import zloss

SOURCE = Path(zloss.__file__).parent
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


def test_help_answers_without_torch() -> None:
    code = "import sys; from zloss.cli.main import main; main(['--help']); assert 'torch' not in sys.modules"
    assert "commands:" in run(code)


def test_no_cli_module_imports_torch_at_the_top() -> None:
    for path in (SOURCE / "cli").glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not {"torch", *HEAVY} & {name.partition(".")[0] for name in names}, path.name
