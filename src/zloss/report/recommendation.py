"""A recommendation, and the plan of one, as documents: the verdict, what to paste, the arms, the decision map."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zloss.decide.recommend import nothing_calls_for_it, with_verdict
from zloss.decide.stages import SOURCE
from zloss.decide.verdict import CENTERED_HEAD
from zloss.report.audit import decision_document, stage_item, tally, verdict_document
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
    Text,
    table,
    terms,
)
from zloss.report.numbers import MISSING, seconds
from zloss.results.comparison import TITLES
from zloss.results.recommendation import ArmResult, Paste, Recommendation, RecommendPlan
from zloss.results.record import to_plain

SELECTION = (
    "An arm is a method with its λ, trained next to plain cross-entropy (CE). Columns: ΔCE in nats per token against CE, on "
    "the selecting seed alone; the quantity that the method is meant to lower, and the tail of the Z gradient at the hidden "
    "states (p99 ‖δ_u‖), both over that of CE. Arms that pass are ranked by this tail as deployed; for an arm that deploys "
    "centered logits its ratio to the raw logits of CE is a rule of ours, not a gain, and not shown."
)

CENTERED = (CENTERED_HEAD, "centered")
"""Methods that deploy centered logits."""


def recommendation_document(found: Recommendation) -> Document:
    """Everything about one recommendation."""
    found = found if found.verdict is not None else with_verdict(found)
    assert found.verdict is not None
    budget = "none" if found.budget_seconds is None else seconds(found.budget_seconds)
    times = {"budget": budget, "time spent": seconds(found.seconds)}
    return [
        Text("Recommendation", "kicker"),
        Heading(Plain(found.tested.model), 1),
        Group("verdict", tuple(verdict_document(found.verdict))),
        *_paste(found.paste),
        *_notes(found),
        Heading("Arms", 2),
        Text(f"{SELECTION} {seeds_sentence(found)}", "lead"),
        *_arms(found, whole=True),
        *_confirmation(found, 2),
        Heading("Decision map", 2),
        *decision_document(found.stages, Text(f"{tally(found.stages)}.", "lead")),
        Group("columns", (terms("Provenance", times | to_plain(found.provenance)),)),
    ]


def recommendation_summary(found: Recommendation, *, verbose: bool = False) -> Document:
    """What a terminal shows: the verdict and the first lines to paste; with `verbose` arms, confirmation and stages too."""
    found = found if found.verdict is not None else with_verdict(found)
    assert found.verdict is not None
    budget = "" if found.budget_seconds is None else f" of {seconds(found.budget_seconds)}"
    # Where nothing calls for a Z-loss, what it would change is for the page.
    idle = nothing_calls_for_it(found) and not verbose
    verdict = replace(found.verdict, changes=()) if idle else found.verdict
    opening: Document = [Heading(Plain(found.tested.model), 1), *verdict_document(verdict)]
    if not verbose:
        more = f"Arms{', stages and all lines to paste' if found.paste else ' and stages'}: --verbose, or the page."
        return [
            *opening,
            *_paste(() if idle else found.paste[:1]),
            Text(f"{seconds(found.seconds)}{budget}. {more}", "soft"),
        ]
    return [
        *opening,
        *_notes(found),
        Heading("Arms", 3),
        *_arms(found, whole=False),
        Text(seeds_sentence(found), "soft"),
        *_confirmation(found, 3),
        Heading("Stages", 3),
        Items(tuple(stage_item(stage, actions=False) for stage in found.stages)),
        *_paste(found.paste),
        Text(f"{seconds(found.seconds)}{budget}", "soft"),
    ]


def plan_summary(plan: RecommendPlan) -> Document:
    """The arms of a plan as settings, and how to pass their runs back."""
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
    unused = any(arm.method == CENTERED_HEAD and arm.state == "passed" and arm.confirmed is None for arm in found.arms)
    unused = unused and not any(stage.stage == SOURCE.name and stage.fired is False for stage in found.stages)
    # A Centered head is measured for every model, and proposed for some.
    why = f" {TITLES[CENTERED_HEAD]} is proposed only where {SOURCE.name} fired and matters."
    return (
        f"Selection used seed {found.selection_seed} and half of the validation text; confirmation used fresh {word} {seeds} "
        "and the other half. One arm is carried to confirmation: the best that passed, or the closest to passing if none did. "
        f"Selection results are not evidence, because the arm was chosen on them.{why if unused else ''}"
    )


def _notes(found: Recommendation) -> Document:
    return [Heading("Notes", 3), *(Text(note, "item") for note in found.notes)] if found.notes else []


def _confirmation(found: Recommendation, level: int) -> Document:
    return [Heading("Confirmation", level), verdict_table(found.confirmation)] if found.confirmation else []


def _paste(pastes: Sequence[Paste]) -> Document:
    """A block per framework that can express the recipe, and a sentence on the others."""
    document: Document = [Heading("Lines to paste", 3)] if pastes else []
    others: dict[str, list[str]] = {}
    for paste in pastes:
        if not paste.exact:
            others.setdefault(paste.note.removeprefix("cannot be expressed: "), []).append(paste.where)
            continue
        document += [Heading(paste.where, 4), Text(Plain(paste.lines), "code")]
        document += [Text(paste.note)] if paste.note else []
    if others:
        said = "; ".join(f"{', '.join(names)} ({why})" for why, names in others.items())
        document.append(Text(f"No setting of these frameworks expresses it: {said}.", "soft"))
    return document


def _arms(found: Recommendation, *, whole: bool) -> Document:
    """The arms that were run, and a sentence on the others."""
    shifted = next((stage.fired for stage in found.stages if stage.stage == SOURCE.name), None)
    # Without a common shift there is nothing to center, so the row of Centered head says nothing.
    run = [
        arm
        for arm in found.arms
        if arm.state != "left out"
        and (arm.method != CENTERED_HEAD or arm.confirmed is not None or shifted is not False)
    ]
    unused = dict[str, list[str]]()
    for arm in found.arms:
        if arm.state == "left out":
            unused.setdefault(arm.reason, []).append(arm.label.replace(", λ", " λ"))
    more = (
        (Column("what was seen", "prose"), lambda arm: arm.reason),
        (Column("proposed by", "prose"), lambda arm: ", ".join(arm.stages)),
    )
    of_seed = "" if found.selection_seed is None else f"\nseed {found.selection_seed}"
    columns: Columns = (
        (Column("arm", "text"), lambda arm: Cell(Plain(arm.label), arm.label, note=arm.note if whole else "")),
        (Column("selection", "text"), lambda arm: arm.state),
        (Column("confirmation", "text"), lambda arm: Cell(arm.confirmed or MISSING, arm.confirmed or "")),
        (f"ΔCE{of_seed}", _delta_ce),
        ("lowered", lambda arm: _present(None if arm.method == CENTERED_HEAD else arm.ratio, "× {:.3g}")),
        ("p99 ‖δ_u‖", lambda arm: _present(None if arm.method in CENTERED else arm.transported, "× {:.3g}")),
        ("steps", lambda arm: _present(arm.steps, "{:,}")),
        *(more if whole else ()),
    )
    left_out = (Text(f"Left out ({why}): {', '.join(labels)}.", "soft") for why, labels in unused.items())
    return [*([table(run, columns, name="arms")] if run else []), *left_out]


def _delta_ce(arm: ArmResult) -> Cell:
    return Cell("" if arm.delta_ce is None else f"{arm.delta_ce:+.4f}".replace("-", "−"), arm.delta_ce)


def _present(value: float | None, form: str) -> Cell:
    """A number in its form; nothing if it does not exist."""
    return Cell("" if value is None else form.format(value), value)
