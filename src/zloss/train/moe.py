"""Training runs of a mixture of experts: the model, its routing, the router losses and their telemetry.

Axes: T counted tokens, E experts, K active routes, L layers; a list of tensors has one entry per layer.
Scaling: N_tl decisions (tokens times layers) of one optimizer step; λ_R as written in the configuration.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from zloss.errors import InputError, UnknownNameError
from zloss.models.routers import RouterModule, find_routers
from zloss.results.run_config import PAPER_CONVENTIONS, REFERENCE, MoeRun
from zloss.results.run_metrics import RouterLayers, RoutingMetrics
from zloss.router.conventions import check_count, match_coefficient, router_scale
from zloss.router.loss import RouterLoss, router_loss
from zloss.statistics import exact_quantile
from zloss.tensors import at_least_fp32

T = TypeVar("T")
TAILS = {"router_log_z_p99": 0.99, "router_log_z_p999": 0.999, "router_log_z_max": 1.0}


def build_moe(moe: MoeRun, *, vocab: int, positions: int = 256, seed: int) -> Any:
    """The paper's controlled model as a small OLMoE: four blocks, width 256, eight experts, tied embeddings.

    The paper does not state the expert width, the tokenizer or the positional encoding; ours are 512, the caller's
    vocabulary and OLMoE's rotary embedding. About 16 M parameters at V = 8192. `positions` is the longest block. The
    model's load-balancing loss is on. The weights are drawn from `seed`; the global random state stays as it was.
    """
    from transformers import OlmoeConfig, OlmoeForCausalLM

    for name, value in (("vocab", vocab), ("positions", positions)):
        check_count(name, value)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model_type: Any = OlmoeForCausalLM
        return model_type(
            OlmoeConfig(
                vocab_size=vocab,
                hidden_size=moe.width,
                intermediate_size=moe.expert_width,
                num_hidden_layers=moe.layers,
                num_attention_heads=moe.heads,
                num_key_value_heads=moe.heads,
                num_experts=moe.experts,
                num_experts_per_tok=moe.top_k,
                norm_topk_prob=True,
                max_position_embeddings=positions,
                tie_word_embeddings=True,
                output_router_logits=True,
                router_aux_loss_coef=moe.load_balance,
                pad_token_id=None,
                bos_token_id=None,
                eos_token_id=None,
                use_cache=False,
            )
        )


def applied_coef(moe: MoeRun) -> float:
    """λ_R as the loss uses it: as written, or converted so that a decision gets what the token-layer mean gives it."""
    if moe.convention is None or not moe.matched:
        return moe.router_coef
    return match_coefficient(moe.router_coef, REFERENCE, moe.convention, layers=moe.layers, top_k=moe.top_k)


def absolute_coef(moe: MoeRun, tokens: int) -> float:
    """λ_R·α of one decision in a step of `tokens` tokens."""
    if moe.convention is None:
        return 0.0
    coef = applied_coef(moe)
    return router_scale(moe.convention, layers=moe.layers, tokens=tokens, top_k=moe.top_k, coef=coef).absolute


def relative_scale(moe: MoeRun) -> float:
    """s_rel: the coefficient of a decision in units of λ_R/N_tl as written; 0 when off, 1 for a matched variant."""
    if not moe.router_coef:
        return 0.0
    return absolute_coef(moe, 1) / absolute_coef(replace(moe, router=REFERENCE), 1)


@dataclass(frozen=True)
class Routing:
    """What the routers decided in one forward pass: their logits, and the routes that the model took."""

    logits: tuple[Tensor, ...]
    """[T, E] of every layer, before the softmax, with their autograd graph."""
    chosen: tuple[Tensor, ...]
    """[T, K] of every layer: the experts each token was sent to."""

    @property
    def tokens(self) -> int:
        """T."""
        return self.logits[0].shape[0]

    def dropped(self, top_k: int) -> float:
        """Share of the k routes of every decision that the model did not take."""
        return 1 - sum(chosen_TK.numel() for chosen_TK in self.chosen) / (top_k * self.tokens * len(self.logits))


class RoutingTap:
    """Records what the routers of a model decide; `counted` drops the positions whose prediction is not counted."""

    def __init__(self, model: nn.Module, counted: Callable[[Tensor], Tensor]) -> None:
        self._routers, self._counted = find_routers(model).modules, counted

    def weights(self, experts: int) -> list[Tensor]:
        """W_R [E, D] of every layer."""
        found = [router.weight(experts) for router in self._routers]
        if any(weight is None for weight in found):
            raise InputError("a router of this model has no single [E, D] weight: its correction norm is not defined.")
        return [weight for weight in found if weight is not None]

    def observe(self, forward: Callable[[], T], blocks: int) -> tuple[T, Routing]:
        """What `forward` returns, and the routing of its one forward pass over this many blocks."""
        caught: list[tuple[Tensor, Tensor]] = []

        def keep(router: RouterModule) -> Any:
            return lambda _module, inputs, output: caught.append(
                (router.logits(inputs, output), _indices(router, output))
            )

        hooks = [router.module.register_forward_hook(keep(router)) for router in self._routers]
        try:
            returned = forward()
        finally:
            for hook in hooks:
                hook.remove()

        def counted(tensor: Tensor) -> Tensor:
            return self._counted(tensor.view(blocks, -1, tensor.shape[-1])).flatten(0, 1)

        logits, chosen = zip(*caught, strict=True)
        return returned, Routing(tuple(map(counted, logits)), tuple(map(counted, chosen)))


def _indices(router: RouterModule, output: Any) -> Tensor:
    """[T, K] of one layer: the one part of the router's output that holds whole numbers."""
    parts = [part for part in output if isinstance(part, Tensor)] if isinstance(output, tuple) else []
    found = [part for part in parts if not part.is_floating_point() and part.dtype != torch.bool]
    if len(found) != 1:
        raise InputError(f"router {router.name!r} does not return the experts it chose: its routes cannot be counted.")
    return found[0]


