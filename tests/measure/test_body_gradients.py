"""Squares, inner products and table gradients below the head against autograd of the whole model, in fp64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.audit.checkpoint.straight import load_fp64
from tests.tiny_models import save_model
from zloss.errors import CheckpointError
from zloss.measure import gradients as engine
from zloss.measure.gradients import (
    CE,
    MODEL,
    BodyGradients,
    InnerProducts,
    all_parameters_on,
    cut_forward,
    decoder_layers,
    objective_gradients,
)
from zloss.measure.measurement import measurement_of
from zloss.models.checkpoint import Checkpoint
from zloss.models.output_head import OutputHead, find_head
from zloss.objectives import CenteredZLoss, StandardZLoss
from zloss.text import Blocks

VOCAB, WIDTH, PARTS = 23, 6, (3, 2)


class Layer(nn.Module):
    """Reads a tensor of the embedding and a parameter of the model; can hand a tensor to the next layer in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, condition: Tensor, *, gate: Tensor, store: dict[str, Tensor] | None) -> Any:
        moved = torch.tanh(self.linear(x) * condition) * gate
        if store is not None:
            moved = moved + store.get("last", 0.0)
            store["last"] = torch.sin(moved)
        return x + moved, moved.mean(-1, keepdim=True)


class Toy(nn.Module):
    """Everything that a stack can do to its layers: one is used twice, something stands between two, the embedding is
    read by all of them and once more after them, and so are the outputs of two layers.
    """

    def __init__(self, *, shares: bool = False) -> None:
        super().__init__()
        self.shares = shares
        self.table = nn.Embedding(VOCAB, WIDTH)
        self.condition = nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Parameter(torch.ones(WIDTH))
        first, second = Layer(), Layer()
        self.layers = nn.ModuleList([first, second, first])
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids_BN: Tensor) -> Tensor:
        embedded = self.table(ids_BN)
        condition = torch.sigmoid(self.condition(embedded))
        x, store, outputs = embedded, {} if self.shares else None, []
        for layer in self.layers:
            x, size = layer(x, condition, gate=self.gate, store=store)
            outputs.append(x)
            x = 1.5 * x + size
        return self.norm(x + embedded + outputs[0] * outputs[1])


def toy(**options: bool) -> tuple[Toy, OutputHead]:
    torch.manual_seed(1)
    model = Toy(**options).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model, OutputHead(model.table, model.table.weight, None, tied=True)


