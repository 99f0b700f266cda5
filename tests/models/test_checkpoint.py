"""Models that can be audited, every way in which one cannot, and their fingerprints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.tiny_gguf import tiny_tensors, write_gguf
from tests.tiny_models import VOCAB, save_model, save_tokenizer
from zloss.errors import CheckpointError
from zloss.models.checkpoint import (
    embedded_smollm2,
    load_checkpoint,
    load_tokenizer,
    model_fingerprint,
    weight_fingerprint,
)
from zloss.models.output_head import check_head, find_head, hidden_states

IDS = torch.arange(2, 60)


@pytest.mark.parametrize("kind", ["gpt2", "neox", "phi", "cohere", "granite", "gemma2"])
def test_heads_reproduce_the_models_own_logits(kind: str, tmp_path: Path) -> None:
    checkpoint = load_checkpoint(str(save_model(kind, tmp_path)))
    head = find_head(checkpoint)
    assert check_head(checkpoint, head, IDS) < 1e-5
    assert head.vocab == VOCAB
    assert head.tied == (kind not in ("neox", "phi"))
    with hidden_states(checkpoint, head) as hidden_of:
        assert hidden_of(IDS.unsqueeze(0)).shape == (1, len(IDS), head.width)
    assert not head.module._forward_pre_hooks


def test_an_unknown_transformation_of_the_logits_is_an_error(tmp_path: Path) -> None:
    """Cohere's scale hidden from the config: the head no longer reproduces the logits, and the error says so."""
    checkpoint = load_checkpoint(str(save_model("cohere", tmp_path)))
    checkpoint.model.logit_scale = 0.5  # the module multiplies by this, the config says 0.25
    with pytest.raises(CheckpointError, match=r"relative difference 0\.5"):
        check_head(checkpoint, find_head(checkpoint), IDS)


def test_an_encoder_is_not_causal(tmp_path: Path) -> None:
    from transformers import BertConfig, BertLMHeadModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    config = BertConfig(vocab_size=VOCAB, **sizes, is_decoder=False)
    BertLMHeadModel(config).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    checkpoint = load_checkpoint(str(tmp_path))
    with pytest.raises(CheckpointError, match="not causal"):
        check_head(checkpoint, find_head(checkpoint), IDS)


def test_models_that_are_not_language_models(tmp_path: Path) -> None:
    from transformers import T5Config, T5ForConditionalGeneration, ViTConfig

    t5 = T5Config(vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4)
    T5ForConditionalGeneration(t5).save_pretrained(tmp_path / "t5")
    save_tokenizer(tmp_path / "t5")
    with pytest.raises(CheckpointError, match="encoder-decoder"):
        load_checkpoint(str(tmp_path / "t5"))
    ViTConfig(hidden_size=32).save_pretrained(tmp_path / "vit")
    save_tokenizer(tmp_path / "vit")
    with pytest.raises(CheckpointError, match="not a causal language model"):
        load_checkpoint(str(tmp_path / "vit"))


def test_a_model_without_an_output_head(tmp_path: Path) -> None:
    checkpoint = load_checkpoint(str(save_model("gpt2", tmp_path)))
    checkpoint.model.get_output_embeddings = lambda: None
    with pytest.raises(CheckpointError, match="no output head"):
        find_head(checkpoint)


