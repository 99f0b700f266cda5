"""What `moe_z_loss_coeff` applies: Megatron's `TopKRouter` under its schedule, data parallelism and `finalize_model_grads`.

Two layers of routers read given hidden states; the scale is measured from the gradients that an optimizer would get
(`zloss.measure_router_scale`). A scale of 1 is λ·Σ_l mean over the tokens of a step of (log Z)².
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import zloss

EXPERTS, TOP_K, WIDTH, LENGTH, BATCH, LAYERS, COEF = 8, 2, 16, 8, 2, 2, 0.01


@dataclass(frozen=True)
class RouterCase:
    micro: int = 1
    """Micro-batches of a step, over all ranks."""
    tp: int = 1
    sp: bool = False
    cp: int = 1
    masked: bool = False
    """Half of the tokens have no loss."""


ON_ONE = {
    "1 process": RouterCase(),
    "1 process, 4 micro-batches": RouterCase(micro=4),
    "1 process, half of the tokens without loss": RouterCase(masked=True),
}
ON_TWO = {
    "2 data ranks": RouterCase(micro=2),
    "2 data ranks, 4 micro-batches": RouterCase(micro=4),
    "TP = 2, sequence parallel": RouterCase(tp=2, sp=True),
    "TP = 2 without sequence parallel": RouterCase(tp=2),
    "CP = 2": RouterCase(cp=2),
    "CP = 2, 4 micro-batches": RouterCase(cp=2, micro=4),
}


def router_scales(cases: dict[str, RouterCase]) -> dict[str, tuple[float, float]]:
    """Scale of every case, without and with `calculate_per_token_loss`."""
    return {name: (_measure(case, False), _measure(case, True)) for name, case in cases.items()}


def router_audit() -> dict[str, Any]:
    """`zloss.audit_router` on Megatron's routers.

    A `TopKRouter` returns probabilities and a map, not its logits, so a subclass adds them to its output. The rest is what
    the audit expects of a model: which class has the logits, a coefficient to switch, and a loss.
    """
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe.router import TopKRouter

    class RouterWithLogits(TopKRouter):
        def forward(self, input: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, ...]:
            return *super().forward(input, padding_mask), self.gating(input)

    class Routers(nn.Module):
        _can_record_outputs = {"router_logits": SimpleNamespace(target_class=RouterWithLogits, index=2)}  # noqa: RUF012

        def __init__(self, config: Any) -> None:
            super().__init__()
            self.config = config
            groups = ProcessGroupCollection.use_mpu_process_groups()
            self.layers = nn.ModuleList(RouterWithLogits(config, pg_collection=groups) for _ in range(LAYERS))
            for number, layer in enumerate(self.layers, start=1):
                layer.set_layer_number(number)

        @property
        def router_z_loss_coef(self) -> float | None:
            return self.config.moe_z_loss_coeff  # type: ignore[no-any-return]

        @router_z_loss_coef.setter
        def router_z_loss_coef(self, coef: float) -> None:
            self.config.moe_z_loss_coeff = coef

        def forward(self, hidden: Tensor, labels: Tensor | None = None, **_: Any) -> Any:
            weights = torch.linspace(-1, 1, EXPERTS)
            return SimpleNamespace(loss=torch.stack([layer(hidden)[0] @ weights for layer in self.layers]).mean())

    parallel_state.initialize_model_parallel()
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=WIDTH,
        num_attention_heads=2,
        use_cpu_initialization=True,
        num_moe_experts=EXPERTS,
        moe_router_topk=TOP_K,
        moe_router_load_balancing_type="none",
        moe_z_loss_coeff=COEF,
        init_method_std=0.5,
    )
    torch.manual_seed(0)
    batch = {"hidden": torch.randn(LENGTH, BATCH, WIDTH), "labels": torch.zeros(BATCH, LENGTH)}
    found = zloss.audit_router(Routers(config), [batch], convention="megatron", target=0.0, top_k=TOP_K)
    parallel_state.destroy_model_parallel()
    assert found.applied is not None, found.reasons
    return {
        "coef_key": found.coef_key,
        "coef": found.coef,
        "stated": found.relative,
        "applied": found.applied.relative,
        "target": found.applied.target,
        "verdict": found.applied.verdict,
    }


def _measure(case: RouterCase, per_token: bool) -> float:
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.enums import ModelType
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.moe.router import TopKRouter

    class Routers(MegatronModule):
        """Routers alone; the output of a token is a fixed function of its routing weights."""

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model_type = ModelType.encoder_or_decoder
            groups = ProcessGroupCollection.use_mpu_process_groups()
            self.layers = nn.ModuleList(TopKRouter(config, pg_collection=groups) for _ in range(LAYERS))
            for number, layer in enumerate(self.layers, start=1):
                layer.set_layer_number(number)

        def set_input_tensor(self, _tensor: Any) -> None:
            pass

        def forward(self, hidden: Tensor) -> Tensor:
            weights = torch.linspace(-1, 1, EXPERTS)
            output = torch.stack([layer(hidden)[0] @ weights for layer in self.layers]).sum(0).view(hidden.shape[:2])
            if case.sp:  # as before the output layer of a model: the loss is that of all tokens on every rank
                output = gather_from_sequence_parallel_region(output, tensor_parallel_output_grad=False)
            return output

    parallel_state.initialize_model_parallel(case.tp, context_parallel_size=case.cp)
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=WIDTH,
        num_attention_heads=2,
        use_cpu_initialization=True,
        tensor_model_parallel_size=case.tp,
        context_parallel_size=case.cp,
        sequence_parallel=case.sp,
        calculate_per_token_loss=per_token,
        num_moe_experts=EXPERTS,
        moe_router_topk=TOP_K,
        moe_router_load_balancing_type="none",
        finalize_model_grads_func=finalize_model_grads,
        add_bias_linear=False,
        init_method_std=0.5,
    )
    torch.manual_seed(0)
    model = Routers(config)
    chunk = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
    parameters = [layer.weight for layer in model.layers]
    batches = torch.randn(case.micro, LENGTH, BATCH, WIDTH, generator=torch.Generator().manual_seed(1)).unbind()
    ranks, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    parts = case.cp if case.cp > 1 else (case.tp if case.sp else 1)
    place = parallel_state.get_context_parallel_rank() + (
        parallel_state.get_tensor_model_parallel_rank() if case.sp else 0
    )
    mask = torch.ones(LENGTH // case.cp, BATCH)
    if case.masked:
        mask[::2] = 0

    def forward_step(data: Any, chunk: Any) -> Any:
        return chunk(next(data)), lambda output: ((output * mask).sum(), mask.sum().to(torch.int), {})

    def gradient(coef: float | None) -> Tensor:
        """A scalar whose gradient is the one an optimizer would get."""
        config.moe_z_loss_coeff = coef
        chunk.zero_grad_buffer()
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter([batch.chunk(parts)[place] for batch in batches[rank::ranks]]),
            model=[chunk],
            num_microbatches=case.micro // ranks,
            seq_length=LENGTH,
            micro_batch_size=BATCH,
            forward_only=False,
        )
        return torch.stack([(weight * weight.main_grad.clone()).sum() for weight in parameters]).sum()

    measured = zloss.measure_router_scale(
        lambda: gradient(COEF),
        lambda: gradient(None),
        lambda: [layer.gating(torch.cat(batches, dim=1)).flatten(0, 1) for layer in model.layers],
        parameters,
        coef=COEF,
        target=0.0,
    )
    parallel_state.destroy_model_parallel()
    assert measured.verdict == "explained", measured
    return measured.relative / LAYERS
