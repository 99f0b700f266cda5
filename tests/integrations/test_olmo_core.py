"""OLMo-core's Trainer with our head; its own head, whose Z cannot be switched off with 0.0."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.docs.pages import DOCS, blocks_of
from tests.forked import forked_ranks
from tests.integrations.framework_table import check_and_record
from tests.integrations.olmo_core_cases import CASES, processes

pytest.importorskip(
    "olmo_core", reason="ai2-olmo-core is not installed: `python -m tools.frameworks olmo-core` runs these tests"
)
from olmo_core.nn.lm_head import LMHead, LMHeadConfig, LMHeadType, LMLossImplementation
from olmo_core.nn.transformer import TransformerConfig

from zloss.cli.main import main
from zloss.errors import InputError, MissingInputError, UnsupportedModelError
from zloss.integrations.olmo_core import ZLossCallback, ZLossLMHeadConfig

PAGE = DOCS / "olmo_core.md"
COEF = 0.1


@pytest.fixture(scope="module")
def answer() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for ranks in (1, 2):
        found |= json.loads(forked_ranks(ranks, processes).splitlines()[-1])
    return found


@pytest.mark.parametrize("case", ["1 process", *CASES])
def test_parameters_after_four_steps_equal_eager_ce_plus_z(case: str, answer: dict[str, Any]) -> None:
    check_and_record(case, answer[case]["error"], answer[case]["without_z"])


@pytest.mark.parametrize("case", ["1 process", *CASES])
def test_ce_and_z_are_recorded_apart(case: str, answer: dict[str, Any]) -> None:
    recorded, (ce, z) = answer[case]["recorded"], answer[case]["wanted"]
    assert recorded["zloss/ce"] == pytest.approx(ce, rel=1e-5)
    assert recorded["train/CE loss"] == pytest.approx(ce, rel=1e-5)
    assert recorded["zloss/z"] == pytest.approx(z, rel=1e-5)
    assert recorded["zloss/log_z"] ** 2 <= z / COEF  # the mean of squares is at least the square of the mean


def head_and_batch(coef: float | None = COEF, **options: Any) -> tuple[Any, Tensor, Tensor]:
    torch.manual_seed(0)
    config = ZLossLMHeadConfig.of(LMHeadConfig(bias=True), coef=coef, target=0.0, **options)
    return config.build(d_model=8, vocab_size=11), torch.randn(2, 5, 8), torch.randint(11, (2, 5))


def test_evaluation_and_inference_are_those_of_the_plain_head() -> None:
    head, x, labels = head_and_batch()
    head.eval()
    for reduction in ("mean", "none"):
        ours, plain = (
            f(head, x, labels=labels, loss_reduction=reduction) for f in (type(head).forward, LMHead.forward)
        )
        assert torch.equal(ours.loss, plain.loss)
        assert ours.z_loss is None
    assert torch.equal(head.train()(x), LMHead.forward(head, x))


@pytest.mark.parametrize("objective", ["standard", "centered", "factorized"])
def test_a_training_loss_of_every_token(objective: str) -> None:
    head, x, labels = head_and_batch(objective=objective)
    out = head(x, labels=labels, loss_reduction="none", return_logits=True)
    logits = LMHead.forward(head, x)
    ce = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(2, 5)
    penalty = head.objective.penalty(logits.flatten(0, 1), None).view(2, 5)
    torch.testing.assert_close(out.loss, ce + penalty)
    torch.testing.assert_close(out.z_loss, penalty)
    torch.testing.assert_close(out.logits, logits)


def test_a_coefficient_of_zero_is_off() -> None:
    head, x, labels = head_and_batch(coef=0.0)
    out = head(x, labels=labels)
    assert float(out.z_loss) == 0
    torch.testing.assert_close(out.loss, LMHead.forward(head, x, labels=labels).loss)


def test_refused_in_one_sentence() -> None:
    head, x, labels = head_and_batch()
    with pytest.raises(InputError, match=r"z_loss_multiplier=0\.0 would count Z twice"):
        head(x, labels=labels, z_loss_multiplier=0.0)
    with pytest.raises(InputError, match="logits_to_keep"):
        head(x, labels=labels, logits_to_keep=2)
    with pytest.raises(MissingInputError, match="`target` of StandardZLoss must be given"):
        ZLossLMHeadConfig.of(LMHeadConfig(), coef=1e-4, target=None).build(d_model=8, vocab_size=11)
    with pytest.raises(UnsupportedModelError, match="'default' is expected, but got 'normalized'"):
        ZLossLMHeadConfig.of(LMHeadConfig(name=LMHeadType.normalized), coef=1e-4, target=0.0)
    fused = LMHeadConfig(loss_implementation=LMLossImplementation.fused_linear)
    with pytest.raises(UnsupportedModelError, match="'fused_linear'"):
        ZLossLMHeadConfig.of(fused, coef=1e-4, target=0.0).build(d_model=8, vocab_size=11)
    callback = ZLossCallback()
    callback.trainer = type("Trainer", (), {"train_module": type("Module", (), {"model": torch.nn.Linear(2, 2)})})
    with pytest.raises(UnsupportedModelError, match="Linear has no ZLossLMHead"):
        callback.pre_step({})
    stage = TransformerConfig.olmo2_190M(vocab_size=11, n_layers=1).build(init_device="meta")
    stage.apply_pp(SimpleNamespace(size=lambda: 2))
    stage.lm_head = None  # as on the first stage
    callback.trainer = SimpleNamespace(train_module=SimpleNamespace(model_parts=[stage], model=stage))
    with pytest.raises(UnsupportedModelError, match="pipeline parallelism is not supported"):
        callback.pre_step({})


def test_the_configuration_survives_a_round_trip() -> None:
    config = ZLossLMHeadConfig.of(LMHeadConfig(bias=False), coef=1e-5, target=0.0)
    assert ZLossLMHeadConfig.from_dict(config.as_config_dict()) == config


def test_the_example_of_the_page_runs() -> None:
    (example,) = (block for block in blocks_of(PAGE) if "fit()" in block.text and block.language == "python")
    printed = forked_ranks(1, lambda: exec(compile(example.text, str(example), "exec"), {"__name__": "page"}))
    step, _, numbers = [line for line in printed.splitlines() if "zloss/" in line][-1].partition(" ")
    found = ast.literal_eval(numbers)
    assert step == "4"
    assert found.keys() == {"zloss/ce", "zloss/z", "zloss/log_z"}
    assert found["zloss/z"] == pytest.approx(1e-5 * found["zloss/log_z"] ** 2, rel=0.05)


def test_zero_trains_with_1e_4_in_version_3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command and the file of the page, on the real package."""
    (code,) = (block.text for block in blocks_of(PAGE) if "switched_off" in block.text and block.language == "python")
    (tmp_path / "olmo_loss.py").write_text(code, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    ended = main(["audit-loss", "olmo_loss:olmo_loss", "--off", "olmo_loss:switched_off", "--linear", "--out", "out"])
    (file,) = (tmp_path / "out").glob("*.json")
    result = json.loads(file.read_text(encoding="utf-8"))
    assert ended == 1
    (finding,) = (finding for finding in result["findings"] if finding["id"] == "not_off")
    assert finding["verdict"] == "finding"
    assert finding["witness"]["measured"] == pytest.approx(1e-4, rel=1e-4)
    assert result["identified"]["coef"] == pytest.approx(1e-3, rel=1e-4)
    assert result["identified"]["target"] == pytest.approx(0, abs=1e-4)
