"""A tensor-parallel head with an FSDP2 body on a 2 × 2 mesh against one process; run once by `test_mesh.py`.

The recorder reads every step; `clip_` clips over both meshes together.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import zloss
from tests.distributed.data_parallel_cases import OBJECTIVE, STEPS, TOKENS, VOCAB, WIDTH, micro_batch
from tests.distributed.leave import leave
from tests.distributed.recipe_cases import mesh_recipe, worst
from zloss.optimizer.recorder import Recorder
from zloss.results.steps import StepRecord

CLIP = 0.05


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.layer = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = torch.tanh(self.layer(self.embed(tokens)))
        return hidden


def head_weight() -> Tensor:
    return torch.randn(VOCAB, WIDTH, generator=torch.Generator().manual_seed(2))


def train(body: Any, head: nn.Parameter, data_ranks: list[int], groups: list[Any]) -> list[StepRecord]:
    """Five clipped steps of AdamW; every data rank has one micro-batch per step."""
    parameters = [*body.parameters(), head]
    # AdamW's foreach form does not mix meshes; one parameter at a time does.
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, foreach=False)
    recorder = Recorder(parameters, optimizer, clip=CLIP, adam_every=1)
    for index in range(STEPS):
        batches = [micro_batch(index, rank, 0) for rank in data_ranks]
        count = zloss.global_normalizer([target for _, target in batches], groups=groups, gradients="averaged")
        for tokens, target in batches:
            loss = zloss.head_loss(body(tokens), head, target, OBJECTIVE, normalizer=count).loss
            loss.backward()
            recorder.micro_batch(loss)
        if isinstance(head, DTensor):
            # FSDP2 averages the body's gradients over data ranks; the head, sharded by hand, is averaged here.
            assert isinstance(head.grad, DTensor)
            local = head.grad.to_local()
            dist.all_reduce(local, group=groups[0])
            local.div_(groups[0].size())
        with recorder.step(index + 1) as step:
            step.clip_()
            optimizer.step()
        optimizer.zero_grad()
    return recorder.records


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    assert TOKENS
    alone, alone_head = Body(), nn.Parameter(head_weight())
    want = train(alone, alone_head, [0, 1], [])
    body: Any = Body()
    fully_shard(body.layer, mesh=mesh["data"])
    fully_shard(body, mesh=mesh["data"])
    head = nn.Parameter(distribute_tensor(head_weight(), mesh["tensor"], [Shard(0)], src_data_rank=None))
    got = train(body, head, [mesh["data"].get_local_rank()], [mesh["data"].get_group()])

    def far(a: float | None, b: float | None) -> float:
        assert a is not None
        assert b is not None
        return abs(a - b) / max(abs(b), 1e-12)

    names = (
        "grad_norm",
        "grad_inf",
        "param_norm",
        "postclip_norm",
        "postclip_inf",
        "loss",
        "cross_entropy",
        "auxiliary",
    )
    found = {
        name: max(far(getattr(g, name), getattr(w, name)) for g, w in zip(got, want, strict=True)) for name in names
    }
    for name in ("v_inf", "d_norm", "d_inf", "corrected_d_norm", "corrected_d_inf", "param_norm"):
        found[f"adam {name}"] = max(far(_adam(g, name), _adam(w, name)) for g, w in zip(got, want, strict=True))
    pairs = zip([*alone.parameters(), alone_head], [*body.parameters(), head], strict=True)
    found["parameters"] = max(float((whole(g) - w.detach()).abs().max() / w.detach().abs().max()) for w, g in pairs)
    recipes = worst(mesh_recipe())
    if dist.get_rank() == 0:
        clipped = all(record.grad_norm > CLIP for record in want)
        print(json.dumps({"differences": found, "clipped": clipped, "recipes": recipes}))
    leave()


def _adam(record: StepRecord, name: str) -> float | None:
    assert record.adam is not None
    value: float | None = getattr(record.adam, name)
    return value
