"""`apply`: a Hugging Face model computes its training loss as CE + Z through `head_loss`, without logits.

[zloss.integrations.transformers.apply] What `apply` returns: the hooks on a model, and the output of its last training step.

[zloss.integrations.transformers.apply] The output that TRL's SFTTrainer asks of a model: log-probabilities, entropy and accuracy per token instead of logits.

`log_probs` is −(CE + Z) of every token, so that the loss TRL makes of it is CE + Z; entropy, accuracy and mask are those
of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

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
from zloss.integrations.moe import RouterLossHandle, RouterZLoss, given_arguments
from zloss.integrations.transformers.lazy_logits import LazyLogits, NoLogits, Settings, TrainingCall, output_head
from zloss.source.objective import Objective
from zloss.telemetry.window import MicroBatch, micro_batch
from zloss.transport.backends.choice import Backend
from zloss.transport.head_loss import HeadLossOutput
from zloss.transport.options import HeadOptions
from zloss.transport.outside_compile import outside_compile
from zloss.transport.statistics_plan import Statistics

# <<< zloss.integrations.transformers.apply
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
    `router_micro_batches`: its divisor in a loop that adds up losses which are divided by the tokens of the whole step:
    the number of micro-batches, times the number of processes where the loop multiplies its loss by that.

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


# <<< zloss.integrations.transformers.apply
LABELS = ("labels", "shift_labels")


class ZLossHandle:
    """A model whose training loss goes through `head_loss`; `remove()` takes everything back.

    `last` is the output of the last training forward: CE and Z apart and the statistics of every token, detached.
    `calls` counts those forwards, and every function in `observers` is called with each. `router` is the handle of the
    router Z-loss, or None. The handle is a context manager. A copy or a pickle of the model carries a handle of
    its own, without `last` and observers.
    """

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        self.settings = settings
        self.last: HeadLossOutput | None = None
        self.calls = 0
        self.observers: list[Callable[[MicroBatch], None]] = []
        self.router: RouterLossHandle | None = None
        self._model = model
        self._open: list[TrainingCall | None] = []
        self._hooks: list[Any] = [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after, with_kwargs=True, always_call=True),
        ]

    def remove(self) -> None:
        """Take the hooks off the model."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self.router is not None:
            self.router.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.remove()

    def __getstate__(self) -> dict[str, Any]:
        # `last` belongs to the original's last step; its tensors are not leaves, which torch refuses to copy.
        return self.__dict__ | {"last": None, "_open": [], "observers": []}

    @outside_compile
    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = given_arguments(model, args, kwargs)
        has_labels = any(given.get(name) is not None for name in LABELS)
        if not (model.training and torch.is_grad_enabled() and has_labels):
            self._open.append(None)
            return None
        per_token = bool(kwargs.get("fused_lm_head"))
        if per_token:
            kwargs = {name: value for name, value in kwargs.items() if name != "fused_lm_head"}
        call = TrainingCall(model, self.settings, per_token=per_token)
        call.arm()
        self._open.append(call)
        return args, kwargs

    @outside_compile
    def _after(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        call = self._open.pop() if self._open else None
        if call is None:
            if output is not None and torch.is_grad_enabled():
                forbid_backward(model, output, given_arguments(model, args, kwargs))
            return None
        call.disarm()
        if output is None:  # the forward raised; its exception goes on from here
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
                    "SFTTrainer makes its loss from the log-probabilities of tokens, which have no place for a router "
                    "Z-loss: apply without `router`, or use the Trainer of transformers."
                )
            return fused_output(call, output, given_arguments(model, args, kwargs))
        return without_logits(output, call.model_name)


def forbid_backward(model: nn.Module, output: Any, given: dict[str, Any]) -> None:
    """A loss that did not go through us may be looked at, but a backward pass from it would train without Z."""
    name = type(model).__name__
    has_labels = any(given.get(label) is not None for label in LABELS)
    if has_labels:
        tensor = output[0] if isinstance(output, tuple) else getattr(output, "loss", None)
        why = (
            f"{name} is in evaluation mode, so its loss has no Z: call model.train() before training "
            "(Lightning leaves models from `from_pretrained` in evaluation mode)."
        )
    elif model.training:
        tensor = output[0] if isinstance(output, tuple) else getattr(output, "logits", None)
        why = (
            f"{name} was called in training mode without `labels`, so the loss was computed outside the model and has no Z. "
            "A label smoother or `compute_loss_func` of a Trainer takes the labels away: pass `label_smoothing` to zloss "
            "instead, or compute the loss with zloss.logits_loss."
        )
    else:
        return

    def refuse(_grad: Tensor) -> None:
        raise UnsupportedModelError(why)

    if isinstance(tensor, Tensor) and tensor.requires_grad:
        tensor.register_hook(refuse)  # type: ignore[no-untyped-call]


def without_logits(output: Any, model_name: str) -> Any:
    """The model's output with `NoLogits` instead of lazy logits."""
    none = NoLogits(model_name)
    if isinstance(output, tuple) and not hasattr(output, "keys"):
        return tuple(none if isinstance(value, LazyLogits) else value for value in output)
    return type(output)(**{name: none if isinstance(value, LazyLogits) else value for name, value in output.items()})


# <<< zloss.integrations.transformers.apply
class NegativeLoss(Tensor):
    """−(CE + Z) of every token: a tensor whose exponential is refused, because it is not a probability."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "").rstrip("_") in ("exp", "exp2", "expm1"):
            raise UnsupportedModelError(
                'the loss of a token was taken for its log-probability (TRL\'s loss_type="dft" does so), but it has Z in '
                'it: use loss_type="nll".'
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def fused_output(call: TrainingCall, output: Any, given: dict[str, Any]) -> Any:
    """TRL's `FusedCausalLMOutput` for a call that asked for `fused_lm_head`."""
    try:
        from trl.trainer.utils import FusedCausalLMOutput
    except ImportError as error:
        raise MissingDependencyError("trl>=1.16", "Training with SFTTrainer", "trl") from error
    assert call.output is not None
    stats = call.output.stats
    if stats.entropy is None:
        raise UnsupportedModelError(
            "SFTTrainer logs the entropy of every token, which light statistics leave out: apply with statistics='full'."
        )
    shifted = given.get("shift_labels")

    def laid_out(values: Tensor) -> Tensor:
        """One value per predicted token, [B, T − 1], or [B, T] for labels that were shifted before."""
        if shifted is not None:
            return values.reshape(shifted.shape)
        batch, length = given["labels"].shape
        if values.numel() == batch * length:  # shifted by padding: the last place of every sequence is ignored
            return values.reshape(batch, length)[:, :-1]
        return values.reshape(batch, length - 1)

    return FusedCausalLMOutput(
        loss=None,
        log_probs=laid_out(-call.output.loss).as_subclass(NegativeLoss),
        entropy=laid_out(stats.entropy.masked_fill(~stats.valid, 0)),
        is_top1=laid_out(stats.top1 & stats.valid),
        label_mask=laid_out(stats.valid),
        aux_loss=getattr(output, "aux_loss", None),
    )
