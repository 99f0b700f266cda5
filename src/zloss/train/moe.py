"""Training runs of a mixture of experts: the model, its routing, the router losses and their telemetry.

Axes: T counted tokens, E experts, K active routes, L layers; a list of tensors has one entry per layer.
Scaling: N_tl decisions (tokens times layers) of one optimizer step; λ_R as written in the configuration.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from zloss.errors import InputError, MissingDependencyError, UnknownNameError
from zloss.jobs import Job
from zloss.measure.tokens import Array, quantile
from zloss.models.output_head import HiddenStates
from zloss.models.routers import RouterModule, find_routers
from zloss.results.run_config import PAPER_CONVENTIONS, REFERENCE, MoeRun
from zloss.results.run_metrics import RouterLayers, RoutingMetrics
from zloss.router.conventions import check_count, match_coefficient, router_scale
from zloss.router.loss import RouterLoss, router_loss
from zloss.statistics import exact_quantile
from zloss.tensors import at_least_fp32

TAILS = {"router_log_z_p99": 0.99, "router_log_z_p999": 0.999, "router_log_z_max": 1.0}
SUMS = ("_load_LE", "_entropy_L", "_correction", "_balance", "_over", "_violation", "_dropped", "_tokens", "_log_z")
"""What `ValidationRouting` adds up over forward passes."""


def build_moe(moe: MoeRun, *, vocab: int, positions: int = 256, seed: int) -> Any:
    """The paper's controlled model as a small OLMoE: four blocks, width 256, eight experts, tied embeddings.

    The paper does not state the expert width, the tokenizer or the positional encoding; ours are 512, the caller's
    vocabulary and OLMoE's rotary embedding. About 16 M parameters at V = 8192. `positions` is the longest block. The
    model's load-balancing loss is on. The weights are drawn from `seed`; the global random state stays as it was.
    """
    try:
        from transformers import OlmoeConfig, OlmoeForCausalLM
    except ImportError as error:
        raise MissingDependencyError("transformers", "The mixture-of-experts model", "train") from error
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


def relative_scale(moe: MoeRun) -> float:
    """s_rel: the coefficient of a decision in units of λ_R/N_tl as written; 0 when off, 1 for a matched variant."""
    if moe.convention is None or not moe.router_coef:
        return 0.0
    scale = router_scale(moe.convention, layers=moe.layers, tokens=1, top_k=moe.top_k, coef=applied_coef(moe))
    reference = router_scale(REFERENCE, layers=moe.layers, tokens=1, top_k=moe.top_k, coef=moe.router_coef)
    return scale.absolute / reference.absolute


def absolute_coef(moe: MoeRun, tokens: int) -> float:
    """λ_R·α of one decision in a step of `tokens` tokens."""
    if moe.convention is None:
        return 0.0
    return router_scale(
        moe.convention, layers=moe.layers, tokens=tokens, top_k=moe.top_k, coef=applied_coef(moe)
    ).absolute


def router_target(moe: MoeRun) -> float:
    """c_R: as set, or log E."""
    return math.log(moe.experts) if moe.router_target is None else moe.router_target


def expert_capacity(moe: MoeRun, tokens: int) -> int | None:
    """Routes that an expert takes of a pass of `tokens` tokens before further ones count as beyond its capacity."""
    if moe.capacity_factor is None:
        return None
    return max(1, math.ceil(moe.capacity_factor * tokens * moe.top_k / moe.experts))


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
    """Collects the routing of forward passes; `counted` drops the positions whose prediction is not counted."""

    def __init__(self, model: nn.Module, counted: Callable[[Tensor], Tensor]) -> None:
        self._routers, self._counted = find_routers(model), counted
        self._outputs: list[tuple[Tensor, Tensor]] = []

    def weights(self, experts: int) -> list[Tensor]:
        """W_R [E, D] of every layer."""
        found = [router.weight(experts) for router in self._routers.modules]
        if any(weight is None for weight in found):
            raise InputError("a router of this model has no single [E, D] weight: its correction norm is not defined.")
        return [weight for weight in found if weight is not None]

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Forward passes inside the block are collected."""
        hooks = [router.module.register_forward_hook(self._hook(router)) for router in self._routers.modules]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def take(self, ids_BN: Tensor) -> Routing:
        """The routing of the pass over these token ids; each pass is taken once."""
        outputs, self._outputs = self._outputs, []
        logits, chosen = zip(*outputs, strict=True)
        rows = ids_BN.shape[0]

        def counted(tensor: Tensor) -> Tensor:
            return self._counted(tensor.view(rows, -1, tensor.shape[-1])).flatten(0, 1)

        return Routing(tuple(map(counted, logits)), tuple(map(counted, chosen)))

    def _hook(self, router: RouterModule) -> Any:
        def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
            self._outputs.append((router.logits(output), _indices(router, output)))

        return keep


