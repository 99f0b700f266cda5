"""Router Z-loss conventions: how each codebase turns per-decision violations into one scalar, and what a coefficient means there.

    L_R = λ_R Σ_{t,l} α_{t,l} (log Z_R − c_R)²        s_rel = N_tl · α        (paper eq:router_loss)

A convention only chooses α. For every layer l it is an exact rational c_l over a count of decisions,

    α_l = c_l / D_l        c_l = factor · k^power · micro-batches / layer divisor

so scales are exact (1, 1/k, k), and the count of a mask never has to leave its device.

This module does not import torch, so `zloss router-scale` starts quickly.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any, Literal, get_args

from zloss.errors import CoefficientError, InputError, UnknownNameError
from zloss.results.router import ConventionScale, RouterScaleTable

TokenCount = Literal["decisions", "layer_tokens", "valid_tokens"]
"""D_l: all decisions N_tl; the layer's counted tokens N_l; or the tokens with a label, even if all tokens are summed."""
LayerDivisor = Literal["none", "moe_layers", "model_layers", "stack_layers"]
"""What the sum over layers is divided by: nothing, L, the depth of the model, or the layers of the router's stack."""


@dataclass(frozen=True)
class RouterContext:
    """What a scale may depend on in addition to layers, tokens and k."""

    model_layers: int | None = None
    """Transformer blocks of the model, dense ones included; None: every block has a router."""
    encoder_layers: int | None = None
    """How many of the MoE layers, counted from the first, are the encoder's; None: one stack."""
    valid_tokens: int | None = None
    """Tokens with a label; None: every counted token has one."""
    micro_batches: int = 1
    """Micro-batches per step; matters if a framework adds their router losses instead of averaging them."""

    def __post_init__(self) -> None:
        for name in ("model_layers", "encoder_layers", "valid_tokens", "micro_batches"):
            check_count(name, getattr(self, name), optional=True)


@dataclass(frozen=True)
class RouterConvention:
    """A named reduction α, with a citation of where it was read.

    >>> RouterConvention("mine", token_count="layer_tokens", layer_divisor="none", cited="my trainer").depends_on
    ('layers',)
    """

    name: str
    token_count: TokenCount
    layer_divisor: LayerDivisor
    cited: str
    """Codebase, file and function, or the paper's label."""
    top_k_power: Literal[-1, 0, 1] = 0
    factor: Fraction = Fraction(1)
    sums_micro_batches: bool = False
    note: str = ""

    def __post_init__(self) -> None:
        for name, known in (("token_count", get_args(TokenCount)), ("layer_divisor", get_args(LayerDivisor))):
            if getattr(self, name) not in known:
                raise UnknownNameError(name, getattr(self, name), known)

    @property
    def depends_on(self) -> tuple[str, ...]:
        """The quantities s_rel depends on."""
        depends = {
            "layers": self.layer_divisor == "model_layers"
            or (self.layer_divisor == "none" and self.token_count != "decisions"),
            "model_layers": self.layer_divisor == "model_layers",
            "encoder_layers": self.layer_divisor == "stack_layers",
            "top_k": self.top_k_power != 0,
            "valid_tokens": self.token_count == "valid_tokens",
            "micro_batches": self.sums_micro_batches,
        }
        return tuple(name for name, does in depends.items() if does and self.factor != 0)

    @property
    def over_ranks(self) -> str:
        """What is counted when the tokens of a step are split over ranks, with and without `groups`."""
        counted = {
            "decisions": "N_tl is counted over all ranks with `groups`",
            "layer_tokens": "N_l of every layer is counted over all ranks with `groups`",
            "valid_tokens": "`valid_tokens` must be the count over all ranks",
        }[self.token_count]
        return (
            f"{counted}; without `groups`, each rank divides by its own count: where n ranks average gradients, "
            "a decision on a rank with N_r of N decisions gets N/(n·N_r) times its share."
        )

    def numerators(self, layers: int, top_k: int, context: RouterContext) -> tuple[Fraction, ...]:
        """c_l of every layer: everything in α_l but the count of tokens."""
        base = self.factor * Fraction(top_k) ** self.top_k_power
        if self.sums_micro_batches:
            base *= context.micro_batches
        return tuple(base / divisor for divisor in self._layer_divisors(layers, context))

    def _layer_divisors(self, layers: int, context: RouterContext) -> Sequence[int]:
        # Without a stated depth every block has a router; without an encoder there is one stack.
        depth, encoder = context.model_layers or layers, context.encoder_layers or layers
        if context.encoder_layers is not None and encoder >= layers:
            raise InputError(
                f"`encoder_layers` is expected to be less than the number of MoE layers, {layers}, but got "
                f"{encoder}: `layers` counts the routers of both stacks."
            )
        if self.layer_divisor == "model_layers" and depth < layers:
            raise InputError(
                f"`model_layers` is expected to be at least the number of MoE layers, {layers}, but got {depth}: "
                "it counts every transformer block, dense ones included."
            )
        decoder = layers - encoder
        return {
            "none": (1,) * layers,
            "moe_layers": (layers,) * layers,
            "model_layers": (depth,) * layers,
            "stack_layers": (encoder,) * encoder + (decoder,) * decoder,
        }[self.layer_divisor]


