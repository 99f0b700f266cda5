"""The packages inside zloss_paper and the directions in which they may import one another.

    engine ← heads, implementations, training, moe, reporting

The engine imports no family. A family imports the engine and itself, never another family. Only the
registry names the recipes' modules, as text, and imports one when its label is asked for.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.test_import_directions import imported_modules
from zloss_paper import engine
from zloss_paper.engine.registry import MODULES

PAPER = Path(engine.__file__).parents[1]
FAMILIES = ("heads", "implementations", "training", "moe", "reporting")
MAY_IMPORT = {
    # package: the packages of zloss_paper it may import, besides itself
    "engine": set(),
    **{family: {"engine"} for family in FAMILIES},
}


def wrong_imports(text: str, package: str) -> set[str]:
    """The packages of zloss_paper that a source of `package` imports without leave."""
    parts = [module.split(".") for module in imported_modules(text)]
    packages = {part[1] for part in parts if part[0] == "zloss_paper" and len(part) > 1}
    return packages - MAY_IMPORT[package] - {package}


def module_name(path: Path) -> str:
    return ".".join(("zloss_paper", *path.relative_to(PAPER).with_suffix("").parts))


def test_every_package_is_listed() -> None:
    here = {path.name for path in PAPER.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert here == {*MAY_IMPORT, "data"}
    assert {path.name for path in PAPER.glob("*.py")} == {"__init__.py"}


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_point_one_way(package: str) -> None:
    sources = sorted((PAPER / package).rglob("*.py"))
    wrong = {str(path): found for path in sources if (found := wrong_imports(path.read_text(), package))}
    assert sources
    assert not wrong


@pytest.mark.parametrize(
    ("package", "line"),
    [
        ("engine", "from zloss_paper.training.table import TrainingTable"),
        ("engine", "def run():\n    from zloss_paper.heads.recipe import head_lines"),
        ("heads", "import zloss_paper.implementations.recipe"),
        ("training", "from zloss_paper import heads"),
        ("reporting", "from zloss_paper.moe.router_variants import run_moe_table"),
    ],
)
def test_a_wrong_import_is_seen(package: str, line: str) -> None:
    assert wrong_imports(line, package)


def test_recipes_stand_in_families() -> None:
    for module in MODULES.values():
        assert module.partition(".")[0] in FAMILIES
        assert (PAPER / f"{module.replace('.', '/')}.py").is_file()


def test_no_module_imports_itself_through_others() -> None:
    """Imports for type checking count too: a cycle that only types close still binds two files together."""
    imports = {
        module_name(path): {name for name in imported_modules(path.read_text()) if name.startswith("zloss_paper.")}
        for path in PAPER.rglob("*.py")
        if path.name != "__init__.py"
    }
    done: set[str] = set()

    def visit(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, f"a cycle: {' → '.join((*way[way.index(module) :], module))}"
        if module not in done:
            for other in sorted(imports.get(module, ())):
                visit(other, (*way, module))
            done.add(module)

    for module in imports:
        visit(module, ())
