"""Vocabulary-parallel losses against one process; run once per number of ranks by `test_vocabulary_parallel.py`.

Every rank computes the whole loss by itself and compares its own part of the sharded one with it. V is not divisible by
the number of ranks, ignored tokens are spread unevenly, and λ is large, so that Z shows.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

import zloss
from tests.distributed.launch import leave
from zloss.head.sharded import VocabularyShard

OBJECTIVES = {
    "ce": zloss.CrossEntropy(),
    "centered-head": zloss.CenteredHead(),
    "standard": zloss.StandardZLoss(0.3),
    "centered": zloss.CenteredZLoss(0.3, target=1.0),
    "factorized": zloss.FactorizedZLoss(0.2, 0.1),
    "gain-aware": zloss.GainAwareZLoss(0.3),
}
VOCAB, VALID, WIDTH, TOKENS = 103, 97, 16, 37
STATISTICS = (
    *("row_max", "log_s", "target_logit", "mu", "p_norm", "gain", "gain_centered", "entropy"),
    *("predicted", "mu_residual"),
)
SIZES = {2: (60, 43), 3: (61, 0, 42)}


@dataclass(frozen=True)
class Sharded:
    """How the head is divided: the own rows, and what a loss takes for them."""

    rows: slice
    weight: Callable[[Tensor], Tensor]
    keyword: dict[str, Any]


@functools.cache
def all_ranks() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def layouts() -> dict[str, Sharded]:
    """Plain shards of uneven sizes with `group=`, and DTensors in torch's own layout."""
    world, rank = dist.get_world_size(), dist.get_rank()
    sizes = SIZES[world]
    own = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    mesh = all_ranks()
    step = -(-VOCAB // world)
    chunk = slice(min(rank * step, VOCAB), min((rank + 1) * step, VOCAB))
    return {
        "group": Sharded(own, lambda value: value[own].clone(), {"group": dist.group.WORLD}),
        "dtensor": Sharded(chunk, lambda value: distribute_tensor(value, mesh, [Shard(0)], src_data_rank=None), {}),
    }


def inputs(dtype: torch.dtype, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden, weight = torch.randn(TOKENS, WIDTH, dtype=dtype), scale * torch.randn(VOCAB, WIDTH, dtype=dtype)
    bias, target = torch.randn(VOCAB, dtype=dtype), torch.randint(0, VALID, (TOKENS,))
    target[: TOKENS // 2 : 3] = -100
    return hidden, weight, bias, target


def plain(value: Tensor | None) -> Tensor:
    assert value is not None
    return value.to_local() if isinstance(value, DTensor) else value


def difference(got: Tensor | None, want: Tensor | None, floor: float = 0.0) -> float:
    """Largest difference relative to the largest wanted number."""
    if got is None or want is None:
        assert got is want, "one of the two is missing"
        return 0.0
    got, want = plain(got).detach(), plain(want).detach()
    assert got.shape == want.shape, (got.shape, want.shape)
    if not want.numel():
        return 0.0
    far = (got - want).abs().max() / want.abs().max().clamp_min(max(floor, 1e-30))
    return float(far) if bool(torch.isfinite(far)) else float("inf")


def head_differences(how: Sharded, dtype: torch.dtype, objective: zloss.Objective, **options: Any) -> dict[str, float]:
    """loss, dh, dW, db, every statistic and the source of a sharded head against one process."""
    hidden, weight, bias, target = inputs(dtype)
    with_bias = options.pop("with_bias", True)

    def run(weight: Tensor, bias: Tensor | None, **more: Any) -> tuple[zloss.HeadLossOutput, list[Tensor | None]]:
        leaves = [hidden.clone().requires_grad_(), weight.requires_grad_(), bias]
        if bias is not None:
            leaves[2] = bias.requires_grad_()
        out = zloss.head_loss(leaves[0], leaves[1], target, objective, bias=leaves[2], **options, **more)
        upstream = torch.linspace(0.5, 1.5, TOKENS, dtype=out.loss.dtype)
        (out.loss if out.loss.dim() == 0 else (out.loss * upstream).sum()).backward()
        return out, [None if leaf is None else leaf.grad for leaf in leaves]

    whole, grads = run(weight.clone(), bias.clone() if with_bias else None)
    own, own_grads = run(how.weight(weight), how.weight(bias) if with_bias else None, **how.keyword)
    found = {
        "loss": difference(own.loss, whole.loss),
        "auxiliary": difference(own.auxiliary, whole.auxiliary, 1e-3),
        "dh": difference(own_grads[0], grads[0]),
        "dW": difference(own_grads[1], plain(grads[1])[how.rows]),
    }
    if with_bias:
        found["db"] = difference(own_grads[2], plain(grads[2])[how.rows])
    for name in STATISTICS:
        # What is left of μ after the mean row is rounding itself: it is measured against μ.
        floor = 10.0 if name == "mu_residual" else 1.0
        found[name] = difference(getattr(own.stats, name), getattr(whole.stats, name), floor)
    source = {k: v for k, v in options.items() if k in ("label_smoothing", "valid_vocab", "reduction", "softcap")}
    want = zloss.head_source(hidden, weight, target, objective, part="total", **source)
    got = zloss.head_source(hidden, how.weight(weight), target, objective, part="total", **source, **how.keyword)
    inside = slice(how.rows.start, max(how.rows.start, min(how.rows.stop, options.get("valid_vocab") or VOCAB)))
    found["source"] = difference(got, want[:, inside])
    return found


def logits_differences(
    how: Sharded, dtype: torch.dtype, objective: zloss.Objective, **options: Any
) -> dict[str, float]:
    """loss, dz and statistics of sharded logits against one process."""
    hidden, weight, bias, target = inputs(dtype)
    logits = hidden @ weight.T + bias
    mesh = all_ranks()

    def run(logits: Tensor, weight: Tensor, **more: Any) -> tuple[zloss.HeadLossOutput, Tensor | None]:
        logits.requires_grad_()
        out = zloss.logits_loss(logits, target, objective, weight=weight, **options, **more)
        out.loss.sum().backward()
        return out, logits.grad

    whole, grad = run(logits.clone(), weight)
    if how.keyword:
        mine = logits[:, how.rows].clone()
    else:
        mine = distribute_tensor(logits, mesh, [Shard(1)], src_data_rank=None)
    own, own_grad = run(mine, how.weight(weight), **how.keyword)
    found = {"loss": difference(own.loss, whole.loss), "dz": difference(own_grad, plain(grad)[:, how.rows])}
    for name in STATISTICS:
        found[name] = difference(getattr(own.stats, name), getattr(whole.stats, name), 1.0)
    return found


def cases() -> Iterator[tuple[str, dict[str, float]]]:
    """name: differences."""
    everything = {"valid_vocab": VALID, "label_smoothing": 0.1, "chunk_size": 10}
    for layout, how in layouts().items():
        for dtype in (torch.float32, torch.float64):
            bits = str(dtype).removeprefix("torch.")
            # What fp32 changes is the same on any number of ranks: three have it for one objective, two for all of them.
            few = dtype == torch.float32 and dist.get_world_size() > 2
            for name, objective in {"factorized": OBJECTIVES["factorized"]}.items() if few else OBJECTIVES.items():
                for reduction in ("mean", "sum", "none"):
                    for statistics in ("light", "audit") if reduction == "mean" else ("full",):
                        options = {"reduction": reduction, "statistics": statistics, **everything}
                        title = f"{bits}|{layout}, {name}, {reduction}, {statistics}"
                        yield title, head_differences(how, dtype, objective, **options)
                    yield (
                        f"{bits}|{layout}, logits, {name}, {reduction}",
                        logits_differences(
                            how, dtype, objective, reduction=reduction, statistics="audit", **everything
                        ),
                    )
            for smoothing, statistics in ((0.0, "full"), (0.1, "full"), (0.1, "light")):
                capped = {"softcap": 5.0, "logit_scale": 0.7, "with_bias": smoothing > 0, "valid_vocab": VALID}
                capped |= {"label_smoothing": smoothing, "statistics": statistics, "chunk_size": 10}
                title = f"{bits}|{layout}, softcap, smoothing {smoothing}, {statistics}"
                yield title, head_differences(how, dtype, OBJECTIVES["standard"], **capped)
    yield from special_cases()


def compared(
    target: Tensor, got: list[Tensor], want: list[Tensor], how: Sharded, name: str = "centered", **options: Any
) -> tuple[dict[str, float], list[Tensor]]:
    """loss, gain and gradients of (hidden, weight[, bias]) on ranks against one process; and the leaves of the ranks."""
    outs, leaves = [], []
    for tensors, keyword in ((got, how.keyword), (want, {})):
        leaf = [tensor.clone().requires_grad_() for tensor in tensors]
        bias = leaf[2] if len(leaf) > 2 else None
        outs.append(zloss.head_loss(*leaf[:2], target, OBJECTIVES[name], bias=bias, **options, **keyword))
        outs[-1].loss.sum().backward()
        leaves.append(leaf)
    own, whole = outs
    found = {"loss": difference(own.loss, whole.loss)}
    if own.stats.gain is not None or whole.stats.gain is not None:
        valid = whole.stats.valid
        found["gain"] = difference(own.stats.gain[valid], whole.stats.gain[valid])
    for mine, other, key in zip(*leaves, ("dh", "dW", "db"), strict=False):
        if isinstance(mine.grad, DTensor):
            assert mine.grad.placements == mine.placements
            found[key] = difference(mine.grad.full_tensor(), other.grad)
        else:
            found[key] = difference(mine.grad, other.grad if key == "dh" else plain(other.grad)[how.rows])
    return found, leaves[0]


def special_cases() -> Iterator[tuple[str, dict[str, float]]]:
    """A rank whose rows are all masked, hidden states sharded over tokens, 16-bit heads, a given buffer for dW."""
    how, spread, mesh = layouts()["group"], layouts()["dtensor"], all_ranks()
    hidden, weight, bias, target = inputs(torch.float64)
    first = SIZES[dist.get_world_size()][0]
    masked = torch.where(torch.arange(VOCAB) < first, bias, -torch.inf)
    for dtype in (torch.float32, torch.float64):
        want = [value.to(dtype) for value in (hidden, weight, masked)]
        case = (target.clamp(max=first - 1), [want[0], *(how.weight(value) for value in want[1:])], want, how)
        title = f"{str(dtype).removeprefix('torch.')}|every row of a rank is -inf"
        yield title, compared(*case, "standard")[0]
        with patch("zloss.head.arguments.may_read", lambda tensor: False):  # as on a device whose values cannot be read
            yield f"{title}, unread", compared(*case, "standard", statistics="light", backend="chunked")[0]

    tokens = distribute_tensor(hidden, mesh, [Shard(0)], src_data_rank=None)
    found, _ = compared(target, [tokens, spread.weight(weight)], [hidden, weight], spread)
    yield "float64|hidden states sharded over tokens", found
    yield from token_sharded_cases()

    module = torch.nn.Linear(WIDTH, VOCAB, bias=False, dtype=torch.float64)
    module.weight.data.copy_(weight)
    plan = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(module, mesh, plan, src_data_rank=None)
    found, leaves = compared(target, [hidden, module.weight.detach()], [hidden, weight], spread)
    yield "float64|ColwiseParallel, head weight", found
    zloss.logits_loss(module(hidden), target, OBJECTIVES["centered"]).loss.backward()
    yield "float64|ColwiseParallel, logits", {"dW": difference(module.weight.grad, leaves[1].grad)}

    for products in ("operand", "fp32"):
        want = [value.bfloat16() for value in inputs(torch.float32)[:2]]
        found, _ = compared(target, [want[0], how.weight(want[1])], want, how, products=products)
        yield f"bfloat16|{products}", found

    whole = (hidden @ weight.T + bias).half()
    grads = []
    for logits, keyword in ((whole[:, how.rows], how.keyword), (whole.double(), {"backend": "dense"})):
        leaf = logits.clone().requires_grad_()
        out = zloss.logits_loss(leaf, target, OBJECTIVES["standard"], normalizer=2e6, label_smoothing=0.1, **keyword)
        (65536 * out.loss).backward()
        grads.append(leaf.grad)
    yield "float16|logits under a loss scale", {"dz": difference(grads[0], grads[1][:, how.rows])}

    hidden, weight = hidden.float(), weight.float()
    buffer, own = torch.ones(how.weight(weight).shape), how.weight(weight).requires_grad_()
    zloss.head_loss(hidden, own, target, OBJECTIVES["centered"], weight_grad_buffer=buffer, **how.keyword)
    _, leaves = compared(target, [hidden, how.weight(weight)], [hidden, weight], how)
    yield "float32|given buffer", {"dW": difference(buffer - 1, leaves[1].grad, 1.0)}


def token_sharded_cases() -> Iterator[tuple[str, dict[str, float]]]:
    """Hidden states [B, N, D] sharded over N, which no number of ranks divides, in several chunks."""
    torch.manual_seed(3)
    hidden, target = torch.randn(2, 19, WIDTH, dtype=torch.float64), torch.randint(0, VALID, (2, 19))
    target[0, 3:9] = -100
    hidden[0, 4] = torch.nan  # at an ignored token
    how, weight = layouts()["dtensor"], inputs(torch.float64)[1]
    tokens = distribute_tensor(hidden, all_ranks(), [Shard(1)], src_data_rank=None)
    options: dict[str, Any] = {"chunk_size": 7, "logit_scale": 0.7}
    for statistics, reduction in (("light", "mean"), ("full", "mean"), ("light", "none")):
        options |= {"statistics": statistics, "reduction": reduction}
        found, _ = compared(target, [tokens, how.weight(weight)], [hidden, weight], how, **options)
        yield f"float64|own tokens, {statistics}, {reduction}", found
    logits = torch.where(hidden.isnan().any(-1, keepdim=True), 0, hidden) @ weight.T
    spread = distribute_tensor(target, all_ranks(), [Shard(1)], src_data_rank=None)
    mine = distribute_tensor(logits, all_ranks(), [Shard(1)], src_data_rank=None)
    for name, reduction in (("centered", "mean"), ("gain-aware", "none"), ("standard", "sum")):
        found = {}
        keyword = {"weight": weight, "reduction": reduction, "statistics": "audit", "chunk_size": 7}
        whole, leaf = (value.clone().requires_grad_() for value in (logits, mine))
        want = zloss.logits_loss(whole, target, OBJECTIVES[name], **keyword)
        for targets in (target, spread):
            got = zloss.logits_loss(leaf, targets, OBJECTIVES[name], **keyword)
            found |= {"loss": difference(got.loss, want.loss), "auxiliary": difference(got.auxiliary, want.auxiliary)}
            found |= {part: difference(getattr(got.stats, part), getattr(want.stats, part)) for part in STATISTICS}
        upstream = torch.linspace(0.5, 1.5, want.loss.numel(), dtype=torch.float64).reshape(want.loss.shape)
        want.loss.backward(upstream)
        got.loss.backward(upstream)
        assert leaf.grad.placements == mine.placements
        found["dz"] = difference(leaf.grad.full_tensor(), whole.grad)
        yield f"float64|logits of own tokens, {name}, {reduction}", found


class Collectives(TorchDispatchMode):
    """Counts the collectives of a call, and the numbers that each moves."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            tensors = [t for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, Tensor)]
            self.seen.append((func._schema.name.partition("::")[2], max((t.numel() for t in tensors), default=0)))
        return func(*args, **(kwargs or {}))


def collectives() -> dict[str, list[tuple[str, int]]]:
    """The collectives of one call in one chunk."""
    how = layouts()["group"]
    hidden, weight, _, target = inputs(torch.float32)
    found = {}
    for statistics in ("audit", "full", "light"):
        leaves = [hidden.clone().requires_grad_(), how.weight(weight).requires_grad_()]
        with Collectives() as counted:
            out = zloss.head_loss(*leaves, target, OBJECTIVES["centered"], statistics=statistics, **how.keyword)  # type: ignore[arg-type]
            out.loss.backward()
        found[statistics] = counted.seen
    return found


def left_out() -> dict[str, float]:
    """The largest difference when one all-reduce is left out: each must show."""
    how = layouts()["dtensor"]
    found = {}
    for name in ("max_", "sum_", "start_sum_"):
        statistics = "light" if name == "start_sum_" else "full"

        def nothing(self: VocabularyShard, value: Tensor) -> Any:
            return dist.all_reduce(torch.zeros(1), async_op=True) if name == "start_sum_" else value  # noqa: B023

        with patch.object(VocabularyShard, name, nothing):
            worst = head_differences(how, torch.float64, OBJECTIVES["standard"], statistics=statistics)
        values = torch.tensor([value if value < 1e9 else 1e9 for value in worst.values()])
        dist.all_reduce(total := values.max().reshape(1), dist.ReduceOp.MAX)
        found[name] = float(total)
    return found


def refusals() -> dict[str, str]:
    """What the ranks disagree on is named before the first collective of the loss."""
    how = layouts()["group"]
    hidden, weight, _, target = inputs(torch.float32)
    rank = dist.get_rank()
    mesh = all_ranks()
    ce, own, world = zloss.CrossEntropy(), how.weight(weight), how.keyword
    by_column, by_row, everywhere = (
        distribute_tensor(weight, mesh, [place], src_data_rank=None) for place in (Shard(1), Shard(0), Replicate())
    )
    leaf = hidden.clone().requires_grad_(rank == 0)
    calls: dict[str, Callable[[], object]] = {
        "targets": lambda: zloss.head_loss(hidden, own, target.roll(rank), ce, **world),
        "options": lambda: zloss.head_loss(hidden, own, target, zloss.StandardZLoss(0.1 + rank), **world),
        "gradients": lambda: zloss.head_loss(leaf, own, target, ce, **world),
        "dense": lambda: zloss.head_loss(hidden, own, target, ce, backend="dense", **world),
        "columns": lambda: zloss.head_loss(hidden, by_column, target, ce),
        "both": lambda: zloss.head_loss(hidden, by_row, target, ce, **world),
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
            found[name] = "no error"
        except zloss.errors.InputError as error:
            found[name] = str(error)
    found["replicated"] = str(float(zloss.head_loss(hidden, everywhere, target, ce).loss))
    # Printed differently on every rank, as tensors on different GPUs are.
    for name, coef in (("number", 0.5), ("tensor", torch.tensor(0.5, dtype=torch.float64 if rank else torch.float32))):
        found[name] = str(float(zloss.head_loss(hidden, own, target, zloss.StandardZLoss(coef), **world).loss))
    return found


def main() -> None:
    dist.init_process_group("gloo")
    worst: dict[str, dict[str, float]] = {}
    for title, differences in cases():
        values = torch.tensor(list(differences.values()), dtype=torch.float64)
        dist.all_reduce(values, dist.ReduceOp.MAX)
        worst[title] = dict(zip(differences, values.tolist(), strict=True))
    found = {"worst": worst, "collectives": collectives(), "left_out": left_out(), "refusals": refusals()}
    if dist.get_rank() == 0:
        print(json.dumps(found))
    leave()
