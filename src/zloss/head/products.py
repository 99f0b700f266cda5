"""The matrix products of a head loss, in which dtype they run, and the gradients dh, dW and db that they add up to.

A head loss has three products with a V-wide factor: the logits h Wᵀ, E W with E = exp(z − m), and Eᵀ(x∘h) with
x = w·a/S. `products` says in which dtype their factors are:

| option    | factors of E W and Eᵀ(x∘h)                                       | error of the gradients  |
|-----------|------------------------------------------------------------------|-------------------------|
| "operand" | fp16                                                             | ≤ 2⁻¹¹ of an entry of E |
| "fp32"    | fp32 (fp64 for fp64 operands)                                    | fp32                    |
| "auto"    | "operand" on CUDA and ROCm for 16-bit operands, "fp32" elsewhere |                         |

The logits product takes W and h as they are. The other two take fp16 even where W and h are bf16: tensor cores multiply
both at the same speed, E and x∘h have a known range, and fp16 has three more bits. For a bf16 head that takes one fp16
copy of W, scaled by a power of two, in which every entry above 2⁻²⁹ of the largest is exact.

Results and sums are fp32 under every option, and the logits are never stored in 16 bits. Operands that are not both of
one 16-bit dtype (after autocast) have fp32 products under every option. The dense backend ignores the option.

Axes: T tokens, C tokens of a chunk, V vocabulary, D width; M, N rows and columns of a result, K the axis that is summed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from zloss.head.options import Products
from zloss.objectives import Coefficients

if TYPE_CHECKING:
    from zloss.head.arguments import HeadProblem
    from zloss.head.chunked import Chunk

Kind = Literal["operand", "fp32"]
Version = tuple[int, int]

_OUT_DTYPE: Version = (2, 8)
"""Since this version torch.mm and torch.addmm take `out_dtype` on CUDA (pytorch/pytorch#150812)."""
_OUT_DTYPE_ON_ROCM: Version = (2, 10)
"""Since this version ROCm writes the fp32 result too (pytorch/pytorch#162600)."""
_FP32_ACCUMULATOR: Version = (2, 10)
"""Since this version addmm(fp32, 16-bit, 16-bit, out_dtype=fp32) takes an fp32 accumulator (pytorch/pytorch#167931)."""


@dataclass(frozen=True)
class ProductPlan:
    """How the products of one loss run."""

    kind: Kind
    device_type: str
    """The device that the plan was made for; a trace on the meta device follows the plan of a GPU."""
    compute: torch.dtype
    """Dtype of logits, results and accumulators: fp32, or fp64 for fp64 operands."""
    operand: torch.dtype | None
    """The 16-bit dtype that h and W share after autocast, and that the logits product takes; None if they share none."""
    takes_16_bit: bool
    """The device multiplies 16-bit factors as they are. Otherwise they are converted first, which gives the same products."""
    fp32_accumulator: bool
    """Such a product can be added to an fp32 accumulator in one call; otherwise it is written and then added."""

    @property
    def narrow(self) -> bool:
        """Whether E and x∘h are rounded to fp16 for their products."""
        return self.kind == "operand"

    @property
    def factor(self) -> torch.dtype:
        """Dtype in which E, x∘h and the W of E W are stored for their products."""
        return torch.float16 if self.narrow else self.compute

    @property
    def exp_scale(self) -> float:
        """Power of two by which the stored E is multiplied. fp16 has full precision from 2⁻¹⁴ on: with 2¹⁵, down to
        E = 2⁻²⁹, and p ≤ E, so that every p above 2e-9 keeps its digits."""
        return 2.0**15 if self.narrow else 1.0


def plan_products(
    option: Products,
    *,
    device_type: str,
    hidden: torch.dtype,
    weight: torch.dtype,
    rounding: torch.dtype | None = None,
    torch_version: Version | None = None,
    hip: bool | None = None,
) -> ProductPlan:
    """The plan for operands of these dtypes; `rounding` is the autocast dtype. Version and hip: None reads torch's own.

    >>> bf16 = torch.bfloat16
    >>> plan_products("auto", device_type="cuda", hidden=bf16, weight=bf16, torch_version=(2, 13), hip=False).kind
    'operand'
    """
    compute = torch.float64 if torch.float64 in (hidden, weight) else torch.float32
    dtypes = {hidden, weight} if rounding is None else {rounding}
    shared = dtypes.pop() if len(dtypes) == 1 else compute
    if compute == torch.float64 or shared not in (torch.bfloat16, torch.float16):
        return fp32_plan(compute, device_type)
    version = torch_version or _INSTALLED
    on_rocm = torch.version.hip is not None if hip is None else hip
    takes_16_bit = device_type == "cuda" and version >= (_OUT_DTYPE_ON_ROCM if on_rocm else _OUT_DTYPE)
    kind: Kind = ("operand" if takes_16_bit else "fp32") if option == "auto" else option
    return ProductPlan(kind, device_type, compute, shared, takes_16_bit, takes_16_bit and version >= _FP32_ACCUMULATOR)


_INSTALLED: Version = (int(torch.__version__.split(".")[0]), int(torch.__version__.split(".")[1]))


def fp32_plan(compute: torch.dtype = torch.float32, device_type: str = "cpu") -> ProductPlan:
    """Every product in compute precision, from factors that are converted to it."""
    return ProductPlan("fp32", device_type, compute, None, takes_16_bit=False, fp32_accumulator=False)


def product_exp(e_CV: Tensor, plan: ProductPlan, out_CV: Tensor | None = None) -> Tensor:
    """E as the products take it: unchanged, or in 16 bits times the plan's scale, written to `out_CV` if there is one."""
    if not plan.narrow:
        return e_CV
    scaled_CV = e_CV * plan.exp_scale
    return scaled_CV.to(plan.factor) if out_CV is None else out_CV.copy_(scaled_CV)


def applied_exp(e_CV: Tensor, plan: ProductPlan) -> Tensor:
    """E as the products see it, back in compute precision: the shape of the source that is really applied."""
    return product_exp(e_CV, plan).to(e_CV.dtype) / plan.exp_scale if plan.narrow else e_CV


def _power_of_two(largest: Tensor, exponent: int) -> Tensor:
    """The power of two that scales `largest` to 2^exponent at most; 1 for 0 and for what is not finite."""
    usable = torch.isfinite(largest) & (largest > 0)
    steps = (exponent - torch.frexp(largest).exponent).clamp(-100, 100)
    return torch.where(usable, torch.ldexp(torch.ones_like(largest), steps), 1.0)


_BLOCK_BYTES = 2**25
"""Size of a converted block of W: small next to the logit buffer, large enough that the product dominates the conversion."""
_COPY_EXPONENT = 15
"""The largest |W| of an fp16 copy is below 2¹⁵, half of what fp16 holds; down to 2⁻²⁹ of it entries are exact."""


class HeadProducts:
    """h Wᵀ, E W, Eᵀx, W[y] and w̄ of a head W [V, D], computed according to a `ProductPlan`.

    A head that is already in the dtype of its products is used as it is; otherwise it is converted one block of the
    vocabulary at a time, so no second copy of the whole head exists in compute precision.
    """

    def __init__(
        self, weight_VD: Tensor, dtype: torch.dtype, rounding: torch.dtype | None, plan: ProductPlan | None = None
    ) -> None:
        self._weight_VD, self._dtype = weight_VD.detach(), dtype
        self._plan = plan = fp32_plan(dtype) if plan is None else plan
        self._rounding = None if rounding == weight_VD.dtype else rounding
        self.vocab, self.width = weight_VD.shape
        self._whole = weight_VD.dtype == dtype and self._rounding is None
        self._rounded_VD = self._weight_VD
        if plan.takes_16_bit and self._rounding is not None:
            # One rounded copy of a master weight in fp32, as autocast keeps it too.
            self._rounded_VD = self._weight_VD.to(self._rounding)
        self._unit: Tensor | None = None
        """The power of two that scales the largest |W| to 2¹⁵ where E W takes an fp16 copy of a bf16 head."""
        if plan.narrow and plan.operand != plan.factor and self.vocab:
            largest = torch.linalg.vector_norm(self._weight_VD, torch.inf, dtype=dtype)
            self._unit = _power_of_two(largest, _COPY_EXPONENT)
        self._copy_VD: Tensor | None = None
        """The copy, made on first use. A plain attribute: torch.compile does not enter the lock of a cached_property."""

    def logits_(self, hidden_CD: Tensor, out_CV: Tensor) -> None:
        """out = h Wᵀ, for h in compute precision, or in 16 bits where the device takes that."""
        if hidden_CD.dtype != self._dtype:
            _multiply(hidden_CD, self._rounded_VD.t(), out_CV)
            return
        if self._whole:
            torch.mm(hidden_CD, self._weight_VD.t(), out=out_CV)
            return
        for block in self._blocks():
            _multiply(hidden_CD, self._wide(self._weight_VD[block]).t(), out_CV[:, block])

    def back_project(self, e_CV: Tensor) -> Tensor:
        """E W in compute precision, which is S·Wᵀp for E = S·p: the product that both the gain and dh need.

        `e_CV` is E times the plan's scale.
        """
        plan, unit = self._plan, self._unit
        if self._whole and not plan.narrow:
            return torch.mm(e_CV, self._weight_VD)
        out_CD = e_CV.new_zeros(e_CV.shape[0], self.width, dtype=self._dtype)
        if plan.narrow and plan.takes_16_bit:
            _accumulate(out_CD, e_CV, self._factor(), plan, first=True)
        else:
            for block in self._blocks():
                weight_VD = self._wide(self._weight_VD[block])
                if unit is not None:  # the entries of `_factor`
                    weight_VD = (weight_VD * unit).to(plan.factor).to(self._dtype)
                _accumulate(out_CD, e_CV[:, block].to(self._dtype), weight_VD, plan, first=block.start == 0)
        if unit is not None:
            out_CD.div_(unit)
        return out_CD if plan.exp_scale == 1 else out_CD.mul_(1 / plan.exp_scale)

    def add_outer_(self, total_VX: Tensor, e_CV: Tensor, factor_CX: Tensor, *, first: bool) -> None:
        """total += Eᵀ x for x = `factor_CX`; `first` overwrites the total."""
        plan = self._plan
        alpha = 1 / plan.exp_scale
        if not plan.narrow or plan.takes_16_bit:
            _accumulate(total_VX, e_CV.t(), factor_CX, plan, first=first, alpha=alpha)
            return
        wide_CX = factor_CX.to(self._dtype)
        for block in self._blocks():
            _accumulate(total_VX[block], e_CV[:, block].to(self._dtype).t(), wide_CX, plan, first=first, alpha=alpha)

    def select(self, index_C: Tensor) -> Tensor:
        """W[y] in compute precision."""
        return self._wide(self._weight_VD.index_select(0, index_C))

    def mean(self) -> Tensor:
        """w̄, the mean row."""
        if self._whole:
            return self._weight_VD.mean(dim=0)
        if self._plan.takes_16_bit:
            return self._rounded_VD.sum(dim=0, dtype=self._dtype) / self.vocab
        total_D = self._weight_VD.new_zeros(self.width, dtype=self._dtype)
        for block in self._blocks():
            total_D += self._wide(self._weight_VD[block]).sum(dim=0)
        return total_D / self.vocab

    def _blocks(self) -> Iterator[slice]:
        step = max(1, self.vocab) if self._whole else max(1, _BLOCK_BYTES // (self.width * self._dtype.itemsize))
        for start in range(0, self.vocab, step):
            yield slice(start, min(start + step, self.vocab))

    def _wide(self, weight_VD: Tensor) -> Tensor:
        """Rows of W in compute precision, rounded first where autocast would."""
        return (weight_VD if self._rounding is None else weight_VD.to(self._rounding)).to(self._dtype)

    def _factor(self) -> Tensor:
        """The head as the product E W takes it on a GPU: in 16 bits, as it is or as a scaled copy."""
        if self._unit is None:
            return self._rounded_VD
        if self._copy_VD is None:
            self._copy_VD = torch.empty_like(self._rounded_VD, dtype=self._plan.factor)
            torch.mul(self._rounded_VD, self._unit, out=self._copy_VD)
        return self._copy_VD


# A product of 16-bit factors has an fp32 result and fp32 sums. Where the device cannot do that (`takes_16_bit` is off) the
# factors are converted first: a product of two 16-bit numbers is exact in fp32, so only the order of the sum differs.


def _multiply(left_MK: Tensor, right_KN: Tensor, out_MN: Tensor) -> None:
    """out = left right, for factors of the dtype of `out`, or 16-bit factors and an fp32 `out`."""
    if left_MK.dtype == out_MN.dtype:
        torch.mm(left_MK, right_KN, out=out_MN)
    elif torch.compiler.is_compiling():
        add_product_(out_MN, left_MK, right_KN, 0.0, 1.0)
    else:
        torch.mm(left_MK, right_KN, out_dtype=out_MN.dtype, out=out_MN)


def _accumulate(
    total_MN: Tensor, left_MK: Tensor, right_KN: Tensor, plan: ProductPlan, *, first: bool, alpha: float = 1.0
) -> None:
    """total = (0 if first, else total) + alpha·left right, in one call where the plan has an fp32 accumulator."""
    beta = 0 if first else 1
    if left_MK.dtype == total_MN.dtype:
        total_MN.addmm_(left_MK, right_KN, beta=beta, alpha=alpha)
    elif not plan.fp32_accumulator:
        product_MN = torch.empty_like(total_MN, memory_format=torch.contiguous_format)
        _multiply(left_MK, right_KN, product_MN)
        if first:
            total_MN.zero_()
        total_MN.add_(product_MN, alpha=alpha)
    elif torch.compiler.is_compiling():
        add_product_(total_MN, left_MK, right_KN, float(beta), alpha)
    else:
        torch.addmm(total_MN, left_MK, right_KN, out_dtype=total_MN.dtype, beta=beta, alpha=alpha, out=total_MN)


@torch.library.custom_op("zloss::add_product_", mutates_args=("total",))
def add_product_(total: Tensor, left: Tensor, right: Tensor, beta: float, alpha: float) -> None:
    """total = beta·total + alpha·left right from 16-bit factors: one op to the compiler, whose own lowering of addmm with
    `out_dtype` fails (pytorch/pytorch#163880)."""
    if left.is_cuda and beta == 0 and alpha == 1:
        torch.mm(left, right, out_dtype=total.dtype, out=total)
    elif left.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, beta=beta, alpha=alpha, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype), beta=beta, alpha=alpha)


