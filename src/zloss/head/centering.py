"""Interventions on an output head: centering it once or after every step, a penalty on its mean row, deploying it centered,
and shifting it on purpose."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zloss.distributed import is_dtensor, local_part
from zloss.errors import InputError, ShapeError, TiedHeadError
from zloss.head.options import check_vocab
from zloss.head.source import centered_logits_from_raw
from zloss.objectives import check_coefficient, is_on, off_is_zero
from zloss.tensors import check_floating, check_holds_values


@torch.no_grad()
def center_head_(
    linear: nn.Linear, *, model: nn.Module | Tensor | None = None, valid_vocab: int | None = None
) -> nn.Linear:
    """Write W − 1w̄ (and b − b̄) into an untied head: μ becomes 0, softmax and CE do not change (paper eq:centered_head).

    Pass `model`, the model that holds the head, or its input embedding (module or table). If another module shares the
    weight of the head, the head is tied and is rejected, because writing to it would also change every input embedding.
    Without `model` a tie cannot be detected, so leave it out only for a head that is known to be untied. Rows from
    `valid_vocab` on are padding: they are not part of the mean, but it is subtracted from them too, so that a softmax over
    all rows does not change either.

    >>> import zloss
    >>> head = zloss.center_head_(nn.Linear(8, 11))
    >>> bool(head.weight.mean(dim=0).abs().max() < 1e-6)
    True
    """
    _refuse_tied(linear, model, "center_head_")
    vocab = check_vocab(valid_vocab, linear.out_features)
    weight = linear.weight.double()
    linear.weight.copy_(weight - weight[:vocab].mean(dim=0))
    if linear.bias is not None:
        bias = linear.bias.double()
        linear.bias.copy_(bias - bias[:vocab].mean())
    return linear


@torch.no_grad()
def shift_head_(
    linear: nn.Linear, shift: Tensor, *, model: nn.Module | Tensor | None = None, valid_vocab: int | None = None
) -> nn.Linear:
    """Add one vector [D] to every row of an untied head: cross-entropy does not change, μ moves by shift·u. A controlled probe.

    `model` is as for `center_head_`: with it a tied head is rejected, without it a tie is not detected. Padding rows
    are shifted too, so that a softmax over all rows is unchanged; `valid_vocab` is only checked.

    >>> import zloss
    >>> head = zloss.shift_head_(nn.Linear(8, 11), torch.ones(8))
    """
    _refuse_tied(linear, model, "shift_head_")
    check_floating("shift", shift)
    check_holds_values(shift=shift)
    if shift.shape != (linear.in_features,):
        raise ShapeError(f"`shift` is expected to be [D] = [{linear.in_features}], but got {list(shift.shape)}.")
    check_vocab(valid_vocab, linear.out_features)
    linear.weight.copy_(linear.weight.double() + shift.to(linear.weight.device).double())
    return linear


def _check_linear(linear: object, what: str) -> None:
    if not isinstance(linear, nn.Linear):
        raise InputError(f"{what} works on an nn.Linear output head, but got {type(linear).__name__}.")


def _refuse_tied(linear: nn.Linear, model: nn.Module | Tensor | None, what: str) -> None:
    """Writing into a tied table would also move every input embedding. A head is tied if the table, or a module other than
    the head itself, holds the memory of its weight."""
    _check_linear(linear, what)
    if model is not None and not isinstance(model, nn.Module | Tensor):
        raise InputError(
            f"`model` is expected to be the nn.Module that holds the head, its input embedding or its table, but got "
            f"{type(model).__name__}."
        )
    if model is None:
        return
    others = (module for module in model.modules() if module is not linear) if isinstance(model, nn.Module) else ()
    tables = [model] if isinstance(model, Tensor) else [p for other in others for p in other.parameters(recurse=False)]
    if any(table.data_ptr() == linear.weight.data_ptr() for table in tables):
        raise TiedHeadError(
            f"{what} would also change the input embedding, because the head is tied to it. "
            "Deploy with CenteredHeadWrapper(linear) instead, or untie first: "
            "linear.weight = nn.Parameter(linear.weight.detach().clone())."
        )


class CenteredHeadWrapper(nn.Module):
    """Deploy a head, tied or not, with centered logits: the raw projection minus its fp32 common shift.

    z̃ = z_raw − μ_head·1 (paper eq:centered_raw). The raw projection runs as the wrapped head does (16 bits included), so
    the realized softmax is unchanged; the weights are not touched. The output is fp32. Rows from `valid_vocab` on are
    padding: they are not part of the mean, but their logits move with the others, so that a softmax over all rows is unchanged.

    >>> import zloss
    >>> deployed = zloss.CenteredHeadWrapper(nn.Linear(8, 11))
    >>> bool(deployed(torch.randn(3, 8)).mean(dim=-1).abs().max() < 1e-5)
    True
    """

    def __init__(self, linear: nn.Linear, *, valid_vocab: int | None = None) -> None:
        super().__init__()
        _check_linear(linear, "CenteredHeadWrapper")
        self.linear = linear
        self._vocab = check_vocab(valid_vocab, linear.out_features)

    @property
    def weight(self) -> Tensor:
        return self.linear.weight

    def forward(self, hidden: Tensor) -> Tensor:
        bias = None if self.linear.bias is None else self.linear.bias[: self._vocab]
        return centered_logits_from_raw(self.linear(hidden), hidden, self.linear.weight[: self._vocab], bias)


# Output embedding centering (arXiv 2601.02031): the mean row w̄ of W is penalized, or removed after every step


@torch.no_grad()
def mu_loss_(weight: Tensor, coef: float | None, *, group: dist.ProcessGroup | None = None) -> Tensor:
    """Add the gradient of the μ-loss γ‖w̄‖², which is 2γw̄/V in every row, to `weight.grad`; returns γ‖w̄‖² (fp64, detached).

    `weight`: the head [V, D], w̄ the mean of all its rows, γ = `coef` (1e-4 as published; None or 0 adds nothing). Call it
    once per optimizer step, after the last backward pass and the reduction of gradients over ranks, before clipping.
    `group`: the ranks that hold the vocabulary, if `weight` is this rank's plain shard of rows; a DTensor needs none.

    Scaling: of the parameters alone, so neither the batch, nor accumulation, nor the number of ranks changes it.

    >>> import zloss
    >>> weight = nn.Parameter(torch.tensor([[1.0, 0.0], [3.0, 2.0]]))
    >>> float(zloss.mu_loss_(weight, 0.1)), weight.grad  # w̄ = (2, 1)
    (0.5, tensor([[0.2000, 0.1000],
            [0.2000, 0.1000]]))
    """
    check_coefficient("coef", coef)
    mean_D, vocab = _mean_row(weight, group)
    if is_on(coef):
        weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        weight.grad.add_(mean_D * (2 * off_is_zero(coef) / vocab))
    return off_is_zero(coef) * local_part(mean_D).square().sum()


@torch.no_grad()
def mu_center_(weight: Tensor, *, group: dist.ProcessGroup | None = None) -> Tensor:
    """W ← W − w̄, the μ-centering of a head [V, D]; call it after every `optimizer.step()`, whose state it leaves alone.

    Softmax and cross-entropy do not change, unless the table is also the input embedding: from scratch that is how the
    method was published, but a pretrained tied model loses its predictions, so untie it first. `group` is as for
    `mu_loss_`.

    >>> import zloss
    >>> zloss.mu_center_(torch.tensor([[1.0, 0.0], [3.0, 2.0]]))
    tensor([[-1., -1.],
            [ 1.,  1.]])
    """
    return weight.sub_(_mean_row(weight, group)[0])


def _mean_row(weight: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, int]:
    """(w̄ [D] in fp64, V) of all rows, on every rank that holds some of them."""
    check_floating("weight", weight)
    if weight.dim() != 2:
        raise ShapeError(f"`weight` is expected to be [V, D], but got {list(weight.shape)}.")
    total_D, vocab = weight.detach().sum(dim=0, dtype=torch.float64), weight.shape[0]
    if is_dtensor(total_D):
        from torch.distributed.tensor import Replicate

        total_D = total_D.redistribute(placements=[Replicate()] * total_D.device_mesh.ndim)
    elif group is not None:
        summed = torch.cat([total_D, total_D.new_tensor([vocab])])
        dist.all_reduce(summed, group=group)
        total_D, vocab = summed[:-1], int(summed[-1])
    return total_D / vocab, vocab
