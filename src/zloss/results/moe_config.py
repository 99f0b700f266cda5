"""The mixture of experts of a training run: the shape of its model and its router loss."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from zloss.errors import InputError, UnknownNameError
from zloss.results.checks import check_counts, check_numbers
from zloss.results.option import NotAnOption, Option

PAPER_CONVENTIONS = ("token_layer_mean", "active_route_mean", "active_route_sum")
"""Conventions whose reduction is trained as the paper writes it, route by route (`zloss.train.moe.reduction`)."""
REFERENCE = "token_layer_mean"
"""The convention that a matched variant is converted to agree with."""
OFF, MATCHED = "none", "matched"
FREE_MOE = ("moe.router", "moe.router_coef")
"""Fields in which the runs of a matched pair may differ, as config.json names them."""


@dataclass(frozen=True)
class MoeRun:
    """A small mixture of experts from scratch; the defaults are the paper's where it states them."""

    top_k: int = 4
    """Experts k that every token of the `moe` model is sent to."""
    experts: int = 8
    """Experts E in every layer of the `moe` model."""
    layers: Annotated[int, Option(flag="moe-layers")] = 4
    """Transformer blocks of the `moe` model; each has a router."""
    width: Annotated[int, Option(flag="moe-width")] = 256
    """Width of the `moe` model, in features; a multiple of `heads`."""
    heads: Annotated[int, Option(flag="moe-heads")] = 4
    """Attention heads of every block of the `moe` model."""
    expert_width: int = 512
    """Width of the hidden layer of an expert, in features; the paper does not state it."""
    tokenizer: Annotated[str | None, Option(metavar="NAME|DIR")] = None
    """Tokenizer of the `moe` model, a Hugging Face name or folder. By default one is trained, see `train_tokenizer`."""
    load_balance: float = 1e-2
    """Coefficient of the load-balancing loss of the `moe` model; that loss is about k at balance, not 1."""
    router: Annotated[str, NotAnOption] = OFF
    """Router Z-loss: `none`, a convention of the paper, or `convention:matched` with the coefficient converted so that
    s_rel is 1."""
    router_coef: Annotated[float, NotAnOption] = 0.0
    """λ_R as written; a matched variant converts it (`zloss.train.moe.router_variant.applied_coef`)."""
    router_target: float | None = None
    """Target c_R of the router log-normalizer, in nats. Default: log E."""
    capacity_factor: float | None = None
    """Capacity of an expert in units of its fair share T·k/E. Routes beyond it are counted and not dropped: OLMoE has no
    capacity. By default nothing is counted."""

    def __post_init__(self) -> None:
        check_counts(self, ("top_k", "experts", "layers", "width", "heads", "expert_width"))
        check_numbers(self, ("load_balance", "router_coef"))
        if self.top_k > self.experts:
            raise InputError(
                f"`top_k` is expected to be at most {self.experts}, the number of experts, but got {self.top_k}."
            )
        if self.width % self.heads:
            raise InputError(f"`width` is expected to be a multiple of `heads` = {self.heads}, but got {self.width}.")
        if self.width // self.heads % 2:
            raise InputError(
                f"the width of an attention head is expected to be even (rotary embedding), but {self.width} / "
                f"{self.heads} is {self.width // self.heads}."
            )
        if self.router not in variants():
            raise UnknownNameError("router variant", self.router, variants())
        if self.router == OFF and self.router_coef:
            raise InputError(
                f"the router variant `none` has no penalty: its coefficient is 0, not {self.router_coef!r}."
            )
        if self.router_target is not None and not math.isfinite(self.router_target):
            raise InputError(f"`router_target` is expected to be a finite number, but got {self.router_target!r}.")
        if self.capacity_factor is not None:
            check_numbers(self, ("capacity_factor",), positive=True)

    @property
    def convention(self) -> str | None:
        """The convention of the paper that this variant trains under; None when off."""
        return None if self.router == OFF else self.router.partition(":")[0]

    @property
    def matched(self) -> bool:
        """Whether the coefficient is converted so that s_rel is 1."""
        return self.router.endswith(f":{MATCHED}")

    @property
    def name(self) -> str:
        """The variant and its coefficient as part of a folder name."""
        return router_name(self.router, self.router_coef)


def router_name(router: str, coef: float) -> str:
    """A router variant and its coefficient as part of a folder name."""
    return f"{router.replace(':', '-')}-{coef:g}"


def variants() -> tuple[str, ...]:
    """Every router variant there is."""
    return (OFF, *(name for c in PAPER_CONVENTIONS for name in (c, f"{c}:{MATCHED}")))
