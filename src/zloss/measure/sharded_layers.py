"""A model whose layers are divided over the processes of a job by FSDP2: each holds 1/n of every layer.

A layer is gathered when it runs and divided again behind it, so a process holds one whole layer at a time, beside the
embedding and the head, which stay whole. Every process has to run as many forward passes as any other, because each pass
gathers layers from all of them.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from zloss.distributed import Job
from zloss.errors import InputError
from zloss.measure.recomputed_layers import decoder_layers
from zloss.models.output_head import HiddenStates


def shard_layers_(model: nn.Module, job: Job) -> None:
    """Divide the layers of a loaded model over the processes of a job, in place; nothing is sent."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    layers = decoder_layers(model)
    if not layers:
        raise InputError("`shard` divides a stack of layers, but the model has no list of at least two modules.")
    mesh = init_device_mesh(next(model.parameters()).device.type, (job.ranks,))
    for layer in layers:
        # Each layer is a root of its own: the pass ends at the head, and a root's clean-up would be left out there.
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)


class InStep:
    """Forward passes of all ranks at the same time; a rank that has none left runs along with ids of its own."""

    def __init__(self, job: Job, hidden_of: HiddenStates, any_ids: Callable[[], Tensor]) -> None:
        self._job, self._hidden_of, self._any_ids = job, hidden_of, any_ids

    def __call__(self, ids_BN: Tensor) -> Tensor:
        """Hidden states of `ids_BN`, in a pass that all ranks make."""
        self._job.all_gather(True)
        return self._hidden_of(ids_BN)

    def finish(self) -> None:
        """Run along until no rank has a pass left."""
        while any(self._job.all_gather(False)):
            self._hidden_of(self._any_ids())
