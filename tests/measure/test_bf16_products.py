"""bf16 products on a CPU that does not support what it advertises."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest
import torch

from zloss.errors import InputError
from zloss.measure import bf16_products


@pytest.fixture(autouse=True)
def forgotten_answer() -> Iterator[None]:
    bf16_products.native_bf16_products_work.cache_clear()
    yield
    bf16_products.native_bf16_products_work.cache_clear()


def test_products_run_without_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bf16_products, "bf16_products_run", lambda environment: False)
    notes: list[str] = []
    a = torch.randn(8, 8, generator=torch.Generator().manual_seed(4)).bfloat16()
    with bf16_products.working_bf16_products(notes.append):
        assert not torch.backends.mkldnn.enabled
        product = a @ a
    assert torch.backends.mkldnn.enabled
    torch.testing.assert_close(product.float(), a.float() @ a.float(), rtol=2e-2, atol=2e-2)
    assert "ONEDNN_MAX_CPU_ISA" in notes[0]


def test_an_illegal_instruction_kills_the_child_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bf16_products, "PROBE", "import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    assert not bf16_products.native_bf16_products_work()


def test_the_probe_runs_in_the_environment_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bf16_products, "PROBE", "import os; assert os.environ['ONEDNN_MAX_CPU_ISA'] == 'SAFE'")
    assert bf16_products.bf16_products_run({"ONEDNN_MAX_CPU_ISA": "SAFE"})
    assert not bf16_products.bf16_products_run({"ONEDNN_MAX_CPU_ISA": "OTHER"})


def test_the_error_after_torch_was_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def runs_when_limited(environment: Mapping[str, str]) -> bool:
        return environment.get("ONEDNN_MAX_CPU_ISA") == "AVX512_CORE_BF16"

    monkeypatch.setattr(bf16_products, "bf16_products_run", runs_when_limited)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    assert bf16_products.make_bf16_safe() is None
    bf16_products.native_bf16_products_work.cache_clear()
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    with pytest.raises(InputError, match="before torch is imported"):
        bf16_products.make_bf16_safe()
    monkeypatch.setattr(bf16_products, "bf16_products_run", lambda environment: False)
    with pytest.raises(InputError, match="do not run on this CPU"):
        bf16_products.make_bf16_safe()
