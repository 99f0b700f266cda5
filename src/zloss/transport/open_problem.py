"""From the tensors of a public call to a validated problem: DTensors become this rank's tensors, then all are checked."""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup

from zloss.transport.head_problem import HeadProblem, prepare_head
from zloss.transport.options import HeadOptions
from zloss.transport.sharded_arguments import open_head
from zloss.transport.tensor_arguments import check_tensors


def open_problem(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    options: HeadOptions,
    *,
    token_weight: Tensor | None,
    normalizer: float | Tensor | None,
    group: ProcessGroup | None,
    weight_grad_buffer: Tensor | None = None,
    whole_tokens: bool = False,
) -> HeadProblem:
    """The problem of a head loss. `whole_tokens` gathers hidden states that are sharded over tokens."""
    check_tensors(hidden=hidden, weight=weight, target=target, optional={"bias": bias, "token_weight": token_weight})
    head = open_head(hidden, weight, bias, target, token_weight, group, whole_tokens=whole_tokens)
    return prepare_head(
        head.hidden,
        head.weight,
        head.target,
        head.bias,
        options,
        token_weight=head.token_weight,
        normalizer=normalizer,
        weight_grad_buffer=weight_grad_buffer,
        group=head.group,
        tokens=head.tokens,
    )
