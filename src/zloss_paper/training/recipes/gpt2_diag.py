"""tab:gpt2_diag: GPT-2 on WikiText-103 for 1200 steps, with gradients taken at the tied table after training.

    zloss reproduce tab:gpt2_diag --profile paper

Expected: auxiliary gradients of 0.4 … 0.5 % of the CE gradient at the tied table, cosines of −0.06. Cost: nine runs of 9.8 M
tokens. Its cpu runs keep the head tied and unshifted, because the table is about tied gradients. The paper decomposes the
auxiliary gradient of these runs into output and input path and prints neither: both stand here.
"""

from __future__ import annotations

from zloss.report.text.numbers import number
from zloss_paper.engine.checks import Tested, judged
from zloss_paper.engine.claim import Claim
from zloss_paper.engine.comparison import cell
from zloss_paper.engine.paper_methods import CENTERED, STANDARD
from zloss_paper.engine.table import Line, Table
from zloss_paper.engine.texts import WIKITEXT
from zloss_paper.training.against_ce import COUNTS, against_ce, line_of, lower
from zloss_paper.training.arms import BASELINE, Arm
from zloss_paper.training.claims import STANDARD_KEEPS_GAIN, STANDARD_TAIL
from zloss_paper.training.paper_run import paper_run
from zloss_paper.training.recipe import AS_IN_THE_MAIN_RUN, training_recipe
from zloss_paper.training.small_training import TIED
from zloss_paper.training.table import TrainingTable

COEF = 1e-4
PATHS = ("output_path_norm", "input_path_norm", "input_output_cosine")
"""The auxiliary gradient of the tied table through the output head, through the input embedding, and their cosine."""
COUPLED = 0.05
"""Smaller path over larger path from which both paths count; that of text:tied_paths."""
BUDGET = 0.01
"""R_aux below which the auxiliary gradient is a small part of CE's."""
TABLE = TrainingTable(
    label="tab:gpt2_diag",
    model="GPT-2",
    corpus=WIKITEXT,
    columns=("ppl", "p_z_999", "a_p_99", "grad_norm_p99", "r_aux", "c_aux", *PATHS),
    arms=(BASELINE, Arm(STANDARD, COEF), Arm(CENTERED, COEF)),
    paper=paper_run("GPT-2", WIKITEXT, steps=1200, warmup=60, micro_batch=16, accumulate=2, valid_blocks=256),
    seeds=(4, 5, 6),
    small=TIED,
)


def _penalized(table: Table) -> list[Line]:
    return [line_of(table, method) for method in (STANDARD, CENTERED)]


def _not_zero(table: Table) -> list[Tested]:
    found = [(line, cell(line, "r_aux")) for line in _penalized(table)]
    return [
        (share.high > 0 and share.low <= BUDGET, f"{line.name()}: R_aux {number(share.value)}") for line, share in found
    ]


def _negative(table: Table) -> list[Tested]:
    found = [(line, cell(line, "c_aux")) for line in _penalized(table)]
    return [(cosine.low < 0, f"{line.name()}: C_aux {number(cosine.value)}") for line, cosine in found]


def _two_paths(table: Table) -> list[Tested]:
    tested = []
    for line in _penalized(table):
        out, into, cosine = (cell(line, name).value for name in PATHS)
        shown = f"output path {number(out)}, input path {number(into)}, cosine {number(cosine)}"
        largest = max(out, into)
        tested.append((largest > 0 and min(out, into) >= COUPLED * largest, f"{line.name()}: {shown}"))
    return tested


CLAIMS = (
    Claim(
        "auxiliary_gradient_is_small_but_there",
        "The auxiliary gradient at the tied table is not zero, and a fraction of a percent of the CE gradient.",
        judged(_not_zero),
        f"a fraction of a percent: at most {BUDGET:.0%}",
    ),
    Claim(
        "cosine_slightly_negative",
        "The cosine of the auxiliary gradient to the CE gradient is slightly negative.",
        judged(_negative),
    ),
    Claim(
        "two_paths",
        "The auxiliary gradient of the tied table splits into an output path and an input path.",
        judged(_two_paths),
        f"both count: the smaller norm is at least {COUPLED:.0%} of the larger",
    ),
    STANDARD_TAIL,
    STANDARD_KEEPS_GAIN,
    Claim(
        "centered_lowers_both",
        "Centered Z-loss lowers both the log-normalizer tail and the gain tail.",
        against_ce((CENTERED,), lower("p_z_999"), lower("a_p_99")),
        COUNTS,
    ),
)
RECIPE = training_recipe(
    TABLE,
    CLAIMS,
    choices={**AS_IN_THE_MAIN_RUN, "diagnostic gradient batch size": "the first 8 validation blocks"},
)
