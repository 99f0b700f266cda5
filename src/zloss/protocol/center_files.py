"""A centered copy of a checkpoint: which stored tensors change, the files, and a model card that says what was measured."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zloss.errors import CheckpointError, CoordinateError, TiedHeadError
from zloss.models.checkpoint import POSITION_TABLES, Checkpoint
from zloss.models.output_head import OutputHead
from zloss.results.centering import FILE, Centering
from zloss.results.folder import LOCK_FILE

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
BETWEEN = ("project_in", "embed_layer_norm", "emb_layer_norm", "word_embeddings_layernorm")
"""Modules between the embeddings and the first layer, through which a moved mean row would not pass unchanged."""
CARD = "README.md"
NOT_CARRIED = {INDEX, CARD, FILE, LOCK_FILE, "config.json", "zloss.json"}
WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}


# What changes


@dataclass(frozen=True)
class Change:
    """Tensors to replace and to add, by their stored key, and what the configuration must say."""

    replaced: dict[str, Tensor]
    added: dict[str, Tensor]
    config: dict[str, Any]
    mean_row_norm: float
    """‖w̄‖₂."""
    mean_bias: float | None

    @property
    def extra_bytes(self) -> int:
        """By how much the weights grow."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.added.values())


def plan_change(
    checkpoint: Checkpoint, head: OutputHead, files: WeightFiles, *, keep_tied: bool, valid_vocab: int
) -> Change:
    """What centering does to the stored tensors of `files`, from which `checkpoint` was loaded.

    An untied head is replaced by W − 1w̄ (and b − b̄). A tied head is untied: the input embedding stays, the centered head is
    a separate tensor. With learned additive positions a tied head can stay tied: the input is wte[x] + wpe[t], so w̄ moves
    from every row of the shared table to every row of the position table, and no hidden state changes.
    """
    name, stored = _module_name(checkpoint.model, head.module), head.weight_VD.detach()
    mean_D = stored[:valid_vocab].double().mean(dim=0)
    replaced, added, config, mean_bias = dict[str, Tensor](), dict[str, Tensor](), dict[str, Any](), None
    table_key = files.find(stored, f"{name}.weight", "the output head")
    centered = _less(files.read(table_key), mean_D)
    if head.tied and not keep_tied:
        added[f"{name}.weight"] = centered
        config["tie_word_embeddings"] = False
        if getattr(checkpoint.config, "text_config", None) is not None:
            config["text_config"] = {"tie_word_embeddings": False}
    else:
        replaced[table_key] = centered
    if head.tied and keep_tied:
        positions = _positions(checkpoint, files)
        replaced[positions] = _less(files.read(positions), -mean_D)
    if head.bias_V is not None:
        bias_V = head.bias_V.detach()
        mean_bias = float(bias_V[:valid_vocab].double().mean())
        bias_key = files.find(bias_V, f"{name}.bias", "the head's bias")
        replaced[bias_key] = _less(files.read(bias_key), mean_bias)
    return Change(replaced, added, config, float(mean_D.norm()), mean_bias)


def refuse_uncenterable(checkpoint: Checkpoint, head: OutputHead) -> None:
    """Heads for which subtracting the mean row would change the model."""
    if head.softcap is not None:
        raise CoordinateError(
            f"{checkpoint.name} softcaps its logits at {head.softcap:g}: a common shift of the logits before the cap changes its "
            "predictions, so a centered head would be another model."
        )
    if head.bias_V is not None and bool(head.bias_V.isneginf().any()):
        raise CoordinateError(f"the head of {checkpoint.name} has -inf in its bias, so the mean bias does not exist.")


def _less(tensor: Tensor, mean: Tensor | float) -> Tensor:
    """tensor − mean in fp64, in the dtype it is stored in."""
    return (tensor.double() - mean).to(tensor.dtype).contiguous()


def _positions(checkpoint: Checkpoint, files: WeightFiles) -> str:
    """The stored key of the learned positions that are added to the token embedding."""
    model: Any = checkpoint.model
    width = model.get_input_embeddings().weight.shape[1]
    modules = {name: module for name, module in model.named_modules() if name}
    found = [
        (name, module.weight)
        for name, module in modules.items()
        if isinstance(module, nn.Embedding) and _last(name) in POSITION_TABLES and module.weight.shape[1] == width
    ]
    between = [name for name in modules if _last(name) in BETWEEN]
    if len(found) != 1 or between:
        raise TiedHeadError(
            f"{type(model).__name__} cannot keep its head tied: that needs learned positions that are added to the token "
            "embedding with nothing between (GPT-2, OPT without projection). Leave `keep_tied` off: the copy is then untied."
        )
    name, table = found[0]
    return files.find(table.detach(), f"{name}.weight", "the learned positions")


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _module_name(model: nn.Module, wanted: nn.Module) -> str:
    for name, module in model.named_modules(remove_duplicate=False):
        if module is wanted:
            return str(name)
    raise CheckpointError(f"the output head of {type(model).__name__} is not one of its modules.")


