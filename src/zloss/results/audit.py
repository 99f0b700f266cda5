"""The audit report: `report.json` with schema "zloss.audit/1".

Numbers are finite or None; a None is explained in `reasons` under its dotted path or the path of a parent
("heads.centered"). Raw and centered are coordinates of one model, not competitors: every number says which it is in.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from zloss.results.decision import Decision, LambdaBudget
from zloss.results.figure_data import ExtremeTable, Figures
from zloss.results.gradient_numbers import NO_INPUT_PATH, GradientInfo, TiedPaths
from zloss.results.provenance import AuditProvenance
from zloss.results.record import COMPUTED_SHARE, COSINE, NOT_NEGATIVE, from_plain, to_plain
from zloss.results.router import RouterFindings
from zloss.results.schema import without_schema

NOT_MEASURED = "not measured in this run"


@dataclass(frozen=True)
class ModelInfo:
    """The audited checkpoint and the head conventions its numbers use."""

    name: str
    """The model as it was asked for."""
    vocab: int
    """V: rows of the head."""
    width: int
    """D: width of the hidden state."""
    tied: bool
    """Whether the head is the input embedding."""
    bias: bool = False
    """Whether the head has a bias."""
    logit_scale: float = 1.0
    """s in z = s(Wu + b)."""
    softcap: float | None = None
    """Cap of the logits; None without one."""
    valid_vocab: int | None = None
    """Rows inside log Z, μ, w̄ and c."""
    rows_beyond_tokenizer: int | None = None
    """Rows of the head that no token has."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further facts: source, class, parameters, dtype, agreement of our logits with the model's."""


@dataclass(frozen=True)
class CorpusInfo:
    """The text: `predictions` tokens were scored, each exactly once."""

    name: str
    """Name of the corpus or of its files."""
    blocks: int
    """Blocks of the text that the audit covers when it is complete."""
    block_size: int
    """Predictions per block."""
    predictions: int
    """Tokens scored."""
    bos: bool
    """Whether each block starts with a BOS token, whose own prediction is not counted."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further facts: offset, files, checksums."""


@dataclass(frozen=True)
class HeadNumbers:
    """Token statistics and spectrum of the head in one coordinate; p99 and p99.9 are over tokens."""

    diag_z: float | None = field(default=None, metadata=NOT_NEGATIVE)
    """λ_diag · E(log Z − c)²."""
    p_z_999: float | None = field(default=None, metadata=NOT_NEGATIVE)
    """p99.9 of |log Z − c|."""
    a_p_mean: float | None = field(default=None, metadata=NOT_NEGATIVE)
    """Mean of A_p = ‖Wᵀp‖₂/‖p‖₂."""
    a_p_99: float | None = field(default=None, metadata=NOT_NEGATIVE)
    """p99 of A_p."""
    log_z_mean: float | None = None
    """Mean of log Z."""
    mu_abs_99: float | None = field(default=None, metadata=NOT_NEGATIVE)
    """p99 of |μ|; centered: the measured fp32 residual."""
    mu_rms: float | None = field(default=None, metadata=NOT_NEGATIVE)
    """√(E μ²): with both diag_z it gives the cross term that the factorized objective removes."""
    delta_u_99: float | None = field(default=None, metadata=NOT_NEGATIVE)
    """p99 of ‖δ_u‖₂ = 2λ_diag·|log Z − c|·‖Wᵀp‖₂, per token before any reduction."""
    delta_u_99_gain_aware: float | None = field(default=None, metadata=NOT_NEGATIVE)
    """p99 of ‖δ_u‖₂ / (1 + β·A_p²) with β = `gain_beta`: the same tail under gain-aware weighting."""
    row_max_999: float | None = None
    """p99.9 of the row maximum max_i z_i."""
    sigma_1: float | None = field(default=None, metadata=NOT_NEGATIVE)
    """Largest singular value of W."""
    e_1: float | None = field(default=None, metadata=COMPUTED_SHARE)
    """Share of ‖W‖_F² in the first singular direction."""
    e_16: float | None = field(default=None, metadata=COMPUTED_SHARE)
    """Share of ‖W‖_F² in the first 16 singular directions."""
    f_16: float | None = field(default=None, metadata=COMPUTED_SHARE)
    """Mean over tokens of the share of A_p² inside the first 16 singular directions."""
    rho_16: float | None = field(default=None, metadata=COSINE)
    """Pearson correlation over tokens of that rank-16 part with A_p²."""


@dataclass(frozen=True)
class Heads:
    """Both coordinates; `centered` is all None where μ does not exist (softcap, -inf bias)."""

    raw: HeadNumbers
    """Logits as the head gives them."""
    centered: HeadNumbers = field(default_factory=HeadNumbers)
    """Row-centered logits, z − μ."""


