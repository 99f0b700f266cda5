"""The chunks of a head loss: logits h Wᵀ, row work, E W, statistics and coefficients, one chunk of tokens at a time.

Axes: C tokens of a chunk, V vocabulary, D width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from zloss.ranks.token_shard import TokenChunk
from zloss.source.injection import inject
from zloss.source.statistics import TokenStats
from zloss.transport.backends.chunk_sizes import chunk_bounds
from zloss.transport.backends.chunk_statistics import chunk_stats, mean_energy
from zloss.transport.backends.chunks import HeadChunk
from zloss.transport.backends.head_products import HeadProducts
from zloss.transport.backends.joined_rows import JoinedRows, clear_absent_rows_, join_rows, row_pass
from zloss.transport.backends.row_work import RowPass, RowWork, empty_narrow, empty_rows
from zloss.transport.backends.torch_rows import TorchRows
from zloss.transport.head_problem import HeadProblem
from zloss.transport.masked_logits import check_rows
from zloss.transport.softcap import softcap_slope


def iterate_head_chunks(
    problem: HeadProblem, *, back_projection: bool, work: RowWork | None = None
) -> Iterator[HeadChunk]:
    """Statistics and coefficients chunk by chunk; the V-wide buffers are reused, so use a chunk before the next.

    E W is formed where `back_projection` asks for it or the plan has the gain.
    """
    products, options = problem.products, problem.options
    work = TorchRows(options.softcap, plan=products) if work is None else work
    head_pass = _HeadPass.over(problem, work, back_projection)
    bounds = chunk_bounds(
        problem.targets.index_T.shape[0],
        problem.shard.widest * (work.buffers * problem.dtype.itemsize + 2 * products.narrow),
        options.chunk_size,
        device_type=products.device_type,
        memory_budget=options.memory_budget,
    )
    spans = _spans(problem, bounds)
    longest = max([span.count for span in spans], default=0)
    buffers_BCV = empty_rows(work.buffers, longest, problem.vocab, problem.dtype, products, problem.hidden_TD)
    narrow_CV = empty_narrow(products, longest, problem.vocab, problem.hidden_TD)
    for span, narrow_CD in _with_hidden(problem, spans):
        narrow = None if narrow_CV is None else narrow_CV[: span.count]
        yield head_pass.chunk(span, narrow_CD, buffers_BCV[:, : span.count], narrow)


@dataclass(frozen=True)
class _HeadPass:
    """What all chunks of one pass have in common."""

    problem: HeadProblem
    work: RowWork
    back_projection: bool
    """Whether E W is wanted for dh."""
    head: HeadProducts
    bias_V: Tensor | None
    """s·b."""
    mean_row_D: Tensor | None
    """w̄, where μ is planned."""
    mean_bias: Tensor | None
    """Mean of s·b."""
    drop: bool
    """Whether the entropy comes from a pass over E."""

    @classmethod
    def over(cls, problem: HeadProblem, work: RowWork, back_projection: bool) -> _HeadPass:
        plan, products, shard = problem.plan, problem.products, problem.shard
        head = HeadProducts(problem.weight_VD[: problem.vocab], problem.dtype, problem.rounding, products)
        bias_V = problem.scaled_bias()
        mean_row_D, mean_bias = _means(problem, head, bias_V) if plan.mu else (None, None)
        # Without a mean the entropy is not in E W; with a bias it also needs E·b, which a 16-bit E does not give, and on
        # a shard E W is of own rows alone.
        drop = plan.entropy and (not plan.mu or (bias_V is not None and products.narrow) or not shard.whole)
        return cls(problem, work, back_projection, head, bias_V, mean_row_D, mean_bias, drop)

    def chunk(self, span: _Span, narrow_CD: Tensor, buffers_BCV: Tensor, narrow_CV: Tensor | None) -> HeadChunk:
        """Logits, row work, E W, statistics and coefficients of one span; the buffers are those of its tokens."""
        problem, plan, shard, options = self.problem, self.problem.plan, self.problem.shard, self.problem.options
        valid_C = problem.targets.valid_T[span.tokens]
        index_C, own_C = shard.own_targets(problem.targets.index_T[span.tokens])
        hidden_CD = self._logits_(narrow_CD, buffers_BCV[0])
        rows = row_pass(
            self.work, buffers_BCV, narrow_CV, index_C, norm=plan.p_norm, mean=plan.mu_residual, drop=self.drop
        )
        if problem.masked and not shard.whole:
            clear_absent_rows_(rows)
        joined = join_rows(shard, rows, own_C, drop=self.drop)
        projected_CD = target_rows_CD = None
        if self.back_projection or plan.gain:
            projected_CD = self.head.back_project(rows.e_CV)
        partial = not (shard.whole or plan.gain)
        if projected_CD is not None and not shard.whole and not partial:
            projected_CD, target_rows_CD = self._over_ranks(joined, projected_CD, index_C)
        stats = self._statistics(rows, joined, valid_C, hidden_CD, projected_CD)
        check_rows(stats)
        return HeadChunk(
            tokens=span.tokens,
            index_C=index_C,
            rows=rows,
            joined=joined,
            stats=stats,
            injection=inject(stats, options.objective, options.label_smoothing),
            hidden_CD=hidden_CD,
            target_slope_C=None if options.softcap is None else softcap_slope(joined.target_logit_C, options.softcap),
            projected_CD=projected_CD,
            target_rows_CD=target_rows_CD,
            partial=partial,
            mean_row_D=self.mean_row_D,
            part=span.part,
        )

    def _logits_(self, narrow_CD: Tensor, out_CV: Tensor) -> Tensor:
        """out = s(W u + b) before the softcap; returns s·u in compute precision."""
        problem, scale = self.problem, self.problem.options.logit_scale
        if problem.rounding is not None:
            narrow_CD = narrow_CD.to(problem.rounding)
        hidden_CD = narrow_CD.to(problem.dtype)
        if scale != 1:
            hidden_CD = hidden_CD * scale
        if problem.products.native:
            self.head.logits_(narrow_CD, out_CV)
            if scale != 1:
                out_CV.mul_(scale)
        else:
            self.head.logits_(hidden_CD, out_CV)
        if self.bias_V is not None:
            out_CV.add_(self.bias_V)
        return hidden_CD

    def _over_ranks(self, joined: JoinedRows, own_CD: Tensor, index_C: Tensor) -> tuple[Tensor, Tensor | None]:
        """exp(z − m) W, and W[y] where dh is wanted, of the whole vocabulary from E W of own rows: one sum over ranks."""
        width, shard = own_CD.shape[1], self.problem.shard
        own_CD = joined.scaled_rows(own_CD)
        if not self.back_projection:
            return shard.sum_(own_CD), None
        ones_C = own_CD.new_ones(own_CD.shape[0])
        if shard.rows:
            picked_CD = self.head.select(index_C) * joined.own_target(ones_C).unsqueeze(1)
        else:
            picked_CD = torch.zeros_like(own_CD)
        both_CX = shard.sum_(torch.cat([own_CD, picked_CD], dim=1))
        return both_CX[:, :width].contiguous(), both_CX[:, width:]

    def _statistics(
        self, rows: RowPass, joined: JoinedRows, valid_C: Tensor, hidden_CD: Tensor, projected_CD: Tensor | None
    ) -> TokenStats:
        plan, mean_row_D = self.problem.plan, self.mean_row_D
        mu_C = energy_C = None
        if mean_row_D is not None:
            mu_C = hidden_CD @ mean_row_D
            mu_C = mu_C if self.mean_bias is None else mu_C + self.mean_bias
        if plan.entropy and joined.sums.drop_C is None:
            assert projected_CD is not None
            assert mean_row_D is not None
            energy_C = mean_energy(
                rows.sums, rows.e_CV, hidden_CD, projected_CD, mean_row_D, self.bias_V, self.mean_bias
            )
        return chunk_stats(
            plan,
            joined.sums,
            joined.target_logit_C,
            valid_C,
            self.problem.shard.total,
            mu_C=mu_C,
            mean_logit_C=joined.mean_logit_C,
            mean_energy_C=energy_C,
            projected_CD=projected_CD,
            mean_row_D=mean_row_D,
            logit_scale=self.problem.options.logit_scale,
        )


@dataclass(frozen=True)
class _Span:
    """The tokens of one chunk: a range of those of this process, or some of every rank."""

    tokens: slice | Tensor
    count: int
    part: TokenChunk | None = None


def _with_hidden(problem: HeadProblem, spans: list[_Span]) -> Iterator[tuple[_Span, Tensor]]:
    """Every span with its hidden states [C, D]. Those of other ranks are fetched while the span before is worked on."""
    own_TD = problem.hidden_TD.detach()
    if problem.tokens is None:
        yield from ((span, own_TD[span.tokens]) for span in spans)
        return
    parts = [span.part for span in spans if span.part is not None]
    following = parts[0].start_gather(own_TD) if parts else None
    for place, span in enumerate(spans):
        assert following is not None
        current = following
        following = parts[place + 1].start_gather(own_TD) if place + 1 < len(parts) else None
        yield span, current.wait()


def _spans(problem: HeadProblem, bounds: list[tuple[int, int]]) -> list[_Span]:
    if problem.tokens is None or not bounds:
        return [_Span(slice(start, stop), stop - start) for start, stop in bounds]
    longest = max(stop - start for start, stop in bounds)
    return [_Span(part.tokens_C, len(part.tokens_C), part) for part in problem.tokens.chunks(longest)]


def _means(problem: HeadProblem, head: HeadProducts, bias_V: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """w̄ and the mean of s·b over the whole vocabulary."""
    if bias_V is None:
        return problem.shard.mean(head.mean()), None
    means = problem.shard.mean(torch.cat([head.mean(), bias_V.mean(dim=0, keepdim=True)]))
    return means[:-1], means[-1]
