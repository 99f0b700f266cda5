"""Code in the pages: Python parses, the pages that promise it run from top to bottom, commands are understood by the parser."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, PAGES, ROOT, Block, blocks_of
from tests.tiny_models import save_model
from zloss.cli.main import COMMANDS, command_type
from zloss.cli.options import parse
from zloss.cli.train import Train
from zloss.errors import ZlossError

BLOCKS = [block for page in PAGES for block in blocks_of(page) if block.language == "python"]
RUN = (
    ROOT / "README.md",
    *(
        DOCS / f"{name}.md"
        for name in ("own_loop", "any_model", "objectives", "coming_from", "ten_minutes", "contributing", "ci")
    ),
)
"""Pages whose Python blocks run in order, in one namespace."""
PLACEHOLDER = re.compile(r"[…\[\]<>]|\.\.\.|^[A-Z_]+$")


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_python_parses(block: Block) -> None:
    ast.parse(block.text)


@pytest.mark.parametrize("page", [page for page in RUN if page.exists()], ids=lambda page: page.name)
def test_a_page_runs_from_top_to_bottom(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "page"}
    blocks = [block for block in blocks_of(page) if block.language == "python"]
    assert blocks, page
    for block in blocks:
        exec(compile(block.text, str(block), "exec"), names)


def test_the_trainer_and_the_loop_of_the_integrations_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # This page needs a folder with a model, so it is not among those that run as they are.
    pytest.importorskip("datasets")
    save_model("phi", tmp_path / "my_model")
    (tmp_path / "train.txt").write_text("A text of one's own, in words of one's own. " * 600, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    blocks = [block for block in blocks_of(DOCS / "integrations.md") if block.language == "python"]
    trainer, loop = (block for block in blocks if "from_pretrained" in block.text)
    names: dict[str, object] = {"__name__": "page"}
    for block in (trainer, loop):
        exec(compile(block.text, str(block), "exec"), names)


def commands() -> Iterator[tuple[str, str]]:
    """(place, command) of every line that begins with `zloss`, in fenced and in indented blocks."""
    for page in PAGES:
        text = re.sub(r"\\\n\s*", " ", page.read_text(encoding="utf-8"))
        for found in re.finditer(r"^(?:    |\$ )?(?:[A-Z_]+=\S+ )*(zloss (?:[a-z-]+).*)$", text, re.MULTILINE):
            if found[1].split()[1] in COMMANDS:
                yield f"{page.relative_to(ROOT)}", found[1]


def words_of(command: str) -> list[str]:
    """The words of a command; what stands behind two spaces or a # is a remark."""
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
    import contextlib
    import io

    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit):
        parse(command_type(name), ["--help"], prog=f"zloss {name}")
    return set(re.findall(r"--[a-z0-9-]+", out.getvalue()))
