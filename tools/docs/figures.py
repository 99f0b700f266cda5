"""The figures of docs/why.md, from committed results; the drawing of source → transport → optimizer; the graph of imports."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tools.docs.drawing import WIDE, Axis, arrow, bar, box, curve, dot, line, picture, text, x_axis, y_axis

DOCS = Path(__file__).parents[2] / "docs"
RESULTS, ARCHITECTURE = DOCS / "results", DOCS / "architecture.md"
BOX, GAP, STEP = 90, 11, 74
"""Size and distances of the boxes of packages.svg."""


def figures() -> dict[str, str]:
    """File name → SVG."""
    return {f"{draw.__name__}.svg": draw() for draw in (log_z, shift, gain, outliers, transport, packages)}


def _read(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def log_z() -> str:
    """Histograms over tokens of log Z − log V, raw and centered (audit of SmolLM2)."""
    report = _read("full_set/audit/report.json")
    x, y = Axis(0, 32, 70, 700), Axis(0, 0.25, 250, 20)
    parts = [*x_axis(x, 250, 20, range(0, 33, 4), "|log Z − log V| of a token, in nats")]
    parts += y_axis(y, 70, 700, (0, 0.05, 0.1, 0.15, 0.2, 0.25), "share of tokens")
    for kind in ("raw", "centered"):
        counts = [0] * 32
        for histogram in report["figures"]["histograms"]:
            if (histogram["quantity"], histogram["coordinate"]) == ("violation", kind):
                for left, count in zip(histogram["edges"], histogram["counts"], strict=False):
                    counts[int(left)] += count
        total = sum(counts)
        for i, count in enumerate(counts):
            if count:
                parts.append(
                    bar(x(i) + 1, y(count / total), x(i + 1) - x(i) - 2, 250 - y(count / total), f"{kind} faint")
                )
        tail = report["heads"][kind]["p_z_999"]
        parts.append(line(x(tail), 20, x(tail), 250, f"line dash edge-{kind}"))
        parts.append(text(x(tail) - 5, 34, f"p99.9 {kind}: {tail:.1f}", "small end"))
    parts += [bar(490, 62, 12, 12, "raw faint"), text(508, 73, "raw: log Z", "small")]
    parts += [bar(490, 82, 12, 12, "centered faint"), text(508, 93, "centered: log Z − μ", "small")]
    return picture(WIDE, 296, "Distance of log Z from log V over 512 tokens, raw and centered, SmolLM2-135M", parts)


def shift() -> str:
    """Mean log Z split into the common shift and the rest, after 100 steps under three methods (SmolLM2)."""
    methods = {entry["method"]: entry["heads"] for entry in _read("matched_smollm2.json")["methods"]}
    x = Axis(-6, 24, 190, 700)
    parts = x_axis(x, 170, 16, range(-5, 25, 5), "nats, mean over 16,384 validation tokens and two seeds")
    names = {
        "ce": "cross-entropy alone",
        "standard": "Standard Z-loss, λ = 1e-3",
        "centered": "Centered Z-loss, λ = 1e-3",
    }
    for i, (method, name) in enumerate(names.items()):
        raw, relative = (methods[method][coordinate]["log_z_mean"]["mean"] for coordinate in ("raw", "centered"))
        mu, top = raw - relative, 22 + 50 * i
        parts.append(text(180, top + 22, name, "small end"))
        parts.append(bar(x(0), top, x(relative) - x(0), 15, "centered faint"))
        parts.append(text(x(relative) - 6, top + 12, f"log Z − μ = {relative:.1f}", "small end"))
        parts.append(bar(min(x(0), x(mu)), top + 17, abs(x(mu) - x(0)), 15, "raw faint"))
        said = f"μ = {mu:+.1f}, so log Z = {raw:.1f}".replace("-", "−")
        parts.append(text(max(x(0), x(mu)) + 6, top + 29, said, "small"))
    parts.append(line(x(0), 16, x(0), 170, "line"))
    return picture(WIDE, 216, "Mean log Z of SmolLM2-135M after 100 steps, split into common shift and the rest", parts)


def gain() -> str:
    """‖δ_u‖ against ‖δ_z‖ of every token with lines of constant gain (audit of SmolLM2)."""
    geometry = _read("full_set/audit/report.json")["figures"]["geometry"]
    pairs = sorted(zip(geometry["delta_z_raw"], geometry["delta_u_raw"], strict=True))
    x, y = Axis(3e-5, 8e-3, 80, 700, log=True), Axis(1e-4, 5e-2, 300, 16, log=True)
    parts = x_axis(x, 300, 16, (1e-4, 3e-4, 1e-3, 3e-3), "‖δ_z‖: length of the source at the logits, λ = 1e-4")
    parts += y_axis(y, 80, 700, (1e-4, 1e-3, 1e-2), "‖δ_u‖ at the hidden state")
    for factor in (2, 10, 30):
        low, high = max(x.low, y.low / factor), min(x.high, y.high / factor)
        parts.append(line(x(low), y(low * factor), x(high), y(high * factor), "line dash"))
        at_the_side = high == x.high
        place = (x(high) - 4, y(high * factor) + 30) if at_the_side else (x(high) + 2, y(high * factor) + 16)
        parts.append(text(*place, f"gain {factor}", "soft small end" if at_the_side else "soft small"))
    inside = [(a, b) for a, b in pairs if x.low <= a <= x.high and y.low <= b <= y.high]
    parts += [dot(x(a), y(b), "raw faint") for a, b in inside]
    left_out = f"; {len(pairs) - len(inside)} smaller ones are not drawn" if len(inside) < len(pairs) else ""
    parts.append(text(92, 32, f"one dot is one of {len(pairs)} tokens{left_out}", "soft small"))
    return picture(
        WIDE, 346, "Length of the Z source at the hidden state against that at the logits, SmolLM2-135M", parts
    )


def outliers() -> str:
    """p99 of the gradient norm over steps under three losses, unclipped stress runs of a small model."""
    rows = {row["method"]: row for row in _read("tab_fineweb_update_outlier.json")["rows"]}
    x = Axis(1, 300, 190, 700, log=True)
    parts = x_axis(x, 130, 12, (1, 3, 10, 30, 100, 300), "p99 of the gradient norm over 200 steps, mean over two seeds")
    for i, (method, kind) in enumerate(
        (("CE baseline", "centered"), ("Standard Z-loss", "raw"), ("Gain-aware Z-loss", "third"))
    ):
        value, top = rows[method]["grad_norm_p99"], 18 + 36 * i
        parts.append(text(180, top + 16, method.replace("CE baseline", "cross-entropy alone"), "small end"))
        parts.append(bar(x(1), top, x(value) - x(1), 22, f"{kind} faint"))
        parts.append(text(x(value) + 6, top + 16, f"{value:.3g}", "small"))
    return picture(WIDE, 176, "p99 of the gradient norm under cross-entropy, Standard and Gain-aware Z-loss", parts)


TRANSPORT = (
    ("Implementation", "Are the logits rounded?", "Δ_src", "audit-loss"),
    ("Common shift", "Is it μ that is pushed?", "p99 |μ|", "audit"),
    ("Head", "δ_u = Wᵀδ_z: amplified?", "A_p", "audit"),
    ("Tied table", "Does the input path add?", "two paths", "audit"),
    ("Router", "Divided by k, or times k?", "s_rel", "router-scale"),
)
"""Title, question, number and command of each part of the path from the logits to the parameters."""


def transport() -> str:
    """The path of a Z-loss gradient, with the command that measures each part."""
    parts = [box(10, 80, 172, 190), text(96, 104, "source", "strong mid"), text(96, 130, "loss", "soft small mid")]
    parts += [
        text(96, 148, "λ(log Z − c)²", "mid"),
        arrow(96, 158, 96, 182),
        text(96, 200, "gradient at the logits", "soft small mid"),
    ]
    parts += [text(96, 218, "δ_z = 2λ(log Z − c)·p", "mid"), text(96, 254, "zloss.head_loss", "mono mid")]
    parts += [box(222, 10, 300, 330), text(372, 34, "transport", "strong mid"), arrow(184, 175, 220, 175)]
    for i, (title, question, number, command) in enumerate(TRANSPORT):
        top = 48 + 57 * i
        parts += [
            box(234, top, 276, 50),
            text(246, top + 20, title, "strong"),
            text(246, top + 38, question, "soft small"),
        ]
        parts += [text(498, top + 20, number, "end"), text(498, top + 38, command, "mono end")]
    parts += [arrow(524, 175, 560, 175), box(562, 80, 148, 190), text(636, 104, "optimizer", "strong mid")]
    for i, words in enumerate(("gradient norm tails", "clipping", "Adam's moments", "fp16 loss scale")):
        parts.append(text(636, 134 + 22 * i, words, "mid"))
    parts.append(text(636, 254, "train, compare", "mono mid"))
    return picture(WIDE, 350, "Source, transport, optimizer: the path of a Z-loss gradient", parts)


def edges() -> list[tuple[str, str]]:
    """(package, package that it imports) of the drawing."""
    return re.findall(r"^ +(\w+) --> (\w+)$", ARCHITECTURE.read_text(encoding="utf-8"), re.MULTILINE)


def packages() -> str:
    """Packages in rows: each is below every package that imports it."""
    found = edges()
    level: dict[str, int] = {}

    def depth(package: str) -> int:
        if package not in level:
            level[package] = max((depth(above) + 1 for above, below in found if below == package), default=0)
        return level[package]

    rows: list[list[str]] = []
    for package in dict.fromkeys(package for edge in found for package in edge):
        while len(rows) <= depth(package):
            rows.append([])
        rows[level[package]].append(package)
    place: dict[str, float] = {}
    for row in rows:
        # A package is centered below those that import it; neighbors keep their distance.
        wanted = {package: _mean([place[above] for above, below in found if below == package]) for package in row}
        row.sort(key=lambda package: wanted[package])
        start = WIDE / 2 - (len(row) - 1) * (BOX + GAP) / 2
        place |= {package: start + i * (BOX + GAP) for i, package in enumerate(row)}
    parts = []
    for above, under in found:
        parts.append(curve(place[above], 16 + STEP * level[above] + 28, place[under], 16 + STEP * level[under]))
    for package, x in place.items():
        y = 16 + STEP * level[package]
        parts += [box(x - BOX / 2, y, BOX, 28), text(x, y + 18, package, "mid")]
    return picture(
        WIDE,
        16 + STEP * len(rows) - 30,
        "Packages of zloss: each imports those that its lines lead down to",
        parts,
    )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else WIDE / 2
