"""A centered copy of a checkpoint's folder: weights changed, everything else carried over, a card that says what was measured."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from zloss.protocol.center.change import Change
from zloss.protocol.center.weight_files import INDEX, WeightFiles, write_weight_files
from zloss.results.centering import FILE, Centering
from zloss.results.folder_lock import LOCK_FILE

CARD = "README.md"
NOT_CARRIED = {INDEX, CARD, FILE, LOCK_FILE, "config.json", "zloss.json"}
WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}


def write_model(files: WeightFiles, change: Change, target: Path) -> None:
    """Weights, configuration and the other files of the original, into the empty folder `target`."""
    for path in sorted(files.folder.iterdir()):
        if path.is_file() and path.name not in NOT_CARRIED and path.suffix not in WEIGHTS:
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
