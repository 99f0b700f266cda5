"""The comparison of matched training runs: `comparison.json` with schema "zloss.comparison/1".

Differences are method minus baseline, seed by seed. Means and standard deviations are over seeds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from zloss.results.options import Coordinate, check_columns
from zloss.results.record import ResultRecord, written_with

TITLES = {
    "ce": "CE",
    "standard": "Standard",
    "centered": "Centered",
    "factorized": "Factorized",
    "gain-aware": "Gain-aware",
    "centered-head": "Centered head",
    "mu-loss": "μ-loss",
    "mu-centering": "μ-centering",
}
"""Name of a method in options and files → its title; other names are their own titles."""


def method_label(method: str, coef: float) -> str:
    """Title and coefficient of a method as tables and sentences show them.

    >>> method_label("factorized", 1e-3), method_label("ce", 0.0)
    ('Factorized, λ 0.001', 'CE')
    """
    title = TITLES.get(method, method)
    return f"{title}, λ {coef:g}" if coef else title


State = Literal["holds", "fails", "open"]
VerdictName = Literal["accepted", "rejected", "inconclusive"]


@dataclass(frozen=True)
class Interval:
    """Two one-sided 95 % bounds of a difference or ratio between method and baseline."""

    lower: float
    """Lower bound."""
    upper: float
    """Upper bound."""
    unit: str
    """ "nats per token", or "ratio"."""


@dataclass(frozen=True)
class VerdictPart:
    """Quality, the diagnosed coordinate, or the optimizer-facing endpoints of one method."""

    state: State
    """Whether the part holds; "open" where the runs do not decide."""
    reason: str
    """One sentence; for an open part, what would settle it."""
    numbers: dict[str, Any] = field(default_factory=dict)
    """The numbers behind the sentence, by name."""
    interval: Interval | None = None
    """The interval of the difference; None if there is none, as with one seed."""


@dataclass(frozen=True)
class VerdictParts:
    """The parts of a verdict, shown separately; a part that does not apply to a method is None."""

    coordinate: VerdictPart | None = None
    """Does the method lower the quantity that it is meant to lower?"""
    quality: VerdictPart | None = None
    """Is the validation cross-entropy within the tolerance?"""
    optimizer: VerdictPart | None = None
    """Are the gradients and states that the optimizer sees no worse?"""

    def named(self) -> tuple[tuple[str, VerdictPart], ...]:
        """(name, part) of every part that applies, quality first."""
        parts = (("quality", self.quality), ("coordinate", self.coordinate), ("optimizer", self.optimizer))
        return tuple((name, part) for name, part in parts if part is not None)


@dataclass(frozen=True)
class Verdict:
    """The verdict on one method. The keys after `coef` that are None were not computed."""

    method: str
    """Name of the method."""
    coef: float
    """Its coefficient."""
    delta_ppl: float | None
    """Mean PPL difference from the baseline; None without a common seed or with a nonfinite PPL."""
    delta_ppl_std: float | None = field(default=None, metadata=written_with("coordinate"), kw_only=True)
    """Its standard deviation over seeds (n − 1)."""
    within_tolerance: bool | None = field(default=None, metadata=written_with("coordinate"), kw_only=True)
    """Whether `delta_ppl` is at most the tolerance; the interval around it is in `parts.quality`."""
    coordinate: Coordinate | None = field(default=None, metadata=written_with("coordinate"), kw_only=True)
    """The coordinate that the method deploys; None without a common seed."""
    delta_diagnosed: float | None = field(default=None, metadata=written_with("coordinate"), kw_only=True)
    """Mean difference of the quantity `diagnosed`, both in `coordinate`."""
    improves: bool | None = field(default=None, metadata=written_with("coordinate"), kw_only=True)
    """Whether `delta_diagnosed` is negative."""
    accepted: bool | None
    """True for an accepted method, False for a rejected one; None for an inconclusive one and if there is no verdict."""
    reason: str = ""
    """The verdict in words."""
    verdict: VerdictName | None = field(default=None, metadata=written_with("reasons"))
    """None if there is no verdict, and in older files."""
    reasons: tuple[str, ...] | None = field(default=None, metadata=written_with("reasons"))
    """The sentences of the parts that decided; None in older files."""
    parts: VerdictParts | None = field(default=None, metadata=written_with("reasons"))
    """What the verdict follows from; None without a common seed, and in older files."""

    @property
    def label(self) -> str:
        """Name and coefficient."""
        return method_label(self.method, self.coef)


@dataclass(frozen=True)
class Quality:
    """The quality gate: its tolerance and the verdict on every method."""

    tolerance_ppl: float | None = None
    """How much PPL may rise; None if the comparison states none."""
    tolerance: str = ""
    """Where the tolerance comes from, in words."""
    diagnosed: str = ""
    """Key of the quantity in `delta_diagnosed`; what each method has to lower is in `parts.coordinate`."""
    seed_varies: str | None = field(default=None, metadata=written_with("seed_varies"))
    """What differs between two seeds; None in older files."""
    methods: tuple[Verdict, ...] = ()
    """Every method but the baseline."""


@dataclass(frozen=True)
class Curve:
    """A quantity over training steps, mean over seeds."""

    step: tuple[int, ...]
    """Last step of each point."""
    value: tuple[float, ...]
    """Mean over the finite steps of each point."""

    def __post_init__(self) -> None:
        check_columns(self, ("step", "value"))


@dataclass(frozen=True)
class NormTail:
    """Pre-clip gradient norms of all steps and seeds, ascending and thinned below the upper tail."""

    norm: tuple[float, ...]
    """‖g‖₂."""
    share: tuple[float, ...]
    """Share of steps with a norm at least as large."""

    def __post_init__(self) -> None:
        check_columns(self, ("norm", "share"))


@dataclass(frozen=True)
class MethodCurves:
    """What the page draws of one method."""

    name: str
    """Name and coefficient."""
    curves: dict[str, Curve]
    """By key of the quantity; the training cross-entropy is always there."""
    norm_tail: NormTail
    """Tail of the gradient norm."""


@dataclass(frozen=True)
class RouterVariant:
    """One router loss: its scale and what its routers did; lists are by seed."""

    convention: str
    """Name of the variant."""
    coef: float | None
    """Nominal λ_R."""
    applied_coef: float | None = None
    """λ_R after matching."""
    s_rel: float | None = None
    """Scale relative to the token-layer mean."""
    absolute: float | None = None
    """λ_R·α per routing decision."""
    seeds: tuple[int, ...] = ()
    """Seeds of the lists below."""
    ce: tuple[float | None, ...] = ()
    """Validation cross-entropy."""
    entropy: tuple[float | None, ...] = ()
    """Router entropy on the validation blocks, in nats."""
    load_cv: tuple[float | None, ...] = ()
    """Coefficient of variation of the expert load on the validation blocks."""
    load_balance: tuple[float | None, ...] = ()
    """The model's own load-balancing term."""
    max_loss_difference: tuple[float | None, ...] = ()
    """Largest |ΔL| from the baseline over all steps, by pair."""
    first_difference: tuple[int | None, ...] = ()
    """First step that differs from the baseline, by pair."""