def _indices(router: RouterModule, output: Any) -> Tensor:
    """[T, K] of one layer: the one part of the router's output that holds whole numbers."""
    found = [
        part
        for part in (output if isinstance(output, tuple) else ())
        if isinstance(part, Tensor) and not part.is_floating_point() and part.dtype != torch.bool
    ]
    if len(found) != 1:
        raise InputError(f"router {router.name!r} does not return the experts it chose: its routes cannot be counted.")
    return found[0]


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
    violations = [_violation(logits_TE, target) for logits_TE in routing.logits]
    # Active routes of every layer, one entry each: the token it belongs to.
    owners = [_owners(chosen_TK) for chosen_TK in routing.chosen]
    passes = step_tokens / routing.tokens
    decisions = passes * sum(violation_T.numel() for violation_T in violations)
    routes = passes * sum(owner_R.numel() for owner_R in owners)
    if convention == "token_layer_mean":
        return coef * (_total(violations) / decisions)
    if convention == "active_route_mean":
        return coef * (_total(violations) / routes)
    if convention == "active_route_sum":
        replicas = [violation_T[owner_R] for violation_T, owner_R in zip(violations, owners, strict=True)]
        return coef * (_total(replicas) / decisions)
    raise UnknownNameError("router convention", convention, PAPER_CONVENTIONS)


def _violation(logits_TE: Tensor, target: float) -> Tensor:
    """φ [T] of every decision of a layer."""
    return (torch.logsumexp(at_least_fp32(logits_TE), dim=1) - target).square()


def _owners(chosen_TK: Tensor) -> Tensor:
    """The token of every active route of a layer, [T·K]."""
    tokens = torch.arange(chosen_TK.shape[0], device=chosen_TK.device)
    return tokens.unsqueeze(1).expand_as(chosen_TK).reshape(-1)


def _total(parts: list[Tensor]) -> Tensor:
    return torch.stack([part.sum() for part in parts]).sum()


@dataclass(frozen=True)
class RouterTerms:
    """The routers' part of one forward pass, detached."""

    load_balance: Tensor
    """The model's balancing term of this pass, without its coefficient: about k at balance."""
    load_balance_term: Tensor
    """What it adds to the step's loss."""
    router_z: Tensor
    """What the router Z-loss adds to the step's loss, by the reduction as it is written."""
    record: RouterLoss
    """Statistics of the decisions; its `loss` is the same router Z-loss in factor form."""
    dropped: float = 0.0
    """Share of routes that the model did not take."""


def load_balancing(routing: Routing, moe: MoeRun) -> Tensor:
    """The balancing term of the model class (OLMoE) on the counted tokens, without its coefficient.

    E Σ_e f_e P_e with f_e the routes per token that expert e received: about k at balance, not 1. It is not linear in the
    batch, so every micro-batch has a separate one, weighted by its share of the step's tokens.
    """
    try:
        from transformers.models.olmoe.modeling_olmoe import load_balancing_loss_func
    except ImportError as error:
        raise MissingDependencyError("transformers", "The mixture-of-experts model", "train") from error
    balancing: Any = load_balancing_loss_func
    found: Tensor = balancing(tuple(logits_TE.float() for logits_TE in routing.logits), moe.experts, moe.top_k)
    return found


