"""The drift over the checkpoints of a run as a document: the finding, curves, what moved, and every checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zloss.decide.drift import SHIFT_KEYS, DriftLimits
from zloss.decide.stages import signed
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
    Terms,
    Text,
    Tone,
    cell,
    table,
    terms,
)
from zloss.report.figures import CENTERED, RAW, TONES
from zloss.report.numbers import MISSING, number
from zloss.results.drift import Drift, DriftCheckpoint, Movement
from zloss.results.quantities import BY_KEY, NAMES, Definition, plain_name, symbol
from zloss.results.record import to_plain

NARROW = (
    ("raw", "mu_abs_99"), ("raw", "p_z_999"), ("centered", "p_z_999"),
    ("raw", "a_p_99"), ("centered", "a_p_99"), ("raw", "r_z"),
)  # fmt: skip
"""What fits a terminal of 80 columns next to step, PPL and ΔCE."""
STATES: dict[str, tuple[Tone, str]] = {
    "invisible": ("fired", "CE cannot see it"),
    "with_ce": ("open", "while CE moved"),
    "quiet": ("quiet", "did not move"),
    "open": ("open", "not evaluated"),
}
LIMITS = {
    "ppl_tolerance": "CE did not move: change of PPL up to this share",
    "least_ratio": "least change, as a share of the smaller value",
    "least_nats": f"least change of {symbol('mu_abs_99')}, {symbol('mu_rms')} and {symbol('p_z_999')}, in nats",
    "least_gain": f"least change of {symbol('a_p_99')}",
    "least_r_z": f"least change of {symbol('r_z')}",
    "least_share": f"least change of {symbol('e_1')}",
}
"""Limit → what it is."""
CURVES = {
    "drift_source": ("ppl", "mu_abs_99", "mu_rms", "p_z_999"),
    "drift_transport": ("a_p_99", "sigma_1", "e_1", "r_z"),
}
"""Name of a figure file → its quantities."""
WATCHED = [key for keys in CURVES.values() for key in keys if key != "ppl"]


def drift_document(drift: Drift) -> Document:
    """Everything about the drift over one run."""
    tolerance = drift.limits.get("ppl_tolerance", DriftLimits.ppl_tolerance)
    rule = (
        "A number moved if its change, minus the noise of the text, exceeds the limits below. CE did not move if the 95 % "
        f"interval of its paired change lies within {number(100 * tolerance)} % of PPL."
    )
    limits = tuple((LIMITS.get(key, Plain(key)), number(value)) for key, value in drift.limits.items())
    panels = [figure for group in drift_figures(drift).values() for figure in group]
    return [
        Heading(Plain(drift.model), 1),
        Text(
            f"{len(drift.checkpoints)} checkpoints on {drift.corpus}, "
            f"{number(drift.blocks * drift.block_size)} predictions each.",
            "lead",
        ),
        Group("verdict", tuple(_verdict(drift))),
        *(Text(note, "soft") for note in drift.notes),
        Group("three", tuple(panels)),
        Heading("What moved", 3),
        Text(rule, "lead"),
        *_movements(drift),
        Heading("Checkpoints", 3),
        Text("ΔCE is in nats per token from the checkpoint before, on the same blocks.", "lead"),
        Heading("Raw head", 4),
        _checkpoints(drift, [("raw", key) for key in WATCHED]),
        Heading("Centered head", 4),
        _checkpoints(drift, [("centered", key) for key in WATCHED if key not in SHIFT_KEYS]),
        Group("columns", (Terms(limits, "Limits"), terms("Provenance", to_plain(drift.provenance)))),
    ]


def drift_summary(drift: Drift) -> Document:
    """What a terminal shows: the finding and the checkpoints."""
    predictions = number(drift.blocks * drift.block_size)
    return [
        Heading(Plain(f"{drift.model}: {len(drift.checkpoints)} checkpoints on {drift.corpus}"), 1),
        *_verdict(drift),
        Text(f"{predictions} predictions, ΔCE in nats from the checkpoint before", "soft"),
        _checkpoints(drift, NARROW, digits=3),
        *(Text(note) for note in drift.notes),
    ]


def _verdict(drift: Drift) -> list[Text]:
    """The first sentence of the finding, which is the answer, and the rest."""
    first, stop, rest = drift.finding.partition(". ")
    return [Text(first + stop.strip(), "answer"), *([Text(rest)] if rest else [])]


def _movements(drift: Drift) -> Document:
    """What moved or could not be evaluated, and the names of the rest."""
    shown = [one for one in drift.movements if one.state != "quiet"]
    still = "; ".join(_movement_name(one) for one in drift.movements if one.state == "quiet")
    columns: Columns = (
        (Column("number", "text"), _movement_name),
        (Column("verdict", "text"), lambda one: Cell(STATES[one.state][1], STATES[one.state][1], STATES[one.state][0])),
        ("noise", "noise"),
        (Column("what was seen", "prose"), lambda one: one.reason),
    )
    return [
        *([table(shown, columns, name="movements")] if shown else []),
        *([Text(f"Did not move: {still}.", "soft")] if still else []),
    ]


def _checkpoints(drift: Drift, numbers: Sequence[tuple[str, str]], digits: int = 4) -> Table:
    """A line per checkpoint; ΔCE is from the checkpoint before, and steps from the drift on stand out."""
    one_head = len({coordinate for coordinate, _ in numbers}) == 1
    later = zip(drift.checkpoints[1:], drift.ce_changes, strict=True)
    changes = {one.step: change.difference for one, change in later}

    def step(one: DriftCheckpoint) -> Cell:
        return Cell(str(one.step), one.step, "fired" if drift.began is not None and one.step >= drift.began else "")

    def change(one: DriftCheckpoint) -> Cell:
        """A change of CE in nats, 0 where it is below 1e-4."""
        if one.step not in changes:
            return Cell("", None)
        value = changes[one.step]
        return Cell(MISSING if value is None else "0" if abs(value) < 1e-4 else signed(value, 2), value)

    columns: Columns = (
        ("step", step),
        (Column.of("ppl"), "ppl"),
        ("ΔCE", change),
        *(
            (
                Column.of(key, "" if key in SHIFT_KEYS or one_head else f"{symbol(key)}\n{coordinate}"),
                lambda one, coordinate=coordinate, key=key: cell(getattr(getattr(one, coordinate), key), digits),
            )
            for coordinate, key in numbers
        ),
        (Column("checkpoint", "text", wide=True), lambda one: Plain(one.name)),
    )
    legend = tuple(_defined(key) for key in dict.fromkeys(key for _, key in NARROW))
    return table(drift.checkpoints, columns, digits=digits, legend=legend, name="numbers")


def _defined(key: str) -> Definition:
    """The quantity as these tables have it: of a common shift, only the raw head."""
    found = BY_KEY[key]
    return replace(found, meaning=found.meaning.partition(" (centered:")[0]) if key in SHIFT_KEYS else found


def _movement_name(movement: Movement) -> str:
    """Plain name, symbol and coordinate; a common shift exists in raw logits only."""
    name = plain_name(movement.quantity)
    return name if movement.quantity in SHIFT_KEYS else f"{name}, {movement.coordinate}"


def drift_figures(drift: Drift) -> dict[str, list[Figure]]:
    """Name of the figure file → its panels, as far as the record has data for them."""
    return {
        name: [figure for key in keys if (figure := _curves(drift, key)) is not None] for name, keys in CURVES.items()
    }


def _curves(drift: Drift, key: str) -> Figure | None:
    """A number over the steps, raw and centered; a dashed line where its drift is first seen."""
    heads = {"PPL": ""} if key == "ppl" else {RAW: "raw"} if key in SHIFT_KEYS else {RAW: "raw", CENTERED: "centered"}
    found: dict[str, fig.Spec] = {}
    for name, coordinate in heads.items():
        values = {one.step: getattr(getattr(one, coordinate, one), key) for one in drift.checkpoints}
        known = {step: value for step, value in values.items() if value is not None}
        if known:
            found[name] = fig.curve(name, list(known), list(known.values()))
    if not found:
        return None
    drawn = [value for row in found.values() for value in row["y"] if value is not None]
    share = drift.limits.get("ppl_tolerance", 0.0) if key == "ppl" and drawn else 0.0
    # PPL within its tolerance must look still: the axis spans at least the tolerance on both sides.
    still = [min(drawn) * (1 - share), max(drawn) * (1 + share)] if share else []
    seen = [one for one in drift.invisible if one.quantity == key and one.began is not None]
    marks = {RAW if one.coordinate == "raw" else CENTERED: float(one.began or 0) for one in seen}
    steps = fig.axis("step", fig.linear_domain([float(one.step) for one in drift.checkpoints]))
    return fig.panel(
        key,
        NAMES[key],
        (steps, fig.axis_of(key, fig.linear_domain(drawn, still, margin=0.08))),
        ((name, TONES.get(name, fig.color_of(0))) for name in found),
        [*([fig.rules(marks)] if marks else []), fig.lines(list(found.values()), points=60)],
        _caption(drift, key, seen),
        of=key,
    )


def _caption(drift: Drift, key: str, seen: Sequence[Movement]) -> str:
    """What the number did while CE did not move, or that it did not move: an axis shows small changes large."""
    said = [
        f"{one.coordinate.capitalize()}: {number(one.before)} → {number(one.after)} while CE did not move, first seen at step "
        f"{one.began}."
        for one in seen
    ]
    of_key = [one for one in drift.movements if one.quantity == key]
    quiet = [one.coordinate for one in of_key if one.state == "quiet"]
    if quiet:
        said.append("Did not move." if len(quiet) == len(of_key) else f"{quiet[0].capitalize()}: did not move.")
    return " ".join(said)
