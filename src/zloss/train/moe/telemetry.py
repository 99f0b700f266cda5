"""Numbers of the routers: of a training step, and of the trained model on the validation blocks.

Entropy in nats, mean over tokens and layers. Load CV: population standard deviation over mean of the routes per expert, mean
over layers. The correction norm is the mean ‖λα·2(log Z − c)·W_Rᵀp‖₂ over decisions. s_rel is measured: the router Z-loss that
was added, over λ_R times the token-layer mean of the same violations. `dropped_routes` counts the routes that the model did not
take, none with OLMoE, which has no capacity; `over_capacity` is the share of routes that a capacity factor would drop.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from zloss.distributed import Job
from zloss.results.moe_config import MoeRun
from zloss.results.routing_metrics import RouterLayers, RoutingMetrics
from zloss.router.loss import RouterLoss
from zloss.statistics import exact_quantile
from zloss.streaming import Accumulator, Quantiles
from zloss.streaming.over_ranks import merged
from zloss.train.moe.loss import RouterTerms
from zloss.train.moe.router_variant import absolute_coef, applied_coef, relative_scale
from zloss.train.moe.routing import Routing

SUMS = ("_load_LE", "_entropy_L", "_correction", "_balance", "_over", "_violation", "_dropped", "_tokens")
"""What `ValidationRouting` adds up over forward passes."""
TAILS = {"router_log_z_p99": 0.99, "router_log_z_p999": 0.999, "router_log_z_max": 1.0}


@torch.no_grad()
def router_numbers(passes: Sequence[RouterTerms], moe: MoeRun, step_tokens: int) -> dict[str, float | None]:
    """Telemetry of one step from its micro-batches; one transfer to the host."""
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

    def __init__(self, moe: MoeRun) -> None:
        self._moe = moe
        shape = moe.layers, moe.experts
        self._load_LE, self._entropy_L = (
            torch.zeros(shape, dtype=torch.float64),
            torch.zeros(shape[0], dtype=torch.float64),
        )
        self._correction = self._balance = self._over = self._violation = self._dropped = 0.0
        self._tokens = 0
        self._log_z: Accumulator = Quantiles()

    def update(self, routing: Routing, record: RouterLoss, balance: Tensor) -> None:
        """Add one forward pass."""
        tokens = routing.tokens
        self._load_LE += record.load.double().cpu()
        self._entropy_L += record.stats.entropy_per_layer.double().cpu() * tokens
        self._correction += float(_present(record.correction_norm)) * tokens
        self._balance += float(balance) * tokens
        self._over += 0.0 if record.dropped is None else float(record.dropped) * tokens
        self._violation += float((_counted_log_z(record) - record.target).square().mean()) * tokens
        self._dropped += routing.dropped(self._moe.top_k) * tokens
        self._tokens += tokens
        self._log_z.update(_counted_log_z(record))

    def join(self, job: Job) -> None:
        """Add what the other ranks of a job have seen, on the first one."""
        whole = merged({"log_z": self._log_z}, job.gather)
        parts = job.gather({name: getattr(self, name) for name in SUMS})
        if whole is not None:
            self._log_z = whole["log_z"]
        for part in parts[1:]:
            for name, value in part.items():
                setattr(self, name, getattr(self, name) + value)

    def metrics(self, step_tokens: int) -> RoutingMetrics:
        """Routing over all passes; `step_tokens` is the number of tokens of a training step."""
        moe = self._moe
        assert isinstance(self._log_z, Quantiles)
        entropy_L, cv_L = self._entropy_L / self._tokens, load_cv(self._load_LE)
        tails = {name: self._log_z.quantile(q) for name, q in TAILS.items()}
        return RoutingMetrics(
            entropy=float(entropy_L.mean()),
            load_cv=float(cv_L.mean()),
            s_rel=relative_scale(moe),
            router_absolute=absolute_coef(moe, step_tokens),
            router_correction_norm=self._correction / self._tokens,
            **{name: None if estimate is None else estimate.value for name, estimate in tails.items()},
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
    assert value is not None  # the record was made with weights, and with a capacity where one is asked for
    return value
