"""`zloss router-scale`: what a router coefficient means under every convention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import tyro


@dataclass(frozen=True)
class RouterScale:
    """Scale of a router Z-loss coefficient under every known convention, and the coefficient that matches it elsewhere.

    Example: zloss router-scale --coef 1e-3 --from megatron --to olmoe --layers 16 --top-k 8
    """

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
    out: str = ""
    """File NAME.json, or folder for router_scale.json, to write the result to; `zloss report` reads it."""
    verbose: bool = False
    """Also print where each convention was read."""

    def run(self, argv: Sequence[str]) -> int:
        from zloss.report.router import router_scale_document
        from zloss.report.terminal import print_document
        from zloss.router.conventions import find_convention, match_coefficient, router_scale_table

        context: dict[str, Any] = {
            "layers": self.layers,
            "top_k": self.top_k,
            "tokens": self.tokens,
            "model_layers": self.model_layers,
            "encoder_layers": self.encoder_layers,
            "valid_tokens": self.valid_tokens,
            "micro_batches": self.micro_batches,
        }
        source = find_convention(self.from_).name
        chosen = None if self.to is None else find_convention(self.to).name
        scales = router_scale_table(self.coef, source, **context)
        # Before printing, so that a closed pipe does not lose the file.
        written = scales.write(self.out) if self.out else None
        print_document(router_scale_document(scales, matched=chosen, cited=self.verbose))
        if not self.verbose:
            print("--verbose prints where each convention was read.")
        if chosen is not None:
            # Not read from the table: a convention that applies nothing has no entry there, and this error says why.
            matched = match_coefficient(self.coef, source, chosen, **context)
            print(f"{self.coef:g} under {source} = {matched:.6g} under {chosen}")
        if written is not None:
            print(written)
        return 0
