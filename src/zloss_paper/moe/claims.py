"""Statements of the paper about its mixture-of-experts runs, for top-4 and top-2 alike.

The paper's tables have one row per variant; ours one per variant and seed and one for their mean, and a statement has to
hold on each of these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zloss.report.text.numbers import number
from zloss_paper.engine.claim import FAILS, HOLDS, OPEN, Claim, Finding, Missing, cell
from zloss_paper.engine.table import Key, Row, Table

TLM, ARM, ARS = "token-layer mean", "active-route mean", "active-route sum"
MATCHED = (f"{ARM} matched", f"{ARS} matched")
RECOVERY = 1e-6
"""Largest difference of a matched run's loss from the token-layer mean's, and relative of its metrics (ours)."""
SIMILAR_CE = 0.02
"""Spread of the validation CE over variants that still is similar, in nat (ours)."""


def name_of(row: Row) -> str:
    """The variant; top-2 rows call it a convention."""
    return str(row.key.get("router_loss", row.key.get("convention", "")))


def by_seed(table: Table) -> dict[Key, dict[str, Row]]:
    """seed → variant → row; a table without seeds is one of its own."""
    found: dict[Key, dict[str, Row]] = {}
    for row in table:
        found.setdefault(row.key.get("seed", "mean"), {})[name_of(row)] = row
    return found


def relative_scales(top_k: int) -> Claim:
    """s_rel of every variant."""
    scales = {"none": 0.0, TLM: 1.0, ARM: 1 / top_k, ARS: float(top_k), **dict.fromkeys(MATCHED, 1.0)}

    def test(rows: dict[str, Row], seed: Key) -> list[tuple[bool, str]]:
        outcomes = []
        for name, row in rows.items():
            found = cell(row, "s_rel")
            outcomes.append((abs(found.value - scales[name]) <= found.half_unit + 1e-12, f"{name}: {found.value:g}"))
        return outcomes if seed == "mean" else []

    return Claim(
        "relative_scales",
        f"Relative to the token-layer mean the active-route mean has scale 1/{top_k}, the active-route sum {top_k}, and "
        "the matched variants 1.",
        _over_seeds(test),
    )


def matched_recovery() -> Claim:
    """Matched variants train like the token-layer mean."""

    def test(rows: dict[str, Row], seed: Key) -> list[tuple[bool, str]]:
        outcomes = []
        for name in MATCHED:
            if name not in rows or TLM not in rows:
                continue
            base, row = rows[TLM], rows[name]
            apart = {c: _apart(base, row, c) for c in ("ce", "ppl", "entropy", "load_cv") if c in base.cells}
            ok = bool(apart) and all(difference <= RECOVERY for difference in apart.values())
            sentence = f"{name}, {_seed(seed)}: metrics within {max(apart.values(), default=0):.2g}"
            if "max_loss_difference" in row.cells:
                gap = cell(row, "max_loss_difference").value
                ok, sentence = ok and gap <= RECOVERY, f"{sentence}, max |ΔL| {gap:.2g}"
            outcomes.append((ok, sentence))
        return outcomes

    return Claim(
        "matched_recovery",
        "Matched active-route variants recover the token-layer-mean run to numerical precision.",
        _over_seeds(test),
        f"metrics within {RECOVERY:g} relative beyond rounding, and every step's loss within {RECOVERY:g} where it is there",
    )


def entropy_moves(remark: str = "") -> tuple[Claim, Claim]:
    """The unmatched variants move the entropy the way of their scale."""
    reading = f"in every seed and on average{remark}"
    return (
        Claim(
            "mean_lowers_entropy",
            "Unmatched active-route mean, a smaller scale, has lower router entropy than the token-layer mean.",
            _over_seeds(_ordered(ARM, TLM)),
            reading,
        ),
        Claim(
            "sum_raises_entropy",
            "Unmatched active-route sum, a larger scale, has higher router entropy than the token-layer mean.",
            _over_seeds(_ordered(TLM, ARS)),
            reading,
        ),
    )


def similar_ce(remark: str = "") -> Claim:
    """Quality does not tell the variants apart."""

    def test(rows: dict[str, Row], seed: Key) -> list[tuple[bool, str]]:
        values = [cell(row, "ce").value for row in rows.values()]
        spread = max(values) - min(values)
        return [(spread <= SIMILAR_CE, f"{_seed(seed)}: {number(min(values))} … {number(max(values))}")]

    return Claim(
        "similar_ce",
        "Validation CE is similar across the router variants.",
        _over_seeds(test),
        f"within {SIMILAR_CE:g} nat of each other, in every seed and on average{remark}",
    )


SeedTest = Callable[[dict[str, Row], Key], Sequence[tuple[bool, str]]]


def _over_seeds(test: SeedTest) -> Callable[[Table], Finding]:
    def check(table: Table) -> Finding:
        try:
            outcomes = [outcome for seed, rows in by_seed(table).items() for outcome in test(rows, seed)]
        except Missing as missing:
            return Finding(OPEN, str(missing))
        if not outcomes:
            return Finding(OPEN, "the variants it is about were not measured")
        failed = [sentence for ok, sentence in outcomes if not ok]
        return Finding(FAILS if failed else HOLDS, "; ".join(failed or [sentence for _, sentence in outcomes]))

    return check


def _ordered(lower: str, higher: str) -> SeedTest:
    def test(rows: dict[str, Row], seed: Key) -> list[tuple[bool, str]]:
        if lower not in rows or higher not in rows:
            return []
        a, b = cell(rows[lower], "entropy"), cell(rows[higher], "entropy")
        return [(a.value < b.value, f"{_seed(seed)}: {lower} {a.value:.4f}, {higher} {b.value:.4f}")]

    return test


def _apart(base: Row, row: Row, column: str) -> float:
    """Relative distance beyond what rounding of the printed cells explains."""
    a, b = cell(base, column), cell(row, column)
    return max(0.0, abs(a.value - b.value) - a.half_unit - b.half_unit) / abs(a.value)


def _seed(seed: Key) -> str:
    return "mean over seeds" if seed == "mean" else f"seed {seed}"
