"""torchtitan (0.3 or newer): CE + Z as the loss of its Trainer, and the scalars of the loss in its metrics.

    --override.imports 'zloss.integrations.torchtitan.z_loss={"coef": 1e-4, "target": 0.0}' \
        zloss.integrations.torchtitan.z_loss_metrics

`ZLoss` computes the loss from logits, `FusedZLoss` from hidden states and `lm_head`. torchtitan adds gradients over ranks and
micro-batches; CE and Z are both divided by its global number of valid tokens, so Z does not scale with processes, accumulation
or tensor parallelism. Evaluation, which runs without gradients, returns CE. The Trainer drops the metrics that a loss returns,
so losses hand their statistics to the `ZLossMetrics` of the process.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from zloss.distributed import is_dtensor, local_part
from zloss.errors import InputError, MissingInputError, UnknownNameError, UnsupportedModelError, require_version
from zloss.head.loss import HeadLossOutput, head_loss, logits_loss
from zloss.objectives import make_objective
from zloss.telemetry.trackers import chosen_names, for_trackers
from zloss.telemetry.window import DEFAULT_WINDOW, StepWindow, micro_batch

try:
    from torch.distributed.tensor import Partial
    from torchtitan.components.loss import BaseLoss, ChunkedLossWrapper, CrossEntropyLoss
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.config.override import derive, override
    from torchtitan.distributed.spmd_types import current_spmd_mesh, spmd_mesh_size
    from torchtitan.tools.logging import logger
except ImportError:
    require_version("torchtitan", "0.3", "zloss.integrations.torchtitan", "torchtitan")
    raise

Result = tuple[Tensor, dict[str, Tensor]]  # a loss and its metrics
ON_CONSOLE = {"zloss/ce": ".5f", "zloss/z": ".3g", "zloss/log_z_p999": ".5f"}  # names and formats


class ZLoss(BaseLoss):  # type: ignore[misc]
    """CE + Z of logits [B, L, V]; replaces torchtitan's `CrossEntropyLoss`, alone or inside a `ChunkedLossWrapper`."""

    built: ClassVar[bool] = False
    """Whether this process has a ZLoss, so that its `ZLossMetrics` have something to log."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):  # type: ignore[misc]
        coef: float | None
        """λ; null or 0 trains CE alone."""
        target: float | None
        """c of λ(log Z − c)², without a default: 0 (most codebases) or None (null in JSON), which is log V. For "centered" and
        "factorized" use None: their log Z − μ is never below log V, so 0 cannot be reached and only flattens the logits."""
        objective: str = "standard"
        """"standard", "centered", "factorized" (λ_μ = λ_rel = coef, c_rel = target) or, fused only, "gain-aware"."""

    def __init__(self, config: Config, *, compile_config: object = None) -> None:
        ZLoss.built = True
        self.objective = make_objective(config.objective, config.coef, target=config.target)
        if config.coef and not self.objective.active:
            raise InputError(
                f"objective {config.objective!r} has no coefficient, but got coef={config.coef}: set it to 0."
            )

    def __call__(self, pred: Tensor, labels: Tensor, global_valid_tokens: Tensor | None = None, **_: Any) -> Result:
        if self.objective.needs_gain:
            raise MissingInputError(
                "gain-aware Z-loss needs `lm_head`: use FusedZLoss.Config(loss_fn=ZLoss.Config(…)), or drop "
                '"fused": false.'
            )
        logits, group = _local(pred, pred.dim() - 1)
        options = _options(logits, global_valid_tokens)
        return self.finish(logits_loss(logits, local_part(labels), self.objective, group=group, **options), options)

    def finish(self, out: HeadLossOutput, options: dict[str, Any]) -> Result:
        """What torchtitan trains or reports; the statistics of a training step go to the metrics."""
        if not out.loss.requires_grad:
            return out.cross_entropy, {}
        if ZLossMetrics.current is not None:
            ZLossMetrics.current.window.coordinate = self.objective.coordinate
            ZLossMetrics.current.window.add(micro_batch(out, options["reduction"], options["normalizer"]))
        return out.loss, {}


class FusedZLoss(ChunkedLossWrapper):  # type: ignore[misc]
    """The loss of its `loss_fn`, a `ZLoss`, from hidden states [B, L, D] and `lm_head`, without whole logits.

    The Trainer hands `lm_head` to a `ChunkedLossWrapper` and skips it in the model. The loss is computed inside a call of that
    module, whose hooks gather its weight under FSDP2. `num_chunks` has no effect: `head_loss` chooses its chunks.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ChunkedLossWrapper.Config): ...  # type: ignore[misc]

    def set_lm_head(self, lm_head: nn.Module) -> None:
        if type(lm_head).forward is not nn.Linear.forward or not isinstance(self.loss_fn, ZLoss):
            raise UnsupportedModelError(
                f"FusedZLoss needs a plain linear `lm_head` and a ZLoss, but got {type(lm_head).__name__} and "
                f"{type(self.loss_fn).__name__}: use ChunkedLossWrapper.Config(loss_fn=ZLoss.Config(…)), or set `fused` to false."
            )
        super().set_lm_head(lm_head)

    def __call__(self, pred: Tensor, labels: Tensor, global_valid_tokens: Tensor | None = None, **_: Any) -> Result:
        before = vars(self.lm_head).get("forward")  # set by tensor parallelism
        self.lm_head.forward = self._from_hidden
        try:
            return self.lm_head(pred, local_part(labels), global_valid_tokens)  # type: ignore[no-any-return]
        finally:
            del self.lm_head.forward
            if before is not None:
                self.lm_head.forward = before

    def _from_hidden(self, hidden: Tensor, labels: Tensor, global_valid_tokens: Tensor | None) -> Result:
        weight, group = _local(self.lm_head.weight, 0, hidden)
        bias = None if self.lm_head.bias is None else _local(self.lm_head.bias, 0, hidden)[0]
        local, _ = _local(hidden, None)
        if group is not None and not is_dtensor(hidden) and local.requires_grad:
            # spmd_types adds the gradients of replicated activations over ranks, and `head_loss` has already done so.
            local = local.view_as(local)
            local.register_hook(lambda gradient: gradient / group.size())  # type: ignore[no-untyped-call]
        options = _options(local, global_valid_tokens)
        out = head_loss(local, weight, labels, self.loss_fn.objective, bias=bias, group=group, **options)
        return self.loss_fn.finish(out, options)  # type: ignore[no-any-return]


