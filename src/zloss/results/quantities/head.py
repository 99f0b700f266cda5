"""Quantities of an output head: token tails and spectrum (`heads.raw`, `heads.centered`), the text they were measured on."""

from __future__ import annotations

from zloss.results.quantities.definition import (
    MEAN_TOKENS,
    METRICS,
    OF_THE_HEAD,
    P99_TOKENS,
    P999_TOKENS,
    Definition,
)

HEAD = (
    Definition(
        "mu_abs_99",
        "p99 |μ|",
        "tail of the mean logit, the common shift CE cannot see (centered: fp32 residual)",
        "nat",
        P99_TOKENS,
        "eq:centered_raw",
        "lower",
    ),
    Definition(
        "p_z_999", "P_Z^99.9", "p99.9 of |log Z − c|, the log-normalizer tail", "nat", P999_TOKENS, METRICS, "lower"
    ),
    Definition("diag_z", "Diag Z", "λ_diag times the mean squared violation", "nat²", MEAN_TOKENS, "eq:zloss", "lower"),
    Definition("a_p_99", "A_p^99", "p99 output-to-hidden gain ‖Wᵀp‖/‖p‖", "", P99_TOKENS, "eq:ap", "lower"),
    Definition("a_p_mean", "mean A_p", "mean output-to-hidden gain", "", MEAN_TOKENS, "eq:ap", "lower"),
    Definition(
        "delta_u_99",
        "p99 ‖δ_u‖",
        "tail of the source that reaches the hidden state, per token at λ_diag",
        "",
        P99_TOKENS,
        "eq:hidden_injection",
        "lower",
    ),
    Definition(
        "delta_u_99_gain_aware",
        "p99 ‖δ_u‖, gain-aware",
        "the same tail weighted by 1/(1 + β·A_p^2)",
        "",
        P99_TOKENS,
        "eq:gain_aware_source",
        "lower",
    ),
    Definition("log_z_mean", "mean log Z", "mean log-normalizer", "nat", MEAN_TOKENS, "eq:zloss"),
    Definition(
        "mu_rms", "rms μ", "root mean square of the common shift", "nat", "rms over tokens", "eq:z_expand", "lower"
    ),
    Definition(
        "row_max_999",
        "p99.9 max z",
        "tail of the row maximum, where stored logits are coarsest",
        "nat",
        P999_TOKENS,
        "eq:precision_link",
        "lower",
    ),
    Definition("sigma_1", "σ_1", "spectral norm of the head", "", OF_THE_HEAD, "eq:ap_svd"),
    Definition(
        "e_1",
        "E_1",
        "share of the head's energy in its first singular direction",
        "share",
        OF_THE_HEAD,
        "tab:spectral_audit",
    ),
    Definition(
        "e_16",
        "E_16",
        "share of the head's energy in the first 16 singular directions",
        "share",
        OF_THE_HEAD,
        "tab:spectral_audit",
    ),
    Definition(
        "f_16", "F_16", "mean share of a token's a² inside those directions", "share", MEAN_TOKENS, "tab:spectral_audit"
    ),
    Definition(
        "rho_16",
        "ρ_16",
        "correlation over tokens of that rank-16 part with a²",
        "",
        "Pearson over tokens",
        "tab:spectral_audit",
    ),
)

PRECISION = (
    Definition(
        "bf16_spacing",
        "bf16 spacing",
        "gap between neighbouring bf16 numbers at the p99.9 row maximum",
        "nat",
        P999_TOKENS,
        "eq:precision_link",
        "lower",
    ),
    Definition(
        "fp16_spacing",
        "fp16 spacing",
        "gap between neighbouring fp16 numbers at the p99.9 row maximum",
        "nat",
        P999_TOKENS,
        "eq:precision_link",
        "lower",
    ),
)

TEXT = (
    Definition("ppl", "PPL", "perplexity, exp of the mean cross-entropy", "", MEAN_TOKENS, "", "lower"),
    Definition("ce", "CE", "mean cross-entropy of the predicted tokens", "nat", MEAN_TOKENS, "", "lower"),
    Definition("diag_coef", "λ_diag", "coefficient at which the diagnostic Z is evaluated", "", "", METRICS),
    Definition("gain_beta", "β", "weight of A_p^2 in the gain-aware tail", "", "", "eq:gain_aware"),
    Definition("target", "c", "value of log Z at which the penalty is zero", "nat", "", "eq:zloss"),
    Definition("predictions", "predictions", "predicted tokens that were scored, each exactly once", "tokens"),
    Definition("blocks", "blocks", "blocks of consecutive tokens that were read", "blocks"),
    Definition("block_size", "block size", "predictions of one block", "tokens"),
    Definition("finished_blocks", "finished blocks", "blocks that were measured before the end", "blocks"),
    Definition("vocab", "V", "rows of the output head", "rows"),
    Definition("width", "D", "features of a hidden state", "features"),
    Definition("valid_vocab", "valid vocabulary", "rows inside log Z, μ, w̄ and c", "rows"),
    Definition(
        "rows_beyond_tokenizer",
        "rows beyond the tokenizer",
        "rows of the head that no token of the tokenizer has",
        "rows",
    ),
    Definition("logit_scale", "logit scale", "factor s of z = s(Wu + b)"),
    Definition("softcap", "softcap", "bound of the logits cap·tanh(z/cap)", "nat"),
    Definition("nan", "NaN", "tokens with a NaN statistic, kept out of every tail", "tokens", "count", "", "lower"),
    Definition(
        "inf", "Inf", "tokens with an infinite statistic, kept out of every tail", "tokens", "count", "", "lower"
    ),
)

HEADLINE = ("mu_abs_99", "p_z_999", "a_p_99", "delta_u_99", "diag_z")
"""The cards of the page, with R_Z after them."""
