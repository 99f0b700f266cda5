"""text:paired_differences: differences from CE that the text quotes, paired by seed, from the runs of the training tables.

    zloss reproduce text:paired_differences --profile paper

Expected: PPL differences of 1e-4 … 0.6 (9.2 for Standard on Pythia-160M) beside A_p^99 differences of −10.8 … −12.9 for the
centered methods and −0.05 for Standard. It needs no runs beyond those of the tables it reads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from zloss.report.text.numbers import number
from zloss_paper.engine.checks import Tested, judged
from zloss_paper.engine.claim import Claim
from zloss_paper.engine.comparison import Missing, cell, near
from zloss_paper.engine.paper_methods import CENTERED, CENTERED_HEAD, STANDARD
from zloss_paper.engine.paper_table import paper_table
from zloss_paper.engine.profile import Overrides, Profile
from zloss_paper.engine.recipe import Recipe, RecipeResult
from zloss_paper.engine.table import Key, Line, Table, cells_of
from zloss_paper.engine.texts import TextSource
from zloss_paper.engine.workbench import Workbench
from zloss_paper.training.arms import BASELINE, Arm
from zloss_paper.training.matched_runs import matched_runs
from zloss_paper.training.recipes import (
    fineweb_ft,
    fineweb_medium_ft,
    fineweb_update_outlier,
    medium_long,
    pythia_ft,
)
from zloss_paper.training.seed_means import column_values
from zloss_paper.training.setting import TrainingTableConfig
from zloss_paper.training.table import TrainingTable

LABEL = "text:paired_differences"
COLUMNS = ("delta_ppl", "delta_a_p_99")
PAPER = paper_table(LABEL)
FRESH = "GPT-2 Medium FineWeb-Edu fresh-token (tab:fineweb_medium_ft)"
LINES: dict[str, tuple[TrainingTable, float]] = {
    "GPT-2 FineWeb-Edu (tab:fineweb_ft)": (fineweb_ft.TABLE, 1e-4),
    FRESH: (fineweb_medium_ft.TABLE, 1e-4),
    "GPT-2 Medium WikiText-103 fixed subset (tab:medium_long)": (medium_long.TABLE, 1e-4),
    "Pythia-160M WikiText-103 (tab:pythia_ft)": (pythia_ft.TABLE, 1e-4),
    "GPT-2 Medium FineWeb-Edu update-outlier, 3e-3 (tab:fineweb_update_outlier_sweep)": (
        fineweb_update_outlier.TABLE,
        fineweb_update_outlier.COEF,
    ),
}
"""The paper's names of the runs: which table's setting, and the coefficient."""
NEGLIGIBLE = 0.05
"""Share of the centered methods' gain difference below which Standard's is negligible."""


@dataclass(frozen=True)
class PairedConfig:
    """The setting of every run that is read."""

    lines: tuple[tuple[str, TrainingTableConfig], ...]

    @property
    def texts(self) -> tuple[TextSource, ...]:
        return tuple(dict.fromkeys(text for _, config in self.lines for text in config.texts))


def configure(profile: Profile, overrides: Overrides) -> PairedConfig:
    """The tables' own settings."""
    return PairedConfig(tuple((run, table.configure(profile, overrides)) for run, (table, _) in LINES.items()))


def run(config: PairedConfig, bench: Workbench) -> RecipeResult:
    """One line per quoted pair."""
    found = []
    for name, setting in config.lines:
        for printed in PAPER.table.find(run=name):
            method = str(printed.key["method"])
            arm = Arm(method, 0.0 if method == CENTERED_HEAD else LINES[name][1])
            found.append(_difference(name, arm, setting, bench))
    return RecipeResult(Table(tuple(found)), texts=config.texts)


def _difference(name: str, arm: Arm, setting: TrainingTableConfig, bench: Workbench) -> Line:
    runs = matched_runs(replace(setting, arms=(arm,)), bench)
    values, reasons = column_values(COLUMNS, runs[arm], runs[BASELINE])
    key: dict[str, Key] = {"run": name, "method": arm.method}
    return Line(key, cells_of(values), reasons, setting.deviations)


def _line(table: Table, run: str, method: str) -> Line:
    found = table.find(run=run, method=method)
    if not found:
        raise Missing(f"{method} of {run} was not measured")
    return found[0]


def _different_targets(table: Table) -> list[Tested]:
    standard = cell(_line(table, FRESH, STANDARD), "delta_a_p_99")
    tested = []
    for method in (CENTERED_HEAD, CENTERED):
        centered = cell(_line(table, FRESH, method), "delta_a_p_99")
        ok = centered.low < 0 and abs(standard.value) <= NEGLIGIBLE * abs(centered.value)
        tested.append((ok, f"{method} {number(centered.value)}, {STANDARD} {number(standard.value)}"))
    return tested


def _as_quoted(table: Table) -> list[Tested]:
    if len(table) == 0:
        raise Missing("nothing was measured")
    if any(line.deviations for line in table):
        raise Missing("numbers of the paper's own setting, from which these runs deviate")
    tested = []
    for line in table:
        (printed,) = PAPER.table.find(**dict(line.key))
        for column, quoted in printed.cells.items():
            ours = cell(line, column)
            tested.append((near(ours, quoted), f"{line.name()}: {column} {number(ours.value)}"))
    return tested


CLAIMS = (
    Claim(
        "different_failure_modes",
        "Centered head and Centered Z-loss lower A_p^99, and Standard Z-loss hardly changes it: they target different failures.",
        judged(_different_targets),
        f"hardly: at most {NEGLIGIBLE:.0%} of what the centered methods change",
    ),
    Claim("quoted", "The paired differences that the text quotes.", judged(_as_quoted), "met within 5 % and rounding"),
)

RECIPE = Recipe(
    label=LABEL,
    title="Differences from CE that the text quotes, paired by seed",
    columns=COLUMNS,
    configure=configure,
    run=run,
    paper=PAPER,
    claims=CLAIMS,
    choices={"seed_values": "those of the tables the runs belong to"},
)
