"""`zloss report` and `zloss glossary`: results on disk as a table, a page and figure files, and what their terms mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from zloss.decide.thresholds import Thresholds
from zloss.results.options import Option


@dataclass(frozen=True)
class Report:
    """Rebuild the page of an audit, compare several audits side by side, or join audits, loss audits, implementation audits,
    comparisons and router scales into one page with one decision map of eight stages. Recommendations, drifts and
    reproductions are shown with their own verdicts."""

    results: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="RESULT...")]
    """Folders or JSON files written by `zloss audit`, `audit-loss`, `audit-implementation`, `compare`, `drift`,
    `recommend`, `router-scale` or `reproduce`."""
    out: str = ""
    """Folder to write to; by default the folder of a single result, otherwise `zloss-report`."""
    figures: bool = False
    """Also write the figures as files."""
    formats: Annotated[tuple[str, ...], Option(comma_separated=True)] = ("svg", "png")
    """Formats of the figure files."""
    force: bool = False
    """Replace a different result that is already in the folder."""
    quiet: bool = False
    """Print only errors."""
    verbose: bool = False
    """Also print all numbers of audits and comparisons, and the decision map of an audit."""
    thresholds: tyro.conf.OmitArgPrefixes[Thresholds] = field(default_factory=Thresholds)

    def run(self, argv: Sequence[str]) -> int:
        from zloss.decide.answer import decide_records
        from zloss.report.files import terminal_document, write_joined
        from zloss.report.terminal import print_document
        from zloss.results.files import load_results
        from zloss.results.folder import refuse_unrelated_page

        # With default thresholds every audit keeps those it was decided with.
        thresholds = None if self.thresholds == Thresholds() else self.thresholds
        loaded = load_results(Path(name) for name in self.results)
        refuse_unrelated_page(self._folder(), [result.path for result in loaded], force=self.force)
        results = decide_records((result.record for result in loaded), thresholds)
        # Files are written before printing, so a closed pipe on the terminal does not lose them.
        written = write_joined(self._folder(), results, loaded, figures=self.figures, formats=self.formats)
        if not self.quiet:
            print_document(terminal_document(results, verbose=self.verbose))
            for path in written:
                print(path)
        return 0

    def _folder(self) -> Path:
        if self.out:
            return Path(self.out)
        if len(self.results) == 1:
            only = Path(self.results[0])
            return only if only.is_dir() else only.parent
        return Path("zloss-report")


@dataclass(frozen=True)
class Glossary:
    """Print what symbols and keys mean: a symbol (A_p^99), a key of a written file (p_z_999), a stage of the decision map, or
    part of one of them. Without an argument, print the letters, the words and the quantities of an output head;
    docs/glossary.md lists everything."""

    words: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="[WORD ...]")] = ()
    """Symbols, keys or parts of them."""

    def run(self, argv: Sequence[str]) -> int:
        from zloss.report.document import Terms
        from zloss.report.glossary import entries
        from zloss.report.terminal import print_document

        print_document([Terms(tuple(entries(self.words)))])
        return 0
