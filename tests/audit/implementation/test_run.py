"""The implementation audit as one record: its numbers are those of the audits it is made of, whatever ends it early."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.audit.implementation.models import Case, tiny_case
from zloss.audit.config import ImplementationAuditConfig
from zloss.audit.implementation import implementations
from zloss.audit.implementation.run import chosen_implementations, run_implementation_audit
from zloss.audit.implementation.source import storage_dtype
from zloss.errors import InputError, ZlossError
from zloss.results.implementation_audit import ImplementationAudit

QUICK: dict[str, Any] = {
    "blocks": 2,
    "block_size": 24,
    "implementations": ("dense", "torch-ce", "chunked-linear"),
    "coef": 1e-2,
    "methods": ("ce", "standard", "centered"),
}


def audit(kind: str, folder: Path, **options: Any) -> tuple[ImplementationAudit, Case]:
    case = tiny_case(kind, folder)
    config = ImplementationAuditConfig(**{"model": str(folder), **QUICK, **options})
    return run_implementation_audit(config, checkpoint=case.checkpoint), case


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> tuple[ImplementationAudit, Case]:
    return audit("gpt2", tmp_path_factory.mktemp("gpt2"))


def test_the_source_section_is_that_of_the_models_own_logits(tied: tuple[ImplementationAudit, Case]) -> None:
    record, case = tied
    with torch.no_grad():
        z = case.logits().double()
    c = math.log(z.shape[-1])
    assert record.target == c
    for line in record.source:
        stored = z.to(storage_dtype(line.storage)).double()
        sources = [2 * (torch.logsumexp(x, -1) - c).unsqueeze(1) * torch.softmax(x, -1) for x in (z, stored)]
        delta = (sources[1] - sources[0]).norm(dim=-1) / sources[0].norm(dim=-1)
        # The model's logits are fp32 products and ours fp64, so rounding to 16 bits differs at some of them.
        assert line.delta_src == pytest.approx(float(delta.mean()), rel=0.05)
        assert line.delta_src_max == pytest.approx(float(delta.max()), rel=0.3)
        assert line.tokens == 48
    assert [line.storage for line in record.source] == ["bf16", "fp16"]


@pytest.mark.parametrize(
    ("name", "absent", "sentence"),
    [
        ("triton", "triton", "Auditing zloss, Triton needs the package 'triton', .*zloss\\[triton\\]"),
        ("liger", "triton", "Auditing Liger cross-entropy needs the package 'triton', .*zloss\\[triton\\]"),
        ("liger", "liger_kernel", "needs the package 'liger_kernel', .*zloss\\[peers\\]"),
        ("flash-attn", "flash_attn", "which no zloss extra installs: install it, or leave 'flash-attn' out"),
    ],
)
def test_what_is_missing_is_named_and_nothing_else(
    name: str, absent: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(implementations.importlib.util, "find_spec", lambda package: None if package == absent else 1)
    found = implementations.find_implementation(name)
    assert not found.installed
    with pytest.raises(ZlossError, match=sentence):
        found.require()


def test_an_older_torch_is_not_called_a_missing_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(implementations.F, "linear_cross_entropy", raising=False)
    found = implementations.find_implementation("torch-linear")
    assert not found.installed
    with pytest.raises(InputError, match=r"needs torch\.nn\.functional\.linear_cross_entropy, which torch"):
        found.require()


def test_every_section_has_its_lines(tied: tuple[ImplementationAudit, Case]) -> None:
    record, _ = tied
    assert record.status == "complete"
    assert record.reasons == {}
    named = [(line.implementation, line.storage) for line in record.implementations]
    assert named == [(name, dtype) for name in QUICK["implementations"] for dtype in ("bf16", "fp16")]
    by = {(line.implementation, line.storage): line for line in record.implementations}
    # Logits stored in bf16 are the same loss for every kernel; without storage the linear loss loses nothing inside.
    assert by["dense", "bf16"].delta_z == pytest.approx(by["torch-ce", "bf16"].delta_z, rel=0.2)
    assert by["chunked-linear", "bf16"].delta_total < 4e-3
    assert by["chunked-linear", "bf16"].delta_weight is not None
    for line in record.implementations:
        assert 0.99 < line.total_cosine <= 1 + 1e-12
        # cos of the whole gradient and its relative error belong together: 2(1 − cos) ≤ Δ² + O(Δ³).
        assert 2 * (1 - line.total_cosine) <= line.delta_total**2 * 1.1 + 1e-12
    keys = {(line.storage, line.part, line.scope) for line in record.updates}
    assert len(keys) == len(record.updates) == 8
    assert [line.method for line in record.overflow] == ["ce", "standard", "centered"]
    assert [line.coef for line in record.overflow] == [0.0, 1e-2, 1e-2]
    assert all(line.kappa_min and line.batches == 2 for line in record.overflow)
    assert set(record.overflow[0].psi) == {f"psi_{scale}" for scale in (256, 1024, 4096, 16384, 65536)}


def test_stored_fp32_leaves_nothing(tmp_path: Path) -> None:
    record, _ = audit("gpt2", tmp_path, precision="fp32", implementations=("none",), overflow_blocks=0)
    (line,) = record.source
    assert line.delta_src < 1e-5
    assert all(error < 1e-5 for _, error in record.update_errors)
    assert record.reasons == {
        "implementations": "no implementation was requested",
        "overflow": "skipped (overflow_blocks = 0)",
    }


def test_only_the_models_own_scale_reaches_the_decision_map(tmp_path: Path) -> None:
    record, _ = audit(
        "gpt2", tmp_path, logit_scales=(1.0, 4.0), precision="bf16", implementations=("none",), overflow_blocks=0
    )
    assert [line.logit_scale for line in record.source] == [1.0, 4.0]
    assert record.own_source == record.source[:1]
    assert len(record.updates) == 2 * len(record.update_errors) == 8
    assert record.update_errors[0][0] == "bf16 logits, CE+Z gradient of the head"


def test_a_capped_head_is_audited_as_far_as_it_goes(tmp_path: Path) -> None:
    record, _ = audit("gemma2", tmp_path)
    assert {line.implementation for line in record.implementations} == {"dense", "torch-ce"}
    assert any("cap" in note for note in record.notes)
    by = {line.method: line for line in record.overflow}
    assert by["centered"].kappa_min is None
    assert "softcap" in by["centered"].reason
    assert by["standard"].kappa_min is not None


@pytest.mark.parametrize(
    ("section", "function"),
    [
        ("source", "source_audit"),
        ("logprobs", "logit_noise"),
        ("implementations", "kernel_line"),
        ("updates", "update_audit"),
        ("overflow", "overflow_audit"),
    ],
)
def test_an_interrupt_keeps_the_sections_before_it(
    section: str, function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*given: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"zloss.audit.implementation.run.{function}", interrupt)
    record, case = audit("gpt2", tmp_path, implementations=("dense",))
    assert record.status == "partial"
    order = ["source", "logprobs", "implementations", "updates", "overflow"]
    at = order.index(section)
    assert all(getattr(record, name) for name in order[:at])
    assert all(getattr(record, name) == () for name in order[at:])
    assert set(record.reasons) == set(order[at:])
    assert ImplementationAudit.from_dict(record.to_dict()) == record
    assert all(
        not parameter.requires_grad or parameter.grad is None for parameter in case.checkpoint.model.parameters()
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"implementations": ("no-such",)}, "unknown implementation"),
        ({"methods": ("no-such",)}, "unknown objective"),
        ({"device": "mps"}, "fp64"),
        ({"device": "nonsense"}, "cpu, cuda or cuda:N"),
        ({"device": "cuda"}, "CUDA devices"),
    ],
)
def test_mistakes_are_seen_before_the_model_is_loaded(options: dict[str, Any], words: str) -> None:
    if options.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(ZlossError, match=words):
        run_implementation_audit(ImplementationAuditConfig(model="nowhere", **{**QUICK, **options}))


@pytest.mark.parametrize(
    "options",
    [
        {"blocks": 0},
        {"coef": 0.0},
        {"precision": "fp8"},
        {"logit_scales": ()},
        {"logit_scales": (math.inf,)},
        {"methods": ()},
    ],
)
def test_a_config_refuses_what_it_cannot_mean(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(options))):
        ImplementationAuditConfig(**options)


def test_what_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    chosen = chosen_implementations(ImplementationAuditConfig(), notes.append)
    left = set(implementations.IMPLEMENTATIONS) - {implementation.name for implementation in chosen}
    assert len(left) == len(notes)
    assert {"dense", "chunked-linear", "torch-ce"} <= {implementation.name for implementation in chosen}
