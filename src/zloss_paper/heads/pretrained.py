"""tab:pretrained: raw and row-centered output head of seven pretrained models on WikiText-103 validation text.

    zloss reproduce tab:pretrained --profile paper

Expected: the perplexities of a model's two lines agree; the log-normalizer tail of DistilGPT-2, GPT-2 and GPT-2 Medium falls
by 4.9, 12.8 and 12.7, while the gain tail of GPT-2 Large, Pythia-410M and Pythia-1B rises. Cost: 1856 blocks of 256 through
models of 82 M to 1 B parameters, twice (once for the deployed perplexity).
"""

from __future__ import annotations

from zloss_paper.engine.audited_models import paper_target
from zloss_paper.engine.checks import Tested, all_pairs, for_models
from zloss_paper.engine.claim import FAILS, HOLDS, OPEN, Claim, Judgement
from zloss_paper.engine.comparison import cell
from zloss_paper.engine.table import Pair, Table
from zloss_paper.engine.texts import WIKITEXT
from zloss_paper.heads.claims import PPL_PRESERVED, SHIFT_REMOVED, gain_rises, not_uniform, quoted_factor
from zloss_paper.heads.pair_tests import both, falls, rises
from zloss_paper.heads.recipe import head_recipe

LABEL = "tab:pretrained"
COLUMNS = ("ppl", "diag_z", "p_z_999", "a_p_99", "mu_abs_99")
BLOCKS = {
    "DistilGPT-2": 512,
    "GPT-2": 512,
    "GPT-2 Medium": 256,
    "GPT-2 Large": 128,
    "Pythia-160M": 256,
    "Pythia-410M": 128,
    "Pythia-1B": 64,
}
TARGETS = tuple(paper_target(model, WIKITEXT, blocks) for model, blocks in BLOCKS.items())
CHOICES = {
    "model_ids": "the checkpoints of these names on the hub: distilgpt2, gpt2, gpt2-medium, gpt2-large",
    "corpus_variant": "the raw variant, wikitext-103-raw-v1",
    "eval_batch_size": "4 blocks; the numbers do not depend on it",
    "block_selection": "the first blocks of the split, read as one token stream",
    "precision": "fp32 throughout, head included",
    "vocab_size": "every row of the head, padding rows included, so c = log 50304 for the three Pythia models",
    "gain_epsilon": "none: ‖p‖₂ ≥ V^(−1/2) > 0",
    "seed_values": "0; nothing here is random",
}

LARGE_SHIFT = ("DistilGPT-2", "GPT-2", "GPT-2 Medium")
SEVERAL, SHARPLY = 3, 2.0


def _shift_dominates(pair: Pair) -> Tested:
    """p99 |μ| is larger than P_Z^99.9 of the centered head: most of the raw violation is the common shift."""
    shift, rest = cell(pair.raw, "mu_abs_99"), cell(pair.centered, "p_z_999")
    return shift.high > rest.low, f"{pair.name}: p99 |μ| {shift.value:g}, centered P_Z^99.9 {rest.value:g}"


def _small_shift_and_rising_gain(pair: Pair) -> Tested:
    dominates, shift = _shift_dominates(pair)
    gain_rises, gain = rises("a_p_99")(pair)
    return not dominates and gain_rises, f"{shift}; {gain}"


def _several(table: Table) -> Judgement:
    if len(table.pairs()) < SEVERAL:
        return Judgement(OPEN, f"at least {SEVERAL} models are needed; measured: {len(table.pairs())}")
    tests = [all_pairs(falls("p_z_999", factor=SHARPLY))(Table((pair.raw, pair.centered))) for pair in table.pairs()]
    shown = [judgement.evidence for judgement in tests if judgement.verdict == HOLDS]
    return Judgement(HOLDS if len(shown) >= SEVERAL else FAILS, "; ".join(shown) or "no model shows it")


CLAIMS = (
    PPL_PRESERVED,
    SHIFT_REMOVED,
    Claim(
        "tail_falls_for_several",
        "Centering sharply lowers the log-normalizer tail of several models.",
        _several,
        f"several: at least {SEVERAL}; sharply: by a factor of {SHARPLY:g} or more",
    ),
    Claim(
        "large_shift_gpt2_family",
        "The raw heads of DistilGPT-2, GPT-2 and GPT-2 Medium have very large common-shift tails.",
        for_models(LARGE_SHIFT, _shift_dominates),
        "very large: p99 |μ| beyond P_Z^99.9 of the centered head; GPT-2 Large, whose tail is small, is not meant",
    ),
    quoted_factor("DistilGPT-2", "p_z_999", 4.9),
    quoted_factor("GPT-2", "p_z_999", 12.8),
    quoted_factor("GPT-2 Medium", "p_z_999", 12.7),
    not_uniform(("GPT-2 Large", "Pythia-410M", "Pythia-1B")),
    Claim(
        "pythia_1b_contrast",
        "The raw common-shift tail of Pythia-1B is already small, and centering raises its gain tail.",
        for_models(("Pythia-1B",), _small_shift_and_rising_gain),
        "small: p99 |μ| below P_Z^99.9 of the centered head",
    ),
    Claim(
        "gpt2_large_diag_rises",
        "For GPT-2 Large centering raises both Diag Z and the gain tail: its raw shift already put log Z near the target.",
        for_models(("GPT-2 Large",), both(rises("diag_z"), rises("a_p_99"))),
    ),
    gain_rises(
        ("Pythia-410M", "Pythia-1B"),
        "pythia_gain_rises",
        "Centering raises the gain tails of Pythia-410M and Pythia-1B.",
    ),
)

RECIPE = head_recipe(
    LABEL,
    "Raw and row-centered output head of pretrained models",
    columns=COLUMNS,
    targets=TARGETS,
    claims=CLAIMS,
    choices=CHOICES,
    deployed=True,
)
