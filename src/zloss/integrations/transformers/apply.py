"""`apply`: a Hugging Face model computes its training loss as CE + Z through `head_loss`, without logits."""

from __future__ import annotations

from typing import Any

from torch import nn

from zloss.errors import CoordinateError, InputError, OutdatedDependencyError, UnsupportedModelError, require_version
from zloss.head.options import Backend, HeadOptions
from zloss.integrations.moe import RouterLossHandle, RouterZLoss
from zloss.integrations.transformers.handle import ZLossHandle
from zloss.integrations.transformers.head_operands import output_head
from zloss.integrations.transformers.settings import Settings
from zloss.objectives import Objective
from zloss.statistics import Statistics

LEAST_PEFT = "0.21"
LEAST_TRANSFORMERS = "5.2"
OWN_Z = ("z_loss_coefficient", "z_loss_coef")
"""Keys of a config under which a model adds a Z-loss of its own (Bamba)."""
ELSEWHERE = {"ProphetNetForCausalLM": "its loss is computed from log-probabilities of several streams"}
"""Classes whose loss does not end in one cross-entropy of their logits, by what the source of transformers shows."""


def apply(
    model: nn.Module,
    objective: Objective,
    *,
    label_smoothing: float = 0.0,
    router: RouterZLoss | None = None,
    router_micro_batches: int = 1,
    statistics: Statistics = "full",
    backend: Backend = "auto",
) -> ZLossHandle:
    """From now on `model(..., labels=...)` in training mode returns CE + Z as its loss, computed without logits.

    `model`: a causal, conditional-generation or multimodal model of transformers, bare or inside PEFT, DDP, FSDP2 or
    torch.compile, in either order. Evaluation, generation, state dict and signature stay as they are. What cannot be
    taken over exactly is refused by name: here where the configuration shows it, else in the first training step.
    `router`: adds a router Z-loss to a mixture-of-experts model; its own load-balancing term is left alone.
    `router_micro_batches`: its divisor where a loop adds micro-batch losses that are divided by the whole batch's tokens.

    >>> import torch, transformers, zloss
    >>> from zloss.integrations.transformers import apply
    >>> config = transformers.LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
    ...     num_attention_heads=2, num_key_value_heads=2)
    >>> model = transformers.LlamaForCausalLM(config).train()
    >>> handle = apply(model, zloss.CenteredZLoss(1e-4))
    >>> ids = torch.randint(64, (2, 8))
    >>> model(input_ids=ids, labels=ids).loss.backward()
    >>> handle.last.stats.gain.shape
    torch.Size([16])
    >>> handle.remove()
    """
    HeadOptions(objective=objective, label_smoothing=label_smoothing, statistics=statistics)  # checks itself
    inner = language_model(model)
    require_version("transformers", LEAST_TRANSFORMERS, "`apply`", "audit")
    _refuse_known(inner, objective)
    output_head(inner)
    handle = ZLossHandle(inner, Settings(objective, label_smoothing, statistics, backend))
    if router is not None:
        try:
            # After ours, so that its forward hook finds the loss that ours returned.
            handle.router = RouterLossHandle(
                inner,
                coef=router.coef,
                convention=router.convention,
                target=router.target,
                top_k=router.top_k,
                capacity=router.capacity,
                micro_batches=router_micro_batches,
            )
        except BaseException:
            handle.remove()
            raise
    return handle


def language_model(model: Any) -> Any:
    """The model of transformers inside DDP, torch.compile and PEFT wrappers."""
    while True:
        kind = type(model).__name__
        if kind == "DataParallel":
            raise UnsupportedModelError(
                "nn.DataParallel runs copies of the model in threads, whose hooks share one handle: use "
                "DistributedDataParallel (`torchrun` or `accelerate launch`)."
            )
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif kind == "DistributedDataParallel":
            model = model.module
        elif hasattr(model, "get_base_model"):
            _check_peft()
            model = model.get_base_model()
        else:
            return model


def _check_peft() -> None:
    try:
        require_version("peft", LEAST_PEFT, "A PEFT model", "peft")
    except OutdatedDependencyError as error:
        raise UnsupportedModelError(
            f"peft {error.installed} calls the inner model's `forward` past its hooks, so Z would be left out: install "
            f"peft ≥ {LEAST_PEFT} (pip install --upgrade 'zloss[peft]')."
        ) from error


def _refuse_known(model: Any, objective: Objective) -> None:
    """Everything that the class or the configuration already shows."""
    name = type(model).__name__
    if any(isinstance(getattr(hook, "__self__", None), ZLossHandle) for hook in model._forward_pre_hooks.values()):
        raise InputError(f"this {name} has a Z-loss applied already: call `handle.remove()` on the earlier one first.")
    config = getattr(model, "config", None)
    if config is None:
        raise UnsupportedModelError(
            f"{name} is not a model of transformers (it has no `config`): call zloss.head_loss in its training step instead."
        )
    if name in ELSEWHERE:
        raise UnsupportedModelError(f"{name} cannot be taken over: {ELSEWHERE[name]}.")
    if any(getattr(config, key, None) for key in OWN_Z):
        raise UnsupportedModelError(
            f"{name} adds a Z-loss of its own (over all positions, ignored ones included): set "
            f"`config.{next(key for key in OWN_Z if getattr(config, key, None))} = 0` first."
        )
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if getattr(text, "final_logit_softcapping", None) and objective.active and objective.needs_mu:
        raise CoordinateError(
            f"{type(objective).__name__} needs the mean logit μ, but {name} softcaps its logits, which is not "
            "shift-invariant: use StandardZLoss or GainAwareZLoss."
        )
    forward = model.__dict__.get("forward") or type(model).forward
    if (getattr(forward, "__module__", "") or "").startswith("liger_kernel"):
        raise UnsupportedModelError(
            f"{name} computes its loss in Liger's fused cross-entropy: load it without, or pass "
            'liger_kernel_config={"fused_linear_cross_entropy": False}.'
        )
