"""The packages and the one direction in which they may import each other (docs/architecture.md)."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import zloss
import zloss_paper

SOURCE = Path(zloss.__file__).parent
PAPER = Path(zloss_paper.__file__).parent

MATHEMATICS = {"errors", "distributed", "results", "tensors", "statistics", "objectives"}
TENSORS = MATHEMATICS | {"head", "router", "optimizer"}
EXPERIMENTS = TENSORS | {"models", "text", "console", "jobs", "measure", "decide"}
LOOPS = EXPERIMENTS | {"telemetry"}
EVERYTHING = LOOPS | {"audit", "train", "report"}

MAY_IMPORT = {
    # package: the packages it may import, besides itself
    "errors": set(),
    "distributed": {"errors"},
    "jobs": {"errors"},
    "results": {"errors"},
    "console": {"errors"},
    "tensors": {"errors"},
    "statistics": {"results"},
    "objectives": {"errors", "results", "statistics", "tensors"},
    "head": MATHEMATICS,
    "router": MATHEMATICS,
    "optimizer": TENSORS - {"optimizer"},
    "models": TENSORS,
    "text": TENSORS,
    "measure": TENSORS | {"models", "text", "console", "jobs"},
    "telemetry": EXPERIMENTS,
    "audit": LOOPS,
    "train": LOOPS,
    "decide": {"errors", "results"},
    "report": {"errors", "results", "decide"},
    "protocol": EVERYTHING,
    "testing": EVERYTHING,
    "integrations": EVERYTHING,
    "cli": EVERYTHING | {"protocol", "integrations", "zloss_paper"},
    "zloss_paper": EVERYTHING,
}
WITHOUT_TORCH = ("results", "decide", "report")


def packages_of(module: str) -> set[str]:
    """The package a dotted name of ours lies in; nothing for foreign packages and for the package itself."""
    package, _, rest = module.partition(".")
    if package == "zloss_paper":
        return {"zloss_paper"}
    return {rest.partition(".")[0]} if package == "zloss" and rest else set()


def imported_modules(text: str) -> Iterator[str]:
    """Every module a source imports anywhere in it, inside functions too."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the package they lead to"
            yield node.module or ""
            if node.module in ("zloss", "zloss_paper"):
                yield from (f"{node.module}.{alias.name}" for alias in node.names if not alias.name.startswith("_"))


def wrong_imports(text: str, package: str) -> set[str]:
    """The packages that a source of `package` must not import, but does."""
    packages = set().union(*(packages_of(module) for module in imported_modules(text)))
    return packages - MAY_IMPORT[package] - {package}


def sources_of(package: str) -> list[Path]:
    if package == "zloss_paper":
        return sorted(PAPER.rglob("*.py"))
    file = SOURCE / f"{package}.py"
    return [file] if file.exists() else sorted((SOURCE / package).rglob("*.py"))


def test_every_package_is_listed() -> None:
    here = {path.name for path in SOURCE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    here |= {path.stem for path in SOURCE.glob("*.py")} - {"__init__", "__main__"}
    assert here | {"zloss_paper"} == set(MAY_IMPORT)


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_point_one_way(package: str) -> None:
    wrong = {str(path): found for path in sources_of(package) if (found := wrong_imports(path.read_text(), package))}
    assert not wrong


def reachable(package: str, graph: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    pending = set(graph[package])
    while pending:
        found |= pending
        pending = set().union(*(graph.get(other, set()) for other in pending)) - found
    return found


def test_no_package_reaches_itself_through_others() -> None:
    assert not [package for package in MAY_IMPORT if package in reachable(package, MAY_IMPORT)]


@pytest.mark.parametrize(
    ("package", "line"),
    [
        ("results", "from zloss.audit.checkpoint.run import run_audit"),
        ("decide", "from zloss.report.numbers import number"),
        ("report", "def draw():\n    from zloss.train.grid import Grid"),
        ("audit", "import zloss.train.run"),
        ("train", "from zloss.report.html import to_page"),
        ("head", "from zloss.models.checkpoint import Checkpoint"),
        ("objectives", "from zloss.head.loss import head_loss"),
        ("zloss_paper", "from zloss.cli.main import main"),
        ("measure", "from zloss import audit"),
    ],
)
def test_a_wrong_import_is_seen(package: str, line: str) -> None:
    assert wrong_imports(line, package)


@pytest.mark.parametrize("package", WITHOUT_TORCH)
def test_results_decisions_and_reports_know_no_torch(package: str) -> None:
    for path in sources_of(package):
        assert "torch" not in {module.partition(".")[0] for module in imported_modules(path.read_text())}, path


def test_results_decisions_and_reports_load_without_torch() -> None:
    names = [
        ".".join(("zloss", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")
        for package in WITHOUT_TORCH
        for path in sources_of(package)
    ]
    code = (
        f"import importlib, sys\nfor name in {names}: importlib.import_module(name)\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def imported_packages() -> dict[str, set[str]]:
    """Package → the packages its sources import, without `errors`, which is below all others."""
    return {
        package: set().union(
            *(packages_of(module) for path in sources_of(package) for module in imported_modules(path.read_text()))
        )
        - {package, "errors"}
        for package in MAY_IMPORT
        if package != "errors"
    }


def test_the_drawing_of_the_architecture_is_true() -> None:
    graph = imported_packages()
    needed = {
        (package, other)
        for package, others in graph.items()
        for other in others
        if not any(other in reachable(third, graph) for third in others - {other})
    }
    text = (SOURCE.parents[1] / "docs" / "architecture.md").read_text(encoding="utf-8")
    drawn = {(left, right) for left, right in re.findall(r"^    (\w+) --> (\w+)$", text, flags=re.MULTILINE)}
    assert drawn == needed
