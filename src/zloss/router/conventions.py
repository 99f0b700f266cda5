"""What a router Z-loss convention is: how a codebase turns per-decision violations into one scalar.

    L_R = λ_R Σ_{t,l} α_{t,l} (log Z_R − c_R)²        s_rel = N_tl · α        (paper eq:router_loss)

A convention only chooses α. For every layer l it is an exact rational c_l over a count of decisions,

    α_l = c_l / D_l        c_l = factor · k^power · micro-batches / layer divisor

so that scales are exact (1, 1/k, k) and a mask's count never has to leave its device. No torch in this file: the
command line answers from it at once.

[zloss.router.conventions] Router Z-loss conventions by name: the paper's three, and those of public codebases with their places.

Facts about other codebases were read from their sources in summer 2026 and may change with them; what a running model
applies is measured by `zloss.router.measure`.

[zloss.router.conventions] What a router coefficient means under a convention, and the equal coefficient under another. No torch here.

[zloss.router.conventions] One router coefficient under every convention of the catalog. No torch here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from zloss.errors import CoefficientError, InputError, UnknownNameError
from zloss.results.router_scale import ConventionScale, RouterScaleTable
from zloss.source.number_kind import is_number

# <<< zloss.router.conventions
TokenCount = Literal["decisions", "layer_tokens", "valid_tokens"]
"""D_l: all decisions N_tl; the layer's counted tokens N_l; or the tokens with a label, even where all tokens are summed."""
LayerDivisor = Literal["none", "moe_layers", "model_layers", "stack_layers"]
"""What the sum over layers is divided by: nothing, L, the model's depth, or the layers of its own stack."""


@dataclass(frozen=True)
class RouterContext:
    """What a scale may depend on besides layers, tokens and k; None is the case in which it does not matter."""

    model_layers: int | None = None
    """Transformer blocks of the model, dense ones included; None: every block has a router."""
    encoder_layers: int | None = None
    """How many of the MoE layers, counted from the first, are the encoder's; None: one stack."""
    valid_tokens: int | None = None
    """Tokens with a label; None: every counted token has one."""
    micro_batches: int = 1
    """Micro-batches per step; matters where a framework adds their router losses instead of averaging."""

    def __post_init__(self) -> None:
        for name in ("model_layers", "encoder_layers", "valid_tokens", "micro_batches"):
            check_count(name, getattr(self, name), optional=True)


