"""`zloss reproduce`: a table or figure of the paper, our rows next to the paper's, with its claims checked against data."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from zloss.results.options import Option, TextFiles
from zloss.results.provenance import without_folders

if TYPE_CHECKING:
    from zloss_paper.engine.recipe import Recipe
    from zloss_paper.engine.reproduction import Reproduction


@dataclass(frozen=True)
class Reproduce:
    """Rerun a table of the paper: print our rows next to the paper's, and check the paper's claims on ours. The exit code is 1
    if a claim does not hold; the smoke profile checks no claims."""

    labels: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="LABEL")] = ()
    """Labels as --list shows them, e.g. tab:pretrained; several share their audits and training runs. `all`: every one."""
    list_: Annotated[bool, tyro.conf.arg(name="list")] = False
    """List the labels and exit."""
    profile: Literal["paper", "cpu", "smoke"] = "cpu"
    """paper: the paper's models, corpora, token counts and seeds; cpu: offline, audits on SmolLM2 in minutes, training on
    separate small models in two to three hours for all tables; smoke: seconds."""
    model: Annotated[tuple[str, ...], Option(metavar="MODEL", repeated=True)] = ()
    """Models instead of the profile's: a folder in the Hugging Face format, an id or a GGUF file; NAME=FOLDER for a local
    copy of one of the paper's models, NAME alone to select one. Repeat to append."""
    texts: TextFiles = ()
    """Text instead of the profile's corpus; repeat to append."""
    text_source: str = ""
    """Source and license of that text, to be recorded in the result."""
    blocks: int | None = None
    """Blocks instead of the profile's count; 0 uses the whole text."""
    block_size: int | None = None
    """Predictions per block instead of the profile's."""
    report: Annotated[tuple[str, ...], Option(metavar="RESULT", repeated=True)] = ()
    """For text:reporting: results to check instead of a new audit."""
    out: str = "zloss-reproduce"
    """Folder for LABEL.json and LABEL.md; audits and training runs are kept there too and reused."""
    rejudge: bool = False
    """Run nothing: check the claims again from the results in --out, and rewrite their files."""
    quiet: bool = False
    """Do not print progress or tables."""

    def run(self, argv: Sequence[str]) -> int:
        from zloss.errors import InputError
        from zloss_paper.engine.recipe import find_recipe, labels

        if self.list_:
            _print_list()
            return 0
        if not self.labels:
            raise InputError(
                f"no table was requested: `zloss reproduce {labels()[0]}` runs one, `zloss reproduce all` runs all of them, and "
                "`zloss reproduce --list` shows their names."
            )
        folder, everything = Path(self.out), self.labels == ("all",)
        recipes = [find_recipe(label) for label in (labels() if everything else self.labels)]
        if self.rejudge and everything:
            recipes = [recipe for recipe in recipes if (folder / f"{recipe.stem}.json").is_file()]

        from zloss.report.reproduction import reproduction_summary
        from zloss.report.terminal import print_document
        from zloss_paper.engine.reproduction import rejudge, write_reproduction

        produce = partial(rejudge, folder) if self.rejudge else self._runner(folder)
        failed = False
        for recipe in recipes:
            result = produce(recipe)
            failed = failed or result.failed
            written = write_reproduction(folder, result)
            if not self.quiet:
                print_document(reproduction_summary(result.record))
                print("\n".join(str(path) for path in written))
        return 1 if failed else 0

    def _runner(self, folder: Path) -> Callable[[Recipe[Any]], Reproduction]:
        """A function that runs a recipe; all recipes share one workbench."""
        from zloss.console import choose_progress
        from zloss.results.folder import check_folder
        from zloss_paper.engine.recipe import Overrides
        from zloss_paper.engine.reproduction import reproduce
        from zloss_paper.engine.workbench import Workbench

        check_folder(folder)
        overrides = Overrides(
            models=tuple(self.model),
            texts=self.texts,
            text_source=self.text_source,
            blocks=self.blocks,
            block_size=self.block_size,
            reports=tuple(self.report),
        )
        bench = Workbench(folder, progress=choose_progress(self.quiet))

        def run(recipe: Recipe[Any]) -> Reproduction:
            bench.command = self.command(recipe.label)
            return reproduce(recipe, self.profile, overrides, bench)

        return run

    def command(self, label: str) -> str:
        """The command line for one label, without the folders of this machine."""
        argv = ["zloss", "reproduce", label, "--profile", self.profile]
        for flag, values in (("--model", self.model), ("--text", self.texts), ("--report", self.report)):
            for value in values:
                argv += [flag, _name_without_folders(value)]
        for flag, count in (("--blocks", self.blocks), ("--block-size", self.block_size)):
            if count is not None:
                argv += [flag, str(count)]
        return shlex.join(argv)


def _name_without_folders(value: str) -> str:
    """FOLDER or NAME=FOLDER by the last part of the folder."""
    prefix, equals, path = value.rpartition("=")
    return f"{prefix}{equals}{without_folders(path)}"


def _print_list() -> None:
    from rich.console import Console
    from rich.table import Table

    from zloss_paper.engine.recipe import find_recipe, labels

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("label", "what it shows", "claims"):
        table.add_column(column, overflow="fold")
    for label in labels():
        recipe = find_recipe(label)
        table.add_row(label, recipe.title, str(len(recipe.claims)))
    Console(markup=False).print(table)
