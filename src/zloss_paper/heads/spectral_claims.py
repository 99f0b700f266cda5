"""What the paper says about the leading singular directions of the output head (tab:spectral_audit)."""

from __future__ import annotations

from zloss.report.text.numbers import number
from zloss_paper.engine.checks import Tested, all_lines, all_pairs, for_models, some_pair
from zloss_paper.engine.claim import OPEN, Claim, Judgement
from zloss_paper.engine.comparison import QUOTED_TOLERANCE, cell, smaller
from zloss_paper.engine.table import Cell, Line, Table
from zloss_paper.engine.texts import FINEWEB, WIKITEXT
from zloss_paper.heads.pair_tests import both, falls, goes_from_to, in_range, quoted, rises

ANISOTROPIC = ("GPT-2", "GPT-2 Medium")
ANISOTROPY, MUCH = 1 / 3, 0.5
UNFAVOURABLE = ("GPT-2 Large", "Pythia-410M", "Pythia-1B")


def _anisotropic_heads(table: Table) -> Judgement:
    lines = tuple(line for line in table if "e_16" in line.cells and line.cells["e_16"].high >= ANISOTROPY)
    if not lines:
        return Judgement(OPEN, "no head as anisotropic was measured")
    return all_lines(_much)(Table(lines))


def _much(line: Line) -> Tested:
    gain, energy = cell(line, "f_16"), cell(line, "e_16")
    return gain.high >= MUCH, f"{line.name()}: E_16 {number(energy.value)}, F_16 {number(gain.value)}"


def _concentrated(line: Line) -> Tested:
    gain, energy = cell(line, "f_16"), cell(line, "e_16")
    return smaller(energy, gain), f"{line.name()}: E_16 {number(energy.value)}, F_16 {number(gain.value)}"


CLAIMS = (
    Claim(
        "anisotropic_heads",
        "In highly anisotropic heads the dominant singular directions explain much of the token-level gain.",
        _anisotropic_heads,
        "highly anisotropic: 16 directions hold a third of the energy or more; much: half of a² or more",
    ),
    Claim(
        "pattern_gain_share",
        "In every line the leading directions hold a larger share of the token-level gain than of the energy.",
        all_lines(_concentrated),
        "a pattern of the table, which the paper does not state: F_16 > E_16",
    ),
    Claim("sigma_1_falls", "Centering lowers the spectral norm of every head.", all_pairs(falls("sigma_1"))),
    Claim(
        "sigma_1_is_no_guarantee",
        "A smaller spectral norm does not guarantee a smaller gain tail: centering can lower σ_1 and raise A_p^99.",
        some_pair(both(falls("sigma_1"), rises("a_p_99")), shown_by=UNFAVOURABLE),
    ),
    Claim(
        "sigma_1_is_no_guarantee_named",
        "It does so for GPT-2 Large and Pythia-410M (FineWeb-Edu) and for Pythia-1B (WikiText-103).",
        for_models(UNFAVOURABLE, both(falls("sigma_1"), rises("a_p_99"))),
    ),
    Claim(
        "energy_gpt2",
        "The top 16 directions hold 33 to 36 % of the raw energy of GPT-2 and GPT-2 Medium.",
        for_models(ANISOTROPIC, in_range("e_16", 0.325, 0.365), exact=True),
        "the bounds are given their rounding",
    ),
    Claim(
        "gain_share_gpt2",
        "They explain 62 to 64 % of a² on average.",
        for_models(ANISOTROPIC, in_range("f_16", 0.615, 0.645), exact=True),
        "the bounds are given their rounding",
    ),
    Claim(
        "correlation_gpt2",
        "The correlation of the rank-16 part with a² is at least 0.997 for GPT-2 and GPT-2 Medium.",
        for_models(ANISOTROPIC, in_range("rho_16", 0.9965, 1.0), exact=True),
        "the bound is given its rounding",
    ),
    Claim(
        "sigma_1_medium",
        "Centering takes σ_1 of GPT-2 Medium from 462.9 to 87.9.",
        for_models(("GPT-2 Medium",), goes_from_to("sigma_1", Cell(462.9, 0.05), Cell(87.9, 0.05))),
        f"within {QUOTED_TOLERANCE:.0%}; the spectrum does not depend on the text",
    ),
    Claim(
        "gain_medium_wikitext",
        "Centering takes A_p^99 of GPT-2 Medium from 30.5 to 14.5 on WikiText-103.",
        for_models(
            ("GPT-2 Medium",), goes_from_to("a_p_99", Cell(30.5, 0.05), Cell(14.5, 0.05)), exact=True, corpus=WIKITEXT
        ),
        f"within {QUOTED_TOLERANCE:.0%}",
    ),
    Claim(
        "gain_medium_fineweb",
        "Centering takes A_p^99 of GPT-2 Medium from 28.0 to 13.1 on FineWeb-Edu.",
        for_models(
            ("GPT-2 Medium",), goes_from_to("a_p_99", Cell(28.0, 0.05), Cell(13.1, 0.05)), exact=True, corpus=FINEWEB
        ),
        f"within {QUOTED_TOLERANCE:.0%}",
    ),
    Claim(
        "top_1_pythia_160m",
        "The first raw direction of Pythia-160M alone holds 91.5 % of the energy.",
        for_models(("Pythia-160M",), quoted("e_1", 0.915, 0.0005)),
        f"within {QUOTED_TOLERANCE:.0%}; the spectrum does not depend on the text",
    ),
    Claim(
        "gain_share_pythia_160m",
        "The top 16 directions of Pythia-160M explain 97.8 % of a².",
        for_models(("Pythia-160M",), quoted("f_16", 0.978, 0.0005), exact=True),
        f"within {QUOTED_TOLERANCE:.0%}",
    ),
    Claim(
        "centering_pythia_160m",
        "Centering takes σ_1 of Pythia-160M from 776.4 to 106.1 and A_p^99 from 61.0 to 6.39.",
        for_models(
            ("Pythia-160M",),
            both(
                goes_from_to("sigma_1", Cell(776.4, 0.05), Cell(106.1, 0.05)),
                goes_from_to("a_p_99", Cell(61.0, 0.05), Cell(6.39, 0.005)),
            ),
            exact=True,
        ),
        f"within {QUOTED_TOLERANCE:.0%}",
    ),
)
