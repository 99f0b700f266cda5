"""torchtitan's own Trainer on two gloo processes against an eager reference on one; loaded in the processes of the job alone.

The reference holds the whole model in fp64, computes CE + Z from whole logits, divides by the valid tokens of the step and
steps torch's AdamW. Both start from the same weights. The stand-ins are for what a CPU does not have: attention is
torchtitan's own module for `F.scaled_dot_product_attention`, because its flex attention is for GPUs; FSDP2 sums gradients
with gloo's own sum; `run` leaves out timeouts of process groups and the pause of two seconds at the end of a run.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import BaseLoss, ChunkedLossWrapper, CrossEntropyLoss, MSELoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.components.validate import Validator
from torchtitan.config import ConfigManager, DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.config.override import OverrideConfig, apply_overrides, parse_cli_imports
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.spmd_types import set_current_spmd_mesh
from torchtitan.models import llama3
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

import zloss
from tests.distributed.launch import leave
from zloss.integrations.torchtitan import FusedZLoss, ZLoss, ZLossMetrics

VOCAB, WIDTH, SEQUENCES, LENGTH, STEPS, COEF = 61, 16, 2, 8, 4, 0.1
ADAM = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-4, "weight_decay": 0.1}
VALIDATION = 1000
"""Number of the first validation batch."""
OURS = "zloss.integrations.torchtitan."
PAGE = Path(__file__).parents[2] / "docs/torchtitan.md"


def batch(number: int) -> tuple[dict[str, Tensor], Tensor]:
    """[B, L] tokens and labels with a different number of ignored ones in every batch."""
    g = torch.Generator().manual_seed(number)
    tokens = torch.randint(VOCAB, (SEQUENCES, LENGTH + 1), generator=g)
    labels = tokens[:, 1:].clone()
    labels[:, : 1 + number % 4] = -100
    positions = torch.arange(LENGTH).repeat(SEQUENCES, 1)
    return {"input": tokens[:, :-1].contiguous(), "positions": positions}, labels


class Batches(BaseDataLoader):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        first: int = 0
        infinite: bool = True

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, **kwargs: object) -> None:
        self.first, self.stride = config.first + dp_rank, dp_world_size

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        for number in range(self.first, self.first + 100 * self.stride, self.stride):
            yield batch(number)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class NoTokenizer(BaseTokenizer):
    """The batches are tokens already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config): ...

    def __init__(self, config: Config, **kwargs: object) -> None: ...

    def encode(self, *args: object, **kwargs: object) -> list[int]:
        raise NotImplementedError

    decode = get_vocab_size = encode  # type: ignore[assignment]


