"""`apply`: a Hugging Face model computes its training loss as CE + Z through `head_loss`, without logits.

The handle that it returns keeps two hooks on the model. Before a training forward the output head is replaced for that
call (`lazy_logits`); after it, the loss is in place and the output has no logits, or is what TRL's SFTTrainer expects.
`support` is the record of trying every causal class of one version of transformers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zloss.errors import (
    CoordinateError,
    InputError,
    MissingDependencyError,
    OutdatedDependencyError,
    UnsupportedModelError,
    require_version,
)
from zloss.head.loss import HeadLossOutput, outside_compile
from zloss.head.options import Backend, HeadOptions
from zloss.integrations.moe import HookHandle, RouterLossHandle, RouterZLoss, named_arguments
from zloss.integrations.transformers.lazy_logits import LazyLogits, NoLogits, TrainingCall, output_head
from zloss.models.in_memory import unwrapped
from zloss.objectives import Objective, refuse_functions
from zloss.statistics import Statistics
from zloss.telemetry.window import TokenTotals, micro_batch

LEAST_PEFT = "0.21"
LEAST_TRANSFORMERS = "5.2"
LEAST_TRL = "1.16"
SFT_FIELDS = ("log_probs", "entropy", "is_top1")
"""What SFTTrainer makes TRL's fused head return. Every other trainer of TRL makes it return something else."""
WITHOUT_Z = "train it without zloss, or add λ(log Z)² of the model's logits in a `compute_loss` of your own."
LABELS = ("labels", "shift_labels")
MODEL_Z_KEYS = ("z_loss_coefficient", "z_loss_coef")
"""Config keys under which a model adds its own Z-loss (Bamba)."""
SUPPORT = Path(__file__).with_name("support.json")
"""Written by `python -m tests.integrations.transformers.sweep --write`."""
UNSUPPORTED = {"ProphetNetForCausalLM": "its loss is computed from log-probabilities of several streams"}
"""Classes whose loss does not end in one cross-entropy of their logits, according to the source of transformers."""


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
    torch.compile, in either order. Evaluation, generation, state dict and signature do not change. A model whose loss
    cannot be reproduced exactly is rejected with an error that names it: here if its configuration shows it, else in the first
    training step.
    `router`: adds a router Z-loss to a mixture-of-experts model; its own load-balancing term is left alone.
    `router_micro_batches`: its divisor in a loop that adds up losses which are divided by the tokens of the whole step:
    the number of micro-batches, times the number of processes if the loop multiplies its loss by that.

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
    refuse_functions(objective, ", or use `attach` with a Trainer")
    options = HeadOptions(objective, label_smoothing=label_smoothing, statistics=statistics, backend=backend)
    inner = unwrapped(model, _refuse_wrapper)
    require_version("transformers", LEAST_TRANSFORMERS, "`apply`", "audit")
    _refuse_known(inner, objective)
    output_head(inner)
    handle = ZLossHandle(inner, options)
    if router is not None:
        try:
            # Registered after ours, so that its forward hook sees the loss that ours returned.
            handle.router = RouterLossHandle(inner, router, router_micro_batches)
        except BaseException:
            handle.remove()
            raise
    return handle


def _refuse_wrapper(model: Any) -> None:
    if type(model).__name__ == "DataParallel":
        raise UnsupportedModelError(
            "nn.DataParallel runs copies of the model in threads, whose hooks share one handle: use "
            "DistributedDataParallel (`torchrun` or `accelerate launch`)."
        )
    if hasattr(model, "get_base_model"):
        try:
            require_version("peft", LEAST_PEFT, "A PEFT model", "peft")
        except OutdatedDependencyError as error:
            raise UnsupportedModelError(
                f"peft {error.installed} calls the inner model's `forward` without its hooks, so Z would be left out: "
                f"install peft ≥ {LEAST_PEFT} (pip install --upgrade 'zloss[peft]')."
            ) from error


def _refuse_known(model: Any, objective: Objective) -> None:
    """Reject what the class or the configuration already shows."""
    name = type(model).__name__
    if ZLossHandle.on(model):
        raise InputError(f"this {name} already has a Z-loss applied: call `handle.remove()` on the earlier one first.")
    config = getattr(model, "config", None)
    if config is None:
        raise UnsupportedModelError(
            f"{name} is not a transformers model (it has no `config`): call zloss.head_loss in its training step instead."
        )
    if name in UNSUPPORTED:
        raise UnsupportedModelError(f"the loss of {name} cannot be replaced: {UNSUPPORTED[name]}.")
    for key in MODEL_Z_KEYS:
        if getattr(config, key, None):
            raise UnsupportedModelError(
                f"{name} already adds its own Z-loss (over all positions, ignored ones included): set `config.{key} = 0` first."
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
            f"{name} computes its loss in Liger's fused cross-entropy: load it without Liger, or pass "
            'liger_kernel_config={"fused_linear_cross_entropy": False}.'
        )


