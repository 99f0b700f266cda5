"""Checkpoints whose tensors do not match the model: missing weights were drawn at random, silently."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.tiny_gguf import tiny_tensors, write_gguf
from tests.tiny_models import save_model
from zloss.errors import CheckpointError
from zloss.models.checkpoint import load_checkpoint

State = dict[str, Tensor]


def rewrite(folder: Path, change: Callable[[State], State]) -> None:
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def without(word: str) -> Callable[[State], State]:
    return lambda state: {name: tensor for name, tensor in state.items() if word not in name}


def head_renamed(message: str) -> str:
    """Early releases of transformers 5 call the head of GPT-NeoX `embed_out`, as its checkpoints do."""
    return message.replace("embed_out.weight", "lm_head.weight")


def renamed(state: State) -> State:
    return {f"other.{name}": tensor for name, tensor in state.items()}


def with_a_layer_more(state: State) -> State:
    return state | {"gpt_neox.layers.2.mlp.dense_4h_to_h.bias": torch.zeros(32)}


def misshapen(state: State) -> State:
    return state | {"gpt_neox.final_layer_norm.bias": torch.zeros(31)}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without("embed_out"), ["lacks 1 tensor (lm_head.weight)"]),
        (without("layers.1."), ["lacks 12 tensors (gpt_neox.layers.1.attention.dense.bias, ", "…"]),
        (renamed, ["lacks 28 tensors", "also has 28 tensors (other."]),
        (with_a_layer_more, ["also has 1 tensor (gpt_neox.layers.2.mlp.dense_4h_to_h.bias)"]),
        (misshapen, ["another shape of 1 tensor (gpt_neox.final_layer_norm.bias [31] for [32])"]),
    ],
)
def test_tensors_that_do_not_match_the_model_are_named(
    change: Callable[[State], State], words: list[str], tmp_path: Path
) -> None:
    folder = save_model("neox", tmp_path)
    rewrite(folder, change)
    with pytest.raises(CheckpointError) as refused:
        load_checkpoint(str(folder))
    for word in words:
        assert word in head_renamed(str(refused.value))


@pytest.mark.parametrize("kind", ["gpt2", "gemma2"])
def test_a_tied_head_may_be_missing_but_not_the_table(kind: str, tmp_path: Path) -> None:
    folder = save_model(kind, tmp_path)
    rewrite(folder, without("lm_head"))
    checkpoint = load_checkpoint(str(folder))
    head, table = checkpoint.model.get_output_embeddings(), checkpoint.model.get_input_embeddings()
    assert head.weight is table.weight
    rewrite(folder, without("wte" if kind == "gpt2" else "embed_tokens"))
    with pytest.raises(CheckpointError, match="lacks"):
        load_checkpoint(str(folder))


def test_buffers_of_older_checkpoints_are_accepted(tmp_path: Path) -> None:
    buffers = {
        "gpt2": ("transformer.h.0.attn.bias", "transformer.h.0.attn.masked_bias"),
        "neox": ("gpt_neox.layers.0.attention.masked_bias", "gpt_neox.layers.0.attention.rotary_emb.inv_freq"),
        "granite": ("model.layers.0.self_attn.rotary_emb.inv_freq", "model.layers.1.self_attn.rotary_emb.cos_cached"),
    }
    for kind, names in buffers.items():
        folder = save_model(kind, tmp_path / kind)
        rewrite(folder, lambda state, names=names: state | {name: torch.zeros(2) for name in names})  # type: ignore[misc]
        load_checkpoint(str(folder))


def test_a_gguf_file_must_contain_every_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZLOSS_CACHE", str(tmp_path / "cache"))
    whole = tiny_tensors()
    tied = {name: tensor for name, tensor in whole.items() if name != "output.weight"}
    for name, tensors in (("whole", whole), ("tied", tied)):
        checkpoint = load_checkpoint(str(write_gguf(tmp_path / f"{name}.gguf", tensors)))
        table = checkpoint.model.get_input_embeddings().weight
        assert torch.equal(table, torch.from_numpy(whole["token_embd.weight"]))
    part = {name: tensor for name, tensor in whole.items() if "ffn_up" not in name}
    more = whole | {"blk.1.ffn_up.weight": whole["blk.0.ffn_up.weight"]}
    for tensors, words in (
        ({}, "lacks 12 tensors"),
        (part, r"lacks 1 tensor \(model.layers.0.mlp.up_proj.weight\)"),
        (more, r"also has 1 tensor \(blk.1.ffn_up.weight\)"),
    ):
        with pytest.raises(CheckpointError, match=words):
            load_checkpoint(str(write_gguf(tmp_path / "part.gguf", tensors)))
    assert not list((tmp_path / "cache" / "gguf").glob("part-*"))


def test_a_conversion_without_checksums_is_redone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions before the check kept random weights in the cache."""
    monkeypatch.setenv("ZLOSS_CACHE", str(tmp_path / "cache"))
    file = write_gguf(tmp_path / "model.gguf", tiny_tensors())
    load_checkpoint(str(file))
    (folder,) = (tmp_path / "cache" / "gguf").iterdir()
    note = json.loads((folder / "zloss.json").read_text())
    (folder / "zloss.json").write_text(json.dumps({"wants_bos": note["wants_bos"], "file": note["file"]}))
    rewrite(folder, lambda state: {name: torch.zeros_like(tensor) for name, tensor in state.items()})
    assert load_checkpoint(str(file)).model.get_input_embeddings().weight.abs().sum() > 0
    assert list((tmp_path / "cache" / "gguf").iterdir()) == [folder]
    assert json.loads((folder / "zloss.json").read_text()) == note
    assert not (folder / "before").exists()
