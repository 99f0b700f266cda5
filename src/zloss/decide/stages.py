"""The eight stages of the decision map as data (paper tab:diagnostic_intervention_map)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """What can go wrong at one place of source → transport → optimizer, what shows it, and what to do about it."""

    name: str
    risk: str
    trigger: str
    action: str
    expected: str
    not_guaranteed: str
    evidence: str
    """Where the paper shows it."""
    threshold_name: str
    commands: tuple[str, ...]
    """The commands that evaluate the stage, one after the other."""


SOURCE = Stage(
    name="Source coordinate",
    risk="A common shift of all logits: invisible to cross-entropy, active in Z-loss",
    trigger="p99 |μ| of the raw head",
    action="Deploy the row-centered head (subtract w̄·u + b̄ from every logit)",
    expected="μ = 0, with softmax and CE unchanged",
    not_guaranteed="A smaller P_Z^99.9, a smaller A_p^99 or a better PPL",
    evidence="tab:pretrained, tab:finetune, tab:fineweb_pretrained",
    threshold_name="shift_over_log_v",
    commands=("zloss audit MODEL",),
)
DECOMPOSITION = Stage(
    name="Objective decomposition",
    risk="Shift and relative logits both violate the target, and one λ pulls on both",
    trigger="Mean squares of μ and of log Z̃ − c, side by side",
    action="Factorized Z-loss: a coefficient and a target for each",
    expected="The two coordinates answer to their own coefficients; the cross term is gone",
    not_guaranteed="Smaller update tails or a better PPL: it is a controlled probe",
    evidence="eq:factorized, tab:fineweb_update_outlier_sweep",
    threshold_name="component_share",
    commands=("zloss audit MODEL",),
)
TRANSPORT = Stage(
    name="Architectural transport",
    risk="The output head amplifies the source on its way to the hidden state",
    trigger="A_p^99 of the raw head, with the tail of ‖δ_u‖",
    action="Gain-aware weighting with the gain detached",
    expected="Source and update tails shrink where A_p is large",
    not_guaranteed="A smaller unweighted A_p^99",
    evidence="tab:stress_diag, tab:spectral_audit, tab:adam_state_stress",
    threshold_name="gain_99",
    commands=("zloss audit MODEL",),
)
PATHWAY = Stage(
    name="Shared pathway",
    risk="On a tied table the output loss also arrives through the input embedding",
    trigger="Input-path norm relative to the output-path norm, and their cosine",
    action="Read both paths, then review λ against the R_Z budget",
    expected="The coupled update of the shared table becomes visible",
    not_guaranteed="Any reduction of the gradient: no intervention is claimed",
    evidence="Tied-embedding pathway diagnostics (appendix)",
    threshold_name="input_path_ratio",
    commands=("zloss audit MODEL",),
)
IMPLEMENTATION = Stage(
    name="Implementation",
    risk="The backward source is not the derivative of the loss that was computed",
    trigger="Δ_src of the training loss against fp64, Δ_θ of the update, and the findings of its audit",
    action="Reuse the forward log-sum-exp statistics in the backward pass",
    expected="A backward source consistent with the computed loss",
    not_guaranteed="fp32 fidelity once logits were stored in fewer bits",
    evidence="tab:source_audit, tab:triton_fused, tab:update_audit",
    threshold_name="delta_src",
    commands=("zloss audit-loss MODULE:FUNCTION --out DIR", "zloss audit-implementation MODEL --out DIR"),
)
ROUTER = Stage(
    name="Router reduction",
    risk="The same λ_R means different strengths under different top-k reductions",
    trigger="s_rel = N_tl·α and the absolute coefficient λ_R·α",
    action="Match the coefficient so that s_rel = 1",
    expected="The scale of the token-layer mean is recovered",
    not_guaranteed="Better validation quality or load balance",
    evidence="tab:router, tab:moe",
    threshold_name="router_scale_tolerance",
    commands=("zloss router-scale --out DIR",),
)
OPTIMIZER = Stage(
    name="Optimizer consequence",
    risk="Rare, large transported updates reach the optimizer",
    trigger="Pre-clip gradient tails, event rates Φ_τ, Adam state, spikes and fp16 margin against the baseline; nonfinite steps",
    action="Apply the action of the stage that fired upstream, then measure again",
    expected="The tail in question shrinks",
    not_guaranteed="Acceptable validation quality",
    evidence="tab:fineweb_update_outlier, tab:adam_state_stress, tab:overflow_audit",
    threshold_name="grad_tail_ratio",
    commands=("zloss train MODEL", "zloss compare DIR"),
)
QUALITY = Stage(
    name="Quality gate",
    risk="The geometry improves at the price of the language model",
    trigger="Validation CE and PPL against the matched baseline",
    action="Reject, retune, or change the intervention",
    expected="Quality stays within a tolerance stated beforehand",
    not_guaranteed="That every diagnostic improves at once",
    evidence="Matched continued pretraining and coefficient sweeps",
    threshold_name="quality_tolerance",
    commands=("zloss train MODEL", "zloss compare DIR"),
)

STAGES = (SOURCE, DECOMPOSITION, TRANSPORT, PATHWAY, IMPLEMENTATION, ROUTER, OPTIMIZER, QUALITY)
