"""docs/glossary.md: every quantity of the table in `zloss.results.quantities`, by family."""

from __future__ import annotations

from tools.docs.markdown import WRITTEN_BY, sentence, table
from zloss.results import quantities as q

FAMILIES = (
    ("The output head", "Keys of `heads.raw` and `heads.centered` of an audit and of `metrics.json`.", q.HEAD),
    ("16-bit numbers", "Spacing of floating-point numbers where the largest logits are.", q.PRECISION),
    ("The text", "Numbers of a model on a text that do not depend on the coordinate.", q.TEXT),
    ("One token", "Fields of `out.stats`, columns of the extreme tokens, axes of figures.", q.TOKENS),
    ("The spectrum", "Singular values of the head.", q.SPECTRUM),
    ("Gradients", "The Z gradient relative to the CE gradient, on the diagnostic blocks.", q.GRADIENT),
    ("16-bit logits", "What storing logits in 16 bits costs, raw and with a centered head as it would be saved.", q.LOGIT_NOISE),
    ("Planned Z-loss", "What the Z-loss that the verdict assumes would send through the model.", q.PLANNED),
    ("Tied tables", "A table that is both input embedding and output head gets a gradient through both.", q.TIED_PATHS),
    ("Tails over steps", "Over the steps of a training run; all parameters form one vector.", q.TAILS),
    ("Events over steps", "Shares of steps, nonfinite ones included.", q.EVENTS),
    ("Adam state", "Sampled every few steps.", q.ADAM_STATE),
    ("A run", "The λ, seed and size of a run.", q.RUN),
    ("One step", "A line of `steps.jsonl`.", q.STEP),
    ("One sample of Adam", "Under `adam` in a line of `steps.jsonl`.", q.ADAM_SAMPLE),
    ("Routers", "Mixtures of experts.", q.ROUTER),
    ("Stored logits", "The Z source of logits that were stored in 16 bits, against fp64.", q.SOURCE),
    ("Updates", "The same error after transport: in the gradient of the parameters and in the first Adam direction.", q.UPDATES),
    ("fp16 headroom", "Largest static loss scale before a gradient overflows.", q.OVERFLOWS),
    ("Reproductions", "Columns of the paper's tables that have no key elsewhere.", q.REPRODUCTION),
)  # fmt: skip


def glossary() -> str:
    """The whole page."""
    parts = [
        WRITTEN_BY,
        "# Glossary",
        "Every symbol that pages, tables and figures use, and every measured number of the files we write. "
        "`zloss glossary WORD` prints the same entries on a terminal. *Over* says what a number is reduced over; *paper* is the "
        "label of its equation, table or section there. An arrow is the direction of an improvement between two runs or two "
        "checkpoints in one coordinate, ↓ lower, ↑ higher; raw and centered numbers of one model are not compared. No arrow: "
        "descriptive.",
        "## Letters",
        table(("letter", "meaning"), q.LETTERS),
        "## Words",
        table(("word", "meaning"), q.WORDS),
    ]
    for title, lead, family in FAMILIES:
        parts += [f"## {title}", lead, table(("symbol", "key", "meaning", "unit", "over", "paper"), map(_line, family))]
    return "\n\n".join(parts) + "\n"


def _line(quantity: q.Definition) -> tuple[str, ...]:
    arrow = {"lower": " ↓", "higher": " ↑", "": ""}[quantity.better]
    key = f'<a id="{quantity.key}"></a>`{quantity.key}`'
    equation = f"`{quantity.equation}`" if quantity.equation else ""
    symbol = quantity.symbol.replace("*", "\\*").replace("_", "\\_")
    return symbol + arrow, key, sentence(quantity.meaning), quantity.unit, quantity.over, equation