@dataclass(frozen=True)
class RouterConvention:
    """A named reduction α with the place it was read from.

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

    @property
    def depends_on(self) -> tuple[str, ...]:
        """The quantities s_rel depends on."""
        found = []
        if self.factor != 0:
            if self.token_count != "decisions" and self.layer_divisor == "none":
                found.append("layers")
            if self.layer_divisor == "model_layers":
                found += ["layers", "model_layers"]
            if self.layer_divisor == "stack_layers":
                found.append("encoder_layers")
            if self.top_k_power:
                found.append("top_k")
            if self.token_count == "valid_tokens":
                found.append("valid_tokens")
            if self.sums_micro_batches:
                found.append("micro_batches")
        return tuple(found)

    @property
    def over_ranks(self) -> str:
        """What its count is where the tokens of a step lie on several ranks, with and without `groups`."""
        counts = {
            "decisions": "N_tl is counted over all ranks with `groups`",
            "layer_tokens": "N_l of every layer is counted over all ranks with `groups`",
            "valid_tokens": "`valid_tokens` has to be the count over all ranks",
        }
        alone = "without, each rank divides by its own count: where n ranks average gradients, a decision on a rank with N_r "
        alone += "of N decisions gets N/(n·N_r) times its share"
        return f"{counts[self.token_count]}; {alone}."

    def numerators(self, layers: int, top_k: int, context: RouterContext) -> tuple[Fraction, ...]:
        """c_l of every layer: everything in α_l but the count of tokens."""
        base = self.factor * Fraction(top_k) ** self.top_k_power
        if self.sums_micro_batches:
            base *= context.micro_batches
        return tuple(base / divisor for divisor in self._layer_divisors(layers, context))

    def _layer_divisors(self, layers: int, context: RouterContext) -> Sequence[int]:
        encoder = stack_split(layers, context)
        if self.layer_divisor == "moe_layers":
            return (layers,) * layers
        if self.layer_divisor == "model_layers":
            depth = layers if context.model_layers is None else context.model_layers
            if depth < layers:
                raise InputError(
                    f"`model_layers` is expected to be at least the number of MoE layers, {layers}, but got {depth}: "
                    "it counts every transformer block, dense ones included."
                )
            return (depth,) * layers
        if self.layer_divisor == "stack_layers" and encoder:
            return (encoder,) * encoder + (layers - encoder,) * (layers - encoder)
        if self.layer_divisor == "stack_layers":
            return (layers,) * layers
        return (1,) * layers


def stack_split(layers: int, context: RouterContext) -> int:
    """How many of the layers belong to the encoder; 0 for one stack."""
    if context.encoder_layers is None:
        return 0
    if context.encoder_layers >= layers:
        raise InputError(
            f"`encoder_layers` is expected to be less than the number of MoE layers, {layers}, but got "
            f"{context.encoder_layers}: `layers` counts the routers of both stacks."
        )
    return context.encoder_layers


def check_count(name: str, value: object, *, optional: bool = False) -> None:
    """A count is an integer ≥ 1."""
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**63:
        raise InputError(f"`{name}` is expected to be an integer ≥ 1, but got {value!r}.")


def exact_coefficient(coef: float | None) -> Fraction:
    """λ_R as an exact fraction; None is off, as 0."""
    if coef is None:
        return Fraction(0)
    if not (is_number(coef) and math.isfinite(coef) and coef >= 0):
        raise CoefficientError(f"`coef` is expected to be None (off) or a finite number ≥ 0, but got {coef!r}.")
    return Fraction(coef)


# <<< zloss.router.conventions
def _layer_sum(name: str, cited: str, note: str = "") -> RouterConvention:
    return RouterConvention(name, token_count="layer_tokens", layer_divisor="none", cited=cited, note=note)


def _layer_mean(name: str, cited: str, note: str = "", count: TokenCount = "layer_tokens") -> RouterConvention:
    divisor: LayerDivisor = "none" if count == "decisions" else "moe_layers"
    return RouterConvention(name, token_count=count, layer_divisor=divisor, cited=cited, note=note)


TOKEN_LAYER_MEAN = _layer_mean(
    "token_layer_mean",
    "paper, prop:router_effective_coefficient",
    "The reference: α = 1/N_tl.",
    "decisions",
)
ACTIVE_ROUTE_MEAN = RouterConvention(
    "active_route_mean",
    token_count="decisions",
    layer_divisor="none",
    top_k_power=-1,
    cited="paper, cor:router_topk_active_mean",
    note="One violation per decision, divided by the N_tl·k active routes.",
)
ACTIVE_ROUTE_SUM = RouterConvention(
    "active_route_sum",
    token_count="decisions",
    layer_divisor="none",
    top_k_power=1,
    cited="paper, cor:router_topk_active_sum",
    note="k replicas of each violation, then the token-layer mean.",
)

_CATALOG = (
    TOKEN_LAYER_MEAN,
    ACTIVE_ROUTE_MEAN,
    ACTIVE_ROUTE_SUM,
    _layer_sum(
        "megatron",
        "NVIDIA/Megatron-LM, megatron/core/transformer/moe/router.py: TopKRouter.apply_z_loss, "
        "moe_utils.py: z_loss_func",
        "Token mean in every layer, each attached to the backward pass on its own: layers add. The logged value is "
        "the layer mean.",
    ),
    RouterConvention(
        "megatron_unscaled",
        token_count="layer_tokens",
        layer_divisor="none",
        sums_micro_batches=True,
        cited="NVIDIA/Megatron-LM, megatron/core/transformer/moe/moe_utils.py: MoEAuxLossAutoScaler",
        note="Megatron's side-channel scaler left at its default of 1 while the main loss is averaged over "
        "micro-batches: set_loss_scale was not called.",
    ),
    _layer_sum(
        "mesh_tf",
        "tensorflow/mesh, mesh_tensorflow/transformer/moe.py (the ST-MoE code)",
        "Each layer's token mean is added to the extra losses.",
    ),
    _layer_sum("st_moe_pytorch", "lucidrains/st-moe-pytorch, st_moe_pytorch/st_moe_pytorch.py"),
    _layer_sum("levanter", "stanford-crfm/levanter, src/levanter/models/mixtral.py"),
    _layer_sum(
        "xtuner",
        "InternLM/xtuner, xtuner/v1/loss/moe_loss.py: z_loss",
        "Token mean per layer, summed over layers, divided by the number of micro-batches.",
    ),
    _layer_sum("kempnerforge", "KempnerInstitute/KempnerForge, kempnerforge/model/moe.py"),
    RouterConvention(
        "olmo_core",
        token_count="valid_tokens",
        layer_divisor="model_layers",
        cited="allenai/OLMo-core, src/olmo_core/nn/moe/router.py: MoERouter.forward, loss.py: router_z_loss",
        note="Sums every token, divides by the tokens with a label and by the depth of the whole model: "
        "s_rel = (L / n_layers)·(N_all / N_valid). Pass no mask, and `valid_tokens` and `model_layers`.",
    ),
    RouterConvention(
        "olmoe",
        token_count="layer_tokens",
        layer_divisor="moe_layers",
        top_k_power=-1,
        cited="the megablocks fork OLMoE was trained with (Muennighoff/megablocks), router Z-loss",
        note="Divided by layers, tokens and k: the active-route mean. It takes log(Σ exp) naively.",
    ),
    _layer_mean(
        "flaxformer",
        "google/flaxformer, flaxformer/architectures/moe/routing.py; google-research/t5x, t5x/contrib/moe/models.py: "
        "_extract_diversity_metrics, _expert_losses",
        "Token mean, then averaged over MoE layers.",
    ),
    _layer_mean("openmoe", "hpcaitech/ColossalAI, OpenMoE application"),
    _layer_mean("marin_grug", "marin-community/marin, grug MoE"),
    _layer_mean(
        "megablocks_mean",
        "databricks/megablocks, megablocks/layers/router.py: batched_router_zloss",
        "Returns one value per router; here the caller averages them.",
    ),
    _layer_sum(
        "megablocks_sum",
        "databricks/megablocks, megablocks/layers/router.py: batched_router_zloss",
        "Returns one value per router; here the caller adds them.",
    ),
    RouterConvention(
        "lm_engine",
        token_count="layer_tokens",
        layer_divisor="none",
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
    RouterConvention(
        "hf_nllb_moe",
        token_count="layer_tokens",
        layer_divisor="none",
        factor=Fraction(0),
        cited="huggingface/transformers, models/nllb_moe/configuration_nllb_moe.py: router_z_loss_coef",
        note="The configuration has a coefficient; the loss never uses it.",
    ),
)
_BY_NAME = {convention.name: convention for convention in _CATALOG}
_ALIASES = {"st_moe": "mesh_tf", "t5x": "flaxformer", "megatron_lm": "megatron", "switch": "hf_switch"}


def router_conventions() -> tuple[RouterConvention, ...]:
    """Every named convention, the paper's three first."""
    return _CATALOG