@dataclass(frozen=True)
class RouterTerms:
    """The routers' part of one forward pass: detached, on the CPU, and small enough to be sent to other ranks."""

    load_balance: Tensor
    """The model's balancing term of this pass, without its coefficient: about k at balance."""
    load_balance_term: Tensor
    """What it adds to the step's loss."""
    router_z: Tensor
    """What the router Z-loss adds to the step's loss, reduced as the paper writes it."""
    log_z: Tensor
    """log Z_R of the decisions that count, [N]."""
    entropy: Tensor
    """Mean over the decisions."""
    entropy_per_layer: Tensor
    load: Tensor
    """Routes per expert, [L, E]."""
    correction_norm: Tensor | None
    over_capacity: Tensor | None
    """Share of routes beyond the capacity; None without one."""
    dropped: float
    """Share of routes that the model did not take."""

    @classmethod
    def of(
        cls, record: RouterLoss, balance: Tensor, balance_term: Tensor, router_z: Tensor, dropped: float
    ) -> RouterTerms:
        return cls(
            load_balance=balance.detach().cpu(),
            load_balance_term=balance_term.detach().cpu(),
            router_z=router_z.detach().cpu(),
            log_z=record.stats.log_z[record.stats.valid].cpu(),
            entropy=record.entropy.cpu(),
            entropy_per_layer=record.stats.entropy_per_layer.double().cpu(),
            load=record.load.double().cpu(),
            correction_norm=None if record.correction_norm is None else record.correction_norm.cpu(),
            over_capacity=None if record.dropped is None else record.dropped.cpu(),
            dropped=dropped,
        )


def router_terms(
    routing: Routing, moe: MoeRun, step_tokens: int, weights: list[Tensor]
) -> tuple[Tensor, Tensor, RouterTerms]:
    """(load-balancing term, router Z-loss, both and the routing detached) of a pass in a step of `step_tokens` tokens."""
    balance = load_balancing(routing, moe)
    balance_term = moe.load_balance * (routing.tokens / step_tokens) * balance
    router_z = router_z_loss(routing, moe, step_tokens)
    record = routing_record(routing, moe, step_tokens, weights)
    terms = RouterTerms.of(record, balance, balance_term, router_z, routing.dropped(moe.top_k))
    return balance_term, router_z, terms


