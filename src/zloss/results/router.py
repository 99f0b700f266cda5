"""Results about routers: what the routers of a model did on a text, and what a coefficient means under every convention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from zloss.errors import InputError
from zloss.results.record import ResultRecord


@dataclass(frozen=True)
class ConventionScale:
    """The coefficient under one convention. Scaling: per routing decision."""

    convention: str
    """Name of the convention."""
    relative: float
    """s_rel against the token-layer mean; the mean over decisions where layers differ."""
    absolute: float
    """λ_R·α of one decision."""
    uniform: bool
    """Whether every layer has the same scale."""
    equal_coef: float | None
    """The coefficient that applies here what `coef` applies under `source`; None if nothing is applied."""
    cited: str
    """Where the convention was read."""


@dataclass(frozen=True)
class RouterScaleTable(ResultRecord):
    """One coefficient under every known convention."""

    SCHEMA: ClassVar[str] = "zloss.router-scale/1"
    FILE: ClassVar[str] = "router_scale.json"

    coef: float
    """λ_R as configured."""
    source: str
    """The convention that `coef` refers to."""
    layers: int
    """Routers, L."""
    top_k: int
    """Experts per token, k."""
    tokens: int
    """Tokens per layer and batch."""
    conventions: tuple[ConventionScale, ...]
    """Every known convention."""
    model_layers: int | None = None
    """Blocks of the model, dense ones included; None for `layers`."""
    encoder_layers: int | None = None
    """Routers of the encoder; None without one."""
    valid_tokens: int | None = None
    """Tokens with a label; None for all."""
    micro_batches: int = 1
    """Micro-batches per step."""

    def __post_init__(self) -> None:
        if self.source not in {scale.convention for scale in self.conventions}:
            raise InputError(f"`source` is {self.source!r}, which is not one of `conventions`.")

    def scale(self, convention: str) -> ConventionScale:
        """The scale under one convention."""
        return next(scale for scale in self.conventions if scale.convention == convention)


Scoring = Literal["softmax", "sigmoid", "other", "unknown"]
"""How a router turns logits into weights; "other": some other function of each expert's own logit."""
CoefOrigin = Literal["hypothetical", "configuration", "given"]


@dataclass(frozen=True)
class RouterTail:
    """A distribution over routing decisions."""

    mean: float | None
    """Mean over decisions."""
    p50: float | None
    """Median."""
    p99: float | None
    """99 % quantile."""
    p999: float | None
    """99.9 % quantile."""


@dataclass(frozen=True)
class RouterLayer:
    """One router, over all batches."""

    name: str
    """Name of its module in the model."""
    log_z_mean: float
    """Mean log Z_R over its decisions."""
    entropy: float
    """Mean entropy of its softmax, in nats."""
    load_cv: float | None
    """Coefficient of variation of its load over experts."""


ScaleVerdict = Literal["explained", "not_squared", "squared_mean", "unexplained", "undetermined", "nothing_applied"]
"""Whether a weighted squared log-normalizer explains the measured gradient."""

EXPLAINED = 1e-3
"""Residual up to which a penalty explains a gradient; fp32 gradients leave 1e-6 to 1e-4."""

DROWNED = 0.1
"""If rounding can account for more than this share of the gradient, the penalty cannot be determined."""
AGAIN = "Measure in fp32 or fp64, with a larger coefficient, or on another batch."
SENTENCES: dict[str, str] = {
    "nothing_applied": "Nothing is applied: the gradient is the same with the coefficient on and off.",
    "squared_mean": "The penalty is the square of the mean log Z_R and not the mean of squares: every decision gets the same "
    "source, whatever its own log Z_R, and no scale per decision can be stated.",
    "not_squared": "The penalty is the mean of log Z_R and not of its square: its source is the same at every log Z_R, and it "
    "has no target.",
    "unexplained": "{residual:.1%} of the gradient does not come from a weighted (log Z_R − c)²: another penalty is applied, and "
    "no scale can be stated.",
    "undetermined": "This batch does not show which penalty is applied: the mean of (log Z_R − c)², the square of the mean log "
    "Z_R and the mean log Z_R without a square cannot be distinguished at a residual of {limit:.1g}. {again}",
    "drowned": "Which penalty is applied could not be determined: rounding can make up {limit:.0%} of the gradient. {again}",
    "explained": "A weighted (log Z_R − c)² explains the gradient but for {residual:.1g} of its norm{within}.",
}
"""Verdict → the sentence that a reader sees; "drowned" is "undetermined" because of limited precision."""


