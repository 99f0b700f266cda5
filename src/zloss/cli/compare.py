"""`zloss compare`: matched runs side by side, with a verdict on every method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from zloss.decide.thresholds import Thresholds


@dataclass(frozen=True)
class Compare:
    """Pair the runs of `zloss train` by seed and every setting, print mean ± std and paired differences, and judge each
    method: accepted, rejected or inconclusive, from its validation quality, the coordinate it is meant to lower, and what
    reaches the optimizer. Of runs with --moe the router variants are compared: scale, entropy, load, and how far their
    losses are from the baseline's.

    Example: zloss compare runs --tolerance-ppl 0.1
    """

    folder: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DIR")]
    """The --out of `zloss train`."""
    baseline: str | None = None
    """The reference method; `method:coef` where it was run with several coefficients. Default ce; token_layer_mean among
    router variants."""
    tolerance_ppl: float | None = None
    """How much PPL may rise, in PPL. Default: --quality-tolerance of the baseline's PPL."""
    diagnosed: str | None = None
    """A number of the head that every method has to lower instead of its own: p_z_999, mu_abs_99, delta_u_99, diag_z or
    mu_rms. Default: what each method is meant to lower."""
    force: bool = False
    """Replace the result of something else that the folder holds."""
    quiet: bool = False
    """No table."""
    thresholds: tyro.conf.OmitArgPrefixes[Thresholds] = field(default_factory=Thresholds)

    def run(self, argv: Sequence[str]) -> int:
        from zloss.decide.answer import decide_results
        from zloss.report.comparison import comparison_summary
        from zloss.report.files import write_result
        from zloss.report.terminal import print_document
        from zloss.results.folder import Owner, refuse_other
        from zloss.train.compare import compare_runs
        from zloss.train.finished import load_runs

        folder = Path(self.folder)
        refuse_other(folder, Owner("comparison"), force=self.force)
        runs, unfinished = load_runs(folder)
        comparison = compare_runs(
            runs,
            baseline=self.baseline,
            tolerance_ppl=self.tolerance_ppl,
            diagnosed=self.diagnosed,
            unfinished=unfinished,
            thresholds=self.thresholds,
        )
        thresholds = None if self.thresholds == Thresholds() else self.thresholds
        written = write_result(folder, decide_results(comparisons=(comparison,), thresholds=thresholds))
        if not self.quiet:
            print_document(comparison_summary(comparison))
            print("\n".join(str(path) for path in written))
        return 0