# Weights


@dataclass(frozen=True)
class WeightFiles:
    """The safetensors files of a checkpoint: the file of every tensor, in the order of the files."""

    folder: Path
    file_of: Mapping[str, str]

    @property
    def files(self) -> list[str]:
        return list(dict.fromkeys(self.file_of.values()))

    def read(self, key: str) -> Tensor:
        from safetensors import safe_open

        with safe_open(str(self.folder / self.file_of[key]), framework="pt") as opened:
            tensor: Tensor = opened.get_tensor(key)
        return tensor

    def keys_of(self, file: str) -> list[str]:
        return [key for key, place in self.file_of.items() if place == file]

    def find(self, wanted: Tensor, name: str, what: str) -> str:
        """The key whose stored values are those of the loaded parameter `name`.

        Names differ between files and modules (prefixes), so values decide; of several equal tensors the one whose name
        ends alike is taken.
        """
        from safetensors import safe_open

        found = []
        for file in self.files:
            with safe_open(str(self.folder / file), framework="pt") as opened:
                for key in self.keys_of(file):
                    same_shape = tuple(opened.get_slice(key).get_shape()) == tuple(wanted.shape)
                    if same_shape and torch.equal(opened.get_tensor(key).to(wanted.dtype), wanted):
                        found.append(key)
        if not found:
            raise CheckpointError(
                f"no tensor of {self.folder} holds the values of {what}: its weights are stored in another form."
            )
        return next((key for key in found if name.endswith(key) or key.endswith(name)), found[0])


def read_weight_files(folder: Path) -> WeightFiles:
    """The files of a folder, from its index or its single file."""
    from safetensors import safe_open

    if (folder / INDEX).is_file():
        weight_map = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        return WeightFiles(
            folder, {key: weight_map[key] for key in sorted(weight_map, key=lambda k: (weight_map[k], k))}
        )
    if (folder / SINGLE).is_file():
        with safe_open(str(folder / SINGLE), framework="pt") as opened:
            return WeightFiles(folder, dict.fromkeys(opened.keys(), SINGLE))
    raise CheckpointError(f"{folder} has no safetensors weights: convert the checkpoint to safetensors first.")


