"""Validated options of a head loss, backend selection and chunk sizing."""

from __future__ import annotations

import importlib.util
import inspect
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypedDict, TypeVar, get_args

import torch

from zloss.errors import (
    CoordinateError,
    DeviceError,
    DtypeError,
    InputError,
    MissingDependencyError,
    ReductionError,
    ShapeError,
    UnknownNameError,
)
from zloss.objectives import Objective
from zloss.statistics import Statistics
from zloss.tensors import is_number

F = TypeVar("F", bound=Callable[..., Any])

Reduction = Literal["mean", "sum", "none"]
Backend = Literal["auto", "dense", "chunked", "triton"]
ChosenBackend = Literal["dense", "chunked", "triton"]
Products = Literal["auto", "operand", "fp32"]


class SourceKeywords(TypedDict, total=False):
    """The keywords that `head_source` shares with the losses; `HeadOptions` explains them."""

    ignore_index: int
    reduction: Reduction
    valid_vocab: int | None
    logit_scale: float
    softcap: float | None
    label_smoothing: float
    backend: Backend
    products: Products
    chunk_size: int | None
    memory_budget: int | None


class HeadKeywords(SourceKeywords, total=False):
    """The keywords that `head_loss`, `HeadLoss` and `logits_loss` share; `HeadOptions` explains them."""

    statistics: Statistics


@dataclass(frozen=True)
class HeadOptions:
    """What a loss computes, apart from its tensors.

    >>> import zloss
    >>> HeadOptions(zloss.StandardZLoss(1e-4), softcap=30.0).softcap
    30.0
    """

    objective: Objective
    ignore_index: int = -100
    """The target of tokens that do not count."""
    reduction: Reduction = "mean"
    """"mean" divides by N = Σ w_t over valid tokens, or by an explicit global `normalizer`; "sum" does not divide; "none"
    returns w_t·ℓ_t in the shape of `target`."""
    valid_vocab: int | None = None
    """Rows of the head that are included in log Z, μ and w̄; the rows after them are padding. None: all."""
    logit_scale: float = 1.0
    """s of z = s(Wu + b)."""
    softcap: float | None = None
    """cap of cap·tanh(z/cap); None disables it."""
    label_smoothing: float = 0.0
    """ε: cross-entropy against (1 − ε)·onehot(y) + ε/V."""
    statistics: Statistics = "full"
    """Which statistics are returned (`zloss.statistics`); "light" skips what the loss itself does not need."""
    backend: Backend = "auto"
    """"auto" is Triton on a GPU if it is installed and "chunked" elsewhere; "dense" is the slow reference."""
    products: Products = "auto"
    """Dtype in which the matrix products run: "operand" (16 bits) or "fp32"; "auto" is "operand" on a GPU for 16-bit
    operands and "fp32" elsewhere (`head/products.py`)."""
    chunk_size: int | None = None
    """Tokens per chunk; None: as many as fit into `memory_budget`."""
    memory_budget: int | None = None
    """Bytes of the V-wide buffers of a chunk; None: ZLOSS_CHUNK_BYTES, else 128 MB on a CPU and 1.25 GiB on a GPU."""

    def __post_init__(self) -> None:
        if not isinstance(self.objective, Objective):
            raise InputError(
                f"`objective` is expected to be an Objective such as zloss.CenteredZLoss(1e-4), but got {self.objective!r}."
            )
        values = self.__dict__
        for name, number in _NUMBERS.items():
            if values[name] is not getattr(HeadOptions, name):
                number.check(name, values[name])
        check_reduction(self.reduction)
        for name, known in _NAMES.items():
            if not isinstance(values[name], str) or values[name] not in known:
                raise UnknownNameError(name, values[name], known)
        # Label smoothing alone may pass: the mean of softcapped logits is not a coordinate, but its loss is well defined.
        if self.softcap is not None and self._objective_uses_mean:
            self.refuse_missing_mean(
                "`softcap` is not shift-invariant: centering would change the model. "
                "Use StandardZLoss or GainAwareZLoss with softcap."
            )

    @property
    def uses_mean(self) -> bool:
        """Whether the loss itself uses the mean logit."""
        return self.label_smoothing != 0 or self._objective_uses_mean

    @property
    def _objective_uses_mean(self) -> bool:
        return self.objective.active and self.objective.needs_mu

    def refuse_missing_mean(self, reason: str) -> None:
        """Raise an error if the loss uses the mean logit μ; `reason` is why there is none, and what to do about it."""
        if self.uses_mean:
            user = type(self.objective).__name__ if self._objective_uses_mean else "`label_smoothing`"
            raise CoordinateError(f"{user} needs the mean logit μ, but {reason}")

    @property
    def uses_gain(self) -> bool:
        return self.objective.active and self.objective.needs_gain


