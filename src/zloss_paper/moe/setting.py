"""The setting of a mixture-of-experts table: which router variants train, at what scale, and how that differs from the paper.

Every variant trains from the same weights on the same batches. The reductions are computed as they are written (replicas
gathered, routes counted), so a matched variant that trains like the token-layer mean is a result, not a definition.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zloss.results.choices import CorpusName
from zloss.results.moe_config import MoeRun
from zloss.results.train_config import TrainConfig
from zloss.train.grid import Grid
from zloss_paper.engine.profile import Overrides, Profile
from zloss_paper.engine.texts import WIKITEXT, TextSource, text_sources

ROUTER_COEF = 1e-3
NAMES = {
    "none": "none",
    "token_layer_mean": "token-layer mean",
    "active_route_mean": "active-route mean",
    "active_route_mean:matched": "active-route mean matched",
    "active_route_sum": "active-route sum",
    "active_route_sum:matched": "active-route sum matched",
}
"""Our variants and the paper's names of them."""


@dataclass(frozen=True)
class MoeTableConfig:
    """The complete setting of a table of router variants, as its result file holds it."""

    profile: Profile
    grid: Grid
    texts: tuple[TextSource, ...]
    deviations: tuple[str, ...]
    notes: tuple[str, ...] = ()


def moe_setting(
    top_k: int, steps: Mapping[Profile, int], routers: Sequence[str], profile: Profile, overrides: Overrides
) -> MoeTableConfig:
    """The grid of a table at a profile: the paper's steps and seeds, or a scale that fits two cores."""
    paper, smoke = profile == "paper", profile == "smoke"
    moe = MoeRun(top_k=top_k, tokenizer="gpt2" if paper else None)
    if smoke:
        moe = MoeRun(top_k=top_k, layers=2, width=32, heads=4, expert_width=16)
    corpus: CorpusName | None = None if overrides.texts else "wikitext-103" if paper else "pydoc"
    count = steps[profile]
    base = TrainConfig(
        model="moe",
        moe=moe,
        train_tokenizer=None if paper else 300 if smoke else 8192,
        texts=overrides.texts,
        corpus=corpus,
        blocks=overrides.blocks,
        valid_blocks=4 if smoke else 64,
        block_size=overrides.block_size or (256 if paper else 24 if smoke else 128),
        steps=count,
        warmup=count // 10,
        lr=1e-3,
        micro_batch=8 if paper else 2 if smoke else 4,
        gradient_blocks=0,
    )
    seeds = (1, 2, 3) if paper else (1, 2)
    grid = Grid(base, ("ce",), (0.0,), seeds, routers=tuple(routers), router_coefs=(ROUTER_COEF,))
    sources = text_sources(overrides.texts, corpus, overrides.text_source)
    ignored = (
        ("the given models were left aside: this table trains a model of its own from scratch",)
        if overrides.models
        else ()
    )
    return MoeTableConfig(profile, grid, sources, _deviations(base, seeds, steps["paper"], sources, smoke), ignored)


def _deviations(
    base: TrainConfig, seeds: Sequence[int], steps: int, sources: Sequence[TextSource], smoke: bool
) -> tuple[str, ...]:
    found = []
    if {source.corpus for source in sources} != {WIKITEXT}:
        found.append(f"the text is {' + '.join(source.title for source in sources)}, not {WIKITEXT}")
    if base.steps != steps:
        found.append(f"{base.steps} steps of {base.tokens_per_step} tokens, not {steps} steps (of an unstated number)")
    if len(seeds) != 3:
        found.append(f"{len(seeds)} seeds, not 3")
    if smoke:
        found.append("a model of width 32 with 2 blocks, not of width 256 with 4")
    return (*found, "tokenizer, batch, learning rate and expert width are ours: the paper does not state them")