class ZLossHandle(HookHandle):
    """A model whose training loss goes through `head_loss`; `remove()` undoes it.

    `last` is the output of the last training forward: CE, Z and the statistics of every token, detached. `calls` counts
    those forwards, and every function in `observers` is called with each. `router` is the handle of the router Z-loss, or
    None. The handle is a context manager. A copy or a pickle of the model has a separate handle, without `last` and
    observers.
    """

    def __init__(self, model: nn.Module, options: HeadOptions) -> None:
        self.options = options
        self.last: HeadLossOutput | None = None
        self.calls = 0
        self.observers: list[Callable[[TokenTotals], None]] = []
        self.router: RouterLossHandle | None = None
        self._open: list[TrainingCall | None] = []
        super().__init__()
        self._hooks += [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after, with_kwargs=True, always_call=True),
        ]

    def remove(self) -> None:
        """Remove the hooks from the model, those of the router Z-loss included."""
        super().remove()
        if self.router is not None:
            self.router.remove()

    def __getstate__(self) -> dict[str, Any]:
        # `last` belongs to the original's last step; its tensors are not leaves, which torch refuses to copy.
        return self.__dict__ | {"last": None, "_open": [], "observers": []}

    @outside_compile
    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = named_arguments(model, args, kwargs)
        if not (model.training and torch.is_grad_enabled() and _has_labels(given)):
            self._open.append(None)
            return None
        kwargs = dict(kwargs)
        per_token = bool(kwargs.pop("fused_lm_head", False))
        if per_token:
            _refuse_other_trl_trainers(model)
        self._open.append(TrainingCall(model, self.options, per_token=per_token))
        return args, kwargs

    @outside_compile
    def _after(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        call = self._open.pop() if self._open else None
        if call is None:
            if output is not None and torch.is_grad_enabled():
                _forbid_backward(model, output, named_arguments(model, args, kwargs))
            return None
        call.remove()
        if output is None:  # the forward raised, and its exception propagates from here
            return None
        if call.output is None:
            raise UnsupportedModelError(
                f"{call.model_name} computed its training loss without its output head or without `F.cross_entropy` "
                "(another patch of its forward, such as Liger's fused cross-entropy?), so Z could not be added."
            )
        self.calls += 1
        self.last = replace(call.output, loss=call.output.loss.detach())
        for observe in self.observers:
            observe(micro_batch(self.last, call.reduction))
        if call.per_token:
            if self.router is not None:
                raise UnsupportedModelError(
                    "SFTTrainer computes its loss from token log-probabilities, which leaves no room for a router "
                    "Z-loss: apply without `router`, or use the transformers Trainer."
                )
            return _trl_output(call, output, named_arguments(model, args, kwargs))
        return _without_logits(output, call.model_name)


def _forbid_backward(model: nn.Module, output: Any, given: dict[str, Any]) -> None:
    """Make a backward pass from a loss that did not go through zloss raise: it would train without Z. Reading it is fine."""
    name = type(model).__name__
    if _has_labels(given):
        part = "loss"
        why = (
            f"{name} is in evaluation mode, so its loss has no Z: call model.train() before training "
            "(Lightning leaves models from `from_pretrained` in evaluation mode)."
        )
    elif model.training:
        part = "logits"
        why = (
            f"{name} was called in training mode without `labels`, so the loss was computed outside the model and has no Z. "
            "A label smoother or `compute_loss_func` of a Trainer takes the labels away: pass `label_smoothing` to zloss "
            "instead, or compute the loss with zloss.logits_loss."
        )
    else:
        return
    tensor = output[0] if isinstance(output, tuple) else getattr(output, part, None)

    def refuse(_grad: Tensor) -> None:
        raise UnsupportedModelError(why)

    if isinstance(tensor, Tensor) and tensor.requires_grad:
        tensor.register_hook(refuse)  # type: ignore[no-untyped-call]


def _has_labels(given: dict[str, Any]) -> bool:
    return any(given.get(label) is not None for label in LABELS)


def _without_logits(output: Any, model_name: str) -> Any:
    """The model's output with `NoLogits` instead of lazy logits."""
    none = NoLogits(model_name)
    if isinstance(output, tuple) and not hasattr(output, "keys"):
        return tuple(none if isinstance(value, LazyLogits) else value for value in output)
    return type(output)(**{name: none if isinstance(value, LazyLogits) else value for name, value in output.items()})


def _refuse_other_trl_trainers(model: Any) -> None:
    """Raise for TRL's fused head unless SFTTrainer put it there: the others compute their loss from log-probabilities.

    The calls of all trainers look alike, so what counts is what they passed to TRL's `add_fused_lm_head`: variables of the
    forward that it put on the model, which accelerate may have wrapped.
    """
    forward: Any = model.forward
    passed: dict[str, Any] = {}
    while forward is not None and "outputs" not in passed:
        names = getattr(getattr(forward, "__code__", None), "co_freevars", ())
        cells = getattr(forward, "__closure__", None) or ()
        passed = {name: cell.cell_contents for name, cell in zip(names, cells, strict=False)}
        forward = getattr(forward, "__wrapped__", None)
    fields, temperature = passed.get("outputs", ()), passed.get("temperature")
    if (fields, temperature) != (SFT_FIELDS, 1.0):
        raise UnsupportedModelError(
            f"{type(model).__name__} is trained by a trainer of TRL other than SFTTrainer (such as GRPO, RLOO, DPO or KTO): "
            f"it asks for {', '.join(fields) or 'unknown fields'} at temperature {temperature}, which Z cannot be part of; "
            f"{WITHOUT_Z}"
        )


def _trl_output(call: TrainingCall, output: Any, given: dict[str, Any]) -> Any:
    """TRL's `FusedCausalLMOutput` for a call with `fused_lm_head`: numbers per token instead of logits.

    `log_probs` is −(CE + Z) of every token, so that the loss TRL computes from it is CE + Z; entropy, accuracy and mask are
    those of the model.
    """
    try:
        from trl.trainer.utils import FusedCausalLMOutput
    except ImportError as error:
        raise MissingDependencyError(f"trl>={LEAST_TRL}", "Training with SFTTrainer", "trl") from error
    assert call.output is not None
    stats = call.output.stats
    if stats.entropy is None:
        raise UnsupportedModelError(
            "SFTTrainer logs the entropy of every token, which light statistics leave out: apply with statistics='full'."
        )
    shifted = given.get("shift_labels")

    def per_token(values: Tensor) -> Tensor:
        """One value per predicted token, [B, T − 1], or [B, T] for labels that were shifted before."""
        if shifted is not None:
            return values.reshape(shifted.shape)
        batch, length = given["labels"].shape
        if values.numel() == batch * length:  # shifted by padding: the last position of every sequence is ignored
            return values.reshape(batch, length)[:, :-1]
        return values.reshape(batch, length - 1)

    return FusedCausalLMOutput(
        loss=None,
        log_probs=per_token(-call.output.loss).as_subclass(_NegativeLoss),
        entropy=per_token(stats.entropy.masked_fill(~stats.valid, 0)),
        is_top1=per_token(stats.top1 & stats.valid),
        label_mask=per_token(stats.valid),
        aux_loss=getattr(output, "aux_loss", None),
    )


class _NegativeLoss(Tensor):
    """−(CE + Z) of every token: a tensor whose exponential is rejected, because it is not a probability."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "").rstrip("_") in ("exp", "exp2", "expm1"):
            raise UnsupportedModelError(
                'the loss of a token was used as its log-probability (as TRL\'s loss_type="dft" does), but it includes Z: '
                'use loss_type="nll".'
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class ModelSupport:
    """The outcome for one class."""

    name: str
    state: str
    """"exact": loss and gradients equal CE + Z of the model's own logits; "refused": `apply` or the first step raises,
    with the reason; "not built": no small model of the class could be made, so it was not tried."""
    detail: str
    """The error, or why no small model was built."""


@dataclass(frozen=True)
class SupportTable:
    """The outcomes, and the version of transformers they were obtained with."""

    transformers: str
    classes: tuple[ModelSupport, ...]

    def __getitem__(self, name: str) -> ModelSupport:
        """The outcome for a class; KeyError for one that was not registered as a causal model."""
        return {model.name: model for model in self.classes}[name]

    def count(self, state: str) -> int:
        """How many classes are in this state."""
        return sum(model.state == state for model in self.classes)


def support() -> SupportTable:
    """The outcome of building every causal class of transformers at a small size and comparing it with CE + Z of its logits.

    >>> from zloss.integrations.transformers import support
    >>> support()["LlamaForCausalLM"].state
    'exact'
    """
    read = json.loads(SUPPORT.read_text(encoding="utf-8"))
    return SupportTable(read["transformers"], tuple(ModelSupport(**model) for model in read["classes"]))