@dataclass(frozen=True)
class RouterScale:
    """The reduction weight of a convention. Scaling: per routing decision (t, l).

    If layers differ (two stacks of unequal depth), the scalars are means over decisions and `uniform` is False.
    """

    convention: RouterConvention
    coef: float | None
    alpha: float
    absolute: float
    """λ_R·α, what multiplies (log Z − c)² of one decision."""
    relative: float
    """s_rel = N_tl·α, 1 for the token-layer mean."""
    relative_per_layer: tuple[float, ...]
    uniform: bool


MOST_LAYERS = 100_000
"""Layers whose weights are computed one by one."""


def router_scale(
    convention: str | RouterConvention,
    *,
    layers: int,
    tokens: int,
    top_k: int,
    coef: float | None,
    model_layers: int | None = None,
    encoder_layers: int | None = None,
    valid_tokens: int | None = None,
    micro_batches: int = 1,
) -> RouterScale:
    """α, λα and s_rel for `layers` routers that each see `tokens` tokens (paper prop:router_effective_coefficient).

    >>> router_scale("active_route_mean", layers=4, tokens=1024, top_k=2, coef=1e-3).relative
    0.5
    """
    context = RouterContext(model_layers, encoder_layers, valid_tokens, micro_batches)
    found = find_convention(convention)
    alphas = _exact_alphas(found, layers, tokens, top_k, context)
    mean = sum(alphas, Fraction(0)) / layers
    decisions = layers * tokens
    return RouterScale(
        convention=found,
        coef=coef,
        alpha=_rounded("α", mean),
        # One rounding of the exact product: a matched coefficient then gives the same bits.
        absolute=_rounded("λ_R·α", exact_coefficient(coef) * mean),
        relative=_rounded("s_rel", decisions * mean),
        relative_per_layer=tuple(_rounded("s_rel", decisions * alpha) for alpha in alphas),
        uniform=len(set(alphas)) == 1,
    )


def match_coefficient(
    coef: float,
    source: str | RouterConvention,
    target: str | RouterConvention,
    *,
    layers: int,
    top_k: int,
    tokens: int = 1,
    model_layers: int | None = None,
    encoder_layers: int | None = None,
    valid_tokens: int | None = None,
    micro_batches: int = 1,
) -> float:
    """The coefficient under `target` that applies what `coef` applies under `source`: λ·s_source / s_target.

    The target c_R is not part of a scale. Most codebases use 0: pass it to `router_loss` with their coefficient, because
    `target=None` means log E.

    `tokens` matters only together with `valid_tokens`, which are among them. If a convention weights its stacks unequally,
    scales are means over decisions.

    >>> match_coefficient(1e-3, "megatron", "olmoe", layers=16, top_k=8)
    0.128
    """
    context = RouterContext(model_layers, encoder_layers, valid_tokens, micro_batches)
    here, there = find_convention(source), find_convention(target)
    exact = exact_coefficient(coef)
    scale_here, scale_there = (
        sum(_exact_alphas(convention, layers, tokens, top_k, context), Fraction(0)) for convention in (here, there)
    )
    if scale_there == 0:
        if scale_here * exact == 0:
            return 0.0
        raise CoefficientError(
            f"no coefficient under {there.name!r} equals {coef!r} under {here.name!r}: that convention applies no router "
            "Z-loss at all."
        )
    return _rounded(f"the coefficient under {there.name!r}", exact * scale_here / scale_there)


