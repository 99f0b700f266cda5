"""The safetensors files of a checkpoint: which tensor lies where, and a copy in which a few tensors are replaced.

A file without a replaced tensor is copied byte for byte. A tensor that is new (the head of an untied copy) gets a file
of its own at the end, so the files that were there keep their content.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zloss.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass(frozen=True)
class WeightFiles:
    """File of every tensor, in the order of the files."""

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
    """All weights of `source` in `target`, with some tensors replaced and some added."""
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
