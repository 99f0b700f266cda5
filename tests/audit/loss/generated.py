"""Correct losses drawn from axes: `draw(seed)` is a case without a mistake, `GENERATED` four hundred of them."""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.audit.loss.corpus import LOG_V, Case, ce, z

AXES: dict[str, tuple[Any, ...]] = {
    "linear": (False, False, True),
    "penalty": ("none", "raw", "raw", "centered", "factorized"),
    "coef": (1e-5, 3e-5, 1e-4, 2e-4, 1e-3, 1e-2),
    "target": (0.0, LOG_V, 5.0),
    "divisor": ("valid", "valid", "all", "sum", "constant"),  # constant: the tokens of a batch over all ranks
    "mask": ("select", "where", "multiply"),
    "nll": ("cross_entropy", "gather", "log_softmax"),
    "chunks": ("one", "split", "tensor_split"),
    "checkpointed": (False, False, True),
    "compute": (None, torch.float32, torch.float32, torch.float64),  # None: the dtype of the logits
    "scale": (1.0, 1.0, 1 / 4, 8.0),  # accumulation, world size
    "constant": (0.0, 0.0, 0.37, -5.0),
    "returns": ("scalar", "scalar", "tuple", "dict", "total", "object", "metrics"),
}
GLOBAL_TOKENS = 2048


def draw(seed: int, *, compiled: bool = False) -> Case:
    rng = random.Random(seed)
    axes = SimpleNamespace(**{axis: rng.choice(values) for axis, values in AXES.items()})
    if compiled:  # one graph, without breaks
        axes.chunks, axes.checkpointed, axes.mask = "one", False, "where"

    def loss(*inputs: Tensor) -> Any:
        target, sums_of = inputs[-1], partial(chunk_sums, axes)
        if axes.checkpointed:
            sums_of = partial(checkpoint, sums_of, use_reentrant=False)
        sums = [sums_of(*chunk) for chunk in chunks(axes, *inputs)]
        counts = {"valid": (target != -100).sum(), "all": target.numel(), "sum": 1, "constant": GLOBAL_TOKENS}
        nll, penalty = (axes.scale * sum(terms) / counts[axes.divisor] for terms in zip(*sums, strict=True))
        return returned(axes, nll, penalty, target)

    loss.__code__ = loss.__code__.replace(co_name=f"draw_{seed}")  # dynamo counts recompilations by code object
    scale, counts = axes.scale, {"ce_denominator": axes.divisor, "z_denominator": axes.divisor}
    if axes.divisor == "constant":
        scale, counts = axes.scale / GLOBAL_TOKENS, {"ce_denominator": "sum", "z_denominator": "sum"}
    truth = ce(ce_scale=scale, ce_denominator=counts["ce_denominator"])
    if axes.penalty != "none":
        shift_coef = 2 * scale * axes.coef if axes.penalty == "factorized" else 0.0
        truth = z(scale * axes.coef, axes.target, axes.penalty, ce_scale=scale, shift_coef=shift_coef, **counts)
    return Case(
        name=f"draw {seed}{', compiled' * compiled}",
        loss=torch.compile(loss, backend="aot_eager", dynamic=True) if compiled else loss,
        truth=truth,
        call={"linear": True} if axes.linear else {},
        also=frozenset(() if axes.compute else {"low_precision_source"}),  # 16-bit logits are not widened
    )


def chunks(axes: SimpleNamespace, rows: Tensor, *rest: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """`rows` (logits, or hidden) and targets by chunks of tokens; the weight of a head is whole in each."""
    *weight, target = rest
    pieces = {"one": lambda x: [x], "split": lambda x: x.split(50), "tensor_split": lambda x: x.tensor_split(7)}
    for row, y in zip(pieces[axes.chunks](rows), pieces[axes.chunks](target), strict=True):
        yield row, *weight, y


def chunk_sums(axes: SimpleNamespace, rows: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
    """Σ nll and Σ penalty of the valid tokens."""
    *weight, target = rest
    logits = F.linear(rows, *weight) if weight else rows
    logits = logits.to(axes.compute or logits.dtype)
    keep = target != -100
    if axes.mask == "select":
        logits, target, keep = logits[keep], target[keep], keep[keep]
    log_z, mu, classes = logits.logsumexp(-1), logits.mean(-1), target.clamp(min=0)
    if axes.nll == "cross_entropy":
        nll = F.cross_entropy(logits, target, reduction="none")
    elif axes.nll == "gather":
        nll = log_z - logits.gather(-1, classes[:, None])[:, 0]
    else:
        nll = -logits.log_softmax(-1).gather(-1, classes[:, None]).squeeze(-1)
    c = math.log(logits.shape[-1]) if axes.target == LOG_V else axes.target
    penalty = {
        "none": torch.zeros_like(log_z),
        "raw": (log_z - c) ** 2,
        "centered": ((logits - mu[:, None]).logsumexp(-1) - c) ** 2,
        "factorized": (log_z - mu - c) ** 2 + 2 * mu**2,
    }[axes.penalty]
    terms = nll, axes.coef * penalty
    if axes.mask == "multiply":
        return tuple((term * keep).sum() for term in terms)
    return tuple(torch.where(keep, term, 0.0).sum() for term in terms)


@dataclass
class Output:
    loss: Tensor
    logits: Tensor | None = None


def returned(axes: SimpleNamespace, nll: Tensor, penalty: Tensor, target: Tensor) -> Any:
    loss = nll + penalty + axes.constant
    logged = {"ce": nll.detach(), "z_loss": penalty.detach() / axes.scale, "tokens": (target != -100).sum()}
    return {
        "scalar": loss,
        "tuple": (loss, nll.detach(), penalty.detach()),
        "dict": {"loss": loss, **logged},
        "total": {"loss": nll.detach(), "total_loss": loss},
        "object": Output(loss),
        "metrics": (loss, logged | {"perplexity": nll.detach().exp()}),
    }[axes.returns]


GENERATED = [draw(seed, compiled=seed % 20 == 0) for seed in range(400)]
