"""How much each finding matters. Errors set exit code 1 of the command; `--strict` counts warnings and notes too."""

from __future__ import annotations

from zloss.results.loss_audit import Severity

SEVERITY: dict[str, Severity] = {
    # The gradient is not the one of the objective the loss claims, or λ is not what it seems.
    "zero_gradient_z": "error",
    "low_precision_source": "error",
    "forward_backward_mismatch": "error",
    "denominator_mismatch": "error",
    "max_shifted": "error",
    "not_off": "error",
    "counted_twice": "error",
    "reported_z_no_gradient": "error",
    "reported_z_value": "error",
    "upstream_ignored": "error",
    "probabilities_not_logits": "error",
    "overflow": "error",
    "filtered_source": "error",
    "padding_in_log_z": "error",
    "negative_coefficient": "error",
    "ignored_tokens_leak": "error",
    "differs_from_expected": "error",
    "not_squared": "error",
    "size_dependent": "error",
    "targets_moved": "error",
    # Known behaviour of common losses, or something the audit cannot judge.
    "all_ignored_nonfinite": "warning",
    "overwrites_input": "warning",
    "reported_z_dtype": "warning",
    "unexplained_source": "warning",
    "not_repeatable": "warning",
    # Facts a reader should know, which are no fault.
    "returned_values": "note",
}
