"""A centered copy of a checkpoint: which stored tensors change, the files, and a model card that says what was measured."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zloss.errors import CheckpointError, CoordinateError, TiedHeadError, first_line
from zloss.models.checkpoint import POSITION_TABLES, Checkpoint
from zloss.models.output_head import OutputHead
from zloss.results.centering import Centering
from zloss.results.folder import LOCK_FILE

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
INDEX_SUFFIX = ".index.json"
CHOSEN_WEIGHTS = "transformers_weights"
"""Key of a config.json that names the file of weights, or its index."""
SAVE_AGAIN = "load the model with transformers, save it to a new folder with save_pretrained, and pass that folder"
BETWEEN = ("project_in", "embed_layer_norm", "emb_layer_norm", "word_embeddings_layernorm")
"""Modules between the embeddings and the first layer that would not pass a moved mean row on unchanged."""
CARD = "README.md"
NOT_CARRIED = {CARD, Centering.FILE, LOCK_FILE, "config.json", "zloss.json"}
WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}
PPL_AGREEMENT = 1e-6
"""Relative difference of PPL up to which a copy counts as verified."""


# What changes


@dataclass(frozen=True)
class Change:
    """Tensors to replace and to add, by their stored key; a copy with an added head is untied."""

    replaced: dict[str, Tensor]
    added: dict[str, Tensor]
    mean_row_norm: float
    """‖w̄‖₂."""
    mean_bias: float | None


def plan_change(
    checkpoint: Checkpoint, head: OutputHead, files: WeightFiles, *, keep_tied: bool, valid_vocab: int
) -> Change:
    """What centering does to the stored tensors of `files`, from which `checkpoint` was loaded.

    An untied head is replaced by W − 1w̄ (and b − b̄). A tied head is untied: the input embedding stays, the centered head is
    a separate tensor. With learned additive positions a tied head can stay tied: the input is wte[x] + wpe[t], so w̄ moves
    from every row of the shared table to every row of the position table, and no hidden state changes.
    """
    modules = checkpoint.model.named_modules(remove_duplicate=False)
    name = next((name for name, module in modules if module is head.module), None)
    if name is None:
        raise CheckpointError(f"the output head of {type(checkpoint.model).__name__} is not one of its modules.")
    stored = head.weight_VD.detach()
    mean_D = stored[:valid_vocab].double().mean(dim=0)
    replaced, added, mean_bias = dict[str, Tensor](), dict[str, Tensor](), None
    table_key = files.find(stored, f"{name}.weight", "the output head")
    centered = _less(files.read(table_key), mean_D)
    if head.tied and not keep_tied:
        added[f"{name}.weight"] = centered
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
    return Change(replaced, added, float(mean_D.norm()), mean_bias)


def refuse_uncenterable(checkpoint: Checkpoint, head: OutputHead) -> None:
    """Reject heads for which subtracting the mean row would change the model."""
    if head.softcap is not None:
        raise CoordinateError(
            f"{checkpoint.name} softcaps its logits at {head.softcap:g}: a common shift of the logits before the cap changes its "
            "predictions, so centering would give a different model."
        )
    if head.bias_V is not None and bool(head.bias_V.isneginf().any()):
        raise CoordinateError(f"the head of {checkpoint.name} has -inf in its bias, so the mean bias is undefined.")


def _less(tensor: Tensor, mean: Tensor | float) -> Tensor:
    """tensor − mean in fp64, in the dtype it is stored in."""
    return (tensor.double() - mean).to(tensor.dtype).contiguous()


def _positions(checkpoint: Checkpoint, files: WeightFiles) -> str:
    """The stored key of the learned positions that are added to the token embedding."""
    model: Any = checkpoint.model
    width = model.get_input_embeddings().weight.shape[1]
    modules = [(name, name.rpartition(".")[2], module) for name, module in model.named_modules()]
    found = [
        (name, module.weight)
        for name, last, module in modules
        if isinstance(module, nn.Embedding) and last in POSITION_TABLES and module.weight.shape[1] == width
    ]
    if len(found) != 1 or any(last in BETWEEN for _, last, _ in modules):
        raise TiedHeadError(
            f"{type(model).__name__} cannot keep its head tied: that needs learned positions that are added to the token "
            "embedding with nothing in between (GPT-2, OPT without projection). Leave `keep_tied` off: the copy is then untied."
        )
    name, table = found[0]
    return files.find(table.detach(), f"{name}.weight", "the learned positions")


# Weights


class WeightFiles:
    """The safetensors files of a checkpoint that transformers has loaded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.keys_of: dict[str, list[str]] = {}
        """The tensors of every file, as the file itself lists them, in the order in which transformers reads the files."""
        for file in _weight_names(folder):
            with self.open(file) as opened:
                self.keys_of[file] = list(opened.keys())

    def open(self, file: str) -> Any:
        from safetensors import SafetensorError, safe_open

        try:
            return safe_open(str(self.folder / file), framework="pt")
        except SafetensorError as error:
            raise CheckpointError(
                f"{self.folder / file} is not a safetensors file ({first_line(error)}): {SAVE_AGAIN}."
            ) from error

    def read(self, wanted: str) -> Tensor:
        with self.open(next(file for file, keys in self.keys_of.items() if wanted in keys)) as opened:
            tensor: Tensor = opened.get_tensor(wanted)
        return tensor

    def find(self, wanted: Tensor, name: str, what: str) -> str:
        """The key whose stored values are those of the loaded parameter `name`.

        Names differ between files and modules (prefixes), so values decide; of several equal tensors the one whose name
        ends alike is taken.
        """
        found = []
        for file, keys in self.keys_of.items():
            with self.open(file) as opened:
                for key in keys:
                    same_shape = tuple(opened.get_slice(key).get_shape()) == tuple(wanted.shape)
                    if same_shape and torch.equal(opened.get_tensor(key).to(wanted.dtype), wanted):
                        found.append(key)
        if not found:
            raise CheckpointError(
                f"no tensor of {self.folder} contains the values of {what}: its weights are stored in a different form."
            )
        return next((key for key in found if name.endswith(key) or key.endswith(name)), found[0])


