"""megatron-core as users run it: `GPTModel`, its schedule, data parallelism and optimizers, with our loss."""

from __future__ import annotations

import importlib.util
import json
import re
from typing import Any

import pytest

from tests.forked import Forked
from tests.integrations.framework_table import check_and_record
from tests.integrations.megatron_cases import CASES, PAGE, jobs


@pytest.fixture(scope="module")
def answer() -> dict[str, Any]:
    """One job for all cases."""
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
        pytest.skip("megatron-core is not installed")
    ended = Forked(jobs).wait()
    assert ended.code == 0, ended.error[-3000:]
    found: dict[str, Any] = json.loads(ended.output.splitlines()[-1])
    return found


@pytest.mark.parametrize("case", CASES)
def test_parameters_after_four_steps_equal_eager_ce_plus_z(case: str, answer: dict[str, Any]) -> None:
    error, without_z = answer["errors"][case]
    check_and_record(case, error, without_z)


def test_ce_and_z_are_separate_and_evaluation_is_ce(answer: dict[str, Any]) -> None:
    assert [name for name, holds in answer["facts"].items() if not holds] == []


@pytest.mark.parametrize(
    ("case", "said"),
    {
        "no target": "MissingInputError: `target` of StandardZLoss must be given",
        "no relative target": "`relative_target` of FactorizedZLoss must be given here: pass relative_target=math.log(V)",
        "no centered target": "`target` of CenteredZLoss must be given here: pass target=math.log(V)",
        "a name": "`objective` is expected to be an objective such as zloss.StandardZLoss(1e-4, target=0.0), but got 'standard'.",
        "a list": "call apply for each model of the list",
        "a sum with another loss function": "the model already returns Σ loss_mask·loss: use handle.loss_func.",
        "a short mask in the report": "to have b·s = 3·8 = 24 entries, like `labels`, but has 23.",
        "a short mask in the loss": "to have b·s = 3·8 = 24 entries, like `labels`, but has 23.",
        "a tied embedding that Megatron would drop": "set `weight.zero_out_wgrad = True`",
        "a bias": "an output layer without a bias: pass fused=False",
        "labels of padding": "`labels` holds the index 60",
        "another reduction": "but got 'mean'",
        "not Megatron": "UnsupportedModelError: Linear has no `compute_language_model_loss`: a LanguageModule of megatron-core "
        "0.16 (GPTModel) is expected, and megatron-core 0.",
        "twice": "this GPTModel already has a Z-loss",
        "an adapter": "but got Adapter with defer_embedding_wgrad_compute=False: pass fused=False",
        "overlapped experts": "`overlap_moe_expert_parallel_comm`",
        "labels [s, b]": "ShapeError: `labels` is expected to be [b, s] = [3, 8], like `input_ids`, but got [8, 3]",
        "labels [s, b] with b = s": "its transpose holds the next tokens",
        "a sum without a mask": "pass `loss_mask` to the model",
    }.items(),
)
def test_refused_in_one_sentence(case: str, said: str, answer: dict[str, Any]) -> None:
    assert said in answer["refused"][case]


def test_the_router_table_of_the_page_is_what_megatron_applies(answer: dict[str, Any]) -> None:
    rows = re.findall(r"^\| ([^|]+) \| ([\d.]+) \| ([\d.]+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    stated = {name: (float(mean), float(per_token)) for name, mean, per_token in rows}
    assert stated.keys() == answer["scales"].keys()
    for name, scales in answer["scales"].items():
        assert scales == pytest.approx(stated[name], rel=1e-5), name


def test_the_router_audit_finds_what_megatron_applies(answer: dict[str, Any]) -> None:
    """λ and its key from Megatron's configuration, scale and c from the gradients of its router."""
    found = answer["router audit"]
    assert (found["coef_key"], found["coef"], found["verdict"]) == ("moe_z_loss_coeff", 0.01, "explained")
    assert found["applied"] == pytest.approx(found["stated"], rel=1e-5)
    assert found["stated"] == 2.0  # a layer sum, of two layers
    assert found["target"] == pytest.approx(0.0, abs=1e-4)


def test_the_example_of_the_page_runs(answer: dict[str, Any]) -> None:
    last = answer["page"].splitlines()[-1]
    step, *numbers = last.split("  ")
    found = {name: float(value) for name, _, value in (number.partition(": ") for number in numbers)}
    assert step == "3"
    assert found.keys() == {"lm loss", "zloss/z", "zloss/log_z"}
    assert found["zloss/z"] == pytest.approx(1e-4 * found["zloss/log_z"] ** 2, rel=0.05)
