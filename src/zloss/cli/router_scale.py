"""`zloss router-scale`: what a router coefficient means under every convention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import tyro


@dataclass(frozen=True)
class RouterScale:
    """Scale of a router Z-loss coefficient under every known convention, and the coefficient that matches it elsewhere."""

    coef: float = 1e-3
    """λ_R as written in the configuration of `--from`."""
    from_: Annotated[str, tyro.conf.arg(name="from")] = "token_layer_mean"
    """The convention in which --coef is meant: token_layer_mean, megatron, olmoe, ..."""
    to: str | None = None
    """The convention to convert to; without it the table alone is printed."""
    layers: int = 16
    """Number of MoE layers L (both stacks of an encoder-decoder). The default, like that of k, is OLMoE-7B's."""
    top_k: int = 8
    """Experts per token k."""
    tokens: int = 4096
    """Tokens per layer and batch, for the absolute coefficient λα."""
    model_layers: int | None = None
    """Transformer blocks of the model, dense ones included; default: --layers."""
    encoder_layers: int | None = None
    """MoE layers of the encoder, for encoder-decoder models."""
    valid_tokens: int | None = None
    """Tokens with a label, of --tokens; default: all."""
    micro_batches: int = 1
    """Micro-batches per step."""

    def run(self) -> int:
        from rich.console import Console
        from rich.table import Table

        from zloss.source.router.catalog import find_convention, router_conventions
        from zloss.source.router.scale import match_coefficient, router_scale

        context: dict[str, Any] = {
            "layers": self.layers,
            "top_k": self.top_k,
            "tokens": self.tokens,
            "model_layers": self.model_layers,
            "encoder_layers": self.encoder_layers,
            "valid_tokens": self.valid_tokens,
            "micro_batches": self.micro_batches,
        }
        source = find_convention(self.from_)
        chosen = None if self.to is None else find_convention(self.to)
        table = Table(
            title=f"router Z-loss, λ = {self.coef:g}, L = {self.layers}, k = {self.top_k}, T = {self.tokens}",
            caption=f"equal: the coefficient that applies what {self.coef:g} applies under {source.name}",
        )
        table.add_column("convention", no_wrap=True)
        table.add_column("s_rel", justify="right", no_wrap=True)
        table.add_column("λα per decision", justify="right", no_wrap=True)
        table.add_column("equal", justify="right", no_wrap=True)
        table.add_column("read from", overflow="fold")
        for convention in router_conventions():
            scale = router_scale(convention, coef=self.coef, **context)
            equal = (
                "none" if scale.relative == 0 else f"{match_coefficient(self.coef, source, convention, **context):.6g}"
            )
            style = "bold" if convention in (source, chosen) else None
            uneven = "" if scale.uniform else " (mean)"
            table.add_row(
                convention.name,
                f"{scale.relative:.6g}{uneven}",
                f"{scale.absolute:.4g}",
                equal,
                convention.cited,
                style=style,
            )
        console = Console()
        console.print(table)
        if chosen is not None:
            matched = match_coefficient(self.coef, source, chosen, **context)
            console.print(
                f"{self.coef:g} under {source.name} = {matched:.6g} under {chosen.name}",
                highlight=False,
                soft_wrap=True,
            )
        return 0
