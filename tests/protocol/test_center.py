"""The centered copy is the same model with μ = 0, for every way a head can be stored."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_models import save_model
from zloss.audit.checkpoint.config import AuditConfig
from zloss.audit.checkpoint.run import run_audit
from zloss.errors import CoordinateError, InputError, TiedHeadError
from zloss.protocol.center import center_checkpoint
from zloss.protocol.config import CenterConfig


def save(kind: str, folder: Path, shard: str | None = None) -> Path:
    """A tiny model with a common shift, in several files where `shard` bounds their size."""
    from transformers import AutoModelForCausalLM

    save_model(kind, folder)
    if shard is not None:
        model = AutoModelForCausalLM.from_pretrained(folder)
        (folder / "model.safetensors").unlink()
        model.save_pretrained(folder, max_shard_size=shard)
        assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


def center(folder: Path, target: Path, **options: Any) -> Any:
    return center_checkpoint(CenterConfig(model=str(folder), blocks=4, block_size=32, **options), target)


@pytest.mark.parametrize(
    ("kind", "tied", "shard"),
    [
        ("neox", False, None),
        ("granite", True, None),
        ("phi", False, None),
        ("gpt2", True, None),
        ("neox", False, "40KB"),
        ("granite", True, "40KB"),
    ],
)
def test_the_copy_predicts_the_same_with_mu_zero(kind: str, tied: bool, shard: str | None, tmp_path: Path) -> None:
    folder = save(kind, tmp_path / "model", shard)
    result = center(folder, tmp_path / "out")
    assert result.verified
    assert result.ppl_relative_difference <= 1e-6
    assert result.greedy_equal
    assert result.after.mu_abs_99 < 1e-5 * result.before.mu_abs_99
    assert result.tied_before == tied
    assert not result.tied_after
    written = json.loads((tmp_path / "out" / "centering.json").read_text())
    assert written["schema"] == "zloss.centering/1"
    assert (tmp_path / "out" / "README.md").read_text().startswith("# model, row-centered")


def test_every_other_tensor_keeps_its_bits(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    folder = save("granite", tmp_path / "model", "40KB")
    center(folder, tmp_path / "out")

    def all_of(place: Path) -> dict[str, torch.Tensor]:
        return {key: value for file in sorted(place.glob("*.safetensors")) for key, value in load_file(file).items()}

    before, after = all_of(folder), all_of(tmp_path / "out")
    assert set(after) == {*before, "lm_head.weight"}
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert len({path.stat().st_mode for path in (tmp_path / "out").iterdir()}) == 1
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == len(list(folder.glob("*.safetensors"))) + 1


def test_a_tied_head_with_learned_positions_can_stay_tied(tmp_path: Path) -> None:
    result = center(save("gpt2", tmp_path / "model"), tmp_path / "out", keep_tied=True)
    assert (result.verified, result.tied_after, result.extra_bytes) == (True, True, 0)
    assert result.after.mu_abs_99 < 1e-5 * result.before.mu_abs_99
    # The card claimed that no other weight was changed.
    assert "w̄ was added to every learned position in return" in (tmp_path / "out" / "README.md").read_text()
    with pytest.raises(TiedHeadError, match="cannot keep its head tied"):
        center(save("granite", tmp_path / "rotary"), tmp_path / "none", keep_tied=True)
    assert not (tmp_path / "none").exists()


def test_an_error_after_the_download_is_not_called_a_failed_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    from zloss.protocol import center as hub

    monkeypatch.setattr(hub, "hub_options", lambda: {"local_files_only": True})
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    with pytest.raises(CoordinateError, match="softcaps its logits"), hub.source_folder("owner/model"):
        raise CoordinateError("owner/model softcaps its logits.")


def test_a_softcapped_head_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(CoordinateError, match="softcaps its logits"):
        center(save("gemma2", tmp_path / "model"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_copy_loads_without_our_package(tmp_path: Path) -> None:
    center(save("granite", tmp_path / "model"), tmp_path / "out")
    code = (
        "import sys; sys.modules['zloss'] = None\n"
        "from transformers import AutoModelForCausalLM\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(tmp_path / 'out')!r})\n"
        "assert model.get_output_embeddings().weight.mean(0).abs().max() < 1e-6\n"
        "assert model.get_input_embeddings().weight.data_ptr() != model.get_output_embeddings().weight.data_ptr()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_card_of_a_16_bit_copy_claimed_unchanged_probabilities(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = save("neox", tmp_path / "model")
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    result = center(folder, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert not result.verified
    assert "NOT verified: the changed tensors are stored in bfloat16" in card
    assert f"PPL is {result.before.ppl:.6g} for the original and {result.after.ppl:.6g} for the copy" in card
    assert "probabilities and cross-entropy are those of the original" not in card
    assert "μ of every token is zero" not in card
    assert f"to {result.after.mu_abs_99:.4g} nat" in card
    assert result.after.mu_abs_99 > 1e-5  # what the card claimed to be zero
    written = json.loads((tmp_path / "out" / "centering.json").read_text())
    assert written["findings"] == list(result.findings)
    assert all(sentence in card for sentence in result.findings)


def test_the_card_claimed_mu_zero_over_all_rows_for_the_mean_of_the_first_ones(tmp_path: Path) -> None:
    folder = save("neox", tmp_path / "model")
    result = center(folder, tmp_path / "out", valid_vocab=504)
    assert (result.vocab, result.valid_vocab) == (512, 504)
    assert result.verified
    assert result.after.mu_valid_abs_99 < 1e-6 < 1e-3 < result.after.mu_abs_99
    # The numbers that the audit of the copy gives.
    audit = AuditConfig(model=str(tmp_path / "out"), blocks=4, block_size=32, gradient_blocks=0)
    assert run_audit(audit).mu_abs_99 == result.after.mu_abs_99
    assert run_audit(replace(audit, valid_vocab=504)).mu_abs_99 == result.after.mu_valid_abs_99
    card = (tmp_path / "out" / "README.md").read_text()
    assert "mean of the first 504 of 512 rows of the output head" in card
    assert f"over all 512 rows went from {result.before.mu_abs_99:.4g} nat to {result.after.mu_abs_99:.4g} nat" in card
    assert f"to {result.after.mu_valid_abs_99:.4g} nat; over all rows μ need not be zero" in card
    assert "μ of every token is zero" not in card


def test_the_copy_of_a_copy_has_its_own_card_and_figures(tmp_path: Path) -> None:
    """What an earlier centering left in the folder is not carried over; the head of a card stays first."""
    center(save("neox", tmp_path / "model"), tmp_path / "first")
    card = tmp_path / "first" / "README.md"
    card.write_text(f"---\nlicense: mit\n---\n{card.read_text()}")
    (tmp_path / "first" / ".zloss-lock").write_text("1\n")
    result = center(tmp_path / "first", tmp_path / "second")
    assert not (tmp_path / "second" / ".zloss-lock").exists()
    assert json.loads((tmp_path / "second" / "centering.json").read_text())["model"] == "first"
    text = (tmp_path / "second" / "README.md").read_text()
    assert text.startswith("---\nlicense: mit\n---\n\n# first, row-centered")
    assert "\n\n# model, row-centered" in text
    assert result.mean_row_norm < 1e-6


@pytest.mark.parametrize("rows", [513, 0, True, "many"])
def test_more_valid_rows_than_the_head_has_were_accepted(tmp_path: Path, rows: Any) -> None:
    with pytest.raises(InputError, match="`valid_vocab` is expected to"):
        center(save("neox", tmp_path / "model"), tmp_path / "out", valid_vocab=rows)
    assert not (tmp_path / "out").exists()


def test_the_rows_of_the_tokenizer_as_in_the_command_that_an_audit_suggests(tmp_path: Path) -> None:
    """`zloss audit --valid-vocab tokenizer` suggests `zloss center --valid-vocab tokenizer`, which was refused."""
    assert center(save("neox", tmp_path / "model"), tmp_path / "out", valid_vocab="tokenizer").valid_vocab == 500
