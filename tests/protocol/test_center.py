"""The centered copy is the same model with μ = 0, for every way a head can be stored."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.forked import Forked
from tests.report.printing import printed
from tests.tiny_models import save_model
from zloss.audit.checkpoint.run import run_audit
from zloss.audit.config import AuditConfig
from zloss.cli.main import main
from zloss.errors import CoordinateError, InputError, TiedHeadError
from zloss.protocol.center import center_checkpoint, judge_copy
from zloss.protocol.config import CenterConfig
from zloss.report.centering import centering_summary
from zloss.results.centering import Centering


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


def save_16_bit(kind: str, folder: Path) -> Path:
    """The same model with its weights stored in bf16."""
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(save(kind, folder), dtype=torch.bfloat16).save_pretrained(folder)
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


def fp64_noise(model: Path, original: Path, storage: torch.dtype, blocks: list[list[int]]) -> float:
    """RMS of log p of `model` from stored logits minus log p of `original` from fp32 ones, softmax in fp64."""
    from transformers import AutoModelForCausalLM

    def logits(folder: Path) -> torch.Tensor:
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            return loaded(torch.tensor(blocks)[:, :-1]).logits

    targets = torch.tensor(blocks)[:, 1:, None]
    stored, exact = (
        z.double().log_softmax(-1).gather(-1, targets) for z in (logits(model).to(storage), logits(original))
    )
    return float((stored - exact).square().mean().sqrt())


@pytest.mark.parametrize(("make", "dtype"), [(save, "float32"), (save_16_bit, "bfloat16")])
def test_the_noise_is_that_of_the_copy_as_saved_against_the_original(make: Any, dtype: str, tmp_path: Path) -> None:
    """Both sides by the definition in fp64, and as the audit of the original predicts them."""
    folder = make("gpt2", tmp_path / "model")
    result = center(folder, tmp_path / "out")
    found = {side: getattr(result, side) for side in ("before", "after")}
    predicted = run_audit(AuditConfig(model=str(folder), blocks=4, block_size=32, gradient_blocks=0)).logit_noise
    assert predicted is not None
    assert (result.stored_dtype, predicted.saved_dtype, predicted.tokens) == (dtype, dtype, result.predictions)
    from zloss.models.checkpoint import load_checkpoint
    from zloss.text import make_blocks, open_corpus

    tokenizer = load_checkpoint(str(folder)).tokenizer
    stream = make_blocks(open_corpus((), None, "text"), tokenizer, size=32, count=4, bos_id=None).stream.tolist()
    blocks = [stream[32 * block : 32 * block + 33] for block in range(4)]
    for name, storage in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        for side, place, key in (("before", folder, "raw"), ("after", tmp_path / "out", "centered")):
            noise = getattr(found[side], f"{name}_noise")
            assert noise == pytest.approx(fp64_noise(place, folder, storage, blocks), rel=2e-3), (name, side)
            assert noise == pytest.approx(getattr(getattr(predicted, name), key), rel=2e-3), (name, side)
    # The second rounding of a head in 16 bits is the larger part of the error of its fp16 logits.
    assert (found["after"].fp16_noise > 5 * 3.7e-4) is (dtype == "bfloat16")


def test_a_copy_with_one_bit_more_is_kept_and_terminal_card_and_file_say_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = save("gpt2", tmp_path / "model"), tmp_path / "out"
    command = ["center", str(folder), "--blocks", "4", "--block-size", "32", "--out", str(out)]
    assert main(command) == 0
    sentence = (
        "Keep the copy: the error of a token's log-probability from bf16 logits (RMS) goes from 0.019 nat to 0.003 nat, measured "
        "on 128 tokens of pydoc."
    )
    assert " ".join(capsys.readouterr().out.split()).endswith(f"{out} {sentence}")
    assert json.loads((out / "centering.json").read_text())["verdict"] == {"action": "keep", "sentence": sentence}
    assert f"\n\n{sentence}\n\n" in (out / "README.md").read_text()
    # The same copy for a stack with fp32 logits, and for one that asks for more bits.
    for words in (["--logits", "fp32"], ["--shift-bits", "4"]):
        assert main([*command, "--force", *words]) == 0
        assert json.loads((out / "centering.json").read_text())["verdict"]["action"] == "neutral"


def test_a_copy_whose_logits_lose_precision_is_discarded_and_ends_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """fp16 logits of a head in bf16: the second rounding costs more than centering recovers."""
    folder, out = save_16_bit("neox", tmp_path / "model"), tmp_path / "out"
    words = ["center", str(folder), "--blocks", "4", "--block-size", "32", "--logits", "fp16", "--out", str(out)]
    assert main([*words, "--shift-noise", "0.001"]) == 1
    assert "Discard the copy: the error of a token's log-probability" in " ".join(capsys.readouterr().out.split())
    # Below the default limit the loss is too small to matter, and a copy that is not verified ended with 1.
    assert main([*words, "--force", "--quiet"]) == 0
    written = json.loads((out / "centering.json").read_text())
    assert (written["verdict"]["action"], written["verified"], written["logits"]) == ("neutral", False, "fp16")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Centering:
    """A copy whose predictions are those of its original."""
    folder = tmp_path_factory.mktemp("measured")
    return center(save("neox", folder / "model"), folder / "out")


FP32, BF16 = "float32", "bfloat16"


@pytest.mark.parametrize(
    ("noise", "action", "said"),
    [
        ((0.242, 0.023), "keep", ""),
        # SmolLM2; a neutral copy hid whether it got better or worse.
        ((0.030, 0.023), "neutral", "from 0.030 nat to 0.023 nat, a gain of 0.4 bit, where 1 or more would matter, "),
        ((0.02, 0.01), "keep", ""),
        ((0.02, 0.0101), "neutral", ""),
        ((0.01, 0.005), "keep", ""),
        ((0.0099, 0.001), "neutral", ""),  # too small to matter
        ((0.005, 0.01), "discard", ""),
        ((0.005, 0.0099), "neutral", ""),
        ((0.005, 0.008), "neutral", "from 0.005 nat to 0.008 nat, and below 0.01 nat neither matters, "),
        ((0.002, 0.0099), "neutral", ""),  # two bits worse, too small to matter
        ((0.012, 0.02), "neutral", "from 0.012 nat to 0.020 nat, a loss of 0.7 bit, where 1 or more would matter, "),
        ((0.01, 0.0), "keep", ""),
        ((0.0, 0.0), "neutral", ""),
        ((0.0, 0.02), "discard", ""),
        ((None, 0.02), "keep", ""),
        ((0.02, None), "discard", ""),
        ((None, None), "neutral", "as you like: fp16 logits overflow in both, "),
    ],
)
def test_the_verdict_follows_the_noise(
    measured: Centering, noise: tuple[float | None, float | None], action: str, said: str
) -> None:
    before, after = (
        replace(side, fp16_noise=each) for side, each in zip((measured.before, measured.after), noise, strict=True)
    )
    result = replace(measured, before=before, after=after, logits="fp16")
    found = judge_copy(result, shift_noise=0.01, shift_bits=1.0)
    assert found.action == action
    assert found.sentence.endswith(f"{said}measured on 128 tokens of pydoc.")
    if action == "neutral":
        assert found.sentence.startswith("Keep the original or the copy, as you like: ")
    # Another precision of the stack has other noise, and fp32 logits have none.
    assert judge_copy(replace(result, logits="bf16"), shift_noise=0.01, shift_bits=1.0).action == "neutral"
    assert judge_copy(replace(result, logits="fp32"), shift_noise=0.01, shift_bits=1.0).action == "neutral"


@pytest.mark.parametrize(
    ("rise", "dtype", "greedy", "action"),
    [
        (9e-6, FP32, True, "keep"),
        (1.1e-5, FP32, True, "discard"),
        (2e-6, FP32, False, "discard"),
        (5e-7, FP32, False, "keep"),
        (-1e-2, FP32, False, "keep"),  # it predicts better
        (9e-4, BF16, False, "keep"),  # near ties that rounding decides
        (1.1e-3, BF16, True, "discard"),
        (1.1e-3, f"{BF16}, {FP32}", True, "discard"),
        (9e-4, "float16", False, "keep"),
    ],
)
def test_a_copy_that_predicts_worse_than_rounding_explains_is_discarded(
    measured: Centering, rise: float, dtype: str, greedy: bool, action: str
) -> None:
    before, after = (
        replace(measured.before, ppl=20.0, bf16_noise=0.2),
        replace(measured.after, ppl=20.0 * (1 + rise), bf16_noise=0.02),
    )
    result = replace(measured, before=before, after=after, stored_dtype=dtype, greedy_equal=greedy)
    found = judge_copy(result, shift_noise=0.01, shift_bits=1.0)
    assert found.action == action
    assert ("its perplexity rises from 20 by 0." in found.sentence) is (action == "discard")
    shown = printed(centering_summary(replace(result, verdict=found), "copy")).strip()
    assert " ".join(shown.split()).endswith(found.sentence)


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
    assert "w̄ was added to every learned position to compensate" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize(
    ("kind", "options", "error", "said"),
    [
        ("granite", {"keep_tied": True}, TiedHeadError, "cannot keep its head tied"),
        ("gemma2", {}, CoordinateError, "softcaps its logits"),
        # More valid rows than the head has were accepted.
        *(("neox", {"valid_vocab": n}, InputError, "`valid_vocab` is expected to") for n in (513, 0, True, "many")),
    ],
)
def test_a_head_that_cannot_be_centered_is_refused_with_the_reason(
    tmp_path: Path, kind: str, options: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        center(save(kind, tmp_path / "model"), tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_an_error_after_the_download_is_not_called_a_failed_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    from zloss.protocol import center as hub

    monkeypatch.setattr(hub, "hub_options", lambda: {"local_files_only": True})
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    with pytest.raises(CoordinateError, match="softcaps its logits"), hub.source_folder("owner/model"):
        raise CoordinateError("owner/model softcaps its logits.")


def test_the_copy_loads_without_our_package(tmp_path: Path) -> None:
    center(save("granite", tmp_path / "model"), tmp_path / "out")

    def load() -> None:
        from transformers import AutoModelForCausalLM

        for name in [name for name in sys.modules if name.partition(".")[0] == "zloss"] + ["zloss"]:
            sys.modules[name] = None  # type: ignore[assignment]
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
        assert head.mean(0).abs().max() < 1e-6
        assert head.data_ptr() != embedding.data_ptr()

    assert Forked(load).wait().code == 0


def test_the_card_of_a_16_bit_copy_claimed_unchanged_probabilities(tmp_path: Path) -> None:
    folder = save_16_bit("neox", tmp_path / "model")
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
    # As in the command that an audit suggests.
    assert center(folder, tmp_path / "rows", valid_vocab="tokenizer").valid_vocab == 500
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
