"""What happens to a chunk of logits between the matrix products: softcap, row sums, E = exp(z − m), statistics, sources.

A row is the row of one token in the [T, V] matrix of logits. `TorchRows` does the V-wide work in plain PyTorch, in place;
`TritonRows` (`triton.py`) does it in kernels.

Axes: C tokens of a chunk, V vocabulary, D width, B buffers.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from zloss.head.products import ProductPlan, applied_exp, product_exp
from zloss.objectives import Coefficients
from zloss.statistics import StatisticsPlan, TokenStats
from zloss.tensors import may_read


class RowSums(NamedTuple):
    """A few numbers of every row: m = max z, S = Σ exp(z − m), z_y, and those that were requested."""

    row_max_C: Tensor
    sum_C: Tensor
    target_logit_C: Tensor
    norm_C: Tensor | None = None
    """√Σ exp(z − m)², so that ‖p‖₂ = norm / S."""
    drop_C: Tensor | None = None
    """Σ exp(z − m)·(m − z), so that the entropy is log S + drop / S."""
    mean_logit_C: Tensor | None = None
    max_index_C: Tensor | None = None
    """Column of the largest logit, the first on ties."""


class RowNeeds(NamedTuple):
    """Which optional numbers of a row are needed."""

    norm: bool
    mean: bool
    drop: bool
    argmax: bool


class RowPass(NamedTuple):
    """One chunk of logits after its row sums."""

    sums: RowSums
    e_CV: Tensor
    """E = exp(z − m), times the slope of the softcap if there is one, as the products with W and h use it: in compute
    precision, or in 16 bits times the scale of the product plan."""
    buffer_CV: Tensor
    """The buffer this RowWork builds a source from: E, or the logits themselves."""
    slope_CV: Tensor | None = None
    """The slope of the softcap, if it is kept."""
    all_have_exp: bool = False
    """Every row is known to have an E; False where values cannot be read."""


class RowWork(Protocol):
    """The V-wide work on one chunk of logits."""

    buffers: int
    """V-wide buffers per chunk in compute precision; the first holds the logits."""
    plan: ProductPlan
    """How the products use E."""

    def statistics(self, buffers_BCV: Tensor, narrow_CV: Tensor | None, index_C: Tensor, needs: RowNeeds) -> RowPass:
        """Softcap, row sums and E; the buffers are consumed. `narrow_CV` receives E if the products use it in 16 bits."""
        ...

    def source(
        self, rows: RowPass, index_C: Tensor, valid_C: Tensor, coefficients: Coefficients, *, through_softcap: bool
    ) -> Tensor:
        """a·E − b·onehot(y) − g/V as [C, V], 0 at ignored tokens; `rows` is consumed.

        E is rounded as the products take it. `through_softcap` multiplies by the slope of the softcap: the source at the
        logits before it.
        """
        ...


class TorchRows:
    """Row work in PyTorch: 1 buffer, 2 under softcap, 3 if the slope of the softcap is kept.

    The buffer of logits is overwritten by E, which serves the statistics, E W / S = Wᵀp and dW alike.
    """

    def __init__(self, softcap: float | None, *, plan: ProductPlan, keep_slope: bool = False) -> None:
        self._softcap, self.plan = softcap, plan
        self._keep_slope = keep_slope and softcap is not None
        self.buffers = 1 + (softcap is not None) + self._keep_slope

    def statistics(self, buffers_BCV: Tensor, narrow_CV: Tensor | None, index_C: Tensor, needs: RowNeeds) -> RowPass:
        z_CV = buffers_BCV[0]
        if self._softcap is not None:
            softcap_(z_CV, buffers_BCV[-1], self._softcap)
        target_logit_C = z_CV.gather(1, index_C.unsqueeze(1)).squeeze(1)
        mean_logit_C = z_CV.mean(dim=1) if needs.mean else None
        # One pair (m, S), which forward and backward share.
        max_index_C = row_argmax(z_CV) if needs.argmax or self.plan.narrow else None
        row_max_C = z_CV.amax(dim=1)
        z_CV.sub_(row_max_C.unsqueeze(1)).exp_()
        sum_C, norm_C = z_CV.sum(dim=1), row_norm(z_CV) if needs.norm else None
        # log E = z − m unless E underflowed to 0, where E·(z − m) is negligible.
        drop_C = -torch.xlogy(z_CV, z_CV).sum(dim=1) if needs.drop else None
        sums = RowSums(row_max_C, sum_C, target_logit_C, norm_C, drop_C, mean_logit_C, max_index_C)
        e_CV, kept_CV = z_CV, None
        if self._softcap is not None:
            slope_CV = buffers_BCV[-1]
            e_CV = torch.mul(slope_CV, z_CV, out=buffers_BCV[1])
            kept_CV = slope_CV if self._keep_slope else None
        # Rows without a finite E are set to 0, so that a coefficient of 0 gives a gradient of 0 and not 0·NaN. A token
        # that counts still has a loss and gradients of NaN, through S.
        all_have_exp = _all_have_exp(sum_C)
        if not all_have_exp:
            e_CV.masked_fill_(~has_exp(sums).unsqueeze(1), 0)
        return RowPass(sums, product_exp(e_CV, self.plan, narrow_CV), z_CV, kept_CV, all_have_exp)

    def source(
        self, rows: RowPass, index_C: Tensor, valid_C: Tensor, coefficients: Coefficients, *, through_softcap: bool
    ) -> Tensor:
        slope_CV = None
        if through_softcap and self._softcap is not None:
            assert rows.slope_CV is not None, "made with keep_slope=False"
            slope_CV = rows.slope_CV
        return source_(applied_exp(rows.buffer_CV, self.plan), index_C, valid_C, coefficients, slope_CV)


def source_(
    e_CV: Tensor, index_C: Tensor, valid_C: Tensor, coefficients: Coefficients, slope_CV: Tensor | None
) -> Tensor:
    """Overwrite E with a·E − b·onehot(y) − g/V, times the slope of the softcap if it is given; 0 at ignored tokens."""
    e_CV.mul_(coefficients.a.unsqueeze(1))
    if coefficients.b is not None:
        e_CV.scatter_add_(1, index_C.unsqueeze(1), -coefficients.b.unsqueeze(1))
    if coefficients.g is not None:
        e_CV.sub_(coefficients.g.unsqueeze(1) / e_CV.shape[1])
    if slope_CV is not None:
        e_CV.mul_(slope_CV)
    # Rows of ignored tokens may have held NaN or infinities, and 0·NaN is not 0.
    return e_CV.masked_fill_(~valid_C.unsqueeze(1), 0)


def row_argmax(z_CV: Tensor) -> Tensor:
    """arg max of every row, the first on ties. On the CPU torch.argmax reads one number at a time, which takes ten times as
    long as a maximum: so it sees one block of every row, the first that has the largest of the blocks' maxima."""
    vocab = z_CV.shape[1]
    width = 512
    if z_CV.device.type != "cpu" or vocab < 8 * width:
        return z_CV.argmax(dim=1)
    blocks = vocab // width
    tops_CB = z_CV[:, : blocks * width].view(-1, blocks, width).amax(dim=2)
    if vocab % width:
        tops_CB = torch.cat([tops_CB, z_CV[:, -(vocab % width) :].amax(dim=1, keepdim=True)], dim=1)
    # A last block that is cut short starts earlier, among columns that are all below the maximum.
    start_C1 = (tops_CB.argmax(dim=1, keepdim=True) * width).clamp_max(vocab - width)
    block_CB = z_CV.gather(1, start_C1 + torch.arange(width, device=z_CV.device))
    return (start_C1 + block_CB.argmax(dim=1, keepdim=True)).squeeze(1)