def _options(pred: Tensor, global_valid_tokens: Tensor | None) -> dict[str, Any]:
    """Torchtitan's divisor, none in evaluation; all statistics where they are read."""
    if pred.is_cuda and torch.cuda.is_current_stream_capturing():
        raise UnsupportedModelError("a Z-loss cannot run inside a CUDA graph: set --training.disable_cuda_graphs.")
    return {
        "reduction": "sum" if global_valid_tokens is None else "mean",
        "normalizer": global_valid_tokens,
        "statistics": "full" if pred.requires_grad and ZLossMetrics.current is not None else "light",
    }


def _local(tensor: Tensor, split: int | None, hidden: Tensor | None = None) -> tuple[Tensor, ProcessGroup | None]:
    """This rank's part of a tensor, and the group over which its dimension `split`, the vocabulary, is sharded."""
    if not is_dtensor(tensor):
        in_shards = split is not None and spmd_mesh_size("tp") > 1  # the spmd_types backend passes plain shards
        return tensor, current_spmd_mesh().get_group("tp") if in_shards else None
    gradient = list(tensor.placements)
    if is_dtensor(hidden):  # what a weight is multiplied by: its gradient is partial where tokens are sharded
        gradient = [Partial() if p.is_shard() else own for p, own in zip(hidden.placements, gradient, strict=True)]
    sharded = [axis for axis, place in enumerate(tensor.placements) if split is not None and place.is_shard(split)]
    group = tensor.device_mesh.get_group(sharded[0]) if sharded else None
    return tensor.to_local(grad_placements=gradient), group


