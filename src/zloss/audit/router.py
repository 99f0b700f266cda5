"""Router audits: what the routers of a model do on a corpus, which scale its own router Z-loss applies, and the projection audit
of the paper (tab:router)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from zloss.errors import DtypeError, InputError, MissingInputError, ShapeError, first_line
from zloss.measure.gradients import CE, gradient_seeds
from zloss.measure.measurement import Measurement
from zloss.measure.tokens import Array, mean, quantile
from zloss.models.checkpoint import Checkpoint
from zloss.models.output_head import all_parameters_on, hidden_states
from zloss.models.routers import ModelRouters, find_routers
from zloss.results.router import CoefOrigin, MeasuredScale, RouterFindings, RouterLayer, RouterTail
from zloss.results.run_config import PAPER_CONVENTIONS
from zloss.router.conventions import RouterConvention
from zloss.router.loss import LayerTensors, RouterLoss, router_loss
from zloss.router.measure import measure_router_scale
from zloss.tensors import at_least_fp32
from zloss.text import Blocks

SIGMOID_REASON = (
    "the router scores each expert with a sigmoid: there is no softmax normalizer, so log Z_R, its entropy and a "
    "router Z-loss are not defined here"
)
OTHER_REASON = (
    "the router scores each expert by a function of its own logit that is not a softmax: there is no softmax normalizer, so "
    "log Z_R, its entropy and a router Z-loss are not defined here"
)
UNKNOWN_REASON = (
    "neither the configuration nor the router's code shows whether it is a softmax or a sigmoid: log Z_R is computed "
    "from the logits, and may not be a normalizer that the model uses"
)
HYPOTHETICAL_COEF = 1e-3
"""λ_R if neither the caller nor the model's configuration states one."""
COEF_KEYS = (
    "router_z_loss_coef",
    "router_z_loss_coeff",
    "router_z_loss_weight",
    "moe_router_z_loss_coef",
    "moe_z_loss_coef",
    "moe_z_loss_coeff",
    "moe_z_loss_weight",
    "moe_zloss_weight",
)
"""Keys of λ_R in configurations: Switch and NLLB-MoE, Megatron's export, the OLMoE fork, and variants."""
COEF_ATTRIBUTE = "router_z_loss_coef"
"""λ_R of a transformers model whose loss includes a router Z-loss."""
NO_OWN_LOSS_REASON = "the model's own loss has no router Z-loss to measure"


def audit_router(
    model: nn.Module,
    batches: Iterable[Mapping[str, Tensor]],
    *,
    coef: float | None = None,
    convention: str | RouterConvention = "token_layer_mean",
    target: float | None = None,
    top_k: int | None = None,
    measure_own: bool = True,
) -> RouterFindings:
    """Run `model` on `batches` (its keyword inputs) and describe its routers.

    `coef` is the λ_R for which the injected correction is reported: by default that of the model's configuration, and if it
    has none, a hypothetical 1e-3, which the findings say. An `attention_mask` in a batch excludes padding. If the model
    has its own router Z-loss and the first batch has labels, what it applies is measured from gradients on that batch.
    """
    if isinstance(batches, (Mapping, Tensor)) or not isinstance(batches, Iterable):
        got = "one batch: pass `[batch]`" if isinstance(batches, Mapping) else type(batches).__name__
        raise DtypeError(f"`batches` is expected to be a list of batches (keyword inputs of the model), but got {got}.")
    routers = find_routers(model)
    k = routers.require_top_k(top_k)
    coef, origin, key, reason = _stated_coefficient(model, coef)
    first: dict[str, Tensor] | None = None
    out: RouterLoss | None = None  # of the first batch
    lost = None
    experts = decisions = nonfinite = 0
    load_LE = torch.zeros(())
    parts: dict[str, list[Array]] = {"log_z": [], "entropy": [], "layer": [], "correction": []}
    for place, batch in enumerate(batches):
        if not isinstance(batch, Mapping):
            raise DtypeError(
                f"`batches[{place}]` is expected to be a mapping from names to inputs of the model, but got "
                f"{type(batch).__name__}."
            )
        first = dict(batch) if first is None else first
        try:
            with torch.no_grad(), routers.capture() as layers:
                model(**batch)
        except ShapeError as error:  # a router whose logits are not [tokens, experts]
            lost = first_line(error)
            break
        experts = layers[0].shape[1]
        lost = None if routers.without_softmax else routers.lost_normalizer(layers)
        if routers.without_softmax or lost is not None:
            break
        weights = [router.weight(experts) for router in routers.modules]
        known = [weight for weight in weights if weight is not None]
        found = router_loss(
            layers,
            coef=coef,
            convention=convention,
            top_k=k,
            target=target,
            mask=routers.masks(batch, [layer.shape[0] for layer in layers]),
            weight=known if len(known) == len(weights) else None,
            context=routers.context,
        )
        out = found if out is None else out
        decisions, nonfinite = decisions + found.decisions, nonfinite + found.nonfinite
        load_LE = load_LE + found.load.double().cpu()
        stats = found.stats
        per_decision = {"log_z": stats.log_z, "entropy": stats.entropy_N, "layer": stats.decisions.layer_N}
        for name, values_N in per_decision.items():
            parts[name].append(values_N[stats.valid].cpu().numpy())
        if found.correction_norm is not None:
            parts["correction"].append(found.correction_norm.reshape(1).cpu().numpy())
    if first is None:
        raise InputError("`batches` is empty: nothing to audit.")
    applied, not_measured = _applied_scale(model, first) if measure_own else (None, "not requested")
    scoring = {"sigmoid": SIGMOID_REASON, "other": OTHER_REASON, "unknown": UNKNOWN_REASON}.get(routers.scoring)
    without_weight = out is not None and not parts["correction"]
    no_norm = "no router weight [E, D] was found, so the correction norm is unknown" if without_weight else None
    columns = {name: np.concatenate(arrays) if arrays else np.empty(0) for name, arrays in parts.items()}
    findings = RouterFindings(
        scoring=routers.scoring,
        softmax_normalizer=None if routers.scoring == "unknown" else not routers.without_softmax,
        layers=len(routers.modules),
        model_layers=routers.model_layers,
        experts=experts,
        top_k=k,
        decisions=decisions,
        nonfinite=nonfinite,
        coef=coef,
        convention=convention if isinstance(convention, str) else convention.name,
        target=None,
        absolute=None,
        relative=None,
        log_z=None,
        violation=None,
        entropy=mean(columns["entropy"]),
        load_cv=None,
        correction_norm=mean(columns["correction"]),
        per_layer=(),
        applied=applied,
        reasons=tuple(why for why in (scoring, reason, lost, not_measured, no_norm) if why),
        coef_origin=origin,
        coef_key=key,
    )
    if out is None:
        return findings
    load_cv_L = load_LE.std(dim=1, correction=0) / load_LE.mean(dim=1)
    return replace(
        findings,
        convention=out.convention.name,
        target=out.target,
        absolute=out.absolute,
        relative=out.relative,
        log_z=_tail(columns["log_z"]),
        violation=_tail(np.abs(columns["log_z"] - out.target)),
        load_cv=float(load_cv_L.nanmean()),
        per_layer=_layers([router.name for router in routers.modules], columns, load_cv_L.tolist()),
    )


