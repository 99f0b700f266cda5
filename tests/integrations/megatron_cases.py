"""A `GPTModel` of megatron-core under our integration, on CPU processes, against eager CE + Z in fp64 on one process.

Everything of Megatron is used as it is: model, schedule, data parallelism, `finalize_model_grads`, optimizers. The stand-ins
for a GPU are in `on_cpu`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import zloss
from tests.distributed.launch import leave
from tests.docs.pages import DOCS, blocks_of
from tests.forked import forked_ranks
from tests.integrations.megatron_router_cases import ON_ONE, ON_TWO, router_audit, router_scales
from zloss.errors import ZlossError
from zloss.integrations.megatron import apply

VOCAB, WIDTH, LENGTH, BATCH, STEPS, MICRO, COEF, LR = 64, 16, 8, 3, 4, 4, 0.1, 0.05
PAGE = DOCS / "megatron.md"
OBJECTIVE = zloss.StandardZLoss(COEF, target=0.0)


@dataclass(frozen=True)
class Case:
    """How two processes train; the four micro-batches of a step are divided over the data-parallel ranks."""

    tp: int = 1
    pp: int = 1
    sp: bool = False
    overlap: bool = True
    per_token: bool = False
    tied: bool = False
    mtp: int | None = None
    adam: bool = False
    """Adam with Megatron's distributed optimizer and clipping, else SGD with momentum."""
    given: dict[str, Any] = field(default_factory=dict)
    """Arguments of `apply`."""

    @property
    def reference(self) -> str:
        """Cases with equal names have the same eager run."""
        return f"{self.per_token}{self.tied}{self.mtp}{self.adam}{self.given.get('mtp')}"


CASES = {
    "2 data ranks": Case(overlap=False),
    "2 data ranks, overlapped reductions": Case(),
    "2 data ranks, summed loss": Case(given={"reduction": "sum"}),
    "2 data ranks, summed, per-token gradients": Case(per_token=True, given={"reduction": "sum"}),
    "2 data ranks, logits": Case(given={"fused": False}),
    "2 data ranks, tied embeddings": Case(tied=True),
    "2 data ranks, distributed Adam, clipping": Case(adam=True),
    "2 data ranks, MTP, Z on the main head": Case(mtp=1),
    "2 data ranks, MTP, Z on the main head, logits": Case(mtp=1, given={"fused": False}),
    "TP = 2": Case(tp=2, overlap=False),
    "TP = 2, logits": Case(tp=2, given={"fused": False}),
    "TP = 2, sequence parallel": Case(tp=2, sp=True),
    "TP = 2, sequence parallel, logits": Case(tp=2, sp=True, given={"fused": False}),
    "TP = 2, sequence parallel, summed, per-token gradients": Case(
        tp=2, sp=True, per_token=True, given={"reduction": "sum"}
    ),
    "TP = 2, sequence parallel, tied, MTP, Z on every depth": Case(
        tp=2, sp=True, tied=True, mtp=1, given={"mtp": True}
    ),
    "PP = 2": Case(pp=2),
}


class OnCpu(TorchFunctionMode):
    """CUDA tensors are CPU tensors, whose `type()` is a name that Megatron's optimizers accept."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "device" in kwargs and "cuda" in str(kwargs["device"]):
            kwargs = kwargs | {"device": "cpu"}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*args, **kwargs)


def on_cpu() -> None:
    """Stand-ins for the devices and kernels that Megatron expects."""
    from megatron.core import tensor_parallel
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    def norm(_cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> nn.Module:
        """Layer norm whose parameters are marked for sequence parallelism, as Apex and Transformer Engine do."""
        layer = nn.LayerNorm(hidden_size, eps)
        for parameter in layer.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return layer

    torch.set_num_threads(1)
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    torch.cuda.set_device = lambda *_: None  # type: ignore[assignment]
    OnCpu().__enter__()
    # No dropout here: states of random generators do not matter.
    tensor_parallel.get_cuda_rng_tracker().fork = lambda *_: contextlib.nullcontext()
    WrappedTorchNorm.__new__ = norm
    moe_utils.te_general_gemm = None  # 0.16.1 reads this name without Transformer Engine too


def batch(step: int, micro: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, labels and loss mask [b, s] of a micro-batch; masks differ in length."""
    tokens = torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(10 * step + micro))
    labels, mask = tokens[:, 1:].contiguous(), torch.ones(BATCH, LENGTH)
    mask[:, : 1 + micro] = 0
    return tokens[:, :-1].contiguous(), labels, mask


def run_model(model: Any, tokens: Tensor, labels: Tensor | None, mask: Tensor | None) -> Any:
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    causal = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    return model(tokens, positions, causal, labels=labels, loss_mask=mask)