_NORM_BLOCK = 512


def row_norm(e_CV: Tensor) -> Tensor:
    """‖E‖ of every row. On the CPU torch adds the squares of a row one by one: at V = 49152 in fp32 that is off by up to 7e-6.

    So a long row is read in blocks; what is left is 2e-7, as in a sum.
    """
    tokens, vocab = e_CV.shape
    parts_CB = e_CV
    if vocab >= 8 * _NORM_BLOCK:
        blocks = vocab // _NORM_BLOCK
        whole = blocks * _NORM_BLOCK
        blocks_CB = torch.linalg.vector_norm(e_CV[:, :whole].view(tokens, blocks, _NORM_BLOCK), dim=2)
        rest_C1 = torch.linalg.vector_norm(e_CV[:, whole:], dim=1, keepdim=True)
        parts_CB = torch.cat([blocks_CB, rest_C1], dim=1)
    norm_C: Tensor = torch.linalg.vector_norm(parts_CB, dim=1)
    return norm_C


def has_exp(sums: RowSums) -> Tensor:
    """Which rows have an E = exp(z − m): not those with only -inf logits, nor with a logit of inf or NaN; bool [C].

    S is at least 1 for any other row, because E is 1 at the largest logit.
    """
    return torch.isfinite(sums.sum_C) & (sums.sum_C > 0)


def _all_have_exp(sum_C: Tensor) -> bool:
    """Whether every row is known to have an E."""
    if not may_read(sum_C) or not sum_C.numel():
        return False
    return float(sum_C.min()) > 0  # NaN if one sum is; with a finite maximum no sum is above V


def statistics_of_no_rows(buffers_BCV: Tensor, narrow_CV: Tensor | None, index_C: Tensor, needs: RowNeeds) -> RowPass:
    """`RowWork.statistics` on a rank that holds no row of the vocabulary: no maximum, and sums of 0."""
    empty_CV = buffers_BCV[0]
    zero_C = empty_CV.new_zeros(empty_CV.shape[0])
    norm_C, drop_C, mean_C = (zero_C if wanted else None for wanted in (needs.norm, needs.drop, needs.mean))
    sums = RowSums(torch.full_like(zero_C, -torch.inf), zero_C, zero_C, norm_C, drop_C, mean_C, zero_C.long())
    return RowPass(sums, empty_CV if narrow_CV is None else narrow_CV, empty_CV)


