"""A comparison of matched training runs as a document: verdicts, means, paired differences, routers, curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zloss.report.document import (
    Cell,
    Column,
    Document,
    Figure,
    Group,
    Heading,
    Plain,
    Row,
    Table,
    Text,
    Tone,
    cell,
    row,
    terms,
)
from zloss.report.figures import (
    Spec,
    Values,
    axis,
    axis_of,
    chart,
    colour_of,
    curve,
    linear_domain,
    lines,
    log_domain,
    reference,
)
from zloss.report.numbers import MISSING, number
from zloss.results.comparison import ComparedMethod, Comparison, MethodCurves, SeedSummary, Verdict
from zloss.results.quantities import BY_KEY, define, symbol

MEANS = (
    "ppl", "p_z_999", "a_p_99", "mu_abs_99", "r_aux", "c_aux", "grad_norm_p99", "grad_norm_max", "clip_rate", "phi_10",
)  # fmt: skip
MEANS_ROUTED = (
    "ce", "ppl", "entropy", "load_cv", "s_rel", "router_absolute", "load_balance", "router_z", "router_log_z_p999",
    "router_correction_norm", "dropped_routes", "grad_norm_p99", "grad_norm_max",
)  # fmt: skip
PAIRED = (
    "ppl", "p_z_999", "a_p_99", "diag_z", "mu_abs_99", "grad_norm_p99", "grad_norm_max", "clip_rate", "phi_10", "adam_v_max",
)  # fmt: skip
PAIRED_ROUTED = (
    "ce", "ppl", "entropy", "load_cv", "load_balance", "router_z", "router_log_z_p999", "router_correction_norm",
    "grad_norm_p99", "clip_rate",
)  # fmt: skip
NO_VERDICT = "no verdict"
PARTS = {"quality": "quality", "coordinate": "diagnosed coordinate", "optimizer": "optimizer"}
VERDICT_COLUMNS = (Column("verdict", "text"), *(Column(title, "prose") for title in PARTS.values()))
WORDS: dict[str, Tone] = {"accepted": "pass", "rejected": "fired", "holds": "pass", "fails": "fired"}
"""Verdicts and states of their parts that are more than open."""
TWO_COORDINATES = (
    "Tails of raw and of centered logits are not comparable line by line; the paired differences below are in one "
    "coordinate."
)
CURVES = {
    # quantity: (title, logarithmic axis)
    "cross_entropy": ("Training cross-entropy", False),
    "grad_norm": ("Gradient norm of each step", True),
    "p_z_999": ("Log-normalizer tail of each step", True),
    "entropy": ("Router entropy of each step", False),
    "load_cv": ("Expert load of each step", False),
    "router_log_z_p999": ("Router log-normalizer tail of each step", False),
}
LARGEST_STEPS = 0.01
"""The share of steps that a p99 leaves out."""
MATCHED = ":matched"
"""How the name of a variant says that its coefficient was matched."""
Curves = Mapping[str, tuple[Values, Values]]
"""Name of a method → its values over steps or norms; empty ones where it has none."""


def comparison_document(comparison: Comparison) -> Document:
    """Everything about one comparison."""
    keys = list(dict.fromkeys(name for method in comparison.methods for name in method.metrics))
    figures = training_figures(comparison.curves)
    document: Document = [
        *([Text(text, "answer", "strong")] if (text := answer(comparison)) else []),
        *_verdicts(comparison),
        *_differences(comparison),
    ]
    if figures:
        document += [Heading("Training", 3), Group("three", tuple(figures))]
    if comparison.methods:
        document += [
            Heading("Metrics", 3),
            Text(_means_sentence(comparison), "lead"),
            _means(comparison, keys, plain=True),
        ]
    skipped = ("schema", "methods", "quality", "router", "curves")
    details = terms("Details", comparison.to_dict(), skip=skipped)
    return [*document, *([Group("columns", (details,))] if details.items else [])]


def comparison_summary(comparison: Comparison) -> Document:
    """What a terminal and comparison.md show: the answer, means, paired differences, verdicts, tokens."""
    keys = _estimable(MEANS if comparison.router is None else MEANS_ROUTED, comparison)
    coordinates = {verdict.coordinate for verdict in comparison.quality.methods}
    mixed = "p_z_999" in keys and len(coordinates) > 1
    return [
        *([Text(text, "strong")] if (text := answer(comparison)) else []),
        Text(_means_sentence(comparison)),
        _means(comparison, keys),
        *([Text(TWO_COORDINATES)] if mixed else []),
        *_differences(comparison),
        *_verdicts(comparison),
        *(Text(sentence) for sentence in _tokens(comparison)),
    ]


def comparison_page(comparison: Comparison) -> Document:
    """comparison.md: the summary under its title, with how the runs were made."""
    made: Document = []
    if (provenance := comparison.provenance) is not None:
        plural = "" if provenance.threads == 1 else "s"
        made = [
            *(Text(command, "code") for command in provenance.commands),
            Text(
                f"{provenance.runs} runs in {provenance.seconds / 60:.0f} minutes, training and validation, on "
                f"{provenance.threads} thread{plural}; zloss {provenance.zloss}, torch {provenance.torch}."
            ),
        ]
    return [Heading("Matched training runs", 1), *made, *comparison_summary(comparison)]


def answer(comparison: Comparison) -> str:
    """The verdicts in one sentence, accepted methods first; empty where nothing was judged."""
    found: dict[str, list[str]] = {"accepted": [], "rejected": [], "inconclusive": [], NO_VERDICT: []}
    for verdict in comparison.quality.methods:
        found.setdefault(verdict_word(verdict), []).append(verdict.label.replace(", λ", " λ"))
    parts = [f"{word}: {', '.join(labels)}" for word, labels in found.items() if labels]
    return f"{parts[0][0].upper()}{parts[0][1:]}{''.join(f'; {part}' for part in parts[1:])}." if parts else ""


def verdict_word(verdict: Verdict) -> str:
    """ "accepted", "rejected", "inconclusive" or "no verdict"."""
    return verdict.verdict or {True: "accepted", False: "rejected", None: NO_VERDICT}[verdict.accepted]


def _verdicts(comparison: Comparison) -> Document:
    """A word for each method and its three parts, and what a reader needs to know about them."""
    if not comparison.quality.methods:
        return []
    said = (
        "Rejected where a part fails, accepted where all three hold, otherwise inconclusive: an open part names what would "
        "settle it."
    )
    columns = (Column("method", "text"), Column("PPL difference"), Column("tolerance"), *VERDICT_COLUMNS)
    tolerance = cell(comparison.quality.tolerance_ppl)
    rows = tuple(
        row(Plain(verdict.label), cell(verdict.delta_ppl), tolerance, *verdict_cells(verdict))
        for verdict in comparison.quality.methods
    )
    notes = " ".join([said, *verdict_notes(comparison)])
    return [Heading("Verdicts", 3), Text(notes, "lead"), Table(columns, rows, name="quality")]


def verdict_cells(verdict: Verdict) -> tuple[Cell, ...]:
    """A verdict under `VERDICT_COLUMNS`: its word, and each part with its state and reason."""
    word = verdict_word(verdict)
    parts = {} if verdict.parts is None else dict(verdict.parts.named())
    stated = "" if verdict.verdict is not None and parts else verdict.reason
    cells = [
        Cell(parts[name].reason, parts[name].state, WORDS.get(parts[name].state, "open"), parts[name].state)
        if name in parts
        else Cell(MISSING)
        for name in PARTS
    ]
    return Cell(word, word, WORDS.get(word, "open"), note=stated), *cells


def verdict_notes(comparison: Comparison) -> list[str]:
    """What a reader needs to know about the verdicts: tolerance, methods compared, seeds and what they vary."""
    quality, compared, seeds = comparison.quality, len(comparison.quality.methods), len(comparison.seeds)
    notes = []
    if quality.tolerance_ppl is not None:
        notes.append(f"PPL may rise by {quality.tolerance_ppl:.4g} ({quality.tolerance}).")
    if compared:
        notes.append(
            f"{compared} method{'s' if compared > 1 else ''} compared; each bound is one-sided at 95 % for one method "
            "alone, so among many methods some bound is wrong more often than that."
        )
    if quality.seed_varies:
        notes.append(f"{seeds} seed{'s' if seeds != 1 else ''}; a seed varies {quality.seed_varies}.")
    return notes


def _estimable(keys: Sequence[str], comparison: Comparison) -> list[str]:
    """The keys without the p99 over steps where the runs have fewer than 100 steps."""
    return [key for key in keys if not (comparison.has_few_steps and key == "grad_norm_p99")]


def _means_sentence(comparison: Comparison) -> str:
    seeds = ", ".join(str(seed) for seed in comparison.seeds)
    return f"Mean ± standard deviation (of a sample) over seeds {seeds}, in the coordinate each method deploys:"


def _means(comparison: Comparison, keys: Sequence[str], *, plain: bool = False) -> Table:
    """A line per method; `plain` columns are titled with their keys."""
    rows = tuple(
        row(Plain(method.label), *(_mean(method.metrics.get(key)) for key in keys)) for method in comparison.methods
    )
    columns = tuple(Column.of(key, Plain(key) if plain else "") for key in keys)
    legend = () if plain else _defined(keys)
    return Table((Column("method", "text"), *columns), rows, legend=legend, name="numbers")


def _mean(summary: SeedSummary | None) -> Cell:
    if summary is None:
        return Cell(MISSING)
    return Cell(f"{number(summary.mean)}{_spread(summary.std)}", summary.mean)


def _spread(std: float | None) -> str:
    return f" ± {number(std, 2)}" if std else ""


def _defined(keys: Sequence[str]) -> tuple[Any, ...]:
    return tuple(found for key in keys if (found := define(key)) is not None)


def _differences(comparison: Comparison) -> Document:
    """Method minus baseline, seed by seed; router losses; where a method without a penalty departs from the baseline."""
    baseline = comparison.baseline_method
    name = comparison.baseline if baseline is None else baseline.label
    document: Document = []
    paired = [method for method in comparison.methods if method.paired is not None]
    if paired:
        keys = _estimable(PAIRED if comparison.router is None else PAIRED_ROUTED, comparison)
        columns = (Column("method", "text"), *(Column.of(key, f"Δ {symbol(key)}") for key in keys))
        tails = comparison.router is None
        rows = tuple(_paired_row(method, keys, tails=tails) for method in paired)
        document += [
            Heading("Paired differences", 3),
            Text(
                f"Method minus {name}, seed by seed, mean ± standard deviation; quantities of the head in the coordinate the "
                "method deploys, for both.",
                "lead",
            ),
            Table((*columns, *([Column("tails in", "text")] if tails else [])), rows, name="numbers"),
        ]
    if comparison.router is not None:
        document += _router_losses(comparison)
    else:
        document += [Text(_trajectories(method, comparison.baseline)) for method in paired if not method.coef]
    return document


def _paired_row(method: ComparedMethod, keys: Sequence[str], *, tails: bool) -> Row:
    assert method.paired is not None
    head, deployed = method.paired.same_coordinate.of(method.coordinate), method.paired.deployed
    cells = []
    for key in keys:
        found = head.get(key) or deployed.get(key)
        text = MISSING if found is None else f"{number(found.mean)}{_spread(found.std)}"
        cells.append(Cell(text, None if found is None else found.mean))
    return Plain(method.label), *cells, *([method.coordinate or MISSING] if tails else [])


def _trajectories(method: ComparedMethod, baseline: str) -> str:
    """Where the training of a method without a penalty departs from the baseline's: in exact arithmetic nowhere."""
    assert method.paired is not None
    parts = []
    for part in method.paired.trajectory:
        if part.first_difference is None:
            parts.append(f"seed {part.seed} equal bit for bit")
        else:
            parts.append(
                f"seed {part.seed} differs from step {part.first_difference} on, "
                f"CE by {number(part.max_ce_difference, 2)} at most and {number(part.mean_ce_difference, 2)} on average"
            )
    return f"{method.label} trained against {baseline}: {'; '.join(parts)}."


