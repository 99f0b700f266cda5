"""Data parallel training with the global normalizer equals one process; the denominator counts every token once."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import zloss
from tests.distributed.data_parallel_cases import main
from tests.distributed.launch import needs_fsdp2_means
from tests.distributed.recipe_cases import recipes
from tests.forked import forked_ranks
from zloss.router.conventions import router_conventions


@pytest.fixture(scope="module")
def answer() -> dict[str, Any]:
    """One job for all cases."""
    found: dict[str, Any] = json.loads(forked_ranks(2, main))
    return found


FSDP2_CASES = [pytest.param(case, marks=needs_fsdp2_means) for case in ("fsdp2, adamw", "fsdp2, sgd")]


@pytest.mark.parametrize("case", ["ddp, adamw", "ddp, sgd", *FSDP2_CASES])
def test_two_ranks_equal_one_process(case: str, answer: dict[str, Any]) -> None:
    assert answer["training"][case] <= 1e-5


def test_a_denominator_that_forgets_the_average_shows(answer: dict[str, Any]) -> None:
    assert answer["training"]["forgotten, sgd"] > 1e-2


def test_router_losses_count_the_decisions_of_all_ranks(answer: dict[str, Any]) -> None:
    found = answer["routers"]
    assert found.pop("own counts") > 1e-2  # what a rank that divides by its own decisions gets wrong
    assert len(found) == 10
    assert max(found.values()) <= 1e-12


def test_every_convention_says_what_it_counts_over_ranks() -> None:
    for convention in router_conventions():
        named = "valid_tokens" if convention.token_count == "valid_tokens" else "`groups`"
        assert named in convention.over_ranks
        assert "own count" in convention.over_ranks


def test_a_router_loss_refuses_two_counts() -> None:
    with pytest.raises(zloss.errors.InputError, match="pass one of them"):
        zloss.router_loss(torch.zeros(4, 3), coef=1.0, convention="megatron", top_k=1, normalizer=4, groups=[])


def test_token_parts_of_two_ranks_are_the_table_of_one_process(answer: dict[str, Any]) -> None:
    assert answer["token parts"] == {"columns": True, "index": True, "vectors": True}


@pytest.mark.parametrize("how", ["empty batch", "join"])
def test_a_rank_without_a_batch(how: str, answer: dict[str, Any]) -> None:
    assert answer["without a batch"][how] <= 1e-5


def test_the_recipes_of_the_page_equal_one_process(answer: dict[str, Any]) -> None:
    found = dict(answer["recipes"])
    assert found.pop("context shifted late") > 1e-2
    assert {name for name in found if " " not in name} | {"fsdp_tp"} == set(recipes())
    assert {name: value for name, value in found.items() if not value <= 1e-5} == {}


COUNTS = {
    "targets of micro-batches": ([torch.tensor([1, -100, 2]), torch.tensor([[-100, 3]])], {}, 3),
    "targets": (torch.tensor([1, -100, 2]), {}, 2),
    "a number": (7, {"gradients": 2}, 3.5),
    "another ignore_index": (torch.tensor([0, 5]), {"ignore_index": 0}, 1),
    # `(labels != -100).sum()` was taken for one target: N was 1.
    "a count in a tensor": (torch.tensor(500), {}, 500),
    "a count in a float tensor": (torch.tensor(500.0), {}, 500),
    "counts in tensors": ([torch.tensor(200), torch.tensor(300)], {}, 500),
    "no valid token: divides by one": (torch.tensor([-100, -100]), {}, 1),
    # They were compared with ignore_index modulo their range.
    "small unsigned targets": (torch.tensor([156, 3], dtype=torch.uint8), {}, 2),
}


@pytest.mark.parametrize("name", COUNTS)
def test_counts_of_one_process(name: str) -> None:
    tokens, options, count = COUNTS[name]
    assert float(zloss.global_normalizer(tokens, **options)) == count


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": -1}, "count ≥ 0"),
        ({"tokens": torch.tensor(-1)}, "count ≥ 0"),
        ({"tokens": torch.ones(3)}, "sum of the weights"),
        ({"tokens": 4, "gradients": "mean"}, "averaged"),
        ({"tokens": 4, "gradients": 0}, "divisor ≥ 1"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(zloss.errors.InputError, match=message):
        zloss.global_normalizer(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("ignored", [-1, -2])
def test_targets_that_the_loss_refuses_were_counted(ignored: int) -> None:
    """nanoGPT marks ignored tokens with -1: without `ignore_index=-1` they were counted, and the mean was too small."""
    target, hidden, weight = torch.tensor([3, ignored, 5, ignored]), torch.randn(4, 2), torch.randn(7, 2)
    message = rf"holds the index {ignored}, but .* or pass ignore_index={ignored}\."
    for tokens in (target, [target[:1], target[1:]]):
        with pytest.raises(zloss.errors.TargetRangeError, match=message):
            zloss.global_normalizer(tokens)
    with pytest.raises(zloss.errors.TargetRangeError, match=message):
        zloss.head_loss(hidden, weight, target, zloss.CrossEntropy())
    assert float(zloss.global_normalizer(target, ignore_index=ignored)) == 2


def test_a_mask_is_not_taken_for_targets() -> None:
    """All its entries were counted, False ones too."""
    with pytest.raises(zloss.errors.DtypeError, match=r"torch\.bool"):
        zloss.global_normalizer(torch.tensor([True, False]))
