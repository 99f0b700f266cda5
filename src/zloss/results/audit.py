"""The audit report: `report.json` with schema "zloss.audit/1".

Numbers are finite or None; a None is explained in `reasons` under its dotted path or the path of a parent
("heads.centered"). Raw and centered are coordinates of one model, not competitors: every number says which it is in.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from zloss.errors import InputError
from zloss.results.figure_data import ExtremeTable, Figures
from zloss.results.provenance import AuditProvenance
from zloss.results.record import from_plain, to_plain

NOT_MEASURED = "not measured in this run"
NO_INPUT_PATH = "the head is untied: no input path leads to its gradient"


@dataclass(frozen=True)
class ModelInfo:
    """The audited checkpoint and the head conventions its numbers use."""

    name: str
    vocab: int
    """V: rows of the head."""
    width: int
    """D."""
    tied: bool
    bias: bool = False
    logit_scale: float = 1.0
    softcap: float | None = None
    valid_vocab: int | None = None
    """Rows inside log Z, μ, w̄ and c, where fewer than V."""
    rows_beyond_tokenizer: int | None = None
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CorpusInfo:
    """The text: `predictions` tokens were scored, each exactly once."""

    name: str
    blocks: int
    block_size: int
    predictions: int
    bos: bool
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class HeadNumbers:
    """Token statistics and spectrum of the head in one coordinate; p99 and p99.9 are over tokens."""

    diag_z: float | None = None
    """λ_diag · E(log Z − c)²."""
    p_z_999: float | None = None
    """p99.9 of |log Z − c|."""
    a_p_mean: float | None = None
    a_p_99: float | None = None
    log_z_mean: float | None = None
    mu_abs_99: float | None = None
    """p99 of |μ|; centered: the measured fp32 residual."""
    mu_rms: float | None = None
    """√(E μ²): with both diag_z it gives the cross term that the factorized objective removes."""
    delta_u_99: float | None = None
    """p99 of ‖δ_u‖₂ = 2λ_diag·|log Z − c|·‖Wᵀp‖₂, per token before any reduction."""
    delta_u_99_gain_aware: float | None = None
    """p99 of ‖δ_u‖₂ / (1 + β·A_p²) with β = `gain_beta`: the same tail under gain-aware weighting."""
    row_max_999: float | None = None
    """p99.9 of the row maximum max_i z_i."""
    sigma_1: float | None = None
    e_1: float | None = None
    e_16: float | None = None
    """Share of ‖W‖_F² in the first 16 singular directions."""
    f_16: float | None = None
    """Mean over tokens of the share of a² inside them."""
    rho_16: float | None = None
    """Pearson correlation over tokens of the rank-16 part with a²."""


@dataclass(frozen=True)
class Heads:
    """Both coordinates; `centered` is all None where μ does not exist (softcap, -inf bias)."""

    raw: HeadNumbers
    centered: HeadNumbers = field(default_factory=HeadNumbers)


@dataclass(frozen=True)
class GradientNumbers:
    """R_Z = ‖g_Z‖/‖g_CE‖ and C_Z = cos(g_Z, g_CE)."""

    r_z: float | None = None
    c_z: float | None = None


@dataclass(frozen=True)
class GradientInfo:
    """Gradients of CE and of Z on a diagnostic batch, both mean-reduced over its predictions."""

    coef: float
    blocks: int
    raw: GradientNumbers = field(default_factory=GradientNumbers)
    centered: GradientNumbers = field(default_factory=GradientNumbers)
    whole_model: GradientNumbers = field(default_factory=GradientNumbers)
    scope: str = "output_head"
    reduction: str = "mean"
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PathNumbers:
    """The Z gradient of a tied table split by path: through the output logits, through the input embedding."""

    output_norm: float | None = None
    input_norm: float | None = None
    cosine: float | None = None


@dataclass(frozen=True)
class TiedPaths:
    """The split in both coordinates."""

    raw: PathNumbers = field(default_factory=PathNumbers)
    centered: PathNumbers = field(default_factory=PathNumbers)


@dataclass(frozen=True)
class Spacing:
    """Gap between neighbouring floats at the p99.9 row maximum: logits closer than this merge when stored so."""

    row_max_999: float | None = None
    bf16_spacing: float | None = None
    fp16_spacing: float | None = None
    """None above 65504, where fp16 overflows."""


@dataclass(frozen=True)
class Precision:
    """The forward side of the precision argument (paper eq:precision_link)."""

    raw: Spacing = field(default_factory=Spacing)
    centered: Spacing = field(default_factory=Spacing)


@dataclass(frozen=True)
class Nonfinite:
    """Tokens with a NaN or an infinite statistic: counted here, kept out of every tail."""

    nan: int = 0
    inf: int = 0


@dataclass(frozen=True)
class QuantileBound:
    """Values at the lower and upper rank bound of a sketched quantile; absent where the quantile is exact."""

    lower: float
    upper: float
    count: int
    """Values the sketch had seen."""


@dataclass(frozen=True)
class Effect:
    """What an action would change, measured on this text: `before` → `after`."""

    quantity: str
    before: float | None
    after: float | None
    unit: str = ""
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """after / before, where both exist and before ≠ 0."""
        return None if self.before in (None, 0) or self.after is None else self.after / float(self.before or 1)


@dataclass(frozen=True)
class Decision:
    """One stage of the decision map. `fired` None: not evaluated, and `reason` names the command that would."""

    stage: str
    risk: str
    trigger: str
    value: float | None
    threshold: float | None
    fired: bool | None
    reason: str
    action: str
    expected: str
    not_guaranteed: str
    evidence: str
    threshold_name: str = ""
    measured: tuple[Effect, ...] = ()
    """For a fired trigger: what the action would change on this text."""


@dataclass(frozen=True)
class LambdaBudget:
    """λ at which R_Z meets `r_z`: R_Z is linear in λ, so λ = coef · r_z / R_Z(coef)."""

    r_z: float
    """The stated budget."""
    raw: float | None = None
    centered: float | None = None
    whole_model: float | None = None


@dataclass(frozen=True)
class AuditReport:
    """One audit of a checkpoint on a text.

    `timings` are seconds by step. `quantile_bounds` maps the dotted path of a number to its bound where a sketch
    answered. `finished_blocks` < `corpus.blocks` with status "partial" is an interrupted run.
    """

    SCHEMA: ClassVar[str] = "zloss.audit/1"

    model: ModelInfo
    corpus: CorpusInfo
    ppl: float | None
    mu_abs_99: float | None
    heads: Heads
    gradient: GradientInfo | None
    tied_paths: TiedPaths | None
    provenance: AuditProvenance
    diag_coef: float = 1e-4
    gain_beta: float = 1e-2
    """β of `delta_u_99_gain_aware`."""
    target: float | None = None
    """c; None only in a report that is too partial to know it."""
    precision: Precision = field(default_factory=Precision)
    nonfinite: Nonfinite = field(default_factory=Nonfinite)
    quantile_bounds: dict[str, QuantileBound] = field(default_factory=dict)
    decisions: tuple[Decision, ...] = ()
    lambda_budget: LambdaBudget | None = None
    thresholds: dict[str, float | None] = field(default_factory=dict)
    """The thresholds the decisions used, by name."""
    router: dict[str, Any] | None = None
    status: Literal["complete", "partial"] = "complete"
    finished_blocks: int | None = None
    timings: dict[str, float] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    figures: Figures = field(default_factory=Figures)
    extreme_tokens: tuple[ExtremeTable, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)

    def reason(self, path: str) -> str | None:
        """Why the number at `path` is None: its own reason, or that of the nearest parent."""
        while path:
            if path in self.reasons:
                return self.reasons[path]
            path = path.rpartition(".")[0]
        return None

    def finite(self) -> AuditReport:
        """The numbers alone (no figures), every nonfinite one None with its reason: a NaN must not pass for "within"."""
        return AuditReport.from_dict(replace(self, figures=Figures(), extreme_tokens=()).to_dict())

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; a nonfinite number becomes None and every None gets a reason."""
        reasons = dict(self.reasons)

        def note(path: str, value: float) -> None:
            reasons.setdefault(path, f"the value was {value}")

        if self.tied_paths is None and not self.model.tied:
            reasons.setdefault("tied_paths", NO_INPUT_PATH)
        plain = to_plain(self, on_nonfinite=note)
        plain = {"schema": self.SCHEMA, **{key: value for key, value in plain.items() if key != "schema"}}
        for path in _null_numbers(plain):
            if self.reason(path) is None:
                reasons.setdefault(path, NOT_MEASURED)
        plain["reasons"] = reasons
        return plain

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> AuditReport:
        """The report of a parsed report.json."""
        if data.get("schema") != cls.SCHEMA:
            raise InputError(f"`schema` is expected to be {cls.SCHEMA!r}, but is {data.get('schema')!r}.")
        return from_plain(cls, {key: value for key, value in data.items() if key != "schema"})


def _null_numbers(plain: dict[str, Any]) -> list[str]:
    """Dotted paths of the Nones among the measured numbers."""
    found = [key for key in ("ppl", "mu_abs_99", "gradient", "tied_paths", "target") if plain[key] is None]
    pending = [(key, plain[key]) for key in ("heads", "gradient", "tied_paths", "precision") if plain[key] is not None]
    while pending:
        path, value = pending.pop()
        if isinstance(value, dict):
            pending.extend((f"{path}.{key}", item) for key, item in value.items())
        elif value is None:
            found.append(path)
    return sorted(found)