def router_scale_table(
    coef: float,
    source: str | RouterConvention,
    *,
    layers: int,
    top_k: int,
    tokens: int,
    model_layers: int | None = None,
    encoder_layers: int | None = None,
    valid_tokens: int | None = None,
    micro_batches: int = 1,
) -> RouterScaleTable:
    """The scale of `coef` under every convention, and the coefficient there that equals `coef` under `source`.

    A custom `source` is listed after the conventions of the catalog.
    """
    context: dict[str, Any] = {
        "layers": layers,
        "top_k": top_k,
        "tokens": tokens,
        "model_layers": model_layers,
        "encoder_layers": encoder_layers,
        "valid_tokens": valid_tokens,
        "micro_batches": micro_batches,
    }
    here = find_convention(source)
    scales = []
    for convention in _CATALOG if here in _CATALOG else (*_CATALOG, here):
        scale = router_scale(convention, coef=coef, **context)
        scales.append(
            ConventionScale(
                convention=convention.name,
                relative=scale.relative,
                absolute=scale.absolute,
                uniform=scale.uniform,
                equal_coef=None if scale.relative == 0 else match_coefficient(coef, here, convention, **context),
                cited=convention.cited,
            )
        )
    return RouterScaleTable(coef=coef, source=here.name, conventions=tuple(scales), **context)


def _exact_alphas(
    convention: RouterConvention, layers: int, tokens: int, top_k: int, context: RouterContext
) -> list[Fraction]:
    """α_l of every layer, for `layers` routers that each see `tokens` tokens."""
    check_count("layers", layers)
    check_count("top_k", top_k)
    check_count("tokens", tokens)
    if layers > MOST_LAYERS:
        raise InputError(f"`layers` is expected to be at most {MOST_LAYERS}, but got {layers}.")
    labelled = tokens if context.valid_tokens is None else context.valid_tokens
    if labelled > tokens:
        raise InputError(
            f"`valid_tokens` is expected to be at most `tokens`, {tokens}, but got {labelled}: it counts the tokens of the "
            "batch that have a label, so pass all tokens of the batch as `tokens`."
        )
    count = {"decisions": layers * tokens, "layer_tokens": tokens, "valid_tokens": labelled}[convention.token_count]
    return [numerator / count for numerator in convention.numerators(layers, top_k, context)]


def _rounded(name: str, value: Fraction) -> float:
    try:
        return float(value)
    except OverflowError as error:
        raise CoefficientError(f"{name} is too large for a float: use a smaller `coef`.") from error


def exact_coefficient(coef: float | None) -> Fraction:
    """λ_R as an exact fraction; None is off, like 0."""
    if coef is None:
        return Fraction(0)
    # The comparison with the largest float excludes NaN, infinity and integers that no float can hold.
    if isinstance(coef, bool) or not isinstance(coef, (int, float)) or not 0 <= coef <= sys.float_info.max:
        raise CoefficientError(f"`coef` is expected to be None (off) or a finite number ≥ 0, but got {coef!r}.")
    return Fraction(coef)


def check_count(name: str, value: object, *, optional: bool = False) -> None:
    """A count is an integer ≥ 1."""
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**63:
        raise InputError(f"`{name}` is expected to be an integer ≥ 1, but got {value!r}.")


def router_conventions() -> tuple[RouterConvention, ...]:
    """Every named convention, the paper's three first."""
    return _CATALOG


def find_convention(convention: str | RouterConvention) -> RouterConvention:
    """A convention by name, in which hyphens and underscores are the same; the error for an unknown name suggests the nearest.

    >>> find_convention("active-route-mean").top_k_power
    -1
    """
    if isinstance(convention, RouterConvention):
        return convention
    name = str(convention).strip().lower().replace("-", "_").replace(" ", "_")
    name = _ALIASES.get(name, name)
    if name not in _BY_NAME:
        raise UnknownNameError("router convention", convention, (*_BY_NAME, *_ALIASES))
    return _BY_NAME[name]


_over_decisions = partial(RouterConvention, token_count="decisions", layer_divisor="none")
_layer_sum = partial(RouterConvention, token_count="layer_tokens", layer_divisor="none")
_layer_mean = partial(RouterConvention, token_count="layer_tokens", layer_divisor="moe_layers")

# The catalog: the paper's three conventions, then those of public codebases as read from their sources in summer 2026. They may
# have changed since; `zloss.measure_router_scale` measures what a running model applies.

