"""tab:fineweb_pretrained: the raw/centered comparison of four models repeated on FineWeb-Edu blocks.

    zloss reproduce tab:fineweb_pretrained --profile paper

Expected: GPT-2 and GPT-2 Medium as on WikiText-103; centering raises the gain tail of GPT-2 Large and Pythia-410M, and the
log-normalizer tail of GPT-2 Large. Cost: 384 blocks of 256, twice.
"""

from __future__ import annotations

from zloss_paper.engine.audited_models import paper_target
from zloss_paper.engine.checks import for_models
from zloss_paper.engine.claim import Claim
from zloss_paper.engine.texts import FINEWEB
from zloss_paper.heads.claims import PPL_PRESERVED, SHIFT_REMOVED, gain_rises, not_uniform
from zloss_paper.heads.pair_tests import both, falls, rises
from zloss_paper.heads.pretrained import CHOICES as WIKITEXT_CHOICES
from zloss_paper.heads.recipe import head_recipe

LABEL = "tab:fineweb_pretrained"
COLUMNS = ("ppl", "diag_z", "p_z_999", "a_p_99", "mu_abs_99")
"""The last one is ours: the paper speaks of the shift without printing it."""
BLOCKS = {"GPT-2": 128, "GPT-2 Medium": 128, "GPT-2 Large": 64, "Pythia-410M": 64}
TARGETS = tuple(paper_target(model, FINEWEB, blocks) for model, blocks in BLOCKS.items())
CHOICES = {
    **WIKITEXT_CHOICES,
    "block_selection": "the first blocks of the streamed sample, read as one token stream",
    "sequence_offset": "0",
}
LARGE = 5.0


CLAIMS = (
    PPL_PRESERVED,
    SHIFT_REMOVED,
    Claim(
        "large_shift_repeats",
        "GPT-2 and GPT-2 Medium repeat the large common-shift pattern: log-normalizer and gain tails fall.",
        for_models(("GPT-2", "GPT-2 Medium"), both(falls("p_z_999", factor=LARGE), falls("a_p_99"))),
        f"the log-normalizer tail falls by a factor of {LARGE:g} or more",
    ),
    not_uniform(("GPT-2 Large", "Pythia-410M")),
    gain_rises(
        ("GPT-2 Large", "Pythia-410M"),
        "geometry_dependent_gain",
        "Centering raises the gain tails of GPT-2 Large and Pythia-410M.",
    ),
    Claim(
        "gpt2_large_tail_rises",
        "For GPT-2 Large centering also raises the log-normalizer tail.",
        for_models(("GPT-2 Large",), rises("p_z_999")),
    ),
)

RECIPE = head_recipe(
    LABEL,
    "Raw and row-centered output head of pretrained models, FineWeb-Edu",
    columns=COLUMNS,
    targets=TARGETS,
    claims=CLAIMS,
    choices=CHOICES,
    deployed=True,
)
