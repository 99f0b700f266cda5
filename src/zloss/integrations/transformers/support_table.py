"""The result of trying every causal class of one version of transformers at a small size."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).with_name("support.json")


@dataclass(frozen=True)
class ModelSupport:
    """The outcome for one class."""

    name: str
    state: str
    """"exact": loss and gradients equal CE + Z of the model's own logits; "refused": `apply` or the first step raises,
    with the reason; "not built": no small model of the class could be made, so it was not tried."""
    detail: str
    """The refusal, or why no small model was built."""


@dataclass(frozen=True)
class SupportTable:
    """The outcomes, and the version of transformers they were obtained with."""

    transformers: str
    classes: tuple[ModelSupport, ...]

    def __getitem__(self, name: str) -> ModelSupport:
        """The outcome for a class; KeyError for one that was not registered as a causal model."""
        return {model.name: model for model in self.classes}[name]

    def count(self, state: str) -> int:
        """How many classes are in this state."""
        return sum(model.state == state for model in self.classes)


def support() -> SupportTable:
    """The table written by the sweep in our tests.

    >>> from zloss.integrations.transformers import support
    >>> support()["LlamaForCausalLM"].state
    'exact'
    """
    read = json.loads(FILE.read_text(encoding="utf-8"))
    return SupportTable(read["transformers"], tuple(ModelSupport(**model) for model in read["classes"]))


def support_page(table: SupportTable) -> str:
    """The table as a page of the documentation."""
    lines = [
        "# Models of transformers",
        "",
        "Made from `zloss.integrations.transformers.support()` by `python -m tests.integrations.transformers.sweep --write`.",
        f"Every causal language model class of transformers {table.transformers} is built at a small size. Its training",
        "loss and all its gradients under `apply` are compared with CE + Z of its own logits.",
        "",
        f"- exact: {table.count('exact')} classes. The loss is within 1e-5 and the gradients are within 1e-4, relative.",
        f"- refused: {table.count('refused')}. `apply` or the first training step raises an error that names the class and the",
        "  reason.",
        f"- not built: {table.count('not built')}. No small model of the class could be made, so it was not tried. `apply` takes",
        "  such a class over exactly or refuses it; it does not train differently without an error.",
        "",
        "| class | result | reason |",
        "|---|---|---|",
    ]
    for model in sorted(table.classes, key=lambda model: model.name.lower()):
        detail = " ".join(model.detail.split()).replace("|", "\\|")
        lines.append(f"| {model.name} | {model.state} | {detail} |")
    return "\n".join(lines) + "\n"
