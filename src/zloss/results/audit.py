"""The audit report: `report.json` with schema "zloss.audit/1", and the data of its figures.

Numbers are finite or None; a None is explained in `reasons` under its dotted path or the path of a parent
("heads.centered"). Raw and centered are coordinates of one model, not competitors: every number says which it is in.
The data of figures are small and already reduced; nothing else is needed to rebuild every figure from report.json.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from zloss.errors import InputError
from zloss.results.decision import ActionVerdict, Decision, LambdaBudget
from zloss.results.logprobs import LogprobNoise
from zloss.results.options import Coordinate, LogitStorage, check_columns
from zloss.results.provenance import AuditProvenance
from zloss.results.record import COMPUTED_SHARE, COSINE, NOT_NEGATIVE, ResultRecord, within
from zloss.results.router import RouterFindings

NO_INPUT_PATH = "the head is untied: no input path leads to its gradient"


@dataclass(frozen=True)
class GradientNumbers:
    """R_Z = ‖g_Z‖/‖g_CE‖ and C_Z = cos(g_Z, g_CE)."""

    r_z: float | None = field(default=None, metadata=NOT_NEGATIVE)
    """Norm of the Z gradient relative to the CE gradient."""
    c_z: float | None = field(default=None, metadata=COSINE)
    """Cosine between the two gradients."""


@dataclass(frozen=True)
class DiagnosticGradient:
    """Gradients of CE and of Z on a diagnostic batch, both mean-reduced over its predictions."""

    coef: float = field(metadata=NOT_NEGATIVE)
    """λ of the Z term."""
    blocks: int = field(metadata=NOT_NEGATIVE)
    """Blocks of the diagnostic batch, the first of the text."""
    raw: GradientNumbers = field(default_factory=GradientNumbers)
    """Z on raw logits, gradient of the head."""
    centered: GradientNumbers = field(default_factory=GradientNumbers)
    """Z on row-centered logits, gradient of the head."""
    whole_model: GradientNumbers = field(default_factory=GradientNumbers)
    """Z on raw logits, gradient of all parameters."""


@dataclass(frozen=True)
class GradientInfo(DiagnosticGradient):
    """Gradients of CE and of Z on the diagnostic batch of an audit, both mean-reduced over its predictions."""

    scope: str = "output_head"
    """The tensor of `raw` and `centered`: the tied table with both paths, or the untied projection."""
    reduction: str = "mean"
    """How tokens are reduced, for CE and Z alike."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further facts: the norms."""


@dataclass(frozen=True)
class PathNumbers:
    """The Z gradient of a tied table split by path: through the output logits, through the input embedding."""

    output_norm: float | None = field(default=None, metadata=NOT_NEGATIVE)
    """‖g‖₂ through the output logits."""
    input_norm: float | None = field(default=None, metadata=NOT_NEGATIVE)
    """‖g‖₂ through the input embedding."""
    cosine: float | None = field(default=None, metadata=COSINE)
    """Cosine between the two."""


@dataclass(frozen=True)
class TiedPaths:
    """The split in both coordinates."""

    raw: PathNumbers = field(default_factory=PathNumbers)
    """Z on raw logits."""
    centered: PathNumbers = field(default_factory=PathNumbers)
    """Z on row-centered logits."""


Quantity = Literal["violation", "gain", "shift", "delta_u"]
"""|log Z − c|, A_p, |μ|, ‖δ_u‖₂."""

_DRAWN_TOGETHER = (("x", "y"), ("a2", "rank16"), ("delta_z", "delta_u"))
"""Columns of a sample that are the two axes of one panel."""

MAX_SAMPLE = 5000
MAX_SINGULAR_VALUES = 256


@dataclass(frozen=True)
class DrawnHistogram:
    """Counts of finite token values between `edges` (one more edge than counts), linear or logarithmic bins."""

    quantity: Quantity
    """The token quantity."""
    coordinate: Coordinate
    """The coordinate of its logits."""
    edges: tuple[float, ...]
    """Edges of the bins, ascending."""
    counts: tuple[int, ...]
    """Tokens in each bin."""

    def __post_init__(self) -> None:
        if (self.edges or self.counts) and len(self.edges) != len(self.counts) + 1:
            raise InputError(
                f"`edges` is expected to have one entry more than `counts`, but they have {len(self.edges)} and "
                f"{len(self.counts)}."
            )


