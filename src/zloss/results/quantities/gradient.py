"""Quantities of gradients on a diagnostic batch: Z against CE, the two paths into a tied table, the λ that meets a budget."""

from __future__ import annotations

from zloss.results.quantities.definition import DIAGNOSTIC_BATCH, METRICS, Definition

GRADIENT = (
    Definition(
        "r_z",
        "R_Z",
        "norm of the Z gradient relative to the CE gradient, output head, at λ_diag",
        "",
        DIAGNOSTIC_BATCH,
        METRICS,
    ),
    Definition("c_z", "C_Z", "cosine of the Z gradient with the CE gradient", "", DIAGNOSTIC_BATCH, METRICS),
    Definition(
        "r_aux",
        "R_aux",
        "norm of the method's auxiliary gradient relative to the CE gradient, output head",
        "",
        DIAGNOSTIC_BATCH,
        METRICS,
    ),
    Definition(
        "c_aux",
        "C_aux",
        "cosine of the method's auxiliary gradient with the CE gradient",
        "",
        DIAGNOSTIC_BATCH,
        METRICS,
    ),
    Definition("gradient.coef", "λ_diag", "coefficient of the Z gradient", "", "", METRICS),
    Definition("gradient.blocks", "blocks", "diagnostic blocks of the gradients", "blocks"),
    Definition("ce_norm", "‖g_CE‖", "norm of the CE gradient of the output-head tensor", "", DIAGNOSTIC_BATCH, METRICS),
    Definition("z_norm", "‖g_Z‖", "norm of the Z gradient of the output-head tensor", "", DIAGNOSTIC_BATCH, METRICS),
    Definition("lambda_budget.r_z", "R_Z budget", "R_Z that the coefficient may reach"),
    Definition("lambda_budget", "λ for R_Z", "coefficient at which R_Z meets its budget, R_Z being linear in λ"),
)

TIED_PATHS = (
    Definition(
        "output_norm",
        "output ‖g‖",
        "norm of the tied table's Z gradient through the output logits",
        "",
        DIAGNOSTIC_BATCH,
        "eq:tied_decomp",
    ),
    Definition(
        "input_norm",
        "input ‖g‖",
        "norm of the tied table's Z gradient through the input embedding",
        "",
        DIAGNOSTIC_BATCH,
        "eq:tied_decomp",
    ),
    Definition(
        "cosine", "cosine", "cosine of the two paths into the tied table", "", DIAGNOSTIC_BATCH, "eq:tied_decomp"
    ),
)
