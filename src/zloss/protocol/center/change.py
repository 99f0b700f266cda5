"""What centering does to the stored tensors of a checkpoint.

An untied head is replaced by W − 1w̄ (and b − b̄). A tied head is untied: the input embedding stays, the centered head is
a tensor of its own. With learned additive positions a tied head can stay tied: the input is wte[x] + wpe[t], so w̄ moves
from every row of the shared table to every row of the position table, and no hidden state changes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from zloss.errors import CheckpointError, CoordinateError, TiedHeadError
from zloss.models.checkpoint import POSITION_TABLES, Checkpoint
from zloss.models.output_head import OutputHead
from zloss.protocol.center.weight_files import WeightFiles

BETWEEN = ("project_in", "embed_layer_norm", "emb_layer_norm", "word_embeddings_layernorm")
"""Modules between the embeddings and the first layer, through which a moved mean row would not pass unchanged."""


@dataclass(frozen=True)
class Change:
    """Tensors to replace and to add, by their stored key, and what the configuration must say."""

    replaced: dict[str, Tensor]
    added: dict[str, Tensor] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    untied: bool = False
    mean_row_norm: float = 0.0
    """‖w̄‖₂."""
    mean_bias: float | None = None

    @property
    def extra_bytes(self) -> int:
        """By how much the weights grow."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.added.values())


def plan_change(
    checkpoint: Checkpoint, head: OutputHead, files: WeightFiles, *, keep_tied: bool, valid_vocab: int
) -> Change:
    """The change for this model; `checkpoint` is loaded from `files`."""
    refuse_uncenterable(checkpoint, head)
    name, stored = _module_name(checkpoint.model, head.module), head.weight_VD.detach()
    mean_D = stored[:valid_vocab].double().mean(dim=0)
    bias_key = None if head.bias_V is None else files.find(head.bias_V.detach(), f"{name}.bias", "the head's bias")
    mean_bias = None if head.bias_V is None else float(head.bias_V.detach()[:valid_vocab].double().mean())
    bias = {} if bias_key is None else {bias_key: _less(files.read(bias_key), mean_bias)}
    norm = float(mean_D.norm())
    table_key = files.find(stored, f"{name}.weight", "the output head")
    if not head.tied:
        return Change({table_key: _less(files.read(table_key), mean_D)} | bias, mean_row_norm=norm, mean_bias=mean_bias)
    if keep_tied:
        positions = _positions(checkpoint, files)
        return Change(
            {table_key: _less(files.read(table_key), mean_D), positions: _less(files.read(positions), -mean_D)} | bias,
            mean_row_norm=norm,
            mean_bias=mean_bias,
        )
    text = "text_config" if getattr(checkpoint.config, "text_config", None) is not None else None
    untie: dict[str, Any] = {"tie_word_embeddings": False}
    return Change(
        bias,
        {f"{name}.weight": _less(files.read(table_key), mean_D)},
        untie | ({text: dict(untie)} if text else {}),
        untied=True,
        mean_row_norm=norm,
        mean_bias=mean_bias,
    )


def refuse_uncenterable(checkpoint: Checkpoint, head: OutputHead) -> None:
    """Heads for which subtracting the mean row would change the model."""
    if head.softcap is not None:
        raise CoordinateError(
            f"{checkpoint.name} softcaps its logits at {head.softcap:g}: a common shift of the logits before the cap changes its "
            "predictions, so a centered head would be another model."
        )
    if head.bias_V is not None and bool(head.bias_V.isneginf().any()):
        raise CoordinateError(f"the head of {checkpoint.name} has -inf in its bias, so the mean bias does not exist.")


def _less(tensor: Tensor, mean: Tensor | float | None) -> Tensor:
    """tensor − mean in fp64, in the dtype it is stored in."""
    assert mean is not None
    return (tensor.double() - mean).to(tensor.dtype).contiguous()


def _positions(checkpoint: Checkpoint, files: WeightFiles) -> str:
    """The stored key of the learned positions that are added to the token embedding."""
    model: Any = checkpoint.model
    width = model.get_input_embeddings().weight.shape[1]
    modules = {name: module for name, module in model.named_modules() if name}
    found = [
        (name, module.weight)
        for name, module in modules.items()
        if isinstance(module, nn.Embedding) and _last(name) in POSITION_TABLES and module.weight.shape[1] == width
    ]
    between = [name for name in modules if _last(name) in BETWEEN]
    if len(found) != 1 or between:
        raise TiedHeadError(
            f"{type(model).__name__} cannot keep its head tied: that needs learned positions that are added to the token "
            "embedding with nothing between (GPT-2, OPT without projection). Leave `keep_tied` off: the copy is then untied."
        )
    name, table = found[0]
    return files.find(table.detach(), f"{name}.weight", "the learned positions")


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _module_name(model: nn.Module, wanted: nn.Module) -> str:
    for name, module in model.named_modules(remove_duplicate=False):
        if module is wanted:
            return str(name)
    raise CheckpointError(f"the output head of {type(model).__name__} is not one of its modules.")
