"""Run with TRITON_INTERPRET=1: audit Triton losses on the CPU, and print a JSON object for each name that is given."""

from __future__ import annotations

import json
import sys
from typing import Any

from torch import Tensor

from tests.quick_interpreter import make_interpreter_quick
from zloss.audit.loss import checks
from zloss.audit.loss.audit import audit_loss


def liger(logits: Tensor, target: Tensor) -> Any:
    from liger_kernel.transformers.functional import liger_cross_entropy

    return liger_cross_entropy(logits, target, lse_square_scale=1e-3, return_z_loss=True)


def ours(logits: Tensor, target: Tensor) -> Any:
    import zloss

    return zloss.logits_loss(logits, target, zloss.StandardZLoss(1e-3, 0.0), backend="triton")


if __name__ == "__main__":
    make_interpreter_quick()
    # An interpreted kernel takes milliseconds per token.
    checks.PRIMES, checks.VOCABS, checks.REPEATS = (5, 131), (5003,), 2
    for name in sys.argv[1:]:
        print(json.dumps(audit_loss({"liger": liger, "ours": ours}[name], tokens=16).to_dict()))