@dataclass(frozen=True)
class MeasuredScale(ResultRecord):
    """The reduction a running loss applies. Scaling: per routing decision; `relative` is 1 for the token-layer mean.

    It is a section of an audit, and a separate result file if `write` was called.
    """

    SCHEMA: ClassVar[str] = "zloss.measured-router-scale/1"
    FILE: ClassVar[str] = "measured_router_scale.json"

    coef: float
    """The nominal λ_R whose effect was measured."""
    target: float | None
    """c_R, fitted or given; None when nothing is applied or it could not be determined."""
    absolute_per_layer: tuple[float, ...]
    """λ_R·α_l of a counted decision."""
    relative: float
    """s_rel against the token-layer mean over counted decisions, mean over decisions."""
    relative_all: float
    """s_rel against the token-layer mean over all decisions, masked ones included: what code that counts padding applies.
    Equal to `relative` without a mask."""
    relative_per_layer: tuple[float, ...]
    """s_rel of every layer."""
    padding_ratio: float | None
    """Coefficient on a masked decision over that on a counted one: 1 when padding is counted, 0 when it is not; None
    without a mask."""
    residual: float
    """‖measured − explained‖ / ‖measured‖: near 0 when a weighted squared log-normalizer explains the gradient."""
    verdict: ScaleVerdict = "explained"
    """ "explained": the figures hold. "not_squared": λ_R·α multiplies log Z without a square, and there is no c.
    "squared_mean": they refer to the square of the mean log Z, not to the mean of squares. "unexplained": the gradient is
    something else, and the figures describe the nearest squared log-normalizer. "undetermined": more than one of these
    explains the gradient up to rounding."""
    name: str = ""
    """What was measured, as described by the caller."""
    limit: float = EXPLAINED
    """Residual up to which a penalty was taken to explain the gradient: 1e-3, or what rounding in the dtype of router logits
    and weights can leave if that is more."""

    def __post_init__(self) -> None:
        if not self.absolute_per_layer:
            raise InputError("`absolute_per_layer` is expected to have an entry for every layer, but is empty.")

    @property
    def sentence(self) -> str:
        """The verdict in one sentence, and a second one where a scale is negative."""
        drowned = self.verdict == "undetermined" and self.limit > DROWNED
        within = f", within the {self.limit:.1g} that rounding can leave" if self.limit > EXPLAINED else ""
        said = SENTENCES["drowned" if drowned else self.verdict]
        said = said.format(residual=self.residual, limit=self.limit, within=within, again=AGAIN)
        layers = self.negative_layers
        if not layers:
            return said
        named = f"the scale of layer{'s' if len(layers) > 1 else ''} {', '.join(map(str, layers))}"
        where = "the scale" if len(layers) == len(self.relative_per_layer) else named
        what = "raises log Z_R" if self.verdict == "not_squared" else "drives log Z_R away from c"
        return f"{said} Warning: {where} is negative, so that training {what} instead of the opposite."

    @property
    def negative_layers(self) -> tuple[int, ...]:
        """The layers that reward the distance from c instead of penalizing it, beyond what rounding can mimic."""
        if self.verdict not in ("explained", "squared_mean", "not_squared"):
            return ()
        least = self.limit * max((abs(value) for value in self.relative_per_layer), default=0.0)
        return tuple(layer for layer, value in enumerate(self.relative_per_layer) if value < -least)

    @property
    def absolute(self) -> float:
        """λ_R·α, mean over layers."""
        return sum(self.absolute_per_layer) / len(self.absolute_per_layer)


@dataclass(frozen=True)
class RouterFindings:
    """What an audit says about a model's routers; None if a number does not exist, with the reason in `reasons`."""

    scoring: Scoring
    """How a router scores its experts."""
    softmax_normalizer: bool | None
    """Whether log Z_R normalizes what the router uses; None if its code and configuration do not tell."""
    layers: int
    """Routers found, L."""
    model_layers: int | None
    """Blocks of the model, dense ones included."""
    experts: int
    """Experts per router, E."""
    top_k: int
    """Experts per token, k."""
    decisions: int
    """Counted routing decisions over all batches."""
    nonfinite: int
    """Decisions with a nonfinite log Z_R, left out of every number."""
    coef: float
    """λ_R of the diagnostic reduction; `coef_origin` says whose it is."""
    convention: str
    """Name of the diagnostic reduction."""
    target: float | None
    """c_R."""
    absolute: float | None
    """λ_R·α of one decision of the first batch under `convention`."""
    relative: float | None
    """s_rel of `convention` for this model."""
    log_z: RouterTail | None
    """log Z_R."""
    violation: RouterTail | None
    """|log Z_R − c_R|."""
    entropy: float | None
    """Mean over decisions, in nats; log E at most."""
    load_cv: float | None
    """Mean over layers, load pooled over batches."""
    correction_norm: float | None
    """Mean ‖λα·2(log Z − c)·W_Rᵀp‖₂ over decisions of the batches."""
    per_layer: tuple[RouterLayer, ...]
    """Every router."""
    applied: MeasuredScale | None
    """What the model's own router Z-loss applies, measured from gradients."""
    reasons: tuple[str, ...]
    """Why numbers are missing."""
    coef_origin: CoefOrigin = "hypothetical"
    """Whose coefficient `coef` is. "hypothetical": neither the model nor the caller states one, and every number that
    depends on it (`absolute`, `correction_norm`) shows what that coefficient would do."""
    coef_key: str | None = None
    """Key of the model's configuration that `coef` was read from."""

    @property
    def projection(self) -> str:
        """The assumptions behind the numbers that depend on λ_R, in words."""
        if self.coef_origin == "configuration":
            return f"at the model's {self.coef_key} = {self.coef:g}, if it is reduced by {self.convention}"
        if self.coef_origin == "given":
            return f"at the given coefficient {self.coef:g} under {self.convention}"
        return f"hypothetical, at coefficient {self.coef:g} under {self.convention}"
