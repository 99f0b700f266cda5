"""R_Z and C_Z over all parameters against autograd in fp64, on a head with a bias and on one without."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.tiny_models import save_model
from zloss.measure.gradients import diagnostic_gradients
from zloss.measure.measurement import measurement_of
from zloss.models.checkpoint import load_checkpoint
from zloss.models.output_head import find_head
from zloss.text import Blocks

COEF = 1e-3


def two_blocks(size: int = 20) -> Blocks:
    return Blocks(torch.randint(512, (2 * size + 1,), generator=torch.Generator().manual_seed(3)), size, 2, None, 0)


def whole_gradients(model: Any, ids: Tensor, target: Tensor) -> dict[str, dict[str, Tensor]]:
    """Gradients of CE and of raw Z by parameter name, from the model's own logits."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    logits = model(input_ids=ids, use_cache=False).logits.flatten(0, 1)
    losses = {
        "ce": F.cross_entropy(logits, target.flatten()),
        "z": (COEF * (logits.logsumexp(1) - math.log(logits.shape[1])) ** 2).mean(),
    }
    found = {}
    for name, loss in losses.items():
        grads = torch.autograd.grad(loss, parameters, retain_graph=True)
        found[name] = dict(zip(names, grads, strict=True))
    return found


def joined(gradients: dict[str, Tensor], without: str = "") -> Tensor:
    return torch.cat([grad.flatten() for name, grad in gradients.items() if name != without])


@pytest.mark.parametrize("kind", ["phi", "neox", "gpt2", "gemma2"])
def test_whole_model_numbers_equal_autograd(tmp_path: Path, kind: str) -> None:
    checkpoint = load_checkpoint(str(save_model(kind, tmp_path)), dtype="fp64")
    head = find_head(checkpoint)
    if kind == "phi":
        # A small weight leaves little gradient below the head, so that the bias counts.
        with torch.no_grad():
            head.weight_VD.mul_(1e-3)
    blocks = two_blocks()
    ids, target = blocks.inputs(0, 2), blocks.targets(0, 2)
    measurement = measurement_of(head, coef=COEF)
    found, _ = diagnostic_gradients(checkpoint, measurement, blocks, 2)
    norms = found.extra["norms"]
    truth = whole_gradients(checkpoint.model.requires_grad_(True), ids, target)
    ce, z = joined(truth["ce"]), joined(truth["z"])
    assert found.whole_model.r_z == pytest.approx(float(z.norm() / ce.norm()), rel=1e-9)
    assert found.whole_model.c_z == pytest.approx(float((z * ce).sum() / z.norm() / ce.norm()), rel=1e-7, abs=1e-10)
    assert norms["ce_model"] == pytest.approx(float(ce.norm()), rel=1e-9)
    assert norms["z_model"] == pytest.approx(float(z.norm()), rel=1e-9)
    assert (head.bias_V is not None) == (kind == "phi")
    if kind == "phi":
        # Without the bias the numbers are others, so the comparison above notices a missing bias.
        short_ce, short_z = (joined(truth[name], without="lm_head.bias") for name in ("ce", "z"))
        assert norms["z_model"] != pytest.approx(float(short_z.norm()), rel=1e-4)
        assert found.whole_model.r_z != pytest.approx(float(short_z.norm() / short_ce.norm()), rel=1e-5)


def test_a_bias_that_is_a_buffer_is_no_parameter(tmp_path: Path) -> None:
    checkpoint = load_checkpoint(str(save_model("phi", tmp_path)), dtype="fp64")
    module: Any = checkpoint.model.get_output_embeddings()  # type: ignore[operator]
    bias = module.bias.detach().clone()
    del module.bias
    module.register_buffer("bias", bias)
    blocks = two_blocks()
    measurement = measurement_of(find_head(checkpoint), coef=COEF)
    found, _ = diagnostic_gradients(checkpoint, measurement, blocks, 2)
    truth = whole_gradients(checkpoint.model, blocks.inputs(0, 2), blocks.targets(0, 2))
    assert found.extra["norms"]["z_model"] == pytest.approx(float(joined(truth["z"]).norm()), rel=1e-9)
