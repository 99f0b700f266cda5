"""The commands of `zloss` that the tests run on two processes."""

from __future__ import annotations

from pathlib import Path

COMMON = [
    *("--block-size", "24", "--valid-blocks", "6", "--adam-every", "4", "--gradient-blocks", "2"),
    *("--lr", "1e-3", "--checkpoint-every", "8", "--trackers", "none", "--quiet"),
]
DROPOUT = ["--steps", "80", "--micro-batch", "2", "--accumulate", "2", "--methods", "centered", "--coef", "1e-3"]
"""Micro-batches are divided; the model has dropout."""
SCRATCH = [
    *("--from-config", "tiny", "--train-tokenizer", "300", "--head", "paper", "--steps", "10", "--micro-batch", "3"),
    *("--methods", "ce,standard", "--coef", "1e-2"),
]
"""Three blocks of one micro-batch on two ranks."""
MOE = [
    *("--moe", "--top-k", "2", "--experts", "4", "--moe-layers", "2", "--moe-width", "32", "--expert-width", "16"),
    *("--train-tokenizer", "300", "--steps", "6", "--micro-batch", "2", "--accumulate", "3"),
    *("--router", "active_route_sum", "--router-coef", "0.05", "--capacity-factor", "1.0"),
]
"""Three micro-batches on two ranks."""
AUDIT = ["--blocks", "21", "--block-size", "48", "--batch-blocks", "5", "--gradient-blocks", "3", "--no-figures"]


def train_words(root: Path, *options: str, out: str, model: bool = False) -> list[str]:
    named = [str(root / "in" / "gpt2")] if model else []
    return ["train", *named, "--text", str(root / "in" / "text.txt"), *COMMON, *options, "--out", str(root / out)]


def audit_words(root: Path, *options: str, out: str) -> list[str]:
    model, text = root / "in" / "gpt2", root / "in" / "text.txt"
    return ["audit", str(model), "--text", str(text), *AUDIT, *options, "--out", str(root / out)]


def commands(root: Path) -> dict[str, list[str]]:
    """By name, in the order in which they run."""
    whole = train_words(root, *DROPOUT, out="whole", model=True)
    one_pass = [*DROPOUT[:4], "--accumulate", "1", "--methods", "ce"]
    return {
        "killed run": train_words(root, *DROPOUT, out="killed", model=True),
        "whole run": whole,
        "blocks": train_words(root, *SCRATCH, out="blocks"),
        "experts": train_words(root, *MOE, out="experts"),
        "finished run": [word for word in whole if word != "--quiet"],
        "dropout refused": train_words(root, *one_pass, out="refused", model=True),
        "experts refused": train_words(root, *MOE, "--accumulate", "1", out="refused"),
        "few blocks": train_words(root, *SCRATCH, "--micro-batch", "1", out="refused"),
        "audit": audit_words(root, out="audit"),
        "placed audit": audit_words(root, "--device-map", "auto", "--quiet", out="placed"),
        "killed audit": audit_words(root, "--resume", "--quiet", out="killed-audit"),
        "no text": ["audit", *map(str, (root / "in" / "gpt2", "--text", root / "nowhere.txt", "--out", root / "none"))],
    }
