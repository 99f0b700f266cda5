"""Curves over optimizer steps and the tail of gradient norms, one colour per method or router variant."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from zloss.report.charts.panel import Axis, Layer, Mark, Panel, Series, Values, across, colour_of
from zloss.report.charts.scale import Scale, linear_scale, log_scale
from zloss.results.method_curves import MethodCurves

CURVES = {
    # quantity: (title, logarithmic axis)
    "cross_entropy": ("Training cross-entropy", False),
    "grad_norm": ("Gradient norm of each step", True),
    "p_z_999": ("Log-normalizer tail of each step", True),
    "entropy": ("Router entropy of each step", False),
    "load_cv": ("Expert load of each step", False),
    "router_log_z_p999": ("Router log-normalizer tail of each step", False),
}
LARGEST = 0.01
"""The share of steps that a p99 leaves out."""
MATCHED = ":matched"
"""How the name of a variant says that its coefficient was matched."""


@dataclass(frozen=True)
class Curve:
    """The values of one method; without data where it has none."""

    name: str
    xs: Values
    ys: Values

    @classmethod
    def of_steps(cls, name: str, values: Sequence[float]) -> Curve:
        """One value per step, from step 1."""
        return cls(name, tuple(float(i + 1) for i in range(len(values))), tuple(values))


def step_panel(key: str, curves: Sequence[Curve]) -> Panel:
    """One quantity of `CURVES` over the steps, averaged over seeds step by step."""
    title, log = CURVES[key]
    caption = "Mean over seeds, in the coordinate that each method deploys." if key == "p_z_999" else "Mean over seeds."
    ys = [curve.ys for curve in curves]
    x = Axis("step", linear_scale(*(curve.xs for curve in curves)))
    y = Axis.of(key, log_scale(*ys) if log else linear_scale(*ys))
    return Panel(key, title, x, y, tuple(_lines(curves)), caption)


def norm_tail_panel(curves: Sequence[Curve]) -> Panel:
    """The share of steps at or above each gradient norm; the largest 1 % of steps lie below the dotted line."""
    smallest = min((share for curve in curves for share in curve.ys), default=LARGEST)
    x = Axis.of("grad_norm", log_scale(*(curve.xs for curve in curves)))
    y = Axis.of("norm_share", Scale(smallest / 1.5, 1.2, log=True))
    layers = _lines(curves)
    caption = "Finite steps of all seeds together."
    if smallest < LARGEST:
        layers = [Mark("zero", across(x), (LARGEST, LARGEST)), *layers]
        caption += " Below the dotted line: the largest 1 % of steps, which a p99 leaves out."
    return Panel("norms", "Gradient norm tail", x, y, tuple(layers), caption)


def training_panels(groups: Sequence[MethodCurves]) -> list[Panel]:
    """Panels for what the groups of a comparison's `curves` hold."""
    panels = []
    for key in CURVES:
        records = [(group.name, group.curves.get(key)) for group in groups]
        curves = [Curve(name, *(((), ()) if found is None else (found.step, found.value))) for name, found in records]
        if any(curve.ys for curve in curves):
            panels.append(step_panel(key, curves))
    tails = [Curve(group.name, group.norm_tail.norm, group.norm_tail.share) for group in groups]
    return [*panels, norm_tail_panel(tails)] if any(curve.ys for curve in tails) else panels


def router_panels(curves: Mapping[str, Mapping[str, Sequence[float]]]) -> list[Panel]:
    """Router entropy and expert load over the steps; `curves` is variant → quantity → value of every step, over seeds."""
    return [
        step_panel(key, [Curve.of_steps(variant, values[key]) for variant, values in curves.items()])
        for key in ("entropy", "load_cv")
    ]


def _lines(curves: Iterable[Curve]) -> list[Layer]:
    """One line per method in its colour. Matched variants lie on the line of the token-layer mean, so they are dashed."""
    return [
        Series("line", curve.xs, curve.ys, curve.name, colour_of(i), dash=2 * i if MATCHED in curve.name else None)
        for i, curve in enumerate(curves)
        if curve.ys
    ]