def build(case: Case, cls: Any = None, first: dict[str, Tensor] | None = None) -> Any:
    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=2,
        hidden_size=WIDTH,
        num_attention_heads=2,
        use_cpu_initialization=True,
        tensor_model_parallel_size=case.tp,
        pipeline_model_parallel_size=case.pp,
        pipeline_dtype=torch.float32,
        sequence_parallel=case.sp,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        calculate_per_token_loss=case.per_token,
        mtp_num_layers=case.mtp,
        finalize_model_grads_func=finalize_model_grads,
        batch_p2p_comm=False,
    )
    spec = get_gpt_layer_local_spec()
    torch.manual_seed(0)
    model = (cls or GPTModel)(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=VOCAB,
        max_sequence_length=LENGTH,
        share_embeddings_and_output_weights=case.tied,
        mtp_block_spec=get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False) if case.mtp else None,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "word_embeddings" in name or "output_layer" in name:
                parameter.mul_(20)  # so that log Z varies
            if first is not None:
                parameter.copy_(local(model, name, parameter, first))
    return model


def local(model: Any, name: str, parameter: Tensor, wholes: dict[str, Tensor]) -> Tensor:
    """The part of a whole parameter that this rank holds."""
    from megatron.core import parallel_state

    if not model.pre_process:  # the second of two stages has the second of two layers
        name = name.replace("decoder.layers.0.", "decoder.layers.1.")
    whole = wholes[name]
    if parameter.shape == whole.shape:
        return whole
    parts = whole.chunk(parallel_state.get_tensor_model_parallel_world_size(), parameter.partition_dim)  # type: ignore[attr-defined]
    return parts[parallel_state.get_tensor_model_parallel_rank()]


