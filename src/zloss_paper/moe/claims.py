"""Statements of the paper about its mixture-of-experts runs, for top-4 and top-2 alike.

The paper's tables have one line per variant. Ours have one per variant and seed and one for the mean over seeds, and a
statement has to hold on each of these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zloss.report.numbers import number
from zloss_paper.engine.claims import Check, Claim, Tested, cell, judged
from zloss_paper.engine.table import Key, Line, Table

TLM, ARM, ARS = "token-layer mean", "active-route mean", "active-route sum"
MATCHED = (f"{ARM} matched", f"{ARS} matched")
RECOVERY = 1e-6
"""Largest difference of a matched run's loss, and largest relative difference of its metrics, from those of the token-layer
mean that still counts as numerical precision (ours)."""
SIMILAR_CE = 0.02
"""Largest spread of the validation CE over variants, in nat, that counts as similar (ours)."""


SeedTest = Callable[[dict[str, Line], Key], Sequence[Tested]]


def relative_scales(top_k: int) -> Claim:
    """Every variant has the s_rel that its convention gives."""
    scales = {"none": 0.0, TLM: 1.0, ARM: 1 / top_k, ARS: float(top_k), **dict.fromkeys(MATCHED, 1.0)}

    def test(lines: dict[str, Line], seed: Key) -> list[Tested]:
        tested = []
        for name, line in lines.items():
            found = cell(line, "s_rel")
            tested.append((abs(found.value - scales[name]) <= found.half_unit + 1e-12, f"{name}: {found.value:g}"))
        return tested if seed == "mean" else []

    return Claim(
        "relative_scales",
        f"Relative to the token-layer mean the active-route mean has scale 1/{top_k}, the active-route sum {top_k}, and "
        "the matched variants 1.",
        _over_seeds(test),
    )


def matched_recovery() -> Claim:
    """Matched variants train like the token-layer mean."""

    def test(lines: dict[str, Line], seed: Key) -> list[Tested]:
        tested = []
        for name in MATCHED:
            if name not in lines or TLM not in lines:
                continue
            base, line = lines[TLM], lines[name]
            apart = {c: _apart(base, line, c) for c in ("ce", "ppl", "entropy", "load_cv") if c in base.cells}
            ok = bool(apart) and all(difference <= RECOVERY for difference in apart.values())
            sentence = f"{name}, {_seed(seed)}: metrics within {max(apart.values(), default=0):.2g}"
            if "max_loss_difference" in line.cells:
                gap = cell(line, "max_loss_difference").value
                ok, sentence = ok and gap <= RECOVERY, f"{sentence}, max |ΔL| {gap:.2g}"
            tested.append((ok, sentence))
        return tested

    return Claim(
        "matched_recovery",
        "Matched active-route variants recover the token-layer-mean run to numerical precision.",
        _over_seeds(test),
        f"metrics within {RECOVERY:g} relative beyond rounding, and every step's loss within {RECOVERY:g} where it is there",
    )


def entropy_moves(remark: str = "") -> tuple[Claim, Claim]:
    """A smaller scale gives a lower router entropy, a larger one a higher."""
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
    """The variants reach nearly the same validation CE."""

    def test(lines: dict[str, Line], seed: Key) -> list[Tested]:
        values = [cell(line, "ce").value for line in lines.values()]
        spread = max(values) - min(values)
        return [(spread <= SIMILAR_CE, f"{_seed(seed)}: {number(min(values))} … {number(max(values))}")]

    return Claim(
        "similar_ce",
        "Validation CE is similar across the router variants.",
        _over_seeds(test),
        f"within {SIMILAR_CE:g} nat of each other, in every seed and on average{remark}",
    )


def _over_seeds(test: SeedTest) -> Check:
    """Holds when it holds of the lines of every seed by variant; a table without seeds counts as the mean."""

    def tests(table: Table) -> list[Tested]:
        seeds: dict[Key, dict[str, Line]] = {}
        for line in table:
            # Lines of top-2 call the variant a convention.
            variant = str(line.key.get("router_loss", line.key.get("convention", "")))
            seeds.setdefault(line.key.get("seed", "mean"), {})[variant] = line
        return [tested for seed, lines in seeds.items() for tested in test(lines, seed)]

    return judged(tests, none="the variants it is about were not measured")


def _ordered(lower: str, higher: str) -> SeedTest:
    def test(lines: dict[str, Line], seed: Key) -> list[Tested]:
        if lower not in lines or higher not in lines:
            return []
        a, b = cell(lines[lower], "entropy"), cell(lines[higher], "entropy")
        return [(a.value < b.value, f"{_seed(seed)}: {lower} {a.value:.4f}, {higher} {b.value:.4f}")]

    return test


def _apart(base: Line, line: Line, column: str) -> float:
    """Relative distance beyond what rounding of the printed cells explains."""
    a, b = cell(base, column), cell(line, column)
    return max(0.0, abs(a.value - b.value) - a.half_unit - b.half_unit) / abs(a.value)


def _seed(seed: Key) -> str:
    return "mean over seeds" if seed == "mean" else f"seed {seed}"