def _layers(names: Sequence[str], columns: Mapping[str, Array], load_cvs: Sequence[float]) -> tuple[RouterLayer, ...]:
    """The layers with at least one finite decision."""
    found = []
    for place, (name, cv) in enumerate(zip(names, load_cvs, strict=True)):
        inside = columns["layer"] == place
        log_z, entropy = mean(columns["log_z"][inside]), mean(columns["entropy"][inside])
        if log_z is not None and entropy is not None:
            found.append(RouterLayer(name, log_z, entropy, cv))
    return tuple(found)


def _tail(values: Array) -> RouterTail:
    return RouterTail(mean(values), *(quantile(values, q) for q in (0.5, 0.99, 0.999)))


def _stated_coefficient(model: nn.Module, given: float | None) -> tuple[float, CoefOrigin, str | None, str | None]:
    """(λ_R, where it was stated, its key in the configuration, why that one does not count)."""
    if given is not None:
        return given, "given", None, None
    for key in COEF_KEYS:
        value = getattr(getattr(model, "config", None), key, None)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        if value > 0:
            return float(value), "configuration", key, None
        off = f"the configuration switches the router Z-loss off ({key} = {value:g})"
        return HYPOTHETICAL_COEF, "hypothetical", None, off
    return HYPOTHETICAL_COEF, "hypothetical", None, None


def _applied_scale(model: nn.Module, batch: dict[str, Tensor]) -> tuple[MeasuredScale | None, str | None]:
    """What the model's own router Z-loss applies, or why it cannot be measured."""
    if not hasattr(model, COEF_ATTRIBUTE):
        return None, NO_OWN_LOSS_REASON
    if "labels" not in batch:
        return None, "the batches have no labels, so the model's own loss cannot be measured"
    # A coefficient of 0 in the configuration still has a scale: measure it at 1.
    try:
        return measure_model_router_scale(model, batch, coef=getattr(model, COEF_ATTRIBUTE) or 1.0), None
    except InputError as error:  # such as gradients that are NaN
        return None, first_line(error)


def measure_model_router_scale(
    model: nn.Module,
    batch: dict[str, Tensor],
    *,
    coef: float = 1.0,
    attribute: str = COEF_ATTRIBUTE,
    mask: LayerTensors | None = None,
    target: float | Literal["fit"] = "fit",
    seed: int = 0,
) -> MeasuredScale:
    """What a Hugging Face model's own router Z-loss applies: its coefficient is set to `coef` and to 0 in turn.

    `batch` holds the model's inputs with labels. The coefficient is the model's attribute `attribute`, restored afterwards.
    """
    routers = find_routers(model)
    if not hasattr(model, attribute):
        raise InputError(f"{type(model).__name__} has no attribute {attribute!r}: its loss includes no router Z-loss.")
    parameters = [
        p for router in routers.modules for p in router.module.parameters() if p.requires_grad and p.ndim == 2
    ]

    def loss(value: float) -> Tensor:
        before = getattr(model, attribute)
        setattr(model, attribute, value)
        try:
            found = model(**batch, output_router_logits=True).loss
        finally:
            setattr(model, attribute, before)
        if not isinstance(found, Tensor):
            raise MissingInputError("the model returned no loss: `batch` needs labels.")
        return found

    def logits() -> list[Tensor]:
        with routers.capture() as collected:
            model(**batch)
        return collected

    return measure_router_scale(
        lambda: loss(coef), lambda: loss(0.0), logits, parameters, coef=coef, mask=mask, target=target, seed=seed
    )