def model_spec(tied: bool = False) -> ModelSpec:
    rope = ComplexRoPE.Config(dim=WIDTH // 2, max_seq_len=LENGTH, theta=10000, scaling="none")
    layers = llama3._build_llama3_layers(
        n_layers=2, dim=WIDTH, n_heads=2, hidden_dim=32, attn_backend="flex", rope=rope
    )
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    embedding = llama3._EMBEDDING_SKIP_INIT if tied else llama3._EMBEDDING_INIT
    model = llama3.Llama3Model.Config(
        dim=WIDTH,
        vocab_size=VOCAB,
        enable_weight_tying=tied,
        tok_embeddings=Embedding.Config(num_embeddings=VOCAB, embedding_dim=WIDTH, param_init=embedding),
        norm=RMSNorm.Config(normalized_shape=WIDTH, param_init=llama3._NORM_INIT),
        lm_head=Linear.Config(in_features=WIDTH, out_features=VOCAB, param_init=llama3._output_linear_init(WIDTH)),
        layers=layers,
    )
    fixed = {"post_optimizer_build_fn": None, "state_dict_adapter": None, "pipelining_fn": None}
    return ModelSpec(name="llama3", flavor="tiny", model=model, parallelize_fn=llama3.parallelize_llama, **fixed)


@dataclass(frozen=True)
class Case:
    loss: BaseLoss.Config
    """Before the overrides."""
    overrides: tuple[str, ...] = ()
    objective: zloss.Objective = zloss.StandardZLoss(COEF, target=0.0)  # noqa: RUF009
    """What the reference trains."""
    tp: int = 1
    ranks: int = 2
    backend: str = "partial_dtensor"
    sequence_parallel: bool = True
    accumulate: int = 1
    tied: bool = False
    bf16: bool = False
    log_every: int = 1

    @property
    def data_ranks(self) -> int:
        return self.ranks // self.tp


def z(coef: float = COEF, target: float | None = 0.0, objective: str = "standard") -> ZLoss.Config:
    return ZLoss.Config(coef=coef, target=target, objective=objective)


FUSED = FusedZLoss.Config(loss_fn=z())
CHUNKED = ChunkedLossWrapper.Config(num_chunks=2, loss_fn=z())
STOCK = ChunkedLossWrapper.Config(num_chunks=2, loss_fn=CrossEntropyLoss.Config(global_vocab_size=VOCAB))
METRICS = OURS + 'z_loss_metrics={"scalars": "all"}'
JSON = '={"coef": 0.1, "target": 0.0}'
CASES = {
    "on logits, FSDP2": Case(z(), (OURS + "z_loss_metrics",)),
    "on logits, TP = 2": Case(z(), (METRICS,), tp=2),
    "on chunks of logits, FSDP2": Case(STOCK, (OURS + "z_loss" + JSON.replace("}", ', "fused": false}'), METRICS)),
    "on chunks of logits, TP = 2": Case(CHUNKED, (METRICS,), tp=2),
    "on logits, 3 micro-batches, FSDP2": Case(z(), (METRICS,), accumulate=3),
    "fused, FSDP2": Case(STOCK, (OURS + "z_loss" + JSON, METRICS)),
    "fused, TP = 2": Case(FUSED, (METRICS,), tp=2),
    "fused, TP = 2 without sequence parallel": Case(FUSED, (), tp=2, sequence_parallel=False),
    "fused, 3 micro-batches, FSDP2": Case(FUSED, (METRICS,), accumulate=3, log_every=2),
    "fused, 3 micro-batches, TP = 2": Case(FUSED, (METRICS,), accumulate=3, tp=2),
    "fused, 1 process": Case(FUSED, (METRICS,), ranks=1, backend="spmd_types"),
    "fused, bf16, FSDP2": Case(FUSED, (METRICS,), bf16=True),
    "on logits, bf16, FSDP2": Case(z(), (METRICS,), bf16=True),
    "fused, FSDP2 × TP = 2": Case(FUSED, (METRICS,), tp=2, ranks=4),
    "fused, tied weights, FSDP2": Case(FUSED, (), tied=True),
    "fused, centered, c = log V, FSDP2": Case(
        FusedZLoss.Config(loss_fn=z(target=None, objective="centered")), (), zloss.CenteredZLoss(COEF)
    ),
    "fused, gain-aware, TP = 2": Case(
        FusedZLoss.Config(loss_fn=z(objective="gain-aware")), (), zloss.GainAwareZLoss(COEF, target=0.0), tp=2
    ),
    "on logits, full DTensor, FSDP2": Case(z(), (METRICS,), backend="full_dtensor"),
    "fused, full DTensor, FSDP2": Case(FUSED, (METRICS,), backend="full_dtensor"),
    "on logits, full DTensor, TP = 2": Case(z(), (METRICS,), backend="full_dtensor", tp=2),
    "fused, full DTensor, TP = 2": Case(FUSED, (METRICS,), backend="full_dtensor", tp=2),
}


def built(case: Case, folder: str) -> Trainer:
    optimizer = default_adamw(**ADAM)
    optimizer.implementation = "foreach"
    config = Trainer.Config(
        loss=deepcopy(case.loss),
        model_spec=model_spec(case.tied),
        tokenizer=NoTokenizer.Config(),
        dataloader=Batches.Config(),
        validator=Validator.Config(enable=True, freq=STEPS, steps=3, dataloader=Batches.Config(first=VALIDATION)),
        optimizer=optimizer,
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=0, min_lr_factor=1.0),
        training=TrainingConfig(
            local_batch_size=SEQUENCES,
            global_batch_size=SEQUENCES * case.data_ranks * case.accumulate,
            seq_len=LENGTH,
            steps=STEPS,
            mixed_precision_param="bfloat16" if case.bf16 else "float32",
            disable_cuda_graphs=True,
        ),
        metrics=MetricsProcessor.Config(log_freq=case.log_every),
        parallelism=ParallelismConfig(
            tensor_parallel_degree=case.tp, spmd_backend=case.backend, enable_sequence_parallel=case.sequence_parallel
        ),
        activation_checkpoint=None,
        debug=DebugConfig(seed=1),
        override=OverrideConfig(imports=parse_cli_imports(list(case.overrides))),
        dump_folder=folder,
    )
    trainer = config.build()
    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    return trainer