_ALIGNMENT = 64
"""On a GPU rows start at multiples of 64 entries: tensor cores read 16 bytes at once, and V = 50257 is odd."""


def empty_rows(count: int, tokens: int, vocab: int, dtype: torch.dtype, plan: ProductPlan, like: Tensor) -> Tensor:
    """Allocate `count` V-wide tensors of a chunk, [count, C, V] on the device of `like`."""
    if plan.device_type != "cuda":
        return torch.empty((count, tokens, vocab), dtype=dtype, device=like.device)
    columns = -(-vocab // _ALIGNMENT) * _ALIGNMENT
    return torch.empty((count, tokens, columns), dtype=dtype, device=like.device)[:, :, :vocab]


def chunk_stats(
    plan: StatisticsPlan,
    sums: RowSums,
    valid_C: Tensor,
    vocab: int,
    *,
    all_valid: bool,
    mu_C: Tensor | None,
    mean_energy_C: Tensor | None = None,
    projected_CD: Tensor | None,
    centered_CD: Tensor | None,
    logit_scale: float,
) -> TokenStats:
    """The statistics that the plan names, from the row sums over the whole vocabulary, E W and S (Wᵀp − w̄).

    `mean_energy_C`: Σ_i p_i (z_i − μ), if the row sums do not give the entropy by themselves. ‖Wᵀp‖/‖p‖ = ‖E W‖/‖E‖: S
    cancels. With a logit scale s the head is s·W.
    """
    log_s_C, norm_C, head_scale = sums.sum_C.log(), sums.norm_C, abs(logit_scale)
    gain_C = gain_centered_C = entropy_C = None
    if plan.entropy and sums.drop_C is not None:
        entropy_C = log_s_C + sums.drop_C / sums.sum_C
    elif plan.entropy and mean_energy_C is not None and mu_C is not None:
        # log Z̃ − Σ p (z − μ): the common shift is in neither term. Rounding may leave it below 0.
        entropy_C = (log_s_C + (sums.row_max_C - mu_C) - mean_energy_C).clamp_min(0)
    if plan.gain and projected_CD is not None and norm_C is not None:
        gain_C = _scaled(torch.linalg.vector_norm(projected_CD, dim=1), head_scale) / norm_C
        if plan.gain_centered and centered_CD is not None:
            gain_centered_C = _scaled(torch.linalg.vector_norm(centered_CD, dim=1), head_scale) / norm_C
    residual = plan.mu_residual and sums.mean_logit_C is not None and mu_C is not None
    return TokenStats(
        row_max=sums.row_max_C,
        log_s=log_s_C,
        target_logit=sums.target_logit_C if all_valid else torch.where(valid_C, sums.target_logit_C, 0),
        valid=valid_C,
        vocab=vocab,
        mu=mu_C if plan.mu else None,
        p_norm=norm_C / sums.sum_C if plan.p_norm and norm_C is not None else None,
        gain=gain_C,
        gain_centered=gain_centered_C,
        entropy=entropy_C,
        predicted=sums.max_index_C if plan.predicted else None,
        mu_residual=sums.mean_logit_C - mu_C if residual else None,  # type: ignore[operator]
    )


def _scaled(value_C: Tensor, scale: float) -> Tensor:
    return value_C if scale == 1 else scale * value_C


def mean_energy(
    sum_C: Tensor,
    e_CV: Tensor,
    hidden_CD: Tensor,
    centered_CD: Tensor,
    bias_V: Tensor | None,
    mean_bias: Tensor | None,
) -> Tensor:
    """Σ_i p_i (z_i − μ) = u·(Wᵀp − w̄) + p·b − b̄ from S (Wᵀp − w̄): no further product with the head.

    `hidden_CD` and `bias_V` carry the logit scale.
    """
    energy_C = (hidden_CD * centered_CD).sum(dim=1)
    if bias_V is None or mean_bias is None:
        return energy_C / sum_C
    return (energy_C + e_CV @ bias_V) / sum_C - mean_bias


# The softcap cap·tanh(z/cap). A masked logit stays masked: tanh would turn -inf into the finite −cap and return it to
# log Z. Its slope is 0. The Triton kernels do the same in registers (`triton_kernels.py`).


def softcapped(z: Tensor, cap: float) -> Tensor:
    """cap·tanh(z/cap), differentiable."""
    return torch.where(torch.isneginf(z), z, cap * torch.tanh(z / cap))


def softcap_slope(capped: Tensor, cap: float) -> Tensor:
    """The derivative, from the capped logits: 1 − (capped/cap)²."""
    return (1 - (capped / cap) ** 2).clamp_min(0)


def softcap_(z: Tensor, slope: Tensor, cap: float) -> None:
    """Overwrite z with the capped logits and `slope` with the derivative, without a third buffer of that size."""
    masked = torch.isneginf(z)
    z.div_(cap).tanh_()
    torch.mul(z, z, out=slope)
    slope.neg_().add_(1)
    z.mul_(cap)
    z.masked_fill_(masked, -torch.inf)
