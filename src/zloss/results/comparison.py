"""The comparison of matched training runs: `comparison.json` with schema "zloss.comparison/1".

Differences are method minus baseline, seed by seed. Means and standard deviations are over seeds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from zloss.results.coordinate import Coordinate
from zloss.results.method_curves import MethodCurves
from zloss.results.method_label import method_label
from zloss.results.quality import Quality
from zloss.results.record import from_plain, to_plain, written_with
from zloss.results.router_variants import RouterVariants
from zloss.results.schema import without_schema

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
    """The values in the order of the method's `seeds`; absent from files before it was kept."""


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
    """Mean of method / baseline; None where a baseline value is 0."""


@dataclass(frozen=True)
class HeadSummaries:
    """Quantities of the head in both coordinates, by their key in `metrics.json`."""

    raw: dict[str, SeedSummary] = field(default_factory=dict)
    """Raw logits."""
    centered: dict[str, SeedSummary] = field(default_factory=dict)
    """Row-centered logits."""


@dataclass(frozen=True)
class HeadDifferences:
    """Differences of the quantities of the head, method and baseline in the same coordinate."""

    raw: dict[str, SeedDifference] = field(default_factory=dict)
    """Both in raw logits."""
    centered: dict[str, SeedDifference] = field(default_factory=dict)
    """Both in row-centered logits."""

    def of(self, coordinate: Coordinate | None) -> dict[str, SeedDifference]:
        """Those of one coordinate; raw where none is stated."""
        return self.centered if coordinate == "centered" else self.raw


@dataclass(frozen=True)
class Trajectory:
    """How far the steps of a run are from those of the baseline run with its seed."""

    seed: int
    """Seed of both runs."""
    steps: int
    """Steps compared."""
    first_difference: int | None
    """First step whose CE or gradient norm differs; None where all steps agree bit for bit."""
    max_loss_difference: float | None
    """Largest |ΔL| over all steps; None where a loss is not finite."""
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
    """Seeds in the means: those the baseline has too, or all where it has none of them."""
    metrics: dict[str, SeedSummary] = field(default_factory=dict)
    """The flat numbers of `metrics.json`, in the deployed coordinate."""
    heads: HeadSummaries = field(default_factory=HeadSummaries)
    """The head's quantities in both coordinates."""
    paired: PairedDifferences | None = None
    """Against the baseline; None for the baseline itself."""

    @property
    def label(self) -> str:
        """ "standard, λ 0.001"; a method without a coefficient has its name alone."""
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
    """How the compared runs were made, together."""

    runs: int
    """Number of runs."""
    commands: tuple[str, ...]
    """Their command lines, each once."""
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
class Comparison:
    """Matched runs side by side."""

    SCHEMA: ClassVar[str] = "zloss.comparison/1"

    model: str | None = field(default=None, metadata=written_with("model"))
    """Name of the model that every run began with; absent where the runs do not name it."""
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
    """None where a run has no provenance."""
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

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"schema": self.SCHEMA, **to_plain(self)}

    @classmethod
    def from_dict(cls, data: Any) -> Comparison:
        """The comparison of a parsed comparison.json."""
        return from_plain(cls, without_schema(data, cls.SCHEMA))
