"""What a router Z-loss convention is: how a codebase turns per-decision violations into one scalar.

    L_R = λ_R Σ_{t,l} α_{t,l} (log Z_R − c_R)²        s_rel = N_tl · α        (paper eq:router_loss)

A convention only chooses α. For every layer l it is an exact rational c_l over a count of decisions,

    α_l = c_l / D_l        c_l = factor · k^power · micro-batches / layer divisor

so that scales are exact (1, 1/k, k) and a mask's count never has to leave its device. No torch in this file: the
command line answers from it at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from zloss.errors import CoefficientError, InputError
from zloss.tensors import is_number

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