class Recorder:
    """A logger of torchtitan's metrics that keeps them."""

    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, float]]] = []

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.logged.append((step, metrics))

    def close(self) -> None: ...


def parameters(trainer: Trainer) -> dict[str, Tensor]:
    """Whole copies, on every rank."""
    named = trainer.model_parts[0].named_parameters()
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().double() for name, value in named
    }


def run(case: Case) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(dist_utils, "set_pg_timeouts"):
        trainer = built(case, folder)
        trainer.metrics_processor.logger = recorder = Recorder()
        begin = parameters(trainer)
        with mock.patch("torchtitan.trainer.time.sleep"):
            trainer.train()
        end = parameters(trainer)
        trainer.close()
    wanted, loss, tokens, (ce, z) = reference(case, begin, case.objective)
    without, *_ = reference(case, begin, zloss.CrossEntropy())
    moved = distance(wanted, begin)
    logged = dict(entry for entry in recorder.logged if "grad_norm" in entry[1])
    validated = [numbers["validation_metrics/loss"] for _, numbers in recorder.logged if "grad_norm" not in numbers]
    return {
        "error": distance(end, wanted) / moved,
        "without_z": distance(without, wanted) / moved,
        "validation": relative(validated[-1], ce),
        "validation_of_loss": relative(validated[-1], ce + z),
        "loss": max(
            relative(numbers["loss_metrics/global_avg_loss"], loss[step - 1]) for step, numbers in logged.items()
        ),
        "scalars": scalar_errors(logged, tokens) if case.overrides else None,
        "reports": ZLossMetrics.current is not None,
    }


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float((one[name] - other[name]).square().sum()) for name in other))


def relative(one: float, other: float) -> float:
    return abs(one - other) / abs(other)


def scalar_errors(logged: dict[int, dict[str, float]], tokens: list[Any]) -> dict[str, float]:
    """The largest relative errors of CE and Z of a logged step, and of the tail of log Z over the tokens since the last log."""
    found: dict[str, float] = {}
    last = 0
    for step, numbers in logged.items():
        ce_T, z_T, _ = tokens[step - 1]
        log_z_T = np.concatenate([part[2] for part in tokens[last:step]])
        wanted = {"ce": ce_T.mean(), "z": z_T.mean(), "log_z_p999": np.quantile(log_z_T, 0.999)}
        if "zloss/tokens" in numbers:
            wanted["tokens"] = len(log_z_T)
        for name, value in wanted.items():
            found[name] = max(found.get(name, 0.0), relative(numbers[f"zloss/{name}"], float(value)))
        last = step
    return found


def reference(
    case: Case, begin: dict[str, Tensor], objective: zloss.Objective
) -> tuple[dict[str, Tensor], list[float], list[Any], tuple[float, float]]:
    """Parameters after the last step; by step the loss and (CE, Z, log Z) of its tokens; mean CE and Z of the validation."""
    model = model_spec(case.tied).model.build()
    model.init_states()
    model = model.double()
    model.load_state_dict(begin, strict=False)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    losses, tokens = [], []
    for step in range(STEPS):
        size = case.data_ranks * case.accumulate
        ce_T, z_T, log_z_T = token_losses(model, range(step * size, (step + 1) * size), objective)
        optimizer.zero_grad()
        loss = (ce_T + z_T).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss))
        tokens.append(tuple(part.detach().numpy() for part in (ce_T, z_T, log_z_T)))
    with torch.no_grad():
        ce_T, z_T, _ = token_losses(model, range(VALIDATION, VALIDATION + 3 * case.data_ranks), objective)
    whole = {name: value.detach() for name, value in model.named_parameters()}
    return whole, losses, tokens, (float(ce_T.mean()), float(z_T.mean()))