def _router_losses(comparison: Comparison) -> Document:
    """Scale and routing of every router variant, seed by seed."""
    assert comparison.router is not None
    rows = []
    for variant in (*comparison.router.off, *comparison.router.conventions):
        largest = max((gap for gap in variant.max_loss_difference if gap is not None), default=None)
        rows.append(
            row(
                Plain(variant.convention),
                *map(cell, (variant.coef, variant.applied_coef, variant.s_rel, variant.absolute)),
                _by_seed(variant.entropy, 4),
                _by_seed(variant.load_cv, 3),
                cell(largest),
            )
        )
    columns = (
        Column("router loss", "text"), Column.of("router.coef"), Column.of("applied_coef"), Column.of("s_rel"),
        Column.of("absolute", f"{symbol('absolute')} per decision"), Column.of("entropy", f"{symbol('entropy')} by seed"),
        Column.of("load_cv", f"{symbol('load_cv')} by seed"), Column.of("max_loss_difference"),
    )  # fmt: skip
    return [
        Heading("Router losses", 3),
        Text(
            "Entropy in nat and load on the validation blocks; max |ΔL| is the largest difference of a training loss from the "
            "baseline's, over all steps and seeds. The load-balancing loss is the model's own term, about k at balance.",
            "lead",
        ),
        Table(columns, tuple(rows), name="numbers"),
    ]