@dataclass(frozen=True)
class Spectrum:
    """The largest singular values of the head, descending, at most `MAX_SINGULAR_VALUES` of each."""

    raw: tuple[float, ...] = ()
    """σ_i of W."""
    centered: tuple[float, ...] = ()
    """σ_i of W − 1w̄ᵀ."""
    method: str = "exact"
    """"exact" (Gram matrix, fp64) or "randomized"."""


@dataclass(frozen=True)
class GeometrySample:
    """Columns over at most `MAX_SAMPLE` tokens for the three panels of paper fig:gradient_geometry.

    With q_t = Wᵀp_t: panel a draws (x, y) = (q·e₁, q·e₂) raw and (q − w̄)·e₁, (q − w̄)·e₂ centered, e₁ = w̄/‖w̄‖ and e₂
    the leading principal direction of the centered cloud {q − w̄} of these tokens after e₁ is projected out. Panel b draws
    ‖V₁₆ᵀq‖²/‖p‖² against a² = ‖q‖²/‖p‖² (centered: q − w̄ with the centered V₁₆). Panel c draws ‖δ_u‖ = a·‖δ_z‖
    against ‖δ_z‖ = 2λ_diag·|log Z − c|·‖p‖. A column that does not exist for the model is empty.
    """

    x_raw: tuple[float, ...] = ()
    """q·e₁ of each token."""
    y_raw: tuple[float, ...] = ()
    """q·e₂."""
    x_centered: tuple[float, ...] = ()
    """(q − w̄)·e₁."""
    y_centered: tuple[float, ...] = ()
    """(q − w̄)·e₂."""
    a2_raw: tuple[float, ...] = ()
    """a² of the raw head."""
    rank16_raw: tuple[float, ...] = ()
    """Its part in the first 16 singular directions."""
    a2_centered: tuple[float, ...] = ()
    """a² of the centered head."""
    rank16_centered: tuple[float, ...] = ()
    """Its part in the first 16 singular directions of the centered head."""
    delta_z_raw: tuple[float, ...] = ()
    """‖δ_z‖ on raw logits."""
    delta_u_raw: tuple[float, ...] = ()
    """‖δ_u‖ on raw logits."""
    delta_z_centered: tuple[float, ...] = ()
    """‖δ_z‖ on row-centered logits."""
    delta_u_centered: tuple[float, ...] = ()
    """‖δ_u‖ on row-centered logits."""
    mean_row_norm: float | None = None
    """‖w̄‖₂: the length of the translation in panel a."""
    drawn_from: int | None = None
    """Number of tokens the sample was drawn from."""
    note: str = ""
    """How it was drawn, e.g. "every 7th token, and all extreme tokens"."""

    def __post_init__(self) -> None:
        columns = [(f"{x}_{head}", f"{y}_{head}") for x, y in _DRAWN_TOGETHER for head in ("raw", "centered")]
        for pair in columns:
            # One column alone cannot be drawn: it counts as absent too.
            if not all(getattr(self, name) for name in pair):
                for name in pair:
                    object.__setattr__(self, name, ())
        check_columns(self, tuple(name for pair in columns for name in pair if getattr(self, name)))

    def __len__(self) -> int:
        return max(len(self.x_raw), len(self.a2_raw), len(self.delta_z_raw))


@dataclass(frozen=True)
class ExtremeToken:
    """One token of a table of extremes, in its context."""

    block: int
    """Index of its block in the text, from 0."""
    position: int
    """Index of the prediction inside its block, from 0."""
    target: str
    """Text of the predicted token."""
    context: str
    """Text of some tokens before it."""
    log_z: float | None = None
    """log Z."""
    log_z_centered: float | None = None
    """log Z − μ."""
    mu: float | None = None
    """Mean logit."""
    gain: float | None = None
    """A_p of the raw head."""
    gain_centered: float | None = None
    """A_p of the centered head."""
    ce: float | None = None
    """−log p(target), nats."""


