"""Quantities that only the paper's tables have: spreads over seeds, differences from CE, identities of its figure."""

from __future__ import annotations

from zloss.results.quantities.definition import METRICS, Definition

SEEDS = "sample standard deviation over seeds"

REPRODUCTION = (
    Definition("ppl_std", "PPL std", "spread of the perplexity", "", SEEDS, "tab:finetune"),
    Definition("ce_std", "CE std", "spread of the cross-entropy", "nat", SEEDS, "tab:moe"),
    Definition("entropy_std", "entropy std", "spread of the router entropy", "nat", SEEDS, "tab:moe"),
    Definition(
        "delta_ppl", "ΔPPL", "perplexity minus that of the matched baseline", "", "mean over seeds", "", "lower"
    ),
    Definition(
        "delta_a_p_99",
        "ΔA_p^99",
        "gain tail minus that of the matched baseline",
        "",
        "mean over seeds",
        "eq:ap",
        "lower",
    ),
    Definition(
        "v_max_ratio_to_ce",
        "max v / CE",
        "largest second moment of Adam relative to that of CE",
        "",
        "",
        "tab:adam_state_stress",
        "lower",
    ),
    Definition(
        "d_inf_p99",
        "p99 ‖d‖∞",
        "p99 of the largest coordinate of Adam's proxy direction",
        "",
        "p99 over sampled steps",
        "tab:adam_state_stress",
        "lower",
    ),
    Definition("lambda_aux", "λ_aux", "coefficient of the method's penalty", "", "", METRICS),
    Definition("aux_ce_cosine", "C_Z", "cosine of the Z gradient with the CE gradient", "", "", METRICS),
    Definition(
        "output_path_norm",
        "output path",
        "norm of the tied table's Z gradient through the output logits",
        "",
        "",
        "eq:tied_decomp",
    ),
    Definition(
        "input_path_norm",
        "input path",
        "norm of the tied table's Z gradient through the input embedding",
        "",
        "",
        "eq:tied_decomp",
    ),
    Definition(
        "input_output_cosine", "cos(in, out)", "cosine of the two paths into the tied table", "", "", "eq:tied_decomp"
    ),
    Definition(
        "translation_error",
        "translation error",
        "largest relative error of the move by −w̄ over the sampled tokens",
        "",
        "maximum over tokens",
        "fig:gradient_geometry",
        "lower",
    ),
    Definition(
        "identity_error",
        "identity error",
        "largest relative error of ‖δ_u‖ = A_p·‖δ_z‖ over the sampled tokens",
        "",
        "maximum over tokens",
        "fig:gradient_geometry",
        "lower",
    ),
)
