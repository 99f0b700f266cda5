"""What a run with experts adds to a training configuration: the shape of the model and its router loss."""

from __future__ import annotations

import math
from dataclasses import dataclass

from zloss.errors import InputError, UnknownNameError
from zloss.source.router.scale import match_coefficient, router_scale

PAPER_CONVENTIONS = ("token_layer_mean", "active_route_mean", "active_route_sum")
"""Conventions whose reduction is trained as it is written, route by route (`train.router_reduction`)."""
REFERENCE = "token_layer_mean"
OFF, MATCHED = "none", "matched"
FREE_MOE = ("moe.router", "moe.router_coef")
"""Fields in which the runs of a matched pair may differ, as config.json names them."""


@dataclass(frozen=True)
class MoeRun:
    """A small mixture of experts from scratch; the defaults are the paper's where it states them."""

    top_k: int = 4
    experts: int = 8
    layers: int = 4
    width: int = 256
    heads: int = 4
    expert_width: int = 512
    """Ours: the paper does not state it."""
    tokenizer: str | None = None
    """A tokenizer by Hugging Face name or folder; None: one is trained on the training text."""
    load_balance: float = 1e-2
    """Coefficient of the model's own load-balancing term, which is about k at balance (not 1)."""
    router: str = OFF
    """`none`, a convention of the paper, or `convention:matched`: the coefficient converted so that s_rel is 1."""
    router_coef: float = 0.0
    """λ_R as written; a matched variant converts it, see `applied_coef`."""
    router_target: float | None = None
    """c_R; None is log E."""
    capacity_factor: float | None = None
    """Capacity of an expert in shares of T·k/E; routes beyond it are counted, not dropped: OLMoE cannot drop."""

    def __post_init__(self) -> None:
        convention, _, suffix = self.router.partition(":")
        if convention not in (OFF, *PAPER_CONVENTIONS):
            raise UnknownNameError("router variant", self.router, variants())
        if suffix not in ("", MATCHED) or (suffix and convention == OFF) or self.router.endswith(":"):
            raise UnknownNameError("router variant", self.router, variants())
        for name in ("load_balance", "router_coef"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise InputError(f"`{name}` is expected to be a finite number ≥ 0, but got {getattr(self, name)!r}.")
        if self.router == OFF and self.router_coef:
            raise InputError(
                f"the router variant `none` has no penalty: its coefficient is 0, not {self.router_coef!r}."
            )
        for name in ("router_target", "capacity_factor"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and (value > 0 or name == "router_target")):
                above = "" if name == "router_target" else " > 0"
                raise InputError(f"`{name}` is expected to be a finite number{above}, but got {value!r}.")

    @property
    def convention(self) -> str | None:
        """The convention of the paper this variant trains under; None when off."""
        return None if self.router == OFF else self.router.partition(":")[0]

    @property
    def matched(self) -> bool:
        return self.router.endswith(f":{MATCHED}")

    @property
    def applied_coef(self) -> float:
        """λ_R as the loss uses it: as written, or converted so that a decision gets what the token-layer mean gives it."""
        if self.convention is None or not self.matched:
            return self.router_coef
        return match_coefficient(self.router_coef, REFERENCE, self.convention, layers=self.layers, top_k=self.top_k)

    @property
    def relative(self) -> float:
        """s_rel: the coefficient of a decision in units of λ_R/N_tl as written; 0 when off, 1 for a matched variant."""
        if self.convention is None or not self.router_coef:
            return 0.0
        scale = router_scale(self.convention, layers=self.layers, tokens=1, top_k=self.top_k, coef=self.applied_coef)
        reference = router_scale(REFERENCE, layers=self.layers, tokens=1, top_k=self.top_k, coef=self.router_coef)
        return scale.absolute / reference.absolute

    def absolute(self, tokens: int) -> float:
        """λ_R·α of one decision in a step of `tokens` tokens."""
        if self.convention is None:
            return 0.0
        return router_scale(
            self.convention, layers=self.layers, tokens=tokens, top_k=self.top_k, coef=self.applied_coef
        ).absolute

    @property
    def name(self) -> str:
        """The variant and its coefficient as part of a folder name."""
        return f"{self.router.replace(':', '-')}-{self.router_coef:g}"


def variants() -> tuple[str, ...]:
    """Every router variant there is."""
    return (OFF, *(name for c in PAPER_CONVENTIONS for name in (c, f"{c}:{MATCHED}")))