@dataclass(frozen=True)
class ExtremeTable:
    """The k most extreme tokens by one quantity, most extreme first."""

    quantity: Quantity
    """The quantity that orders the table."""
    coordinate: Coordinate
    """Its coordinate."""
    tokens: tuple[ExtremeToken, ...]
    """The tokens."""


@dataclass(frozen=True)
class Figures:
    """All data of the figures."""

    histograms: tuple[DrawnHistogram, ...] = ()
    """Tails over tokens."""
    spectrum: Spectrum | None = None
    """Singular values of the head."""
    geometry: GeometrySample | None = None
    """A sample of tokens for the scatter panels."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Keys of a newer version."""

    def histogram(self, quantity: Quantity, coordinate: Coordinate) -> DrawnHistogram | None:
        """The histogram of one quantity in one coordinate, if it was recorded."""
        found = (h for h in self.histograms if h.quantity == quantity and h.coordinate == coordinate)
        return next(found, None)


NOT_MEASURED = "not measured in this run"


@dataclass(frozen=True)
class ModelInfo:
    """The audited checkpoint and the head conventions its numbers use."""

    name: str
    """The model as requested."""
    vocab: int = field(metadata=within(1))
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
    valid_vocab: int | None = field(default=None, metadata=within(1))
    """Rows inside log Z, μ, w̄ and c."""
    rows_beyond_tokenizer: int | None = None
    """Rows of the head that belong to no token."""
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
    """Both coordinates; `centered` is all None if μ does not exist (softcap, -inf bias)."""

    raw: HeadNumbers
    """Logits as the head gives them."""
    centered: HeadNumbers = field(default_factory=HeadNumbers)
    """Row-centered logits, z − μ."""


@dataclass(frozen=True)
class Spacing:
    """Gap between neighboring floats at the p99.9 row maximum: logits closer than this merge when stored so."""

    row_max_999: float | None = None
    """p99.9 of the row maximum."""
    bf16_spacing: float | None = None
    """Gap between neighboring bf16 numbers there."""
    fp16_spacing: float | None = None
    """Gap between neighboring fp16 numbers there; None above 65504, where fp16 overflows."""


@dataclass(frozen=True)
class Precision:
    """The forward side of the precision argument (paper eq:precision_link)."""

    raw: Spacing = field(default_factory=Spacing)
    """Raw logits."""
    centered: Spacing = field(default_factory=Spacing)
    """Row-centered logits."""


@dataclass(frozen=True)
class NoiseNumbers:
    """Root mean square over tokens of log p₁₆(y) − log p₃₂(y), in nats; y is the target."""

    raw: float | None = field(default=None, metadata=NOT_NEGATIVE)
    """Logits of the head as it is."""
    centered: float | None = field(default=None, metadata=NOT_NEGATIVE)
    """Logits of the row-centered head as `zloss center` would save it."""


@dataclass(frozen=True)
class LogitNoise:
    """What logits stored in 16 bits do to the log-probability of the target: the share of the head alone."""

    tokens: int
    """Tokens measured, from the first blocks of the text."""
    saved_dtype: str
    """Dtype of the checkpoint, in which a centered head would be saved."""
    bf16: NoiseNumbers = field(default_factory=NoiseNumbers)
    """Logits rounded to bf16."""
    fp16: NoiseNumbers = field(default_factory=NoiseNumbers)
    """Logits rounded to fp16."""
    rows: tuple[LogprobNoise, ...] = ()
    """The whole table: by format, by what is rounded, by head."""


