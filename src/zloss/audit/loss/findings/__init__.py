"""One question per file; each answers `check(evidence) -> Finding`."""

from __future__ import annotations

from zloss.audit.loss.evidence import Check
from zloss.audit.loss.findings import (
    all_ignored_nonfinite,
    counted_twice,
    denominator_mismatch,
    differs_from_expected,
    filtered_source,
    forward_backward_mismatch,
    ignored_tokens_leak,
    low_precision_source,
    max_shifted,
    negative_coefficient,
    not_off,
    not_repeatable,
    not_squared,
    overflow,
    overwrites_input,
    padding_in_log_z,
    probabilities_not_logits,
    reported_z_dtype,
    reported_z_no_gradient,
    reported_z_value,
    returned_values,
    size_dependent,
    targets_moved,
    unexplained_source,
    upstream_ignored,
    zero_gradient_z,
)

CHECKS: tuple[Check, ...] = (
    zero_gradient_z.check,
    low_precision_source.check,
    forward_backward_mismatch.check,
    all_ignored_nonfinite.check,
    denominator_mismatch.check,
    max_shifted.check,
    not_off.check,
    counted_twice.check,
    overwrites_input.check,
    reported_z_dtype.check,
    reported_z_no_gradient.check,
    reported_z_value.check,
    upstream_ignored.check,
    probabilities_not_logits.check,
    overflow.check,
    filtered_source.check,
    padding_in_log_z.check,
    unexplained_source.check,
    not_squared.check,
    size_dependent.check,
    targets_moved.check,
    returned_values.check,
    negative_coefficient.check,
    ignored_tokens_leak.check,
    differs_from_expected.check,
    # Last: it asks whether the calls in between have left a trace.
    not_repeatable.check,
)
"""In the order of the report."""
