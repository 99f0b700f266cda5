"""The applied source against fp64 (paper eq:backward_deltas, Δ_src): on audited logits, and on the tokens of a model.

The Z source is what the gradient holds beyond cross-entropy: the difference from the loss with Z off where that is given, else
to the fp64 cross-entropy gradient. In the second case the rounding of the CE part counts too; the rounding floor says how much of
Δ_src that alone can be. On a model's text, a loss of (logits, target) is compared at the logits; one of (hidden, weight, target)
gets the hidden states and the head, and is compared at ∂/∂hidden = Wᵀδ and ∂/∂weight = δᵀu.
Axes: T tokens, D width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zloss.audit.loss import probes
from zloss.audit.loss.calls import BlackBox, LossCallError, dtype_name
from zloss.audit.loss.identify import Identification
from zloss.audit.loss.probes import SLICE, Probe, draw, times_weight
from zloss.audit.loss.source import UNIT, Model, relative_error
from zloss.console import Progress, Silent
from zloss.errors import InputError, ShapeError
from zloss.results.loss_audit import SourceError, TargetModelSource
from zloss.results.provenance import without_folders

if TYPE_CHECKING:
    from zloss.models.checkpoint import Checkpoint
    from zloss.models.output_head import OutputHead
    from zloss.results.options import DtypeName
    from zloss.text import Blocks

Z_LIMIT = 1e-3
"""Δ_src of the Z source: fp32 stays below 1e-4, fp16 logits give 0.002 to 0.03, bf16 logits 0.05 to 0.2."""
TOTAL_LIMIT, TOTAL_LIMIT_16_BITS = 3e-4, 2e-2
MOST_TOKENS = 256
"""Maximum number of audited tokens: fp64 copies of [T, V] logits are large."""
BF16_TOKENS, BF16_WIDTH, BF16_OFFSET = 64, 72, 20.0
"""A dense head for bf16 inputs; between 16 and 32 neighboring bf16 numbers are 0.125 apart."""
ENTRIES = 2**23
"""Maximum number of logits per call: about ten fp64 copies of them exist at once."""
TINY = torch.finfo(torch.float64).tiny


# Audited logits.


def audited_probe(
    ident: Identification, logits: Tensor | None, target: Tensor | None, ignore_index: int, seed: int
) -> tuple[Probe, torch.dtype]:
    """The given logits, or synthetic continuous ones in fp32; and the dtype that the loss receives."""
    space = ident.space
    if logits is None:
        if target is not None:
            raise InputError("`target` was given without `logits`: pass both, or neither.")
        return draw("continuous", space, seed + 1), torch.float32
    if logits.dim() < 2 or not logits.is_floating_point():
        raise ShapeError(
            f"`logits` is expected to be a floating tensor [..., V], but got {list(logits.shape)} {logits.dtype}."
        )
    flat = logits.detach().reshape(-1, logits.shape[-1])
    if target is None:
        labels = probes.allowed(flat.argmax(-1).cpu(), flat.shape[-1], space.avoid)
    elif target.numel() != flat.shape[0]:
        raise ShapeError(f"`target` has {target.numel()} entries for {flat.shape[0]} rows of `logits`.")
    else:
        labels = target.detach().reshape(-1).cpu()
        labels = torch.where(labels == ignore_index, torch.full_like(labels, -1), labels)
    flat, labels = flat[:MOST_TOKENS], labels[:MOST_TOKENS]
    lanes = flat.shape[-1] if not space.padded else min(space.lanes, flat.shape[-1])
    if bool((labels >= lanes).any()) or bool((labels < -1).any()):
        raise InputError(f"`target` holds class indices outside [0, {lanes}) that are not ignore_index={ignore_index}.")
    return Probe(flat.cpu().double(), labels, lanes, name="audited"), flat.dtype


def measure_source(
    box: BlackBox, off: BlackBox | None, ident: Identification, probe: Probe, dtype: torch.dtype
) -> tuple[SourceError, float]:
    """Δ_src, cosine and relative forward error, and the rounding floor of Δ_src. Norms are over all audited tokens."""
    bare = SourceError(None, None, None, tokens=len(probe.target_T), dtype=dtype_name(dtype))
    if not ident.trusted:
        why = "the gradient is not explained by a known penalty with equal token weights: no reference to compare with"
        if ident.how == "rounded":
            why = "part of the gradient is noise of 16 bits, so the loss has no exact source to compare with"
        return replace(bare, reason=why), 0.0
    if ident.special and bool(torch.isin(probe.target_T, torch.tensor([one.index for one in ident.special])).any()):
        why = f"the targets include a class that is weighted differently ({ident.special[0].words})"
        return replace(bare, reason=why), 0.0
    try:
        compared = _at_logits(box, off, ident.model, probe, dtype)
    except LossCallError as error:
        return replace(bare, reason=str(error)), 0.0
    if not compared.finite:
        return replace(bare, reason="loss or gradient is not finite"), 0.0
    found, has_z = summary([compared]), bool(ident.model.z_source(probe).any())
    figures = {key: found[key] for key in ("forward_rel_error", "delta_src", "cosine", "delta_total")}
    return replace(bare, of="z" if has_z else "total", **figures), found["rounding_floor"] if has_z else 0.0


def beyond_rounding(source: SourceError, floor: float) -> bool:
    """Whether the source is further from fp64 than fp32 rounding of the total gradient can bring it."""
    if source.delta_src is None or source.delta_total is None:
        return False
    total = TOTAL_LIMIT_16_BITS if source.dtype in ("bfloat16", "float16") else TOTAL_LIMIT
    return (source.of == "z" and source.delta_src > max(Z_LIMIT, 4 * floor)) or source.delta_total > total


def bf16_input_error(box: BlackBox, ident: Identification, seed: int) -> float | None:
    """‖dW − dW₆₄‖/‖dW₆₄‖ on dense bf16 hidden and weight, against fp64 of the same bf16 numbers.

    dW itself comes back in bf16, which alone costs about 2e-3; logits stored in bf16 cost 1e-2 and more. None if it cannot
    be measured: the loss is not linear, there is no model to compare with, or the loss rejects bf16.
    """
    if not box.linear or not ident.plain or box.targets != "given":
        return None
    dense = probes.dense_head(BF16_TOKENS, BF16_WIDTH, ident.space, seed + 3, offset=BF16_OFFSET)
    hidden, weight, target = dense[0].bfloat16().double(), dense[1].bfloat16().double(), dense[2]
    try:
        _, _, grad_weight = box.on_head(hidden, weight, target, torch.bfloat16)
    except LossCallError:
        return None
    if not bool(torch.isfinite(grad_weight).all()):
        return None
    r = Probe(hidden @ weight.T, target, ident.space.lanes)
    return relative_error(grad_weight, ident.model.source(r).T @ hidden)


# Errors of one call, and summed over calls.


@dataclass(frozen=True)
class Compared:
    """One call against fp64, at the logits or at the hidden states."""

    forward: float
    """Relative error of the value."""
    moments_TK: Tensor
    """Per token: squared norms of the error, the wanted and the applied source, the product of the last two; the same four of
    the whole gradient; and the square of the rounding of the latter."""
    weight: tuple[float, float] | None = None
    """‖error of dW‖², and the norm² it is compared with."""

    @property
    def finite(self) -> bool:
        return math.isfinite(self.forward) and bool(torch.isfinite(self.moments_TK).all())


def _compare(
    applied: tuple[float, Tensor], without: Tensor | None, wanted: tuple[float, Tensor, Tensor], rounding_T: Tensor
) -> Compared:
    """`applied` is (value, gradient), `wanted` (value, gradient, its Z part) in fp64; the source is Z's where there is one."""
    (value, grad), (wanted_value, total, z) = applied, wanted
    total_error, source = grad - total, z if bool(z.any()) else total
    error = total_error
    if source is z and without is not None and bool(torch.isfinite(without).all()):
        # An `off` that still applies a Z would give 0, so the nearer of the two differences is taken.
        error = min(total_error, grad - without - z, key=lambda one: float(one.norm()))
    pairs = [(error, source), (total_error, total)]
    moments = [x for off, right in pairs for x in (off * off, right * right, (right + off) ** 2, (right + off) * right)]
    rounding = (rounding_T * total.norm(dim=-1)).square()
    forward = abs(value - wanted_value) / max(abs(wanted_value), TINY)
    return Compared(forward, torch.stack([*(x.sum(-1) for x in moments), rounding], dim=-1))


