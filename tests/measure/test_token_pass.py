"""The pass over tokens: its columns are those of straight definitions, batches and spans do not matter, BOS is not counted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.measure.conftest import COUNT, SIZE
from zloss.measure import tokens
from zloss.measure.measurement import Measurement, measurement_of
from zloss.measure.tokens import FLOATS, INTEGERS, Columns, concatenated, head_numbers, token_batches
from zloss.models.checkpoint import Checkpoint
from zloss.models.output_head import find_head, hidden_states
from zloss.text import Blocks


def taken(
    checkpoint: Checkpoint, measurement: Measurement, blocks: Blocks, batch: int, span: range = range(COUNT)
) -> dict[str, Any]:
    with hidden_states(checkpoint, measurement.head) as hidden_of:
        return concatenated([part for _, part in token_batches(measurement, blocks, hidden_of, batch, span)])


@pytest.fixture(scope="module")
def whole(checkpoint: Checkpoint, measurement: Measurement, blocks: Blocks) -> Columns:
    return taken(checkpoint, measurement, blocks, 2)


def straight_columns(checkpoint: Checkpoint, blocks: Blocks, coef: float) -> dict[str, Tensor]:
    """Every column from the model's own logits and autograd."""
    weight = find_head(checkpoint).weight_VD.detach()
    with hidden_states(checkpoint, find_head(checkpoint)) as hidden_of, torch.no_grad():
        hidden = hidden_of(blocks.inputs(0, COUNT)).flatten(0, 1)
    target, c = blocks.targets(0, COUNT).reshape(-1), np.log(len(weight))
    hidden = hidden.clone().requires_grad_()
    found: dict[str, Tensor] = {"block": torch.arange(COUNT).repeat_interleave(SIZE)}
    found |= {"position": torch.arange(SIZE).repeat(COUNT), "target": target}
    found["token"] = blocks.stream[:-1]
    for suffix, head in (("", weight), ("_centered", weight - weight.mean(0))):
        z = hidden @ head.T
        log_z, p = z.logsumexp(1), z.softmax(1)
        (delta_u,) = torch.autograd.grad((coef * (log_z - c) ** 2).sum(), hidden, retain_graph=True)
        q = p @ head
        directions = torch.linalg.svd(head, full_matrices=False)[2][:16]
        found |= {
            f"log_z{suffix}": log_z,
            f"mu{suffix}": z.mean(1),
            f"gain{suffix}": q.norm(dim=1) / p.norm(dim=1),
            f"row_max{suffix}": z.amax(1),
            f"delta_u{suffix}": delta_u.norm(dim=1),
            f"rank16{suffix}": (q @ directions.T).square().sum(1) / p.norm(dim=1) ** 2,
        }
    z = hidden @ weight.T
    ce = F.cross_entropy(z, target, reduction="none")
    (delta_u_ce,) = torch.autograd.grad(ce.sum(), hidden)
    return found | {"ce": ce, "p_norm": z.softmax(1).norm(dim=1), "delta_u_ce": delta_u_ce.norm(dim=1)}


def test_every_column_equals_its_straight_definition(
    checkpoint: Checkpoint, measurement: Measurement, blocks: Blocks, whole: Columns
) -> None:
    truth = straight_columns(checkpoint, blocks, measurement.coef)
    assert set(truth) == {*INTEGERS, *FLOATS}, "define the column in `straight_columns`, from the logits"
    assert set(whole) == set(truth)
    assert all(whole[name].dtype == np.int32 for name in INTEGERS)
    for name, want in truth.items():
        assert whole[name].tolist() == pytest.approx(want.tolist(), rel=1e-9, abs=1e-12), name


def test_the_hidden_source_of_ce_is_that_of_a_scaled_and_capped_head(measurement: Measurement) -> None:
    """‖Wᵀ C (p − onehot)‖ with the slope C of the cap, against autograd."""
    head = replace(measurement.head, softcap=3.0, logit_scale=1.7)
    capped = measurement_of(head, coef=1e-4)
    hidden = torch.randn(9, head.width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    target = torch.arange(9)
    ((_, columns, _),) = tokens.token_chunks(capped, hidden, target)
    leaf = hidden.clone().requires_grad_()
    F.cross_entropy(head.logits(leaf), target, reduction="sum").backward()
    assert leaf.grad is not None
    assert columns["delta_u_ce"].tolist() == pytest.approx(leaf.grad.norm(dim=1).tolist(), rel=1e-9)
    assert set(FLOATS) - set(columns) == {name for name in FLOATS if name.endswith("_centered")} | {"mu"}


@pytest.mark.parametrize(
    ("batch", "spans"), [(1, [range(COUNT)]), (3, [range(COUNT)]), (2, [range(4), range(4, COUNT)])]
)
def test_batches_and_spans_do_not_change_the_columns(
    checkpoint: Checkpoint, measurement: Measurement, blocks: Blocks, whole: Columns, batch: int, spans: list[range]
) -> None:
    parts = [taken(checkpoint, measurement, blocks, batch, span) for span in spans]
    assert [len(part["ce"]) for part in parts] == [len(span) * SIZE for span in spans]
    joined = concatenated(parts)
    assert joined.keys() == whole.keys()
    for name, column in whole.items():
        assert joined[name].tolist() == pytest.approx(column.tolist(), rel=1e-9, abs=1e-12), name
    # A pass that resumes has the bytes of one pass.
    assert batch != 2 or all(joined[name].tobytes() == whole[name].tobytes() for name in whole)
    assert None not in vars(head_numbers(joined, measurement, "centered")).values()


def test_a_batch_ends_at_a_multiple_of_its_size(
    checkpoint: Checkpoint, measurement: Measurement, blocks: Blocks
) -> None:
    with hidden_states(checkpoint, measurement.head) as hidden_of:
        ends = [stop for stop, _ in token_batches(measurement, blocks, hidden_of, 3, range(1, COUNT))]
    assert ends == [3, 6, 7]


def test_bos_positions_are_not_counted(measurement: Measurement, blocks: Blocks) -> None:
    seen: list[tuple[int, ...]] = []

    def hidden_of(ids_BN: Tensor) -> Tensor:
        seen.append(tuple(ids_BN.shape))
        return torch.zeros(*ids_BN.shape, measurement.head.width, dtype=torch.float64)

    with_bos = replace(blocks, bos_id=0, offset=5)
    ((stop, columns),) = token_batches(measurement, with_bos, hidden_of, 2, range(2))
    assert stop == 2
    assert seen == [(2, SIZE + 1)]
    assert columns["target"].tolist() == blocks.stream[1 : 2 * SIZE + 1].tolist()
    assert columns["token"].tolist() == blocks.stream[: 2 * SIZE].tolist()
    assert columns["block"].tolist() == [5] * SIZE + [6] * SIZE
    assert columns["position"].tolist() == [*range(SIZE), *range(SIZE)]


def test_rows_outside_the_vocabulary_do_not_hide_the_centered_head(measurement: Measurement) -> None:
    """A -inf bias beyond `valid_vocab` is not inside μ."""
    bias_V = torch.zeros(measurement.head.vocab)
    bias_V[-1] = -torch.inf
    head = replace(measurement.head, bias_V=bias_V)
    assert measurement_of(head, coef=1e-4).lacks_centered is not None
    assert measurement_of(head, head.vocab - 1, coef=1e-4).lacks_centered is None
