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
from zloss.measure import body_gradients as engine
from zloss.measure import graph_room, parameter_sums
from zloss.measure.body_gradients import all_parameters_on, body_gradients
from zloss.measure.diagnostic_batch import DiagnosticBatch, MadeForward
from zloss.measure.gradient_engine import objective_gradients
from zloss.measure.graph_room import GraphRoom, SavedBytes
from zloss.measure.layer_cuts import cut_forward
from zloss.measure.measurement import measurement_of
from zloss.measure.parameter_sums import BodyGradients
from zloss.measure.recomputed_layers import decoder_layers
from zloss.models.checkpoint import Checkpoint
from zloss.models.output_head import OutputHead, find_head, hidden_states
from zloss.objectives import CenteredZLoss, StandardZLoss

VOCAB, WIDTH, PARTS = 23, 6, (3, 2)
PAIRS = (("a", "b"),)


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
    read by all of them and once more after them.
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
        x, store = embedded, {} if self.shares else None
        for layer in self.layers:
            x, size = layer(x, condition, gate=self.gate, store=store)
            x = 1.5 * x + size
        return self.norm(x + embedded)


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
    seeds = {name: torch.randn(tokens, WIDTH, generator=generator, dtype=torch.float64) for name in ("a", "b", "c")}
    return ids, seeds


def measured(model: Toy, head: OutputHead, room: GraphRoom | None = None) -> tuple[BodyGradients, list[int]]:
    """(the numbers, calls of layers in every forward pass)."""
    ids, seeds = ids_and_seeds()
    with all_parameters_on(model):
        cuts = [cut_forward(model, model, part, room) for part in ids]
        calls = [len(cut.calls) for cut in cuts]
        with torch.enable_grad():
            forwards = [(cut, cut.hidden_BND.reshape(-1, WIDTH)) for cut in cuts]
        found = body_gradients(model, head, forwards, seeds, PAIRS, torch.unique(torch.cat(ids)))
    return found, calls


def agrees(found: BodyGradients, model: Toy) -> bool:
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
        found.squares.keys() == {"a", "b"},
        all(found.squares[name] == pytest.approx(float(body[name] @ body[name]), rel=1e-10) for name in found.squares),
        found.dots["a", "b"] == pytest.approx(float(body["a"] @ body["b"]), rel=1e-8),
        found.table_UD.keys() == seeds.keys(),
    ]
    tables = (torch.allclose(found.table_UD[name], grads[name]["table.weight"][used_U], rtol=1e-9) for name in seeds)
    return all(near) and all(tables)