def load_balancing(routing: Routing, moe: MoeRun) -> Tensor:
    """The balancing term of the model class (OLMoE) on the counted tokens, without its coefficient.

    E Σ_e f_e P_e with f_e the routes per token that expert e received: about k at balance, not 1. It is not linear in the
    batch, so every micro-batch has a separate one, weighted by its share of the step's tokens.
    """
    from transformers.models.olmoe.modeling_olmoe import load_balancing_loss_func

    balancing: Any = load_balancing_loss_func
    found: Tensor = balancing(tuple(logits_TE.float() for logits_TE in routing.logits), moe.experts, moe.top_k)
    return found


def router_z_loss(routing: Routing, moe: MoeRun, step_tokens: int) -> Tensor:
    """The router Z-loss of the run's variant; exactly 0, without a gradient, when it is off."""
    coef = applied_coef(moe)
    if moe.convention is None or not coef:
        return torch.zeros((), device=routing.logits[0].device)
    return reduced_router_loss(
        routing, convention=moe.convention, coef=coef, target=_target(moe), step_tokens=step_tokens
    )


def reduced_router_loss(routing: Routing, *, convention: str, coef: float, target: float, step_tokens: int) -> Tensor:
    """λ_R times the reduced violations of one forward pass, as its part of a step of `step_tokens` tokens.

        token-layer mean     λ (1/N_tl) Σ φ                    prop:router_effective_coefficient
        active-route mean    λ (1/R) Σ φ, R active routes      cor:router_topk_active_mean
        active-route sum     λ (1/N_tl) Σ over routes of φ     cor:router_topk_active_sum

    φ = (log Z_R − c_R)² of one decision. The reductions are computed as the paper writes them, without α, k or s_rel: that
    matched coefficients train alike is then measured, not assumed. `zloss.router_loss` computes the same losses with a
    factor α, which is faster; `tests/train/test_moe.py` compares the two.

    Scaling: denominators are those of the whole optimizer step, so that the parts of its micro-batches add up.
    """
    violations = [(torch.logsumexp(at_least_fp32(logits_TE), dim=1) - target).square() for logits_TE in routing.logits]
    # Active routes of every layer, one entry each: the token it belongs to.
    owners = [
        torch.arange(len(chosen_TK), device=chosen_TK.device).repeat_interleave(chosen_TK.shape[1])
        for chosen_TK in routing.chosen
    ]
    passes = step_tokens / routing.tokens
    decisions = passes * sum(map(len, violations))
    routes = passes * sum(map(len, owners))
    if convention == "token_layer_mean":
        return coef * (_total(violations) / decisions)
    if convention == "active_route_mean":
        return coef * (_total(violations) / routes)
    if convention == "active_route_sum":
        replicas = [violation_T[owner_R] for violation_T, owner_R in zip(violations, owners, strict=True)]
        return coef * (_total(replicas) / decisions)
    raise UnknownNameError("router convention", convention, PAPER_CONVENTIONS)


def _total(parts: list[Tensor]) -> Tensor:
    return torch.stack([part.sum() for part in parts]).sum()


@torch.no_grad()
def routing_record(routing: Routing, moe: MoeRun, step_tokens: int, weights: list[Tensor]) -> RouterLoss:
    """Entropy, load, log Z and what the loss applies to each decision."""
    # Routes that an expert takes of this pass before further ones count as beyond its capacity.
    fair = routing.tokens * moe.top_k / moe.experts
    return router_loss(
        [logits_TE.detach() for logits_TE in routing.logits],
        coef=applied_coef(moe),
        convention=moe.convention or REFERENCE,
        top_k=moe.top_k,
        target=_target(moe),
        weight=weights,
        capacity=None if moe.capacity_factor is None else max(1, math.ceil(moe.capacity_factor * fair)),
        normalizer=step_tokens,
    )


def _target(moe: MoeRun) -> float:
    """c_R: as set, or log E."""
    return math.log(moe.experts) if moe.router_target is None else moe.router_target


