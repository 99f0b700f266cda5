"""Routers as documents: the section of an audit, a measured router scale, and a coefficient under every convention."""

from __future__ import annotations

from zloss.report.document import (
    Block,
    Cell,
    Column,
    Columns,
    Document,
    Group,
    Heading,
    Plain,
    Table,
    Terms,
    Text,
    table,
)
from zloss.report.numbers import MISSING, number
from zloss.results.quantities import BY_KEY, Definition, coefficient, define, symbol
from zloss.results.router import MeasuredScale, RouterFindings, RouterScaleTable, RouterTail

SCORING = {
    "softmax": "softmax over experts",
    "sigmoid": "a sigmoid for each expert",
    "other": "another function of each expert's own logit",
    "unknown": "not stated by the model",
}
TAIL = (("mean", "mean"), ("p50", "median"), ("p99", "p99"), ("p999", "p99.9"))
Line = tuple[str, str, str]
"""Name, number, and what the number is."""


def findings_document(router: RouterFindings, *, layers: bool = False) -> Document:
    """What was measured, what is hypothetical, what the model's own loss applies; with `layers` also every router."""
    measured = [
        ("scoring", SCORING[router.scoring], ""),
        ("routers L", number(router.layers), ""),
        ("experts E", number(router.experts), ""),
        ("experts per token k", number(router.top_k), ""),
        ("routing decisions", number(router.decisions), "tokens times routers that were counted"),
        *([("nonfinite decisions", number(router.nonfinite), "")] if router.nonfinite else []),
        *_tail("log Z_R", router.log_z),
        *_tail("|log Z_R − c_R|", router.violation),
        _line("entropy", number(router.entropy), " (nat)"),
        _line("load_cv", number(router.load_cv)),
    ]
    groups: list[Block] = [_named("Routers, measured on the text", measured)]
    if router.absolute is not None:
        projected = [
            ("c_R", number(router.target), "target of log Z_R"),
            _line("s_rel", number(router.relative)),
            _line("router_absolute", coefficient(router.absolute)),
            _line("router_correction_norm", number(router.correction_norm)),
        ]
        groups.append(_named(f"Router Z-loss: {router.projection}", projected))
    notes = [f"{reason[0].upper()}{reason[1:]}." for reason in router.reasons if reason]
    if router.applied is not None:
        title = "The model's own router Z-loss, measured from gradients"
        groups.append(_named(title, _scale_lines(router.applied)))
        notes.insert(0, router.applied.sentence)
    document: Document = [*(Text(note, "soft") for note in notes), Group("columns", tuple(groups))]
    if layers and router.per_layer:
        columns: Columns = (
            (Column("router", "text"), lambda layer: Plain(layer.name)),
            ("mean log Z_R", "log_z_mean"),
            (Column.of("entropy"), "entropy"),
            (Column.of("load_cv"), "load_cv"),
        )
        document.append(table(router.per_layer, columns, name="numbers"))
    return document


def measured_document(scale: MeasuredScale) -> Document:
    """The verdict on a measured scale in one sentence, then the numbers."""
    return [
        Heading(f"Measured router Z-loss{f': {scale.name}' if scale.name else ''}", 3),
        Text(scale.sentence, "lead"),
        Group("columns", (_named("Measured from gradients", _scale_lines(scale)),)),
    ]


def router_scale_document(scales: RouterScaleTable, *, matched: str | None = None, cited: bool = True) -> Document:
    """One line per convention, and what the columns hold; the source and `matched` stand out.

    With `cited` the place where each convention was read.
    """
    bold = (scales.source, matched)
    columns: Columns = (
        (
            Column("convention", "text"),
            lambda one: Cell(Plain(one.convention), tone="strong" if one.convention in bold else ""),
        ),
        ("s_rel", lambda one: Cell(f"{one.relative:.6g}{'' if one.uniform else ' (mean)'}", one.relative)),
        ("λα", lambda one: Cell(f"{one.absolute:.4g}", one.absolute)),
        ("equal λ_R", lambda one: Cell("none" if one.equal_coef is None else f"{one.equal_coef:.6g}", one.equal_coef)),
        *([(Column("read from", "prose"), lambda one: Cell(Plain(one.cited), tone="soft"))] if cited else []),
    )
    legend = [
        ("s_rel", f"{BY_KEY['s_rel'].meaning}; 1 under {scales.conventions[0].convention}"),
        (
            "λα",
            f"{BY_KEY['router_absolute'].meaning}, with T = {scales.tokens} tokens in each of L = {scales.layers} layers",
        ),
        ("equal λ_R", f"the coefficient that applies what {scales.coef:g} applies under {scales.source}"),
        (
            "c_R",
            "the target of log Z_R is not part of the scale. Most codebases use 0, and `zloss.router_loss` uses log E: with "
            "their coefficients, pass target=0.0",
        ),
    ]
    if not all(scale.uniform for scale in scales.conventions):
        legend.append(("(mean)", "layers have different scales; this is the mean over routing decisions"))
    return [
        Heading(f"Router Z-loss, λ_R = {scales.coef:g} under {scales.source}", 3),
        Text(
            f"L = {scales.layers} routers, k = {scales.top_k} experts per token, T = {scales.tokens} tokens per layer and batch.",
            "lead",
        ),
        table(scales.conventions, columns, name="numbers"),
        Terms(tuple(legend)),
    ]


def _scale_lines(scale: MeasuredScale) -> list[Line]:
    """A measured scale; without s_rel where no squared log-normalizer explains the gradient."""
    lines = [_line("router.coef", coefficient(scale.coef))]
    if scale.verdict in ("explained", "nothing_applied"):
        lines += [
            _line("s_rel", number(scale.relative)),
            ("s_rel by layer", ", ".join(number(value) for value in scale.relative_per_layer), ""),
            _line("router_absolute", coefficient(scale.absolute)),
        ]
    if scale.target is not None and scale.verdict == "explained":
        lines.append(("c_R", number(scale.target), "target of log Z_R, recovered from the gradient"))
    if scale.padding_ratio is not None:
        lines.append(("padding", number(scale.padding_ratio), "weight of a masked decision relative to a counted one"))
    unexplained = "share of the gradient's norm that a weighted squared log-normalizer leaves unexplained"
    return [*lines, ("unexplained", number(scale.residual), unexplained)]


def _named(title: str, lines: list[Line]) -> Table:
    """Numbers under their names."""
    columns: Columns = (
        (Column("", "text"), lambda line: Cell(line[0], quantity=Definition(line[0], *line[::2]) if line[2] else None)),
        (Column("", "prose"), lambda line: line[1]),
        (Column("", "prose"), lambda line: Cell(line[2], tone="soft")),
    )
    return table(lines, columns, title=title, name="small", sortable=False)


def _line(key: str, text: str, unit: str = "") -> Line:
    found = define(key)
    return symbol(key) + (unit if text != MISSING else ""), text, "" if found is None else found.meaning


def _tail(name: str, tail: RouterTail | None) -> list[Line]:
    if tail is None:
        return []
    return [(f"{word} {name} (nat)", number(getattr(tail, key)), "") for key, word in TAIL]
