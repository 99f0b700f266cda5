"""Generated tables: equivalents, checks of a loss, claims of the paper, model classes of transformers."""

from __future__ import annotations

import collections
import contextlib
from pathlib import Path

import zloss
from tools.docs.markdown import sentence, table
from zloss.audit.loss.checks import CHECKS
from zloss.errors import InputError
from zloss.integrations.transformers import support
from zloss.results.files import read_record
from zloss.results.reproduction import ReproductionRecord
from zloss.router.conventions import router_conventions

RESULTS = Path(__file__).parents[2] / "docs" / "results"
HOLDS, FAILS, UNTESTED = "holds", "does not hold", "cannot be tested here"
MARKS = {HOLDS: "✓ holds", FAILS: "✗ does not hold", UNTESTED: "○ not testable here"}
COEF, LAYERS, TOP_K = 1e-3, 16, 8


def heads() -> str:
    """One line per framework: its setting for λ = 1e-4, what it is here, its denominator."""
    found = zloss.explain(zloss.StandardZLoss(1e-4, target=0.0), vocab=50_304)
    lines = []
    for recipe in found.recipes:
        setting = f"`{recipe.setting}`" if recipe.setting else "none"
        ours = "`zloss.StandardZLoss(1e-4, target=0.0)`" if recipe.setting else "[routers](#routers)"
        lines.append((recipe.framework, setting, ours, sentence(recipe.note)))
    return table(("framework", "setting there", "the same here", "denominator there"), lines)


def routers() -> str:
    """One line per convention: s_rel, and the coefficient that equals 1e-3 of the token-layer mean."""
    lines = []
    for name in (convention.name for convention in router_conventions()):
        scale = zloss.router_scale(name, layers=LAYERS, tokens=4096, top_k=TOP_K, coef=COEF)
        equal = (
            zloss.match_coefficient(COEF, "token_layer_mean", name, layers=LAYERS, top_k=TOP_K)
            if scale.relative
            else None
        )
        lines.append((f"`{name}`", f"{scale.relative:g}", "none" if equal is None else f"{equal:.4g}"))
    return table(("convention", "s_rel:", "λ_R that equals 1e-3 of `token_layer_mean`:"), lines)


def checks() -> str:
    """One line per check of the audit of a loss."""
    lines = ((f"`{one.id}`", one.severity, one.question, one.consequence) for one in CHECKS.values())
    return table(("id", "severity", "the question", "what a finding means"), lines)


def reproductions() -> list[tuple[str, ReproductionRecord]]:
    """(name of the page, record) of every committed reproduction with claims."""
    found = []
    for path in sorted(RESULTS.glob("*.json")):
        with contextlib.suppress(InputError):  # a comparison, or another kind of result
            found.append((path.stem, read_record(path, ReproductionRecord)))
    return [(page, record) for page, record in found if record.claims]


def summary() -> str:
    """Verdicts by table of the paper."""
    total: collections.Counter[str] = collections.Counter()
    lines = []
    for page, record in reproductions():
        counts = collections.Counter(claim.verdict for claim in record.claims)
        total += counts
        link = f"[`{record.label}`](results/{page}.md)"
        lines.append((link, record.title, *(str(counts[verdict] or "") for verdict in (HOLDS, FAILS, UNTESTED))))
    lines.append(("**all**", "", *(f"**{total[verdict]}**" for verdict in (HOLDS, FAILS, UNTESTED))))
    return table(("label", "about", "holds:", "does not hold:", "cannot be tested here:"), lines)


def claims() -> str:
    """Every claim, by label."""
    parts = []
    for page, record in reproductions():
        lines = [
            (
                claim.statement,
                MARKS[claim.verdict].replace(" ", "\N{NO-BREAK SPACE}"),
                claim.evidence.replace("_", "\\_"),
            )
            for claim in record.claims
        ]
        parts += [f"### {record.label}", f"{record.title}. [Numbers, settings and deviations](results/{page}.md)."]
        parts.append(table(("the paper", "here", "our numbers, or the reason"), lines))
    return "\n\n".join(parts)


def support_page() -> str:
    """Every causal class of transformers and what `apply` does with it."""
    found = support()
    classes = sorted(found.classes, key=lambda model: model.name.lower())
    parts = [
        "# Models of transformers",
        "Which model classes [`apply` and `attach`](integrations.md) support. For every causal language model class of "
        f"transformers {found.transformers}, a small model was built, and its training loss and all its gradients were compared "
        "with CE + Z of its own logits (`python -m tests.integrations.transformers.sweep --write`). "
        "In Python: `zloss.integrations.transformers.support()`.",
        f"- exact: {found.count('exact')} classes. The loss is within 1e-5 and the gradients are within 1e-4, relative.\n"
        f"- refused: {found.count('refused')}. `apply` or the first training step raises an error that names class and reason.\n"
        f"- not built: {found.count('not built')}. No small model of the class could be built, so it was not tried. `apply` "
        "either handles such a class exactly or rejects it; it does not train differently without an error.",
        table(("class", "result", "reason"), ((model.name, model.state, model.detail) for model in classes)),
    ]
    return "\n\n".join(parts) + "\n"
