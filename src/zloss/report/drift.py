"""The drift over the checkpoints of a run as a document: the finding, curves, what moved, and every checkpoint."""

from __future__ import annotations

from zloss.decide.drift import SHIFT_KEYS, DriftLimits
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
    terms,
)
from zloss.report.figures import (
    CENTERED,
    RAW,
    TONES,
    Spec,
    axis,
    axis_of,
    chart,
    colour_of,
    curve,
    linear_domain,
    lines,
    rules,
)
from zloss.report.numbers import MISSING, number
from zloss.results.drift import Drift, Movement
from zloss.results.quantities import BY_KEY, define, symbol
from zloss.results.record import to_plain

COLUMNS: tuple[tuple[str, str], ...] = (
    # coordinate, key
    ("raw", "mu_abs_99"),
    ("raw", "mu_rms"),
    ("raw", "p_z_999"),
    ("centered", "p_z_999"),
    ("raw", "a_p_99"),
    ("centered", "a_p_99"),
    ("raw", "sigma_1"),
    ("centered", "sigma_1"),
    ("raw", "e_1"),
    ("centered", "e_1"),
    ("raw", "r_z"),
    ("centered", "r_z"),
)
NARROW = COLUMNS[:1] + COLUMNS[2:6] + COLUMNS[10:11]
"""What fits a terminal of 80 columns next to step, PPL and ΔCE."""
STATES: dict[str, tuple[Tone, str]] = {
    "invisible": ("fired", "CE cannot see it"),
    "with_ce": ("open", "while CE moved"),
    "quiet": ("quiet", "did not move"),
    "open": ("open", "not evaluated"),
}
CURVES = {
    "drift_source": {
        "ppl": "Perplexity",
        "mu_abs_99": "Common shift, tail",
        "mu_rms": "Common shift, root mean square",
        "p_z_999": "Log-normalizer tail",
    },
    "drift_transport": {
        "a_p_99": "Gain tail",
        "sigma_1": "Spectral norm of the head",
        "e_1": "Energy of the first direction",
        "r_z": "Z gradient over CE gradient",
    },
}
"""Name of a figure file → its quantities and their titles."""


def drift_document(drift: Drift) -> Document:
    """Everything about the drift over one run."""
    tolerance = drift.limits.get("ppl_tolerance", DriftLimits.ppl_tolerance)
    rule = (
        "A number moved where its change, less the noise of the text, exceeds the limits below. CE stood still where the 95 % "
        f"interval of its paired change lies within {number(100 * tolerance)} % of PPL."
    )
    panels = [figure for group in drift_figures(drift).values() for figure in group]
    return [
        Heading(Plain(drift.model), 1),
        Text(
            f"{len(drift.checkpoints)} checkpoints on {drift.corpus}, "
            f"{number(drift.blocks * drift.block_size)} predictions each.",
            "lead",
        ),
        Heading("Drift", 2),
        Text(drift.finding, "answer"),
        *(Text(note, "soft") for note in drift.notes),
        Group("three", tuple(panels)),
        Heading("What moved", 3),
        Text(rule, "lead"),
        _movements(drift),
        Heading("Checkpoints", 3),
        Text("ΔCE is in nats per token from the checkpoint before, on the same blocks.", "lead"),
        _checkpoints(drift, COLUMNS),
        Group("columns", (terms("Limits", drift.limits), terms("Provenance", to_plain(drift.provenance)))),
    ]


def drift_summary(drift: Drift) -> Document:
    """What a terminal shows: the checkpoints, the finding, and what moved."""
    moved = tuple(
        (
            Cell(_movement_name(movement), tone=STATES[movement.state][0]),
            f"{number(movement.before)} → {number(movement.after)}",
            f"first seen at step {movement.began}, {STATES[movement.state][1]}",
        )
        for movement in drift.movements
        if movement.state in ("invisible", "with_ce")
    )
    untitled = (Column("", "text"), Column("", "text"), Column("", "prose"))
    predictions = number(drift.blocks * drift.block_size)
    return [
        Heading(Plain(f"{drift.model}: {len(drift.checkpoints)} checkpoints on {drift.corpus}"), 1),
        Text(f"{predictions} predictions, ΔCE in nats from the checkpoint before", "soft"),
        _checkpoints(drift, NARROW, digits=3),
        *(Text(note) for note in drift.notes),
        Text(drift.finding, "strong"),
        *([Table(untitled, moved)] if moved else []),
    ]


