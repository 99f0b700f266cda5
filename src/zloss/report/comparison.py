"""A comparison of matched training runs as a document: verdicts, means, paired differences, routers, curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zloss.report import figures as fig
from zloss.report.document import (
    Cell,
    Column,
    Columns,
    Document,
    Figure,
    Group,
    Heading,
    Plain,
    Table,
    Text,
    Tone,
    cell,
    table,
    terms,
)
from zloss.report.numbers import MISSING, number
from zloss.results.comparison import (
    ComparedMethod,
    Comparison,
    MethodCurves,
    RouterVariant,
    RouterVariants,
    SeedDifference,
    SeedSummary,
    Verdict,
)
from zloss.results.quantities import define, symbol

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
FEW_MEANS = 3
"""Columns of the short table."""
NO_VERDICT = "no verdict"
PARTS = {"quality": "quality", "coordinate": "diagnosed coordinate", "optimizer": "optimizer"}
METHOD = (Column("method", "text"), lambda method: Plain(method.label))
"""The column of names."""
WORDS: dict[str, Tone] = {"accepted": "pass", "rejected": "fired", "holds": "pass", "fails": "fired"}
"""Verdicts and states of their parts that are more than open."""
WORDS_OF_VERDICTS = (
    "Accepted: quality, the quantity the method should lower, and the optimizer all hold; rejected: one fails (“no effect”: "
    "the quantity did not fall); inconclusive: not enough runs to tell."
)
"""What the words of a verdict mean, for the short summary."""
TWO_COORDINATES = (
    "Tails of raw and of centered logits are not comparable line by line; paired differences are in one coordinate."
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
Curves = Mapping[str, tuple[fig.Values, fig.Values]]
"""Name of a method → its values over steps or norms; empty ones where it has none."""


def comparison_document(comparison: Comparison) -> Document:
    """Everything about one comparison."""
    keys = list(dict.fromkeys(name for method in comparison.methods for name in method.metrics))
    figures = training_figures(comparison.curves)
    details = terms("Details", comparison.to_dict(), skip=("schema", "methods", "quality", "router", "curves"))
    trained: Document = [Heading("Training", 3), Group("three", tuple(figures))] if figures else []
    means: Document = [
        Heading("Metrics", 3),
        Text(_means_sentence(comparison), "lead"),
        _means(comparison, keys, plain=True),
        *_two_coordinates(comparison),
    ]
    return [
        *([Group("verdict", (Text(text, "answer"),))] if (text := answer(comparison)) else []),
        *_verdicts(comparison),
        *_differences(comparison),
        *trained,
        *(means if comparison.methods else []),
        *([Group("columns", (details,))] if details.items else []),
    ]


def comparison_summary(comparison: Comparison, *, verbose: bool = True) -> Document:
    """What comparison.md and, with `verbose`, a terminal show: the answer, means, paired differences, verdicts, tokens.

    Without `verbose` the answer, what decided on each method, and the first means.
    """
    keys = _estimable(MEANS if comparison.router is None else MEANS_ROUTED, comparison)
    tokens, notes = comparison.tokens, []
    opening: Document = [Text(text, "strong")] if (text := answer(comparison)) else []
    if verbose and tokens.available and tokens.consumed is not None:
        notes.append(
            f"Tokens per run: {number(tokens.consumed)} consumed of {number(tokens.available)} available, reuse factor "
            f"{number(tokens.reuse)}."
        )
    if comparison.unfinished:
        notes.append(f"Not finished, left out: {', '.join(comparison.unfinished)}.")
    if comparison.unpaired:
        notes.append(f"Without a baseline run of their seed: {', '.join(comparison.unpaired)}.")
    if not verbose:
        decided = (
            f"{one.label}: {'; '.join(filter(None, (verdict_word(one), one.reason)))}"
            for one in comparison.quality.methods
        )
        more = "All means, paired differences and verdicts: --verbose, or the page."
        return [
            *opening,
            *(Text(sentence, "item") for sentence in decided),
            *([Text(WORDS_OF_VERDICTS, "soft")] if comparison.quality.methods else []),
            _means(comparison, keys[:FEW_MEANS], legend=False),
            *_two_coordinates(comparison),
            *map(Text, notes),
            Text(more, "soft"),
        ]
    return [
        *opening,
        Text(_means_sentence(comparison)),
        _means(comparison, keys),
        *_two_coordinates(comparison),
        *_differences(comparison),
        *_verdicts(comparison),
        *map(Text, notes),
    ]


def comparison_page(comparison: Comparison) -> Document:
    """comparison.md: the summary under its title, with how the runs were produced."""
    made: Document = []
    if (provenance := comparison.provenance) is not None:
        plural, minutes = "" if provenance.threads == 1 else "s", round(provenance.seconds / 60)
        made = [
            *(Text(command, "code") for command in provenance.commands),
            Text(
                f"{provenance.runs} run{'' if provenance.runs == 1 else 's'} in {minutes} "
                f"minute{'' if minutes == 1 else 's'}, training and validation, on "
                f"{provenance.threads} thread{plural}; zloss {provenance.zloss}, torch {provenance.torch}."
            ),
        ]
    return [Heading("Matched training runs", 1), *made, *comparison_summary(comparison)]


def answer(comparison: Comparison) -> str:
    """The verdicts in one sentence, accepted methods first; empty if there is no verdict."""
    found: dict[str, list[str]] = {"accepted": [], "rejected": [], "inconclusive": [], NO_VERDICT: []}
    for verdict in comparison.quality.methods:
        found.setdefault(verdict_word(verdict), []).append(verdict.label.replace(", λ", " λ"))
    be = {True: "is", False: "are"}
    parts = [
        f"{', '.join(labels)} {'has' if len(labels) == 1 else 'have'} {word}"
        if word == NO_VERDICT
        else f"{', '.join(labels)} {be[len(labels) == 1]} {word}"
        for word, labels in found.items()
        if labels
    ]
    if not parts:
        return ""
    said = "; ".join(parts)
    return f"{said[0].upper()}{said[1:]}." if found["accepted"] else f"No method is accepted: {said}."


def verdict_word(verdict: Verdict) -> str:
    """ "accepted", "rejected", "inconclusive" or "no verdict"."""
    return verdict.verdict or {True: "accepted", False: "rejected", None: NO_VERDICT}[verdict.accepted]


def _verdicts(comparison: Comparison) -> Document:
    """A word for each method and its three parts, and what a reader needs to know about them."""
    quality, compared, seeds = comparison.quality, len(comparison.quality.methods), len(comparison.seeds)
    if not compared:
        return []
    notes = [
        "Rejected if any part fails, accepted if all three hold, otherwise inconclusive: an open part names what would "
        "settle it."
    ]
    if quality.tolerance_ppl is not None:
        notes.append(f"PPL may rise by {quality.tolerance_ppl:.4g} ({quality.tolerance}).")
    notes.append(
        f"{compared} method{'s' if compared > 1 else ''} compared; each bound is one-sided at 95 % for one method "
        "alone, so among many methods some bound is wrong more often than that."
    )
    if quality.seed_varies:
        notes.append(f"{seeds} seed{'s' if seeds != 1 else ''}; a seed varies {quality.seed_varies}.")
    tolerance = cell(quality.tolerance_ppl)
    more: Columns = (("PPL difference", "delta_ppl"), ("tolerance", lambda verdict: tolerance))
    return [Heading("Verdicts", 3), Text(" ".join(notes), "lead"), verdict_table(quality.methods, more)]


def verdict_table(verdicts: Sequence[Verdict], more: Columns = ()) -> Table:
    """A line per verdict: its method, `more`, its word, and each part with its state and reason."""

    def stated(verdict: Verdict) -> Cell:
        word = verdict_word(verdict)
        explained = verdict.verdict is not None and verdict.parts is not None and verdict.parts.named()
        return Cell(word, word, WORDS.get(word, "open"), note="" if explained else verdict.reason)

    def part(verdict: Verdict, name: str) -> Cell:
        found = getattr(verdict.parts, name, None)
        return (
            Cell(MISSING)
            if found is None
            else Cell(found.reason, found.state, WORDS.get(found.state, "open"), found.state)
        )

    columns: Columns = (
        METHOD,
        *more,
        (Column("verdict", "text"), stated),
        *((Column(title, "prose"), lambda verdict, name=name: part(verdict, name)) for name, title in PARTS.items()),
    )
    return table(verdicts, columns, name="quality")


def _estimable(keys: Sequence[str], comparison: Comparison) -> list[str]:
    """The keys without the p99 over steps where the runs have fewer than 100 steps."""
    return [key for key in keys if not (comparison.has_few_steps and key == "grad_norm_p99")]


def _means_sentence(comparison: Comparison) -> str:
    seeds = ", ".join(str(seed) for seed in comparison.seeds)
    return f"Mean ± sample standard deviation over seeds {seeds}, in the coordinate each method deploys:"


def _means(comparison: Comparison, keys: Sequence[str], *, plain: bool = False, legend: bool = True) -> Table:
    """A line per method; `plain` columns are titled with their keys."""
    columns = [
        (Column.of(key, Plain(key) if plain else ""), lambda method, key=key: _spread(method.metrics.get(key)))
        for key in keys
    ]
    explained = tuple(found for key in keys if (found := define(key)) is not None) if legend and not plain else ()
    return table(comparison.methods, (METHOD, *columns), legend=explained, name="numbers")


def _two_coordinates(comparison: Comparison) -> Document:
    """What keeps means from being compared, where methods deploy different coordinates; those of routers have none."""
    deployed = {method.coordinate for method in comparison.methods} - {None}
    return [Text(TWO_COORDINATES)] if len(deployed) > 1 and comparison.router is None else []


def _spread(found: SeedSummary | SeedDifference | None) -> Cell:
    """A mean over seeds with its standard deviation."""
    if found is None:
        return Cell(MISSING)
    return Cell(number(found.mean) + (f" ± {number(found.std, 2)}" if found.std else ""), found.mean)


def _differences(comparison: Comparison) -> Document:
    """Method minus baseline, seed by seed; router losses; where a method without a penalty departs from the baseline."""
    baseline, routed = comparison.baseline_method, comparison.router is not None
    name = comparison.baseline if baseline is None else baseline.label
    paired = [method for method in comparison.methods if method.paired is not None]
    keys = _estimable(PAIRED_ROUTED if routed else PAIRED, comparison)
    columns: Columns = (
        METHOD,
        *(
            (Column.of(key, f"Δ {symbol(key)}"), lambda method, key=key: _spread(_difference(method, key)))
            for key in keys
        ),
        *([] if routed else [(Column("tails in", "text"), lambda method: method.coordinate or MISSING)]),
    )
    said = (
        f"Method minus {name}, seed by seed, mean ± standard deviation; quantities of the head in the coordinate the method "
        "deploys, for both."
    )
    coordinates = [verdict.parts.coordinate for verdict in comparison.quality.methods if verdict.parts is not None]
    if any(part is not None and "target" in part.numbers for part in coordinates):
        said += " P_Z and Diag Z are measured from c = log V here; verdicts at another c say so."
    document: Document = []
    if paired:
        document = [Heading("Paired differences", 3), Text(said, "lead"), table(paired, columns, name="numbers")]
    if comparison.router is not None:
        return [*document, *_router_losses(comparison.router)]
    return [*document, *(Text(_trajectories(method, comparison.baseline)) for method in paired if not method.coef)]


def _difference(method: ComparedMethod, key: str) -> SeedDifference | None:
    assert method.paired is not None
    return method.paired.same_coordinate.of(method.coordinate).get(key) or method.paired.deployed.get(key)


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


def _router_losses(router: RouterVariants) -> Document:
    """Scale and routing of every router variant, seed by seed."""

    def by_seed(values: Sequence[float | None], digits: int) -> Cell:
        return Cell(" ".join(f"{value:.{digits}f}" for value in values if value is not None))

    def largest(variant: RouterVariant) -> Cell:
        return cell(max((gap for gap in variant.max_loss_difference if gap is not None), default=None))

    columns: Columns = (
        (Column("router loss", "text"), lambda variant: Plain(variant.convention)),
        (Column.of("router.coef"), "coef"),
        (Column.of("applied_coef"), "applied_coef"),
        (Column.of("s_rel"), "s_rel"),
        (Column.of("absolute", f"{symbol('absolute')} per decision"), "absolute"),
        (Column.of("entropy", f"{symbol('entropy')} by seed"), lambda variant: by_seed(variant.entropy, 4)),
        (Column.of("load_cv", f"{symbol('load_cv')} by seed"), lambda variant: by_seed(variant.load_cv, 3)),
        (Column.of("max_loss_difference"), largest),
    )
    return [
        Heading("Router losses", 3),
        Text(
            "Entropy in nat and load on the validation blocks; max |ΔL| is the largest difference of a training loss from the "
            "baseline's, over all steps and seeds. The load-balancing loss is the model's own term, about k at balance.",
            "lead",
        ),
        table((*router.off, *router.conventions), columns, name="numbers"),
    ]


def training_figures(groups: Sequence[MethodCurves]) -> list[Figure]:
    """Curves over the steps, one color per method, and the tail of gradient norms."""
    figures = []
    for key in CURVES:
        found = {group.name: group.curves.get(key) for group in groups}
        curves: Curves = {name: ((), ()) if one is None else (one.step, one.value) for name, one in found.items()}
        if any(ys for _, ys in curves.values()):
            figures.append(step_figure(key, curves))
    tails = {group.name: (group.norm_tail.norm, group.norm_tail.share) for group in groups}
    return [*figures, norm_tail_figure(tails)] if any(ys for _, ys in tails.values()) else figures


def step_figure(key: str, curves: Curves) -> Figure:
    """One quantity of `CURVES` over the steps, averaged over seeds step by step."""
    title, log = CURVES[key]
    caption = "Mean over seeds, in the coordinate that each method deploys." if key == "p_z_999" else "Mean over seeds."
    x = fig.axis("step", fig.linear_domain(*(steps for steps, _ in curves.values())))
    y = fig.axis_of(key, (fig.log_domain if log else fig.linear_domain)(*(ys for _, ys in curves.values())), log=log)
    return _methods_figure(key, title, (x, y), curves, caption, log_y=log)


def norm_tail_figure(curves: Curves) -> Figure:
    """The share of steps at or above each gradient norm; the largest 1 % of steps lie below the dotted line."""
    smallest = min((share for _, ys in curves.values() for share in ys if share), default=LARGEST_STEPS)
    wide = fig.log_domain(*(norms for norms, _ in curves.values()))
    below, caption = [], "Finite steps of all seeds together."
    if smallest < LARGEST_STEPS:
        below = [fig.reference(wide, (LARGEST_STEPS, LARGEST_STEPS))]
        caption += " Below the dotted line: the largest 1 % of steps, which a p99 leaves out."
    axes = fig.axis_of("grad_norm", wide, log=True), fig.axis_of("norm_share", (smallest / 1.5, 1.2), log=True)
    return _methods_figure(
        "norms", "Gradient norm tail", axes, curves, caption, below, of="norm_share", log_x=True, log_y=True
    )


def _methods_figure(
    name: str,
    title: str,
    axes: tuple[fig.Spec, fig.Spec],
    curves: Curves,
    caption: str,
    below: Sequence[fig.Spec] = (),
    *,
    of: str = "",
    **log: bool,
) -> Figure:
    """One line per method; a method without a curve in one figure keeps its color in the others.

    Matched variants lie on the line of the token-layer mean, so they are dashed.
    """
    rows = [fig.curve(method, xs, ys, **log, dash=MATCHED in method) for method, (xs, ys) in curves.items() if ys]
    series = ((method, fig.color_of(i)) for i, method in enumerate(curves))
    return fig.panel(
        name, title, axes, series, [*below, fig.lines(rows)], caption, of=of or name, width=380, height=250
    )