add_product_.register_fake(lambda *_: None)


_FACTOR_EXPONENT = 4
"""max |w∘h| is scaled to 2⁴ in fp16. That leaves 12 powers of two above: dW of a token with a/S > 4096 is infinite. Below are
18 at full precision, for 1/S and for small entries of h, and 10 that lose one bit each."""
_BIAS_PARTS = 3
"""Parts of x in the product for db: a vector is cheap enough to be kept exact."""
_BIAS_COLUMNS = 8
"""Columns of that product: tensor cores take multiples of 8."""


class HeadGradients:
    """Whichever of dh, dW and db are wanted, of Σ_t weight_t·ℓ_t, summed over chunks in compute precision.

        dh_t = s (x_t E_t W − b_t W[y_t] − g_t w̄)
        dW   = Σ_t (x_t E_t − b_t onehot(y_t)) (s u_t)ᵀ − (1/V) 1 (Σ_t g_t s u_t)ᵀ,    db likewise with 1 for u_t

    s is the logit scale, which the chunk's hidden states already carry. x, b and g are the a, b and g of
    `TokenLoss.exp_coefficients`: x = w·a/S, because it multiplies E = S·p; b and g include w. The Z-loss has no separate
    term: on the row of the target x·E_y − b = w(a·p_y − 1), which tends to w(a − 1) for a confident token.

    In 16 bits the product for dW takes round(x∘h), which loses much of what distinguishes a from 1: a Z-loss of λ = 1e-4 at
    log Z − c = 10 changes a by 2e-3, four times the largest rounding error of fp16. So on the rows of the target and of the
    largest logit, where E is of order 1, the residue E·(x∘h − round(x∘h)) is added back in compute precision. On all other
    rows E is small and the rounding errors of many tokens average out.
    """

    def __init__(self, problem: HeadProblem, head: HeadProducts, wanted: tuple[bool, ...], weight_T: Tensor) -> None:
        self._problem, self._head, self._plan, self._weight_T = problem, head, problem.products, weight_T
        self._wants_hidden, wants_weight, wants_bias = wanted
        self._factor_unit: Tensor | None = None
        self._bias_unit: Tensor | None = None
        """Powers of two by which x∘h and x are multiplied in fp16, one for all chunks: fp16 has a narrow range and x∘h is
        small, because w is 1/tokens and S up to V."""
        if self._plan.narrow and weight_T.numel():
            largest_w = weight_T.detach().abs().amax()
            largest_h = problem.hidden_TD.detach().abs().amax().float() * abs(problem.options.logit_scale)
            self._factor_unit = _power_of_two(largest_w * largest_h, _FACTOR_EXPONENT)
            self._bias_unit = _power_of_two(largest_w, _FACTOR_EXPONENT)
        shape_VD, dtype, device = problem.weight_VD.shape, problem.dtype, problem.hidden_TD.device
        self._dhidden_TD: Tensor | None = None
        """dh; with one chunk, that chunk's own; otherwise allocated at the first chunk."""
        self._dbias_V = torch.zeros(shape_VD[0], dtype=dtype, device=device) if wants_bias else None
        self._dweight_VD: Tensor | None = None
        self._dweight_unset = problem.weight_grad_buffer is None
        """Whether nothing has been added to dW yet; memory that we allocate is uninitialized."""
        if wants_weight:
            self._dweight_VD = problem.weight_grad_buffer
            if self._dweight_VD is None:
                self._dweight_VD = torch.empty(shape_VD, dtype=dtype, device=device)
            elif self._factor_unit is not None:
                self._dweight_VD[: problem.local_rows].mul_(self._factor_unit)
        self._uniform_D: Tensor | None = None
        """Σ_t g_t u_t."""
        self._uniform: Tensor | None = None
        """Σ_t g_t."""
        self._pending: list[Any] = []
        """Pending all-reduces of dh."""

    def add(self, chunk: Chunk) -> None:
        """Add the gradients of a chunk; its E W is consumed."""
        whole = chunk.exp_coefficients(self._weight_T)
        assert whole.b is not None
        assert chunk.hidden_CD is not None
        if chunk.target_slope_C is not None:
            b_C = whole.b * chunk.target_slope_C
            whole = replace(whole, b=b_C if chunk.counted_C is None else torch.where(chunk.counted_C, b_C, 0))
        local = chunk.share.local(whole)
        assert local.b is not None
        if self._wants_hidden:
            self._add_hidden(chunk, whole, local)
        if self._dweight_VD is not None:
            if self._problem.local_rows:
                self._add_weight(chunk, chunk.hidden_CD, local.a, local.b, self._dweight_VD[: self._problem.local_rows])
            self._dweight_unset = False
            if local.g is not None:
                uniform_D = local.g @ chunk.hidden_CD
                self._uniform_D = uniform_D if self._uniform_D is None else self._uniform_D + uniform_D
        if self._dbias_V is not None:
            if self._problem.local_rows:
                self._add_bias(chunk, local.a, self._dbias_V[: self._problem.local_rows])
                self._dbias_V.index_add_(0, chunk.index_C, local.b, alpha=-1)
            if local.g is not None:
                uniform = local.g.sum()
                self._uniform = uniform if self._uniform is None else self._uniform + uniform

    def add_source(self, chunk: Chunk, source_CV: Tensor) -> None:
        """Add the gradients of a chunk from its source δ [C, V] at the logits before any softcap: δW, δᵀh and Σ_t δ_t."""
        inside = slice(self._problem.local_rows)
        if self._wants_hidden:
            self._place_hidden(chunk.tokens, self._head.back_project(source_CV), partial=not self._problem.shard.whole)
        if self._dweight_VD is not None:
            assert chunk.hidden_CD is not None
            self._head.add_outer_(self._dweight_VD[inside], source_CV, chunk.hidden_CD, first=self._dweight_unset)
            self._dweight_unset = False
        if self._dbias_V is not None:
            self._dbias_V[inside] += source_CV.sum(dim=0)

    def _add_hidden(self, chunk: Chunk, whole: Coefficients, local: Coefficients) -> None:
        """x·E W − b·W[y] − g·w̄, with the coefficients of the whole vocabulary, or of the local rows if E W is theirs."""
        partial, group = self._problem.partial_projection, self._problem.shard.group
        a_C, b_C, g_C = (local.a, local.b, local.g) if partial else (whole.a, whole.b, whole.g)
        assert chunk.projected_CD is not None
        assert b_C is not None
        grad_CD = chunk.projected_CD.mul_(a_C.unsqueeze(1))
        target_rows_CD = chunk.target_rows_CD
        if target_rows_CD is None and self._problem.local_rows:
            target_rows_CD = self._head.select(chunk.index_C)
        if target_rows_CD is not None:
            grad_CD.addcmul_(target_rows_CD, b_C.unsqueeze(1), value=-1)
        # Every rank knows the term along w̄, so in a sum over ranks the first one adds it.
        if g_C is not None and (not partial or (group is not None and group.rank() == 0)):
            assert chunk.mean_row_D is not None  # a source along 1/V needs μ, and with μ there is w̄
            grad_CD.addr_(g_C, chunk.mean_row_D, alpha=-1)
        self._place_hidden(chunk.tokens, grad_CD, partial=partial)

    def _place_hidden(self, tokens: slice, grad_CD: Tensor, *, partial: bool) -> None:
        """Write dh of a chunk to its tokens; `partial` is a term of it, to be summed over ranks."""
        if grad_CD.shape == self._problem.hidden_TD.shape:
            self._dhidden_TD = grad_CD
        else:
            self._dhidden_TD = self._empty_hidden() if self._dhidden_TD is None else self._dhidden_TD
            self._dhidden_TD[tokens] = grad_CD
        if partial:  # the sum runs in parallel with the products of this chunk's dW and of the next chunk
            self._pending.append(self._problem.shard.start_sum_(self._dhidden_TD[tokens]))

    def _empty_hidden(self) -> Tensor:
        return torch.empty_like(
            self._problem.hidden_TD, dtype=self._problem.dtype, memory_format=torch.contiguous_format
        )

    def _add_weight(self, chunk: Chunk, hidden_CD: Tensor, x_C: Tensor, b_C: Tensor, total_VD: Tensor) -> None:
        """Add Eᵀ(x∘h) − onehotᵀ(b∘h) to dW; x = w·a/S multiplies h, because E is V wide.

        The Z gradient of a confident token is what this difference leaves on the row of the target; `_finished_weight`
        subtracts the part along 1/V. Under softcap with label smoothing the source is formed first (`add_source`).
        """
        e_CV, max_index_C, index_C = chunk.rows.e_CV, chunk.rows.sums.max_index_C, chunk.index_C
        hidden_CD = hidden_CD if self._factor_unit is None else hidden_CD * self._factor_unit
        weighted_CD = hidden_CD * x_C.unsqueeze(1)
        picked_CD = hidden_CD * b_C.unsqueeze(1)
        if not self._plan.narrow:
            self._head.add_outer_(total_VD, e_CV, weighted_CD, first=self._dweight_unset)
        else:
            assert max_index_C is not None
            factor_CD = weighted_CD.to(self._plan.factor)
            self._head.add_outer_(total_VD, e_CV, factor_CD, first=self._dweight_unset)
            residue_CD = weighted_CD.sub_(factor_CD)
            # Subtracted below with the opposite sign, so E_y·residue is added to the row of the target.
            picked_CD.addcmul_(residue_CD, _entries(e_CV, index_C, self._plan.exp_scale), value=-1)
            elsewhere_C1 = (max_index_C != index_C).unsqueeze(1)
            residue_CD.mul_(_entries(e_CV, max_index_C, self._plan.exp_scale) * elsewhere_C1)
            total_VD.index_add_(0, max_index_C, residue_CD)
        total_VD.index_add_(0, index_C, picked_CD, alpha=-1)

    def _add_bias(self, chunk: Chunk, x_C: Tensor, total_V: Tensor) -> None:
        """Eᵀx; in 16 bits x is divided into parts, each a column of the factor."""
        e_CV, unit = chunk.rows.e_CV, self._bias_unit
        if unit is None:
            total_V.addmv_(e_CV.t(), x_C)
            return
        factor_CX = torch.zeros((x_C.shape[0], _BIAS_COLUMNS), dtype=self._plan.factor, device=x_C.device)
        rest_C = x_C * unit
        for column in range(_BIAS_PARTS):
            factor_CX[:, column] = rest_C
            rest_C = rest_C - factor_CX[:, column]
        total_VX = torch.empty((total_V.shape[0], _BIAS_COLUMNS), dtype=total_V.dtype, device=total_V.device)
        self._head.add_outer_(total_VX, e_CV, factor_CX, first=True)
        total_V.add_(total_VX.sum(dim=1) / unit)

    def finish(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """(dh, dW, db) after the last chunk; no dW if it went to the caller's buffer."""
        for handle in self._pending:
            handle.wait()
        scale, shard = self._problem.options.logit_scale, self._problem.shard
        if self._dbias_V is not None:
            if self._uniform is not None:
                self._dbias_V[: shard.rows].sub_(self._uniform / shard.total)
            self._dbias_V.mul_(scale)
        if self._wants_hidden and self._dhidden_TD is None:
            self._dhidden_TD = self._empty_hidden()  # no tokens
        if self._dhidden_TD is not None and scale != 1:
            self._dhidden_TD.mul_(scale)
        return self._dhidden_TD, self._finished_weight(), self._dbias_V

    def _finished_weight(self) -> Tensor | None:
        """dW less its part along 1/V, in compute precision."""
        if self._dweight_VD is None:
            return None
        if self._dweight_unset:
            self._dweight_VD.zero_()
        problem, unit, vocab = self._problem, self._factor_unit, self._problem.local_rows
        inside_VD = self._dweight_VD[:vocab]
        if self._uniform_D is None:
            if unit is not None:
                inside_VD.div_(unit)
        elif unit is None:
            inside_VD.sub_(self._uniform_D / problem.shard.total)
        else:
            torch.addcmul(-self._uniform_D / problem.shard.total, inside_VD, 1 / unit, out=inside_VD)
        if problem.weight_grad_buffer is not None:
            return None
        self._dweight_VD[vocab:].zero_()
        return self._dweight_VD


def _entries(e_CV: Tensor, index_C: Tensor, exp_scale: float) -> Tensor:
    """E[t, index_t] as the product took it, [C, 1] in fp32."""
    return e_CV.gather(1, index_C.unsqueeze(1)).float() / exp_scale
