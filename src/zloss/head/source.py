"""The logit source of an objective: as a backend applies it, at the head's rows, in the paper's listing, in other frameworks.

`head_source` and `head_gradient_rows` are for audits and tests; a loss does not go through them. The listing (paper
lst:centered_source) has the paper's signatures; one stated deviation: fp64 inputs stay fp64, where the listing rounds
everything to fp32. `explain` says what an objective is called elsewhere.

Axes: T tokens, V vocabulary, R rows of a block, D width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Unpack, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from zloss.errors import CoefficientError, InputError, ShapeError, UnknownNameError
from zloss.head.arguments import HeadProblem, check_rows, prepare_head
from zloss.head.chunked import chunk_source, chunks
from zloss.head.loss import outside_compile
from zloss.head.options import HeadOptions, Reduction, SourceKeywords, check_reduction, resolve_backend, shows_options
from zloss.head.products import HeadProducts
from zloss.head.reference import dense_source
from zloss.head.rows import RowWork, TorchRows, softcap_
from zloss.objectives import Coefficients, Objective, Part, StandardZLoss
from zloss.tensors import (
    at_least_fp32,
    check_differentiable,
    check_floating,
    check_not_all_meta,
    check_same_device,
    is_number,
    without_autocast,
)


@outside_compile
@shows_options(SourceKeywords)
def head_source(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    objective: Objective,
    *,
    part: Part = "z",
    bias: Tensor | None = None,
    normalizer: float | Tensor | None = None,
    token_weight: Tensor | None = None,
    group: ProcessGroup | None = None,
    **options: Unpack[SourceKeywords],
) -> Tensor:
    """∂loss/∂z as [T, V], fp32 (fp64 for fp64): the auxiliary part alone ("z") or cross-entropy plus auxiliary ("total").

    The source is the one at the final logits: after logit scale and softcap, before any transport. Scaling: the reduction
    weight (1/N for "mean") is inside; V is `valid_vocab` if set. For a head that is divided over ranks this rank's
    columns are returned. The other keywords are the fields of `HeadOptions`, except `statistics`.

    >>> import torch, zloss
    >>> hidden, weight, target = torch.randn(4, 8), torch.randn(11, 8), torch.tensor([1, 2, -100, 10])
    >>> source = zloss.head_source(hidden, weight, target, zloss.CenteredZLoss(1e-4), part="z")
    >>> source.shape, bool(source[2].any())
    (torch.Size([4, 11]), False)
    """
    if not isinstance(part, str) or part not in get_args(Part):
        raise UnknownNameError("part", part, get_args(Part))
    checked = HeadOptions(objective, statistics="light", **options)
    problem = prepare_head(
        hidden,
        weight,
        target,
        bias,
        checked,
        token_weight=token_weight,
        normalizer=normalizer,
        group=group,
    )
    chosen = resolve_backend(checked.backend, hidden.device, problem.dtype)
    with without_autocast(hidden.device.type):
        if chosen == "dense":
            return dense_source(problem, auxiliary_only=part == "z")
        if chosen == "triton":
            from zloss.head.triton import TritonRows

            return _chunked_source(problem, part, TritonRows(checked.softcap, plan=problem.products, keep_logits=True))
        return _chunked_source(problem, part, TorchRows(checked.softcap, plan=problem.products))


@torch.no_grad()
def _chunked_source(problem: HeadProblem, part: Part, work: RowWork) -> Tensor:
    out_TV = problem.hidden_TD.new_zeros((problem.hidden_TD.shape[0], problem.local_rows), dtype=problem.dtype)
    for chunk in chunks(problem, back_projection=False, work=work):
        check_rows(chunk.stats)
        weighted = chunk.exp_coefficients(problem.targets.weight_T, part)
        out_TV[chunk.tokens] = chunk_source(work, problem.shard, chunk, weighted, through_softcap=False)
    return out_TV


_BLOCK_BYTES = 2**25
"""Size of the [T, R] block of probabilities."""


class HeadGradientRows(NamedTuple):
    """The gradient of one loss at a block of rows."""

    weight_RD: Tensor
    bias_R: Tensor | None
    """None for a head without bias."""


@torch.no_grad()
def head_gradient_rows(
    problem: HeadProblem, log_z_T: Tensor, losses: Mapping[str, Coefficients]
) -> Iterator[tuple[slice, dict[str, HeadGradientRows]]]:
    """(rows, gradient of each loss at those rows), over all rows inside log Z. Coefficients include the reduction weight.

    With δ = a·p − b·onehot(y) − g/V, dW = s·Σ_t δ_t u_tᵀ and db = s·Σ_t δ_t. For tokens whose log Z is known, the rows of a
    block need only those rows of W, so inner products of whole head gradients are formed without holding one.
    """
    scale, softcap, index_T = problem.options.logit_scale, problem.options.softcap, problem.targets.index_T
    rounded_TD = problem.hidden_TD.detach()
    rounded_TD = rounded_TD if problem.rounding is None else rounded_TD.to(problem.rounding)
    hidden_TD = rounded_TD.to(problem.dtype) * scale
    scale_T1 = hidden_TD.new_full((hidden_TD.shape[0], 1), scale)
    bias_V = problem.scaled_bias()
    step = max(1, _BLOCK_BYTES // (max(1, hidden_TD.shape[0]) * problem.dtype.itemsize))
    for start in range(0, problem.local_rows, step):
        rows = slice(start, min(start + step, problem.local_rows))
        # Operands are already rounded to the autocast dtype; from there on nothing may be rounded again.
        with without_autocast(hidden_TD.device.type):
            p_TR = hidden_TD.new_empty((hidden_TD.shape[0], rows.stop - rows.start))
            HeadProducts(problem.weight_VD[rows], problem.dtype, problem.rounding).logits_(hidden_TD, p_TR)
            if bias_V is not None:
                p_TR += bias_V[rows]
            slope_TR = None
            if softcap is not None:
                slope_TR = torch.empty_like(p_TR)
                softcap_(p_TR, slope_TR, softcap)
            p_TR.sub_(log_z_T.unsqueeze(1)).exp_()
            if slope_TR is not None:
                p_TR.mul_(slope_TR)
            here_T = (index_T >= rows.start) & (index_T < rows.stop)
            local = index_T[here_T] - rows.start
            slope = None if slope_TR is None else slope_TR[here_T, local]
            at_rows = partial(_gradient_at_rows, p_TR, here_T, local, slope, problem.local_rows)
            gradients = {
                name: HeadGradientRows(
                    at_rows(coefficients, hidden_TD),
                    None if bias_V is None else at_rows(coefficients, scale_T1).squeeze(1),
                )
                for name, coefficients in losses.items()
            }
        yield rows, gradients


def _gradient_at_rows(
    p_TR: Tensor,
    here_T: Tensor,
    local: Tensor,
    slope: Tensor | None,
    vocab: int,
    coefficients: Coefficients,
    input_TD: Tensor,
) -> Tensor:
    """Σ_t δ_t input_tᵀ at a block of rows, [R, D]: the input of the weight is s·u, that of the bias is s.

    `p_TR` is p, times the slope of the softcap if there is one; `local` and `slope` are the targets among the rows and the
    slope there, for the tokens `here_T`.
    """
    grad_RD = p_TR.T @ (input_TD * coefficients.a.unsqueeze(1))
    if coefficients.b is not None:
        weight = coefficients.b[here_T]
        weight = weight if slope is None else weight * slope
        grad_RD.index_add_(0, local, input_TD[here_T] * weight.unsqueeze(1), alpha=-1)
    if coefficients.g is not None:
        grad_RD.sub_((coefficients.g @ input_TD) / vocab)
    return grad_RD


def centered_logits_from_raw(raw_logits: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """z̃ = z_raw − μ_head·1 with μ_head = w̄·u + b̄: the finite-precision deployment (paper eq:centered_raw).

    `raw_logits` [..., V], `hidden` [..., D], `weight` [V, D], `bias` [V]. Subtracting one fp32 scalar per token keeps the
    realized softmax, which a second low-precision projection would not.

    >>> import torch, zloss
    >>> hidden, weight = torch.randn(3, 8), torch.randn(11, 8) + 1
    >>> centered = zloss.centered_logits_from_raw(hidden @ weight.T, hidden, weight)
    >>> bool(centered.mean(dim=-1).abs().max() < 1e-5)
    True
    """
    for name, tensor, dims in (("raw_logits", raw_logits, 1), ("hidden", hidden, 1), ("weight", weight, 2)):
        check_floating(name, tensor, dims)
    if bias is not None:
        check_floating("bias", bias)
    if weight.dim() != 2 or hidden.shape[-1] != weight.shape[1] or raw_logits.shape[:-1] != hidden.shape[:-1]:
        raise ShapeError(
            f"`raw_logits` [..., V], `hidden` [..., D] and `weight` [V, D] are expected, but got {list(raw_logits.shape)}, "
            f"{list(hidden.shape)} and {list(weight.shape)}."
        )
    check_same_device(raw_logits=raw_logits, hidden=hidden, weight=weight, bias=bias)
    check_not_all_meta(raw_logits=raw_logits, hidden=hidden, weight=weight, bias=bias)
    check_differentiable(raw_logits=raw_logits, hidden=hidden, weight=weight, bias=bias)
    # The listing means fp32: autocast would round the common shift to 16 bits.
    with without_autocast(hidden.device.type):
        mean_w = at_least_fp32(weight).mean(dim=0, keepdim=True)
        mean_b = None if bias is None else at_least_fp32(bias).mean().view(1)
        common_shift = F.linear(at_least_fp32(hidden), mean_w, mean_b)
        return at_least_fp32(raw_logits) - common_shift


def z_loss_source(logits: Tensor, coef: float, target: float, reduction: Reduction = "mean") -> Tensor:
    """2λ(log Z − c)·p, the gradient of λ(logsumexp(z) − c)² at the logits (paper eq:source).

    `logits` [..., V]; the source has their shape. Scaling: "mean" divides by the number of tokens; "sum" and "none" do not.

    >>> import torch, zloss
    >>> float(zloss.z_loss_source(torch.zeros(1, 4), coef=0.5, target=0.0).sum())  # 2λ·log 4
    1.386294...
    """
    check_reduction(reduction)
    check_floating("logits", logits)
    if logits.shape[-1] == 0:
        raise ShapeError(f"`logits` are expected to be [..., V] with at least one class, but got {list(logits.shape)}.")
    numbers: dict[str, object] = {"coef": coef, "target": target}
    for name, value in numbers.items():
        if not (is_number(value) or (isinstance(value, Tensor) and value.numel() == 1)):
            raise CoefficientError(f"`{name}` is expected to be a number, but got {value!r}.")
    check_differentiable(logits=logits)
    logits_f = at_least_fp32(logits)
    log_z = torch.logsumexp(logits_f, dim=-1, keepdim=True)
    scale = 2.0 * coef * (log_z - target)
    if reduction == "mean":
        scale = scale / logits_f[..., 0].numel()
    return scale * torch.softmax(logits_f, dim=-1)


FRAMEWORKS: dict[str, tuple[str | None, str]] = {
    "Liger": (
        "lse_square_scale",
        'reduction="mean": CE and Z over the count of valid tokens; "sum": neither is divided; with class weights CE is over '
        "their sum and Z stays over the count. Log Z is computed from logits in the model's dtype",
    ),
    "flash-attn": (
        "lse_square_scale",
        "per token, CE + Z in one number, 0 at ignored tokens; the divisor is the caller's, the same for both",
    ),
    "OLMo-core": (
        "z_loss_multiplier",
        "CE and Z summed over valid tokens, both over one divisor, the valid tokens of the whole batch",
    ),
    "t5x / MaxText": (
        "z_loss",
        "t5x: CE and Z summed with the token weights, over `loss_normalizing_factor`, or not divided where that is None. "
        "MaxText names it `z_loss_multiplier` and divides both by the count of tokens that are not padding",
    ),
    "levanter": ("logsumexp_weight", "CE + Z per token, Σ w(CE + Z) / Σ w with the loss weights w"),
    "Megatron-LM": (None, "it has a Z-loss for routers only (`--moe-z-loss-coeff`)"),
    "xtuner": (None, "it has a Z-loss for routers only (`ZLossConfig(z_loss_alpha=...)`)"),
}
"""Framework → (name of the setting or None, its denominator or why there is none)."""


@dataclass(frozen=True)
class FrameworkRecipe:
    """One framework: a setting, or the reason that there is none."""

    framework: str
    setting: str | None
    """As it is written there, such as `lse_square_scale=0.0001`; None if the recipe cannot be expressed."""
    note: str
    """The denominator, or what cannot be expressed."""


@dataclass(frozen=True)
class Explanation:
    """An objective in every framework."""

    objective: str
    recipes: tuple[FrameworkRecipe, ...]

    def __getitem__(self, framework: str) -> FrameworkRecipe:
        """The recipe in a framework, by name."""
        by_name = {recipe.framework: recipe for recipe in self.recipes}
        if framework not in by_name:
            raise UnknownNameError("framework", framework, by_name)
        return by_name[framework]

    def __str__(self) -> str:
        lines = [self.objective]
        lines += [f"  {r.framework}: {r.setting or 'cannot be expressed'} ({r.note})" for r in self.recipes]
        return "\n".join(lines)


def explain(objective: Objective, *, vocab: int) -> Explanation:
    """What `objective` is in other frameworks, for a head of `vocab` rows (log V is the default target).

    >>> import zloss
    >>> zloss.explain(zloss.StandardZLoss(1e-4, target=0.0), vocab=50_304)["Liger"].setting
    'lse_square_scale=0.0001'
    """
    if not isinstance(objective, Objective):
        raise InputError(
            f"`objective` is expected to be an Objective such as zloss.StandardZLoss(1e-4), but got {objective!r}."
        )
    if isinstance(vocab, bool) or not isinstance(vocab, int) or vocab < 1:
        raise InputError(f"`vocab` is expected to be the number of rows of the head, but got {vocab!r}.")
    missing = _inexpressible(objective, vocab)
    recipes = []
    for framework, (setting, note) in FRAMEWORKS.items():
        if not objective.active:
            shown = f"{setting}=0.0" if setting else "nothing to set"
            recipes.append(FrameworkRecipe(framework, shown, "no Z in the loss"))
        elif setting is None or missing is not None:
            recipes.append(FrameworkRecipe(framework, None, note if setting is None else str(missing)))
        else:
            assert isinstance(objective, StandardZLoss)
            recipes.append(FrameworkRecipe(framework, f"{setting}={objective.coef:g}", note))
    return Explanation(repr(objective), tuple(recipes))


def _inexpressible(objective: Objective, vocab: int) -> str | None:
    """Why no setting of a raw Z with c = 0 gives this objective; None if one does."""
    if not objective.active:
        return None
    if not isinstance(objective, StandardZLoss):
        return f"its Z is λ(log Z)² of raw logits, and {type(objective).__name__} is another function of them"
    target = math.log(vocab) if objective.target is None else objective.target
    if target != 0:
        return f"its target is fixed at c = 0, and this objective has c = {target:.6g}"
    return None
