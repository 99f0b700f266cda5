"""The audit of a checkpoint as a document: answer, headline numbers, decision map, figures, extreme tokens, all numbers.

Several audits side by side have a document too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from zloss.decide.answer import bottom_line
from zloss.decide.stages import usual_range
from zloss.report.audit_figures import audit_figures, compared_figures
from zloss.report.document import (
    Block,
    Card,
    Cell,
    Column,
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
    row,
    terms,
)
from zloss.report.numbers import coefficient, factor, number, percent, seconds
from zloss.report.router import findings_document
from zloss.results.audit import NOT_MEASURED, AuditReport, ExtremeTable
from zloss.results.decision import Decision, Effect
from zloss.results.quantities import BY_KEY, HEAD, HEADLINE, Definition, symbol
from zloss.results.record import to_plain

MOVES_LITTLE = 0.02
"""Ratios within this of 1 are called unchanged."""
CAPPED = {
    "a_p_99": "p99 output-to-hidden gain through the softcap, ‖WᵀCp‖/‖p‖ with C = diag(1 − tanh²(z/cap))",
    "a_p_mean": "mean output-to-hidden gain through the softcap",
    "delta_u_99": "tail of the source that reaches the hidden state through the softcap, per token at λ_diag",
}
"""Quantities that mean something else where the logits are capped."""
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
ADVICE = " A stage that fired says that a closer look pays, not that the model is broken."
OUTPUT_STAGES = 4
"""The first stages are about the output head: what their actions change is measured on the same text."""


def audit_document(
    report: AuditReport, *, name: str = "", key: str = "a0", models: str | None = None, links: bool = True
) -> Document:
    """Everything about one audit; `key` is the prefix of its anchors, `models` says which joined result is of which model."""

    def heading(text: str, anchor: str = "", link: str = "") -> Heading:
        return Heading(text, 2, f"{key}-{anchor}" if anchor else "", link if links else "")

    figures = audit_figures(report)
    decided = [Text(bottom_line(report.decisions), "summary", "strong")] if report.decisions else []
    document: Document = [
        Text("Audit of a checkpoint", "kicker"),
        Heading(Plain(name or report.model.name), 1),
        Text(" · ".join(_facts(report)), "facts"),
        *_banners(report),
        *decided,
        *(Text(sentence, "summary") for sentence in summarize(report)),
        Text(
            "Two forms of one model with the same predictions: the centered head is without the common shift μ.", "soft"
        ),
        Group("cards", tuple(_cards(report))),
        heading("Decision map", "decisions", "Decisions"),
        *decision_document(report.decisions, models=models, advice=ADVICE),
        heading("Gradient geometry", "figures", "Figures"),
        *([Group("three", tuple(figures["gradient_geometry"]))] if figures["gradient_geometry"] else []),
        Text(_sample(report), "soft"),
    ]
    if figures["tails"]:
        said = "Counts are on a logarithmic axis, so that the few tokens at the right end stay visible."
        document += [heading("Tails over tokens"), Text(said, "lead"), Group("two", tuple(figures["tails"]))]
    if figures["spectrum"]:
        document += [heading("Spectrum of the output head"), Group("two", tuple(figures["spectrum"]))]
    if extremes := [_extreme_tokens(table) for table in report.extreme_tokens if table.tokens]:
        document += [heading("Extreme tokens in context", "tokens", "Tokens"), Group("tabs", tuple(extremes))]
    document += [
        heading("All numbers", "numbers", "Numbers"),
        numbers_table(report),
        Group("columns", _further(report)),
    ]
    if report.router is not None:
        document += [heading("Routers", "routers"), *findings_document(report.router, layers=True)]
    blocks = [
        terms("Model", to_plain(report.model)),
        terms("Corpus", to_plain(report.corpus)),
        terms("Run", to_plain(report.provenance)),
        Terms(tuple((Plain(step), seconds(value)) for step, value in report.timings.items()), "Time"),
        Terms(tuple((Plain(limit), number(value)) for limit, value in report.thresholds.items()), "Thresholds"),
    ]
    return [*document, heading("Provenance"), Group("columns", tuple(block for block in blocks if block.items))]


def audit_summary(report: AuditReport, *, models: str | None = None) -> Document:
    """What a terminal shows: summary, numbers, routers, and the decision map with the answer last."""
    document: Document = [
        Heading(Plain(report.model.name), 1),
        Text(" · ".join(_facts(report)), "facts"),
        *(Text(sentence) for sentence in summarize(report)),
        numbers_table(report),
        Text("Other symbols and keys: zloss glossary WORD", "soft"),
        *(findings_document(report.router) if report.router is not None else ()),
    ]
    return [*document, *(decision_summary(report.decisions, models=models) if report.decisions else ())]


def decision_document(decisions: Sequence[Decision], *, models: str | None = None, advice: str = "") -> Document:
    """The counts of verdicts, where to begin, and every stage; `models` says which joined result is of which model."""
    return [
        Text(f"{tally(decisions)}.{advice}", "lead"),
        *([Text(models, "banner")] if models else []),
        Text(bottom_line(decisions), "strong"),
        Items(tuple(_stage(decision, i) for i, decision in enumerate(decisions))),
    ]


def decision_summary(decisions: Sequence[Decision], *, models: str | None = None) -> Document:
    """The same for a terminal: where to begin stands last."""
    return [
        Heading(f"Decision map: {tally(decisions)}"),
        *([Text(models)] if models else []),
        Items(tuple(_stage(decision, i) for i, decision in enumerate(decisions))),
        Text(bottom_line(decisions), "strong"),
    ]


def _stage(decision: Decision, place: int) -> Item:
    tone, word = VERDICTS[decision.fired]
    trigger = decision.trigger
    if decision.value is not None:
        named = f" `{decision.threshold_name}`" if decision.threshold_name else ""
        trigger += f": {number(decision.value)}, threshold {number(decision.threshold)}{named}"
    facts = (
        ("Risk", decision.risk),
        ("Trigger", trigger),
        ("Action", decision.action),
        ("Expect", decision.expected),
        ("Not guaranteed", decision.not_guaranteed),
        ("Evidence", decision.evidence),
    )
    body: list[Block] = [Terms(facts)]
    if decision.measured:
        title = "What the action would change, measured on this text" if place < OUTPUT_STAGES else "Measured"
        columns = (Column("quantity", "text"), Column("before"), Column("after"), Column("change"))
        body.append(Table(columns, tuple(map(_effect, decision.measured)), title, name="effects", sortable=False))
    # The λ on budget is the same for every stage and is part of the summary.
    changes = "; ".join(
        f"{symbol(effect.quantity)} {effect_number(effect, effect.before)} → {effect_number(effect, effect.after)}"
        for effect in decision.measured
        if effect.unit != "λ"
    )
    more: tuple[tuple[str, Tone], ...] = ((f"→ {decision.action}", "strong"), (changes, "soft"))
    return Item(
        f"{place + 1}. {decision.stage}",
        word,
        tone,
        decision.reason,
        tuple(line for line in more if line[0]) if decision.fired else (),
        tuple(body),
        bool(decision.fired),
    )


def _effect(effect: Effect) -> Row:
    before, after = (effect_number(effect, value) for value in (effect.before, effect.after))
    return Cell(symbol(effect.quantity), note=effect.note), before, after, factor(effect.ratio)


def effect_number(effect: Effect, value: float | None) -> str:
    """A number of an effect; a λ is written as a power of ten."""
    return coefficient(value) if effect.unit == "λ" else number(value)


def tally(decisions: Sequence[Decision]) -> str:
    """Counts of verdicts: "4 of 8 stages fired, 0 quiet, 4 not evaluated"."""
    fired, quiet, unevaluated = (sum(one.fired is state for one in decisions) for state in (True, False, None))
    return f"{fired} of {len(decisions)} stages fired, {quiet} quiet, {unevaluated} not evaluated"


def _facts(report: AuditReport) -> list[str]:
    corpus, model = report.corpus, report.model
    beyond = model.rows_beyond_tokenizer
    return [
        corpus.name,
        f"{number(corpus.predictions)} predictions in {number(corpus.blocks)} blocks of {corpus.block_size}",
        f"PPL {number(report.ppl)}",
        f"V = {number(model.vocab)}, D = {number(model.width)}",
        *([f"{number(beyond)} rows of V beyond the tokenizer"] if beyond else []),
        f"{'tied' if model.tied else 'untied'} head",
        f"c = {number(report.target)}",
        f"λ_diag = {coefficient(report.diag_coef)}",
    ]


def _banners(report: AuditReport) -> list[Text]:
    banners = []
    if report.status == "partial":
        banners.append(
            f"Partial: {report.finished_blocks or 0} of {report.corpus.blocks} blocks were finished. Run the same command with "
            "`--resume` to continue."
        )
    if report.nonfinite.nan or report.nonfinite.inf:
        banners.append(
            f"Nonfinite statistics: {report.nonfinite.nan} NaN, {report.nonfinite.inf} Inf. They are counted here and kept out "
            "of every tail."
        )
    return [Text(sentence, "banner") for sentence in banners]


def summarize(report: AuditReport) -> list[str]:
    """Sentences on the common shift, on what centering changes, on the λ that meets the R_Z budget, and the notes."""
    partial = ""
    if report.status != "complete":
        done = report.finished_blocks or 0
        partial = f"This audit was interrupted: it covers {done} of {report.corpus.blocks} blocks."
    sentences = (partial, _shift(report), _centering(report), _budget(report), *report.notes)
    return [sentence for sentence in sentences if sentence]


def _shift(report: AuditReport) -> str:
    fired = {decision.stage: decision for decision in report.decisions}.get("Source coordinate")
    if fired is None or fired.value is None:
        return ""
    state = "large" if fired.fired else "small"
    limit = f"against a threshold of {number(fired.threshold)}"
    return f"The common shift is {state}: {symbol('mu_abs_99')} is {number(fired.value)} nats {limit}."


def _centering(report: AuditReport) -> str:
    raw, centered = report.heads.raw, report.heads.centered
    verbs: dict[str, list[str]] = {"lowers": [], "raises": [], "keeps": []}
    for key in ("p_z_999", "a_p_99", "delta_u_99"):
        before, after = getattr(raw, key), getattr(centered, key)
        if before is None or after is None or before == 0:
            continue
        ratio = after / before
        verb = "keeps" if abs(ratio - 1) <= MOVES_LITTLE else "lowers" if ratio < 1 else "raises"
        verbs[verb].append(f"{symbol(key)} from {number(before)} to {number(after)} ({factor(ratio)})")
    parts = [f"{verb} {_listed(items)}" for verb, items in verbs.items() if items]
    if not parts:
        return ""
    return f"Centering leaves PPL at {number(report.ppl)}; on this text it {', and it '.join(parts)}."


def _listed(items: list[str]) -> str:
    """The items with commas, and "and" before the last."""
    return " and ".join(part for part in (", ".join(items[:-1]), items[-1]) if part)


def _budget(report: AuditReport) -> str:
    budget, gradient = report.lambda_budget, report.gradient
    if budget is None or gradient is None or gradient.raw.r_z is None or budget.raw is None or not budget.raw > 0:
        return ""
    sentence = f"At λ = {coefficient(gradient.coef)} the Z gradient of the head is {percent(gradient.raw.r_z)} of the CE gradient"
    sentence += f"; it would be {percent(budget.r_z)}, the budget of R_Z, at λ = {coefficient(budget.raw)} raw"
    if budget.centered is not None:
        sentence += f", {coefficient(budget.centered)} centered"
    farthest = max(
        (value for value in (budget.raw, budget.centered) if value is not None and value > 0),
        key=lambda value: abs(math.log(value / 1e-4)),
    )
    return f"{sentence} ({usual_range(farthest)})."


def head_definition(key: str, report: AuditReport) -> Definition:
    """How a number of the head is written for this model; under a softcap the gain is another one."""
    found = BY_KEY[key]
    if report.model.softcap is None or key not in CAPPED:
        return found
    return replace(found, symbol=f"{found.symbol}, capped", meaning=CAPPED[key])


def _cards(report: AuditReport) -> list[Card]:
    """The headline quantities, R_Z last."""
    heads, gradient = report.heads, report.gradient
    cards = [
        Card(
            head_definition(key, report),
            getattr(heads.raw, key),
            getattr(heads.centered, key),
            why_missing(report, f"heads.centered.{key}"),
        )
        for key in HEADLINE
    ]
    raw, centered = (gradient.raw.r_z, gradient.centered.r_z) if gradient else (None, None)
    return [*cards, Card(BY_KEY["r_z"], raw, centered, why_missing(report, "gradient"))]


def why_missing(report: AuditReport, path: str) -> str:
    """Why the number at a dotted path is absent."""
    return report.reason(path) or NOT_MEASURED


def numbers_table(report: AuditReport) -> Table:
    """Every number of the head in both coordinates, and R_Z, C_Z; a missing number is followed by the reason."""
    rows = []
    for label in (head_definition(quantity.key, report) for quantity in HEAD):
        raw, centered = getattr(report.heads.raw, label.key), getattr(report.heads.centered, label.key)
        notes = []
        for coordinate, value in (("raw", raw), ("centered", centered)):
            path = f"heads.{coordinate}.{label.key}"
            bound = report.quantile_bounds.get(path)
            if bound is not None:
                notes.append(f"{coordinate} within {number(bound.lower)} … {number(bound.upper)}")
            if value is None:
                notes.append(f"{coordinate}: {why_missing(report, path)}")
        rows.append(_both_heads(label, raw, centered, "; ".join(notes)))
    legend = tuple(head_definition(key, report) for key in HEADLINE)
    if report.gradient is not None:
        of_both = report.gradient.raw, report.gradient.centered
        rows.append(_both_heads(BY_KEY["r_z"], of_both[0].r_z, of_both[1].r_z))
        rows.append(_both_heads(BY_KEY["c_z"], of_both[0].c_z, of_both[1].c_z, ratio=False))
        legend += (BY_KEY["r_z"], BY_KEY["c_z"])
    columns = (
        Column("quantity", "text"), Column("raw"), Column("centered"), Column("centered / raw"),
        Column("meaning", "prose", wide=True),
    )  # fmt: skip
    return Table(columns, tuple(rows), keys=4, legend=legend, name="numbers")


def _both_heads(
    label: Definition, raw: float | None, centered: float | None, note: str = "", *, ratio: bool = True
) -> Row:
    change = centered / raw if raw and centered is not None else None
    return (
        Cell(label.axis, label.key, quantity=label),
        cell(raw),
        cell(centered),
        Cell(factor(change), change) if ratio else Cell("", None),
        Cell(label.meaning, note=note, tone="soft"),
    )


def _further(report: AuditReport) -> tuple[Block, ...]:
    """Gradient of the head, paths into a tied table, spacing of stored logits."""
    blocks: list[Block] = []
    gradient, budget, tied = report.gradient, report.lambda_budget, report.tied_paths
    if gradient is None:
        blocks.append(_small("Gradient of the head", (), (), why_missing(report, "gradient")))
    else:
        solved = (None, None, None) if budget is None else (budget.raw, budget.centered, budget.whole_model)
        at = "" if budget is None else f" = {number(budget.r_z)}"
        columns: tuple[Column, ...] = (
            Column.of("r_z"),
            Column.of("c_z"),
            Column.of("lambda_budget", f"{symbol('lambda_budget')}{at}"),
        )
        rows = [
            (name, cell(numbers.r_z), cell(numbers.c_z), coefficient(value))
            for name, numbers, value in zip(
                ("raw", "centered", "whole model"),
                (gradient.raw, gradient.centered, gradient.whole_model),
                solved,
                strict=True,
            )
        ]
        how = f"{gradient.reduction}-reduced over {gradient.blocks} blocks at λ = {coefficient(gradient.coef)}"
        blocks.append(_small("Gradient of the head", columns, rows, f"{how}; R_Z is linear in λ."))
    if tied is None:
        untied = NOT_MEASURED if report.model.tied else "The head is untied: no input path leads to its gradient."
        blocks.append(_small("Paths into the tied table", (), (), report.reason("tied_paths") or untied))
    else:
        keys = ("output_norm", "input_norm", "cosine")
        columns = tuple(Column.of(key) for key in keys)
        blocks.append(_small("Paths into the tied table", columns, _sides((tied.raw, tied.centered), keys)))
    keys = ("row_max_999", "bf16_spacing", "fp16_spacing")
    precision = _sides((report.precision.raw, report.precision.centered), keys)
    why = "Logits closer than the spacing merge when stored in that format, before any softmax sees them."
    blocks.append(_small("Where stored logits get coarse", tuple(Column.of(key) for key in keys), precision, why))
    return tuple(blocks)


def _sides(records: Iterable[object], keys: Sequence[str]) -> list[Row]:
    sides = zip(("raw", "centered"), records, strict=True)
    return [(name, *(cell(getattr(numbers, key)) for key in keys)) for name, numbers in sides]


def _small(title: str, columns: tuple[Column, ...], rows: Sequence[Row], why: str = "") -> Table:
    return Table((Column("", "text"), *columns), tuple(rows), title, name="small", sortable=False, note=why)


def _sample(report: AuditReport) -> str:
    sample = report.figures.geometry
    if sample is None:
        why = report.reason("figures.geometry")
        return f"No token sample in this report{f': {why}' if why else ''}."
    of = f" of {number(sample.drawn_from)}" if sample.drawn_from else ""
    return f"{len(sample)} tokens drawn{of}{f': {sample.note}' if sample.note else ''}."


def _extreme_tokens(table: ExtremeTable) -> Table:
    title = EXTREMES.get((table.quantity, table.coordinate), f"{table.quantity}, {table.coordinate}")
    columns = ("log Z", "log Z̃", "μ", "A_p raw", "A_p centered", "CE", "block", "position")
    rows = tuple(
        (
            Cell(str(i), i),
            Cell(visible_text(token.target), visible_text(token.target), note=visible_text(token.context), token=True),
            *map(cell, (token.log_z, token.log_z_centered, token.mu, token.gain, token.gain_centered, token.ce)),
            Cell(str(token.block), token.block),
            Cell(str(token.position), token.position),
        )
        for i, token in enumerate(table.tokens, 1)
    )
    return Table(
        (Column("#"), Column("context → predicted token", "text"), *map(Column, columns)),
        rows,
        title,
        keys=2,
        name="tokens",
    )


_CONTROL = {code: 0x2400 + code for code in range(32)} | {0x7F: "␡", ord("\n"): "⏎", ord("\t"): "⇥"}


def visible_text(text: str) -> str:
    """Text of tokens with line breaks, tabs and control characters made visible."""
    return text.translate(_CONTROL)


def side_by_side_document(named: Sequence[tuple[str, AuditReport]], *, models: Sequence[str | None] = ()) -> Document:
    """Several audits: what keeps them from being compared, figures, numbers and verdicts."""
    keys = (*HEADLINE, "r_z", "c_z", "sigma_1", "e_16", "f_16")
    heads: tuple[Tone, ...] = ("raw", "centered")
    rows = tuple(
        row(
            Plain(name),
            Cell(head, head, head),
            Plain(report.corpus.name),
            cell(report.ppl),
            *(cell(_of_head(report, head, key)) for key in keys),
        )
        for name, report in named
        for head in heads
    )
    columns = (
        Column("model", "text"),
        Column("head", "text"),
        Column("corpus", "text", wide=True),
        *map(Column.of, ("ppl", *keys)),
    )
    legend = tuple(BY_KEY[key] for key in (*HEADLINE, "r_z"))
    stages = zip(*(report.decisions for _, report in named), strict=True)
    verdicts = tuple(
        row(f"{i}. {decisions[0].stage}", *(_verdict(decision) for decision in decisions))
        for i, decisions in enumerate(stages, 1)
    )
    figures = compared_figures(named)
    return [
        *(Text(sentence, "banner") for sentence in differences(named)),
        *([Group("two", tuple(figures))] if figures else []),
        Table(columns, rows, keys=2, legend=legend, name="numbers"),
        Heading("Decisions side by side"),
        Table(
            (Column("stage", "text"), *(Column(Plain(name), "text") for name, _ in named)), verdicts, name="matrix",
            sortable=False,
        ),
        *(Text(sentence, "banner") for sentence in dict.fromkeys(one for one in models if one is not None)),
    ]  # fmt: skip


def _of_head(report: AuditReport, head: str, key: str) -> float | None:
    of_gradient = key in ("r_z", "c_z")
    if of_gradient and report.gradient is None:
        return None
    value: float | None = getattr(getattr(report.gradient if of_gradient else report.heads, head), key)
    return value


def _verdict(decision: Decision) -> Cell:
    tone, word = VERDICTS[decision.fired]
    text = number(decision.value) if decision.value is not None else ""
    return Cell(text, decision.value, tone, word)


def differences(named: Sequence[tuple[str, AuditReport]]) -> list[str]:
    """What keeps audits from being compared number by number: another text, another λ_diag, an interruption."""
    sentences = []
    texts = [_text(report) for _, report in named]
    if len(set(texts)) > 1:
        listed = "; ".join(f"{name}: {_described(report)}" for name, report in named)
        sentences.append(
            f"Not on the same text, so PPL and tails are not comparable between the audits ({listed}). "
            "σ_1 and E_16 depend on the weights alone."
        )
    coefs = [report.diag_coef for _, report in named]
    if len(set(coefs)) > 1:
        listed = ", ".join(f"{name} {coefficient(coef)}" for (name, _), coef in zip(named, coefs, strict=True))
        sentences.append(f"Diag Z, ‖δ_u‖ and R_Z are in proportion to λ_diag, which differs: {listed}.")
    if partial := ", ".join(name for name, report in named if report.status == "partial"):
        sentences.append(f"Interrupted, so on a part of the text: {partial}.")
    return sentences


def _text(report: AuditReport) -> tuple[object, ...]:
    """What identifies the tokens up to the tokenizer; two models read one text as different tokens."""
    corpus = report.corpus
    files = corpus.extra.get("files")
    content = [file.get("sha256") for file in files if isinstance(file, dict)] if isinstance(files, list) else []
    return (corpus.name, corpus.blocks, corpus.block_size, corpus.extra.get("offset"), tuple(map(str, content)))


def _described(report: AuditReport) -> str:
    corpus = report.corpus
    return f"{corpus.name}, {number(corpus.predictions)} predictions in blocks of {corpus.block_size}"
