"""OLMo-core's Trainer with our head on CPU processes, against eager CE + Z in fp64 on one process."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.distributed.launch import leave

VOCAB, LENGTH, BATCH, STEPS, COEF, LR = 64, 8, 8, 4, 0.1, 0.01
"""BATCH sequences per step over all ranks, in micro-batches of two."""
RECORDED = ("train/CE loss", "zloss/ce", "zloss/z", "zloss/log_z")
CASES = {"2 processes, FSDP2": "fsdp", "2 processes, DDP": "ddp", "TP = 2 with FSDP2": "tp"}


def batch(step: int) -> Tensor:
    """Token ids of all sequences of a step."""
    return torch.randint(VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step))


def labels_of(tokens: Tensor) -> Tensor:
    """Next tokens; the first sequences have fewer labels."""
    labels = F.pad(tokens[:, 1:], (0, 1), value=-100)
    labels[: BATCH // 2 : 2, :3] = -100
    return labels


def build(*, ours: bool) -> Any:
    """A transformer with the head of OLMo-core, or with ours, and the same parameters."""
    from olmo_core.nn.attention import AttentionBackendName
    from olmo_core.nn.transformer import TransformerConfig

    from zloss.integrations.olmo_core import ZLossLMHeadConfig

    config = TransformerConfig.llama_like(
        d_model=32, vocab_size=VOCAB, n_layers=1, n_heads=2, attn_backend=AttentionBackendName.torch
    )
    if ours:
        config.lm_head = ZLossLMHeadConfig.of(config.lm_head, coef=COEF, target=0.0)
    return filled(config.build(init_device="cpu"))


@torch.no_grad()
def filled(model: Any) -> Any:
    """The model with fixed parameters; OLMo-core initializes a model again when it makes it parallel."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        value = torch.randn(parameter.shape, generator=generator) * 0.3
        if isinstance(parameter, DTensor):
            value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
        parameter.copy_(value)
    return model


def train(kind: str | None) -> tuple[Any, list[dict[str, float]]]:
    """Four steps of OLMo-core's Trainer; the model and the metrics of every step."""
    from olmo_core.config import DType
    from olmo_core.data.data_loader import DataLoaderBase
    from olmo_core.distributed.parallel import DataParallelType
    from olmo_core.distributed.utils import get_rank, get_world_size
    from olmo_core.optim import AdamWConfig
    from olmo_core.train import Duration, TrainerConfig
    from olmo_core.train.callbacks import Callback
    from olmo_core.train.train_module import TransformerTrainModuleConfig
    from olmo_core.train.train_module.transformer.config import (
        TransformerDataParallelConfig,
        TransformerTensorParallelConfig,
    )

    from zloss.integrations.olmo_core import ZLossCallback

    class Data(DataLoaderBase):
        total_batches = STEPS

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            pass

        def reshuffle(self, epoch: int | None = None, **_: Any) -> None:
            pass

        def _iter_batches(self) -> Iterator[dict[str, Any]]:
            for step in range(STEPS):
                tokens = batch(step)
                mine = slice(self.dp_rank, None, self.dp_world_size)
                yield {"input_ids": tokens[mine], "labels": labels_of(tokens)[mine]}

        def get_mock_batch(self) -> dict[str, Any]:
            return {"input_ids": batch(99)[: BATCH // self.dp_world_size]}

    recorded: list[dict[str, float]] = []

    @dataclass
    class Keep(Callback):
        def log_metrics(self, step: int, metrics: dict[str, float]) -> None:
            recorded.append(dict(metrics))

    parallel: dict[str, Any] = {}
    if kind is not None:
        name = DataParallelType.ddp if kind == "ddp" else DataParallelType.fsdp
        parallel["dp_config"] = TransformerDataParallelConfig(
            name=name, param_dtype=DType.float32, reduce_dtype=DType.float32
        )
    if kind == "tp":
        parallel["tp_config"] = TransformerTensorParallelConfig(degree=2)
    module = TransformerTrainModuleConfig(
        rank_microbatch_size=2 * LENGTH,
        max_sequence_length=LENGTH,
        optim=AdamWConfig(lr=LR, eps=1e-3, weight_decay=0.0),
        **parallel,
    ).build(build(ours=True), device=torch.device("cpu"))
    filled(module.model)
    shared = 1 if kind in (None, "tp") else get_world_size()
    with tempfile.TemporaryDirectory() as folder:
        data = Data(
            work_dir=folder,
            global_batch_size=BATCH * LENGTH,
            dp_world_size=shared,
            dp_rank=get_rank() % shared,
            fs_local_rank=get_rank(),
        )
        TrainerConfig(
            save_folder=folder,
            max_duration=Duration.steps(STEPS),
            metrics_collect_interval=1,
            device="cpu",
            no_checkpoints=True,
            no_evals=True,
            async_bookkeeping=False,
            callbacks={"zloss": ZLossCallback(), "keep": Keep()},
        ).build(module, data).fit()
    return module, recorded


def eager(coef: float, ranks: int) -> tuple[dict[str, Tensor], list[tuple[float, float]]]:
    """Parameters after the steps, and CE and Z of every step, from whole logits in fp64: the mean over ranks of the mean over
    the labels of a rank, as OLMo-core defines it."""
    model = build(ours=False).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=1e-3, weight_decay=0.0)
    parts = []
    for step in range(STEPS):
        tokens = batch(step)
        logits, labels = model(tokens), labels_of(tokens)
        valid = labels != -100
        share_BN = torch.stack([valid[rank % ranks :: ranks].sum() for rank in range(BATCH)]).unsqueeze(1) * ranks
        ce = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
        z = torch.where(valid, coef * logits.logsumexp(-1).square(), 0)
        ce, z = (ce / share_BN).sum(), (z / share_BN).sum()
        optimizer.zero_grad()
        (ce + z).backward()
        optimizer.step()
        parts.append((float(ce.detach()), float(z.detach())))
    return {name: value.detach() for name, value in model.named_parameters()}, parts


def difference(module: Any, ranks: int, coef: float = COEF) -> float:
    """‖θ − θ_eager‖ / ‖θ_eager − θ_0‖."""
    from torch.distributed.tensor import DTensor

    wanted, _ = eager(coef, ranks)
    first = dict(build(ours=False).named_parameters())
    moved, _ = eager(COEF, ranks)
    error = norm = 0.0
    for name, value in module.model.named_parameters():
        name = name.removeprefix("module.")
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        error += float((whole.double() - wanted[name]).square().sum())
        norm += float((moved[name] - first[name].double()).square().sum())
    return (error / norm) ** 0.5


def processes() -> None:
    """The cases of as many processes as there are: relative error, the same without Z, metrics of the last step."""
    from olmo_core.distributed import parallel

    torch.set_num_threads(1)
    cases: dict[str, str | None] = {"1 process": None}
    if os.environ["WORLD_SIZE"] != "1":
        dist.init_process_group("gloo")
        cases = dict(CASES)
    found = {}
    for name, kind in cases.items():
        parallel._WORLD_MESH = None  # a process makes one mesh in its life, but here for each case
        module, recorded = train(kind)
        ranks = 2 if kind in ("fsdp", "ddp") else 1
        _, parts = eager(COEF, ranks)
        found[name] = {
            "error": difference(module, ranks),
            "without_z": difference(module, ranks, 0.0),
            "recorded": {key: value for key, value in recorded[-1].items() if key in RECORDED},
            "wanted": parts[-1],
        }
    if not dist.is_initialized():
        json.dump(found, sys.stdout)
        return
    if dist.get_rank() == 0:
        json.dump(found, sys.stdout)
    leave()