def router_gradient_share(
    checkpoint: Checkpoint,
    measurement: Measurement,
    routers: ModelRouters,
    blocks: Blocks,
    *,
    coef: float,
    convention: str | RouterConvention,
) -> float | None:
    """‖g_RZ‖/‖g_CE‖ over the weights of all routers, on the first block; None for routers without a softmax or a gradient.

    CE is the mean over the predictions of the block, and the router Z-loss is reduced as `convention` says.
    """
    if routers.without_softmax:
        return None
    head = measurement.head
    ids_BN, target_T = blocks.inputs(0, 1).to(head.weight_VD.device), blocks.targets(0, 1).reshape(-1)
    with torch.enable_grad(), all_parameters_on(checkpoint.model):
        with routers.capture() as layers, hidden_states(checkpoint, head) as hidden_of:
            hidden_TD = blocks.counted(hidden_of(ids_BN)).flatten(0, 1)
        if routers.lost_normalizer(layers) is not None:
            return None
        problem = measurement.problem(hidden_TD.detach(), target_T.to(hidden_TD.device))
        _, seeds_TD, _ = gradient_seeds(measurement, problem, {})
        penalty = router_loss(
            layers, coef=coef, convention=convention, top_k=routers.require_top_k(None), context=routers.context
        ).loss
        weights = [p for router in routers.modules for p in router.module.parameters() if p.ndim == 2]
        of_ce = torch.autograd.grad(hidden_TD, weights, seeds_TD[CE], retain_graph=True, allow_unused=True)
        of_z = torch.autograd.grad(penalty, weights, allow_unused=True)
    ce, z = (
        math.sqrt(sum(float(g.double().square().sum()) for g in grads if g is not None)) for grads in (of_ce, of_z)
    )
    return z / ce if ce > 0 else None


@dataclass(frozen=True)
class ProjectedCorrection:
    """What one convention injects into the hidden states at one k: a row of tab:router."""

    top_k: int
    convention: str
    relative: float
    """s_rel: the coefficient of a decision in units of that of the token-layer mean."""
    correction_norm: float
    """Mean over decisions of ‖λα·2(log Z − c)·W_Rᵀp‖₂, α included."""


def router_projection(
    hidden: Tensor,
    *,
    experts: int = 16,
    top_ks: Sequence[int] = (1, 2, 4),
    conventions: Sequence[str | RouterConvention] = PAPER_CONVENTIONS,
    coef: float = 1e-3,
    target: float | None = None,
    init_std: float = 0.02,
    seed: int = 0,
) -> tuple[ProjectedCorrection, ...]:
    """The projection audit of the paper (tab:router): a seeded linear router on `hidden` [T, D], for each top-k and convention.

    The hidden states are the same for every line and only the reduction changes, so within one k the norms of the token-layer
    mean, the active-route mean and the active-route sum have the ratio 1 : 1/k : k. This ratio does not depend on the router's
    scale, c_R, the hidden states or the number of decisions.

    The router of each k has its own seed, `seed + k`, because the paper's routers differ from k to k; norms are comparable
    only within one k. `target` is c_R; None is log E. Scaling: α = s_rel / T, so the norms fall as 1/T.
    """
    if hidden.ndim != 2:
        raise ShapeError(
            f"`hidden` is expected to be [T, D], but got {list(hidden.shape)}: flatten batch and sequence."
        )
    h_TD = at_least_fp32(hidden.detach())
    found = []
    for top_k in top_ks:
        w_ED = seeded_router(experts, h_TD.shape[1], seed=seed + top_k, init_std=init_std, dtype=h_TD.dtype)
        w_ED = w_ED.to(h_TD.device)
        with torch.autocast(h_TD.device.type, enabled=False):
            logits_TE = h_TD @ w_ED.T
        for convention in conventions:
            out = router_loss(logits_TE, coef=coef, convention=convention, top_k=top_k, target=target, weight=w_ED)
            assert out.correction_norm is not None  # the weight was given
            found.append(ProjectedCorrection(top_k, out.convention.name, out.relative, float(out.correction_norm)))
    return tuple(found)


def seeded_router(experts: int, width: int, *, seed: int, init_std: float, dtype: torch.dtype) -> Tensor:
    """W_R [E, D] with N(0, init_std²) entries, drawn on the CPU in fp64: the same router on every device and dtype."""
    generator = torch.Generator().manual_seed(seed)
    return (init_std * torch.randn(experts, width, generator=generator, dtype=torch.float64)).to(dtype)