def _by_seed(values: Sequence[float | None], digits: int) -> Cell:
    return Cell(" ".join(f"{value:.{digits}f}" for value in values if value is not None))


def _tokens(comparison: Comparison) -> list[str]:
    tokens = comparison.tokens
    sentences = []
    if tokens.available and tokens.consumed is not None:
        sentences.append(
            f"Tokens per run: {number(tokens.consumed)} consumed of {number(tokens.available)} available, reuse factor "
            f"{number(tokens.reuse)}."
        )
    if comparison.unfinished:
        sentences.append(f"Not finished, left out: {', '.join(comparison.unfinished)}.")
    if comparison.unpaired:
        sentences.append(f"Without a baseline run of their seed: {', '.join(comparison.unpaired)}.")
    return sentences


def training_figures(groups: Sequence[MethodCurves]) -> list[Figure]:
    """Curves over the steps, one colour per method, and the tail of gradient norms."""
    figures = []
    for key in CURVES:
        records = {group.name: group.curves.get(key) for group in groups}
        curves: Curves = {
            name: ((), ()) if found is None else (found.step, found.value) for name, found in records.items()
        }
        if any(ys for _, ys in curves.values()):
            figures.append(step_figure(key, curves))
    tails = {group.name: (group.norm_tail.norm, group.norm_tail.share) for group in groups}
    return [*figures, norm_tail_figure(tails)] if any(ys for _, ys in tails.values()) else figures


