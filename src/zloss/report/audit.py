"""One audit of a checkpoint, or several side by side, as a document: answer, headline numbers, decision map, figures, tokens."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from zloss.decide.consequences import applies, lambda_limit, strongest
from zloss.decide.recommend import one_digit
from zloss.decide.stages import DECOMPOSITION, SOURCE, TRANSPORT
from zloss.decide.thresholds import WHY, stored_thresholds
from zloss.report.audit_figures import audit_figures, compared_figures
from zloss.report.document import (
    Block,
    Card,
    Cell,
    Column,
    Columns,
    Document,
    Group,
    Heading,
    Item,
    Items,
    Plain,
    Row,
    Table,
    Terms,
    Text,
    Tone,
    cell,
    table,
    terms,
)
from zloss.report.logprobs import logprob_document
from zloss.report.numbers import factor, number, percent, seconds
from zloss.report.router import findings_document
from zloss.results.audit import MAX_SAMPLE, NOT_MEASURED, AuditReport, ExtremeTable, ExtremeToken
from zloss.results.decision import ActionVerdict, Decision
from zloss.results.quantities import BY_KEY, HEAD, HEADLINE, NAMES, Definition, coefficient, symbol
from zloss.results.record import to_plain

CAPPED = {
    "a_p_99": "p99 output-to-hidden gain through the softcap, ‖WᵀCp‖/‖p‖ with C = diag(1 − tanh²(z/cap))",
    "a_p_mean": "mean output-to-hidden gain through the softcap",
    "delta_u_99": "tail of the source that reaches the hidden state through the softcap, per token at λ_diag",
}
"""Quantities that mean something else where the logits are capped."""
CARD_STAGES = {
    "mu_abs_99": SOURCE.name,
    "p_z_999": DECOMPOSITION.name,
    "a_p_99": TRANSPORT.name,
    "delta_u_99": TRANSPORT.name,
}
"""Headline quantity → the stage whose consequence says whether it matters."""
EXTREMES = {
    ("violation", "raw"): "|log Z − c|, raw",
    ("violation", "centered"): "|log Z̃ − c|, centered",
    ("gain", "raw"): "A_p, raw",
    ("gain", "centered"): "A_p, centered",
    ("shift", "raw"): "|μ|",
    ("delta_u", "raw"): "‖δ_u‖, raw",
    ("delta_u", "centered"): "‖δ_u‖, centered",
}
VERDICTS: dict[bool | None, tuple[Tone, str]] = {
    True: ("fired", "fired"),
    False: ("quiet", "quiet"),
    None: ("open", "not evaluated"),
}
"""Whether a stage fired → its tone and its word."""
HARMLESS = "Large, but harmless here: "
"""Begins the line of a stage that fired without a consequence that matters."""
PAPER = "Z-Loss Backward Geometry in Dense Output Heads and Sparse Routers"
ADVICE = (
    " A stage fires when its number passes its threshold; whether that matters depends on a second number, its measured "
    "consequence. Every limit can be set (`zloss report AUDIT --gain-99 15`); each has its reason under Thresholds at the "
    f"end of the page. Labels such as tab:pretrained refer to the paper “{PAPER}”."
)
OURS = "The stages are the paper's; thresholds, consequences and their limits are ours."
TWO_COORDINATES = (
    "Each number is given for the head as it is (raw) and with its mean row subtracted (centered). Both make the same "
    "predictions, so a difference between them is not a gain: compare runs or checkpoints in one coordinate."
)
MATTERS: dict[bool | None, str] = {True: "It matters", False: "It does not matter", None: "Not known"}
"""Whether a consequence matters → how its stage says so."""
HEADS = {"raw": "raw", "centered": "centered"}
SCOPES = {"raw": "head, raw", "centered": "head, centered", "whole_model": "whole model, raw"}
"""Rows of the gradient ratios."""
OUTPUT_STAGES = 4
"""The first stages are about the output head: what their actions change is measured on the same text."""


def audit_document(
    report: AuditReport, *, name: str = "", key: str = "a0", models: str | None = None, links: bool = True
) -> Document:
    """Everything about one audit; `key` is the prefix of its anchors, `models` says which joined result is of which model."""

    def heading(text: str, anchor: str, link: str = "") -> Heading:
        return Heading(text, 2, f"{key}-{anchor}", link if links else "")

    figures = audit_figures(report)
    banners = []
    if report.status == "partial":
        banners.append(
            f"Partial: {report.finished_blocks or 0} of {report.corpus.blocks} blocks were finished. Run the same command with "
            "`--resume` to continue."
        )
    if report.nonfinite.nan or report.nonfinite.inf:
        banners.append(
            f"Nonfinite statistics: {report.nonfinite.nan} NaN, {report.nonfinite.inf} Inf. They are counted here and "
            "excluded from every tail."
        )
    document: Document = [
        Text("Audit of a checkpoint", "kicker"),
        Heading(Plain(name or report.model.name), 1),
        Text(_facts(report), "facts"),
        *(Text(sentence, "banner") for sentence in banners),
        *([Group("verdict", tuple(verdict_document(report.verdict)))] if report.verdict is not None else []),
        Text(TWO_COORDINATES, "soft"),
        Group("cards", tuple(_cards(report))),
        heading("Decision map", "decisions", "Decisions"),
        *decision_document(report.decisions, Text(f"{tally(report.decisions)}.{ADVICE}", "lead"), models),
        heading("Gradient geometry", "figures", "Figures"),
        *([Group("three", tuple(figures["gradient_geometry"]))] if figures["gradient_geometry"] else []),
        Text(_sample(report), "soft"),
    ]
    if figures["tails"]:
        said = "Counts are on a logarithmic axis, so that the few tokens at the right end stay visible."
        document += [
            heading("Tails over tokens", "tails", "Tails"),
            Text(said, "lead"),
            Group("two", tuple(figures["tails"])),
        ]
    if figures["spectrum"]:
        document += [
            heading("Spectrum of the output head", "spectrum", "Spectrum"),
            Group("two", tuple(figures["spectrum"])),
        ]
    if extremes := [_extreme_tokens(one) for one in report.extreme_tokens if one.tokens]:
        document += [heading("Extreme tokens in context", "tokens", "Tokens"), Group("tabs", tuple(extremes))]
    document += [
        heading("All numbers", "numbers", "Numbers"),
        *map(Text, remarks(report)),
        numbers_table(report),
        Group("columns", _small_tables(report)),
    ]
    if report.logit_noise is not None and report.logit_noise.rows:
        document += [heading("Log-probabilities from 16-bit logits", "logprobs", "Log-probabilities")]
        stored = "" if report.planned is None else report.planned.logits
        document += logprob_document(report.logit_noise.rows, verdict_format=stored)
    if report.router is not None:
        document += [heading("Routers", "routers"), *findings_document(report.router, layers=True)]
    blocks = [
        terms("Model", to_plain(report.model)),
        terms("Corpus", to_plain(report.corpus)),
        terms("Run", to_plain(report.provenance)),
        Terms(tuple((Plain(step), seconds(value)) for step, value in report.timings.items()), "Time"),
        Terms(
            tuple((Plain(limit), number(value)) for limit, value in ({} if links else report.thresholds).items()),
            "Thresholds",
        ),
    ]
    return [
        *document,
        heading("Provenance", "provenance", "Provenance"),
        Group("columns", tuple(block for block in blocks if block.items)),
        # A page of several audits does not repeat the reasons.
        *(_thresholds(report) if links and report.thresholds else ()),
    ]


def _thresholds(report: AuditReport) -> Document:
    """Every threshold that was used, with its reason."""
    columns: Columns = (
        (Column("threshold", "text"), lambda one: Cell(Plain(one[0]), one[0])),
        ("value", lambda one: cell(one[1])),
        (Column("why", "prose"), lambda one: WHY.get(one[0], "")),
    )
    shown = table(report.thresholds.items(), columns, name="thresholds", sortable=False)
    said = "Set them with options of `zloss report`, with hyphens for underscores: `--shift-noise 0.02`."
    return [Heading("Thresholds", 3), Text(said, "soft"), shown]


def verdict_document(verdict: ActionVerdict, *, reasons: int | None = None) -> Document:
    """The answer, the first `reasons` of each kind (None: all), what it would change, and how sure it is."""
    document: Document = [Text(verdict.sentence, "answer")]
    trained = verdict.if_trained or ()
    for title, sentences in (
        ("Why", [said for said in verdict.why if said not in trained][:reasons]),
        # The limit of λ comes first; where there is more to do than to train, the sentence alone has it.
        ("If you train with a Z-loss anyway", trained[: None if reasons is None else 0 if verdict.changes else 1]),
        ("What it changes", verdict.changes),
    ):
        items = [Text(sentence, "item") for sentence in sentences if sentence]
        document += [Heading(title, 3), *items] if items else []
    if verdict.confidence:
        document += [Heading("How sure", 3), Text(verdict.confidence)]
    return document


def audit_summary(report: AuditReport, *, models: str | None = None, verbose: bool = False) -> Document:
    """What a terminal shows: the verdict; with `verbose` all numbers, routers and the decision map too."""
    document: Document = [Heading(Plain(report.model.name), 1), Text(_facts(report), "facts")]
    if report.verdict is not None:
        # 25 lines in all; the deciding reasons come first.
        several = report.verdict.changes or report.verdict.if_trained
        document += verdict_document(report.verdict, reasons=None if verbose else 2 if several else 4)
    if not verbose:
        more = [Text(sentence) for sentence in (models, *report.notes) if sentence]
        return [*document, *more, Text("All numbers and the decision map: --verbose, or the page.", "soft")]
    return [
        *document,
        *map(Text, remarks(report)),
        Text(TWO_COORDINATES, "soft"),
        numbers_table(report),
        Text("Other symbols and keys: zloss glossary WORD", "soft"),
        *(findings_document(report.router) if report.router is not None else ()),
        *(
            decision_document(report.decisions, Heading(f"Decision map: {tally(report.decisions)}"), models)
            if report.decisions
            else ()
        ),
    ]


def decision_document(decisions: Sequence[Decision], first: Block, models: str | None = None) -> Document:
    """Every stage, below the line `first`, which counts them; stages that were not evaluated for the same reason share a line.

    `models` says which joined result is of which model.
    """
    items: list[Item] = []
    for (fired, _), run in itertools.groupby(enumerate(decisions, 1), lambda one: (one[1].fired, one[1].reason)):
        places, together = zip(*run, strict=True)
        if fired is not None or len(together) == 1:
            items += map(_stage, together, places)
            continue
        names = ", ".join(one.stage for one in together)
        risks = Terms(tuple((one.stage, one.risk) for one in together))
        short = stage_item(together[0])
        name = f"Stages {places[0]} {'and' if len(places) == 2 else 'to'} {places[-1]}"
        items.append(replace(short, name=name, text=f"{names}: {short.text}", body=(risks,)))
    return [first, Text(OURS, "soft"), *([Text(models, "banner")] if models else []), Items(tuple(items))]


def stage_item(decision: Decision, *, actions: bool = True) -> Item:
    """A stage in short, with its action where it fired; nothing calls for the action of one that is harmless."""
    tone, word = verdict_word(decision)
    more = tuple[tuple[str, Tone], ...]()
    if decision.fired and actions:
        more = (
            (f"If it mattered: {decision.action}", "soft")
            if tone == "harmless"
            else (f"→ {decision.action}", "strong"),
        )
    return Item(decision.stage, word, tone, decision.reason, more)


def verdict_word(decision: Decision) -> tuple[Tone, str]:
    """The tone and the word for whether a stage fired; a stage that fired harmlessly has no alarming color."""
    if is_harmless(decision):
        return "harmless", "fired"
    return VERDICTS[decision.fired] if applies(decision) else ("open", "not applicable")


def is_harmless(decision: Decision) -> bool:
    """Whether the stage fired and its measured consequence does not matter."""
    return bool(decision.fired) and decision.consequence is not None and decision.consequence.matters is False


def _stage(decision: Decision, place: int) -> Item:
    """A stage with its number and every detail."""
    trigger = decision.trigger
    if decision.value is not None:
        named = f" `{decision.threshold_name}`" if decision.threshold_name else ""
        trigger += f": {number(decision.value)}, threshold {number(decision.threshold)}{named}"
    consequence, harmless = decision.consequence, is_harmless(decision)
    # The line of a harmless stage says it already.
    here = consequence is not None and not harmless and applies(decision)
    facts = (
        *(
            [("Consequence (ours)", f"{MATTERS[consequence.matters]}. {consequence.reason}")]
            if here and consequence
            else []
        ),
        ("Risk", decision.risk),
        ("Trigger", trigger),
        (
            "Action" if consequence is None or consequence.matters is not False else "Action, if it mattered",
            decision.action,
        ),
        ("Expect", decision.expected),
        ("Not guaranteed", decision.not_guaranteed),
        ("Evidence in the paper", decision.evidence),
    )
    of_head, source = place <= OUTPUT_STAGES, decision.stage == SOURCE.name
    title = "What the action would change, measured on this text" if of_head else "Measured"
    before, after = ("raw", "centered") if source else ("before", "after")
    # The λ that meets the budget of R_Z is the same for every stage: it is among the numbers of the gradient.
    effects = [effect for effect in decision.measured if effect.unit != "λ"]
    measured = table(
        effects,
        (
            (Column("quantity", "text"), lambda effect: Cell(symbol(effect.quantity), note=effect.note)),
            (before, lambda effect: number(effect.before)),
            (after, lambda effect: number(effect.after)),
            # An action on the head may lead to the other coordinate, where a ratio would mean nothing.
            *([] if of_head else [("change", lambda effect: factor(effect.ratio))]),
        ),
        title=title,
        name="effects",
        sortable=False,
    )
    form = f"{{}} {before}, {{}} {after}" if of_head else "{} → {}"
    changes = "; ".join(
        f"{symbol(one.quantity)} {form.format(number(one.before), number(one.after))}" for one in effects
    )
    short = stage_item(decision)
    return replace(
        short,
        text=f"{HARMLESS}{short.text} {consequence.reason}" if harmless and consequence else short.text,
        name=f"{place}. {decision.stage}",
        more=(*short.more, (changes, "soft")) if decision.fired and changes else short.more,
        body=(Terms(facts), *([measured] if effects else [])),
        expanded=bool(decision.fired) and not harmless,
    )


def tally(decisions: Sequence[Decision]) -> str:
    """Counts of verdicts: "4 of 7 stages that apply fired (3 harmless here), 0 quiet, 3 not evaluated; 1 not applicable"."""
    fired, quiet, unevaluated = (sum(one.fired is state for one in decisions) for state in (True, False, None))
    harmless, inapplicable = sum(map(is_harmless, decisions)), sum(not applies(one) for one in decisions)
    of = f"{fired} of {len(decisions) - inapplicable} stages{' that apply' if inapplicable else ''} fired"
    of += f" ({'all' if harmless == fired else harmless} harmless here)" if harmless else ""
    rest = f"; {inapplicable} not applicable" if inapplicable else ""
    return f"{of}, {quiet} quiet, {unevaluated - inapplicable} not evaluated{rest}"


def _facts(report: AuditReport) -> str:
    corpus, model = report.corpus, report.model
    beyond = model.rows_beyond_tokenizer
    facts = (
        *_origin(report),
        corpus.name,
        f"{number(corpus.predictions)} predictions, {number(corpus.blocks)} blocks of {corpus.block_size}",
        f"PPL {number(report.ppl)}",
        f"V = {number(model.vocab)}, D = {number(model.width)}",
        *([f"{number(beyond)} rows beyond the tokenizer"] if beyond else []),
        f"{'tied' if model.tied else 'untied'} head",
        f"c = {number(report.target)}",
        f"λ_diag = {coefficient(report.diag_coef)}",
    )
    return " · ".join(facts)


def _origin(report: AuditReport) -> list[str]:
    """The file of the checkpoint where its name does not say it, and the dtype in which it stores its weights."""
    kind, _, place = str(report.model.extra.get("source") or "").partition(":")
    if kind == "gguf":
        # Dequantized for the audit; the format of a GGUF file is in its name by convention.
        format_ = re.search(r"[.-](I?Q\d\w*|TQ\d\w*|BF16|F16|F32)\.gguf$", place, re.IGNORECASE)
        return [f"`{place}`", f"stored as {format_[1] if format_ else 'GGUF'}"]
    dtype = "" if report.logit_noise is None else report.logit_noise.saved_dtype
    return [f"stored in {dtype.replace('bfloat', 'bf').replace('float', 'fp')}"] if dtype else []


def remarks(report: AuditReport) -> list[str]:
    """How strong the Z gradient is, the one limit of λ, and the notes."""
    gradient, limit = report.gradient, lambda_limit(report, stored_thresholds(report.thresholds))
    if gradient is None or gradient.raw.r_z is None:
        return list(report.notes)
    share = percent(gradient.raw.r_z)
    said = f"At λ = {coefficient(gradient.coef)} the Z gradient of the head alone is {share} of the CE gradient"
    if gradient.whole_model.r_z is not None:
        said += f", that of the whole model {percent(gradient.whole_model.r_z)}"
    if limit is not None and report.planned is not None:
        solved = coefficient(one_digit(limit[0]))
        said += f". The limit of λ is {solved}, where the largest of its gradient ratios meets its budget"
    return [f"{said}.", *report.notes]


def head_definition(key: str, report: AuditReport) -> Definition:
    """How a number of the head is written for this model; under a softcap the gain is a different quantity."""
    found = BY_KEY[key]
    if report.model.softcap is None or key not in CAPPED:
        return found
    return replace(found, symbol=f"{found.symbol}, capped", meaning=CAPPED[key])


def _cards(report: AuditReport) -> list[Card]:
    """The headline quantities, R_Z last."""
    return [
        Card(
            NAMES[key],
            BY_KEY[key] if key == "r_z" else head_definition(key, report),
            _of_head(report, "raw", key),
            _of_head(report, "centered", key),
            report.reason("gradient" if key == "r_z" else f"heads.centered.{key}") or NOT_MEASURED,
            *_card_verdict(key, report),
        )
        for key in (*HEADLINE, "r_z")
    ]


def _card_verdict(key: str, report: AuditReport) -> tuple[str, Tone]:
    """Whether the value matters here, with its tone."""
    raw, gradient, planned, stage = _of_head(report, "raw", key), report.gradient, report.planned, CARD_STAGES.get(key)
    if key == "diag_z" and raw is not None and report.ppl is not None and report.ppl > 1:
        return f"It adds {percent(raw / math.log(report.ppl))} to the cross-entropy.", ""
    if key == "r_z" and raw is not None and gradient is not None:
        budget = stored_thresholds(report.thresholds).r_z_budget
        coef, (share, scope) = gradient.coef, max((raw, "head"), (gradient.whole_model.r_z or 0.0, "whole model"))
        if planned is not None and planned.coef:  # the run that the verdict is about
            coef, (share, scope) = planned.coef, strongest(planned)
        beyond = share > budget
        said = f"At λ = {coefficient(coef)} the Z gradient of the {scope} is {percent(share)} of its CE gradient"
        where = "beyond" if beyond else "within"
        return f"{said}, {where} the budget of {percent(budget)}.", "fired" if beyond else "quiet"
    found = next((one for one in report.decisions if one.stage == stage), None)
    if found is None or found.consequence is None:
        return "", ""
    consequence = found.consequence
    if consequence.matters:
        return f"It matters here: {consequence.reason}", "fired"
    if consequence.matters is None:
        return "Its effect is not known.", "open"
    large = bool(found.fired) and key in ("mu_abs_99", "a_p_99")  # the numbers that a stage compares with its threshold
    if large and key == "a_p_99":
        return f"Above {number(found.threshold)}, but the gradient that it amplifies is harmless: next card.", ""
    lead = f"Above {number(found.threshold)}, but harmless here" if large else "Harmless here"
    return f"{lead}: {consequence.reason}", ""


def _of_head(report: AuditReport, head: str, key: str) -> float | None:
    """A number of the head, or R_Z and C_Z of its gradient, in one coordinate."""
    of = report.gradient if key in ("r_z", "c_z") else report.heads
    value: float | None = None if of is None else getattr(getattr(of, head), key)
    return value


def numbers_table(report: AuditReport) -> Table:
    """Every number of the head in both coordinates, and R_Z, C_Z; a missing number is followed by the reason."""
    of_gradient = ("r_z", "c_z") if report.gradient is not None else ()
    shown = [
        *(head_definition(quantity.key, report) for quantity in HEAD),
        *(BY_KEY[key] for key in of_gradient),
    ]

    def meaning(label: Definition) -> Cell:
        notes = []
        for head in ("raw", "centered") if label.key not in of_gradient else ():
            path = f"heads.{head}.{label.key}"
            if _of_head(report, head, label.key) is None:
                notes.append(f"{head}: {report.reason(path) or NOT_MEASURED}")
        return Cell(label.meaning, note="; ".join(notes), tone="soft")

    return table(
        shown,
        (
            (Column("quantity", "text"), lambda label: Cell(label.axis, label.key, quantity=label)),
            ("raw", lambda label: cell(_of_head(report, "raw", label.key))),
            ("centered", lambda label: cell(_of_head(report, "centered", label.key))),
            (Column("meaning", "prose", wide=True), meaning),
        ),
        keys=3,
        legend=(*(head_definition(key, report) for key in HEADLINE), *(BY_KEY[key] for key in of_gradient)),
        name="numbers",
    )


def _small_tables(report: AuditReport) -> tuple[Table, ...]:
    """Gradients, paths and spacing by coordinate, each with a note; the note alone where they were not measured."""
    gradient, budget = report.gradient, report.lambda_budget
    why, at = report.reason("gradient") or NOT_MEASURED, "" if budget is None else f" = {number(budget.r_z)}"
    if gradient is not None:
        how = f"{gradient.reduction}-reduced over {gradient.blocks} blocks"
        why = f"{how} at λ = {coefficient(gradient.coef)}. The λ in the two head rows is for the head alone and not a limit of λ."
    untied = NOT_MEASURED if report.model.tied else "The head is untied: no input path leads to its gradient."
    no_paths = "" if report.tied_paths is not None else report.reason("tied_paths") or untied
    coarse = "Logits closer than the spacing merge when stored in that format, before any softmax sees them."
    solved = Column.of("lambda_budget", f"{symbol('lambda_budget')}{at}")
    more: Columns = ((solved, lambda name: coefficient(getattr(budget, name, None))),)
    keys = ("row_max_999", "bf16_spacing", "fp16_spacing")
    return (
        _small("Z gradient relative to CE", gradient, ("r_z", "c_z"), why, SCOPES, more),
        _small("Paths into the tied table", report.tied_paths, ("output_norm", "input_norm", "cosine"), no_paths),
        _small("Where stored logits get coarse", report.precision, keys, coarse),
    )


def _small(
    title: str,
    found: Any,
    keys: Sequence[str],
    why: str,
    heads: Mapping[str, str] = HEADS,
    more: Columns = (),
) -> Table:
    """The numbers of a section by coordinate, and `why`; only `why` if there is no section."""
    columns: Columns = (
        (Column("", "text"), heads.__getitem__),
        *((Column.of(key), lambda name, key=key: cell(getattr(getattr(found, name), key))) for key in keys),
        *more,
    )
    return table(heads if found is not None else (), columns, title=title, name="small", sortable=False, note=why)


def _sample(report: AuditReport) -> str:
    sample = report.figures.geometry
    if sample is None:
        why = report.reason("figures.geometry")
        return f"No token sample in this report{f': {why}' if why else ''}."
    of = f" of {number(sample.drawn_from)}" if sample.drawn_from else ""
    how = sample.note.removeprefix(f"at most {MAX_SAMPLE} tokens, ")
    return f"{len(sample)} tokens drawn{of}{f', {how}' if how else ''}."


def _extreme_tokens(extremes: ExtremeTable) -> Table:
    numbers = {
        "log Z": "log_z", "log Z̃": "log_z_centered", "μ": "mu", "A_p raw": "gain", "A_p centered": "gain_centered",
        "CE": "ce",
    }  # fmt: skip
    place = itertools.count(1)
    return table(
        extremes.tokens,
        (
            ("#", lambda token: cell(next(place))),
            (Column("context → predicted token", "text"), _token),
            *numbers.items(),
            ("block", lambda token: Cell(str(token.block), token.block)),
            ("position", lambda token: Cell(str(token.position), token.position)),
        ),
        stack=True,
        title=EXTREMES.get((extremes.quantity, extremes.coordinate), f"{extremes.quantity}, {extremes.coordinate}"),
        keys=2,
        name="tokens",
    )


_CONTROL = {code: 0x2400 + code for code in range(32)} | {0x7F: "␡", ord("\n"): "⏎", ord("\t"): "⇥"}
"""What makes line breaks, tabs and control characters visible."""


def _token(token: ExtremeToken) -> Cell:
    text = token.target.translate(_CONTROL)
    return Cell(text, text, note=token.context.translate(_CONTROL), token=True)


def side_by_side_document(named: Sequence[tuple[str, AuditReport]], *, models: Sequence[str | None] = ()) -> Document:
    """Several audits: what keeps them from being compared, figures, numbers and verdicts."""
    keys = (*HEADLINE, "r_z", "c_z", "sigma_1", "e_16", "f_16")
    heads: tuple[Tone, ...] = ("raw", "centered")
    numbers = table(
        [(name, report, head) for name, report in named for head in heads],
        (
            (Column("model", "text"), lambda line: Plain(line[0])),
            (Column("head", "text"), lambda line: Cell(line[2], line[2], line[2])),
            (Column("corpus", "text", wide=True), lambda line: Plain(line[1].corpus.name)),
            (Column.of("ppl"), lambda line: cell(line[1].ppl)),
            *((Column.of(key), lambda line, key=key: cell(_of_head(line[1], line[2], key))) for key in keys),
        ),
        keys=2,
        legend=tuple(BY_KEY[key] for key in (*HEADLINE, "r_z")),
        name="numbers",
    )
    stages = zip(*(report.decisions for _, report in named), strict=True)
    verdicts: tuple[Row, ...] = tuple(
        (f"{i}. {found[0].stage}", *map(_verdict, found)) for i, found in enumerate(stages, 1)
    )
    columns = (Column("stage", "text"), *(Column(Plain(name), "text") for name, _ in named))
    figures = compared_figures(named)
    return [
        *(Text(sentence, "banner") for sentence in differences(named)),
        *([Group("two", tuple(figures))] if figures else []),
        Text(TWO_COORDINATES, "soft"),
        numbers,
        Heading("Decisions side by side"),
        Table(columns, verdicts, name="matrix", sortable=False),
        *(Text(sentence, "banner") for sentence in dict.fromkeys(one for one in models if one is not None)),
    ]


def _verdict(decision: Decision) -> Cell:
    tone, word = verdict_word(decision)
    return Cell("" if decision.value is None else number(decision.value), decision.value, tone, word)


def differences(named: Sequence[tuple[str, AuditReport]]) -> list[str]:
    """What keeps audits from being compared number by number: another text, another λ_diag, an interruption."""
    sentences = []
    if len({_text(report) for _, report in named}) > 1:
        listed = "; ".join(
            f"{name}: {report.corpus.name}, {number(report.corpus.predictions)} predictions in blocks of "
            f"{report.corpus.block_size}"
            for name, report in named
        )
        sentences.append(
            f"Not on the same text, so PPL and tails are not comparable between the audits ({listed}). "
            "σ_1 and E_16 depend on the weights alone."
        )
    if len({report.diag_coef for _, report in named}) > 1:
        listed = ", ".join(f"{name} {coefficient(report.diag_coef)}" for name, report in named)
        sentences.append(f"Diag Z, ‖δ_u‖ and R_Z are proportional to λ_diag, which differs: {listed}.")
    if partial := ", ".join(name for name, report in named if report.status == "partial"):
        sentences.append(f"Interrupted, so measured on only part of the text: {partial}.")
    return sentences


def _text(report: AuditReport) -> tuple[object, ...]:
    """What identifies the tokens up to the tokenizer; two models read one text as different tokens."""
    corpus = report.corpus
    files = corpus.extra.get("files")
    content = [file.get("sha256") for file in files if isinstance(file, dict)] if isinstance(files, list) else []
    return (corpus.name, corpus.blocks, corpus.block_size, corpus.extra.get("offset"), tuple(map(str, content)))