@dataclass(frozen=True)
class PlannedLoss:
    """The Z-loss λ(log Z − c)² on raw logits that the user trains with or plans to, and what it would send through this model.

    λ, c and the precision of the logits are the user's: an assumption of the consequences, not a measurement.
    """

    coef: float = 1e-4
    """λ."""
    target: float | None = None
    """c; None in a report too incomplete to determine log V."""
    logits: LogitStorage = "bf16"
    """Precision in which the training stack stores its logits."""
    delta_u_99: float | None = field(default=None, metadata=NOT_NEGATIVE)
    """p99 over tokens of ‖δ_u‖ of Z, per token before any reduction."""
    delta_u_ce_99: float | None = field(default=None, metadata=NOT_NEGATIVE)
    """p99 over tokens of ‖Wᵀp − W_y‖, the same for cross-entropy."""
    r_z: float | None = field(default=None, metadata=NOT_NEGATIVE)
    """‖g_Z‖/‖g_CE‖ at the output head, on the diagnostic batch."""
    r_z_model: float | None = field(default=None, metadata=NOT_NEGATIVE)
    """The same over all parameters."""
    input_path: float | None = field(default=None, metadata=NOT_NEGATIVE)
    """‖g_Z‖ of the input path / ‖g_CE‖ of a tied table; None for an untied head."""
    tokens: int | None = None
    """Predictions of the diagnostic batch; R grows with it."""
    router_coef: float | None = None
    """λ_R; None if none was given."""
    router_convention: str | None = None
    """The reduction that λ_R refers to."""
    router_share: float | None = field(default=None, metadata=NOT_NEGATIVE)
    """‖g_RZ‖/‖g_CE‖ on the router weights at λ_R; None without λ_R or routers."""


@dataclass(frozen=True)
class Nonfinite:
    """Tokens with a NaN or an infinite statistic: counted here, excluded from every tail."""

    nan: int = field(default=0, metadata=NOT_NEGATIVE)
    """Tokens with a NaN."""
    inf: int = field(default=0, metadata=NOT_NEGATIVE)
    """Tokens with an infinite statistic."""


@dataclass(frozen=True)
class AuditReport(ResultRecord):
    """One audit of a checkpoint on a text."""

    SCHEMA: ClassVar[str] = "zloss.audit/1"
    FILE: ClassVar[str] = "report.json"

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
    """How the numbers were produced."""
    diag_coef: float = 1e-4
    """λ_diag of `diag_z`, `delta_u_99` and the gradients."""
    gain_beta: float = 1e-2
    """β of `delta_u_99_gain_aware`."""
    target: float | None = None
    """c; None only in a report too incomplete to determine it."""
    precision: Precision = field(default_factory=Precision)
    """Spacing of stored logits."""
    logit_noise: LogitNoise | None = None
    """What 16-bit logits cost; None if it was not measured."""
    planned: PlannedLoss | None = None
    """The Z-loss that the consequences assume; None in older files."""
    nonfinite: Nonfinite = field(default_factory=Nonfinite)
    """Tokens that are excluded from every tail."""
    quantile_bounds: dict[str, Any] = field(default_factory=dict)
    """Always empty, because quantiles are exact."""
    verdict: ActionVerdict | None = None
    """What to do; None before the report is decided, and in older files."""
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
    """Notes on how the numbers were measured, such as a block size limited by the model's positions."""
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
        plain = super().to_dict()
        reasons = plain["reasons"]
        if self.tied_paths is None and not self.model.tied:
            reasons.setdefault("tied_paths", NO_INPUT_PATH)
        for path in _null_numbers(plain):
            if self.reason(path) is None:
                reasons.setdefault(path, NOT_MEASURED)
        return plain


NUMBERS = ("heads", "gradient", "tied_paths", "precision", "logit_noise", "planned")
"""Sections whose nulls need a reason."""


def _null_numbers(plain: dict[str, Any]) -> list[str]:
    """Dotted paths of the Nones among the measured numbers."""
    found = [key for key in ("ppl", "mu_abs_99", "gradient", "tied_paths", "target") if plain[key] is None]
    pending = [(key, plain[key]) for key in NUMBERS if plain[key] is not None]
    while pending:
        path, value = pending.pop()
        if isinstance(value, dict):
            pending.extend((f"{path}.{key}", item) for key, item in value.items())
        elif value is None:
            found.append(path)
    return sorted(found)
