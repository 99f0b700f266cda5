"""tab:pretrained: raw and row-centered output head of seven pretrained models on WikiText-103 validation text.

    zloss reproduce tab:pretrained --profile paper

Expected: the perplexities of a model's two rows agree; the log-normalizer tail of DistilGPT-2, GPT-2 and GPT-2 Medium falls
by 4.9, 12.8 and 12.7, while the gain tail of GPT-2 Large, Pythia-410M and Pythia-1B rises. Cost: 1856 blocks of 256 through
models of 82 M to 1 B parameters, twice (once for the deployed perplexity).
"""

from __future__ import annotations

from zloss_paper.engine.claim import Claim, Finding, all_pairs, cell, for_models
from zloss_paper.engine.paper_table import paper_table
from zloss_paper.engine.profile import Overrides, Profile
from zloss_paper.engine.recipe import Measured, Recipe
from zloss_paper.engine.table import Pair, Table
from zloss_paper.engine.texts import WIKITEXT
from zloss_paper.engine.workbench import Workbench
from zloss_paper.heads.audit_rows import AuditTableConfig, audit_table, paper_target
from zloss_paper.heads.claims import (
    PPL_PRESERVED,
    SHIFT_REMOVED,
    both,
    falls,
    gain_rises,
    not_uniform,
    quoted_factor,
    rises,
)
from zloss_paper.heads.rows import run_head_table

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


def configure(profile: Profile, overrides: Overrides) -> AuditTableConfig:
    """The audits of the table."""
    return audit_table(LABEL, TARGETS, profile, overrides, deployed=True)


def run(config: AuditTableConfig, bench: Workbench) -> Measured:
    """Two rows per model."""
    return run_head_table(config, bench, COLUMNS)


def _shift_dominates(pair: Pair) -> tuple[bool, str]:
    """|μ| beyond the whole centered violation tail: the shift is most of what Z-loss would see."""
    shift, rest = cell(pair.raw, "mu_abs_99"), cell(pair.centered, "p_z_999")
    return shift.high > rest.low, f"{pair.name}: p99 |μ| {shift.value:g}, centered P_Z^99.9 {rest.value:g}"


def _several(table: Table) -> Finding:
    if len(table.pairs()) < SEVERAL:
        return Finding("cannot be tested here", f"at least {SEVERAL} models are needed; measured: {len(table.pairs())}")
    tests = [all_pairs(falls("p_z_999", factor=SHARPLY))(Table((pair.raw, pair.centered))) for pair in table.pairs()]
    shown = [finding.evidence for finding in tests if finding.verdict == "holds"]
    return Finding("holds" if len(shown) >= SEVERAL else "does not hold", "; ".join(shown) or "no model shows it")


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
        for_models(("Pythia-1B",), lambda pair: (not _shift_dominates(pair)[0] and rises("a_p_99")(pair)[0],
                                                 f"{_shift_dominates(pair)[1]}; {rises('a_p_99')(pair)[1]}")),
        "small: p99 |μ| below P_Z^99.9 of the centered head",
    ),
    Claim(
        "gpt2_large_diag_rises",
        "For GPT-2 Large centering raises both Diag Z and the gain tail: its raw shift already put log Z near the target.",
        for_models(("GPT-2 Large",), both(rises("diag_z"), rises("a_p_99"))),
    ),
    gain_rises(
        ("Pythia-410M", "Pythia-1B"), "pythia_gain_rises", "Centering raises the gain tails of Pythia-410M and Pythia-1B."
    ),
)  # fmt: skip

RECIPE = Recipe(
    label=LABEL,
    title="Raw and row-centered output head of pretrained models",
    columns=COLUMNS,
    configure=configure,
    run=run,
    paper=paper_table(LABEL),
    claims=CLAIMS,
    choices=CHOICES,
)
