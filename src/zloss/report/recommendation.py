"""A recommendation, and the plan of one, as documents: what to do, how sure, why, what it costs, what to paste."""

from __future__ import annotations

from zloss.decide.recommend import CENTERED_HEAD
from zloss.decide.stages import SOURCE
from zloss.report.audit import decision_document, stage_item
from zloss.report.comparison import verdict_table
from zloss.report.document import (
    Cell,
    Column,
    Columns,
    Document,
    Group,
    Heading,
    Items,
    Plain,
    Table,
    Text,
    Tone,
    table,
    terms,
)
from zloss.report.numbers import seconds
from zloss.results.recommendation import Recommendation, RecommendPlan
from zloss.results.record import to_plain

LEVELS: dict[str, Tone] = {"confirmed here": "pass", "direction only": "warning", "undecided": "open"}
SELECTION = (
    "Selection: ΔCE in nats per token from CE; the quantity that the method is meant to lower, and p99 ‖δ_u‖ as deployed, both "
    "over that of CE."
)


def recommendation_document(found: Recommendation) -> Document:
    """Everything about one recommendation."""
    budget = "none" if found.budget_seconds is None else seconds(found.budget_seconds)
    times = {"budget": budget, "time spent": seconds(found.seconds)}
    return [
        Heading(Plain(found.tested.model), 1),
        Heading(found.action, 2),
        Text(f"{found.level}: {found.tested.sentence}.", "lead"),
        *_sentences(found),
        *_paste(found),
        Heading("Decision map", 2),
        *decision_document(found.stages),
        Heading("Confirmation", 2),
        Text(seeds_sentence(found), "lead"),
        *([verdict_table(found.confirmation)] if found.confirmation else []),
        Heading("Arms", 2),
        Text(SELECTION, "lead"),
        _arms(found, whole=True),
        Group("columns", (terms("Provenance", times | to_plain(found.provenance)),)),
    ]


def recommendation_summary(found: Recommendation) -> Document:
    """What a terminal shows: the stages in short, and the lines to paste last."""
    selected: Document = []
    if found.arms:
        selected = [
            Heading("Arms on the selecting seed", 3),
            _arms(found, whole=False),
            Text(seeds_sentence(found), "soft"),
        ]
    confirmed: Document = [Heading("Confirmation", 3), verdict_table(found.confirmation)] if found.confirmation else []
    budget = "" if found.budget_seconds is None else f" of {seconds(found.budget_seconds)}"
    return [
        Heading(found.action, 1),
        Text(found.confidence, "", LEVELS[found.level]),
        *_sentences(found),
        Heading("Stages", 3),
        Items(tuple(stage_item(stage, actions=False) for stage in found.stages)),
        *selected,
        *confirmed,
        *_paste(found),
        Text(f"{seconds(found.seconds)}{budget}", "soft"),
    ]


def plan_summary(plan: RecommendPlan) -> Document:
    """The arms of a plan as settings, and how their runs come back."""
    columns: Columns = (
        (Column("arm", "text"), lambda arm: Plain(arm.label)),
        (Column("objective", "prose"), lambda arm: Plain(arm.code)),
        (Column("why", "prose"), lambda arm: ", ".join(arm.stages) or arm.note),
    )
    settings = ", ".join(f"{key} {value}" for key, value in plan.settings.items())
    return [
        Heading(Plain(f"{plan.model} on {plan.text}: {len(plan.arms)} arms"), 1),
        table(plan.arms, columns),
        Text(f"The same for every arm: {settings}."),
        Text(f"Seeds {', '.join(map(str, plan.seeds))}: the first selects, the others confirm."),
        Text("Record each run with zloss.record_run(DIR, …), then run: zloss recommend MODEL --runs DIR", "soft"),
    ]


def seeds_sentence(found: Recommendation) -> str:
    """Which seed selected and which confirmed."""
    if found.selection_seed is None:
        return "No run was made."
    seeds = ", ".join(map(str, found.confirmation_seeds)) or "none"
    word = "seeds" if len(found.confirmation_seeds) > 1 else "seed"
    source = next((stage for stage in found.stages if stage.stage == SOURCE.name), None)
    passed = any(arm.method == CENTERED_HEAD and arm.state == "passed" for arm in found.arms)
    # A Centered head is measured for every model, and proposed for some.
    unproposed = f" {CENTERED_HEAD} is proposed only where {SOURCE.name} fired."
    return (
        f"Seed {found.selection_seed} and half of the validation text selected; {word} {seeds} and the other half were for "
        "confirmation. Numbers of the selection are not evidence: it chose by them. The chosen arm is the best that passed, or "
        f"the nearest where none did.{unproposed if passed and source is not None and not source.fired else ''}"
    )


def _sentences(found: Recommendation) -> Document:
    titled = (
        ("Why", found.why),
        ("What it costs", found.cost),
        ("What is not guaranteed", found.not_guaranteed),
        ("Notes", found.notes),
    )
    document: Document = []
    for title, sentences in titled:
        if sentences:
            document += [Heading(title, 3), *(Text(sentence, "item") for sentence in sentences)]
    return document


def _paste(found: Recommendation) -> Document:
    document: Document = [Heading("Lines to paste", 3)] if found.paste else []
    for paste in found.paste:
        near = "" if paste.exact or not paste.lines else ", the nearest setting"
        document.append(Heading(f"{paste.where}{near}", 4))
        document += [Text(Plain(paste.lines), "code")] if paste.lines else []
        document += [Text(paste.note)] if paste.note else []
    return document


def _arms(found: Recommendation, *, whole: bool) -> Table:
    more = (
        (Column("what was seen", "prose"), lambda arm: arm.reason),
        (Column("proposed by", "prose"), lambda arm: ", ".join(arm.stages)),
        (Column("λ", "prose"), lambda arm: arm.note),
    )
    columns: Columns = (
        (Column("arm", "text"), lambda arm: Cell(Plain(arm.label), arm.label)),
        (Column("state", "text"), lambda arm: arm.state),
        ("ΔCE", lambda arm: _present(arm.delta_ce, "{:+.4f}")),
        ("lowered", lambda arm: _present(arm.ratio, "× {:.3g}")),
        ("p99 ‖δ_u‖", lambda arm: _present(arm.transported, "× {:.3g}")),
        ("steps", lambda arm: _present(arm.steps, "{:,}")),
        *(more if whole else ()),
    )
    return table(found.arms, columns, name="numbers")


def _present(value: float | None, form: str) -> Cell:
    """A number in its form; nothing where it does not exist."""
    return Cell("" if value is None else form.format(value), value)
