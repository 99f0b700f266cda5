"""Squares, inner products and table gradients below the head against autograd of the whole model, in fp64."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.audit.checkpoint.straight import load_fp64
from tests.tiny_models import save_model
from tests.train.test_run import straight_loss
from zloss.errors import CheckpointError
from zloss.measure import gradients as engine
from zloss.measure.gradients import (
    CE,
    HEAD,
    MODEL,
    BodyGradients,
    InnerProducts,
    cut_forward,
    decoder_layers,
    diagnostic_gradients,
    objective_gradients,
)
from zloss.measure.measurement import measurement_of
from zloss.models.checkpoint import Checkpoint
from zloss.models.output_head import OutputHead, all_parameters_on, find_head, hidden_states
from zloss.objectives import make_objective
from zloss.text import Blocks

VOCAB, WIDTH, PARTS = 23, 6, (3, 2)


class Layer(nn.Module):
    """Reads a tensor of the embedding and a parameter of the model; can hand a tensor to the next layer in a dict."""

    def __init__(self, *, second: bool = False) -> None:
        super().__init__()
        self.linear, self.second = nn.Linear(WIDTH, WIDTH), second

    def forward(self, x: Tensor, condition: Tensor, *, gate: Tensor, store: dict[str, Tensor] | None) -> Any:
        moved = torch.tanh(self.linear(x) * condition) * gate
        if store is not None:
            moved = moved + store.get("last", 0.0)
            store["last"] = torch.sin(moved)
        return x + moved, moved.mean(-1, keepdim=True)


class Toy(nn.Module):
    """Everything that a stack can do to its layers: one is used twice, there is something between two, the embedding is
    read by all of them and once more after them, and so are the outputs of two layers.
    """

    def __init__(self, *, shares: bool = False) -> None:
        super().__init__()
        self.shares = shares
        self.table = nn.Embedding(VOCAB, WIDTH)
        self.condition = nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Parameter(torch.ones(WIDTH))
        first, second = Layer(), Layer(second=True)
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


def measured(
    model: Toy, head: OutputHead, whole: Collection[str] = (CE, "b", "c")
) -> tuple[InnerProducts, dict[str, Tensor], list[int]]:
    """(inner products, gradients of the table at its used rows, calls of layers in every forward pass)."""
    ids, seeds = ids_and_seeds()
    products = InnerProducts()
    with all_parameters_on(model):
        passes = [cut_forward(model, model, part) for part in ids]
        counts = [len(calls) for _, calls in passes]
        with torch.enable_grad():
            forwards = [(hidden_BND.flatten(0, 1), calls) for hidden_BND, calls in passes]
        rows_U = torch.unique(torch.cat(ids))
        table_UD = BodyGradients(model, head, rows_U, products, whole).add_all(forwards, seeds)
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


straight_forward = Layer.forward


def in_place(layer: Layer, x: Tensor, condition: Tensor, **rest: Any) -> Any:
    """The second layer overwrites its input."""
    moved, size = straight_forward(layer, x.clone(), condition, **rest)
    return (x.mul_(0.0).add_(moved) if layer.second else moved), size


def twice(*arguments: Any, **rest: Any) -> Any:
    """One tensor is returned twice, and counts once."""
    moved, _ = straight_forward(*arguments, **rest)
    return moved, moved


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize(
    ("shares", "forward", "cuts"),
    [(False, straight_forward, 3), (False, twice, 3), (False, in_place, 0), (True, straight_forward, 0)],
)
def test_every_kind_of_stack(
    shares: bool, forward: Any, cuts: int, held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers that share a dict, or change their input, are not cut: between them a gradient would be lost without a trace.

    A gradient that the user holds is left alone.
    """
    monkeypatch.setattr(Layer, "forward", forward)
    model, head = toy(shares=shares)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) if held else None
    products, table_UD, counts = measured(model, head)
    assert counts == [cuts, cuts]
    assert agrees(products, table_UD, model)
    assert all("forward" not in vars(module) for module in model.modules())
    for parameter in model.parameters():
        assert bool((parameter.grad == 1).all()) if held and parameter.grad is not None else parameter.grad is None


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("whole", [(), (CE, "b")])
def test_losses_outside_the_whole_model_have_the_same_table_and_no_body(whole: tuple[str, ...], shares: bool) -> None:
    model, head = toy(shares=shares)
    every, table_UD, _ = measured(model, head)
    some, same_UD, _ = measured(model, head, whole)
    assert table_UD.keys() == same_UD.keys()
    assert all(torch.equal(table_UD[name], same_UD[name]) for name in table_UD)
    for name in table_UD:
        assert some.norm(name, ("body",)) == (every.norm(name, ("body",)) if name in whole else 0.0)
    assert every.norm("c", ("body",)) > 0


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


