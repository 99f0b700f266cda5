"""The routers of an audit, and a measured router scale, as named lines: for the page and the terminal."""

from __future__ import annotations

from dataclasses import dataclass

from zloss.report.text.numbers import MISSING, coefficient, number
from zloss.results.quantities import define, symbol
from zloss.results.router import MeasuredScale, RouterFindings, RouterTail

SCORING = {
    "softmax": "softmax over experts",
    "sigmoid": "a sigmoid for each expert",
    "other": "another function of each expert's own logit",
    "unknown": "not stated by the model",
}
TAIL = (("mean", "mean"), ("p50", "median"), ("p99", "p99"), ("p999", "p99.9"))


@dataclass(frozen=True)
class NamedLine:
    """One number under its name."""

    name: str
    text: str
    meaning: str = ""
    """What the number is, in one sentence."""


@dataclass(frozen=True)
class RouterGroup:
    """Lines under one title."""

    title: str
    lines: tuple[NamedLine, ...]


@dataclass(frozen=True)
class RouterView:
    """Everything shown of the routers of one audit."""

    groups: tuple[RouterGroup, ...]
    layers: tuple[tuple[str, str, str, str], ...]
    """(name, mean log Z_R, entropy, load CV) of every router."""
    notes: tuple[str, ...]
    """Why numbers are missing, and what a measured loss applies."""


def router_view(router: RouterFindings) -> RouterView:
    """What was measured, what is hypothetical, and what the model's own router loss applies."""
    measured = RouterGroup(
        "Routers, measured on the text",
        (
            NamedLine("scoring", SCORING[router.scoring]),
            NamedLine("routers L", number(router.layers)),
            NamedLine("experts E", number(router.experts)),
            NamedLine("experts per token k", number(router.top_k)),
            NamedLine("routing decisions", number(router.decisions), "tokens times routers that were counted"),
            *([NamedLine("nonfinite decisions", number(router.nonfinite))] if router.nonfinite else []),
            *_tail("log Z_R", router.log_z),
            *_tail("|log Z_R − c_R|", router.violation),
            _line("entropy", number(router.entropy), " (nat)"),
            _line("load_cv", number(router.load_cv)),
        ),
    )
    groups = [measured]
    if router.absolute is not None:
        groups.append(
            RouterGroup(
                f"Router Z-loss: {router.projection}",
                (
                    NamedLine("c_R", number(router.target), "target of log Z_R"),
                    _line("s_rel", number(router.relative)),
                    _line("router_absolute", coefficient(router.absolute)),
                    _line("router_correction_norm", number(router.correction_norm)),
                ),
            )
        )
    notes = [f"{reason[0].upper()}{reason[1:]}." for reason in router.reasons if reason]
    if router.applied is not None:
        groups.append(
            RouterGroup("The model's own router Z-loss, measured from gradients", scale_lines(router.applied))
        )
        notes.insert(0, router.applied.sentence)
    layers = tuple(
        (layer.name, number(layer.log_z_mean), number(layer.entropy), number(layer.load_cv))
        for layer in router.per_layer
    )
    return RouterView(tuple(groups), layers, tuple(notes))


def scale_lines(scale: MeasuredScale) -> tuple[NamedLine, ...]:
    """A measured scale; without s_rel where no squared log-normalizer explains the gradient."""
    lines = [_line("router.coef", coefficient(scale.coef))]
    if scale.verdict in ("explained", "nothing_applied"):
        lines += [
            _line("s_rel", number(scale.relative)),
            NamedLine("s_rel by layer", ", ".join(number(value) for value in scale.relative_per_layer)),
            _line("router_absolute", coefficient(scale.absolute)),
        ]
    if scale.target is not None and scale.verdict == "explained":
        lines.append(NamedLine("c_R", number(scale.target), "target of log Z_R, recovered from the gradient"))
    if scale.padding_ratio is not None:
        lines.append(
            NamedLine("padding", number(scale.padding_ratio), "weight of a masked decision over that of a counted one")
        )
    unexplained = "share of the gradient's norm that a weighted squared log-normalizer leaves unexplained"
    return (*lines, NamedLine("unexplained", number(scale.residual), unexplained))


def _line(key: str, text: str, unit: str = "") -> NamedLine:
    found = define(key)
    return NamedLine(symbol(key) + (unit if text != MISSING else ""), text, "" if found is None else found.meaning)


def _tail(name: str, tail: RouterTail | None) -> list[NamedLine]:
    if tail is None:
        return []
    return [NamedLine(f"{word} {name} (nat)", number(getattr(tail, key))) for key, word in TAIL]
