"""Claims that several training tables share."""

from __future__ import annotations

from collections.abc import Sequence

from zloss.report.text.numbers import number
from zloss_paper.engine.checks import Tested, judged, together
from zloss_paper.engine.claim import Claim
from zloss_paper.engine.comparison import cell
from zloss_paper.engine.paper_methods import CENTERED, CENTERED_HEAD, STANDARD
from zloss_paper.engine.table import Table
from zloss_paper.training.against_ce import (
    COUNTS,
    NEAR_CE,
    PZ,
    SAME_PPL,
    SMALL_PPL,
    against_ce,
    all_smallest,
    falls,
    line_of,
    lower,
    near_ce,
)


def _below_centered_head(table: Table) -> list[Tested]:
    head, own = (cell(line_of(table, method), "p_z_999") for method in (CENTERED_HEAD, CENTERED))
    return [
        (falls(head, own, "p_z_999"), f"{CENTERED}: {PZ} {number(own.value)}, {CENTERED_HEAD} {number(head.value)}")
    ]


STANDARD_TAIL = Claim(
    "standard_lowers_tail",
    "Standard Z-loss lowers the log-normalizer tail of CE.",
    against_ce((STANDARD,), lower("p_z_999")),
    COUNTS,
)
STANDARD_KEEPS_GAIN = Claim(
    "standard_keeps_gain",
    "Standard Z-loss leaves the gain tail at the CE level.",
    against_ce((STANDARD,), near_ce("a_p_99")),
    f"at the level: within {NEAR_CE:.0%}",
)
HEAD_LOWERS_BOTH = Claim(
    "centered_head_lowers_both",
    "Deploying the centered head lowers the log-normalizer tail and the gain tail without any auxiliary loss.",
    against_ce((CENTERED_HEAD,), lower("p_z_999"), lower("a_p_99")),
    COUNTS,
)
HEAD_KEEPS_PPL = Claim(
    "centered_head_keeps_ppl",
    "Centered head deployment preserves the PPL of CE.",
    against_ce((CENTERED_HEAD,), near_ce("ppl", SAME_PPL)),
    f"preserved: within {SAME_PPL:.1%}",
)
CENTERED_JOINT = Claim(
    "centered_joint",
    "Centered Z-loss gives the strongest joint reduction: no method has a smaller gain tail, and its log-normalizer tail is "
    "below those of CE and the centered head.",
    together(all_smallest("a_p_99", CENTERED), against_ce((CENTERED,), lower("p_z_999")), judged(_below_centered_head)),
    COUNTS,
)


def small_ppl_differences(methods: Sequence[str], tolerance: float = SMALL_PPL) -> Claim:
    """The PPL of these methods is within `tolerance` of that of CE."""
    return Claim(
        "small_ppl_differences",
        f"The PPL of {' and of '.join(methods)} differs little from that of CE.",
        against_ce(methods, near_ce("ppl", tolerance)),
        f"little: within {tolerance:.1%}",
    )
