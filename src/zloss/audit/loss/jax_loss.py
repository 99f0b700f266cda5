"""A loss of JAX arrays as one of torch tensors, so that every check of the audit applies to it unchanged.

Inputs become JAX arrays of the same dtype, gradients come from `jax.vjp`, and outputs come back as tensors in an autograd
graph. fp64 is enabled for calls with fp64 inputs only: elsewhere it would change the dtypes of arrays that the loss creates.
The loss runs as it is given, so jit is the caller's choice. Imported on use: this is the only module that imports jax.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor


def from_jax(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `loss`, a function of JAX arrays, as a function of tensors; its last argument holds the targets.

    JAX has no `requires_grad`: a returned number counts as detached where its gradient is zero.
    """

    @functools.wraps(loss, updated=())
    def of_tensors(*tensors: Tensor) -> Any:
        *inputs, target = tensors
        structure: Any = None
        rest: list[Any] = []

        def arrays_of(*arrays: Any) -> list[Any]:
            """The returned arrays; anything else, such as a Python number, is kept in `rest`."""
            nonlocal structure, rest
            leaves, structure = jax.tree.flatten(loss(*arrays, labels))
            rest = [None if isinstance(leaf, jax.Array) else leaf for leaf in leaves]
            return [leaf for leaf in leaves if isinstance(leaf, jax.Array)]

        with _precision(inputs):
            labels = jnp.asarray(target.cpu().numpy(), dtype=jnp.int32)
            returned, pull_back = jax.vjp(arrays_of, *map(_array, inputs))
        found = iter(_Bridge.apply(returned, pull_back, *inputs) if returned else ())  # type: ignore[no-untyped-call]
        return jax.tree.unflatten(structure, [next(found) if leaf is None else leaf for leaf in rest])

    return of_tensors


class _Bridge(torch.autograd.Function):
    """The tensors of one call; backward goes through `pull_back`, the function that `jax.vjp` returned."""

    @staticmethod
    def forward(ctx: Any, returned: list[Any], pull_back: Callable[..., Any], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.pull_back, ctx.inputs, ctx.dtypes = pull_back, inputs, [array.dtype for array in returned]
        outputs = tuple(map(_tensor, returned))
        ones = [[torch.full_like(x, float(x is one)) for x in outputs] for one in outputs]
        silent = [
            x
            for x, one in zip(outputs, ones, strict=True)
            if x.numel() == 1 and not any(grad.any() for grad in _pulled(ctx, one))
        ]
        ctx.mark_non_differentiable(*silent)
        return outputs

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *_pulled(ctx, upstream))


def _pulled(ctx: Any, upstream: Sequence[Tensor]) -> list[Tensor]:
    """The gradients at the inputs, from those at the outputs; integers have none."""
    with _precision(ctx.inputs):
        cotangents = [
            _array(grad).astype(dtype)
            if jnp.issubdtype(dtype, jnp.floating)
            else np.zeros(grad.shape, jax.dtypes.float0)
            for grad, dtype in zip(upstream, ctx.dtypes, strict=True)
        ]
        return [_tensor(grad) for grad in ctx.pull_back(cotangents)]


def _precision(inputs: Sequence[Tensor]) -> Any:
    return jax.enable_x64(any(x.dtype == torch.float64 for x in inputs))


def _array(tensor: Tensor) -> Any:
    """The same numbers in the same dtype. NumPy has no bf16, but fp32 holds every 16-bit number."""
    wide = tensor.detach().cpu().to(torch.float64 if tensor.dtype == torch.float64 else torch.float32)
    return jnp.asarray(wide.numpy(), dtype=str(tensor.dtype).removeprefix("torch."))


def _tensor(array: Any) -> Tensor:
    return torch.from_numpy(np.array(array, dtype=np.float64)).to(getattr(torch, array.dtype.name))
