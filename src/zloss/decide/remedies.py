"""What to do about each finding of a loss audit."""

from __future__ import annotations

from collections.abc import Sequence

REUSE = "reuse the forward log-sum-exp statistics in the backward pass"
REMEDIES = {
    "forward_backward_mismatch": REUSE,
    "low_precision_source": f"keep the logits in fp32 on their way to log Z, and {REUSE}",
    "overflow": "subtract the row maximum before exp, and add it back to log Z",
    "zero_gradient_z": "take Z from the logits that carry the gradient, neither detached nor log-probabilities",
    "probabilities_not_logits": "take the log-sum-exp of the logits, not of probabilities",
    "max_shifted": "add the row maximum back to log Z before the square",
    "negative_coefficient": "make λ positive",
    "upstream_ignored": "multiply the stored gradient by the upstream gradient in the backward pass",
    "filtered_source": "give every counted token its Z source: do not skip small probabilities or confident tokens",
    "padding_in_log_z": "keep padding rows of the vocabulary outside log Z",
    "ignored_tokens_leak": "mask ignored tokens out of the sum with `where`",
    "denominator_mismatch": "divide CE and Z by one token count, so that λ means the same in every batch",
    "counted_twice": "add Z once: it is in the loss already",
    "not_off": "return plain CE where λ is 0 or None",
    "not_squared": "square log Z − c: a penalty that is linear in log Z pushes equally hard at every value",
    "targets_moved": "shift the targets once, in the loss or before it",
    "size_dependent": "make the loss independent of the number of tokens and of the vocabulary beyond their means",
    "differs_from_expected": "set λ, c and coordinate to what was meant, or state what is applied",
    "unexplained_source": "find what else enters the gradient beside CE and Z before λ is chosen",
    "not_repeatable": "remove state and random numbers from the loss",
    "overwrites_input": "write into a copy, not into the caller's tensors",
    "all_ignored_nonfinite": "divide by at least 1, so that a batch without targets gives 0",
    "reported_z_value": "report the Z that is trained",
    "reported_z_no_gradient": "detach the reported Z, or give it a gradient",
    "reported_z_dtype": "report Z in fp32",
    "returned_values": "return the loss to train on first, and say which of the further values is Z",
}
"""Finding → remedy, in the order in which they should be made: what makes the trained objective wrong comes first."""


def remedies_for(findings: Sequence[str]) -> str:
    """One sentence with the remedy of each finding, each once, the gravest first; a finding without one is named."""
    order = list(REMEDIES)
    known = sorted({finding for finding in findings if finding in REMEDIES}, key=order.index)
    unknown = [finding for finding in dict.fromkeys(findings) if finding not in REMEDIES]
    parts = [*dict.fromkeys(REMEDIES[finding] for finding in known), *(f"mend {finding}" for finding in unknown)]
    text = "; ".join(parts)
    return text[:1].upper() + text[1:]