def step_figure(key: str, curves: Curves) -> Figure:
    """One quantity of `CURVES` over the steps, averaged over seeds step by step."""
    title, log = CURVES[key]
    caption = "Mean over seeds, in the coordinate that each method deploys." if key == "p_z_999" else "Mean over seeds."
    ys = [values for _, values in curves.values()]
    x = axis("step", linear_domain(*(steps for steps, _ in curves.values())))
    y = axis_of(key, (log_domain if log else linear_domain)(*ys), log=log)
    rows = _rows(curves, log_y=log)
    return Figure(
        key, title, chart(x, y, _series(curves), [lines(rows)]), _series(curves), caption, BY_KEY[key].hint, 380, 250
    )


def norm_tail_figure(curves: Curves) -> Figure:
    """The share of steps at or above each gradient norm; the largest 1 % of steps lie below the dotted line."""
    smallest = min((share for _, ys in curves.values() for share in ys if share), default=LARGEST_STEPS)
    wide = log_domain(*(norms for norms, _ in curves.values()))
    layers = [lines(_rows(curves, log_x=True, log_y=True))]
    caption = "Finite steps of all seeds together."
    if smallest < LARGEST_STEPS:
        layers.insert(0, reference(wide, (LARGEST_STEPS, LARGEST_STEPS)))
        caption += " Below the dotted line: the largest 1 % of steps, which a p99 leaves out."
    x, y = axis_of("grad_norm", wide, log=True), axis_of("norm_share", (smallest / 1.5, 1.2), log=True)
    spec = chart(x, y, _series(curves), layers)
    return Figure("norms", "Gradient norm tail", spec, _series(curves), caption, BY_KEY["norm_share"].hint, 380, 250)


def _series(curves: Curves) -> tuple[tuple[str, str], ...]:
    """A method without a curve in one figure keeps its colour in the others."""
    return tuple((name, colour_of(i)) for i, name in enumerate(curves))


def _rows(curves: Curves, *, log_x: bool = False, log_y: bool = False) -> list[Spec]:
    """One line per method. Matched variants lie on the line of the token-layer mean, so they are dashed."""
    return [
        curve(name, xs, ys, log_x=log_x, log_y=log_y, dash=MATCHED in name) for name, (xs, ys) in curves.items() if ys
    ]