def _at_logits(box: BlackBox, off: BlackBox | None, model: Model, probe: Probe, dtype: torch.dtype) -> Compared:
    outcome = box(probe, dtype)
    without = None if off is None else off(probe, dtype).grad_TV
    wanted = (model.value(probe), model.source(probe), model.z_source(probe))
    return _compare((outcome.value, outcome.grad_TV), without, wanted, _rounding(probe, dtype))


def _rounding(r: Probe, dtype: torch.dtype) -> Tensor:
    """Relative rounding of p: exp(z − log Z) inherits the rounding of log Z; a 16-bit gradient is rounded as it is stored."""
    unit = max(UNIT.get(dtype_name(dtype), UNIT["float32"]), UNIT["float32"])
    return 2 * unit * (1.0 + r.max_T.abs() if unit == UNIT["float32"] else torch.ones_like(r.max_T))


def summary(calls: list[Compared]) -> dict[str, Any]:
    """The figures of several calls, under the names of `TargetModelSource`."""
    moments_TK = torch.cat([one.moments_TK for one in calls])
    error, wanted, applied, along, *whole, rounding = moments_TK.sum(0).tolist()
    # An ignored token has no source.
    loud = moments_TK[:, 1] > 0
    errors_T = (moments_TK[loud, 0] / moments_TK[loud, 1]).sqrt()
    weights = [one.weight for one in calls if one.weight is not None]
    weight = sum(size for _, size in weights)
    return {
        "forward_rel_error": max(one.forward for one in calls),
        "delta_src": math.sqrt(error / max(wanted, TINY)),
        "delta_total": math.sqrt(whole[0] / max(whole[1], TINY)),
        "cosine": _cosine(along, applied, wanted),
        "total_cosine": _cosine(whole[3], whole[2], whole[1]),
        "token_mean": float(errors_T.mean()),
        "token_p99": float(errors_T.quantile(0.99)) if len(errors_T) else math.nan,
        "token_max": float(errors_T.max()) if len(errors_T) else math.nan,
        "delta_weight": math.sqrt(sum(off for off, _ in weights) / weight) if weight else None,
        "rounding_floor": math.sqrt(rounding / max(wanted, TINY)),
    }