class ZLossMetrics(MetricsProcessor):  # type: ignore[misc]
    """torchtitan's metrics with the scalars `zloss/…`: CE and Z of the logged step, tails over the tokens since the last log."""

    current: ClassVar[ZLossMetrics | None] = None
    """Where the losses of this process report: torchtitan gives a loss no reference to its metrics."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):  # type: ignore[misc]
        scalars: Literal["main", "all"] = "main"
        """Nine scalars or about forty."""

    def __init__(self, config: Config, *, parallel_dims: Any, **settings: Any) -> None:
        super().__init__(config, parallel_dims=parallel_dims, **settings)
        mesh = parallel_dims.get_optional_mesh("loss")  # ranks that hold different tokens
        group = None if mesh is None else mesh.get_group()
        self.window = StepWindow(DEFAULT_WINDOW, across_ranks=group is not None, group=group, since_restart=True)
        ZLossMetrics.current = self

    def should_log(self, step: int) -> bool:
        if not ZLoss.built:
            raise InputError(
                "z_loss_metrics is on, but the loss of this run is not a ZLoss: no Z-loss is trained and nothing would be "
                "logged. Add zloss.integrations.torchtitan.z_loss to the same --override.imports."
            )
        self.window.end_step()  # the Trainer asks as a step begins
        return super().should_log(step)  # type: ignore[no-any-return]

    def log(self, step: int, *numbers: float, extra_metrics: dict[str, Any] | None = None, **named: float) -> None:
        self.window.end_step()
        since_last_log, this_step = self.window.both()
        parts = {name: this_step[name] for name in ("ce", "z") if name in this_step}  # their sum is torchtitan's loss
        found = for_trackers(since_last_log | parts, chosen_names(self.config.scalars))
        self.window.restart()
        super().log(step, *numbers, extra_metrics={**(extra_metrics or {}), **found}, **named)
        shown = [f"{name}: {found[name]:{digits}}" for name, digits in ON_CONSOLE.items() if name in found]
        if shown:  # nothing on the first stages of a pipeline
            logger.info("  ".join([f"step: {step:2}", *shown]))

    def close(self) -> None:
        ZLossMetrics.current = None
        super().close()


@override(target=BaseLoss.Config, fqns=["loss"], description="CE + Z")  # type: ignore[untyped-decorator]
def z_loss(config: Any, *, fused: bool = True, **settings: Any) -> Any:
    """For `--override.imports`: `settings` are those of `ZLoss.Config`. With `"fused": false` the loss is on logits, in
    torchtitan's chunks if `config` has them."""
    known = [field.name for field in fields(ZLoss.Config)]
    for name in settings:
        if name not in known:
            raise UnknownNameError("setting of z_loss", name, [*known, "fused"])
    if "coef" not in settings:
        raise MissingInputError("`coef` must be given: the coefficient λ, or null for cross-entropy alone.")
    if "target" not in settings:
        raise MissingInputError("`target` must be given: 0.0 (the convention of most code) or null (log V).")
    if not isinstance(fused, bool):
        raise InputError(f"`fused` is expected to be true or false, but got {fused!r}.")
    chunked = isinstance(config, ChunkedLossWrapper.Config)
    replaced = config.loss_fn if chunked else config
    if not isinstance(replaced, CrossEntropyLoss.Config):
        hint = " It is a Z-loss already: set --loss.loss_fn.coef instead." if isinstance(replaced, ZLoss.Config) else ""
        raise InputError(
            f"a Z-loss replaces CrossEntropyLoss.Config, but this loss is {type(replaced).__qualname__}.{hint}"
        )
    inner = ZLoss.Config(**settings)
    if fused:
        return FusedZLoss.Config(loss_fn=inner)
    return replace(config, loss_fn=inner) if chunked else inner


@override(target=MetricsProcessor.Config, fqns=["metrics"], description="CE, Z")  # type: ignore[untyped-decorator]
def z_loss_metrics(config: Any, *, scalars: Literal["main", "all"] = "main") -> Any:
    """For `--override.imports`."""
    return derive(config, ZLossMetrics.Config, scalars=scalars)