def test_folders_that_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="model 'nobody/nothing' not found"):
        load_checkpoint("nobody/nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="not a Hugging Face model"):
        load_checkpoint(str(tmp_path / "empty"))
    folder = save_model("gpt2", tmp_path / "gpt2")
    with pytest.raises(CheckpointError, match=r"is not a model, but has 1 inside: pass one of them, such as .*gpt2\."):
        load_checkpoint(str(tmp_path))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(CheckpointError, match="tokenizer"):
        load_checkpoint(str(folder))
    save_tokenizer(folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        load_checkpoint(str(folder))


def test_pickled_weights_are_read_only_on_request(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    folder = save_model("neox", tmp_path)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="`allow_pickle`"):
        load_checkpoint(str(folder))
    assert load_checkpoint(str(folder), allow_pickle=True).model is not None


def test_gguf_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZLOSS_CACHE", str(tmp_path / "cache"))
    for content in (b"", b"this is no model", b"GGUF\x03\x00\x00\x00"):
        (tmp_path / "bad.gguf").write_bytes(content)
        with pytest.raises(CheckpointError, match="GGUF"):
            load_checkpoint(str(tmp_path / "bad.gguf"))
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def edit(file: Path, **changes: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(("kind", "key", "sharded"), [("gpt2", "n_layer", False), ("neox", "num_hidden_layers", True)])
def test_a_config_with_far_more_layers_than_tensors_was_built_without_end(
    kind: str, key: str, sharded: bool, tmp_path: Path
) -> None:
    folder = save_model(kind, tmp_path)
    if sharded:
        load_checkpoint(str(folder)).model.save_pretrained(folder, max_shard_size="50KB")
        (folder / "model.safetensors").unlink()
    edit(folder / "config.json", **{key: 10**13})
    for weights in (True, False):
        with pytest.raises(CheckpointError, match="has 10000000000000 layers, but its weights are only 28 tensors"):
            load_checkpoint(str(folder), weights=weights)


def test_a_gguf_file_with_far_more_layers_than_tensors_was_built_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZLOSS_CACHE", str(tmp_path / "cache"))
    file = write_gguf(tmp_path / "deep.gguf", tiny_tensors(), layers=10**7)
    with pytest.raises(CheckpointError, match="has 10000000 layers, but its weights are only 12 tensors"):
        load_checkpoint(str(file))


def test_a_model_with_its_own_code_names_the_option_that_runs_it(tmp_path: Path) -> None:
    """`auto_map` was "not a Hugging Face model", or a tokenizer that cannot be loaded."""
    said = "needs Python code that comes with it .* runs only with `trust_remote_code`"
    own = {"auto_map": {"AutoTokenizer": ["own.Own", None]}, "tokenizer_class": "Own"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(own))
    with pytest.raises(CheckpointError, match=f"the tokenizer '.*' {said}"):
        load_tokenizer(str(tmp_path))
    folder = save_model("gpt2", tmp_path / "model")
    auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}
    edit(folder / "config.json", model_type="own", auto_map=auto_map)
    with pytest.raises(CheckpointError, match=said):
        load_checkpoint(str(folder))


def test_a_tokenizer_that_panics_on_special_tokens_is_an_error_of_one_sentence(tmp_path: Path) -> None:
    folder = save_model("gpt2", tmp_path)
    single = [{"SpecialToken": {"id": "<x>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    post = {"type": "TemplateProcessing", "single": single, "pair": single[1:], "special_tokens": {}}
    edit(folder / "tokenizer.json", post_processor=post)
    with pytest.raises(CheckpointError, match="no tokenizer that can be loaded"):
        load_checkpoint(str(folder))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_of_nan_were_an_architecture_that_changes_the_logits(value: float, tmp_path: Path) -> None:
    checkpoint = load_checkpoint(str(save_model("neox", tmp_path)))
    norm = checkpoint.model.gpt_neox.layers[1].input_layernorm.weight
    norm.data[3] = value
    with pytest.raises(
        CheckpointError, match=r"are NaN, because 1 of its 28 weights hold .* \(gpt_neox.layers.1.input_lay"
    ):
        check_head(checkpoint, find_head(checkpoint), IDS)


@pytest.mark.slow
def test_the_embedded_model_is_converted_once_and_is_an_ordinary_checkpoint(
    tmp_path: Path, cache_of_all_tests: Path
) -> None:
    if embedded_smollm2() is None:
        pytest.skip("the package that carries SmolLM2 is not installed")
    checkpoint = load_checkpoint("smollm2")
    head = find_head(checkpoint)
    assert (head.vocab, head.width, head.tied, checkpoint.wants_bos) == (49152, 576, True, False)
    assert not hasattr(checkpoint.config, "quantization_config")
    folders = [path for path in (cache_of_all_tests / "gguf").iterdir() if path.is_dir()]
    assert len(folders) == 1
    stamp = (folders[0] / "model.safetensors").stat().st_mtime_ns
    again = load_checkpoint("smollm2")
    assert (folders[0] / "model.safetensors").stat().st_mtime_ns == stamp
    assert torch.equal(find_head(again).weight_VD, head.weight_VD)
    assert json.loads((folders[0] / "zloss.json").read_text())["wants_bos"] is False
    again.model.save_pretrained(tmp_path / "saved")  # a model still marked as quantized would refuse


@pytest.fixture(scope="module")
def cohere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("cohere", tmp_path_factory.mktemp("model"))


def test_a_fingerprint_sees_one_bit_of_one_weight(cohere: Path) -> None:
    """Beyond the first 64 entries of a tensor, a change was not seen."""
    model = load_checkpoint(str(cohere)).model
    first = weight_fingerprint(model)
    weight = model.get_output_embeddings().weight
    with torch.no_grad():
        weight[200, 3] = torch.nextafter(weight[200, 3], torch.tensor(torch.inf))
        assert weight_fingerprint(model) != first
        weight[200, 3] = torch.nextafter(weight[200, 3], torch.tensor(-torch.inf))
        assert weight_fingerprint(model) == first
        weight[[200, 201]] = weight[[201, 200]]
        assert weight_fingerprint(model) != first


def test_a_fingerprint_depends_on_the_config_and_not_on_the_folder(cohere: Path, tmp_path: Path) -> None:
    first = model_fingerprint(load_checkpoint(str(cohere)))
    moved = Path(shutil.copytree(cohere, tmp_path / "moved"))
    assert model_fingerprint(load_checkpoint(str(moved))) == first
    config = json.loads((moved / "config.json").read_text())
    (moved / "config.json").write_text(json.dumps(config | {"logit_scale": 0.5}))
    other = load_checkpoint(str(moved))
    assert model_fingerprint(other) != first
    assert weight_fingerprint(other.model) == weight_fingerprint(load_checkpoint(str(cohere)).model)


def test_every_dtype_has_a_fingerprint(cohere: Path) -> None:
    found = {weight_fingerprint(load_checkpoint(str(cohere), dtype=dtype).model) for dtype in ("fp32", "fp64", "bf16")}
    assert len(found) == 3
    tied, untied = load_checkpoint(str(cohere)).model, load_checkpoint(str(cohere)).model
    head = untied.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().clone())
    assert weight_fingerprint(tied) != weight_fingerprint(untied)
