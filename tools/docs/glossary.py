"""docs/glossary.md: every quantity of the table in `zloss.results.quantities`, by family."""

from __future__ import annotations

from tools.docs.markdown import WRITTEN_BY, sentence, table
from zloss.results.quantities import (
    ADAM_SAMPLE,
    ADAM_STATE,
    EVENTS,
    GRADIENT,
    HEAD,
    LETTERS,
    LOGIT_NOISE,
    OVERFLOWS,
    PLANNED,
    PRECISION,
    QUANTITIES,
    REPRODUCTION,
    ROUTER,
    RUN,
    SOURCE,
    SPECTRUM,
    STEP,
    TAILS,
    TEXT,
    TIED_PATHS,
    TOKENS,
    UPDATES,
    WORDS,
    Definition,
)

FAMILIES = (
    ("The output head", "Keys of `heads.raw` and `heads.centered` of an audit and of `metrics.json`.", HEAD),
    ("16-bit numbers", "Spacing of floating-point numbers where the largest logits are.", PRECISION),
    ("The text", "Numbers of a model on a text that do not depend on the coordinate.", TEXT),
    ("One token", "Fields of `out.stats`, columns of the extreme tokens, axes of figures.", TOKENS),
    ("The spectrum", "Singular values of the head.", SPECTRUM),
    ("Gradients", "Z gradient against CE gradient, on the diagnostic blocks.", GRADIENT),
    ("16-bit logits", "What storing logits in 16 bits costs, raw and with a centered head as it would be saved.", LOGIT_NOISE),
    ("Planned Z-loss", "What the Z-loss that the verdict assumes would send through the model.", PLANNED),
    ("Tied tables", "A table that is both input embedding and output head gets a gradient through both.", TIED_PATHS),
    ("Tails over steps", "Of a training run; all parameters are one vector.", TAILS),
    ("Events over steps", "Shares of steps, nonfinite steps counted.", EVENTS),
    ("Adam state", "Sampled every few steps.", ADAM_STATE),
    ("A run", "What a run was.", RUN),
    ("One step", "A line of `steps.jsonl`.", STEP),
    ("One sample of Adam", "Under `adam` of a line of `steps.jsonl`.", ADAM_SAMPLE),
    ("Routers", "Mixtures of experts.", ROUTER),
    ("Stored logits", "The Z source of logits that were stored in 16 bits, against fp64.", SOURCE),
    ("Updates", "That error after transport, at parameters and at the first Adam direction.", UPDATES),
    ("fp16 headroom", "Largest static loss scale before a gradient overflows.", OVERFLOWS),
    ("Reproductions", "Columns of the paper's tables that have no key elsewhere.", REPRODUCTION),
)  # fmt: skip


def glossary() -> str:
    """The whole page."""
    missing = set(QUANTITIES) - {quantity for _, _, family in FAMILIES for quantity in family}
    assert not missing, f"a family of quantities has no section: {sorted(q.key for q in missing)}"
    parts = [
        WRITTEN_BY,
        "# Glossary",
        "Every symbol that pages, tables and figures use, and every measured number of the files we write. "
        "`zloss glossary WORD` prints the same entries on a terminal. *Over* says what a number is reduced over; *paper* is the "
        "label of its equation, table or section there. Directions: ↓ lower is better, ↑ higher is better, none: descriptive.",
        "## Letters",
        table(("letter", "meaning"), LETTERS),
        "## Words",
        table(("word", "meaning"), WORDS),
    ]
    for title, lead, family in FAMILIES:
        parts += [f"## {title}", lead, table(("symbol", "key", "meaning", "unit", "over", "paper"), map(_line, family))]
    return "\n\n".join(parts) + "\n"


def _line(quantity: Definition) -> tuple[str, ...]:
    arrow = {"lower": " ↓", "higher": " ↑", "": ""}[quantity.better]
    key = f'<a id="{quantity.key}"></a>`{quantity.key}`'
    equation = f"`{quantity.equation}`" if quantity.equation else ""
    symbol = quantity.symbol.replace("*", "\\*").replace("_", "\\_")
    return symbol + arrow, key, sentence(quantity.meaning), quantity.unit, quantity.over, equation
