"""DTensors as the plain tensors of this rank, with their gradients back in the placement they came with."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

import torch.distributed as dist
from torch import Tensor

from zloss.errors import InputError
from zloss.head.sharded import TokenShard

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: object) -> TypeGuard[DTensor]:
    """Whether a tensor is a DTensor; the module of DTensors, slow to import, is not loaded for the answer."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_shard(name: str, tensor: Tensor, dim: int) -> tuple[Tensor, dist.ProcessGroup | None]:
    """This rank's rows of a DTensor that is sharded along `dim`, and the group they are divided over.

    Plain tensors come back as they are. A replicated DTensor is a plain tensor on every rank.
    """
    if not is_dtensor(tensor):
        return tensor, None
    sharded = [axis for axis, place in enumerate(tensor.placements) if not place.is_replicate()]
    if not sharded:
        return tensor.to_local(), None
    axis = sharded[0]
    place: Any = tensor.placements[axis]
    if len(sharded) > 1 or not place.is_shard() or place.dim % tensor.dim() != dim % tensor.dim():
        raise InputError(
            f"`{name}` is expected to be sharded over one axis of its mesh, with Shard({dim}) there and Replicate() "
            f"elsewhere, but its placements are {tuple(tensor.placements)}: call `{name}.redistribute(...)` first."
        )
    return tensor.to_local(), tensor.device_mesh.get_group(axis)


def local_tokens(hidden: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, TokenShard] | None:
    """Own hidden states [..., D] and whose they are, where they are sharded over tokens along `group` and nothing else; the
    gradient that comes back is of own tokens. None for any other tensor."""
    if not is_dtensor(hidden):
        return None
    sharded = [axis for axis, place in enumerate(hidden.placements) if not place.is_replicate()]
    if len(sharded) != 1 or hidden.dim() < 2:
        return None
    place: Any = hidden.placements[sharded[0]]
    mesh_group = hidden.device_mesh.get_group(sharded[0])
    if not place.is_shard() or place.dim % hidden.dim() == hidden.dim() - 1:
        return None
    if dist.get_process_group_ranks(mesh_group) != dist.get_process_group_ranks(group):
        return None
    local = hidden.to_local(grad_placements=hidden.placements)
    return local, TokenShard(tuple(hidden.shape[:-1]), place.dim % hidden.dim(), group, local.device)


def replicated(name: str, tensor: Tensor | None) -> Tensor | None:
    """The whole tensor on every rank: as it is, or gathered from a DTensor that is sharded over tokens.

    The gradient that comes back is complete on every rank, so a sharded tensor keeps its own part of it.
    """
    if tensor is None or not is_dtensor(tensor):
        return tensor
    from torch.distributed.tensor import Replicate

    whole = [Replicate()] * tensor.device_mesh.ndim
    if any(place.is_partial() for place in tensor.placements):
        raise InputError(
            f"`{name}` is a DTensor with Partial() placements: sum it with `{name}.redistribute(...)` first."
        )
    return tensor.redistribute(placements=whole).to_local(grad_placements=whole)
