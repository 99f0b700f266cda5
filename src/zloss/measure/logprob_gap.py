"""`logprob_gap`: how far apart the log-probabilities of a trainer and of a sampler are."""

from __future__ import annotations

from typing import Any

import torch

from zloss.errors import DtypeError, InputError, ShapeError
from zloss.results.logprobs import LogprobGap, gap_of


def logprob_gap(trainer_logprobs: Any, sampler_logprobs: Any, mask: Any = None) -> LogprobGap:
    """The gap δ = trainer − sampler between log-probabilities of the same sampled tokens, as one record.

    All arguments are tensors, arrays or lists of one shape: [T] for one sequence, [..., T] for several, whose tokens are
    along the last axis. `mask` is True for tokens that count (the response, without prompt and padding). `print` shows the record
    as a table.

    >>> import zloss
    >>> gap = zloss.logprob_gap([[-1.00, -2.00, 0.0]], [[-1.02, -2.01, 0.0]], mask=[[True, True, False]])
    >>> gap.tokens, round(gap.rms, 4), gap.outside_1, round(gap.sequence_sums[0], 3)
    (2, 0.0158, 1.0, 0.03)
    """
    trainer, sampler = _tensor("trainer_logprobs", trainer_logprobs), _tensor("sampler_logprobs", sampler_logprobs)
    for name, logprobs in (("trainer_logprobs", trainer), ("sampler_logprobs", sampler)):
        if not logprobs.is_floating_point():
            raise DtypeError(f"`{name}` is expected to hold log-probabilities (floats), but got {logprobs.dtype}.")
    if trainer.shape != sampler.shape:
        raise ShapeError(
            f"`sampler_logprobs` is expected to have the shape of `trainer_logprobs`, {list(trainer.shape)}, but got "
            f"{list(sampler.shape)}: both are log-probabilities of the same tokens."
        )
    counted = torch.ones_like(trainer, dtype=torch.bool) if mask is None else _tensor("mask", mask)
    if counted.shape != trainer.shape or counted.is_floating_point() or bool(((counted != 0) & (counted != 1)).any()):
        raise InputError(
            f"`mask` is expected to hold booleans of shape {list(trainer.shape)}, True for tokens that count, but got "
            f"{counted.dtype} {list(counted.shape)}."
        )
    for name, logprobs in (("trainer_logprobs", trainer), ("sampler_logprobs", sampler)):
        above = logprobs[counted.bool()] > 1e-3
        if bool(above.any()):
            raise InputError(
                f"`{name}` holds {int(above.sum())} numbers above 0, which are not log-probabilities: pass log p of the sampled "
                "tokens, not p and not a loss (−log p)."
            )
    length = trainer.shape[-1] if trainer.dim() else 1
    rows = zip(
        (trainer.double() - sampler.double()).reshape(-1, length), counted.bool().reshape(-1, length), strict=True
    )
    return gap_of([delta_T[keep_T].numpy() for delta_T, keep_T in rows])


def _tensor(name: str, values: Any) -> torch.Tensor:
    try:
        return torch.as_tensor(values).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"`{name}` is expected to be a tensor, an array or a list of numbers of one shape, but got {type(values).__name__}: "
            "pad sequences of different lengths and pass `mask`."
        ) from error
