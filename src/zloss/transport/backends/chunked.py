"""Chunked backend: plain PyTorch on any device, one [chunk, V] buffer, every objective at the cost of cross-entropy.

Per chunk of tokens three products: logits h Wᵀ, E W (for dh and the gain) and Eᵀh (for dW). For scalar reductions the
gradients are formed in the forward pass; for reduction="none" the backward pass recomputes the logits, because only
then are the per-token upstream gradients known.

What is done to a chunk of logits between the products is a `RowWork`: plain PyTorch here, Triton kernels on a GPU.

Axes: T tokens, C tokens of a chunk, V vocabulary, D width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from zloss.errors import CoordinateError, DoubleBackwardError
from zloss.source.statistics import TokenStats
from zloss.transport.backends.head_rows import HeadRows
from zloss.transport.backends.rows import (
    Injection,
    RowPass,
    RowWork,
    TorchRows,
    check_rows,
    chunk_bounds,
    chunk_stats,
    inject,
)
from zloss.transport.problem import HeadProblem, Options

STAT_FIELDS = ("row_max", "log_s", "target_logit", "mu", "p_norm", "gain", "gain_centered", "mu_residual")


def present_fields(options: Options, *, has_mu: bool, has_weight: bool = True) -> tuple[str, ...]:
    """The statistics a pass with these options gives."""
    shift = has_mu and (options.statistics != "light" or options.objective.needs_mu or options.label_smoothing != 0)
    gain = has_weight and (options.statistics != "light" or (options.objective.active and options.objective.needs_gain))
    present = {
        "mu": shift,
        "p_norm": options.statistics != "light" or gain,
        "gain": gain,
        "gain_centered": gain and has_mu and options.statistics != "light",
        "mu_residual": has_mu and options.statistics == "audit" and has_weight,
    }
    return tuple(name for name in STAT_FIELDS if present.get(name, True))


@dataclass(frozen=True)
class Wanted:
    """Which gradients are asked for."""

    hidden: bool = False
    weight: bool = False
    bias: bool = False

    @property
    def any(self) -> bool:
        return self.hidden or self.weight or self.bias


@dataclass
class ChunkedRun:
    """What a pass over all chunks leaves behind: values and statistics per token, gradients of Σ_t upstream_t·ℓ_t."""

    cross_entropy_T: Tensor
    auxiliary_T: Tensor
    stats: dict[str, Tensor] = field(default_factory=dict)
    grad_hidden: Tensor | None = None
    grad_weight: Tensor | None = None
    grad_bias: Tensor | None = None


@dataclass(frozen=True)
class Chunk:
    """One chunk after its statistics, and what is injected."""

    tokens: slice
    hidden_CD: Tensor
    """s·u: the logit scale sits on the narrow side."""
    index_C: Tensor
    rows: RowPass
    target_slope_C: Tensor | None
    projected_CD: Tensor | None
    """E W, unnormalised."""
    mean_row_D: Tensor | None
    stats: TokenStats
    injection: Injection


def iterate_chunks(problem: HeadProblem, *, back_projection: bool, work: RowWork | None = None) -> Iterator[Chunk]:
    """Statistics and coefficients chunk by chunk; the V-wide buffers are reused, so use a chunk before the next."""
    options, targets = problem.options, problem.targets
    work = TorchRows(options.softcap) if work is None else work
    full = options.statistics != "light"
    gain_wanted = full or (options.objective.active and options.objective.needs_gain)
    mu_wanted = problem.has_mu and (full or options.objective.needs_mu or options.label_smoothing != 0)
    rows = HeadRows(problem.weight_VD[: problem.vocab], problem.dtype, problem.rounding)
    bias_V = _scaled_bias(problem)
    mean_row_D = rows.mean() if mu_wanted else None
    mean_bias = bias_V.mean() if bias_V is not None and mu_wanted else None
    scale = options.logit_scale

    tokens = problem.hidden_TD.shape[0]
    bounds = chunk_bounds(tokens, problem.vocab, problem.dtype.itemsize, options.chunk_size, work.buffers)
    longest = max([stop - start for start, stop in bounds], default=0)
    buffer = problem.hidden_TD.new_empty((work.buffers, longest, problem.vocab), dtype=problem.dtype)

    for start, stop in bounds:
        chunk_tokens = slice(start, stop)
        valid_C, index_C = targets.valid_T[chunk_tokens], targets.index_T[chunk_tokens]
        hidden_CD = problem.hidden_TD.detach()[chunk_tokens]
        narrow_CD = hidden_CD if problem.rounding is None else hidden_CD.to(problem.rounding)
        hidden_CD = narrow_CD.to(problem.dtype)
        if scale != 1:
            hidden_CD = hidden_CD * scale
        z_CV = buffer[0, : stop - start]
        if rows.takes_narrow(narrow_CD):
            rows.narrow_logits_(narrow_CD, z_CV)
            z_CV.mul_(scale)
        else:
            rows.logits_(hidden_CD, z_CV)
        if bias_V is not None:
            z_CV.add_(bias_V)
        audited = options.statistics == "audit" and mean_row_D is not None
        passed = work.statistics(buffer[:, : stop - start], index_C, norm=gain_wanted, mean=audited)
        projected_CD = rows.back_project(passed.shaped_CV) if back_projection or gain_wanted else None

        mu_C = None
        if mean_row_D is not None:
            mu_C = hidden_CD @ mean_row_D
            mu_C = mu_C if mean_bias is None else mu_C + mean_bias
        stats = chunk_stats(
            passed.sums,
            passed.target_logit_C,
            valid_C,
            problem.vocab,
            mu_C=mu_C,
            projected_CD=projected_CD,
            mean_row_D=mean_row_D if full else None,
            logit_scale=scale,
        )
        if passed.mean_logit_C is not None and mu_C is not None:
            stats = replace(stats, mu_residual=passed.mean_logit_C - mu_C)
        check_rows(stats)
        yield Chunk(
            tokens=chunk_tokens,
            hidden_CD=hidden_CD,
            index_C=index_C,
            rows=passed,
            target_slope_C=None if options.softcap is None else 1 - (passed.target_logit_C / options.softcap) ** 2,
            projected_CD=projected_CD,
            mean_row_D=mean_row_D,
            stats=stats,
            injection=inject(stats, options),
        )


def _scaled_bias(problem: HeadProblem) -> Tensor | None:
    """s·b in compute precision, rounded first where autocast would."""
    if problem.bias_V is None:
        return None
    bias_V = problem.bias_V.detach()[: problem.vocab]
    bias_V = (bias_V if problem.rounding is None else bias_V.to(problem.rounding)).to(problem.dtype)
    return bias_V * problem.options.logit_scale


def run_chunks(problem: HeadProblem, work: RowWork, wanted: Wanted, upstream_T: Tensor | None = None) -> ChunkedRun:
    """One pass: values, statistics, and the wanted gradients of Σ_t upstream_t·(CE_t + aux_t)."""
    _refuse_capped_smoothing(problem)
    tokens, like = problem.hidden_TD.shape[0], problem.targets.weights.per_token
    run = ChunkedRun(like.new_zeros(tokens), like.new_zeros(tokens))
    gradients = _Gradients(problem, wanted) if wanted.any else None
    # Operands were rounded to the autocast dtype where asked; from there on nothing may be rounded again.
    with torch.autocast(problem.hidden_TD.device.type, enabled=False):
        for chunk in iterate_chunks(problem, back_projection=wanted.hidden, work=work):
            run.cross_entropy_T[chunk.tokens] = chunk.injection.cross_entropy
            run.auxiliary_T[chunk.tokens] = chunk.injection.auxiliary
            for name in STAT_FIELDS:
                value_C = getattr(chunk.stats, name)
                if value_C is not None:
                    run.stats.setdefault(name, like.new_zeros(tokens))[chunk.tokens] = value_C
            if gradients is not None:
                assert upstream_T is not None
                gradients.add(chunk, upstream_T[chunk.tokens])
        if gradients is not None:
            run.grad_hidden, run.grad_weight, run.grad_bias = gradients.finish()
    return run


class _Gradients:
    """Accumulates dh, dW and db over chunks, in compute precision."""

    def __init__(self, problem: HeadProblem, wanted: Wanted) -> None:
        self._problem, self._wanted = problem, wanted
        self._rows = HeadRows(problem.weight_VD[: problem.vocab], problem.dtype, problem.rounding)
        self._started = False
        dtype, device = problem.dtype, problem.hidden_TD.device
        rows, width = problem.weight_VD.shape
        self._hidden = torch.empty(problem.hidden_TD.shape, dtype=dtype, device=device) if wanted.hidden else None
        self._weight = torch.empty(rows, width, dtype=dtype, device=device) if wanted.weight else None
        self._bias = torch.zeros(rows, dtype=dtype, device=device) if wanted.bias else None
        self._uniform_D = torch.zeros(width, dtype=dtype, device=device)
        self._uniform = torch.zeros((), dtype=dtype, device=device)
        self._has_uniform = False

    def add(self, chunk: Chunk, upstream_C: Tensor) -> None:
        injection, zero = chunk.injection, upstream_C.new_zeros(())
        valid_C = chunk.stats.valid
        # `where` and not a product: what an ignored token computed may be infinite.
        p_C = torch.where(valid_C, upstream_C * injection.along_p / chunk.rows.sums.sum_C, zero)
        target_C = upstream_C * injection.along_target
        if chunk.target_slope_C is not None:
            target_C = target_C * chunk.target_slope_C
        target_C = torch.where(valid_C, target_C, zero)
        uniform_C = None
        if injection.has_uniform:
            uniform_C = torch.where(valid_C, upstream_C * injection.along_uniform, zero)
            self._has_uniform = True
        if self._hidden is not None:
            assert chunk.projected_CD is not None
            grad_CD = chunk.projected_CD.mul_(p_C.unsqueeze(1))
            grad_CD.addcmul_(self._rows.select(chunk.index_C), target_C.unsqueeze(1), value=-1)
            if uniform_C is not None:
                assert chunk.mean_row_D is not None  # whatever injects along 1/V needs μ
                grad_CD.addr_(uniform_C, chunk.mean_row_D, alpha=-1)
            self._hidden[chunk.tokens] = grad_CD
        if self._weight is not None:
            vocab = self._problem.vocab
            # The V-wide E is left alone: the weights of the tokens go onto the narrow hidden states.
            weighted_CD = chunk.hidden_CD * p_C.unsqueeze(1)
            self._weight[:vocab].addmm_(chunk.rows.shaped_CV.t(), weighted_CD, beta=1 if self._started else 0)
            self._weight.index_add_(0, chunk.index_C, chunk.hidden_CD * target_C.unsqueeze(1), alpha=-1)
            if uniform_C is not None:
                self._uniform_D += uniform_C @ chunk.hidden_CD
        if self._bias is not None:
            self._bias[: self._problem.vocab].addmv_(chunk.rows.shaped_CV.t(), p_C)
            self._bias.index_add_(0, chunk.index_C, target_C, alpha=-1)
            if uniform_C is not None:
                self._uniform += uniform_C.sum()
        self._started = True

    def finish(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        vocab, scale = self._problem.vocab, self._problem.options.logit_scale
        if self._weight is not None:
            if not self._started:
                self._weight.zero_()
            self._weight[vocab:].zero_()
            if self._has_uniform:
                self._weight[:vocab].sub_(self._uniform_D / vocab)
        if self._bias is not None:
            if self._has_uniform:
                self._bias[:vocab].sub_(self._uniform / vocab)
            self._bias.mul_(scale)
        if self._hidden is not None and scale != 1:
            self._hidden.mul_(scale)
        return self._hidden, self._weight, self._bias


def chunked_loss(problem: HeadProblem, work: RowWork) -> tuple[Tensor, Tensor, Tensor, TokenStats]:
    """(loss, cross-entropy, auxiliary, statistics), reduced; the loss carries gradient to hidden, weight and bias."""
    function = _PerTokenLoss if problem.options.reduction == "none" else _ScalarLoss
    loss, run = _apply(function, problem, work)
    return loss, *parts_and_stats(problem, run)


def parts_and_stats(problem: HeadProblem, run: ChunkedRun) -> tuple[Tensor, Tensor, TokenStats]:
    """Cross-entropy and auxiliary apart, reduced, and the statistics of all tokens."""
    weight_T, valid_T = problem.targets.weights.per_token, problem.targets.valid_T
    zero = weight_T.new_zeros(())
    ce = torch.where(valid_T, weight_T * run.cross_entropy_T, zero)
    aux = torch.where(valid_T, weight_T * run.auxiliary_T, zero)
    if problem.options.reduction != "none":
        ce, aux = ce.sum(), aux.sum()
    if not run.stats:  # no token, no chunk: every statistic that exists is empty
        run.stats = {name: weight_T.new_zeros(0) for name in present_fields(problem.options, has_mu=problem.has_mu)}
    return ce, aux, TokenStats(valid=valid_T, vocab=problem.vocab, **run.stats)


def _apply(function: type[torch.autograd.Function], problem: HeadProblem, work: RowWork) -> tuple[Tensor, ChunkedRun]:
    """One typed door to the untyped `Function.apply`."""
    box: list[ChunkedRun] = []
    tensors = problem.hidden_TD, problem.weight_VD, problem.bias_V
    loss: Tensor = function.apply(*tensors, problem, work, box)  # type: ignore[no-untyped-call]
    return loss, box[0]


def wanted_gradients(problem: HeadProblem) -> Wanted:
    """Asked of the problem, because inside an autograd.Function grad mode is always off."""
    if not problem.grad_enabled:
        return Wanted()
    bias = problem.bias_V
    return Wanted(
        problem.hidden_TD.requires_grad, problem.weight_VD.requires_grad, bias is not None and bias.requires_grad
    )


def weighted_losses(problem: HeadProblem, run: ChunkedRun) -> Tensor:
    """w_t·(CE_t + aux_t), 0 at ignored tokens."""
    weight_T = problem.targets.weights.per_token
    terms_T = weight_T * (run.cross_entropy_T + run.auxiliary_T)
    return torch.where(problem.targets.valid_T, terms_T, weight_T.new_zeros(()))


def narrow(grad: Tensor, like: Tensor) -> Tensor:
    """bf16 gradients wait for backward in bf16, as small as the parameter; fp16 ones wait in fp32, because a loss scale
    that is still to come is what keeps them from underflowing."""
    return grad if like.dtype == torch.float16 else grad.to(like.dtype)


def refuse_double_backward() -> None:
    if torch.is_grad_enabled():
        raise DoubleBackwardError(
            "this backend computes first derivatives only, but backward was called with create_graph=True: "
            "use backend='dense' for second derivatives."
        )


def _refuse_capped_smoothing(problem: HeadProblem) -> None:
    if problem.options.softcap is not None and problem.options.label_smoothing:
        raise CoordinateError(
            "`label_smoothing` with `softcap` needs the slope of every logit in a second V-wide product, which this "
            "backend does not form: use backend='dense'."
        )


def _recomputed(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients from the saved operands: every chunk again, with the upstream gradient of every token."""
    hidden, weight, bias = ctx.saved_tensors
    problem = replace(ctx.problem, hidden_TD=hidden, weight_VD=weight, bias_V=bias)
    per_token_T = problem.targets.weights.per_token * upstream
    run = run_chunks(problem, ctx.work, Wanted(*ctx.needs_input_grad[:3]), per_token_T)
    return run.grad_hidden, run.grad_weight, run.grad_bias, None, None, None