@torch.no_grad()
def router_numbers(passes: Sequence[RouterTerms], moe: MoeRun, step_tokens: int) -> dict[str, float | None]:
    """Telemetry of the routers over some forward passes.

    Entropy in nats, mean over tokens and layers. Load CV: population standard deviation over mean of the routes per expert,
    mean over layers. The correction norm is the mean ‖λα·2(log Z − c)·W_Rᵀp‖₂ over decisions. s_rel is measured: the router
    Z-loss that was added, over λ_R times the token-layer mean of the same violations. `dropped_routes` counts the routes
    that the model did not take, none with OLMoE, which has no capacity; `over_capacity` is the share of routes that a
    capacity factor would drop.
    """
    log_z = torch.cat([part.log_z for part in passes])
    weight_P = torch.tensor([float(len(part.log_z)) for part in passes], dtype=torch.float64)

    def mean(values: Sequence[Tensor | None]) -> Tensor:
        known = torch.stack([value.double() for value in values if value is not None])
        return (weight_P * known).sum() / weight_P.sum()

    found: dict[str, Tensor] = {
        "entropy": mean([part.entropy for part in passes]),
        "load_cv": load_cv(sum_of_loads(passes)).mean(),
        **{name: exact_quantile(log_z, q) for name, q in TAILS.items()},
        "router_correction_norm": mean([part.correction_norm for part in passes]),
        "load_balance": mean([part.load_balance for part in passes]),
        "load_balance_term": torch.stack([part.load_balance_term for part in passes]).sum(),
        "router_z": torch.stack([part.router_z for part in passes]).sum(),
        "violation": mean([(part.log_z - _target(moe)).square().mean() for part in passes]),
        "dropped_routes": mean([weight_P.new_tensor(part.dropped) for part in passes]),
    }
    if moe.capacity_factor is not None:
        found["over_capacity"] = mean([part.over_capacity for part in passes])
    values = torch.stack([value.double() for value in found.values()]).tolist()
    numbers: dict[str, float | None] = dict(zip(found, (v if math.isfinite(v) else None for v in values), strict=True))
    router_z, violation, coef = numbers["router_z"], numbers.pop("violation"), moe.router_coef
    measured = router_z / (coef * violation) if router_z is not None and violation and coef else None
    return numbers | {"router_absolute": absolute_coef(moe, step_tokens), "s_rel": measured if coef else 0.0}


def sum_of_loads(passes: Sequence[RouterTerms]) -> Tensor:
    """Routes [L, E] that every expert received."""
    return torch.stack([part.load for part in passes]).sum(dim=0)


def load_cv(load_LE: Tensor) -> Tensor:
    """Coefficient of variation of each layer's load, [L]."""
    return load_LE.std(dim=1, correction=0) / load_LE.mean(dim=1)


def routing_metrics(passes: Sequence[RouterTerms], moe: MoeRun, step_tokens: int) -> RoutingMetrics:
    """Routing over forward passes without training; `step_tokens` are the tokens of a training step."""
    numbers, load_LE = router_numbers(passes, moe, step_tokens), sum_of_loads(passes)
    decisions_P = torch.tensor([float(len(part.log_z)) for part in passes], dtype=torch.float64)
    entropy_PL = torch.stack([part.entropy_per_layer for part in passes])
    entropy_L = (decisions_P @ entropy_PL) / decisions_P.sum()
    log_z = torch.cat([part.log_z for part in passes])
    finite = log_z[log_z.isfinite()]
    numbers |= {name: float(exact_quantile(finite, q)) if len(finite) else None for name, q in TAILS.items()}
    numbers["entropy"] = float(entropy_L.mean())
    # λ_R·s_rel times the mean violation: per decision, whatever the tokens of a training step.
    violation = float((log_z - _target(moe)).double().square().mean())
    numbers["router_z"] = relative_scale(moe) * moe.router_coef * violation
    found: dict[str, Any] = {entry.name: numbers.get(entry.name) for entry in fields(RoutingMetrics)}
    found["s_rel"] = relative_scale(moe)
    found["router"] = RouterLayers(
        variant=moe.router,
        convention=moe.convention,
        coef=moe.router_coef,
        applied_coef=applied_coef(moe),
        load_balance_coef=moe.load_balance,
        entropy_per_layer=tuple(entropy_L.tolist()),
        load_cv_per_layer=tuple(load_cv(load_LE).tolist()),
        load=tuple(tuple(load_E) for load_E in load_LE.tolist()),
        top_k=moe.top_k,
        decisions=moe.layers * step_tokens,
    )
    return RoutingMetrics(**found)
