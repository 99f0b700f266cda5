"""A centered copy of a checkpoint's folder: weights changed, everything else carried over, a card that says so."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from zloss.protocol.center.change import Change
from zloss.protocol.center.weight_files import INDEX, WeightFiles, write_weight_files
from zloss.results.folder_writing import whole_folder

CARD = "README.md"
NOT_CARRIED = {INDEX, CARD, "config.json", "zloss.json"}
WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}


def write_centered(files: WeightFiles, change: Change, target: Path, name: str) -> None:
    """Make the copy beside `target` and rename it there, so that it appears whole or not at all."""
    with whole_folder(target) as part:
        for path in sorted(files.folder.iterdir()):
            if path.is_file() and path.name not in NOT_CARRIED and path.suffix not in WEIGHTS:
                shutil.copyfile(path, part / path.name)
        write_weight_files(files, part, change.replaced, change.added)
        (part / "config.json").write_text(changed_config(files.folder, change), encoding="utf-8")
        (part / CARD).write_text(card(files.folder, change, name), encoding="utf-8")


def changed_config(folder: Path, change: Change) -> str:
    """config.json with the keys that untying needs."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for key, value in change.config.items():
        if isinstance(value, dict) and isinstance(config.get(key), dict):
            config[key] |= value
        else:
            config[key] = value
    return json.dumps(config, indent=2, ensure_ascii=False) + "\n"


def card(folder: Path, change: Change, name: str) -> str:
    """The model card: what was done, then the card of the original."""
    what = "The rows of the output head have their mean subtracted"
    what += " (and the bias its mean)" if change.mean_bias is not None else ""
    tied = (
        f" The head was tied to the input embedding and is a tensor of its own here ({change.extra_bytes / 1e6:.1f} MB more)."
        if change.untied
        else ""
    )
    original = (folder / CARD).read_text(encoding="utf-8", errors="replace") if (folder / CARD).is_file() else ""
    front, body = _front_matter(original)
    return (
        f"{front}# {name}, row-centered output head\n\n"
        f"{what}: probabilities and cross-entropy are those of the original, the mean logit μ of every token is zero.{tied} "
        f"No other weight was changed. ‖w̄‖ was {change.mean_row_norm:.4g}. Measured before and after: `centering.json`.\n"
        + (f"\n{body}" if body.strip() else "")
    )


def _front_matter(text: str) -> tuple[str, str]:
    """The YAML block at the head of a card, which must stay first, and the rest."""
    if not text.startswith("---\n"):
        return "", text
    end = text.find("\n---", 4)
    return ("", text) if end < 0 else (text[: end + 5].rstrip() + "\n\n", text[end + 5 :].lstrip("\n"))