class _Number(NamedTuple):
    """What an option that is a number may be."""

    whole: bool
    optional: bool
    allowed: Callable[[float], bool] = lambda value: True
    expected: str = ""

    def check(self, name: str, value: Any) -> None:
        if value is None and self.optional:
            return
        if not is_number(value) or (self.whole and not isinstance(value, int)):
            kind = f"{'a whole number' if self.whole else 'a number'}{' or None' if self.optional else ''}"
            raise InputError(f"`{name}` is expected to be {kind}, but got {value!r}.")
        if not self.allowed(value):
            raise InputError(f"`{name}` is expected to {self.expected}, but got {value!r}.")


# Written as comparisons, which a compiler can turn into guards where the number is symbolic to it.
_NUMBERS = {
    "label_smoothing": _Number(False, False, lambda value: 0 <= value <= 1, "lie in [0, 1]"),
    "logit_scale": _Number(
        False, False, lambda value: -math.inf < value < math.inf and value != 0, "be a finite number other than 0"
    ),
    "softcap": _Number(False, True, lambda value: 0 < value < math.inf, "be None or a finite number > 0"),
    "chunk_size": _Number(True, True, lambda value: value >= 1, "be a number of tokens ≥ 1"),
    "memory_budget": _Number(True, True, lambda value: value >= 1, "be a number of bytes ≥ 1"),
    "ignore_index": _Number(True, False),
    "valid_vocab": _Number(True, True),
}
_NAMES = {"statistics": get_args(Statistics), "backend": get_args(Backend), "products": get_args(Products)}


def shows_options(keywords: type[SourceKeywords]) -> Callable[[F], F]:
    """Show these keywords, with the defaults of `HeadOptions`, in a signature that has `**options`: for `help` and the docs."""
    options = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in inspect.signature(HeadOptions).parameters.values()
        if parameter.name in keywords.__annotations__
    ]

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        named = [parameter for parameter in signature.parameters.values() if parameter.name != "options"]
        function.__signature__ = signature.replace(parameters=[*named, *options])  # type: ignore[attr-defined]
        return function

    return decorate


def check_reduction(reduction: str) -> None:
    if not isinstance(reduction, str) or reduction not in get_args(Reduction):
        raise ReductionError(reduction)


def check_vocab(valid_vocab: int | None, rows: int) -> int:
    """V, the number of rows inside log Z: `valid_vocab`, or all rows if it is None."""
    if rows == 0:
        raise ShapeError("the vocabulary is empty: `weight` or `logits` has V = 0.")
    if valid_vocab is None:
        return rows
    _NUMBERS["valid_vocab"].check("valid_vocab", valid_vocab)
    if not 1 <= valid_vocab <= rows:
        raise InputError(
            f"`valid_vocab` is expected to lie in 1..{rows} (the rows of the head), but got {valid_vocab!r}."
        )
    return valid_vocab


TRITON_INSTALLED = importlib.util.find_spec("triton") is not None
"""Detected without importing triton."""

_OLDEST_GENERATION = 8
"""Minimum NVIDIA compute capability for Triton; on older GPUs "auto" uses "chunked"."""


def resolve_backend(backend: Backend, device: torch.device, dtype: torch.dtype) -> ChosenBackend:
    """The backend behind a name, for tensors on `device` that compute in `dtype`.

    A backend requested by name runs, or an error says why it cannot.
    """
    if backend == "auto":
        return "triton" if prefers_triton(device, dtype) else "chunked"
    if backend == "triton":
        require_triton(device, dtype)
    return backend


