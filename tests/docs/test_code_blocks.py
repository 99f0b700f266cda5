"""Code in the pages: Python parses and imports what exists, some pages run as a whole, commands have only real options."""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, PAGES, ROOT, Block, blocks_of
from tests.tiny_models import save_model
from zloss.cli.main import COMMANDS, command_type
from zloss.cli.options import parse
from zloss.cli.train import Train
from zloss.errors import MissingDependencyError, ZlossError

BLOCKS = [block for page in PAGES for block in blocks_of(page) if block.language == "python"]
RUN = (
    ROOT / "README.md",
    *(
        DOCS / f"{name}.md"
        for name in ("own_loop", "any_model", "objectives", "coming_from", "ten_minutes", "contributing", "ci")
    ),
)
"""Pages whose Python blocks run from top to bottom."""
PLACEHOLDER = re.compile(r"[…\[\]<>]|\.\.\.|^[A-Z_]+$")


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_python_parses_and_imports_names_that_exist(block: Block) -> None:
    """The page on reports imported a function that was gone."""
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("zloss"):
            try:
                module = importlib.import_module(node.module)
            except MissingDependencyError:  # the framework of this integration
                continue
            assert all(hasattr(module, name.name) for name in node.names), block


def run(blocks: Sequence[Block]) -> None:
    """The blocks in order, in one namespace."""
    assert blocks
    names: dict[str, object] = {"__name__": "page"}
    for block in blocks:
        exec(compile(block.text, str(block), "exec"), names)


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.name)
def test_a_page_runs_from_top_to_bottom(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run([block for block in BLOCKS if block.page == page])


def test_the_trainer_and_the_loop_of_the_integrations_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # This page needs a folder with a model, so it is not in `RUN`.
    pytest.importorskip("datasets")
    save_model("phi", tmp_path / "my_model")
    (tmp_path / "train.txt").write_text("A text of one's own, in words of one's own. " * 600, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    blocks = [block for block in BLOCKS if block.page.name == "integrations.md" and "from_pretrained" in block.text]
    assert len(blocks) == 2
    run(blocks)


def commands() -> Iterator[tuple[str, str]]:
    """(place, command) of every line that begins with `zloss`, in fenced and in indented blocks."""
    for page in PAGES:
        text = re.sub(r"\\\n\s*", " ", page.read_text(encoding="utf-8"))
        for found in re.finditer(r"^(?:    |\$ )?(?:[A-Z_]+=\S+ )*(zloss (?:[a-z-]+).*)$", text, re.MULTILINE):
            if found[1].split()[1] in COMMANDS:
                yield f"{page.relative_to(ROOT)}", found[1]


def words_of(command: str) -> list[str]:
    """The words of a command; what follows three spaces or a # is a remark."""
    return shlex.split(re.split(r"\s{3,}|\s#", command)[0])[1:]


@pytest.mark.parametrize(("place", "command"), sorted(set(commands())))
def test_a_command_has_only_options_that_exist(place: str, command: str) -> None:
    name, *words = words_of(command)
    if any(PLACEHOLDER.search(word) for word in words):
        flags = [word for word in words if word.startswith("--")]
        known = options_of(name)
        assert all(flag.partition("=")[0] in known for flag in flags), f"{place}: {command}"
        return
    try:
        parsed = parse(command_type(name), words, prog=f"zloss {name}")
        if isinstance(parsed, Train):
            parsed.grid()  # its defaults are filled in after parsing
    except ZlossError as error:
        pytest.fail(f"{place}: {command}: {error}")


def options_of(name: str) -> set[str]:
    """The flags that the help of a command lists."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit):
        parse(command_type(name), ["--help"], prog=f"zloss {name}")
    return set(re.findall(r"--[a-z0-9-]+", out.getvalue()))
