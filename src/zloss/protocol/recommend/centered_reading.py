"""Centered head without a run of its own: with a fused head it trains bit for bit as CE does.

The two differ in the coordinate that is deployed, and both coordinates are in the metrics of the CE run.
"""

from __future__ import annotations

from dataclasses import replace

from zloss.train.compare.finished_run import FinishedRun

METHOD = "centered-head"


def as_centered_head(run: FinishedRun) -> FinishedRun | None:
    """The CE run as a run of Centered head; None where μ does not exist, or where another head was trained."""
    head = run.record.heads.centered
    if head.p_z_999 is None or run.config.get("head", "fused") != "fused":
        return None
    return replace(
        run,
        config={**run.config, "method": METHOD},
        record=replace(
            run.record,
            method=METHOD,
            coordinate="centered",
            diag_z=head.diag_z,
            p_z_999=head.p_z_999,
            a_p_99=head.a_p_99,
            mu_abs_99=head.mu_abs_99,
        ),
    )