def test_a_parameter_used_behind_the_back_of_its_layer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradient was reduced before its second use is reached: the square of a sum is not the sum of squares."""
    model, head = toy()
    model.layers = nn.ModuleList([Layer().double(), Layer().double()])
    hidden = [model.layers[1].linear]  # a list does not register a module

    def borrowed(layer: Layer, x: Tensor, condition: Tensor, **rest: Any) -> Any:
        return straight_forward(layer, hidden[0](x), condition, **rest)

    monkeypatch.setattr(Layer, "forward", borrowed)
    with pytest.raises(CheckpointError, match=r"layers\.1\.linear.* is used by several layers"):
        measured(model, head)


def test_the_stack_is_the_list_with_the_most_parameters() -> None:
    """A layer can have more experts than a model has layers."""
    experts = [nn.ModuleList([nn.Linear(2, 2) for _ in range(5)]) for _ in range(3)]
    model = nn.ModuleDict({"layers": nn.ModuleList(experts)})
    assert decoder_layers(model) == experts
    assert decoder_layers(nn.Linear(2, 2)) == []


@pytest.mark.parametrize("coef", [1e-4, 30.0])
@pytest.mark.parametrize("kind", ["gpt2", "neox", "phi", "mixtral", "gemma2", "granite"])
def test_every_number_of_a_model_equals_autograd(tmp_path: Path, kind: str, coef: float) -> None:
    """Tied and untied heads, a bias, experts, a cap, a scale; λ as in training, and one that outweighs CE; two passes."""
    model, tokenizer = load_fp64(save_model(kind, tmp_path))
    model.requires_grad_(False)
    checkpoint = Checkpoint(kind, "safetensors", model, tokenizer, False)
    head = find_head(checkpoint)
    blocks = Blocks(torch.randint(512, (61,), generator=torch.Generator().manual_seed(3)), 20, 3, None, 0)
    ids, target = blocks.batch(slice(0, 3))
    methods = ("standard", "centered", "factorized", "gain-aware")[: 1 if head.softcap is not None else None]
    objectives = {method: make_objective(method, coef) for method in methods}
    given = (checkpoint, measurement_of(head, coef=coef), blocks, 3, objectives)
    found = objective_gradients(*given, whole_model=methods, forward_blocks=2)
    # Losses outside the whole model go back to the table only, with the same numbers there.
    for whole in ((), methods[:1]):
        some = objective_gradients(*given, whole_model=whole, forward_blocks=2)
        assert all(some.inner(name, name) == found.inner(name, name) for name in (CE, *methods))
        assert all(some.paths(name) == found.paths(name) for name in methods)
        assert all(some.norm(name, MODEL) == found.norm(name, MODEL) for name in whole)
    assert not any(parameter.requires_grad for parameter in model.parameters())

    parameters = list(model.requires_grad_(True).parameters())
    place = next(i for i, parameter in enumerate(parameters) if parameter.data_ptr() == head.weight_VD.data_ptr())
    scaled = head.weight_VD.detach() * head.logit_scale
    with hidden_states(checkpoint, head) as hidden_of, torch.no_grad():
        hidden_BND = hidden_of(ids)

    def truth(method: str, logits: Tensor, wanted: list[Tensor]) -> tuple[Tensor, ...]:
        loss, ce = straight_loss(method, coef, logits, target, scaled), straight_loss(CE, coef, logits, target, scaled)
        return torch.autograd.grad(loss if method == CE else loss - ce, wanted, retain_graph=True, allow_unused=True)

    def flat(gradients: tuple[Tensor, ...]) -> Tensor:
        return torch.cat([gradient.flatten() for gradient in gradients])

    logits = model(input_ids=ids, use_cache=False).logits
    all_ce = truth(CE, logits, parameters)
    for name in objectives:
        everything = truth(name, logits, parameters)
        for parts, ours, ce in (
            (HEAD, everything[place].flatten(), all_ce[place].flatten()),
            (MODEL, flat(everything), flat(all_ce)),
        ):
            assert found.inner(name, name, parts) == pytest.approx(float(ours @ ours), rel=1e-9)
            assert found.inner(CE, CE, parts) == pytest.approx(float(ce @ ce), rel=1e-9)
            assert found.inner(name, CE, parts) == pytest.approx(float(ours @ ce), rel=1e-7, abs=1e-12)
            numbers = found.against_ce(name, parts)
            assert numbers.r_z == pytest.approx(float(ours.norm() / ce.norm()), rel=1e-9)
            assert numbers.r_z != pytest.approx(float(ours.norm() / (ce + ours).norm()), rel=1e-9, abs=0)
            assert numbers.c_z == pytest.approx(float(ours @ ce / ours.norm() / ce.norm()), rel=1e-7, abs=1e-10)
        paths = found.paths(name)
        assert (paths is not None) == head.tied
        if paths is not None:
            # The output path alone: logits from hidden states that do not depend on the table.
            (g_out,) = truth(name, head.logits(hidden_BND), [parameters[place]])
            g_in = everything[place] - g_out
            assert paths.output_norm == pytest.approx(float(g_out.norm()), rel=1e-9)
            assert paths.input_norm == pytest.approx(float(g_in.norm()), rel=1e-7)
            assert paths.cosine == pytest.approx(float((g_out * g_in).sum() / g_out.norm() / g_in.norm()), abs=1e-7)


@pytest.mark.parametrize("is_parameter", [True, False])
def test_a_bias_counts_unless_it_is_a_buffer(tmp_path: Path, is_parameter: bool) -> None:
    model, tokenizer = load_fp64(save_model("phi", tmp_path))
    module = model.get_output_embeddings()
    if not is_parameter:
        bias = module.bias.detach().clone()
        del module.bias
        module.register_buffer("bias", bias)
    with torch.no_grad():
        module.weight.mul_(1e-3)  # a small weight leaves little gradient below the head, so that the bias counts
    blocks = Blocks(torch.randint(512, (41,), generator=torch.Generator().manual_seed(3)), 20, 2, None, 0)
    checkpoint = Checkpoint("phi", "safetensors", model, tokenizer, False)
    found, _, _ = diagnostic_gradients(checkpoint, measurement_of(find_head(checkpoint), coef=1e-3), blocks, 2)
    ids, target = blocks.batch(slice(0, 2))
    named = dict(model.requires_grad_(True).named_parameters())
    assert ("lm_head.bias" in named) == is_parameter
    logits = model(input_ids=ids, use_cache=False).logits
    ce = straight_loss(CE, 1e-3, logits, target, module.weight)
    z = straight_loss("standard", 1e-3, logits, target, module.weight) - ce
    grads = dict(zip(named, torch.autograd.grad(z, list(named.values()), retain_graph=True), strict=True))
    whole = torch.cat([grad.flatten() for grad in grads.values()])
    without = torch.cat([grad.flatten() for name, grad in grads.items() if name != "lm_head.bias"])
    assert found.extra["norms"]["z_model"] == pytest.approx(float(whole.norm()), rel=1e-9)
    assert (float(without.norm()) == pytest.approx(float(whole.norm()), rel=1e-4)) is not is_parameter


def test_every_architecture_of_the_tests_is_cut(tmp_path: Path) -> None:
    """One recomputation per layer, not the fallback for layers that share tensors."""
    for kind in ("gpt2", "neox", "phi", "cohere", "granite", "gemma2", "mixtral"):
        model, _ = load_fp64(save_model(kind, tmp_path / kind))
        _, calls = cut_forward(
            model, lambda ids, model=model: model(input_ids=ids, use_cache=False).logits, torch.ones(1, 4).long()
        )
        assert [call.layer for call in calls] == decoder_layers(model), kind