_CATALOG = (
    _over_decisions(
        "token_layer_mean",
        cited="paper, prop:router_effective_coefficient",
        note="The reference: α = 1/N_tl.",
    ),
    _over_decisions(
        "active_route_mean",
        top_k_power=-1,
        cited="paper, cor:router_topk_active_mean",
        note="One violation per decision, divided by the N_tl·k active routes.",
    ),
    _over_decisions(
        "active_route_sum",
        top_k_power=1,
        cited="paper, cor:router_topk_active_sum",
        note="k replicas of each violation, then the token-layer mean.",
    ),
    _layer_sum(
        "megatron",
        cited="NVIDIA/Megatron-LM, megatron/core/transformer/moe/router.py: TopKRouter.apply_z_loss, "
        "moe_utils.py: z_loss_func",
        note="Token mean in every layer, each attached to the backward pass on its own: layers add. The logged value is "
        "the layer mean.",
    ),
    _layer_sum(
        "megatron_unscaled",
        sums_micro_batches=True,
        cited="NVIDIA/Megatron-LM, megatron/core/transformer/moe/moe_utils.py: MoEAuxLossAutoScaler",
        note="Megatron's side-channel scaler left at its default of 1 while the main loss is averaged over "
        "micro-batches: set_loss_scale was not called.",
    ),
    _layer_sum(
        "mesh_tf",
        cited="tensorflow/mesh, mesh_tensorflow/transformer/moe.py (the ST-MoE code)",
        note="Each layer's token mean is added to the extra losses.",
    ),
    _layer_sum("st_moe_pytorch", cited="lucidrains/st-moe-pytorch, st_moe_pytorch/st_moe_pytorch.py"),
    _layer_sum("levanter", cited="stanford-crfm/levanter, src/levanter/models/mixtral.py"),
    _layer_sum(
        "xtuner",
        cited="InternLM/xtuner, xtuner/v1/loss/moe_loss.py: z_loss",
        note="Token mean per layer, summed over layers, divided by the number of micro-batches.",
    ),
    _layer_sum("kempnerforge", cited="KempnerInstitute/KempnerForge, kempnerforge/model/moe.py"),
    RouterConvention(
        "olmo_core",
        token_count="valid_tokens",
        layer_divisor="model_layers",
        cited="allenai/OLMo-core, src/olmo_core/nn/moe/router.py: MoERouter.forward, loss.py: router_z_loss",
        note="Sums every token, divides by the tokens with a label and by the depth of the whole model: "
        "s_rel = (L / n_layers)·(N_all / N_valid). Pass no mask, and `valid_tokens` and `model_layers`.",
    ),
    _layer_mean(
        "olmoe",
        top_k_power=-1,
        cited="the megablocks fork OLMoE was trained with (Muennighoff/megablocks), router Z-loss",
        note="Divided by layers, tokens and k: the active-route mean. It takes log(Σ exp) naively.",
    ),
    _layer_mean(
        "flaxformer",
        cited="google/flaxformer, flaxformer/architectures/moe/routing.py; google-research/t5x, t5x/contrib/moe/models.py: "
        "_extract_diversity_metrics, _expert_losses",
        note="Token mean, then averaged over MoE layers.",
    ),
    _layer_mean("openmoe", cited="hpcaitech/ColossalAI, OpenMoE application"),
    _layer_mean("marin_grug", cited="marin-community/marin, grug MoE"),
    _layer_mean(
        "megablocks_mean",
        cited="databricks/megablocks, megablocks/layers/router.py: batched_router_zloss",
        note="Returns one value per router; here the caller averages them.",
    ),
    _layer_sum(
        "megablocks_sum",
        cited="databricks/megablocks, megablocks/layers/router.py: batched_router_zloss",
        note="Returns one value per router; here the caller adds them.",
    ),
    _layer_sum(
        "lm_engine",
        factor=Fraction(1, 10),
        cited="open-lm-engine/lm-engine, lm_engine/hf_models/modeling_utils/mlp_blocks/moe.py: MoE._compute_switch_loss",
        note="A tenth of the load-balancing coefficient, added over layers; the coefficient is the balancing one.",
    ),
    RouterConvention(
        "hf_switch",
        token_count="layer_tokens",
        layer_divisor="stack_layers",
        cited="huggingface/transformers, models/switch_transformers/modeling_switch_transformers.py: "
        "router_z_loss_func, SwitchTransformersForConditionalGeneration.forward",
        note="Mean over tokens and layers of each stack, padding counted (pass no mask); encoder and decoder add.",
    ),
    _layer_sum(
        "hf_nllb_moe",
        factor=Fraction(0),
        cited="huggingface/transformers, models/nllb_moe/configuration_nllb_moe.py: router_z_loss_coef",
        note="The configuration has a coefficient; the loss never uses it.",
    ),
)
_BY_NAME = {convention.name: convention for convention in _CATALOG}
_ALIASES = {"st_moe": "mesh_tf", "t5x": "flaxformer", "megatron_lm": "megatron", "switch": "hf_switch"}
