"""Our own CE + Z on logits, as `zloss audit-loss tools/own_loss.py:standard` calls it."""

from __future__ import annotations

from torch import Tensor

import zloss


def standard(logits: Tensor, target: Tensor) -> Tensor:
    """CE + 1e-4·(log Z − log V)², mean over valid tokens."""
    return zloss.logits_loss(logits, target, zloss.StandardZLoss(1e-4)).loss
