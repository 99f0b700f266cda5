"""`zloss compare`: matched runs side by side, accepted or rejected."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro


@dataclass(frozen=True)
class Compare:
    """Pair the runs of `zloss train` by seed and every setting, print mean ± std and paired differences, and accept or
    reject each method: its diagnosed coordinate must improve, and PPL must stay within the tolerance."""

    folder: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DIR")]
    """The --out of `zloss train`."""
    baseline: str = "ce"
    """The reference method; `method:coef` where it was run with several coefficients."""
    tolerance_ppl: float | None = None
    """How much PPL may rise. Default: 1 % of the baseline's."""
    diagnosed: str = "p_z_999"
    """The quantity of the head that an intervention has to lower: p_z_999, a_p_99, diag_z, mu_abs_99, ..."""
    quiet: bool = False
    """No table."""

    def run(self) -> int:
        from zloss.report.joined import join_results, write_joined
        from zloss.report.results import Result
        from zloss.report.writing import write_json
        from zloss.train.compare import compare_folder
        from zloss.train.comparison_terminal import print_comparison

        folder = Path(self.folder)
        data = compare_folder(
            folder, baseline=self.baseline, tolerance_ppl=self.tolerance_ppl, diagnosed=self.diagnosed
        )
        file = folder / "comparison.json"
        write_json(file, data)
        written = write_joined(folder, join_results([Result(file, "comparison", data)]))
        if not self.quiet:
            print_comparison(data)
            print("\n".join(str(path) for path in (file, written[0])))
        return 0
