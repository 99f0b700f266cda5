"""Router Z-loss conventions by name: the paper's three, and those of public codebases with their places.

Facts about other codebases were read from their sources in summer 2026 and may change with them; what a running model
applies is measured by `zloss.audit.router.measure`.
"""

from __future__ import annotations

from fractions import Fraction

from zloss.errors import UnknownNameError
from zloss.source.router.convention import LayerDivisor, RouterConvention, TokenCount


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