def ids_and_seeds() -> tuple[list[Tensor], dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    ids = [torch.randint(VOCAB, (blocks, 5), generator=generator) for blocks in PARTS]
    tokens = 5 * sum(PARTS)
    seeds = {name: torch.randn(tokens, WIDTH, generator=generator, dtype=torch.float64) for name in (CE, "b", "c")}
    return ids, seeds


def measured(model: Toy, head: OutputHead) -> tuple[InnerProducts, dict[str, Tensor], list[int]]:
    """(inner products, gradients of the table at its used rows, calls of layers in every forward pass)."""
    ids, seeds = ids_and_seeds()
    products = InnerProducts()
    with all_parameters_on(model):
        passes = [cut_forward(model, model, part) for part in ids]
        counts = [len(calls) for _, calls in passes]
        with torch.enable_grad():
            forwards = [(hidden_BND.flatten(0, 1), calls) for hidden_BND, calls in passes]
        table_UD = BodyGradients(model, head, torch.unique(torch.cat(ids)), products).add_all(forwards, seeds)
    return products, table_UD, counts


def agrees(products: InnerProducts, table_UD: dict[str, Tensor], model: Toy) -> bool:
    """Whether the numbers are those of autograd over all parts at once."""
    ids, seeds = ids_and_seeds()
    hidden_TD = model(torch.cat(ids)).reshape(-1, WIDTH)
    named = dict(model.named_parameters())
    grads = {
        name: dict(
            zip(named, torch.autograd.grad(hidden_TD, list(named.values()), seed, retain_graph=True), strict=True)
        )
        for name, seed in seeds.items()
    }
    used_U = torch.unique(torch.cat(ids))
    body = {
        name: torch.cat([g.flatten() for key, g in grad.items() if key != "table.weight"])
        for name, grad in grads.items()
    }
    near = [
        products.inner(name, other, ("body",)) == pytest.approx(float(body[name] @ body[other]), rel=1e-8)
        for name in seeds
        for other in (name, CE)
    ]
    tables = (torch.allclose(table_UD[name], grads[name]["table.weight"][used_U], rtol=1e-9) for name in seeds)
    return all(near) and table_UD.keys() == seeds.keys() and all(tables)


def test_a_stack_with_shared_tensors_and_layers() -> None:
    model, head = toy()
    products, table_UD, counts = measured(model, head)
    assert counts == [3, 3]
    assert agrees(products, table_UD, model)
    assert all("forward" not in vars(module) for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_gradient_that_the_user_holds_is_left_alone() -> None:
    model, head = toy()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    products, table_UD, _ = measured(model, head)
    assert agrees(products, table_UD, model)
    assert all(bool((parameter.grad == 1).all()) for parameter in model.parameters() if parameter.grad is not None)
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_layers_that_share_a_dict_are_not_cut() -> None:
    """Between such layers a gradient would be lost without a trace."""
    model, head = toy(shares=True)
    products, table_UD, counts = measured(model, head)
    assert counts == [0, 0]
    assert agrees(products, table_UD, model)
    assert all("forward" not in vars(module) for module in model.modules())


def test_a_layer_that_changes_its_input_is_not_cut() -> None:
    model, head = toy()
    straight = Layer.forward

    def in_place(layer: Layer, x: Tensor, condition: Tensor, **rest: Any) -> Any:
        moved, size = straight(layer, x.clone(), condition, **rest)
        return (x.mul_(0.0).add_(moved) if layer is model.layers[1] else moved), size

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Layer, "forward", in_place)
        products, table_UD, counts = measured(model, head)
        assert counts == [0, 0]
        assert agrees(products, table_UD, model)


@pytest.mark.parametrize("shares", [False, True])
def test_a_forward_of_the_layer_itself_is_put_back(shares: bool) -> None:
    """Hooks of accelerate are such forwards: they were deleted, and the model ran without them."""
    model, head = toy(shares=shares)
    layer = model.layers[1]
    straight, called = layer.forward, []

    def own(*args: Any, **kwargs: Any) -> Any:
        called.append(1)
        return straight(*args, **kwargs)

    layer.forward = own
    products, table_UD, _ = measured(model, head)
    assert layer.forward is own
    assert called
    del layer.forward
    assert agrees(products, table_UD, model)


straight_add, straight_run = BodyGradients.add, engine._run


def overwrite(sums: Any, tensor: Tensor, name: str, grad: Tensor) -> None:
    """Only the last contribution to a tensor that several layers read."""
    if not isinstance(tensor, nn.Parameter):
        sums._sums[id(tensor)].pop(name, None)
    straight_add(sums, tensor, name, grad)


def last_part(sums: Any, tensor: Tensor, name: str, grad: Tensor) -> None:
    """Only the last forward pass."""
    if isinstance(tensor, nn.Parameter):
        sums._sums[id(tensor)].pop(name, None)
    straight_add(sums, tensor, name, grad)


def in_fp32(products: Any, part: str, a: str, b: str, grad_a: Tensor, grad_b: Tensor) -> None:
    products._sums[part, a, b] += float((grad_a.float() * grad_b.float()).sum())


def detached(forward: Any, arguments: list[Any], structure: Any, *, graph: bool) -> Any:
    """A layer whose second argument has no gradient."""
    leaves, returned = straight_run(forward, arguments, structure, graph=graph)
    return {key: leaf for key, leaf in leaves.items() if key == id(arguments[0])}, returned


MUTATIONS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "adjoints overwritten": (BodyGradients, "add", overwrite),
    "one forward pass only": (BodyGradients, "add", last_part),
    "arguments forgotten": (engine, "_run", detached),
    "products in fp32": (InnerProducts, "add_pair", in_fp32),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_comparison_notices_a_mistake(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*MUTATIONS[name])
    model, head = toy()
    assert not agrees(*measured(model, head)[:2], model)


def test_a_parameter_used_behind_the_back_of_its_layer_is_refused() -> None:
    """Its gradient was reduced before its second use is reached: the square of a sum is not the sum of squares."""
    model, head = toy()
    model.layers = nn.ModuleList([Layer().double(), Layer().double()])
    hidden = [model.layers[1].linear]  # a list does not register a module
    straight = Layer.forward

    def borrowed(layer: Layer, x: Tensor, condition: Tensor, **rest: Any) -> Any:
        return straight(layer, hidden[0](x), condition, **rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Layer, "forward", borrowed)
        with pytest.raises(CheckpointError, match=r"layers\.1\.linear.* is used by several layers"):
            measured(model, head)


def test_the_stack_is_the_list_with_the_most_parameters() -> None:
    """A layer can have more experts than a model has layers."""
    experts = [nn.ModuleList([nn.Linear(2, 2) for _ in range(5)]) for _ in range(3)]
    model = nn.ModuleDict({"layers": nn.ModuleList(experts)})
    assert decoder_layers(model) == experts
    assert decoder_layers(nn.Linear(2, 2)) == []


@pytest.mark.parametrize("coef", [1e-4, 30.0])
@pytest.mark.parametrize("kind", ["gpt2", "neox", "phi", "mixtral", "gemma2"])
def test_every_number_of_a_model_equals_autograd(tmp_path: Path, kind: str, coef: float) -> None:
    """Tied and untied heads, a bias, experts, a cap; λ as in training, and one that outweighs CE; two forward passes."""
    model, tokenizer = load_fp64(save_model(kind, tmp_path))
    model.requires_grad_(False)
    checkpoint = Checkpoint(kind, "safetensors", model, tokenizer, False)
    head = find_head(checkpoint)
    blocks = Blocks(torch.randint(512, (61,), generator=torch.Generator().manual_seed(3)), 20, 3, None, 0)
    ids, target = blocks.inputs(0, 3), blocks.targets(0, 3).reshape(-1)
    measurement = measurement_of(head, coef=coef)
    objectives: dict[str, Any] = {"z": StandardZLoss(coef, measurement.target)}
    if head.softcap is None:
        objectives["centered"] = CenteredZLoss(coef, measurement.target)
    found = objective_gradients(checkpoint, measurement, blocks, 3, objectives, whole_model=("z",), forward_blocks=2)
    assert not any(parameter.requires_grad for parameter in model.parameters())

    names, parameters = zip(*model.requires_grad_(True).named_parameters(), strict=True)
    logits = model(input_ids=ids, use_cache=False).logits.flatten(0, 1)
    log_z = logits.logsumexp(1)
    losses = {
        CE: F.cross_entropy(logits, target),
        "z": (coef * (log_z - measurement.target) ** 2).mean(),
        "centered": (coef * (log_z - logits.mean(1) - measurement.target) ** 2).mean(),
    }
    truth = {name: torch.autograd.grad(loss, parameters, retain_graph=True) for name, loss in losses.items()}
    place = next(i for i, parameter in enumerate(parameters) if parameter.data_ptr() == head.weight_VD.data_ptr())
    for name in objectives:
        ours, ce = truth[name][place], truth[CE][place]
        assert found.inner(name, name) == pytest.approx(float((ours * ours).sum()), rel=1e-9)
        assert found.inner(CE, CE) == pytest.approx(float((ce * ce).sum()), rel=1e-9)
        assert found.inner(name, CE) == pytest.approx(float((ours * ce).sum()), rel=1e-7, abs=1e-12)
        assert (found.paths(name) is not None) == head.tied
    z, ce = (torch.cat([grad.flatten() for grad in truth[name]]) for name in ("z", CE))
    assert found.inner("z", "z", MODEL) == pytest.approx(float(z @ z), rel=1e-9)
    assert found.inner(CE, CE, MODEL) == pytest.approx(float(ce @ ce), rel=1e-9)
    assert found.inner("z", CE, MODEL) == pytest.approx(float(z @ ce), rel=1e-7, abs=1e-12)
    assert len(names) == len(set(names))


def test_every_architecture_of_the_tests_is_cut(tmp_path: Path) -> None:
    """One recomputation per layer, not the way out for layers that share tensors."""
    for kind in ("gpt2", "neox", "phi", "cohere", "granite", "gemma2", "mixtral"):
        model, _ = load_fp64(save_model(kind, tmp_path / kind))
        _, calls = cut_forward(
            model, lambda ids, model=model: model(input_ids=ids, use_cache=False).logits, torch.ones(1, 4).long()
        )
        assert [call.layer for call in calls] == decoder_layers(model), kind
