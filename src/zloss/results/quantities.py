"""The measured quantities by key: symbol and one line of meaning, in the order tables show them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Label:
    """How a quantity is written and what it means."""

    key: str
    symbol: str
    meaning: str


HEAD = (
    Label("mu_abs_99", "p99 |μ|", "tail of the mean logit, the common shift CE cannot see (centered: fp32 residual)"),
    Label("p_z_999", "P_Z^99.9", "p99.9 of |log Z − c|, the log-normalizer tail"),
    Label("diag_z", "Diag Z", "λ_diag times the mean squared violation"),
    Label("a_p_99", "A_p^99", "p99 output-to-hidden gain ‖Wᵀp‖/‖p‖"),
    Label("a_p_mean", "mean A_p", "mean output-to-hidden gain"),
    Label("delta_u_99", "p99 ‖δ_u‖", "tail of the source that reaches the hidden state, per token at λ_diag"),
    Label("delta_u_99_gain_aware", "p99 ‖δ_u‖, gain-aware", "the same tail weighted by 1/(1 + β·A_p^2)"),
    Label("log_z_mean", "mean log Z", "mean log-normalizer"),
    Label("mu_rms", "rms μ", "root mean square of the common shift"),
    Label("row_max_999", "p99.9 max z", "tail of the row maximum, where stored logits are coarsest"),
    Label("sigma_1", "σ_1", "spectral norm of the head"),
    Label("e_1", "E_1", "share of the head's energy in its first singular direction"),
    Label("e_16", "E_16", "share of the head's energy in the first 16 singular directions"),
    Label("f_16", "F_16", "mean share of a token's a² inside those directions"),
    Label("rho_16", "ρ_16", "correlation over tokens of that rank-16 part with a²"),
)

HEADLINE = ("mu_abs_99", "p_z_999", "a_p_99", "delta_u_99", "diag_z")
"""The cards of the page, with R_Z after them."""

BY_KEY = {label.key: label for label in HEAD}
