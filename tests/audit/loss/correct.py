"""Correct losses in random shapes of code: the audit has to find neither an error nor a warning in any of them.

`correct_losses` draws a `Recipe` for each: what is computed (objective, λ, c, smoothing, class weights, denominators) and how
the code looks (organisation, masks, precision, style, returned type). `Recipe.formula` states the same loss plainly.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.audit.loss.further import Case, right, some
from tests.audit.loss.zoo import LOG_V, valid_of

BETA = 1e-2


class Parts(NamedTuple):
    loss: Tensor
    ce_loss: Tensor
    z_loss: Tensor


@dataclass(frozen=True)
class Recipe:
    """What a loss computes and how its code looks."""

    coef: float = 1e-3
    target: float | None = 0.0
    """c; None is log V."""
    objective: str = "raw"
    smoothing: float = 0.0
    class_weights: bool = False
    """CE and Z of a token weigh as much as its target; both are divided by the sum of the weights."""
    ignore: int = -100
    reduction: str = "valid"
    constant: float = 1.0
    """A further divisor of both parts."""
    linear: bool = False
    shift: str = "no"
    precision: str = "wide"
    organisation: str = "whole"
    chunk: int = 64
    mask: str = "where"
    log_z: str = "logsumexp"
    cross_entropy: str = "functional"
    style: str = "closure"
    returns: str = "scalar"

    # The code under audit.

    def __call__(self, *inputs: Tensor) -> Any:
        *given, y = inputs
        tensors = [self.cast(x) for x in given]
        if self.shift == "slice":
            tensors, y = [tensors[0][..., :-1, :]], y[..., 1:].contiguous()
        elif self.shift == "pad":
            y = F.pad(y, (0, 1), value=self.ignore)[..., 1:]
        n = self.count(y, tensors[0].dtype)
        if self.organisation == "by hand":
            total, penalty = _ByHand.apply(self, y, *tensors)
            loss, penalty = total / n, penalty / n
            ce = loss - penalty
        else:
            ce, penalty = (part / n for part in self.sums(tensors, y))
            loss = ce + penalty
        return self.output(loss, ce.detach(), penalty.detach(), given[0])

    def cast(self, x: Tensor) -> Tensor:
        """fp32 at least for "wide"; always that precision for "fp32" and "fp64"."""
        if self.precision == "fp64":
            return x.double()
        return x if self.precision == "wide" and x.dtype == torch.float64 else x.float()

    def count(self, y: Tensor, dtype: torch.dtype) -> Tensor:
        keep = y != self.ignore
        if self.class_weights:
            total = self.weights(y, dtype).masked_fill(~keep, 0.0).sum()
            return torch.where(total > 0, total, 1.0)
        n = {"valid": keep.sum().clamp(min=1), "all": keep.new_tensor(y.numel(), dtype=torch.int64)}
        return n.get(self.reduction, torch.ones((), dtype=torch.int64)) * self.constant

    def weights(self, y: Tensor, dtype: torch.dtype) -> Tensor:
        return 0.5 + (y.clamp(min=0) % 7).to(dtype) / 7 if self.class_weights else torch.ones(len(y), dtype=dtype)

    def sums(self, tensors: list[Tensor], y: Tensor) -> tuple[Tensor, Tensor]:
        """ΣCE and Σ penalty over the tokens that are not ignored."""
        if self.organisation == "whole":
            return self.block(y, *tensors)
        ce = penalty = tensors[0][:0].sum()
        rows, *weight = tensors
        for x, labels in zip(rows.split(self.chunk), y.split(self.chunk), strict=True):
            if self.organisation == "checkpointed":
                parts = checkpoint(self.block, labels, x, *weight, use_reentrant=False)
            else:
                parts = self.block(labels, x, *weight)
            ce, penalty = ce + parts[0], penalty + parts[1]
        return ce, penalty

    def block(self, y: Tensor, x: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
        keep = y != self.ignore
        if self.mask == "index":
            x, y, keep = x[keep], y[keep], keep[keep]
        elif self.mask == "rows":
            x = x.masked_fill(~keep[:, None], 0.0)
        z = x if weight is None else F.linear(x, weight)
        labels, weights = torch.where(keep, y, 0), self.weights(y, x.dtype)
        ce = weights * self.cross_entropy_rows(z, labels)
        penalty = weights * self.penalty_rows(z, self.log_z_rows(z, labels), weight)
        if self.mask == "fill":
            return ce.masked_fill(~keep, 0.0).sum(), penalty.masked_fill(~keep, 0.0).sum()
        return torch.where(keep, ce, 0.0).sum(), torch.where(keep, penalty, 0.0).sum()

    def cross_entropy_rows(self, z: Tensor, y: Tensor) -> Tensor:
        if self.cross_entropy == "functional":
            return F.cross_entropy(z, y, reduction="none", label_smoothing=self.smoothing)
        if self.cross_entropy == "nll":
            log_p = F.log_softmax(z, -1)
            return (1 - self.smoothing) * F.nll_loss(log_p, y, reduction="none") - self.smoothing * log_p.mean(-1)
        soft = (1 - self.smoothing) * F.one_hot(y, z.shape[-1]).to(z.dtype) + self.smoothing / z.shape[-1]
        return torch.logsumexp(z, -1) - torch.einsum("tv,tv->t", soft, z)

    def log_z_rows(self, z: Tensor, y: Tensor) -> Tensor:
        match self.log_z:
            case "from nll":
                return F.cross_entropy(z, y, reduction="none") + z.gather(-1, y[:, None]).squeeze(-1)
            case "maximum restored":
                top = z.detach().amax(-1, keepdim=True) if len(z) else z[:, :1].detach()
                return (z - top).exp().sum(-1).log() + top.squeeze(-1)
            case "from log p":
                return (z - F.log_softmax(z, -1)).mean(-1)
        return torch.logsumexp(z, -1)

    def center(self, z: Tensor) -> float:
        return math.log(z.shape[-1]) if self.target is None else self.target

    def penalty_rows(self, z: Tensor, log_z: Tensor, weight: Tensor | None) -> Tensor:
        if self.objective in ("centered", "factorized"):
            mu = z.mean(-1)
            rows = self.coef * (log_z - mu - self.center(z)).square()
            return rows + self.coef * mu.square() if self.objective == "factorized" else rows
        rows = self.coef * (log_z - self.center(z)).square()
        return rows * self.damping(z, weight) if self.objective == "gain-aware" else rows

    def damping(self, z: Tensor, weight: Tensor | None) -> Tensor:
        """1/(1 + β A²), A = ‖Wᵀp‖/‖p‖, a constant to autograd."""
        assert weight is not None
        with torch.no_grad():
            p = torch.softmax(z, -1)
            return 1 / (1 + BETA * (p @ weight).square().sum(-1) / p.square().sum(-1))

    def output(self, loss: Tensor, ce: Tensor, penalty: Tensor, first: Tensor) -> Any:
        match self.returns:
            case "(loss, z)":
                return loss, penalty
            case "named tuple":
                return Parts(loss, ce, penalty)
            case "mapping":
                return {"loss": loss, "ce_loss": ce, "z_loss": penalty}
            case "object":
                return SimpleNamespace(loss=loss, z_loss=penalty)
            case "(loss, metrics)":
                return loss, {"ce": float(ce), "z_loss": float(penalty)}
            case "(logits, loss)":
                return first, loss
        return loss

    # The same loss in the plainest form, for the check of correctness.

    def formula(self, z: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        """Ignores −100. The gain of a linear loss is that of `weight`, or of zᵀ where hidden states are the identity."""
        if self.shift != "no":
            z, y = z[:-1], y[1:]
        keep, total = valid_of(y), y.numel()
        head = (z.T if weight is None else weight).detach()
        z, y = z[keep], y[keep]
        p, log_z, mu = torch.softmax(z, -1), torch.logsumexp(z, -1), z.mean(-1)
        c = math.log(z.shape[-1]) if self.target is None else self.target
        match self.objective:
            case "raw":
                penalty = (log_z - c) ** 2
            case "centered":
                penalty = (log_z - mu - c) ** 2
            case "factorized":
                penalty = (log_z - mu - c) ** 2 + mu**2
            case _:
                gain = torch.linalg.vector_norm(p @ head, dim=-1) / torch.linalg.vector_norm(p, dim=-1)
                penalty = (log_z - c) ** 2 / (1 + BETA * gain.detach() ** 2)
        w = 0.5 + (y % 7).to(z.dtype) / 7 if self.class_weights else torch.ones_like(mu)
        n = w.sum() if self.class_weights else {"valid": len(y), "all": total}.get(self.reduction, 1) * self.constant
        nll = log_z - (1 - self.smoothing) * z[torch.arange(len(y)), y] - self.smoothing * mu
        return (w * (nll + self.coef * penalty)).sum() / n


class _ByHand(torch.autograd.Function):
    """w ((1 + s) p − (1 − ε) onehot(y) − (ε + g)/V) for each token, formed in forward chunk by chunk."""

    @staticmethod
    def forward(ctx: Any, recipe: Recipe, y: Tensor, x: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
        grads = [torch.zeros_like(tensor) for tensor in (x, weight) if tensor is not None]
        total, penalties = x.new_zeros(()), x.new_zeros(())
        for start in range(0, len(y), recipe.chunk):
            rows = slice(start, start + recipe.chunk)
            ce, penalty = recipe.block(y[rows], x[rows], weight)
            total, penalties = total + ce + penalty, penalties + penalty
            z = x[rows] if weight is None else x[rows] @ weight.T
            grad = _adjoint(recipe, z, y[rows], weight)
            if weight is None:
                grads[0][rows] = grad
            else:
                grads[0][rows] = grad @ weight
                grads[1] += grad.T @ x[rows]
        ctx.save_for_backward(*grads)
        ctx.mark_non_differentiable(penalties)
        return total, penalties

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(upstream * grad for grad in ctx.saved_tensors)


def _adjoint(recipe: Recipe, z: Tensor, y: Tensor, weight: Tensor | None) -> Tensor:
    keep, eps = y != recipe.ignore, recipe.smoothing
    log_z, mu = torch.logsumexp(z, -1), z.mean(-1)
    relative = recipe.objective in ("centered", "factorized")
    s = 2 * recipe.coef * (log_z - (mu if relative else 0.0) - recipe.center(z))
    if recipe.objective == "gain-aware":
        s = s * recipe.damping(z, weight)
    g = s if relative else torch.zeros_like(s)
    if recipe.objective == "factorized":
        g = g - 2 * recipe.coef * mu
    grad = (1 + s)[:, None] * torch.exp(z - log_z[:, None]) - ((eps + g) / z.shape[-1])[:, None]
    grad[torch.arange(len(y)), torch.where(keep, y, 0)] -= 1 - eps
    return torch.where(keep[:, None], recipe.weights(y, z.dtype)[:, None] * grad, 0.0)


class _Module(nn.Module):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe

    def forward(self, *inputs: Tensor) -> Any:
        return self.recipe(*inputs)


def _with(recipe: Recipe, *inputs: Tensor) -> Any:
    return recipe(*inputs)


def _in_style(recipe: Recipe) -> Callable[..., Any]:
    match recipe.style:
        case "module":
            return _Module(recipe)
        case "partial":
            return functools.partial(_with, recipe)
        case "method":
            return recipe.__call__
        case "compiled":
            return torch.compile(lambda *inputs: recipe(*inputs), backend="aot_eager", dynamic=True)
    if recipe.linear:
        return lambda hidden, weight, target: recipe(hidden, weight, target)
    return lambda logits, target: recipe(logits, target)


def _draw(rng: random.Random) -> Recipe:
    """A consistent recipe. Centered penalties go with unscaled, unsmoothed CE: gradients do not tell the three apart."""

    def often(value: Any, *others: Any, share: float = 0.6) -> Any:
        return value if rng.random() < share else rng.choice(others)

    linear = rng.random() < 0.3
    objective = often("raw", "centered", "factorized", *["gain-aware"] * linear, share=0.55)
    relative = objective in ("centered", "factorized")
    class_weights = objective == "raw" and rng.random() < 0.12
    returned = ["(loss, z)", "named tuple", "mapping", "object", "(loss, metrics)", *["(logits, loss)"] * (not linear)]
    shift = "no" if linear else often("no", "slice", "pad", share=0.75)
    plain_ce = relative or class_weights or objective == "gain-aware"
    return Recipe(
        coef=float(f"{10 ** rng.uniform(-5, -1):.2g}"),
        target=often(None, 0.0, 1.5, share=0.7) if relative else often(0.0, None, 1.5, 4.0, 10.825, share=0.4),
        objective=objective,
        smoothing=0.0 if plain_ce else often(0.0, 0.05, 0.1, share=0.7),
        class_weights=class_weights,
        ignore=often(-100, -1, 0),
        reduction="valid" if class_weights else often("valid", "sum", *["all"] * (shift == "no"), share=0.5),
        constant=1.0 if relative or class_weights else often(1.0, 8.0, 256.0, 1000.0, share=0.7),
        linear=linear,
        shift=shift,
        precision=rng.choice(["wide", "wide", "fp32", "fp32", "fp64"]),
        organisation=rng.choice(["whole", "whole", "chunked", "checkpointed", "by hand"]),
        chunk=rng.choice([16, 40, 64, 128, 1000]),
        mask=rng.choice(["where", "index", "rows", "fill"]),
        log_z=often("logsumexp", "from nll", "maximum restored", "from log p", share=0.5),
        cross_entropy=rng.choice(["functional", "nll", "one-hot"]),
        style=rng.choice(["closure", "module", "partial", "method", "object"]),
        returns=often("scalar", *returned, share=0.4),
    )


def _truth(recipe: Recipe, loss: Callable[..., Any], why: str) -> Case:
    options: dict[str, Any] = {"ignore_index": recipe.ignore} | ({"linear": True} if recipe.linear else {})
    more: dict[str, Any] = {
        "label_smoothing": recipe.smoothing,
        "targets": "given" if recipe.shift == "no" else "shifted",
    }
    if not recipe.class_weights:
        more["ce_scale"] = 1 / recipe.constant
    case = right(
        loss,
        why,
        recipe.coef / recipe.constant,
        LOG_V if recipe.target is None else recipe.target,
        "centered" if recipe.objective == "centered" else "raw",
        (None, None) if recipe.class_weights else (recipe.reduction, recipe.reduction),
        may=some("forward_backward_mismatch") if recipe.objective == "gain-aware" else frozenset(),
        more=more,
        options=options,
        ratio=recipe.class_weights,
        tolerance=max(1e-3, 4e-8 / recipe.coef) if recipe.precision == "fp32" else 1e-5,
        formula=recipe.formula,
    )
    return replace(case, coordinate=None) if recipe.objective in ("factorized", "gain-aware") else case


def recipes(seed: int = 0, count: int = 200) -> Iterator[tuple[str, Recipe]]:
    """`count` named recipes; one in 50 is compiled."""
    rng = random.Random(seed)
    for number in range(count):
        recipe = _draw(rng)
        if number % 50 == 49:
            recipe = replace(recipe, style="compiled", organisation="whole", mask="where", returns="scalar")
        words = (recipe.objective, "linear" if recipe.linear else "logits", recipe.precision, recipe.organisation)
        yield f"{number:03} {' '.join(words)} {recipe.reduction} {recipe.style} {recipe.returns}", recipe


def correct_losses(seed: int = 0, count: int = 200) -> Iterator[tuple[str, Callable[..., Any], dict[str, Any], Case]]:
    """`count` correct losses as (name, loss, options of the audit, truth)."""
    for name, recipe in recipes(seed, count):
        loss = _in_style(recipe)
        truth = _truth(recipe, loss, name)
        yield name, loss, truth.options, truth
