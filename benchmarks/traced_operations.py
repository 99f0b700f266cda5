"""What a loss would issue on a GPU, traced on the meta device: no GPU is needed, and no value is computed.

The dispatcher sees every operation, Triton kernels included, because they are custom ops. Each has its bytes: tensors that
are read and tensors that are written, once each; a product also has its floating-point operations.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import zloss
from zloss.head.arguments import HeadProblem, prepare_targets
from zloss.head.chunked import multiplied, run_chunks
from zloss.head.options import HeadOptions, Products
from zloss.head.products import plan_products
from zloss.head.sharded import whole_vocabulary
from zloss.head.triton import TritonRows
from zloss.statistics import plan_statistics

TORCH = (2, 13)
"""The torch version whose CUDA branch is traced."""
PRODUCTS = ("aten.mm", "aten.addmm")
ROWS_OF_AN_INDEX = ("index_add", "index_select", "gather", "scatter")
WRITES_ONLY = ("out",)
"""Arguments that an operation writes without reading them."""


@dataclass(frozen=True)
class Operation:
    """One operation as the dispatcher saw it: floating-point operations by the dtype of the factors, and bytes moved."""

    name: str
    flops: int
    operand: torch.dtype | None
    """Dtype of the factors of a product; None for any other operation."""
    bytes: int
    shape: tuple[int, ...] = ()
    """[M, K, N] of a product."""


@dataclass(frozen=True)
class Trace:
    """The operations of one loss, forward and backward, and its memory."""

    operations: tuple[Operation, ...]
    peak: int
    """Bytes allocated at the highest point, gradients included, operands not."""
    beyond: int
    """The same without dW and dh."""
    copies: int = 0
    """Bytes of 16-bit copies of W, which `peak` and `beyond` contain."""
    wide: frozenset[str] = frozenset()
    """Names of the operations that read or write a V-wide matrix."""


def size(*tensors: Tensor) -> int:
    """Bytes of the elements of some tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class Ledger(TorchDispatchMode):
    """Every operation with its bytes, the floating-point operations of products, and the bytes that are allocated."""

    def __init__(self, vocab: int, *operands: Tensor) -> None:
        super().__init__()
        self._vocab, self._live = vocab, 0
        self._storages = {operand.untyped_storage()._cdata for operand in operands}
        self.peak = 0
        self.wide: set[str] = set()
        self.operations: list[Operation] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        for tensor in outputs:
            self._hold(tensor)
        view = any(result.alias_info is not None and not result.alias_info.is_write for result in func._schema.returns)
        if not view and "empty" not in str(func) and "detach" not in str(func):
            self._record(func, args, kwargs or {}, outputs)
        return out

    def _record(self, func: Any, args: Any, kwargs: Any, outputs: list[Tensor]) -> None:
        name = str(func)
        named = dict(zip([argument.name for argument in func._schema.arguments], args, strict=False)) | kwargs
        given = {key: value for key, value in named.items() if isinstance(value, Tensor)}
        written = [given[a.name] for a in func._schema.arguments if a.name in given and a.is_write] or outputs
        read = [tensor for key, tensor in given.items() if key not in WRITES_ONLY]
        if any(word in name for word in ROWS_OF_AN_INDEX):
            # Only the rows of the index are moved, not the tensor they lie in.
            rows = min((t for t in (*given.values(), *outputs) if t.is_floating_point()), key=size)
            self.operations.append(Operation(name, 0, None, 3 * size(rows)))
            return
        if "new_zeros" in name:  # makes a tensor like another, which it does not read
            read = []
        if any(self._vocab in tensor.shape and tensor.dim() == 2 for tensor in (*read, *written)):
            self.wide.add(name)
        if not name.startswith(PRODUCTS):
            self.operations.append(Operation(name, 0, None, size(*read) + size(*written)))
            return
        left, right = (given["self"], given["mat2"]) if "mat1" not in given else (given["mat1"], given["mat2"])
        added = name.startswith("aten.addmm") and named.get("beta", 1) != 0
        shape = (left.shape[0], left.shape[1], right.shape[1])
        moved = size(left, right) + (2 if added else 1) * size(*written)
        self.operations.append(Operation(name, 2 * shape[0] * shape[1] * shape[2], left.dtype, moved, shape))

    def _hold(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._storages:
            return
        self._storages.add(storage._cdata)
        self._live += storage.nbytes()
        self.peak = max(self.peak, self._live)
        weakref.finalize(storage, self._release, storage._cdata, storage.nbytes())

    def _release(self, key: int, count: int) -> None:
        self._storages.discard(key)
        self._live -= count


def head_problem(
    tokens: int, width: int, vocab: int, products: Products, dtype: torch.dtype, chunk_size: int | None = None
) -> HeadProblem:
    """A head loss on the meta device with the product plan of a CUDA device."""
    options = HeadOptions(zloss.CenteredZLoss(1e-4), products=products, backend="triton", chunk_size=chunk_size)
    hidden = torch.empty(tokens, width, dtype=dtype, device="meta")
    weight = torch.empty(vocab, width, dtype=dtype, device="meta")
    target = torch.empty(tokens, dtype=torch.int64, device="meta")
    targets = prepare_targets(target, target.shape, vocab, options, torch.float32)
    return HeadProblem(
        hidden_TD=hidden,
        weight_VD=weight,
        bias_V=None,
        targets=targets,
        shard=whole_vocabulary(vocab),
        dtype=torch.float32,
        rounding=None,
        nonfinite_mask_T=None,
        plan=plan_statistics("full", needs_mu=True, needs_gain=False, has_mu=True, has_head=True, has_hidden=True),
        products=plan_products(
            products, device_type="cuda", hidden=dtype, weight=dtype, torch_version=TORCH, hip=False
        ),
        options=options,
    )


def trace_head_loss(problem: HeadProblem) -> Trace:
    """The head loss of the Triton backend, forward and backward."""
    work = TritonRows(problem.options.softcap, plan=problem.products, keep_logits=False)
    targets, plan = problem.targets, problem.products
    given = (problem.hidden_TD, problem.weight_VD, targets.index_T, targets.valid_T, targets.weight_T)
    ledger = Ledger(problem.local_rows, *given)
    with torch.no_grad(), ledger:
        run = run_chunks(problem, (True, True, False), problem.targets.weight_T, work)
        hidden, weight, _ = run.gradients
        assert hidden is not None
        assert weight is not None
        beyond = ledger.peak - 4 * (problem.hidden_TD.numel() + problem.weight_VD.numel())
        run.gradients = ()
        # Backward multiplies both by the upstream gradient and rounds them.
        upstream = torch.empty((), device="meta")
        hidden = multiplied(hidden, upstream, problem.hidden_TD.dtype)
        weight = multiplied(weight, upstream, problem.weight_VD.dtype)
    copied = plan.kind == "operand" and plan.operand != plan.factor
    copies = 2 * problem.weight_VD.numel() if copied else 0
    return Trace(tuple(ledger.operations), ledger.peak, beyond, copies, frozenset(ledger.wide))