def token_losses(model: nn.Module, numbers: range, objective: zloss.Objective) -> tuple[Tensor, Tensor, Tensor]:
    """CE, Z and log Z of every valid token of these batches, from whole logits."""
    batches = [batch(number) for number in numbers]
    logits = torch.cat([model(inputs["input"], inputs["positions"]) for inputs, _ in batches])
    labels = torch.cat([labels for _, labels in batches])
    logits_TV, label_T = logits[labels != -100], labels[labels != -100]
    p_TV = logits_TV.detach().softmax(-1)
    gain_T = (p_TV @ model.lm_head.weight.detach()).norm(dim=-1) / p_TV.norm(dim=-1)
    ce_T = F.cross_entropy(logits_TV, label_T, reduction="none")
    return ce_T, objective.penalty(logits_TV, gain_T) * torch.ones_like(ce_T), logits_TV.logsumexp(-1)


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, weight and labels of one step of one process, the same on every rank."""
    g = torch.Generator().manual_seed(1)
    return torch.randn(SEQUENCES, LENGTH, WIDTH, generator=g), torch.randn(VOCAB, WIDTH, generator=g), batch(1)[1]


def gradients(objective: zloss.Objective) -> tuple[Tensor, Tensor, Tensor]:
    """By hidden states, weight and logits, in fp64 from whole logits."""
    hidden, weight, labels = tensors()
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logits = hidden @ weight.T
    logits.retain_grad()
    valid_TV = logits[labels != -100]
    ce_T = F.cross_entropy(valid_TV, labels[labels != -100], reduction="none")
    (ce_T + objective.penalty(valid_TV, None)).mean().backward()
    return hidden.grad, weight.grad, logits.grad


def fused_loss(weight: Tensor) -> FusedZLoss:
    """With an `lm_head` of this weight, or of this rank's rows."""
    lm_head = Linear.Config(in_features=WIDTH, out_features=len(weight)).build()
    lm_head.weight = nn.Parameter(weight)
    loss = FUSED.build()
    loss.set_lm_head(lm_head)
    return loss


def errors(name: str, measured: Tensor, wanted: Tensor, without: Tensor) -> dict[str, dict[str, float]]:
    parts = {"error": measured - wanted, "without_z": without - wanted}
    return {name: {key: float(part.norm() / wanted.norm()) for key, part in parts.items()}}


def gradients_without_a_trainer() -> dict[str, dict[str, float]]:
    """The losses called as a Trainer calls them, where it cannot be used or would not notice.

    spmd_types under TP = 2 passes plain local rows and columns, and adds the gradient of hidden states over ranks; its Trainer
    needs a newer torch on two processes. FSDP2 adds the local gradients of a DTensor, whatever their placements say.
    """
    (wanted_h, wanted_w, wanted_z), (no_h, no_w, no_z) = (
        gradients(CASES["fused, FSDP2"].objective),
        gradients(zloss.CrossEntropy()),
    )
    hidden, weight, labels = tensors()
    tokens, rank = (labels != -100).sum(), dist.get_rank()
    rows = slice(0, 31) if rank == 0 else slice(31, VOCAB)
    dist_utils.set_spmd_backend("spmd_types")
    with set_current_spmd_mesh(init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))):
        local_h, columns = hidden.clone().requires_grad_(), (hidden @ weight.T)[..., rows].contiguous().requires_grad_()
        fused = fused_loss(weight[rows].clone())
        fused(local_h, labels, tokens)[0].backward()
        z().build()(columns, labels, tokens)[0].backward()
    dist.all_reduce(local_h.grad)
    plain = "plain shards of spmd_types, TP = 2: gradient of the "
    found = errors(plain + "hidden states", local_h.grad, wanted_h, no_h)
    found |= errors(plain + "weight", fused.lm_head.weight.grad, wanted_w[rows], no_w[rows])
    found |= errors(plain + "logits", columns.grad, wanted_z[..., rows], no_z[..., rows])
    dist_utils.set_spmd_backend("full_dtensor")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    fused = fused_loss(distribute_tensor(weight, mesh, [Replicate()]))
    placed_h, placed_labels = (distribute_tensor(part, mesh, [Shard(0)]) for part in (hidden, labels))
    placed_h.requires_grad_()
    fused(placed_h, placed_labels, tokens)[0].backward()
    placed = "full DTensor on two data ranks: gradient of the "
    found |= errors(placed + "hidden states", placed_h.grad.full_tensor(), wanted_h, no_h)
    return found | errors(placed + "weight", fused.lm_head.weight.grad.full_tensor(), wanted_w, no_w)


