"""The audit of an implementation: what a loss in low precision injects, and what reaches the update."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from zloss.results.audit import CorpusInfo, ModelInfo
from zloss.results.logprobs import LogprobNoise
from zloss.results.provenance import AuditProvenance
from zloss.results.record import ResultRecord

CE = "ce"
"""The method whose fp16 margin is the reference of the others."""


@dataclass(frozen=True)
class StoredLogits:
    """The Z source that fp32 statistics of stored logits give, against that of the fp64 logits."""

    storage: str
    """Dtype in which the logits were stored: fp32, bf16 or fp16."""
    logit_scale: float
    """Factor on the logits before they were stored; 1 for the model's own."""
    tokens: int
    """Tokens audited."""
    forward_rel_error: float | None
    """|ΣL̂ − ΣL| / ΣL of the penalty summed over a block, mean over blocks."""
    delta_src: float | None
    """Δ_src = ‖δ̂ − δ‖₂ / ‖δ‖₂ of the Z source, mean over tokens (paper eq:backward_deltas)."""
    delta_src_p99: float | None
    """p99 of Δ_src over tokens."""
    delta_src_max: float | None
    """Largest Δ_src of a token."""
    backward_cosine: float | None
    """Cosine of the two sources, mean over tokens."""
    nonfinite: int = 0
    """Tokens whose Δ_src is not finite; they enter none of the numbers above."""


@dataclass(frozen=True)
class AppliedLoss:
    """The gradient that one installed implementation of CE + Z returns.

    For a loss that takes logits the reference is fp64 of the logits before they were stored. A loss that projects hidden
    states is compared at the hidden states, with fp64 of the same rounded inputs.
    """

    implementation: str
    """Short name of the implementation."""
    title: str
    """What it is."""
    takes: Literal["logits", "linear"]
    """ "logits", or "linear" for hidden states and head."""
    storage: str
    """Dtype of the logits, or of hidden states and head."""
    tokens: int
    """Tokens audited."""
    interpreted: bool
    """Whether its kernels ran on Triton's interpreter, which cuts bf16 off where a GPU rounds."""
    target: float
    """c: the audit's, or the only one that the implementation supports."""
    rel_forward_error: float | None
    """|Ẑ − Z| / Z of the penalty summed over all tokens; None for a loss without Z."""
    delta_total: float | None
    """Δ_tot: relative error of the whole CE+Z gradient."""
    total_cosine: float | None
    """Cosine of the whole CE+Z gradient with the reference."""
    delta_z: float | None
    """Δ_Z: relative error of its Z part; None for a loss without Z."""
    z_cosine: float | None
    """Cosine of the Z part with the reference, mean over tokens; None for a loss without Z."""
    kernel_delta_z: float | None
    """Relative error of the Z part against fp64 of the inputs as they were given: the kernel's own share."""
    delta_weight: float | None
    """For a loss that projects: relative error of the head's CE+Z gradient."""


@dataclass(frozen=True)
class UpdateErrors:
    """The source of stored logits sent through the model graph, against the fp64 source."""

    storage: str
    """Dtype in which the logits were stored."""
    logit_scale: float
    """Factor on the logits before they were stored."""
    part: Literal["total", "z"]
    """ "total" for the CE+Z source, "z" for the Z source alone."""
    scope: Literal["head", "all"]
    """The parameters: those of the output head (a tied table with both paths), or all."""
    tokens: int
    """Predictions of the batch, over which gradients are mean-reduced."""
    grad_rel_error: float | None
    """‖ĝ − g‖_F / ‖g‖_F; for part "z" it is Δ_θ of the paper (eq:backward_deltas)."""
    grad_cosine: float | None
    """Cosine of the two gradients."""
    adam_dir_rel_error: float | None
    """Relative error of the first Adam direction g/(|g| + 1e-8)."""
    adam_dir_cosine: float | None
    """Cosine of the two first Adam directions."""


@dataclass(frozen=True)
class Fp16Headroom:
    """How far a static fp16 loss scale can go with the full-model gradient of one method; a batch is one block."""

    method: str
    """Name of the objective."""
    coef: float
    """λ; 0 for a method without one."""
    batches: int
    """Batches audited."""
    grad_norm_mean: float | None
    """Mean over batches of ‖g‖₂ over all parameters, before clipping."""
    grad_inf_mean: float | None
    """Mean over batches of the largest coordinate, ‖g‖∞."""
    kappa_min: float | None
    """Smallest over batches of the largest safe scale 65504/‖g‖∞; 0 where a gradient is not finite."""
    psi: dict[str, float] = field(default_factory=dict)
    """Share of batches that overflow fp16 at a static scale κ, by `psi_κ`."""
    nonfinite: int = 0
    """Batches whose gradient holds NaN or Inf."""
    reason: str = ""
    """Why the numbers are missing; empty if they are there."""


@dataclass(frozen=True)
class ImplementationAudit(ResultRecord):
    """Source, update and overflow audit of one model on one text."""

    SCHEMA: ClassVar[str] = "zloss.implementation-audit/1"
    FILE: ClassVar[str] = "implementation_audit.json"

    model: ModelInfo
    """The checkpoint."""
    corpus: CorpusInfo
    """The text of the source audit; the other sections read its first blocks."""
    coef: float
    """λ of every section."""
    target: float
    """c."""
    source: tuple[StoredLogits, ...]
    """One line per storage dtype and logit factor."""
    implementations: tuple[AppliedLoss, ...]
    """One line per implementation and dtype."""
    updates: tuple[UpdateErrors, ...]
    """One line per storage dtype, logit factor, part and scope."""
    overflow: tuple[Fp16Headroom, ...]
    """One line per method."""
    provenance: AuditProvenance
    """How the numbers were produced."""
    logprobs: tuple[LogprobNoise, ...] = ()
    """Log-probabilities from 16-bit logits: one line per format, rounded quantity and head."""
    autocast: str | None = None
    """Precision of the forward pass of the overflow audit; None for fp32."""
    status: Literal["complete", "partial"] = "complete"
    """ "partial" for an interrupted audit."""
    timings: dict[str, float] = field(default_factory=dict)
    """Seconds by section."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Why a section is empty or a number None, by its dotted path."""
    notes: tuple[str, ...] = ()
    """Caveats: implementations that are not installed or could not run, slow paths."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Keys of a newer version."""

    @property
    def own_source(self) -> tuple[StoredLogits, ...]:
        """The lines of the source audit at the model's own logit scale."""
        return tuple(line for line in self.source if line.logit_scale == 1)

    @property
    def update_errors(self) -> tuple[tuple[str, float], ...]:
        """(name in the decision map, Δ_θ = ‖ĝ − g‖_F / ‖g‖_F) of every line at the model's own logit scale."""
        parts, scopes = {"total": "CE+Z", "z": "Z"}, {"head": "of the head", "all": "of all parameters"}
        return tuple(
            (f"{line.storage} logits, {parts[line.part]} gradient {scopes[line.scope]}", line.grad_rel_error)
            for line in self.updates
            if line.logit_scale == 1 and line.grad_rel_error is not None
        )
