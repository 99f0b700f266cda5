"""The router section of an audit: None for a dense model, the findings of its routers otherwise."""

from __future__ import annotations

from zloss.audit.router.findings import audit_router
from zloss.errors import ZlossError
from zloss.models.checkpoint import Checkpoint
from zloss.models.routers import find_routers
from zloss.results.router import RouterFindings
from zloss.text.blocks import Blocks


def router_section(checkpoint: Checkpoint, blocks: Blocks, count: int) -> RouterFindings | None:
    """Findings of the routers on the first `count` blocks."""
    try:
        find_routers(checkpoint.model)
    except ZlossError:
        return None
    # One batch, so that α = 1/N_tl counts exactly the decisions that are reported.
    ids = blocks.inputs(0, count)
    batch = {"input_ids": ids}
    if hasattr(checkpoint.model, "router_z_loss_coef"):
        # With labels the model computes its own loss, and what its router Z-loss applies is measured from gradients.
        batch["labels"] = ids
    return audit_router(checkpoint.model, [batch])
