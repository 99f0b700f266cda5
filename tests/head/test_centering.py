"""Interventions on an output head."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zloss
from tests.laws.definitions import relative_error
from zloss import errors


def head(bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    linear = nn.Linear(8, 29, bias=bias).double()
    with torch.no_grad():
        linear.weight += torch.randn(8)
    return linear


@pytest.mark.parametrize("bias", [False, True])
def test_centering_keeps_softmax_and_removes_the_mean(bias: bool) -> None:
    hidden = torch.randn(13, 8, dtype=torch.float64)
    linear = head(bias)
    before = linear(hidden)
    after = zloss.center_head_(linear)(hidden)
    assert relative_error(after.softmax(-1), before.softmax(-1)) < 1e-13
    assert after.mean(-1).abs().max() < 1e-13
    assert relative_error(after, before - before.mean(-1, keepdim=True)) < 1e-13


@pytest.mark.parametrize("bias", [False, True])
def test_padding_rows_are_outside_the_mean_and_keep_every_softmax(bias: bool) -> None:
    hidden, valid = torch.randn(13, 8, dtype=torch.float64), 23
    linear, wrapped = head(bias), head(bias)
    before = linear(hidden)
    deployed = zloss.CenteredHeadWrapper(wrapped, valid_vocab=valid)(hidden)
    after = zloss.center_head_(linear, valid_vocab=valid)(hidden)
    for centered in (after, deployed):
        assert centered[:, :valid].mean(-1).abs().max() < 1e-13
        assert relative_error(centered.softmax(-1), before.softmax(-1)) < 1e-13
        assert relative_error(centered[:, :valid].softmax(-1), before[:, :valid].softmax(-1)) < 1e-13
    shifted = zloss.shift_head_(linear, torch.ones(8).double(), valid_vocab=valid)(hidden)
    assert relative_error(shifted.softmax(-1), before.softmax(-1)) < 1e-13
    with pytest.raises(errors.InputError, match="valid_vocab"):
        zloss.center_head_(linear, valid_vocab=30)


def test_shifting_moves_mu_by_a_known_amount_and_not_ce() -> None:
    hidden, target, shift = torch.randn(13, 8).double(), torch.randint(29, (13,)), torch.randn(8).double() * 50
    linear = head()
    before = zloss.head_loss(hidden, linear.weight, target, zloss.CrossEntropy(), bias=linear.bias)
    zloss.shift_head_(linear, shift)
    after = zloss.head_loss(hidden, linear.weight, target, zloss.CrossEntropy(), bias=linear.bias)
    assert relative_error(after.cross_entropy, before.cross_entropy) < 1e-12
    assert relative_error(after.stats.mu - before.stats.mu, hidden @ shift) < 1e-12


def test_the_wrapper_deploys_centered_logits_without_touching_the_weights() -> None:
    linear = head().float()
    kept = linear.weight.detach().clone()
    wrapper = zloss.CenteredHeadWrapper(linear)
    hidden = torch.randn(13, 8)
    raw = linear(hidden)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = wrapper(hidden)
        raw_low = linear(hidden)
    assert low.dtype == torch.float32
    assert relative_error(low.softmax(-1), raw_low.float().softmax(-1)) < 1e-6
    assert relative_error(wrapper(hidden), raw - raw.mean(-1, keepdim=True)) < 1e-6
    assert torch.equal(linear.weight, kept)
    assert wrapper.weight is linear.weight


def test_bad_input() -> None:
    with pytest.raises(errors.ShapeError, match=r"\[D\]"):
        zloss.shift_head_(head(), torch.ones(29))
    with pytest.raises(errors.InputError, match=r"nn\.Linear"):
        zloss.center_head_(nn.Embedding(3, 4))  # type: ignore[arg-type]
    with pytest.raises(errors.InputError, match=r"CenteredHeadWrapper works on an nn\.Linear"):
        zloss.CenteredHeadWrapper(nn.Embedding(3, 4))


def test_a_tied_head_is_recognized_by_its_embedding_whatever_kind_of_module_that_is() -> None:
    class Table(nn.Module):
        def __init__(self, rows: nn.Parameter) -> None:
            super().__init__()
            self.rows = rows

    linear = nn.Linear(8, 29, bias=False)
    embedding = nn.Embedding(29, 8)
    linear.weight = embedding.weight
    before = linear.weight.detach().clone()
    view = Table(nn.Parameter(linear.weight.data))  # another parameter in the same memory
    whole = nn.ModuleDict({"embed": embedding, "head": linear})
    for model in (embedding, embedding.weight, Table(linear.weight), nn.ModuleList([linear, view]), whole):
        with pytest.raises(errors.TiedHeadError, match="CenteredHeadWrapper"):
            zloss.center_head_(linear, model=model)
        with pytest.raises(errors.TiedHeadError, match="untie first"):
            zloss.shift_head_(linear, torch.ones(8), model=model)
    assert torch.equal(linear.weight, before)
    untied = nn.Linear(8, 29, bias=False)  # a model may hold a head several times
    for model in (untied, nn.ModuleList([embedding, untied, untied]), zloss.CenteredHeadWrapper(untied)):
        zloss.center_head_(untied, model=model)
    assert untied.weight.mean(dim=0).abs().max() < 1e-7


def test_without_a_model_other_references_to_the_weight_do_not_matter() -> None:
    """Referrers of the weight were once searched in all of memory; a list or a dictionary is not a tie."""
    linear = nn.Linear(8, 29, bias=False)
    holders = [{"weight": linear.weight}, [linear.weight], nn.ParameterList([linear.weight])]
    zloss.center_head_(linear)
    assert len(holders) == 3
    with pytest.raises(errors.InputError, match="`model` is expected"):
        zloss.center_head_(linear, model="gpt2")  # type: ignore[arg-type]
