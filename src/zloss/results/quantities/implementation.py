"""Quantities of an implementation against its reference: source, gradient and update errors, fp16 headroom."""

from __future__ import annotations

from zloss.results.quantities.definition import Definition

DELTAS = "eq:backward_deltas"
UPDATE = "tab:update_audit"
FUSED = "tab:triton_fused"
OVERFLOW = "eq:overflow_proxy"
TOKENS = "mean of per-token ratios; in the audit of a loss, norms over all tokens"


def _error(key: str, symbol: str, meaning: str, over: str = "", equation: str = DELTAS) -> Definition:
    return Definition(key, symbol, meaning, "", over, equation, "lower")


def _cosine(key: str, symbol: str, meaning: str, equation: str) -> Definition:
    return Definition(key, symbol, meaning, "", "", equation, "higher")


SOURCE = (
    _error("forward_rel_error", "forward error", "relative error of the loss value against fp64"),
    _error("rel_forward_error", "forward error", "relative error of the loss value against the reference"),
    _error("delta_src", "Δ_src", "relative error of the Z source at the logits", TOKENS),
    _error("delta_src_p99", "Δ_src p99", "p99 of the relative error of the Z source", "p99 over tokens"),
    _error("delta_src_max", "Δ_src max", "largest relative error of the Z source", "maximum over tokens"),
    _error("delta_total", "Δ_tot", "relative error of the total CE+Z source", "", FUSED),
    _error("delta_z", "Δ_Z", "relative error of the Z part of the source", "", FUSED),
    _error(
        "kernel_delta_z", "kernel Δ_Z", "relative error of the Z source against fp64 on the stored logits", "", FUSED
    ),
    _error("delta_weight", "Δ_tot at W", "relative error of the head's total gradient", "", FUSED),
    _error(
        "split_residual",
        "split residual",
        "relative size of what the three terms of the source mismatch leave over",
        "",
        "eq:source_mismatch",
    ),
    _error("bf16_inputs", "dW error, bf16 inputs", "relative error of dW on bf16 hidden states and weights"),
    _cosine("source.cosine", "cosine", "cosine of the applied source with the fp64 source", DELTAS),
    _cosine("backward_cosine", "cosine", "cosine of the applied source with the reference source", "tab:source_audit"),
    _cosine("z_cosine", "Z cosine", "cosine of the Z part of the source with the reference", FUSED),
    _cosine("total_cosine", "total cosine", "cosine of the total CE+Z gradient with the reference", FUSED),
    Definition(
        "source.logit_scale", "logit ×", "factor on the logits before they are stored", "", "", "tab:source_audit"
    ),
    Definition("source.nonfinite", "nonfinite", "tokens whose error is not finite", "tokens", "count", "", "lower"),
    Definition("tokens", "tokens", "tokens that were audited", "tokens"),
)

UPDATES = (
    Definition("updates.logit_scale", "logit ×", "factor on the logits before they are stored", "", "", UPDATE),
    _error("grad_rel_error", "gradient error", "relative error of the parameter gradient", "", UPDATE),
    _error("grad_rel_error_min", "least error", "smallest relative error of a parameter gradient", "", UPDATE),
    _error("grad_rel_error_max", "largest error", "largest relative error of a parameter gradient", "", UPDATE),
    _error(
        "grad_rel_error_max_bf16", "largest, bf16", "largest relative error of a parameter gradient in bf16", "", UPDATE
    ),
    _error("z_grad_rel_error", "Δ_θ of Z", "relative error of the Z part of the parameter gradient"),
    _error("adam_dir_rel_error", "Adam direction error", "relative error of the first Adam direction", "", UPDATE),
    _cosine(
        "adam_dir_cosine", "Adam direction cosine", "cosine of the first Adam direction with the reference", UPDATE
    ),
    _cosine("grad_cosine", "gradient cosine", "cosine of the parameter gradient with the reference", UPDATE),
)

OVERFLOWS = (
    Definition("batches", "batches", "batches whose gradient was audited", "batches"),
    Definition(
        "overflow.nonfinite", "nonfinite", "batches whose gradient is not finite", "batches", "count", "", "lower"
    ),
    Definition(
        "grad_norm_mean",
        "mean ‖g‖₂",
        "mean gradient norm of the audited batches",
        "",
        "mean over batches",
        "tab:overflow_audit",
        "lower",
    ),
    Definition(
        "grad_inf_mean",
        "mean ‖g‖∞",
        "mean largest gradient coordinate of the audited batches",
        "",
        "mean over batches",
        "tab:overflow_audit",
        "lower",
    ),
    Definition(
        "kappa_min",
        "κ_min",
        "smallest safe static fp16 loss scale of a batch",
        "",
        "minimum over batches",
        OVERFLOW,
        "higher",
    ),
    *(
        Definition(
            f"psi_{scale}",
            f"Ψ_{scale}",
            f"share of batches whose gradient overflows fp16 at loss scale {scale}",
            "share",
            "share of batches",
            OVERFLOW,
            "lower",
        )
        for scale in (256, 1024, 4096, 16384, 65536)
    ),
)
