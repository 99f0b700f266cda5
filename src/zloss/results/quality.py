"""What `comparison.json` says about quality: a verdict on the perplexity of every method against the baseline."""

from __future__ import annotations

from dataclasses import dataclass, field

from zloss.results.coordinate import Coordinate
from zloss.results.method_label import method_label
from zloss.results.record import written_with
from zloss.results.verdict import VerdictName, VerdictParts


@dataclass(frozen=True)
class QualityVerdict:
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
    """True for an accepted method, False for a rejected one; None for an inconclusive one and where nothing is judged."""
    reason: str = ""
    """The verdict in words."""
    verdict: VerdictName | None = field(default=None, metadata=written_with("reasons"))
    """None where nothing is judged, and in files from before it was kept."""
    reasons: tuple[str, ...] | None = field(default=None, metadata=written_with("reasons"))
    """The sentences of the parts that decided; None in files from before they were kept."""
    parts: VerdictParts | None = field(default=None, metadata=written_with("reasons"))
    """What the verdict follows from; None without a common seed, and in files from before it was kept."""

    @property
    def label(self) -> str:
        """Name and coefficient."""
        return method_label(self.method, self.coef)


@dataclass(frozen=True)
class Quality:
    """The quality gate: its tolerance and the verdict on every method."""

    tolerance_ppl: float | None = None
    """How much PPL may rise; None where the comparison states none."""
    tolerance: str = ""
    """Where the tolerance comes from, in words."""
    diagnosed: str = ""
    """Key of the quantity in `delta_diagnosed`; what each method has to lower is in `parts.coordinate`."""
    seed_varies: str | None = field(default=None, metadata=written_with("seed_varies"))
    """What differs between two seeds; None in files from before it was kept."""
    methods: tuple[QualityVerdict, ...] = ()
    """Every method but the baseline."""
