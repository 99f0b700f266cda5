"""docs/support_transformers.md: the outcome for every causal class, from `zloss.integrations.transformers.support()`."""

from __future__ import annotations

from zloss.integrations.transformers import support


def support_page() -> str:
    """The page."""
    table = support()
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
        f"- not built: {table.count('not built')}. No small model of the class could be built, so it was not tried. `apply`",
        "  either handles such a class exactly or rejects it; it does not train differently without an error.",
        "",
        "| class | result | reason |",
        "|---|---|---|",
    ]
    for model in sorted(table.classes, key=lambda model: model.name.lower()):
        detail = " ".join(model.detail.split()).replace("|", "\\|")
        lines.append(f"| {model.name} | {model.state} | {detail} |")
    return "\n".join(lines) + "\n"