def refusals() -> dict[str, str]:
    """The error that a user gets, by cause."""

    def error_of(work: Callable[[], Any]) -> str:
        try:
            work()
        except (zloss.errors.ZlossError, TypeError) as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    def building(case: Case) -> str:
        return error_of(lambda: built(case, tempfile.mkdtemp()))

    def fused(lm_head: nn.Module) -> str:
        return error_of(lambda: FUSED.build().set_lm_head(lm_head))

    class Scaled(Linear):
        @dataclass(kw_only=True, slots=True)
        class Config(Linear.Config): ...

        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    def only_metrics() -> None:
        ZLoss.built = False  # as in the process of a user
        built(Case(STOCK, (OURS + "z_loss_metrics",)), tempfile.mkdtemp()).metrics_processor.should_log(1)

    def gain_without_head() -> None:
        z(objective="gain-aware").build()(torch.randn(1, 2, VOCAB), batch(0)[1])

    return {
        "no target": building(Case(STOCK, (OURS + 'z_loss={"coef": 1e-4}',))),
        "metrics without a Z-loss": error_of(only_metrics),
        "no coefficient": building(Case(STOCK, (OURS + 'z_loss={"target": 0.0}',))),
        "unknown setting": building(
            Case(STOCK, (OURS + 'z_loss={"coef": 1e-4, "target": 0.0, "objectiv": "centered"}',))
        ),
        "fused is not a bool": building(Case(STOCK, (OURS + "z_loss" + JSON.replace("}", ', "fused": "no"}'),))),
        "a Z-loss already": building(Case(FUSED, (OURS + "z_loss" + JSON,))),
        "CE with a coefficient": building(Case(z(objective="ce"))),
        "a centered head with a coefficient": building(Case(z(objective="centered-head"))),
        "CE without one": building(Case(z(coef=0.0, objective="ce"))),
        "another loss": building(Case(MSELoss.Config(), (OURS + "z_loss" + JSON,))),
        "unknown objective": building(Case(z(objective="centred"))),
        "negative coefficient": building(Case(z(coef=-1.0))),
        "head with another forward": fused(Scaled.Config(in_features=2, out_features=3).build()),
        "gain without a head": error_of(gain_without_head),
        "plain head": fused(Linear.Config(in_features=2, out_features=3).build()),
        "cross-entropy in the fused loss": building(Case(FusedZLoss.Config())),
    }


def page() -> dict[str, Any]:
    """The configurations that the commands of docs/torchtitan.md build, with its module `my_configs`."""
    text = PAGE.read_text(encoding="utf-8")
    (module,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    sys.modules["my_configs"] = configs = ModuleType("my_configs")
    exec(module, vars(configs))
    found = {}
    for command in re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL):
        _, _, argv = command.replace("\\\n", " ").partition("-m torchtitan.train ")
        config = ConfigManager().parse_args(shlex.split(argv))
        apply_overrides(config.override, config)
        found[config.loss.to_dict()["loss_fn"]["coef"]] = [
            f"{config.loss}",
            type(config.metrics).__qualname__,
            config.training.disable_cuda_graphs,
        ]
    return found


OTHERS = {"gradients": gradients_without_a_trainer, "refusals": refusals, "page": page}


def on_rank(name: str) -> None:
    """One case; a process for each, because DTensor keeps the device mesh of the first Trainer."""
    dist.init_process_group("gloo")
    found = run(CASES[name]) if name in CASES else OTHERS[name]()
    if dist.get_rank() == 0:
        print(json.dumps(found))
    leave()