def prefers_triton(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether backend="auto" uses Triton: a supported GPU, Triton installed, and fp32 statistics."""
    if device.type != "cuda" or dtype == torch.float64 or not TRITON_INSTALLED:
        return False
    return torch.version.hip is not None or torch.cuda.get_device_properties(device).major >= _OLDEST_GENERATION


def require_triton(device: torch.device, dtype: torch.dtype) -> None:
    """Raise an error if backend="triton" cannot run on these tensors; it says why and what to use instead."""
    if not TRITON_INSTALLED:
        raise MissingDependencyError("triton", "backend='triton'", "triton")
    if dtype == torch.float64:
        raise DtypeError(
            "backend='triton' computes in fp32 from fp32, bf16 or fp16 tensors, but got fp64: "
            "use backend='chunked' or 'dense', which stay in fp64."
        )
    if device.type == "cuda":
        return
    from zloss.head.triton_kernels import INTERPRETED  # Triton decides it when the kernels are defined

    if device.type != "cpu" or not INTERPRETED:
        raise DeviceError(
            f"backend='triton' needs tensors on a GPU, but got {device}: use backend='chunked' there. To run the kernels "
            "interpreted on the CPU, as tests do, set TRITON_INTERPRET=1 before the first loss with backend='triton'."
        )


# Large chunks need fewer passes over dW, small ones less memory. On the CPU the V-wide buffers stay near 128 MB: 512 tokens
# at V = 50k was the fastest of 64..1024 on the CPUs measured (benchmarks/bench_head_loss.py prints the sweep).
#
# On a GPU reading and writing an fp32 dW once per chunk moves 8·V·D bytes next to a product of 2·C·V·D operations, so it
# hides behind the product from C = 4·(operations per second)/(bytes per second) tokens on: 1200 on an H100, 610 on an
# A100, by the peak figures of the model in benchmarks/roofline.py. There a chunk has at least 1280 tokens and as many more
# as the memory budget holds, a multiple of 128, the tile of a tensor core product.

CPU_BYTES = 2**27
"""Default size of the V-wide buffers of a chunk together, off a GPU."""
GPU_BYTES = 5 * 2**28
"""The same on a GPU: 1.25 GiB."""
BUDGET_VARIABLE = "ZLOSS_CHUNK_BYTES"
"""Environment variable that replaces both defaults; the option `memory_budget` takes precedence."""
GPU_TOKENS = 1280
"""Minimum tokens per chunk on a GPU, whatever the budget; only `chunk_size` goes below it."""
TILE = 128

_IN_ENVIRONMENT = os.environ.get(BUDGET_VARIABLE, "")
"""Read once: a compiler that traces a loss cannot follow the environment."""


def chunk_bounds(
    tokens: int,
    token_bytes: int,
    chunk_size: int | None = None,
    *,
    device_type: str = "cpu",
    memory_budget: int | None = None,
) -> list[tuple[int, int]]:
    """Token ranges of nearly equal length; `token_bytes` is the size of the V-wide buffers of one token."""
    if tokens == 0:
        return []
    budget = memory_budget
    if budget is None and _IN_ENVIRONMENT:
        if not _IN_ENVIRONMENT.isdecimal() or int(_IN_ENVIRONMENT) == 0:
            raise InputError(f"{BUDGET_VARIABLE} is expected to be a number of bytes ≥ 1, but got {_IN_ENVIRONMENT!r}.")
        budget = int(_IN_ENVIRONMENT)
    if chunk_size is not None:
        size = chunk_size
    elif device_type == "cuda":
        size = max(GPU_TOKENS, (budget or GPU_BYTES) // token_bytes // TILE * TILE)
    elif budget is not None:
        size = max(1, budget // token_bytes)
    else:
        size = min(1024, max(32, CPU_BYTES // token_bytes))
    count = -(-tokens // size)
    step = -(-tokens // count)
    if chunk_size is None and device_type == "cuda":
        step = -(-step // TILE) * TILE
    return [(start, min(start + step, tokens)) for start in range(0, tokens, step)]