def write_weight_files(
    source: WeightFiles, target: Path, replaced: Mapping[str, Tensor], added: Mapping[str, Tensor]
) -> None:
    """All weights of `source` in `target`, with some tensors replaced and some added.

    A file without a replaced tensor is copied byte for byte. An added tensor (the head of an untied copy) gets a separate file
    at the end, so the files that were there keep their content.
    """
    from safetensors import safe_open
    from safetensors.torch import save_file

    names = _new_names(source.files, bool(added))
    for file in source.files:
        changed = {key for key in replaced if source.file_of[key] == file}
        if not changed:
            shutil.copyfile(source.folder / file, target / names[file])
            continue
        with safe_open(str(source.folder / file), framework="pt") as opened:
            tensors = {key: replaced[key] if key in changed else opened.get_tensor(key) for key in source.keys_of(file)}
            save_file(tensors, str(target / names[file]), metadata=opened.metadata() or {"format": "pt"})
    weight_map = {key: names[file] for key, file in source.file_of.items()}
    if added:
        last = _numbered(len(names) + 1, len(names) + 1)
        save_file(
            {key: tensor.contiguous() for key, tensor in added.items()}, str(target / last), metadata={"format": "pt"}
        )
        weight_map |= dict.fromkeys(added, last)
    if len(set(weight_map.values())) > 1 or (source.folder / INDEX).is_file():
        size = sum((target / name).stat().st_size for name in set(weight_map.values()))
        index: dict[str, Any] = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (target / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _new_names(files: list[str], one_more: bool) -> dict[str, str]:
    """The name of every file in the copy: as it was, unless one more file changes the count that names state."""
    if not one_more:
        return {file: file for file in files}
    return {file: _numbered(number, len(files) + 1) for number, file in enumerate(files, start=1)}


def _numbered(number: int, count: int) -> str:
    return f"model-{number:05d}-of-{count:05d}.safetensors"


# The folder of the copy


def write_model(files: WeightFiles, change: Change, target: Path) -> None:
    """Weights, configuration and the other files of the original, into the empty folder `target`."""
    for path in sorted(files.folder.iterdir()):
        if path.is_file() and path.name not in NOT_CARRIED and path.suffix not in WEIGHT_SUFFIXES:
            shutil.copyfile(path, target / path.name)
    write_weight_files(files, target, change.replaced, change.added)
    (target / "config.json").write_text(changed_config(files.folder, change), encoding="utf-8")


def changed_config(folder: Path, change: Change) -> str:
    """config.json with the keys that untying needs."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for key, value in change.config.items():
        if isinstance(value, dict) and isinstance(config.get(key), dict):
            config[key] |= value
        else:
            config[key] = value
    return json.dumps(config, indent=2, ensure_ascii=False) + "\n"


def findings_of(result: Centering, ppl_agreement: float) -> tuple[str, ...]:
    """What the comparison of this copy with its original showed, in sentences."""
    before, after, valid = result.before, result.after, result.valid_vocab
    found = [
        f"PPL is {before.ppl:.6g} for the original and {after.ppl:.6g} for the copy, a relative difference of "
        f"{result.ppl_relative_difference:.1e}; greedy continuations of {result.greedy_tokens} tokens are "
        f"{'equal' if result.greedy_equal else 'NOT equal'}.",
        f"p99 |μ| over all {result.vocab} rows went from {_nat(before.mu_abs_99)} to {_nat(after.mu_abs_99)}.",
    ]
    if valid != result.vocab:
        found.append(
            f"p99 |μ| over the first {valid} rows, whose mean was subtracted, went from {_nat(before.mu_valid_abs_99)} to "
            f"{_nat(after.mu_valid_abs_99)}; over all rows μ need not be zero."
        )
    rounded = [dtype for dtype in result.stored_dtype.split(", ") if dtype not in ("float32", "float64")]
    if result.verified:
        found.append(f"Verified: PPL agrees to {ppl_agreement:g} and the continuations are equal.")
    elif rounded:
        found.append(
            f"NOT verified: the changed tensors are stored in {' and '.join(rounded)}, which rounds them once more, so the "
            "copy's predictions differ from the original's."
        )
    else:
        found.append("NOT verified: the copy's predictions differ from the original's.")
    return tuple(found)


def _nat(value: float | None) -> str:
    return "a number that is not finite" if value is None else f"{value:.4g} nat"


def write_card(original: Path, target: Path, result: Centering) -> None:
    """The model card of the copy: what was done and measured, then the card of the original."""
    card = original / CARD
    front, body = _front_matter(card.read_text(encoding="utf-8", errors="replace") if card.is_file() else "")
    text = f"{front}# {result.model}, row-centered output head\n\n{_done(result)}\n\n"
    text += f"Measured on {result.predictions} tokens of {result.corpus}, in fp32, with this copy as it loads from disk:\n\n"
    text += "".join(f"- {sentence}\n" for sentence in result.findings)
    text += f"\nAll figures: `{FILE}`.\n" + (f"\n{body}" if body.strip() else "")
    (target / CARD).write_text(text, encoding="utf-8")


def _done(result: Centering) -> str:
    """What was done to the weights."""
    rows = (
        "mean row"
        if result.valid_vocab == result.vocab
        else f"mean of the first {result.valid_vocab} of {result.vocab} rows"
    )
    bias = ", and the mean of the bias from the bias" if result.mean_bias is not None else ""
    text = f"The {rows} of the output head (‖w̄‖ = {result.mean_row_norm:.4g}) was subtracted from every row{bias}."
    if result.tied_after:
        text += " The head is still tied to the input embedding: w̄ was added to every learned position in return."
    elif result.tied_before:
        text += (
            " The head was tied to the input embedding and is a separate tensor in this copy "
            f"({result.extra_bytes / 1e6:.1f} MB more)."
        )
    return f"{text} No other weight was changed."


def _front_matter(text: str) -> tuple[str, str]:
    """The YAML block at the head of a card, which must stay first, and the rest."""
    if not text.startswith("---\n"):
        return "", text
    end = text.find("\n---", 4)
    return ("", text) if end < 0 else (text[: end + 5].rstrip() + "\n\n", text[end + 5 :].lstrip("\n"))
