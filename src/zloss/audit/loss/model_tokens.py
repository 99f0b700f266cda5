"""The applied source on the tokens of a model, against fp64 of what was identified.

A loss of (logits, target) is compared at the logits; one of (hidden, weight, target) gets the hidden states and the head, and is
compared at ∂/∂hidden = Wᵀδ and ∂/∂weight = δᵀu. Axes: T tokens, D width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zloss.audit.loss.calls import LossCallError, dtype_name
from zloss.audit.loss.evidence import Evidence
from zloss.audit.loss.probes import Probe
from zloss.console import Progress, Silent
from zloss.errors import InputError
from zloss.results.loss_audit import TargetModelSource
from zloss.results.provenance import without_folders

if TYPE_CHECKING:
    from zloss.models.checkpoint import Checkpoint
    from zloss.models.output_head import OutputHead
    from zloss.results.options import DtypeName
    from zloss.text import Blocks

ENTRIES = 2**23
"""Most logits of a call: about ten fp64 copies of them exist at once."""
SLICE = 8192
"""Rows of a head that are widened to fp64 at once."""
TINY = torch.finfo(torch.float64).tiny


@dataclass(frozen=True)
class ModelTokens:
    """A loaded model and the blocks of text that it will read."""

    checkpoint: Checkpoint
    head: OutputHead
    blocks: Blocks
    text: str
    dtype: torch.dtype

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(hidden [T, D], target [T]) of every block, on the CPU."""
        from zloss.models.output_head import hidden_states

        with hidden_states(self.checkpoint, self.head) as hidden_of:
            for index in range(self.blocks.count):
                ids = self.blocks.inputs(index, index + 1).to(self.head.weight_VD.device)
                # Not around the `yield`: the loss that is audited in between needs its gradients.
                with torch.no_grad():
                    hidden = self.blocks.counted(hidden_of(ids))[0]
                yield hidden.cpu(), self.blocks.targets(index, index + 1)[0].cpu()


def open_model_tokens(
    model: str,
    *,
    texts: Sequence[str] = (),
    blocks: int = 4,
    block_size: int | None = None,
    dtype: DtypeName = "fp32",
    progress: Progress | None = None,
) -> ModelTokens:
    """Load the model, cut the text, and check that the head is understood.

    `texts` are files, by default the corpus `pydoc`; `block_size` is 256, or fewer if the model has fewer positions.
    """
    from zloss.measure.measurement import model_blocks
    from zloss.models.checkpoint import DTYPES, load_checkpoint
    from zloss.models.output_head import check_head, find_head
    from zloss.text import open_corpus

    progress = progress or Silent()
    with progress.step(f"loading {model[-40:]}", None):
        checkpoint = load_checkpoint(model, dtype=dtype, allow_pickle=None, takes_tokenizer=False)
        head = find_head(checkpoint)
    with progress.step("reading text", None):
        corpus = open_corpus(texts, None)
        cut = model_blocks(checkpoint, corpus, size=block_size, count=blocks).blocks
        check_head(checkpoint, head, cut.inputs(0, 1)[0])
    return ModelTokens(checkpoint, head, cut, corpus.name, DTYPES[dtype])


@dataclass(frozen=True)
class Compared:
    """One call against fp64."""

    forward: float
    """Relative error of the value; NaN where it is not known."""
    moments_TK: Tensor
    """Per token: squared norms of error, wanted and applied source and the product of the last two; the same four of the whole
    gradient; and the square of the rounding of the latter."""
    weight: tuple[float, float] = (0.0, 0.0)
    """‖error of dW‖², and the norm² it is compared with."""


