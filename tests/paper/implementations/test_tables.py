"""Recipes of the implementation audits: their lines are the audits' numbers."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.paper.claim_tables import smoke as smoke_recipe
from zloss.audit.implementation.implementations import IMPLEMENTATIONS
from zloss.models.output_head import OutputHead
from zloss.results.implementation_audit import Fp16Headroom
from zloss_paper.engine.recipe import Overrides, find_recipe
from zloss_paper.engine.reproduction import Reproduction
from zloss_paper.engine.workbench import Workbench
from zloss_paper.implementations import recipe as shared
from zloss_paper.implementations.overflow_audit import OverflowConfig, configure, overflow_line
from zloss_paper.implementations.recipe import HeadTokens
from zloss_paper.implementations.source_audit import OWN_INPUTS

SHARED = "tab:source_audit text:source_audit_fineweb text:source_audit_medium tab:update_audit text:update_audit_fp16"


@pytest.fixture(scope="module")
def bench() -> Workbench:
    return Workbench()


def smoke(label: str, folder: Path, bench: Workbench) -> Reproduction:
    return smoke_recipe(label, Overrides(models=(str(folder),)), bench)


def test_source_lines_are_next_to_the_papers(gpt2_folder: Path, bench: Workbench) -> None:
    result = smoke("tab:source_audit", gpt2_folder, bench)
    stored = [line for line in result.table if line.key["storage"] != OWN_INPUTS]
    assert len(stored) == 9
    for line in stored:
        other = result.recipe.beside(line)
        assert (other is None) == (line.key["storage"] == "fp32")
        assert line.cells["split_residual"].value <= 1e-6
    ours = result.table.find(storage=OWN_INPUTS)
    assert len(ours) == 3
    assert all(line.cells["delta_src_max"].value <= 1e-4 for line in ours)
    details = result.record.to_dict()["details"]["source_rows"]
    assert [detail["row"]["delta_src"]["mean"] for detail in details] == [
        line.cells["delta_src"].value for line in stored
    ]


def test_recipes_of_one_audit_share_it(gpt2_folder: Path, bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[str] = []
    for name in ("source_audit", "update_audit", "kernel_line"):
        real = getattr(shared, name)

        def counted(*args: Any, _real: Any = real, _name: str = name, **options: Any) -> Any:
            runs.append(_name)
            return _real(*args, **options)

        monkeypatch.setattr(shared, name, counted)
    fresh = Workbench()
    for label in (*SHARED.split(), "text:pytorch_backward_audit"):
        smoke(label, gpt2_folder, fresh)
    assert sorted(runs) == ["source_audit", "update_audit"]


def test_update_lines_have_both_scopes_and_z_alone(neox_folder: Path, bench: Workbench) -> None:
    result = smoke("tab:update_audit", neox_folder, bench)
    assert {(line.key["scope"], line.key["logit_scale"]) for line in result.table} == {
        (scope, scale) for scope in ("head", "all") for scale in (1, 4)
    }
    assert all(line.cells["z_grad_rel_error"].value > 0 for line in result.table)
    assert all(result.recipe.beside(line) is not None for line in result.table)
    (fp16,) = smoke("text:update_audit_fp16", neox_folder, bench).table.find(logit_scale=1)
    assert fp16.cells["grad_rel_error_max"].value < fp16.cells["grad_rel_error_max_bf16"].value


def test_overflow_lines(gpt2_folder: Path, bench: Workbench) -> None:
    result = smoke("tab:overflow_audit", gpt2_folder, bench)
    by = {line.key["method"]: line for line in result.table}
    assert len(by) == 6
    # The head materializes its logits, and the centered head's are shifted in fp32: equal to CE up to that rounding.
    for column in ("grad_norm_mean", "grad_inf_mean", "kappa_min"):
        ce, centered = (by[method].cells[column].value for method in ("CE baseline", "Centered head"))
        assert centered == pytest.approx(ce, rel=1e-4)
    assert result.config.head == "paper"
    # The paper's WikiText line has three methods; the others are next to nothing.
    beside = [method for method, line in by.items() if result.recipe.beside(line) is not None]
    assert beside == ["CE baseline", "Standard Z-loss", "Centered Z-loss"]
    audited = [detail["row"] for detail in result.record.to_dict()["details"]["overflow_rows"]]
    assert [one["batches"] for one in audited] == [2] * 6
    assert set(audited[0]["psi"]) == {f"psi_{scale}" for scale in (256, 1024, 4096, 16384, 65536)}


def test_the_overflow_setting_is_the_papers() -> None:
    stated = find_recipe("tab:overflow_audit").paper
    assert stated is not None
    config: OverflowConfig = configure("paper", Overrides())
    assert config.coef == stated.config["lambda_aux"]
    assert config.beta == stated.config["gain_beta"]
    assert list(config.scales) == stated.config["static_scales_audited"]
    for model in config.models.rows:
        assert model.audit.blocks == stated.config["num_batches"]
        assert not model.deviations
    factorized: Any = config.objectives()["Factorized Z-loss"]
    assert (factorized.shift_target, factorized.relative_target) == (0.0, None)


def test_a_method_without_a_gradient_prints_its_reason() -> None:
    (model, *_) = configure("smoke", Overrides()).models.rows
    line = overflow_line(model, Fp16Headroom("Centered Z-loss", 0.0, 0, None, None, None, reason="softcap"))
    assert not line.cells
    assert set(line.reasons.values()) == {"softcap"}


def test_thinned_tokens_come_from_every_block() -> None:
    head = OutputHead(torch.nn.Identity(), torch.zeros(5, 1), None, False)
    tokens = HeadTokens(head, torch.arange(24.0).unsqueeze(1), torch.arange(24), 8)
    thin = tokens.thinned(3)
    assert thin.label_T.tolist() == [0, 3, 7, 8, 11, 15, 16, 19, 23]
    assert thin.hidden_TD.flatten().long().tolist() == thin.label_T.tolist()
    assert tokens.thinned(8) is tokens.thinned(None) is tokens


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_the_fused_kernel_is_audited_interpreted(gpt2_folder: Path, bench: Workbench) -> None:
    result = smoke("tab:triton_fused", gpt2_folder, bench)
    assert {(line.key["storage"], line.key["logit_scale"]) for line in result.table} == {
        (storage, scale) for storage in ("fp32", "bf16", "fp16") for scale in (1, 4)
    }
    for line in result.table.find(storage="fp32"):
        # An untrained model's log Z is close to c, and fp32 rounds their difference by 1e-7 of log Z.
        assert line.cells["delta_z"].value <= 5e-6
        assert line.cells["delta_total"].value <= 1e-6
        assert line.cells["rel_forward_error"].value <= 5e-6
    assert all("interpreter, on 4 tokens" in line.deviations[-1] for line in result.table)
    medium = smoke("text:fused_audit_medium", gpt2_folder, bench)
    assert [line.cells["delta_z"] for line in medium.table.find(storage="bf16")] == [
        line.cells["delta_z"] for line in result.table.find(storage="bf16")
    ]


def test_every_installed_implementation_has_its_lines(gpt2_folder: Path, bench: Workbench) -> None:
    result = smoke("audit:implementations", gpt2_folder, bench)
    audited = [way for way in IMPLEMENTATIONS.values() if way.name != "cut-cross-entropy"]
    installed = {way.title for way in audited if way.installed}
    assert {line.key["implementation"] for line in result.table} == installed
    assert {f"{way.title}: not installed" for way in audited if not way.installed} <= set(result.record.notes)
    for way in audited:
        for line in result.table.find(implementation=way.title, dtype="fp32"):
            assert line.cells["delta_total"].value <= 1e-5
            assert ("delta_z" in line.cells) == way.has_z
    (ours,) = result.table.find(implementation=IMPLEMENTATIONS["chunked-linear"].title, dtype="bf16")
    assert ours.cells["delta_src"].value <= 1e-4
