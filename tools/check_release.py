"""Builds wheel and sdist, and tries the wheel in a fresh environment with nothing but the minimal dependencies.

    python -m tools.check_release [--out dist] [--python python3.11 python3.12 python3.13]

1. `zloss/__init__.py` defines the version; the built files carry it, and CITATION.cff and CHANGELOG.md name it.
2. `twine check` accepts both files. Every data file of the source tree is in the wheel.
3. In a fresh environment of each Python, with the wheel and its required dependencies: import, `zloss --help`, the first Python
   example of the README, and for each extra that is missing one sentence with the line that installs it.

Needs `build`, `twine` and `hatchling` (`make release` installs them). Exit code 1 where something is wrong.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from tools.fresh_environment import FreshEnvironment

ROOT = Path(__file__).parents[1]
PACKAGES = ("zloss", "zloss_paper")

MISSING_EXTRAS = {
    "zloss audit gpt2 --text {text}": "zloss[audit]",
    "zloss train gpt2 --text {text} --out {folder}": "zloss[train]",
    "zloss center gpt2 --out {folder}": "zloss[audit]",
    "zloss audit-implementation gpt2 --text {text} --out {folder}": "zloss[audit]",
    "python -c 'import zloss; from zloss.integrations.transformers import apply; "
    'apply(__import__("torch").nn.Linear(2, 2), zloss.CrossEntropy())\'': "zloss[audit]",
    "python -c 'import zloss.integrations.lightning as t; t.ZLossCallback'": "zloss[lightning]",
}
"""A command in an environment without extras: the extra that its error must name."""


def built(out: Path) -> tuple[Path, Path]:
    """Wheel and sdist, from the working tree."""
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("zloss-*"):
        old.unlink()
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT))
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, sdist


def version_problems(wheel: Path) -> Iterator[str]:
    source = (ROOT / "src/zloss/__init__.py").read_text()
    version = re.search(r'^__version__ = "(.+)"$', source, re.MULTILINE)
    assert version is not None
    if f"-{version[1]}-" not in wheel.name:
        yield f"{wheel.name} does not carry the version {version[1]} of zloss/__init__.py"
    for name, line in (("CITATION.cff", f"version: {version[1]}"), ("CHANGELOG.md", f"## {version[1]}")):
        if line not in (ROOT / name).read_text():
            yield f"{name} does not have the line {line!r}"


def missing_data(wheel: Path) -> Iterator[str]:
    inside = set(zipfile.ZipFile(wheel).namelist())
    for package in PACKAGES:
        for path in sorted((ROOT / "src" / package).rglob("*")):
            name = path.relative_to(ROOT / "src").as_posix()
            if path.is_file() and "__pycache__" not in name and name not in inside:
                yield f"{name} is not in the wheel"


def first_example() -> str:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return str(blocks[0])


def environment_problems(wheel: Path, folder: Path, interpreter: str) -> Iterator[str]:
    """What goes wrong with the wheel in a new environment of an interpreter."""
    environment = FreshEnvironment.made(folder, interpreter)
    for what in ("torch", str(wheel)):  # torch first: its pin keeps later resolution from fetching the CUDA build
        done = environment.install(what, constraints=ROOT / "constraints.txt")
        if done.returncode:
            yield f"{what} cannot be installed: {done.stderr[-500:]}"
            return
    text = folder / "text.txt"
    text.write_text("some text\n")
    example = folder / "example.py"
    example.write_text(first_example())
    for command in ("python -c 'import zloss; print(zloss.__version__)'", "zloss --help", f"python {example}"):
        done = environment.shell(command)
        if done.returncode:
            yield f"{command!r} exited with {done.returncode}: {done.stderr[-500:]}"
    for command, extra in MISSING_EXTRAS.items():
        command = command.format(text=text, folder=folder / "out")
        done = environment.shell(command)
        said = " ".join((done.stdout + done.stderr).split())
        if extra not in said or "pip install" not in said:
            yield f"{command!r} does not name {extra}: {said[-500:]}"
        if command.startswith("zloss") and done.returncode != 2:
            yield f"{command!r} exited with {done.returncode}, not with 2"


def run(*words: str) -> None:
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the built files")
    parser.add_argument("--python", nargs="+", default=[sys.executable], metavar="PYTHON", help="interpreters to try")
    given = parser.parse_args()
    wheel, sdist = built(given.out)
    run(sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(sdist))
    problems = [*version_problems(wheel), *missing_data(wheel)]
    for interpreter in given.python:
        with tempfile.TemporaryDirectory() as folder:
            found = [f"{interpreter}: {problem}" for problem in environment_problems(wheel, Path(folder), interpreter)]
        print(f"{interpreter}: {f'{len(found)} problems' if found else 'in order'}", flush=True)
        problems += found
    print(*problems, sep="\n", end="\n" if problems else "")
    print(f"{wheel.name} and {sdist.name}: {f'{len(problems)} problems' if problems else 'no problems'}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
