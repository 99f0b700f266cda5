"""A linear loss on bf16 hidden and weight: are the logits in between kept in more than bf16?

The one-hot hidden of the other probes makes logits that bf16 holds exactly; here hidden is dense, so that a product
stored in bf16 loses what the paper's source audit measures. Axes: T tokens, D width, V vocabulary.
"""

from __future__ import annotations

import torch

from zloss.audit.loss.callable import BlackBox
from zloss.audit.loss.identification import Identification
from zloss.audit.loss.output import LossCallError
from zloss.audit.loss.probes import allowed
from zloss.audit.loss.reference import Reference

TOKENS, WIDTH = 64, 72
OFFSET = 20.0
"""Mean logit: between 16 and 32 neighbouring bf16 numbers are 0.125 apart."""


def bf16_input_error(box: BlackBox, ident: Identification, seed: int) -> float | None:
    """‖dW − dW₆₄‖/‖dW₆₄‖ on bf16 hidden and weight, against fp64 of the same bf16 numbers.

    dW itself comes back in bf16, which alone costs about 2e-3; logits stored in bf16 cost 1e-2 and more. None where
    the question does not arise: no linear loss, no model to compare with, or bf16 refused.
    """
    plain = ident.trusted and ident.selection.how in ("none", "explained") and ident.selection.fit.damping is None
    if not box.linear or not plain or box.targets != "given":
        return None
    generator = torch.Generator().manual_seed(seed + 3)
    lanes, width = ident.space.lanes, ident.space.width
    hidden = torch.randn(TOKENS, WIDTH, generator=generator)
    weight = 2.5 / WIDTH**0.5 * torch.randn(width, WIDTH, generator=generator)
    # One shared direction carries the common shift of the logits.
    hidden[:, 0], weight[:, 0] = 4.0, OFFSET / 4.0
    hidden, weight = hidden.bfloat16().double(), weight.bfloat16().double()
    target = allowed(torch.randint(lanes, (TOKENS,), generator=generator), lanes, ident.space.avoid)
    try:
        grad_weight = box.weight_gradient(hidden, weight, target, dtype=torch.bfloat16)
    except LossCallError:
        return None
    r = Reference(hidden @ weight.T, target, lanes)
    model = ident.model_at(WIDTH)
    wanted = (model.ce_source(r) + model.z_source(r)).T @ hidden
    if not bool(torch.isfinite(grad_weight).all()):
        return None
    return float((grad_weight - wanted).norm() / wanted.norm())
