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
        from zloss.decide.decided_results import decide_results
        from zloss.report.files import write_comparison
        from zloss.report.terminal.comparison import print_comparison
        from zloss.train.compare.comparison import compare_runs
        from zloss.train.compare.finished_run import load_runs

        folder = Path(self.folder)
        runs, unfinished = load_runs(folder)
        comparison = compare_runs(
            runs,
            baseline=self.baseline,
            tolerance_ppl=self.tolerance_ppl,
            diagnosed=self.diagnosed,
            unfinished=unfinished,
        )
        written = write_comparison(folder, decide_results(comparisons=(comparison,)))
        if not self.quiet:
            print_comparison(comparison)
            print("\n".join(str(path) for path in written))
        return 0
