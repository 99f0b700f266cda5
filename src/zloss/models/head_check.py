"""Whether an output head gives the logits of its model, and whether the model is causal.

An architecture may do something to its logits that `find_head` does not know; then every number of an audit would be wrong.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zloss.errors import CheckpointError, first_line
from zloss.models.checkpoint import Checkpoint
from zloss.models.hidden_states import hidden_states
from zloss.models.output_head import OutputHead

CHECK_TOKENS = 64
"""Tokens that are compared; few, because the model forms all their logits at once (V can be 262,144)."""
AGREEMENT = 1e-3
"""Largest relative difference between our logits and the model's own."""
FORESIGHT = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
"""Largest relative change of earlier hidden states when a later token changes: what rounding explains."""


@torch.no_grad()
def check_head(checkpoint: Checkpoint, head: OutputHead, ids_N: Tensor) -> float:
    """The relative difference between our logits and the model's own; an error where it is too large.

    Also an error where the model is not causal: then changing the last token changes the hidden states before it.
    """
    ids_BN = ids_N[:CHECK_TOKENS].unsqueeze(0)
    with hidden_states(checkpoint, head) as hidden_of:
        try:
            hidden = hidden_of(ids_BN)
        except (IndexError, RuntimeError) as error:
            raise CheckpointError(f"the forward pass of {checkpoint.name} fails: {first_line(error)}.") from error
        changed = ids_BN.clone()
        changed[0, -1] = (changed[0, -1] + 1) % head.vocab
        future = hidden_of(changed)
    if ids_BN.shape[1] > 1 and _relative(future[0, :-1], hidden[0, :-1]) > FORESIGHT[hidden.dtype]:
        raise CheckpointError(
            f"{checkpoint.name} is not causal: changing a token changes the hidden states before it. "
            "An audit needs a causal language model, not an encoder."
        )
    try:
        own = checkpoint.model(input_ids=ids_BN, use_cache=False).logits
    except Exception as error:
        raise CheckpointError(f"the forward pass of {checkpoint.name} fails: {first_line(error)}.") from error
    difference = _relative(head.logits(hidden), own)
    if not difference <= AGREEMENT:
        raise CheckpointError(
            f"the logits of {checkpoint.name} are not reproduced by its output head: relative difference {difference:.2g} "
            f"(limit {AGREEMENT:g}) with logit scale {head.logit_scale:g} and softcap {head.softcap}. "
            f"Its architecture ({type(checkpoint.model).__name__}) does something to the logits that is not known here."
        )
    return difference


def _relative(got: Tensor, want: Tensor) -> float:
    """‖got − want‖ / ‖want‖. Equal infinities agree: a bias of -inf gives them to a class that is switched off."""
    got, want = got.double(), want.double()
    difference = torch.where(got == want, 0.0, got - want).norm()
    return float(difference / torch.where(want.isinf(), 0.0, want).norm().clamp_min(torch.finfo(torch.float64).tiny))
