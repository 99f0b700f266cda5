"""Recipes that read audits of output heads, with a raw and a centered row per model, and the claims about these pairs.

The perplexity of the centered head is measured as the paper deploys it, with one fp32 scalar subtracted from the raw logits
of a token: the audit derives log Z̃ from the statistics of the raw logits, so its two perplexities are equal by construction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F

from zloss.console import Progress
from zloss.head.source import centered_logits_from_raw
from zloss.models.checkpoint import Checkpoint
from zloss.models.output_head import find_head, hidden_states
from zloss.report.numbers import number
from zloss.results.audit import AuditReport
from zloss.text import Blocks
from zloss_paper.engine.audited_models import AuditedModel, AuditTableConfig, Target, audit_table
from zloss_paper.engine.claims import (
    QUOTED_TOLERANCE,
    SYMBOLS,
    Claim,
    Compare,
    Tested,
    all_pairs,
    cell,
    change,
    near,
    of_models,
    ratio,
    rises,
    some_pair,
)
from zloss_paper.engine.recipe import Recipe, RecipeResult
from zloss_paper.engine.table import Cell, Key, Line, PaperTable, Table, cells_of, paper_table
from zloss_paper.engine.workbench import Workbench, text_blocks

DEPLOYED = "deployed_ppl"
"""Key of the deployed perplexities among the extras of a kept report."""


def head_recipe(
    label: str,
    title: str,
    *,
    columns: tuple[str, ...],
    targets: Sequence[Target],
    claims: tuple[Claim, ...],
    paper: PaperTable | None = None,
    deployed: bool = False,
    with_corpus: bool = False,
    run: Callable[[AuditTableConfig, Workbench], RecipeResult] | None = None,
) -> Recipe[AuditTableConfig]:
    """The recipe of `label`: a raw and a centered line per target, unless it has a separate `run`.

    `deployed` measures the perplexity of the centered logits as deployed; `with_corpus` puts the corpus into the key.
    """

    configure = partial(audit_table, label, targets, deployed=deployed)
    run = run or partial(run_head_table, columns=columns, with_corpus=with_corpus)
    return Recipe(label, title, columns, configure, run, paper or paper_table(label), claims)


def run_head_table(
    config: AuditTableConfig, bench: Workbench, *, columns: Sequence[str], with_corpus: bool
) -> RecipeResult:
    """Audit every model of the table: two lines each."""
    lines: list[Line] = []
    audits = []
    for model in config.rows:

        def perplexities(model: AuditedModel = model) -> dict[str, object]:
            checkpoint = bench.checkpoint(model.audit)
            return deployed_perplexity(checkpoint, text_blocks(model.audit, checkpoint), bench.progress)

        report = bench.audit(model.audit, {DEPLOYED: perplexities} if config.deployed else None)
        lines += head_lines(model, report, columns, with_corpus=with_corpus)
        audits.append(audit_summary(model, report))
    return RecipeResult(Table(tuple(lines)), texts=config.texts, details={"audits": audits})


def head_lines(
    model: AuditedModel, report: AuditReport, columns: Sequence[str], *, with_corpus: bool = False
) -> list[Line]:
    """The raw and the centered line of one audit; the perplexity of the centered one is that of its logits as deployed."""
    lines = []
    for head in ("raw", "centered"):
        key: dict[str, Key] = {"model": model.model, "head": head}
        beside: dict[str, Key] = {"model": model.beside, "head": head}
        if with_corpus:
            key = {"model": model.model, "corpus": model.corpus, "head": head}
            beside["corpus"] = model.beside_corpus
        values = {column: getattr(getattr(report.heads, head), column, None) for column in columns}
        reasons = {column: report.reason(f"heads.{head}.{column}") for column in columns}
        if "ppl" in columns and head == "raw":
            values["ppl"], reasons["ppl"] = report.ppl, report.reason("ppl")
        elif "ppl" in columns:
            deployed = report.extra.get(DEPLOYED) or {}
            values["ppl"], reasons["ppl"] = deployed.get("centered"), deployed.get("reason")
        missing = {column: reasons[column] or "not measured" for column in columns if values[column] is None}
        lines.append(Line(key, cells_of(values), missing, model.deviations, beside))
    return lines


def audit_summary(model: AuditedModel, report: AuditReport) -> dict[str, object]:
    """Weights, text and time of one audit, for the JSON file."""
    return {
        "model": model.model,
        "weights": report.model.extra.get("source"),
        "vocab": report.model.vocab,
        "width": report.model.width,
        "tied": report.model.tied,
        "target": report.target,
        "predictions": report.corpus.predictions,
        "bos": report.corpus.bos,
        "nonfinite": {"nan": report.nonfinite.nan, "inf": report.nonfinite.inf},
        "seconds": {step: round(value, 1) for step, value in report.timings.items()},
    }


@torch.no_grad()
def deployed_perplexity(checkpoint: Checkpoint, blocks: Blocks, progress: Progress) -> dict[str, object]:
    """exp of the mean cross-entropy over all predictions, `raw` and `centered`, of logits that are both formed.

    None with a `reason` where the centered head does not exist.
    """
    head = find_head(checkpoint)
    if head.softcap is not None or (head.bias_V is not None and bool(head.bias_V.isneginf().any())):
        reason = "softcap or a -inf bias: the centered head does not exist"
        return {"raw": None, "centered": None, "reason": reason}
    scale = head.logit_scale
    weight_VD = head.weight_VD if scale == 1 else scale * head.weight_VD
    bias_V = head.bias_V if head.bias_V is None or scale == 1 else scale * head.bias_V
    totals = {"raw": 0.0, "centered": 0.0}
    with hidden_states(checkpoint, head) as hidden_of, progress.step("deployed perplexity", blocks.predictions) as step:
        for block in range(blocks.count):
            hidden_TD = blocks.counted(hidden_of(blocks.inputs(block, block + 1)))[0]
            target_T = blocks.targets(block, block + 1)[0]
            raw_TV = head.logits(hidden_TD).float()
            centered_TV = centered_logits_from_raw(raw_TV, hidden_TD, weight_VD, bias_V)
            for name, logits_TV in (("raw", raw_TV), ("centered", centered_TV)):
                # The logits are fp32, as deployed; their softmax is not: torch's fp32 sum is off by 1e-5 nat at V = 50k.
                totals[name] += float(F.cross_entropy(logits_TV.double(), target_T, reduction="sum"))
            step.advance(blocks.size)
    return {**{name: math.exp(total / blocks.predictions) for name, total in totals.items()}, "reason": ""}


# Claims: what centering keeps, removes and may raise.

PPL_TOLERANCE = 1e-4
SHIFT_LEFT = 1e-4


def goes_from_to(column: str, raw: Cell, centered: Cell) -> Compare:
    """The number goes from one quoted value to the other."""
    return change(column, lambda found, after: near(found, raw) and near(after, centered))


def raw_test(column: str, holds: Callable[[Cell], bool]) -> Compare:
    """Whether `holds` is true of the raw number."""

    def test(name: str, raw: Line, centered: Line) -> Tested:
        found = cell(raw, column)
        return holds(found), f"{name}: {column} {number(found.value)}"

    return test


def in_range(column: str, low: float, high: float) -> Compare:
    """The raw number lies between two bounds, within the rounding of its cell."""
    return raw_test(column, lambda found: found.high >= low and found.low <= high)


def both(*compares: Compare) -> Compare:
    """All of these comparisons; the sentence has the numbers of each."""

    def test(name: str, raw: Line, centered: Line) -> Tested:
        tested = [compare(name, raw, centered) for compare in compares]
        sentences = [sentence.removeprefix(f"{name}: ") for _, sentence in tested]
        return all(ok for ok, _ in tested), f"{name}: {', '.join(sentences)}"

    return test


def _same_ppl(name: str, raw: Line, centered: Line) -> Tested:
    _, sentence = rises("ppl")(name, raw, centered)
    gap = abs(raw.cells["ppl"].value - centered.cells["ppl"].value) / raw.cells["ppl"].value
    return gap <= PPL_TOLERANCE, f"{sentence}, relative difference {number(gap, 2)}"


PPL_PRESERVED = Claim(
    "ppl_preserved",
    "Centering leaves the perplexity of every model as it is.",
    all_pairs(_same_ppl),
    f"equal within {PPL_TOLERANCE:g} relative",
)
SHIFT_REMOVED = Claim(
    "shift_removed",
    "Centering removes the common-shift tail of every model, up to rounding.",
    all_pairs(change("mu_abs_99", lambda raw, centered: centered.low <= SHIFT_LEFT * raw.high)),
    f"at most {SHIFT_LEFT:g} of the raw tail is left",
)


def not_uniform(*shown_by: str) -> Claim:
    """The gain tail of some head rises; in the paper these are the heads of `shown_by`."""
    return Claim(
        "gain_may_rise",
        "Centering is not uniformly beneficial: there are heads whose gain tail A_p^99 it raises.",
        some_pair(rises("a_p_99"), shown_by=shown_by),
    )


def quoted_factor(model: str, column: str, factor: float) -> Claim:
    """Centering divides a tail of one model by a factor the paper quotes to one decimal."""

    def test(name: str, raw: Line, centered: Line) -> Tested:
        found = ratio(cell(raw, column), cell(centered, column))
        _, sentence = rises(column)(name, raw, centered)
        return near(found, Cell(factor, 0.05)), f"{sentence}, a factor of {number(found.value)}"

    return Claim(
        f"{column}_factor_{model.lower().replace(' ', '_')}",
        f"Centering lowers {SYMBOLS[column]} of {model} by a factor of {factor:g}.",
        of_models((model,), all_pairs(test), exact=True),
        f"within {QUOTED_TOLERANCE:.0%} of the quoted factor",
    )