def _cosine(along: float, a: float, b: float) -> float | None:
    return along / math.sqrt(a * b) if a > 0 and b > 0 else None


# The tokens of a model.


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


def source_on_model(
    box: BlackBox, off: BlackBox | None, ident: Identification, tokens: ModelTokens, progress: Progress
) -> TargetModelSource:
    """Value, source and per-token errors on every block; each part of a block is one call of the loss."""
    head = tokens.head
    ident, assumed = _unblurred(ident)
    found = TargetModelSource(
        # A whole path would show the folders of someone's machine.
        model=without_folders(tokens.checkpoint.name),
        text=tokens.text,
        tokens=0,
        calls=0,
        dtype=dtype_name(tokens.dtype),
        vocab=head.vocab,
        at="hidden" if box.linear else "logits",
        of="z" if ident.model.penalties else "total",
        assumed=assumed,
    )
    why = _not_comparable(box, ident, tokens, known=assumed is not None)
    if why is not None:
        return replace(found, reason=why)
    calls: list[Compared] = []
    try:
        with progress.step("source on the model's logits", tokens.blocks.predictions) as step:
            for hidden_TD, target_T in tokens:
                # Equal parts of a block whose logits fit the memory.
                count = -(-len(target_T) * head.vocab // ENTRIES)
                for hidden, target in zip(hidden_TD.chunk(count), target_T.chunk(count), strict=True):
                    calls.append(_on_tokens(box, off, ident, tokens, hidden, target))
                    step.advance(len(target))
    except LossCallError as error:
        return replace(found, reason=str(error))
    found = replace(found, tokens=sum(len(one.moments_TK) for one in calls), calls=len(calls))
    if not all(one.finite for one in calls):
        return replace(found, reason="the loss or its gradient is not finite on these logits")
    if not any(bool(one.moments_TK[:, 1].any()) for one in calls):
        return replace(found, reason="the source is zero on every token of the text")
    return replace(found, **summary(calls))


def _unblurred(ident: Identification) -> tuple[Identification, str | None]:
    """A loss of low precision with the usual λ and c inside the identified intervals, and a sentence that says so.

    Rounding in the loss makes the identified values imprecise, c most of all.
    If 0 or log V is inside the interval it is used as c, with the λ
    that has the fewest digits; otherwise nothing is assumed, because a wrong c would be read as an error of the source.
    """
    got, model = ident.identified, ident.model
    if ident.how != "rounded" or len(model.penalties) != 1 or got.coef is None or got.target is None:
        return ident, None
    (penalty,) = model.penalties
    log_v = math.log(model.probe_vocab)
    near = [c for c in (0.0, log_v) if abs(penalty.target - c) <= (got.uncertainty.target or 0.0)]
    if len(near) != 1 or got.ce_weights != "uniform":
        return ident, None
    shortened = (float(f"{penalty.coef:.{digits}g}") for digits in range(1, 8))
    coef = next((x for x in shortened if abs(x - penalty.coef) <= (got.uncertainty.coef or 0.0)), penalty.coef)
    exact = replace(model, penalties=(replace(penalty, coef=coef, target=near[0]),), log_v_target=near[0] == log_v)
    name = "log V" if near[0] == log_v else "0"
    return replace(ident, model=exact), f"λ = {coef:g} and c = {name}, which the rounding of the loss leaves possible"


def _not_comparable(box: BlackBox, ident: Identification, tokens: ModelTokens, *, known: bool) -> str | None:
    """Why there is no fp64 gradient to compare with."""
    head, lanes = tokens.head, ident.space.lanes
    if ident.space.padded and lanes > head.vocab:
        raise InputError(f"`valid_vocab` is {lanes}, but the head of {tokens.checkpoint.name} has {head.vocab} rows.")
    if not ident.trusted and not known:
        return "the gradient is not explained by a known penalty with equal token weights: no reference to compare with"
    got = ident.identified
    if got.ce_weights == "groups":
        return "the loss averages means of groups of tokens, whose sizes on another number of tokens are not known"
    if not known and got.target is not None and got.target_rule is None and got.vocab not in (None, head.vocab):
        return f"whether c follows the vocabulary could not be probed, so c at V = {head.vocab} is not known"
    if ident.special:
        return f"one class is weighted differently ({ident.special[0].words}), and the text may have it as a target"
    if not box.linear:
        return None
    if head.bias_V is not None:
        return "the head has a bias, which a loss of (hidden, weight, target) does not see"
    if ident.damped and not ident.model.warp.identity:
        return "the gain under the loss's own change of the logits is not defined here"
    return None


def _on_tokens(
    box: BlackBox, off: BlackBox | None, ident: Identification, tokens: ModelTokens, hidden_TD: Tensor, target_T: Tensor
) -> Compared:
    head, model, dtype = tokens.head, ident.model, tokens.dtype
    lanes = ident.space.lanes if ident.space.padded else head.vocab
    labels = torch.where(target_T == box.ignore_index, torch.full_like(target_T, -1), target_T)
    if bool((labels >= lanes).any()):
        raise InputError(f"the text has token ids beyond the {lanes} classes of `valid_vocab`.")
    if not box.linear:
        with torch.no_grad():
            logits_TV = head.logits(hidden_TD.to(head.weight_VD.device)).cpu()
        r = Probe(logits_TV.double(), labels, lanes)
        return _at_logits(box, off, model, r, dtype)
    # The scale of the logits belongs to the weight: a loss of (hidden, weight, target) sees z = Wu.
    weight_VD = (head.weight_VD.detach().cpu() * head.logit_scale).to(dtype)
    u_TD = hidden_TD.double()
    logits_TV = torch.cat([u_TD @ rows.double().T for rows in torch.split(weight_VD, SLICE)], dim=-1)
    r = Probe(logits_TV, labels, lanes, weight_VD)
    total_TV, z_TV = model.source(r), model.z_source(r)
    value, grad_hidden, grad_weight = box.on_head(hidden_TD, weight_VD, labels, dtype)
    without = None if off is None else off.on_head(hidden_TD, weight_VD, labels, dtype)[1]
    wanted = (model.value(r), times_weight(total_TV, weight_VD), times_weight(z_TV, weight_VD))
    compared = _compare((value, grad_hidden), without, wanted, _rounding(r, dtype))
    of_TV = z_TV if model.penalties else total_TV
    error = size = 0.0
    for start in range(0, head.vocab, SLICE):
        rows = slice(start, start + SLICE)
        error += float((grad_weight[rows] - total_TV[:, rows].T @ u_TD).square().sum())
        size += float((of_TV[:, rows].T @ u_TD).square().sum())
    return replace(compared, weight=(error, size))
