"""Quantities of one token: the fields of `TokenStats`, the columns of a table of extreme tokens, the axes of token figures."""

from __future__ import annotations

from zloss.results.quantities.definition import PER_TOKEN, Definition

TOKENS = (
    Definition("log_z", "log Z", "log-normalizer of the token's logits", "nat", PER_TOKEN, "eq:zloss"),
    Definition(
        "log_z_centered",
        "log Z̃",
        "log-normalizer of the centered logits, log Z − μ",
        "nat",
        PER_TOKEN,
        "eq:centered_head",
    ),
    Definition("row_max", "max z", "largest logit of the token", "nat", PER_TOKEN, "eq:precision_link"),
    Definition("log_s", "log S", "log-normalizer minus the row maximum", "nat", PER_TOKEN),
    Definition("target_logit", "z_y", "logit of the target", "nat", PER_TOKEN),
    Definition("target_log_prob", "log p_y", "log-probability of the target", "nat", PER_TOKEN),
    Definition("valid", "valid", "whether the token is counted", "", PER_TOKEN),
    Definition("top1", "top-1", "whether the target has the largest logit", "", PER_TOKEN),
    Definition("nonfinite", "nonfinite", "whether log Z or the target's logit is NaN or infinite", "", PER_TOKEN),
    Definition("mu", "μ", "mean logit, the common shift", "nat", PER_TOKEN, "eq:centered_raw"),
    Definition("mu_residual", "μ residual", "mean of the computed logits minus μ", "nat", PER_TOKEN, "eq:centered_raw"),
    Definition("p_norm", "‖p‖", "Euclidean norm of the softmax", "", PER_TOKEN, "eq:source"),
    Definition("gain", "gain A_p", "output-to-hidden gain ‖Wᵀp‖/‖p‖", "", PER_TOKEN, "eq:ap"),
    Definition("gain_centered", "centered gain A_p", "the gain of the row-centered head", "", PER_TOKEN, "eq:ap"),
    Definition("tokens.ce", "CE", "−log p of the predicted token", "nat", PER_TOKEN, "", "lower"),
    Definition("block", "block", "index of the block the token stands in"),
    Definition("position", "position", "index of the prediction inside its block, from 0"),
    # What the figures over tokens draw.
    Definition(
        "violation", "|log Z − c|", "distance of the log-normalizer from its target", "nat", PER_TOKEN, "eq:zloss"
    ),
    Definition("shift", "|μ|", "size of the common shift", "nat", PER_TOKEN, "eq:centered_raw"),
    # What a run keeps of its validation tokens, block by block.
    Definition("shift_squared", "μ²", "square of the common shift", "nat²", PER_TOKEN, "eq:centered_raw"),
    Definition("violation_squared", "(log Z − c)²", "squared distance from the target", "nat²", PER_TOKEN, "eq:zloss"),
    Definition(
        "delta_u_gain_aware", "‖δ_u‖, gain-aware", "‖δ_u‖ times 1/(1 + β·A_p²), at λ_diag", "", PER_TOKEN, "eq:ap"
    ),
    Definition("validation_blocks.tokens", "tokens", "predictions of each validation block", "tokens"),
    Definition("kept", "K", "values kept of every tail of the validation tokens", "tokens"),
    Definition("a2", "a²", "squared output-to-hidden gain", "", PER_TOKEN, "eq:ap_svd"),
    Definition(
        "rank16",
        "rank-16 part of a²",
        "part of a² inside the first 16 singular directions of the head",
        "",
        PER_TOKEN,
        "eq:ap_svd",
    ),
    Definition("logit_source", "‖δ_z‖", "norm of the Z source at the logits, at λ_diag", "", PER_TOKEN, "eq:source"),
    Definition(
        "delta_u", "‖δ_u‖", "norm of the Z source at the hidden state, at λ_diag", "", PER_TOKEN, "eq:hidden_injection"
    ),
)

SPECTRUM = (
    Definition("sigma", "σ_i", "singular value number i of the head", "", "of the head's weights", "eq:ap_svd"),
    Definition(
        "energy",
        "share of energy",
        "share of ‖W‖² in the first i singular directions",
        "share",
        "of the head's weights",
        "tab:spectral_audit",
    ),
)
