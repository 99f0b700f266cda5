"""The plane of the gradient-geometry figure against its definition over all tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.measure.conftest import COUNT, SIZE
from zloss.measure.measurement import Measurement
from zloss.measure.tokens import Columns, TokenSample, concatenated, geometry_sample, has_plane, token_batches
from zloss.models.checkpoint import Checkpoint
from zloss.models.output_head import find_head, hidden_states
from zloss.results.audit import GeometrySample
from zloss.text import Blocks


def sampled(
    checkpoint: Checkpoint, measurement: Measurement, blocks: Blocks, batch: int, spans: tuple[range, ...]
) -> tuple[GeometrySample, Columns]:
    sample = TokenSample(measurement.head.width, seed=0)
    with hidden_states(checkpoint, measurement.head) as hidden_of:
        passes = [token_batches(measurement, blocks, hidden_of, batch, span, sample) for span in spans]
        columns = concatenated([part for batches in passes for _, part in batches])
    return geometry_sample(columns, measurement, blocks, sample), columns


@torch.no_grad()
def straight_cloud(checkpoint: Checkpoint, blocks: Blocks) -> tuple[Tensor, Tensor]:
    """(Wᵀp of every token, w̄) from the model's own logits."""
    logits = checkpoint.model(input_ids=blocks.inputs(0, COUNT)).logits.flatten(0, 1)
    weight = find_head(checkpoint).weight_VD
    return logits.softmax(-1) @ weight, weight.mean(0)


def straight_place(cloud_TD: Tensor, mean_D: Tensor, base_TD: Tensor) -> tuple[Tensor, Tensor]:
    """x and y of `cloud_TD` in the plane of `base_TD`, by singular vectors."""
    first = mean_D / mean_D.norm()
    rest = base_TD - torch.outer(base_TD @ first, first)
    second = torch.linalg.svd(rest - rest.mean(0), full_matrices=False)[2][0]
    return cloud_TD @ first, cloud_TD @ (second * second[second.abs().argmax()].sign())


@pytest.mark.parametrize("batch", [1, 3])
def test_the_plane_is_that_of_all_tokens(
    checkpoint: Checkpoint, measurement: Measurement, blocks: Blocks, batch: int
) -> None:
    sample, _ = sampled(checkpoint, measurement, blocks, batch, (range(COUNT),))
    assert len(sample) == COUNT * SIZE
    cloud_TD, mean_D = straight_cloud(checkpoint, blocks)
    x, y = straight_place(cloud_TD, mean_D, cloud_TD)
    assert sample.x_raw == pytest.approx(x.tolist(), rel=1e-5, abs=1e-5)
    assert sample.y_raw == pytest.approx(y.tolist(), rel=1e-4, abs=1e-4)
    assert sample.y_centered == pytest.approx(sample.y_raw, abs=1e-9)
    assert sample.mean_row_norm == pytest.approx(float(mean_D.norm()))
    moved = [raw - centered for raw, centered in zip(sample.x_raw, sample.x_centered, strict=True)]
    assert moved == pytest.approx([float(mean_D.norm())] * len(moved), rel=1e-9)
    # The plane of the first batch alone is another one, which the comparison above would notice.
    _, first_y = straight_place(cloud_TD, mean_D, cloud_TD[: 3 * SIZE])
    assert sample.y_raw != pytest.approx(first_y.tolist(), rel=1e-2, abs=1e-2)


def test_which_heads_have_a_plane(measurement: Measurement, blocks: Blocks) -> None:
    capped = replace(measurement, head=replace(measurement.head, softcap=30.0))
    flat = replace(measurement, mean_row_D=torch.zeros_like(measurement.mean_row_D))
    assert [has_plane(each) for each in (measurement, capped, flat)] == [True, False, False]
    without = geometry_sample({}, measurement, blocks, TokenSample(measurement.head.width, seed=0))
    assert (without.x_raw, without.a2_raw, without.drawn_from) == ((), (), 0)  # no tokens yet


def test_the_sample_of_an_offset_or_partial_table_is_by_the_place_in_the_blocks(
    checkpoint: Checkpoint, measurement: Measurement, blocks: Blocks
) -> None:
    """Two ranks, both interrupted: the table lacks blocks, and its rows are not at their place in the text."""
    spans = (range(2), range(5, COUNT))
    sample, columns = sampled(checkpoint, measurement, replace(blocks, offset=7), 1, spans)
    assert len(sample) == 4 * SIZE == sample.drawn_from
    assert sample.rank16_raw == pytest.approx(columns["rank16"].tolist())
    assert sample.delta_u_centered == pytest.approx(columns["delta_u_centered"].tolist())
