"""One row: an interpreter, a new environment, the installation, the tests."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tools.compat.record import Outcome, installer_reason, with_counts
from tools.compat.rows import EXTRAS, ROOT, TEST_TOOLS, Row, constraints
from tools.compat.selection import DESELECTED, FILES, MARKS
from tools.fresh_environment import FreshEnvironment

INSTALL_SECONDS = 1800
TEST_SECONDS = 3600


def commit() -> str:
    """The commit of the tree, with `-dirty` where files differ from it."""
    words = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def run_row(row: Row, commit: str) -> Outcome:
    """The outcome of a row. Its environment is gone when this returns."""
    outcome = Outcome(row.name, row.python, row.what, commit)
    program = interpreter(row.python)
    if program is None:
        return replace(outcome, unavailable=f"This machine has no Python {row.python}.")
    with tempfile.TemporaryDirectory(prefix="compat-") as folder:
        environment = FreshEnvironment.made(Path(folder), program)
        begin = time.perf_counter()
        unavailable = install(environment, constraints(row))
        outcome = replace(outcome, unavailable=unavailable, install_seconds=round(time.perf_counter() - begin))
        if unavailable:
            return outcome
        outcome = replace(outcome, installed=installed(environment), python=python_version(environment))
        print(f"  installed in {outcome.install_seconds:.0f} s; testing", flush=True)
        return tested(environment, outcome)


def install(environment: FreshEnvironment, versions: dict[str, str]) -> str:
    """Installs zloss under the constraints; the installer's reason where it cannot."""
    file = environment.folder / "constraints.txt"
    file.write_text("".join(f"{name}=={version}\n" for name, version in versions.items()), encoding="utf-8")
    package = f"{ROOT}[{','.join(EXTRAS)}]"
    try:
        done = environment.install(package, *TEST_TOOLS, constraints=file, seconds=INSTALL_SECONDS)
    except subprocess.TimeoutExpired:
        return f"The installation was not done after {INSTALL_SECONDS // 60} minutes."
    return installer_reason(done.stdout + "\n" + done.stderr) if done.returncode else ""


def installed(environment: FreshEnvironment) -> dict[str, str]:
    """Name → version of every distribution, names as package indexes normalise them."""
    question = (
        "import importlib.metadata, json; "
        "print(json.dumps({found.name: found.version for found in importlib.metadata.distributions()}))"
    )
    listed = json.loads(environment.shell(f"python -c {shlex.quote(question)}").stdout)
    return {re.sub(r"[-_.]+", "-", name).lower(): listed[name] for name in sorted(listed, key=str.lower)}


def python_version(environment: FreshEnvironment) -> str:
    return environment.shell("python -c 'import platform; print(platform.python_version())'").stdout.strip()


def tested(environment: FreshEnvironment, outcome: Outcome) -> Outcome:
    """The tests against the installed package; the source tree gives the tests alone."""
    junit = environment.folder / "junit.xml"
    # A busy machine must not decide a row, so a test has four times the time it has elsewhere.
    options = f"-p no:cacheprovider -o timeout=1200 -m '{MARKS}' --junitxml {junit}"
    left_out = " ".join(f"--deselect {name}" for name in DESELECTED)
    command = f"python -m pytest {options} {left_out} {shlex.join(FILES)}"
    begin = time.perf_counter()
    try:
        done = environment.shell(command, place=ROOT, seconds=TEST_SECONDS, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    except subprocess.TimeoutExpired:
        return replace(outcome, failed=1, failures=(f"the tests were not done after {TEST_SECONDS // 60} minutes",))
    seconds = round(time.perf_counter() - begin)
    if not junit.is_file():
        print(done.stdout[-3000:], done.stderr[-3000:], flush=True)
        return replace(outcome, failed=1, failures=(f"pytest ended with {done.returncode}",), test_seconds=seconds)
    outcome = replace(with_counts(outcome, junit), test_seconds=seconds)
    if outcome.failures:
        print(done.stdout[-20000:], flush=True)
    return outcome


def interpreter(version: str) -> str | None:
    """A program whose Python has the version, as in "3.12", and which can make environments; None where there is none."""
    return next((program for program in candidates(version) if works(program, version)), None)


def candidates(version: str) -> Iterator[str]:
    """This interpreter, those on PATH, those of pyenv, which is not on PATH for versions that were not chosen."""
    yield sys.executable
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        yield str(Path(folder) / f"python{version}")
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    yield from map(str, sorted(root.glob(f"versions/{version}.*/bin/python"), reverse=True))


def works(program: str, version: str) -> bool:
    """A program on PATH may be a shim without a Python behind it, or a Python without `ensurepip`."""
    question = f"import ensurepip, sys; sys.exit('%d.%d' % sys.version_info[:2] != '{version}')"
    try:
        return subprocess.run([program, "-c", question], capture_output=True, check=False).returncode == 0
    except OSError:
        return False
