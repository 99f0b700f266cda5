"""What a loss would issue on a GPU, traced on the meta device: no GPU is needed, and no value is computed.

Products and V-wide passes are those that `zloss.transport.backends.products` reports; Triton kernels declare theirs. All
other operations (of [C, D] and smaller tensors) are seen by the dispatcher. Each has its bytes; a product its operations.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import zloss
from zloss.ranks.vocabulary_shard import whole_vocabulary
from zloss.transport.backends.chunked_autograd import narrow
from zloss.transport.backends.chunked_head import run_head_chunks
from zloss.transport.backends.product_plan import Products, plan_products
from zloss.transport.backends.products import Issued, observed, size
from zloss.transport.backends.triton.rows import TritonRows
from zloss.transport.head_problem import HeadProblem
from zloss.transport.options import HeadOptions
from zloss.transport.statistics_plan import plan_statistics
from zloss.transport.targets import prepare_targets

COPIES_OF_WEIGHT = ("W rounded", "fp16 copy of W")
"""Names under which zloss reports them."""
TORCH = (2, 13)
"""The torch version whose CUDA branch is traced."""


@dataclass(frozen=True)
class Trace:
    """The operations of one loss, forward and backward, and its memory."""

    operations: tuple[Issued, ...]
    peak: int
    """Bytes allocated at the highest point, gradients included, operands not."""
    beyond: int
    """The same without dW and dh."""

    @property
    def copies(self) -> int:
        """Bytes of 16-bit copies of W, which `peak` and `beyond` contain."""
        return sum(2 * math.prod(o.shape) for o in self.operations if o.name in COPIES_OF_WEIGHT)


class _Ledger(TorchDispatchMode):
    """Bytes of operations that are not V wide, names of those that are, and the allocated bytes."""

    def __init__(self, vocab: int, *operands: Tensor) -> None:
        super().__init__()
        self._vocab, self._live = vocab, 0
        self._storages = {operand.untyped_storage()._cdata for operand in operands}
        self.peak = 0
        self.wide: set[str] = set()
        self.small: list[Issued] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        for tensor in outputs:
            self._hold(tensor)
        name = str(func)
        view = any(result.alias_info is not None and not result.alias_info.is_write for result in func._schema.returns)
        if view or "empty" in name or "detach" in name:
            return out
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(word in name for word in ("index_add", "index_select", "gather", "scatter")):
            # Only the rows of the index are moved, not the tensor they lie in.
            rows = min((t for t in (*tensors, *outputs) if t.is_floating_point()), key=size)
            self.small.append(Issued(name, 0, None, 3 * size(rows), tuple(rows.shape)))
        elif any(self._vocab in t.shape and t.dim() == 2 for t in (*tensors, *outputs)):
            self.wide.add(name)
        else:
            moved = size(*tensors) + size(*outputs)
            shape = tuple(outputs[0].shape) if outputs else ()
            self.small.append(Issued(name, 0, None, moved, shape))
        return out

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
    targets = prepare_targets(target, target.shape, vocab, options, torch.float32, token_weight=None, normalizer=None)
    return HeadProblem(
        hidden_TD=hidden,
        weight_VD=weight,
        bias_V=None,
        targets=targets,
        shard=whole_vocabulary(vocab),
        masked=False,
        dtype=torch.float32,
        rounding=None,
        poisoned_T=None,
        plan=plan_statistics(
            options.objective, "full", label_smoothing=0.0, has_mu=True, has_head=True, has_hidden=True
        ),
        products=plan_products(
            products, device_type="cuda", hidden=dtype, weight=dtype, torch_version=TORCH, hip=False
        ),
        grad_enabled=True,
        options=options,
    )


def trace_head_loss(problem: HeadProblem) -> tuple[Trace, set[str]]:
    """The head loss of the Triton backend, forward and backward; and the V-wide operations that the dispatcher saw."""
    work = TritonRows(problem.options.softcap, plan=problem.products, keep_logits=False)
    targets = problem.targets
    given = (problem.hidden_TD, problem.weight_VD, targets.index_T, targets.valid_T, targets.weights.per_token)
    ledger = _Ledger(problem.vocab, *given)
    with torch.no_grad(), observed() as seen, ledger:
        run = run_head_chunks(problem, work, (True, True, False), problem.targets.weights.per_token)
        hidden, weight, _ = run.gradients
        assert hidden is not None
        assert weight is not None
        beyond = ledger.peak - 4 * (problem.hidden_TD.numel() + problem.weight_VD.numel())
        stored = [narrow(hidden, problem.hidden_TD), narrow(weight, problem.weight_VD)]
        copied = [kept for kept, grad in zip(stored, (hidden, weight), strict=True) if kept is not grad]
        run.gradients = ()
        del hidden, weight
        # Backward multiplies both by the upstream gradient.
        final = [grad * 1.0 for grad in stored if grad is not None]
    passes = [Issued("gradients to the dtype of the operands", 0, None, 3 * size(*copied), (0,))]
    passes.append(Issued("upstream gradient", 0, None, 2 * size(*final), (0,)))
    return Trace((*seen, *ledger.small, *passes), ledger.peak, beyond), ledger.wide


Tracer = Callable[[int, int, int, torch.dtype], Trace]
