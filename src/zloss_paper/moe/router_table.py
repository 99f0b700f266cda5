"""tab:router: a seeded 16-expert linear router on a model's hidden states, top-k × convention.

    zloss reproduce tab:router --profile paper

Expected: s_rel is 1, 1/k and k; within one k the norms have that ratio, whatever the router. Norms compare within one
k only. The paper states E = 16, k ∈ {1, 2, 4}, λ_R = 1e-3 and one deterministic router per k. It states neither text size,
hidden layer, router scale nor c_R, so its norms can be compared in order of magnitude at best.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from zloss.audit.router import router_projection
from zloss.report.numbers import number
from zloss_paper.engine.audited_models import AuditedModel, audit_table, paper_target
from zloss_paper.engine.claims import Claim, Tested, all_lines, cell
from zloss_paper.engine.inputs import WIKITEXT, TextSource
from zloss_paper.engine.recipe import Overrides, Profile, Recipe, RecipeResult
from zloss_paper.engine.table import Key, Line, Table, cells_of, paper_table
from zloss_paper.engine.workbench import Workbench

LABEL = "tab:router"
COLUMNS = ("s_rel", "delta_h_norm_mean")
TARGETS = (paper_target("GPT-2", WIKITEXT, 32),)
MEAN = "token-layer mean"


@dataclass(frozen=True)
class ProjectionConfig:
    """The routers of the table: options of `router_projection`."""

    experts: int = 16
    top_ks: tuple[int, ...] = (1, 2, 4)
    coef: float = 1e-3
    target: float | None = None
    init_std: float = 0.02
    seed: int = 0


@dataclass(frozen=True)
class RouterTableConfig:
    """The complete setting of the router table, as its result file holds it."""

    profile: Profile
    hidden: tuple[AuditedModel, ...]
    """Where the hidden states come from."""
    projection: ProjectionConfig
    texts: tuple[TextSource, ...]


def configure(profile: Profile, overrides: Overrides) -> RouterTableConfig:
    """Hidden states of each model, and the router on them."""
    source = audit_table(LABEL, TARGETS, profile, overrides)
    return RouterTableConfig(profile, source.rows, ProjectionConfig(), source.texts)


def run(config: RouterTableConfig, bench: Workbench) -> RecipeResult:
    """Nine lines per model."""
    lines = []
    for model in config.hidden:
        for projected in router_projection(bench.hidden(model.audit), **asdict(config.projection)):
            convention = projected.convention.replace("_", " ").replace(" ", "-", 1)
            beside: dict[str, Key] = {"top_k": projected.top_k, "convention": convention}
            key: dict[str, Key] = {"model": model.model, **beside} if len(config.hidden) > 1 else beside
            values = {"s_rel": projected.relative, "delta_h_norm_mean": projected.correction_norm}
            # Even on the paper's model its router's scale, c_R and decisions are unknown.
            unknown = "the paper does not state the router's scale, c_R or the number of decisions"
            lines.append(Line(key, cells_of(values), {}, (*model.deviations, unknown), beside))
    names = ", ".join(model.model for model in config.hidden)
    notes = (f"hidden states of {names}; norms are comparable within one k only",)
    return RecipeResult(Table(tuple(lines)), notes=notes, texts=config.texts)


def _relative_scale(line: Line) -> Tested:
    top_k = int(line.key["top_k"])
    expected = {MEAN: 1.0, "active-route mean": 1 / top_k, "active-route sum": float(top_k)}[
        str(line.key["convention"])
    ]
    found = cell(line, "s_rel")
    ok = abs(found.value - expected) <= found.half_unit + 1e-12
    return ok, f"k = {top_k}, {line.key['convention']}: {number(found.value)}"


def _norms_follow(table: Table) -> list[Tested]:
    tested = []
    for line in table:
        (mean,) = table.find(**{**line.key, "convention": MEAN})
        base, found, scale = cell(mean, "delta_h_norm_mean"), cell(line, "delta_h_norm_mean"), cell(line, "s_rel")
        slack = found.half_unit + scale.value * base.half_unit + 1e-6 * found.value
        shown = f"{line.name()}: {number(found.value)} = {number(found.value / base.value)} × {number(base.value)}"
        tested.append((abs(found.value - scale.value * base.value) <= slack, shown))
    return tested


CLAIMS = (
    Claim(
        "relative_scales",
        "Relative to the token-layer mean, the active-route mean scales by 1/k and the active-route sum by k.",
        all_lines(_relative_scale),
    ),
    Claim(
        "norms_follow_the_scale",
        "Within one k the hidden correction norms stand in the ratio of the relative scales.",
        _norms_follow,
        "within 1e-6, and within the rounding of printed cells",
    ),
)

PAPER = paper_table(LABEL, "top_k")
RECIPES = (
    Recipe(LABEL, "Router Z-loss conventions on a seeded 16-expert router", COLUMNS, configure, run, PAPER, CLAIMS),
)