@dataclass(frozen=True)
class RouterVariants:
    """The router losses of compared mixture-of-experts runs."""

    baseline: str
    """Name of the baseline variant."""
    conventions: tuple[RouterVariant, ...]
    """Variants with a router Z-loss."""
    off: tuple[RouterVariant, ...] = ()
    """The variant without one."""
    top_k: int | None = field(default=None, metadata=written_with("top_k"))
    """Experts k per token in every run; absent from older files."""
    decisions: int | None = field(default=None, metadata=written_with("decisions"))
    """N_tl: routing decisions of a training step, tokens times layers; absent from older files."""


FEW_STEPS = 100
"""With fewer steps the p99 over steps is close to the maximum, so only the maximum is shown."""
SAMPLE_STD = "sample standard deviation over seeds (n − 1)"


@dataclass(frozen=True)
class SeedSummary:
    """One quantity over seeds."""

    mean: float
    """Mean over seeds."""
    std: float | None
    """Standard deviation of a sample (n − 1); None for one seed."""
    n: int
    """Seeds that have the number."""
    by_seed: tuple[float | None, ...] | None = field(default=None, metadata=written_with("by_seed"))
    """The values in the order of the method's `seeds`; absent from older files."""


@dataclass(frozen=True)
class SeedDifference:
    """Method minus baseline of one quantity, over seeds."""

    mean: float
    """Mean of the differences."""
    std: float | None
    """Standard deviation of the differences (n − 1); None for one seed."""
    by_seed: tuple[float, ...]
    """The differences, in the order of the pairs."""
    ratio: float | None
    """Mean of method / baseline; None if a baseline value is 0."""


@dataclass(frozen=True)
class HeadSummaries:
    """Quantities of the head in both coordinates, by their key in `metrics.json`."""

    raw: dict[str, SeedSummary] = field(default_factory=dict)
    """Raw logits."""
    centered: dict[str, SeedSummary] = field(default_factory=dict)
    """Row-centered logits."""


@dataclass(frozen=True)
class HeadDifferences:
    """Differences between method and baseline in the quantities of the head, both in the same coordinate."""

    raw: dict[str, SeedDifference] = field(default_factory=dict)
    """Both in raw logits."""
    centered: dict[str, SeedDifference] = field(default_factory=dict)
    """Both in row-centered logits."""

    def of(self, coordinate: Coordinate | None) -> dict[str, SeedDifference]:
        """The values in one coordinate; raw if none is stated."""
        return self.centered if coordinate == "centered" else self.raw


