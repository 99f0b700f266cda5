"""The audit of a loss on a model's own logits: exact losses are exact, rounded ones err as an independent fp64 says."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.tiny_models import VOCAB, save_model
from zloss.audit.loss.calls import Loss
from zloss.audit.loss.evidence import identify
from zloss.audit.loss.model_tokens import ModelTokens, open_model_tokens, source_on_model
from zloss.audit.loss.probes import Space
from zloss.cli.main import main
from zloss.console import Silent
from zloss.decide.decision_map import decide
from zloss.errors import InputError
from zloss.head.loss import head_loss
from zloss.objectives import GainAwareZLoss
from zloss.results.loss_audit import LossAudit, TargetModelSource

COEF = 1e-2


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> ModelTokens:
    folder = save_model("gpt2", tmp_path_factory.mktemp("model") / "tiny")
    return open_model_tokens(str(folder), blocks=2, block_size=48)


def good(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, y) + COEF * (z.logsumexp(-1) - math.log(z.shape[-1])).square().mean()


def stored_in_bf16(z: Tensor, y: Tensor) -> Tensor:
    """Exact on the vocabulary of the probes, where λ is read; on that of the model Z is of bf16 logits."""
    stored = z.bfloat16().to(z.dtype) if z.shape[-1] == VOCAB else z
    return F.cross_entropy(z, y) + COEF * stored.logsumexp(-1).square().mean()


def gain_aware(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return head_loss(h, w, y, GainAwareZLoss(COEF)).loss


def measured(loss: Callable[..., Any], tokens: ModelTokens, *, linear: bool = False) -> TargetModelSource:
    return source_on_model(identify(Loss(loss, "the loss", linear), Space(), 0), tokens, Silent())


def test_an_exact_loss_is_exact_on_the_model_s_logits(tokens: ModelTokens) -> None:
    found = measured(good, tokens)
    assert (found.tokens, found.calls, found.vocab, found.at, found.of) == (96, 2, VOCAB, "logits", "z")
    assert found.forward_rel_error is not None
    assert found.forward_rel_error < 1e-6
    assert found.delta_src is not None
    assert found.delta_src < 1e-4
    assert found.token_mean is not None
    assert found.token_p99 is not None
    assert found.token_max is not None
    assert found.token_mean <= found.token_p99 <= found.token_max < 1e-3


def test_logits_stored_in_bf16_err_as_much_as_an_independent_fp64_says(tokens: ModelTokens) -> None:
    found = measured(stored_in_bf16, tokens)
    error = wanted = 0.0
    per_token = []
    for hidden, target in tokens:
        z = tokens.head.logits(hidden).detach()
        (applied,) = torch.autograd.grad(stored_in_bf16(leaf := z.clone().requires_grad_(), target), leaf)
        fp64 = z.double().requires_grad_()
        (ce,) = torch.autograd.grad(F.cross_entropy(fp64, target), fp64)
        (source,) = torch.autograd.grad(COEF * fp64.logsumexp(-1).square().mean(), fp64)
        difference = applied.double() - ce - source
        error += float(difference.square().sum())
        wanted += float(source.square().sum())
        per_token.append(difference.norm(dim=-1) / source.norm(dim=-1))
    truth = torch.cat(per_token)
    assert found.delta_src == pytest.approx((error / wanted) ** 0.5, rel=1e-3)
    assert found.delta_src > 1e-3
    assert found.beyond_rounding
    assert found.token_mean == pytest.approx(float(truth.mean()), rel=1e-3)
    assert found.token_p99 == pytest.approx(float(truth.quantile(0.99)), rel=1e-3)
    assert found.token_max == pytest.approx(float(truth.max()), rel=1e-3)


def test_a_linear_loss_gets_the_hidden_states_and_the_head(tokens: ModelTokens) -> None:
    """Gain-aware, whose weight depends on the real head: the gain of the probes' head would be wrong here."""
    found = measured(gain_aware, tokens, linear=True)
    assert (found.at, found.of, found.tokens) == ("hidden", "z", 96)
    assert found.delta_src is not None
    assert found.delta_src < 1e-3
    assert found.delta_weight is not None
    assert found.delta_weight < 1e-3


def test_what_cannot_be_compared_says_why(tokens: ModelTokens) -> None:
    focal = measured(
        lambda z, y: (1 - torch.softmax(z, -1).amax(-1)).mul(F.cross_entropy(z, y, reduction="none")).mean(), tokens
    )
    assert focal.delta_src is None
    assert "no reference" in (focal.reason or "")

    def own_vocabulary(z: Tensor, y: Tensor) -> Tensor:
        assert z.shape[-1] < 500, "of its own vocabulary only"
        return good(z, y)

    refused = measured(own_vocabulary, tokens)
    assert refused.delta_src is None
    assert refused.reason


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"block_size": 999}, "`block_size` is 999, but .* has 128 positions: use at most 128"),
        ({"block_size": 0}, "`block_size` is expected to be a whole number ≥ 1, but got 0"),
        ({"blocks": 0}, "`blocks` is expected to be a whole number ≥ 1, but got 0"),
    ],
)
def test_blocks_that_cannot_be_cut_are_refused_by_name(tokens: ModelTokens, options: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        open_model_tokens(tokens.checkpoint.name, **options)


def test_the_command_writes_the_section_and_report_reads_it(
    tokens: ModelTokens, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "mine.py"
    script.write_text(
        "import torch.nn.functional as F\n"
        "def loss(z, y):\n"
        "    keep = y != -100\n"
        "    return F.cross_entropy(z, y) + 1e-3 * z.logsumexp(-1)[keep].square().sum() / keep.sum().clamp(min=1)\n"
    )
    text = tmp_path / "some.txt"
    text.write_text("A text of a few words, again and again. " * 60)
    model = ["--model", tokens.checkpoint.name, "--text", str(text), "--blocks", "1", "--block-size", "32"]
    assert main(["audit-loss", f"{script}:loss", *model, "--out", str(tmp_path / "out")]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "On 32 float32 tokens of tiny (some.txt), at the logits:" in out
    assert "Relative error of a token's source: mean" in out
    data = json.loads((tmp_path / "out" / "report.json").read_text())
    assert data["target_model"]["tokens"] == 32
    assert data["target_model"]["text"] == "some.txt"
    audit = LossAudit.from_dict(data)
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "Source on the model&#x27;s own logits" in page
    del data["target_model"]
    assert LossAudit.from_dict(data).target_model is None  # as files were before
    assert audit.target_model is not None
    far = replace(audit, target_model=replace(audit.target_model, delta_src=0.5))
    for one, fired in ((audit, False), (far, True)):
        stage = next(d for d in decide(None, loss_audits=[one]) if d.stage == "Implementation")
        assert stage.fired is fired
    assert main(["audit-loss", f"{script}:loss", "--text", str(text)]) == 2
    assert "--text was given without --model" in " ".join(capsys.readouterr().err.split())
