"""A tensor-parallel head with an FSDP2 body on a 2 × 2 mesh against one process; run once by `test_mesh.py`.

The recorder reads every step; `clip_` clips over both meshes together.
"""

from __future__ import annotations

import json
import operator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import zloss
from tests.distributed.data_parallel_cases import STEPS, micro_batch
from tests.distributed.launch import leave
from tests.distributed.recipe_cases import OBJECTIVE, FirstStage, Model, far, mesh_recipe, worst
from zloss.optimizer.recorder import Recorder
from zloss.results.steps import StepRecord

CLIP = 0.05


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


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    alone, alone_head = FirstStage(Model()), nn.Parameter(Model().lm_head.weight.detach())
    want = train(alone, alone_head, [0, 1], [])
    body: Any = FirstStage(Model())
    fully_shard(body.layer, mesh=mesh["data"])
    fully_shard(body, mesh=mesh["data"])
    weight = Model().lm_head.weight.detach()
    head = nn.Parameter(distribute_tensor(weight, mesh["tensor"], [Shard(0)], src_data_rank=None))
    got = train(body, head, [mesh["data"].get_local_rank()], [mesh["data"].get_group()])

    names = [
        "grad_norm",
        "grad_inf",
        "param_norm",
        "postclip_norm",
        "postclip_inf",
        "loss",
        "cross_entropy",
        "auxiliary",
    ]
    adam = ["v_inf", "d_norm", "d_inf", "corrected_d_norm", "corrected_d_inf", "param_norm"]
    found = {}
    for name in (*names, *(f"adam.{name}" for name in adam)):
        read = operator.attrgetter(name)
        found[name] = max(abs(read(g) - read(w)) / max(abs(read(w)), 1e-12) for g, w in zip(got, want, strict=True))
    pairs = zip([*alone.parameters(), alone_head], [*body.parameters(), head], strict=True)
    found["parameters"] = max(far(g, w) for w, g in pairs)
    recipes = worst(mesh_recipe())
    if dist.get_rank() == 0:
        clipped = all(record.grad_norm > CLIP for record in want)
        print(json.dumps({"differences": found, "clipped": clipped, "recipes": recipes}))
    leave()