@dataclass(frozen=True)
class Trajectory:
    """How far the steps of a run are from those of the baseline run with its seed."""

    seed: int
    """Seed of both runs."""
    steps: int
    """Steps compared."""
    first_difference: int | None
    """First step whose CE or gradient norm differs; None if all steps agree bit for bit."""
    max_loss_difference: float | None
    """Largest |ΔL| over all steps; None if a loss is not finite."""
    max_ce_difference: float | None
    """Largest |ΔCE| over the finite steps."""
    mean_ce_difference: float | None
    """Mean |ΔCE| over the finite steps."""


@dataclass(frozen=True)
class PairedDifferences:
    """A method against the baseline, seed by seed."""

    pairs: int
    """Seeds that both have."""
    deployed: dict[str, SeedDifference]
    """Differences of the flat metrics, each run in the coordinate it deploys."""
    same_coordinate: HeadDifferences
    """Differences of the head's quantities in one coordinate."""
    trajectory: tuple[Trajectory, ...]
    """Differences of the steps, one record per pair."""


@dataclass(frozen=True)
class ComparedMethod:
    """One method at one coefficient."""

    method: str
    """Name of the method, or of the router variant."""
    coef: float
    """λ, or λ_R of a router variant; 0 for a method without one."""
    coordinate: Coordinate | None = None
    """The coordinate the method deploys."""
    seeds: tuple[int, ...] = ()
    """Seeds in the means: those that the baseline also has, or all of them if it has none."""
    metrics: dict[str, SeedSummary] = field(default_factory=dict)
    """The flat numbers of `metrics.json`, in the deployed coordinate."""
    heads: HeadSummaries = field(default_factory=HeadSummaries)
    """The head's quantities in both coordinates."""
    paired: PairedDifferences | None = None
    """Against the baseline; None for the baseline itself."""

    @property
    def label(self) -> str:
        """ "Standard, λ 0.001"; a method without a coefficient has its title alone."""
        return method_label(self.method, self.coef)

    def mean(self, key: str) -> float | None:
        """Mean of a metric over seeds, where it exists."""
        summary = self.metrics.get(key)
        return None if summary is None else summary.mean


@dataclass(frozen=True)
class TokenBudget:
    """Training tokens of one run."""

    available: int | None = None
    """Tokens of the training text."""
    consumed: int | None = None
    """Tokens trained on."""
    reuse: float | None = None
    """consumed / available."""


@dataclass(frozen=True)
class ComparedProvenance:
    """How the compared runs were produced, combined."""

    runs: int
    """Number of runs."""
    commands: tuple[str, ...]
    """Their command lines, without duplicates."""
    seconds: float
    """Seconds of all runs, training and validation."""
    threads: int
    """Largest number of threads."""
    zloss: str
    """Versions of zloss."""
    torch: str
    """Versions of torch."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further keys of a newer version."""


@dataclass(frozen=True, kw_only=True)
class Comparison(ResultRecord):
    """Matched runs side by side."""

    SCHEMA: ClassVar[str] = "zloss.comparison/1"
    FILE: ClassVar[str] = "comparison.json"

    model: str | None = field(default=None, metadata=written_with("model"))
    """Name of the model that every run started from; absent if the runs do not name it."""
    baseline: str
    """Name of the method that the others are compared with."""
    baseline_coef: float | None = None
    """Its coefficient."""
    seeds: tuple[int, ...]
    """Seeds of the baseline."""
    steps: int | None = None
    """Optimizer steps of every run."""
    std: str = SAMPLE_STD
    """What `std` means everywhere in the file."""
    methods: tuple[ComparedMethod, ...]
    """Every method, the baseline first."""
    quality: Quality
    """The quality gate."""
    router: RouterVariants | None = field(default=None, metadata=written_with("router"))
    """Router losses; absent for dense runs."""
    tokens: TokenBudget = field(default_factory=TokenBudget)
    """Training tokens of the baseline's first run."""
    unpaired: tuple[str, ...] = ()
    """Folders of runs whose seed the baseline lacks."""
    unfinished: tuple[str, ...] = ()
    """Folders of runs without a result."""
    provenance: ComparedProvenance | None = None
    """None if a run has no provenance."""
    curves: tuple[MethodCurves, ...] = ()
    """What the page draws; empty without step records."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Keys of a newer version."""

    @property
    def baseline_method(self) -> ComparedMethod | None:
        """The record of the baseline among `methods`."""
        return next(
            (m for m in self.methods if m.method == self.baseline and self.baseline_coef in (None, m.coef)), None
        )

    @property
    def has_few_steps(self) -> bool:
        """Whether the runs are too short for a p99 over steps."""
        return self.steps is not None and self.steps < FEW_STEPS