def router_z_loss(routing: Routing, moe: MoeRun, step_tokens: int) -> Tensor:
    """The router Z-loss of the run's variant; exactly 0, without a gradient, when it is off."""
    coef = applied_coef(moe)
    if moe.convention is None or not coef:
        return torch.zeros((), device=routing.logits[0].device)
    return reduced_router_loss(
        routing,
        convention=moe.convention,
        coef=coef,
        target=router_target(moe),
        step_tokens=step_tokens,
    )


@torch.no_grad()
def routing_record(routing: Routing, moe: MoeRun, step_tokens: int, weights: list[Tensor]) -> RouterLoss:
    """Entropy, load, log Z and what the loss applies to each decision."""
    return router_loss(
        [logits_TE.detach() for logits_TE in routing.logits],
        coef=applied_coef(moe),
        convention=moe.convention or REFERENCE,
        top_k=moe.top_k,
        target=router_target(moe),
        weight=weights,
        capacity=expert_capacity(moe, routing.tokens),
        normalizer=step_tokens,
    )


@torch.no_grad()
def router_numbers(passes: Sequence[RouterTerms], moe: MoeRun, step_tokens: int) -> dict[str, float | None]:
    """Telemetry of one step from its micro-batches; one transfer to the host.

    Entropy in nats, mean over tokens and layers. Load CV: population standard deviation over mean of the routes per expert,
    mean over layers. The correction norm is the mean ‖λα·2(log Z − c)·W_Rᵀp‖₂ over decisions. s_rel is measured: the router
    Z-loss that was added, over λ_R times the token-layer mean of the same violations. `dropped_routes` counts the routes
    that the model did not take, none with OLMoE, which has no capacity; `over_capacity` is the share of routes that a
    capacity factor would drop.
    """
    records = [part.record for part in passes]
    log_z = torch.cat([_counted_log_z(record) for record in records])
    violation = torch.stack([(_counted_log_z(r) - r.target).square().mean() for r in records])
    load_LE = torch.stack([record.load for record in records]).sum(dim=0)
    found: dict[str, Tensor] = {
        "entropy": _mean([record.entropy for record in records]),
        "load_cv": load_cv(load_LE).mean(),
        **{name: exact_quantile(log_z, q) for name, q in TAILS.items()},
        "router_correction_norm": _mean([_present(record.correction_norm) for record in records]),
        "load_balance": _mean([part.load_balance for part in passes]),
        "load_balance_term": torch.stack([part.load_balance_term for part in passes]).sum(),
        "router_z": torch.stack([part.router_z for part in passes]).sum(),
        "violation": violation.mean(),
    }
    if moe.capacity_factor is not None:
        found["over_capacity"] = _mean([_present(record.dropped) for record in records])
    values = torch.stack([value.double() for value in found.values()]).tolist()
    numbers: dict[str, float | None] = dict(zip(found, (v if math.isfinite(v) else None for v in values), strict=True))
    router_z, reference = numbers["router_z"], numbers.pop("violation")
    numbers["router_absolute"] = absolute_coef(moe, step_tokens)
    numbers["s_rel"] = measured_scale(router_z, reference, moe.router_coef)
    numbers["dropped_routes"] = sum(part.dropped for part in passes) / len(passes)
    return numbers


def _counted_log_z(record: RouterLoss) -> Tensor:
    """log Z_R of the decisions that count: [N] without the masked ones."""
    return record.stats.log_z[record.stats.valid]


def measured_scale(router_z: float | None, violation: float | None, coef: float) -> float | None:
    """s_rel = router_z / (λ_R · mean violation); 0 without a coefficient, None where the violation is 0 or not known."""
    if not coef:
        return 0.0
    return router_z / (coef * violation) if router_z is not None and violation else None