def source_on_model(e: Evidence, tokens: ModelTokens, progress: Progress) -> TargetModelSource:
    """Source and per-token errors on every block; each part of a block is one call of the loss."""
    head = tokens.head
    found = TargetModelSource(
        # A whole path would show the folders of someone's machine.
        model=without_folders(tokens.checkpoint.name),
        text=tokens.text,
        tokens=0,
        calls=0,
        dtype=dtype_name(tokens.dtype),
        vocab=head.vocab,
        at="hidden" if e.loss.linear else "logits",
        of="z" if e.identified.has_z else "total",
    )
    lanes = e.space.lanes if e.space.padded else head.vocab
    if lanes > head.vocab:
        raise InputError(f"`valid_vocab` is {lanes}, but the head of {tokens.checkpoint.name} has {head.vocab} rows.")
    if not e.plain or e.changing or e.identified.ce_weights == "groups":
        return replace(
            found,
            reason="the gradient is not explained by a known penalty with equal token weights: no reference to compare with",
        )
    if e.at(lanes) is None:
        return replace(found, reason=f"c at V = {lanes} is not known")
    if e.loss.linear and head.bias_V is not None:
        return replace(found, reason="the head has a bias, which a loss of (hidden, weight, target) does not see")
    calls: list[Compared] = []
    try:
        with progress.step("source on the model's logits", tokens.blocks.predictions) as step:
            for hidden_TD, target_T in tokens:
                parts = -(-len(target_T) * head.vocab // ENTRIES)
                for hidden, target in zip(hidden_TD.chunk(parts), target_T.chunk(parts), strict=True):
                    calls.append(_on_tokens(e, tokens, hidden, target, lanes))
                    step.advance(len(target))
    except LossCallError as error:
        return replace(found, reason=str(error))
    moments_TK = torch.cat([one.moments_TK for one in calls])
    found = replace(found, tokens=len(moments_TK), calls=len(calls))
    if not bool(moments_TK.isfinite().all()):
        return replace(found, reason="the loss or its gradient is not finite on these logits")
    if not bool(moments_TK[:, 1].any()):
        return replace(found, reason="the source is zero on every token of the text")
    return replace(found, **_summary(calls, moments_TK))


def _on_tokens(e: Evidence, tokens: ModelTokens, hidden_TD: Tensor, target_T: Tensor, lanes: int) -> Compared:
    head, dtype = tokens.head, tokens.dtype
    labels = torch.where(target_T == e.loss.ignore_index, -1, target_T)
    if bool((labels >= lanes).any()):
        raise InputError(f"the text has token ids beyond the {lanes} classes of `valid_vocab`.")
    if not e.loss.linear:
        with torch.no_grad():
            logits_TV = head.logits(hidden_TD.to(head.weight_VD.device)).cpu()
        probe = Probe(logits_TV.double(), labels, lanes, warp=e.space.warp)
        outcome = e.loss(probe, dtype)
        total, z = e.wanted(probe)
        without = None if e.off is None else e.off(probe, dtype).grad_TV
        return _compared(e, probe, outcome.value, outcome.grad_TV, without, total, z, dtype)
    # The scale of the logits belongs to the weight: a loss of (hidden, weight, target) sees z = Wu.
    weight_VD = (head.weight_VD.detach().cpu() * head.logit_scale).to(dtype)
    u_TD = hidden_TD.double()
    logits_TV = torch.cat([u_TD @ rows.double().T for rows in torch.split(weight_VD, SLICE)], dim=-1)
    probe = Probe(logits_TV, labels, lanes, warp=e.space.warp)
    if e.fitted is not None and e.fitted.beta:
        p_TV = probe.widened(probe.seen_TV.softmax(-1))
        probe = replace(probe, gain_T=_times_weight(p_TV, weight_VD).square().sum(-1) / p_TV.square().sum(-1))
    total_TV, z_TV = e.wanted(probe)
    value, grad_hidden, grad_weight = e.loss.on_head(hidden_TD, weight_VD, labels, dtype)
    without = None if e.off is None else e.off.on_head(hidden_TD, weight_VD, labels, dtype)[1]
    total, z = (_times_weight(one, weight_VD) for one in (total_TV, z_TV))
    compared = _compared(e, probe, float(value), grad_hidden, without, total, z, dtype)
    of_TV = z_TV if e.identified.has_z else total_TV
    error = size = 0.0
    for start in range(0, head.vocab, SLICE):
        rows = slice(start, start + SLICE)
        error += float((grad_weight[rows] - total_TV[:, rows].T @ u_TD).square().sum())
        size += float((of_TV[:, rows].T @ u_TD).square().sum())
    return replace(compared, weight=(error, size))


def _times_weight(source_TV: Tensor, weight_VD: Tensor) -> Tensor:
    """source · W in fp64, [T, D], without a copy of the whole head."""
    out = source_TV.new_zeros(len(source_TV), weight_VD.shape[1])
    for start in range(0, len(weight_VD), SLICE):
        out += source_TV[:, start : start + SLICE] @ weight_VD[start : start + SLICE].double()
    return out


def _compared(
    e: Evidence,
    probe: Probe,
    value: float,
    grad: Tensor,
    without: Tensor | None,
    total: Tensor,
    z: Tensor,
    dtype: torch.dtype,
) -> Compared:
    error, source = grad - total, z if bool(z.any()) else total
    off = error
    if source is z and without is not None and bool(without.isfinite().all()):
        # An `off` that still applies a Z would give 0, so the nearer of the two differences is taken.
        off = min(error, grad - without - z, key=lambda one: float(one.norm()))
    pairs = ((off, source), (error, total))
    moments = [x for a, b in pairs for x in (a * a, b * b, (b + a) ** 2, (b + a) * b)]
    unit = max(torch.finfo(dtype).eps / 2, 2.0**-24)
    size_T = 1.0 + probe.seen_TV.amax(-1).abs() if unit == 2.0**-24 else torch.ones(len(total))
    rounding_T = (2 * unit * size_T * total.norm(dim=-1)).square()
    stated = e.value(probe)
    forward = math.nan if stated is None else abs(value - stated) / max(abs(stated), TINY)
    return Compared(forward, torch.stack([*(x.sum(-1) for x in moments), rounding_T], dim=-1))


def _summary(calls: list[Compared], moments_TK: Tensor) -> dict[str, Any]:
    """The figures of several calls, under the names of `TargetModelSource`."""
    error, wanted, applied, along, *whole, rounding = moments_TK.sum(0).tolist()
    loud = moments_TK[:, 1] > 0  # an ignored token has no source
    errors_T = (moments_TK[loud, 0] / moments_TK[loud, 1]).sqrt()
    weight_error, weight = (sum(one.weight[i] for one in calls) for i in (0, 1))
    forward = max(one.forward for one in calls)
    return {
        "forward_rel_error": forward if math.isfinite(forward) else None,
        "delta_src": math.sqrt(error / max(wanted, TINY)),
        "delta_total": math.sqrt(whole[0] / max(whole[1], TINY)),
        "cosine": along / math.sqrt(applied * wanted) if applied > 0 and wanted > 0 else None,
        "total_cosine": whole[3] / math.sqrt(whole[2] * whole[1]) if whole[1] > 0 and whole[2] > 0 else None,
        "token_mean": float(errors_T.mean()),
        "token_p99": float(errors_T.quantile(0.99)),
        "token_max": float(errors_T.max()),
        "delta_weight": math.sqrt(weight_error / weight) if weight else None,
        "rounding_floor": math.sqrt(rounding / max(wanted, TINY)),
    }