def _movements(drift: Drift) -> Table:
    rows = tuple(
        (
            _movement_name(movement),
            Cell(STATES[movement.state][1], STATES[movement.state][1], STATES[movement.state][0]),
            cell(movement.before),
            cell(movement.after),
            cell(movement.noise),
            cell(movement.began),
            movement.reason,
        )
        for movement in drift.movements
    )
    columns = (
        Column("number", "text"), Column("verdict", "text"), Column("before"), Column("after"), Column("noise"),
        Column("first seen at step"), Column("what was seen", "prose"),
    )  # fmt: skip
    return Table(columns, rows, name="movements")


def _checkpoints(drift: Drift, columns: tuple[tuple[str, str], ...], digits: int = 4) -> Table:
    """A line per checkpoint; ΔCE is from the checkpoint before, and steps from the drift on stand out."""
    rows: list[Row] = []
    for i, checkpoint in enumerate(drift.checkpoints):
        change = drift.ce_changes[i - 1].difference if i else None
        drifted = drift.began is not None and checkpoint.step >= drift.began
        rows.append(
            (
                Cell(str(checkpoint.step), checkpoint.step, "fired" if drifted else ""),
                cell(checkpoint.ppl, digits),
                Cell(_signed(change) if i else "", change),
                *(cell(getattr(getattr(checkpoint, coordinate), key), digits) for coordinate, key in columns),
                Plain(checkpoint.name),
            )
        )
    titles = (
        Column.of(key) if key in SHIFT_KEYS else Column.of(key, f"{symbol(key)}\n{coordinate}")
        for coordinate, key in columns
    )
    legend = tuple(BY_KEY[key] for key in dict.fromkeys(key for _, key in NARROW))
    named = Column("checkpoint", "text", wide=True)
    return Table(
        (Column("step"), Column.of("ppl"), Column("ΔCE"), *titles, named), tuple(rows), legend=legend, name="numbers"
    )


def _movement_name(movement: Movement) -> str:
    """Symbol and coordinate."""
    if movement.quantity in SHIFT_KEYS:
        return symbol(movement.quantity)
    return f"{symbol(movement.quantity)}, {movement.coordinate}"


def _signed(value: float | None) -> str:
    """A change of CE in nats, 0 where it is below 1e-4."""
    if value is None:
        return MISSING
    return "0" if abs(value) < 1e-4 else f"{value:+.2g}"


def drift_figures(drift: Drift) -> dict[str, list[Figure]]:
    """Name of the figure file → its panels, as far as the record has data for them."""
    return {
        name: [figure for key, title in titles.items() if (figure := _curves(drift, key, title)) is not None]
        for name, titles in CURVES.items()
    }


def _curves(drift: Drift, key: str, title: str) -> Figure | None:
    """A number over the steps, raw and centered; a dashed line where its drift is first seen."""
    found: dict[str, Spec] = {}
    heads = {"PPL": None} if key == "ppl" else {RAW: "raw"} if key in SHIFT_KEYS else {RAW: "raw", CENTERED: "centered"}
    for name, coordinate in heads.items():
        values = [getattr(one if coordinate is None else getattr(one, coordinate), key) for one in drift.checkpoints]
        pairs = [(one.step, value) for one, value in zip(drift.checkpoints, values, strict=True) if value is not None]
        if pairs:
            found[name] = curve(name, [step for step, _ in pairs], [value for _, value in pairs])
    if not found:
        return None
    drawn = [value for row in found.values() for value in row["y"] if value is not None]
    share = drift.limits.get("ppl_tolerance", 0.0) if key == "ppl" and drawn else 0.0
    # PPL within its tolerance must look still: the axis spans at least the tolerance on both sides.
    still = [min(drawn) * (1 - share), max(drawn) * (1 + share)] if share else []
    seen = {
        RAW if movement.coordinate == "raw" else CENTERED: movement
        for movement in drift.invisible
        if movement.quantity == key and movement.began is not None
    }
    caption = " ".join(
        f"{movement.coordinate.capitalize()}: {number(movement.before)} → {number(movement.after)} while CE stood still, "
        f"first seen at step {movement.began}."
        for movement in seen.values()
    )
    series = tuple((name, TONES.get(name, colour_of(0))) for name in found)
    marks = [rules({name: float(movement.began or 0) for name, movement in seen.items()})] if seen else []
    spec = chart(
        axis("step", linear_domain([float(one.step) for one in drift.checkpoints])),
        axis_of(key, linear_domain(drawn, still, margin=0.08)),
        series,
        [*marks, lines(list(found.values()), points=60)],
    )
    quantity = define(key)
    return Figure(key, title, spec, series, caption, "" if quantity is None else quantity.hint)