def train(case: Case, first: dict[str, Tensor]) -> Any:
    """The model after all steps, beginning with the parameters `first`."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func

    model = build(case, first=first)
    handle = apply(model, OBJECTIVE, **case.given)
    sharing = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=case.overlap, use_distributed_optimizer=case.adam
    )
    chunk = DistributedDataParallel(model.config, sharing, model)
    settings = {"optimizer": "sgd", "sgd_momentum": 0.9, "clip_grad": 0.0}
    if case.adam:
        settings = {"optimizer": "adam", "adam_eps": 1e-3, "clip_grad": 0.5, "use_distributed_optimizer": True}
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=LR, weight_decay=0.0, **settings), [chunk])

    def forward_step(data: Iterator[tuple[Tensor, Tensor, Tensor]], chunk: Any) -> Any:
        tokens, labels, mask = next(data)
        return run_model(chunk, tokens, labels, mask), lambda output: handle.loss_func(mask, output)

    ranks, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    for step in range(STEPS):
        chunk.zero_grad_buffer()
        optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter([batch(step, micro) for micro in range(rank, MICRO, ranks)]),
            model=[chunk],
            num_microbatches=MICRO // ranks,
            seq_length=LENGTH,
            micro_batch_size=BATCH,
            forward_only=False,
        )
        assert model.post_process == (handle.last is not None)
        if model.post_process:
            weight = model.shared_embedding_or_output_weight() if case.tied else model.output_layer.weight
            in_main_grad = case.given.get("fused", True) and (case.per_token or "reduction" not in case.given)
            assert weight.grad_added_to_main_grad == in_main_grad
        optimizer.step()
    return model


def eager(case: Case, coef: float) -> dict[str, Tensor]:
    """The parameters after all steps, from whole logits in fp64: mean over micro-batches, or over the tokens of a step."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

    main: list[Tensor] = []

    class Eager(GPTModel):
        def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
            logits_bsV = logits.transpose(0, 1)
            ce = F.cross_entropy(logits_bsV.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
            wanted = labels is main[0] or case.given.get("mtp")
            return ce + coef * logits_bsV.logsumexp(-1).square() if wanted else ce

    model = build(case, Eager).double()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    if case.adam:
        optimizer = torch.optim.Adam(model.parameters(), lr=LR, eps=1e-3)
    for step in range(STEPS):
        optimizer.zero_grad()
        parts = [batch(step, micro) for micro in range(MICRO)]
        total = sum(float(mask.sum()) for *_, mask in parts)
        for tokens, labels, mask in parts:
            main[:] = [labels]
            MTPLossAutoScaler.set_loss_scale(torch.tensor(1 / MICRO, dtype=torch.float64))
            loss = (run_model(model, tokens, labels, mask.double()) * mask).sum()
            (loss / (total if case.per_token else MICRO * mask.sum())).backward()
        if case.adam:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return {name: value.detach() for name, value in model.named_parameters()}


def distance(model: Any, first: dict[str, Tensor], wanted: dict[str, Tensor]) -> tuple[float, float]:
    """‖θ − θ_wanted‖² and ‖θ_wanted − θ_0‖² over the parameters that this rank holds."""
    error = moved = 0.0
    for name, value in model.named_parameters():
        begin, end = (local(model, name, value, wholes) for wholes in (first, wanted))
        error += float((value.double() - end).square().sum())
        moved += float((end - begin).square().sum())
    return error, moved


def two_processes() -> None:
    """Relative errors of all cases with and without Z, and scales of routers, by name."""
    from megatron.core import parallel_state

    on_cpu()
    dist.init_process_group("gloo")
    errors: dict[str, tuple[float, float]] = {}
    eager_runs: dict[str, Any] = {}
    parallel_state.initialize_model_parallel()
    for case in {case.reference: case for case in CASES.values()}.values():
        alone = Case(per_token=case.per_token, tied=case.tied, mtp=case.mtp, adam=case.adam, given=case.given)
        first = {key: value.detach().double() for key, value in build(alone).named_parameters()}
        both: list[Any] = [None, None]
        dist.all_gather_object(both, eager(alone, (COEF, 0.0)[dist.get_rank()]))  # with and without Z
        eager_runs[case.reference] = first, *both
    parallel_state.destroy_model_parallel()
    # Groups are made anew only where the layout changes.
    for layout, named in itertools.groupby(CASES.items(), key=lambda item: (item[1].tp, item[1].pp)):
        parallel_state.initialize_model_parallel(*layout)
        for name, case in named:
            first, with_z, without = eager_runs[case.reference]
            model = train(case, first)
            parts = [*distance(model, first, with_z), distance(model, first, without)[0]]
            sums = torch.tensor(parts, dtype=torch.float64)
            dist.all_reduce(sums)
            error, moved, missing = sums.tolist()
            errors[name] = ((error / moved) ** 0.5, (missing / moved) ** 0.5)
        parallel_state.destroy_model_parallel()
    scales = router_scales(ON_TWO)
    if dist.get_rank() == 0:
        json.dump({"errors": errors, "scales": scales}, sys.stdout)
    leave()


def one_process() -> None:
    """What does not need several processes."""
    from megatron.core import parallel_state

    on_cpu()
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    found: dict[str, Any] = {"facts": facts(), "refused": refused()}
    parallel_state.destroy_model_parallel()
    found |= {"scales": router_scales(ON_ONE), "router audit": router_audit()}
    json.dump(found, sys.stdout)
    leave()


def page() -> None:
    """The complete example of the page; prints what it prints."""
    from megatron.core import tensor_parallel

    on_cpu()
    tensor_parallel.model_parallel_cuda_manual_seed = lambda *_: None
    (example,) = (block for block in blocks_of(PAGE) if block.language == "python")
    exec(compile(example.text, str(example), "exec"), {"__name__": "page"})
    leave()


def facts() -> dict[str, bool]:
    from megatron.core.transformer.module import Float16Module

    tokens, labels, mask = batch(0, 1)
    model, gpt = build(Case()), build(Case())
    own, logits = run_model(gpt, tokens, labels, mask), run_model(gpt, tokens, None, mask)
    handle = apply(model, OBJECTIVE)
    loss, count, report = handle.loss_func(mask, run_model(model, tokens, labels, mask))
    counted = mask.bool()
    ce_sum, z_sum = own[counted].sum(), COEF * logits.logsumexp(-1).square()[counted].sum()
    found = {
        "training returns CE + Z": torch.allclose(loss, ce_sum + z_sum) and int(count) == int(mask.sum()),
        "CE is reported": torch.allclose(report["lm loss"], torch.stack([ce_sum, mask.sum()])),
        "a flat mask gives the same report": torch.equal(handle.report(mask.view(-1))["zloss/z"], report["zloss/z"]),
        "Z is reported": torch.allclose(report["zloss/z"], torch.stack([z_sum, mask.sum()])),
        "log Z is reported": torch.allclose(report["zloss/log_z"][0], logits.logsumexp(-1)[counted].sum()),
        "without labels there are logits": torch.equal(run_model(model, tokens, None, mask), logits),
    }
    model.eval()
    evaluated = run_model(model, tokens, labels, mask)
    found["evaluation returns the model's own CE"] = torch.equal(evaluated, own)
    found["evaluation reports CE alone"] = list(handle.loss_func(mask, evaluated)[2]) == ["lm loss"]
    model.train()
    handle.remove()
    found["remove() restores the model"] = torch.equal(run_model(model, tokens, labels, mask), own)
    patched = model.output_layer.forward = (
        model.output_layer.forward
    )  # an attribute of the instance, as a patch makes it
    apply(model, OBJECTIVE).remove()
    found["remove() keeps what others had patched"] = vars(model.output_layer).pop("forward") is patched
    found["remove() leaves nothing"] = "compute_language_model_loss" not in vars(model)
    with apply(model, zloss.StandardZLoss(0.0)) as off:
        found["a coefficient of 0 is off"] = bool(
            torch.allclose(run_model(model, tokens, labels, mask)[counted], own[counted], rtol=1e-6)
            and off.last is not None
            and float(off.last.auxiliary.sum()) == 0
        )
    model.config.bf16 = True
    wrapped = Float16Module(model.config, model)
    with apply(wrapped, OBJECTIVE):
        given = run_model(wrapped, tokens, labels, mask)[counted].sum()
    found["a wrapped model in bf16"] = bool(torch.isclose(given, ce_sum + z_sum, rtol=1e-2))
    return found


def refused() -> dict[str, str]:
    """What is refused, with its sentence."""
    model = build(Case())
    tokens, labels, mask = batch(0, 1)
    square = torch.arange(LENGTH * (LENGTH + 1)).view(LENGTH, LENGTH + 1) % VOCAB

    def applied(model: Any, *args: Any, **options: Any) -> Any:
        with apply(model, OBJECTIVE, **options):
            run_model(model, *args)

    def twice() -> None:
        with apply(model, OBJECTIVE):
            apply(model, OBJECTIVE)

    class Adapter(type(model.output_layer)):  # type: ignore[misc]
        pass

    def own_loss_func() -> None:
        with apply(model, OBJECTIVE, reduction="sum") as handle:
            run_model(model, tokens, labels, mask)
            handle.report(mask)

    def short_mask(report: bool) -> None:
        with apply(model, OBJECTIVE) as handle:
            output = run_model(model, tokens, labels, mask)
            handle.report(mask.view(-1)[1:]) if report else handle.loss_func(mask.view(-1)[1:], output)

    def tied_without_flag() -> None:
        tied = build(Case(tied=True))
        weight = tied.shared_embedding_or_output_weight()
        weight.main_grad, weight.grad_added_to_main_grad = torch.zeros_like(weight), False
        weight.zero_out_wgrad = False
        with apply(tied, OBJECTIVE):
            run_model(tied, tokens, labels, mask).sum().backward()

    biased = build(Case())
    biased.output_layer.bias = nn.Parameter(torch.zeros(VOCAB))
    adapted, overlapped = build(Case()), build(Case())
    adapted.output_layer.__class__ = Adapter
    overlapped.config.overlap_moe_expert_parallel_comm = True
    cases: dict[str, Callable[[], Any]] = {
        "no target": lambda: apply(model, zloss.StandardZLoss(1e-4)),
        "no relative target": lambda: apply(model, zloss.FactorizedZLoss(1e-4, 1e-4)),
        "no centered target": lambda: apply(model, zloss.CenteredZLoss(1e-4)),
        "a name": lambda: apply(model, "standard"),  # type: ignore[arg-type]
        "a list": lambda: apply([model], OBJECTIVE),  # type: ignore[arg-type]
        "a sum with another loss function": own_loss_func,
        "a short mask in the report": lambda: short_mask(True),
        "a short mask in the loss": lambda: short_mask(False),
        "a tied embedding that Megatron would drop": tied_without_flag,
        "a bias": lambda: apply(biased, OBJECTIVE),
        "labels of padding": lambda: applied(model, tokens, torch.full_like(labels, 60), mask, valid_vocab=60),
        "another reduction": lambda: apply(model, OBJECTIVE, reduction="mean"),  # type: ignore[arg-type]
        "not Megatron": lambda: apply(nn.Linear(2, 2), OBJECTIVE),
        "twice": twice,
        "an adapter": lambda: apply(adapted, OBJECTIVE),
        "overlapped experts": lambda: apply(overlapped, OBJECTIVE),
        "labels [s, b]": lambda: applied(model, tokens, labels.T, mask),
        "labels [s, b] with b = s": lambda: applied(model, square[:, :-1], square[:, 1:].T, None),
        "a sum without a mask": lambda: applied(model, tokens, labels, None, reduction="sum"),
    }
    said = {}
    for name, work in cases.items():
        try:
            work()
        except ZlossError as error:
            said[name] = f"{type(error).__name__}: {error}"
    applied(model, square[:, :-1], square[:, 1:], None)
    return said


def jobs() -> None:
    """All jobs as one JSON object. Megatron is imported once, in a separate process: it changes settings of torch."""
    import megatron.core.models.gpt
    import megatron.core.optimizer  # noqa: F401

    printed = forked_ranks(2, page)
    parts = [
        json.loads(forked_ranks(ranks, job).splitlines()[-1]) for ranks, job in ((1, one_process), (2, two_processes))
    ]
    json.dump(parts[0] | parts[1] | {"scales": parts[0]["scales"] | parts[1]["scales"], "page": printed}, sys.stdout)