@dataclass(frozen=True)
class Spacing:
    """Gap between neighbouring floats at the p99.9 row maximum: logits closer than this merge when stored so."""

    row_max_999: float | None = None
    """p99.9 of the row maximum."""
    bf16_spacing: float | None = None
    """Gap between neighbouring bf16 numbers there."""
    fp16_spacing: float | None = None
    """Gap between neighbouring fp16 numbers there; None above 65504, where fp16 overflows."""


@dataclass(frozen=True)
class Precision:
    """The forward side of the precision argument (paper eq:precision_link)."""

    raw: Spacing = field(default_factory=Spacing)
    """Raw logits."""
    centered: Spacing = field(default_factory=Spacing)
    """Row-centered logits."""


@dataclass(frozen=True)
class Nonfinite:
    """Tokens with a NaN or an infinite statistic: counted here, kept out of every tail."""

    nan: int = field(default=0, metadata=NOT_NEGATIVE)
    """Tokens with a NaN."""
    inf: int = field(default=0, metadata=NOT_NEGATIVE)
    """Tokens with an infinite statistic."""


@dataclass(frozen=True)
class QuantileBound:
    """Values at the lower and upper rank bound of a sketched quantile; absent where the quantile is exact."""

    lower: float
    """Value at the lower rank bound."""
    upper: float
    """Value at the upper rank bound."""
    count: int
    """Values the sketch had seen."""


@dataclass(frozen=True)
class AuditReport:
    """One audit of a checkpoint on a text."""

    SCHEMA: ClassVar[str] = "zloss.audit/1"

    model: ModelInfo
    """The checkpoint."""
    corpus: CorpusInfo
    """The text."""
    ppl: float | None
    """Perplexity on the text, the same in both coordinates."""
    mu_abs_99: float | None
    """p99 of |μ| of the raw head."""
    heads: Heads
    """Numbers of the head."""
    gradient: GradientInfo | None
    """Gradients on the diagnostic batch."""
    tied_paths: TiedPaths | None
    """The Z gradient of a tied table by path; None for an untied head."""
    provenance: AuditProvenance
    """What made the numbers."""
    diag_coef: float = 1e-4
    """λ_diag of `diag_z`, `delta_u_99` and the gradients."""
    gain_beta: float = 1e-2
    """β of `delta_u_99_gain_aware`."""
    target: float | None = None
    """c; None only in a report that is too partial to know it."""
    precision: Precision = field(default_factory=Precision)
    """Spacing of stored logits."""
    nonfinite: Nonfinite = field(default_factory=Nonfinite)
    """Tokens that no tail contains."""
    quantile_bounds: dict[str, QuantileBound] = field(default_factory=dict)
    """Bounds of the quantiles that a sketch answered, by the dotted path of the number."""
    decisions: tuple[Decision, ...] = ()
    """The decision map."""
    lambda_budget: LambdaBudget | None = None
    """λ on the R_Z budget; None without gradients."""
    thresholds: dict[str, float | None] = field(default_factory=dict)
    """The thresholds the decisions used, by name."""
    router: RouterFindings | None = None
    """The routers; None for a dense model."""
    status: Literal["complete", "partial"] = "complete"
    """ "partial" for an interrupted audit."""
    finished_blocks: int | None = None
    """Blocks that the numbers cover; fewer than `corpus.blocks` in a partial report."""
    timings: dict[str, float] = field(default_factory=dict)
    """Seconds by step of the audit."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Why a number is None, by its dotted path or that of a parent."""
    notes: tuple[str, ...] = ()
    """Sentences on how the numbers were measured, such as a block size that the model's positions decided."""
    figures: Figures = field(default_factory=Figures)
    """What the figures draw."""
    extreme_tokens: tuple[ExtremeTable, ...] = ()
    """The most extreme tokens in their context."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Keys of a newer version."""

    def reason(self, path: str) -> str | None:
        """Why the number at `path` is None: its own reason, or that of the nearest parent."""
        while path:
            if path in self.reasons:
                return self.reasons[path]
            path = path.rpartition(".")[0]
        return None

    def finite(self) -> AuditReport:
        """The numbers without figures, every nonfinite one None with its reason: a comparison with NaN is false, and
        must not be read as "within the threshold"."""
        return AuditReport.from_dict(replace(self, figures=Figures(), extreme_tokens=()).to_dict())

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; a nonfinite number becomes None and every None gets a reason."""
        reasons = dict(self.reasons)

        def note(path: str, value: float) -> None:
            reasons.setdefault(path, f"the value was {value}")

        if self.tied_paths is None and not self.model.tied:
            reasons.setdefault("tied_paths", NO_INPUT_PATH)
        plain: dict[str, Any] = {"schema": self.SCHEMA, **to_plain(self, on_nonfinite=note)}
        for path in _null_numbers(plain):
            if self.reason(path) is None:
                reasons.setdefault(path, NOT_MEASURED)
        plain["reasons"] = reasons
        return plain

    @classmethod
    def from_dict(cls, data: Any) -> AuditReport:
        """The report of a parsed report.json."""
        return from_plain(cls, without_schema(data, cls.SCHEMA))


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
