"""What a row of a corpus is: a loss, how its user would call the audit, what it trains, and its mistake if it has one.

Truths are fixed from the code of the losses and checked against autograd in fp64 (`stated`), never against the audit.
T tokens, V classes, D width; a batch of sequences is [B, T, V].
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

LOG_V = "log_v"


@dataclass(frozen=True)
class Truth:
    """ce_scale · Σ CE / ce_denominator + coef · Σ (v − target)² / z_denominator, where v is log Z in this coordinate.

    `has_z` None: there is a penalty that no choice of λ and c describes, so "cannot tell" is right and a number is not.
    `coef` None where `has_z` is true: a penalty on log Z of another form; the coordinate is "other".
    """

    has_z: bool | None
    coef: float | None = None
    target: float | str | None = None
    coordinate: str | None = None
    ce_scale: float = 1.0
    ce_denominator: str = "valid"
    z_denominator: str = "valid"
    shift_coef: float = 0.0  # factorized: + shift_coef · Σ μ² / z_denominator
    z_tokens: str = "valid"  # which tokens Z is summed over; "all" trains on ignored ones
    label_smoothing: float = 0.0
    shifted: bool = False  # row t is trained on target t + 1, as in transformers


def ce(**rest: Any) -> Truth:
    return Truth(has_z=False, **rest)


def z(coef: float = 1e-4, target: float | str = 0.0, coordinate: str = "raw", **rest: Any) -> Truth:
    return Truth(has_z=True, coef=coef, target=target, coordinate=coordinate, **rest)


Objective = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    name: str
    loss: Callable[..., Any]
    truth: Truth | None  # None: what it trains depends on sizes, calls or dtypes; only the mistake is compared
    call: Mapping[str, Any] = field(default_factory=dict)  # keywords for `audit_loss`
    defects: frozenset[str] = frozenset()  # the mistake; any of these ids (or free names) is a right answer
    also: frozenset[str] = frozenset()  # right next to it, or on a correct loss as a note
    meant: Truth | None = None  # what the author of a mistake wanted to train
    objective: Objective | None = None  # what it trains, where `truth` cannot say it
    shape: str = "T"  # "BT": to be called with [B, T, V]
    head: str = "VD"  # layout of `weight` of a linear loss


def stated(truth: Truth, logits: Tensor, target: Tensor, ignore_index: int = -100) -> Tensor:
    """The objective that `truth` states, in the dtype of `logits`."""
    if truth.shifted:
        logits, target = logits[..., :-1, :], target[..., 1:]
    logits, target = logits.flatten(0, -2), target.flatten()
    keep = target != ignore_index
    counts = {"valid": int(keep.sum()), "all": target.numel(), "sum": 1}
    nll_T = F.cross_entropy(
        logits, target, ignore_index=ignore_index, label_smoothing=truth.label_smoothing, reduction="none"
    )
    loss = truth.ce_scale * nll_T.sum() / counts[truth.ce_denominator]
    if truth.coef is None:
        return loss
    log_z = logits.logsumexp(-1)
    mu = logits.mean(-1)
    origin = {"raw": 0.0, "centered": mu, "factorized": mu, "max_shifted": logits.amax(-1)}[truth.coordinate or "raw"]
    c = torch.tensor(float(logits.shape[-1])).double().log() if truth.target == LOG_V else truth.target
    penalty_T = truth.coef * (log_z - origin - c) ** 2 + truth.shift_coef * mu**2
    counted = penalty_T if truth.z_tokens == "all" else penalty_T[keep]
    return loss + counted.sum() / counts[truth.z_denominator]


def reference(case: Case, truth: Truth | None = None) -> Callable[..., Tensor]:
    """The stated objective as a function of the inputs of the loss; `truth` replaces what the case says it trains."""

    def value(*inputs: Tensor) -> Tensor:
        logits, *weight, target = inputs
        if weight:
            logits = logits @ (weight[0].T if case.head == "VD" else weight[0])
        logits = logits[..., : case.call.get("valid_vocab")] * case.call.get("logit_scale", 1.0)
        if cap := case.call.get("softcap"):
            logits = cap * torch.tanh(logits / cap)
        if truth is None and case.objective is not None:
            return case.objective(logits, target)
        return stated(truth or case.truth, logits, target, case.call.get("ignore_index", -100))

    return value


def batch(case: Case, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """(logits, target) or (hidden, weight, target): 399 tokens, a quarter of them ignored, log Z from 3 to 20."""
    rng = torch.Generator().manual_seed(seed)
    tokens, vocab = (399,) if case.shape == "T" else (3, 133), 200
    target = torch.randint(vocab if "valid_vocab" not in case.call else 50, tokens, generator=rng)
    ignored = torch.rand(tokens, generator=rng) < 0.25
    target = target.masked_fill(ignored, case.call.get("ignore_index", -100))
    if not case.call.get("linear"):
        shift = 4 * torch.randn(*tokens, 1, generator=rng)
        return (3 * torch.randn(*tokens, vocab, generator=rng) + shift).to(dtype), target
    hidden, weight = torch.randn(*tokens, 24, generator=rng), torch.randn(vocab, 24, generator=rng)
    weight = 0.6 * (weight + torch.randn(24, generator=rng))  # a mean row: μ is not 0
    return hidden.to(dtype), (weight if case.head == "VD" else weight.T.contiguous()).to(dtype), target


def gradient(loss: Callable[..., Any], *inputs: Tensor, upstream: float = 1.0) -> Tensor:
    """The gradients at all inputs but the target, in one fp64 vector."""
    leaves = [tensor.clone().requires_grad_() for tensor in inputs[:-1]]
    value = loss_of(loss(*leaves, inputs[-1]))
    (upstream * value).backward()
    return torch.cat([(torch.zeros_like(x) if x.grad is None else x.grad).double().flatten() for x in leaves])


def loss_of(output: Any) -> Tensor:
    """The trained value: the loss, the first of several, or the total."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        return output.get("total_loss", output["loss"])
    return output.loss if hasattr(output, "loss") else output[0]
