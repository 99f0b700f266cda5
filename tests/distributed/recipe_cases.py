"""The recipes of docs/distributed.md, run verbatim, each against one process. They run together with the cases of another module.

A recipe is the block behind the comment `<!-- recipe: NAME -->`; the names it reads are given to it here.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import zloss
from zloss.optimizer.recorder import Recorder

PAGE = Path(__file__).parents[2] / "docs" / "distributed.md"
VOCAB, WIDTH, TOKENS, STEPS = 61, 8, 12, 3
OBJECTIVE = zloss.CenteredZLoss(0.1)
COMMON = {"zloss": zloss, "torch": torch, "dist": dist, "device": "cpu", "objective": OBJECTIVE, "Recorder": Recorder}


def recipes() -> dict[str, str]:
    """The blocks of the page by name."""
    blocks = re.findall(
        r"<!-- recipe: (\w+) -->\n```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL
    )
    return dict(blocks)


def run(name: str, **given: Any) -> dict[str, Any]:
    """The names that a recipe has left."""
    names = {**COMMON, **given}
    exec(compile(recipes()[name], f"recipe {name}", "exec"), names)
    return names


class Model(nn.Module):
    """An embedding, a layer and a head; `forward` gives logits, or the loss where it gets labels."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.layer = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)

    def body(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = torch.tanh(self.layer(self.embed(tokens)))
        return hidden

    def forward(self, tokens: Tensor, labels: Tensor | None = None, count: Tensor | None = None) -> Tensor:
        hidden = self.body(tokens)
        if labels is None:
            logits: Tensor = self.lm_head(hidden)
            return logits
        return zloss.head_loss(hidden, self.lm_head.weight, labels, OBJECTIVE, normalizer=count).loss


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens, labels = (torch.randint(VOCAB, (TOKENS,), generator=generator) for _ in range(2))
    labels[: 2 + 5 * rank] = -100
    return tokens, labels


def far(got: Tensor | None, want: Tensor | None) -> float:
    assert got is not None
    assert want is not None
    got, want = (t.full_tensor() if isinstance(t, DTensor) else t for t in (got.detach(), want.detach()))
    return float((got - want).abs().max() / want.abs().max())


def gradients(model: nn.Module, want: nn.Module) -> float:
    return max(far(g.grad, w.grad) for g, w in zip(model.parameters(), want.parameters(), strict=True))


def parameters(model: nn.Module, want: nn.Module) -> float:
    return max(far(g, w) for g, w in zip(model.parameters(), want.parameters(), strict=True))


def trained_alone(ranks: int, lr: float = 1e-2) -> Model:
    """The steps of all ranks on one process."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for step in range(STEPS):
        batches = [batch(step, rank) for rank in range(ranks)]
        count = zloss.global_normalizer([labels for _, labels in batches], groups=[])
        for tokens, labels in batches:
            model(tokens, labels, count).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def head_recipes() -> dict[str, float]:
    """One head over two ranks."""
    tokens, labels = batch(0, 0)
    want = Model()
    whole = zloss.head_loss(want.body(tokens), want.lm_head.weight, labels, OBJECTIVE)
    whole.loss.backward()
    mesh = init_device_mesh("cpu", (2,))
    weight, hidden = want.lm_head.weight.detach(), want.body(tokens).detach()
    mine = slice(31 * dist.get_rank(), 31 * dist.get_rank() + 31)
    rows = weight[mine].clone().requires_grad_()
    wanted_rows = want.lm_head.weight.grad
    assert wanted_rows is not None
    found = {}
    left = run("dtensor", weight=weight, hidden=hidden, target=labels)
    found["dtensor"] = max(far(left["out"].loss, whole.loss), far(left["head"].grad, wanted_rows))
    left = run("group", rows=rows, hidden=hidden, target=labels, tensor_group=dist.group.WORLD)
    found["group"] = max(far(left["out"].loss, whole.loss), far(rows.grad, wanted_rows[mine]))
    for name in ("colwise", "loss_parallel"):
        model = Model()
        left = run(name, model=model, mesh=mesh, tokens=tokens, target=labels)
        found[name] = max(far(left["out"].loss, whole.loss), gradients(model, want))

    layer = nn.Linear(WIDTH, 31 if dist.get_rank() == 0 else 30, bias=False)
    layer.weight.data.copy_(weight[mine])
    main_grad = torch.zeros_like(layer.weight)
    layer.weight.main_grad = main_grad
    mask = (labels != -100).float()
    left = run(
        "megatron",
        output_layer=layer,
        hidden=hidden,
        labels=labels.clamp(min=0),
        loss_mask=mask,
        tensor_group=dist.group.WORLD,
    )
    found["megatron"] = max(far(left["loss"], whole.loss), far(main_grad, wanted_rows[mine]))
    return found


def token_recipes() -> dict[str, float]:
    """Tokens over two ranks."""
    rank, want = dist.get_rank(), trained_alone(2)
    found = {}
    plain = Model()
    model = DistributedDataParallel(plain)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for step in range(STEPS):
        run("denominator", model=model, batches=[batch(step, rank)])
        optimizer.step()
        optimizer.zero_grad()
    found["denominator"] = parameters(plain, want)

    tokens, labels = batch(0, 0)
    alone, plain = Model(), Model()
    alone(tokens, labels).backward()
    left = run("empty", batches=[(tokens, labels)] if rank == 0 else [])
    run("denominator", model=DistributedDataParallel(plain), batches=left["batches"])
    found["empty"] = gradients(plain, alone)

    sharded = Model()
    run("torchtitan", model=sharded, steps=[[batch(step, rank)] for step in range(STEPS)])
    found["torchtitan"] = parameters(sharded, want)

    ids = torch.randint(VOCAB, (2, 10), generator=torch.Generator().manual_seed(5))
    alone, plain = Model(), Model()
    alone(ids, nn.functional.pad(ids[:, 1:], (0, 1), value=-100)).backward()
    run("context", model=DistributedDataParallel(plain), tokens=ids, part=5, context_group=dist.group.WORLD)
    found["context"] = gradients(plain, alone)
    # Labels that are shifted after the split lose the last token of every part.
    late, mine = Model(), ids[:, 5 * rank : 5 * rank + 5]
    labels = nn.functional.pad(mine[:, 1:], (0, 1), value=-100)
    DistributedDataParallel(late)(mine, labels, zloss.global_normalizer(labels)).backward()
    found["context shifted late"] = gradients(late, alone)
    return found


class FirstStage(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.table, self.layer = model.embed, model.layer

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = torch.tanh(self.layer(self.table(tokens)))
        return hidden


class LastStage(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.table, self.second = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.table.weight.data.copy_(model.embed.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.tanh(self.second(hidden))


def pipeline_recipe() -> dict[str, float]:
    """Two stages with a tied table against one process: parameters, and the record of the step."""
    first, last = FirstStage(Model()), LastStage(Model())
    tokens = torch.randint(VOCAB, (4, 6), generator=torch.Generator().manual_seed(3))
    labels = tokens.roll(-1, dims=1)
    labels[:, -1] = -100
    labels[0, :3] = -100  # the micro-batches have different counts
    stages = [copy.deepcopy(first), copy.deepcopy(last)]
    table = stages[0].table.weight
    trained = [*stages[0].parameters(), *stages[1].second.parameters()]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    recorder = Recorder(trained, optimizer)
    loss = zloss.head_loss(stages[1](stages[0](tokens)), table, labels, OBJECTIVE).loss
    loss.backward()
    recorder.micro_batch(loss)
    with recorder.step(1) as step:
        step.clip_(1.0)
        optimizer.step()

    module = (first, last)[dist.get_rank()]
    world = dist.group.WORLD
    left = run("pipeline", module=module, tokens=tokens, labels=labels, pipeline_group=world, tied_group=world)
    got, want = left["recorder"].records[0], recorder.records[0]
    record = {
        name: abs(getattr(got, name) / getattr(want, name) - 1)
        for name in ("grad_norm", "grad_inf", "param_norm", "loss", "postclip_norm")
    }
    tied = far(module.table.weight, table)
    own = (
        far(module.layer.weight, stages[0].layer.weight)
        if dist.get_rank() == 0
        else far(module.second.weight, stages[1].second.weight)
    )
    return {"pipeline": max(tied, own), **{f"pipeline {name}": value for name, value in record.items()}}


def mesh_recipe() -> dict[str, float]:
    """Tokens over two ranks, the head over two: four processes."""
    model = Model()
    run("fsdp_tp", model=model, steps=lambda rank: [[batch(step, rank)] for step in range(STEPS)])
    return {"fsdp_tp": parameters(model, trained_alone(2))}


def worst(found: dict[str, float]) -> dict[str, float]:
    """The largest difference on any rank."""
    values = torch.tensor(list(found.values()), dtype=torch.float64)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return dict(zip(found, values.tolist(), strict=True))