def find_convention(convention: str | RouterConvention) -> RouterConvention:
    """The convention of that name (hyphens and underscores are one); an unknown name suggests the nearest.

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


# <<< zloss.router.conventions
@dataclass(frozen=True)
class RouterScale:
    """The reduction weight of a convention. Scaling: per routing decision (t, l).

    Where layers differ (two stacks of unequal depth) the scalars are means over decisions and `uniform` is False.
    """

    convention: RouterConvention
    coef: float | None
    alpha: float
    """α."""
    absolute: float
    """λ_R·α, what multiplies (log Z − c)² of one decision."""
    relative: float
    """s_rel = N_tl·α, 1 for the token-layer mean."""
    relative_per_layer: tuple[float, ...]
    uniform: bool


def exact_scales(
    convention: RouterConvention, *, tokens: Sequence[int], top_k: int, context: RouterContext
) -> tuple[tuple[Fraction, ...], int]:
    """α_l of every layer as exact fractions, and N_tl = Σ_l N_l, from the counted tokens N_l of every layer."""
    total = sum(tokens)
    alphas = []
    for numerator, count in zip(convention.numerators(len(tokens), top_k, context), tokens, strict=True):
        if convention.token_count == "decisions":
            denominator = total
        elif convention.token_count == "valid_tokens" and context.valid_tokens is not None:
            denominator = context.valid_tokens
        else:
            denominator = count
        alphas.append(numerator / denominator)
    return tuple(alphas), total


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
    check_count("layers", layers)
    check_count("top_k", top_k)
    context = RouterContext(model_layers, encoder_layers, valid_tokens, micro_batches)
    _check_tokens(tokens, valid_tokens)
    found = find_convention(convention)
    alphas, total = exact_scales(found, tokens=(tokens,) * layers, top_k=top_k, context=context)
    mean = sum(alphas, Fraction(0)) / layers
    return RouterScale(
        convention=found,
        coef=coef,
        alpha=float(mean),
        # One rounding of the exact product: a matched coefficient then gives the same bits.
        absolute=float(exact_coefficient(coef) * mean),
        relative=float(total * mean),
        relative_per_layer=tuple(float(total * alpha) for alpha in alphas),
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

    The target c_R is no part of a scale. Most codebases have 0: pass it to `router_loss` with their coefficient, because
    `target=None` is log E.

    `tokens` matters only together with `valid_tokens`, which are among them. Where a convention weighs its stacks
    unequally, scales are means over decisions.

    >>> match_coefficient(1e-3, "megatron", "olmoe", layers=16, top_k=8)
    0.128
    """
    check_count("layers", layers)
    check_count("top_k", top_k)
    context = RouterContext(model_layers, encoder_layers, valid_tokens, micro_batches)
    _check_tokens(tokens, valid_tokens)
    exact, counts, sums = exact_coefficient(coef), (tokens,) * layers, []
    for convention in (source, target):
        alphas, _ = exact_scales(find_convention(convention), tokens=counts, top_k=top_k, context=context)
        sums.append(sum(alphas, Fraction(0)))
    if sums[1] == 0:
        if sums[0] * exact == 0:
            return 0.0
        raise CoefficientError(
            f"no coefficient under {find_convention(target).name!r} equals {coef!r} under "
            f"{find_convention(source).name!r}: that convention applies no router Z-loss at all."
        )
    return float(exact * sums[0] / sums[1])


def _check_tokens(tokens: int, valid_tokens: int | None) -> None:
    check_count("tokens", tokens)
    if valid_tokens is not None and valid_tokens > tokens:
        raise InputError(
            f"`valid_tokens` is expected to be at most `tokens`, {tokens}, but got {valid_tokens}: it counts the tokens of the "
            "batch that have a label, so pass all tokens of the batch as `tokens`."
        )


# <<< zloss.router.conventions
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

    A `source` of one's own stands behind those of the catalog.
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
    meant = find_convention(source)
    scales = []
    catalog = router_conventions()
    for convention in catalog if meant in catalog else (*catalog, meant):
        scale = router_scale(convention, coef=coef, **context)
        scales.append(
            ConventionScale(
                convention=convention.name,
                relative=scale.relative,
                absolute=scale.absolute,
                uniform=scale.uniform,
                equal_coef=None if scale.relative == 0 else match_coefficient(coef, meant, convention, **context),
                cited=convention.cited,
            )
        )
    return RouterScaleTable(coef=coef, source=meant.name, conventions=tuple(scales), **context)
