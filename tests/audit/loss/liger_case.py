"""Run with TRITON_INTERPRET=1: audit Liger's fp32 cross-entropy with Z on the CPU and print the result as JSON."""

from __future__ import annotations

import json
from typing import Any

from torch import Tensor

from zloss.audit.loss.run import audit_loss


def main() -> None:
    from liger_kernel.transformers.functional import liger_cross_entropy

    def loss(logits: Tensor, target: Tensor) -> Any:
        return liger_cross_entropy(logits, target, lse_square_scale=1e-3, return_z_loss=True)

    print(json.dumps(audit_loss(loss).to_dict()))


if __name__ == "__main__":
    main()