def load_cv(load_LE: Tensor) -> Tensor:
    """Coefficient of variation of each layer's load, [L]."""
    return load_LE.std(dim=1, correction=0) / load_LE.mean(dim=1)


class ValidationRouting:
    """Routing over the validation blocks, added up over forward passes."""

    def __init__(self, moe: MoeRun, model: nn.Module, counted: Callable[[Tensor], Tensor], step_tokens: int) -> None:
        """`step_tokens`: tokens of a training step."""
        self._moe, self._step_tokens, self._tap = moe, step_tokens, RoutingTap(model, counted)
        self._load_LE = torch.zeros(moe.layers, moe.experts, dtype=torch.float64)
        self._entropy_L = torch.zeros(moe.layers, dtype=torch.float64)
        self._correction = self._balance = self._over = self._violation = self._dropped = 0.0
        self._tokens = 0
        self._log_z: list[Array] = []

    def observed(self, hidden_of: HiddenStates) -> HiddenStates:
        """The same hidden states; the routing of each forward pass is added."""

        def run(inputs_BN: Tensor) -> Tensor:
            with self._tap.listening():
                hidden_BND = hidden_of(inputs_BN)
            self._add(self._tap.take(inputs_BN))
            return hidden_BND

        return run

    def _add(self, routing: Routing) -> None:
        moe, tokens = self._moe, routing.tokens
        record = routing_record(routing, moe, self._step_tokens, self._tap.weights(moe.experts))
        self._load_LE += record.load.double().cpu()
        self._entropy_L += record.stats.entropy_per_layer.double().cpu() * tokens
        self._correction += float(_present(record.correction_norm)) * tokens
        self._balance += float(load_balancing(routing, moe)) * tokens
        self._over += 0.0 if record.dropped is None else float(record.dropped) * tokens
        self._violation += float((_counted_log_z(record) - record.target).square().mean()) * tokens
        self._dropped += routing.dropped(moe.top_k) * tokens
        self._tokens += tokens
        self._log_z.append(_counted_log_z(record).cpu().numpy())

    def join(self, job: Job) -> None:
        """Add what the other ranks of a job have seen, on the first one."""
        for part in job.gather({name: getattr(self, name) for name in SUMS})[1:]:
            for name, value in part.items():
                setattr(self, name, getattr(self, name) + value)

    def metrics(self) -> RoutingMetrics:
        """Routing over all passes."""
        moe, step_tokens = self._moe, self._step_tokens
        entropy_L, cv_L = self._entropy_L / self._tokens, load_cv(self._load_LE)
        log_z = np.concatenate(self._log_z)
        return RoutingMetrics(
            entropy=float(entropy_L.mean()),
            load_cv=float(cv_L.mean()),
            s_rel=relative_scale(moe),
            router_absolute=absolute_coef(moe, step_tokens),
            router_correction_norm=self._correction / self._tokens,
            **{name: quantile(log_z, q) for name, q in TAILS.items()},
            load_balance=self._balance / self._tokens,
            router_z=relative_scale(moe) * moe.router_coef * self._violation / self._tokens,
            dropped_routes=self._dropped / self._tokens,
            over_capacity=None if moe.capacity_factor is None else self._over / self._tokens,
            router=RouterLayers(
                variant=moe.router,
                convention=moe.convention,
                coef=moe.router_coef,
                applied_coef=applied_coef(moe),
                load_balance_coef=moe.load_balance,
                entropy_per_layer=tuple(entropy_L.tolist()),
                load_cv_per_layer=tuple(cv_L.tolist()),
                load=tuple(tuple(load_E) for load_E in self._load_LE.tolist()),
                top_k=moe.top_k,
                decisions=moe.layers * step_tokens,
            ),
        )


def _mean(values: Sequence[Tensor]) -> Tensor:
    """Mean over micro-batches, which have equally many tokens."""
    return torch.stack([value.double() for value in values]).mean()


def _present(value: Tensor | None) -> Tensor:
    assert value is not None  # the record was made with weights, and with a capacity if one is set
    return value