def test_a_stack_with_shared_tensors_and_layers() -> None:
    model, head = toy()
    found, calls = measured(model, head)
    assert calls == [3, 3]
    assert agrees(found, model)
    assert all("forward" not in vars(module) for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("left", [1, 10_000, 2**30])
def test_graphs_that_are_kept_give_the_same_numbers(left: int) -> None:
    model, head = toy()
    room = GraphRoom(left)
    found, calls = measured(model, head, room)
    assert calls == [3, 3]
    plain, _ = measured(model, head)
    assert (found.squares, found.dots) == (plain.squares, plain.dots)
    assert all(torch.equal(found.table_UD[name], plain.table_UD[name]) for name in plain.table_UD)
    assert (room.left < left) == (left > 1)


def test_the_size_of_a_graph_is_what_autograd_keeps() -> None:
    x, layer = torch.randn(50, 10, requires_grad=True), nn.Linear(10, 10)
    saved = SavedBytes(layer)
    with saved:
        torch.tanh(layer(x))
    assert saved.total == 2 * 50 * 10 * 4  # the input of the product and the result of tanh, not the weight


def test_the_room_is_a_quarter_of_the_free_memory(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    4096 kB\n")
    assert graph_room._available(tmp_path / "meminfo") == 4096 * 1024
    assert graph_room._available(tmp_path / "missing") == 0
    (tmp_path / "memory.max").write_text("3000\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert graph_room._below_limit(tmp_path) == 2000
    (tmp_path / "memory.max").write_text("max\n")
    assert graph_room._below_limit(tmp_path) > 2**50
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph_room, "free_bytes", lambda device: 4000)
        assert GraphRoom.of_device(torch.device("cpu")).left == 1000
    assert graph_room.free_bytes(torch.device("meta")) == 0


def test_layers_that_share_a_dict_are_not_cut() -> None:
    """Between such layers a gradient would be lost without a trace."""
    model, head = toy(shares=True)
    found, calls = measured(model, head)
    assert calls == [0, 0]
    assert agrees(found, model)
    assert all("forward" not in vars(module) for module in model.modules())


def test_a_layer_that_changes_its_input_is_not_cut() -> None:
    model, head = toy()
    straight = Layer.forward

    def in_place(layer: Layer, x: Tensor, condition: Tensor, **rest: Any) -> Any:
        moved, size = straight(layer, x.clone(), condition, **rest)
        return (x.mul_(0.0).add_(moved) if layer is model.layers[1] else moved), size

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Layer, "forward", in_place)
        found, calls = measured(model, head)
        assert calls == [0, 0]
        assert agrees(found, model)


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
    found, _ = measured(model, head)
    assert layer.forward is own
    assert called
    del layer.forward
    assert agrees(found, model)


def overwrite(backward: Any, tensor: Tensor, name: str, adjoint: Tensor) -> None:
    """Only the last contribution to a tensor that several layers read."""
    if backward._sums.owns(tensor):
        if backward._sums.wants(tensor, name):
            backward._sums.add(tensor, name, adjoint)
    else:
        backward._waiting.setdefault(id(tensor), {})[name] = adjoint


def last_part(sums: Any, parameter: Tensor, seed: str, grad: Tensor) -> None:
    """Only the last forward pass."""
    sums._sums[id(parameter)][seed] = grad[sums._rows_U] if id(parameter) == sums._table else grad


def no_glue(outputs: Any) -> list[Tensor]:
    """Only what stands directly below."""
    return [tensor for tensor in straight_leaves(outputs) if not isinstance(tensor, nn.Parameter) or tensor.dim() > 1]


straight_leaves = engine._graph_leaves
MUTATIONS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "adjoints overwritten": (engine._Backward, "_deliver", overwrite),
    "one forward pass only": (parameter_sums.ParameterSums, "add", last_part),
    "vectors forgotten": (engine, "_graph_leaves", no_glue),
    "products in fp32": (parameter_sums, "_dot", lambda a, b: float((a.float() * b.float()).sum())),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_comparison_notices_a_mistake(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*MUTATIONS[name])
    model, head = toy()
    assert not agrees(measured(model, head)[0], model)


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
    ids = torch.randint(512, (3, 20), generator=torch.Generator().manual_seed(3))
    target = torch.randint(512, (60,), generator=torch.Generator().manual_seed(4))
    measurement = measurement_of(head, coef=coef)
    objectives: dict[str, Any] = {"z": StandardZLoss(coef, measurement.target)}
    if head.softcap is None:
        objectives["centered"] = CenteredZLoss(coef, measurement.target)
    batch = DiagnosticBatch(ids, target, forward_blocks=2)
    found = objective_gradients(checkpoint, measurement, batch, objectives, whole_model=("z",))
    assert not any(parameter.requires_grad for parameter in model.parameters())
    with hidden_states(checkpoint, head) as hidden_of, all_parameters_on(model):
        batch.made[0] = MadeForward(cut_forward(model, hidden_of, ids[:2]))
    assert objective_gradients(checkpoint, measurement, batch, objectives, whole_model=("z",)) == found
    assert batch.made == {}  # a pass is used up

    names, parameters = zip(*model.requires_grad_(True).named_parameters(), strict=True)
    logits = model(input_ids=ids, use_cache=False).logits.flatten(0, 1)
    log_z = logits.logsumexp(1)
    losses = {
        "ce": F.cross_entropy(logits, target),
        "z": (coef * (log_z - measurement.target) ** 2).mean(),
        "centered": (coef * (log_z - logits.mean(1) - measurement.target) ** 2).mean(),
    }
    truth = {name: torch.autograd.grad(loss, parameters, retain_graph=True) for name, loss in losses.items()}
    place = next(i for i, parameter in enumerate(parameters) if parameter.data_ptr() == head.weight_VD.data_ptr())
    for name, gradient in found.items():
        ours, ce = truth[name][place], truth["ce"][place]
        assert gradient.head.square == pytest.approx(float((ours * ours).sum()), rel=1e-9)
        assert gradient.head.ce_square == pytest.approx(float((ce * ce).sum()), rel=1e-9)
        assert gradient.head.dot == pytest.approx(float((ours * ce).sum()), rel=1e-7, abs=1e-12)
        assert (gradient.paths is not None) == head.tied
    z, ce = (torch.cat([grad.flatten() for grad in truth[name]]) for name in ("z", "ce"))
    whole = found["z"].model
    assert whole is not None
    assert whole.square == pytest.approx(float(z @ z), rel=1e-9)
    assert whole.ce_square == pytest.approx(float(ce @ ce), rel=1e-9)
    assert whole.dot == pytest.approx(float(z @ ce), rel=1e-7, abs=1e-12)
    assert len(names) == len(set(names))


def test_every_architecture_of_the_tests_is_cut(tmp_path: Path) -> None:
    """One recomputation per layer, not the way out for layers that share tensors."""
    for kind in ("gpt2", "neox", "phi", "cohere", "granite", "gemma2", "mixtral"):
        model, _ = load_fp64(save_model(kind, tmp_path / kind))
        cut = cut_forward(
            model, lambda ids, model=model: model(input_ids=ids, use_cache=False).logits, torch.ones(1, 4).long()
        )
        assert [call.layer for call in cut.calls] == decoder_layers(model), kind
