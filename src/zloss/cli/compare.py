"""`zloss compare`: matched runs side by side, accepted or rejected."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro


@dataclass(frozen=True)
class Compare:
    """Pair the runs of `zloss train` by seed and every setting, print mean ± std and paired differences, and accept or
    reject each method: its diagnosed coordinate must improve, and PPL must stay within the tolerance. Of runs with --moe
    the router variants are compared: scale, entropy, load, and how far their losses are from the baseline's."""

    folder: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DIR")]
    """The --out of `zloss train`."""
    baseline: str | None = None
    """The reference method; `method:coef` where it was run with several coefficients. Default ce; token_layer_mean among
    router variants."""
    tolerance_ppl: float | None = None
    """How much PPL may rise. Default: 1 % of the baseline's."""
    diagnosed: str = "p_z_999"
    """The quantity of the head that an intervention has to lower: p_z_999, a_p_99, diag_z, mu_abs_99, ..."""
    quiet: bool = False
    """No table."""

    def run(self) -> int:
        from zloss.report.html.page import Page, render_page
        from zloss.report.tables.comparison_markdown import comparison_markdown
        from zloss.report.terminal.comparison import print_comparison
        from zloss.results.writing import write_json, write_text
        from zloss.train.compare.comparison import compare_runs
        from zloss.train.compare.finished_run import load_runs

        folder = Path(self.folder)
        runs, unfinished = load_runs(folder)
        data = compare_runs(
            runs,
            baseline=self.baseline,
            tolerance_ppl=self.tolerance_ppl,
            diagnosed=self.diagnosed,
            unfinished=unfinished,
        )
        file, text, page = (folder / name for name in ("comparison.json", "comparison.md", "report.html"))
        write_json(file, data)
        write_text(text, comparison_markdown(data))
        write_text(page, render_page(Page(comparisons=(data,))))
        if not self.quiet:
            print_comparison(data)
            print("\n".join(str(path) for path in (file, text, page)))
        return 0