def _weight_names(folder: Path) -> list[str]:
    """The files that transformers loads: what the config names, else the single file, else those of the index.

    They may lie in sub-folders. One outside the folder is rejected: it belongs to somebody else.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    first = config.get(CHOSEN_WEIGHTS) or (SINGLE if (folder / SINGLE).is_file() else INDEX)
    if not (folder / first).is_file():
        raise CheckpointError(f"{folder} has no safetensors weights: convert the checkpoint to safetensors first.")
    names = [first]
    if first.endswith(INDEX_SUFFIX):
        names = sorted(set(json.loads((folder / first).read_text(encoding="utf-8"))["weight_map"].values()))
    for name in names:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise CheckpointError(
                f"{folder / first} names the file {name!r}, but weights are expected to be inside the folder: {SAVE_AGAIN}."
            )
    return names


def write_model(files: WeightFiles, change: Change, target: Path) -> None:
    """Weights, configuration and the other files of the original, into the empty folder `target`.

    Files of weights get our names, whatever the original calls them. One without a replaced tensor is copied byte for byte. An
    added tensor (the head of an untied copy) gets a separate file at the end.
    """
    from safetensors.torch import save_file

    for path in sorted(files.folder.iterdir()):
        named_here = path.name in NOT_CARRIED or path.name in files.keys_of or path.name.endswith(INDEX_SUFFIX)
        if path.is_file() and not named_here and path.suffix not in WEIGHT_SUFFIXES:
            shutil.copyfile(path, target / path.name)
    weight_map, count = dict[str, str](), len(files.keys_of) + bool(change.added)
    for number, (file, keys) in enumerate(files.keys_of.items(), start=1):
        name = SINGLE if count == 1 else _numbered(number, count)
        weight_map |= dict.fromkeys(keys, name)
        if change.replaced.keys().isdisjoint(keys):
            shutil.copyfile(files.folder / file, target / name)
            continue
        with files.open(file) as opened:
            tensors = {key: change.replaced[key] if key in change.replaced else opened.get_tensor(key) for key in keys}
            save_file(tensors, str(target / name), metadata=opened.metadata() or {"format": "pt"})
    config = json.loads((files.folder / "config.json").read_text(encoding="utf-8"))
    if change.added:
        save_file(change.added, str(target / _numbered(count, count)), metadata={"format": "pt"})
        weight_map |= dict.fromkeys(change.added, _numbered(count, count))
        for part in (config, config.get("text_config")):
            if isinstance(part, dict):
                part["tie_word_embeddings"] = False
    config.pop(CHOSEN_WEIGHTS, None)
    _write_json(target / "config.json", config)
    if count > 1:
        size = sum((target / name).stat().st_size for name in set(weight_map.values()))
        _write_json(target / INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})


def _numbered(number: int, count: int) -> str:
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# Model card


def findings_of(result: Centering) -> tuple[str, ...]:
    """What the comparison of this copy with its original showed, in sentences."""
    before, after, valid = result.before, result.after, result.valid_vocab

    def nats(*values: float | None) -> str:
        shown = ("a number that is not finite" if value is None else f"{value:.4g} nat" for value in values)
        return "went from {} to {}".format(*shown)

    found = [
        f"PPL is {before.ppl:.6g} for the original and {after.ppl:.6g} for the copy, a relative difference of "
        f"{result.ppl_relative_difference:.1e}; greedy continuations of {result.greedy_tokens} tokens are "
        f"{'equal' if result.greedy_equal else 'NOT equal'}.",
        f"p99 |μ| over all {result.vocab} rows {nats(before.mu_abs_99, after.mu_abs_99)}.",
    ]
    if valid != result.vocab:
        found.append(
            f"p99 |μ| over the first {valid} rows, whose mean was subtracted, "
            f"{nats(before.mu_valid_abs_99, after.mu_valid_abs_99)}; over all rows μ need not be zero."
        )
    rounded = [dtype for dtype in result.stored_dtype.split(", ") if dtype not in ("float32", "float64")]
    if result.verified:
        found.append(f"Verified: PPL agrees to {PPL_AGREEMENT:g} and the continuations are equal.")
    else:
        why = (
            f"the changed tensors are stored in {' and '.join(rounded)}, which rounds them once more, so "
            if rounded
            else ""
        )
        found.append(f"NOT verified: {why}the copy's predictions differ from the original's.")
    return tuple(found)


def write_card(original: Path, target: Path, result: Centering) -> None:
    """The model card of the copy: what was done and measured, then the card of the original."""
    card = original / CARD
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    # The YAML block at the head of a card must stay first.
    front = re.match(r"---\n.*?\n---[^\n]*\n?", text, re.DOTALL)
    head, body = (front[0].rstrip() + "\n\n", text[front.end() :].lstrip("\n")) if front else ("", text)
    head += f"# {result.model}, row-centered output head\n\n{_done(result)}\n\n"
    head += "" if result.verdict is None else f"{result.verdict.sentence}\n\n"
    head += f"Measured on {result.predictions:,} tokens of {result.corpus}, in fp32, with this copy as it loads from disk:\n\n"
    head += "".join(f"- {sentence}\n" for sentence in result.findings)
    head += f"\nAll figures: `{Centering.FILE}`.\n" + (f"\n{body}" if body.strip() else "")
    (target / CARD).write_text(head, encoding="utf-8")


def _done(result: Centering) -> str:
    """What was done to the weights."""
    rows = "mean row"
    if result.valid_vocab != result.vocab:
        rows = f"mean of the first {result.valid_vocab} of {result.vocab} rows"
    bias = ", and the mean of the bias from the bias" if result.mean_bias is not None else ""
    text = f"The {rows} of the output head (‖w̄‖ = {result.mean_row_norm:.4g}) was subtracted from every row{bias}."
    if result.tied_after:
        text += " The head is still tied to the input embedding: w̄ was added to every learned position to compensate."
    elif result.tied_before:
        text += (
            " The head was tied to the input embedding and is a separate tensor in this copy "
            f"({result.extra_bytes / 1e6:.1f} MB more)."
        )
    return f"{text} No other weight was changed."
