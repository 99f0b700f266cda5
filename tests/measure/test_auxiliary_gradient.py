"""R_aux, C_aux and tied paths of every objective against autograd in fp64."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.train.test_run import straight_loss
from tests.train.tiny_run import tiny_config
from zloss.measure.gradients import objective_gradients
from zloss.measure.measurement import measurement_of
from zloss.models.checkpoint import load_checkpoint
from zloss.models.output_head import find_head
from zloss.objectives import make_objective
from zloss.text import Blocks


@pytest.mark.parametrize("kind", ["gpt2", "neox", "granite"])
@pytest.mark.parametrize("method", ["standard", "centered", "factorized", "gain-aware"])
def test_against_autograd(tmp_path: Path, kind: str, method: str) -> None:
    config = tiny_config(tmp_path, kind=kind)
    checkpoint = load_checkpoint(config.model, dtype="fp64")
    head = find_head(checkpoint)
    blocks = Blocks(torch.randint(512, (41,), generator=torch.Generator().manual_seed(3)), 20, 2, None, 0)
    ids, target = blocks.inputs(0, 2), blocks.targets(0, 2)
    measurement = measurement_of(head, coef=1e-4)
    objective = make_objective(method, 1e-2)
    products = objective_gradients(checkpoint, measurement, blocks, 2, {"aux": objective})
    found, paths = products.against_ce("aux"), products.paths("aux")

    model: Any = checkpoint.model
    weight = model.get_output_embeddings().weight
    scaled = weight.detach() * head.logit_scale
    logits = model(input_ids=ids).logits
    total = straight_loss(method, 1e-2, logits, target, scaled)
    ce = F.cross_entropy(logits.flatten(0, 1), target.flatten())
    (g_ce,) = torch.autograd.grad(ce, weight, retain_graph=True)
    (g_aux,) = torch.autograd.grad(total - ce, weight)
    assert found.r_z == pytest.approx(float(g_aux.norm() / g_ce.norm()), rel=1e-9)
    assert found.c_z == pytest.approx(float((g_aux * g_ce).sum() / g_aux.norm() / g_ce.norm()), rel=1e-7, abs=1e-10)
    assert found.r_z != pytest.approx(float(g_aux.norm() / (g_ce + g_aux).norm()), rel=1e-9)
    if not head.tied:
        assert paths is None
        return
    assert paths is not None
    # The output path alone: logits from hidden states that do not depend on the table.
    hidden = model.get_decoder()(input_ids=ids).last_hidden_state.detach()
    out_logits = F.linear(hidden, weight) * head.logit_scale
    alone = straight_loss(method, 1e-2, out_logits, target, scaled) - F.cross_entropy(
        out_logits.flatten(0, 1), target.flatten()
    )
    (g_out,) = torch.autograd.grad(alone, weight)
    g_in = g_aux - g_out
    assert paths.output_norm == pytest.approx(float(g_out.norm()), rel=1e-9)
    assert paths.input_norm == pytest.approx(float(g_in.norm()), rel=1e-7)
    assert paths.cosine == pytest.approx(float((g_out * g_in).sum() / g_out.norm() / g_in.norm()), abs=1e-7)
    assert math.isfinite(paths.input_norm or math.nan)