def _save(ctx: Any, problem: HeadProblem, work: RowWork, *tensors: Tensor | None) -> None:
    """The operands live in save_for_backward alone, where checkpointing and version checks can see them."""
    ctx.save_for_backward(*tensors)
    empty = problem.hidden_TD.new_empty(0)
    ctx.work, ctx.problem = work, replace(problem, hidden_TD=empty, weight_VD=empty, bias_V=None)


class _ScalarLoss(torch.autograd.Function):
    """Reduction "mean" or "sum": gradients are formed in forward and scaled by the one upstream number in backward.

    They are handed out once, so that whoever gets them may change them; a second backward over a retained graph
    recomputes them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        problem: HeadProblem,
        work: RowWork,
        box: list[ChunkedRun],
    ) -> Tensor:
        run = run_chunks(problem, work, wanted_gradients(problem), problem.targets.weights.per_token)
        box.append(run)
        pairs = ((run.grad_hidden, hidden), (run.grad_weight, weight), (run.grad_bias, bias))
        ctx.ready = [[None if grad is None or like is None else narrow(grad, like) for grad, like in pairs]]
        run.grad_hidden = run.grad_weight = run.grad_bias = None
        _save(ctx, problem, work, hidden, weight, bias)
        return weighted_losses(problem, run).sum()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward()
        if not ctx.ready:
            return _recomputed(ctx, upstream)
        # A pass over dW is worth a look at one number where looking is free.
        unit = upstream.device.type == "cpu" and float(upstream) == 1.0
        grads = (None if grad is None else grad if unit else grad.mul_(upstream) for grad in ctx.ready.pop())
        return (*grads, None, None, None)


class _PerTokenLoss(torch.autograd.Function):
    """Reduction "none": backward recomputes the chunks with the upstream gradient of every token."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        problem: HeadProblem,
        work: RowWork,
        box: list[ChunkedRun],
    ) -> Tensor:
        run = run_chunks(problem, work, Wanted())
        box.append(run)
        _save(ctx, problem, work, hidden, weight, bias)
        return weighted_losses(problem, run)

    @staticmethod
    def backward(ctx: Any, upstream_T: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward()
        return _recomputed(ctx, upstream_T)
