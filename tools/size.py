"""How large is the package? One row per package: modules, lines, statements, functions, dataclasses, median and largest module.

    python tools/size.py [CHECKOUT]

Statements are those of the syntax tree without imports and docstrings. Medians and largest modules leave out `__init__.py`.
"""

from __future__ import annotations

import ast
import statistics
import sys
from pathlib import Path
from typing import NamedTuple


class Module(NamedTuple):
    package: str
    name: str
    lines: int
    statements: int
    functions: int
    dataclasses: int


def is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def measure(path: Path, root: Path) -> Module:
    text = path.read_text(encoding="utf-8")
    nodes = list(ast.walk(ast.parse(text)))
    parts = path.relative_to(root).parts
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    return Module(
        package="/".join(parts[:2]) if parts[0] == "audit" and len(parts) > 2 else parts[0].removesuffix(".py"),
        name=str(path.relative_to(root)),
        lines=len(text.splitlines()),
        statements=sum(
            isinstance(node, ast.stmt) and not isinstance(node, (ast.Import, ast.ImportFrom)) and not is_docstring(node)
            for node in nodes
        ),
        functions=sum(isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) for node in nodes),
        dataclasses=sum(any("dataclass" in ast.unparse(mark) for mark in node.decorator_list) for node in classes),
    )


def row(name: str, modules: list[Module]) -> str:
    real = [module for module in modules if not module.name.endswith("__init__.py")] or modules
    largest = max(real, key=lambda module: module.lines)
    sums = [
        sum(getattr(module, field) for module in modules)
        for field in ("lines", "statements", "functions", "dataclasses")
    ]
    numbers = [len(real), *sums, round(statistics.median(module.lines for module in real))]
    return f"{name:24}" + "".join(f"{number:>12,}" for number in numbers) + f"   {largest.lines} {largest.name}"


def main() -> None:
    checkout = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1]
    for source in ("zloss", "zloss_paper"):
        root = checkout / "src" / source
        modules = [measure(path, root) for path in sorted(root.rglob("*.py"))]
        names = ("modules", "lines", "statements", "functions", "dataclasses", "median")
        print(f"{source:24}" + "".join(f"{name:>12}" for name in names) + "   largest")
        for package in sorted({module.package for module in modules}):
            print(row(package, [module for module in modules if module.package == package]))
        print(row("all", modules), end="\n\n")


if __name__ == "__main__":
    main()
