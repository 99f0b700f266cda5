"""Sixty losses as people write them in training code: thirty that are right, thirty with one mistake that matters.

Each stands below its row: what it trains, and how its user would honestly call the audit. `meant` is what the author of a
mistake wanted. Where the truth has no word for an objective (focal, DFT, hinges …) a line of fp64 torch states it.
"""

import itertools
import math
from collections import namedtuple
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import CausalLMOutput

from tests.audit.loss.corpus import LOG_V, Case, Objective, Truth, ce, z

STYLES: list[Case] = []
EXPECTED = {"coef": 1e-4, "target": 0.0}
CENTERED = {"coef": 1e-2, "target": 0.0, "coordinate": "centered"}
OTHER = Truth(has_z=True, coordinate="other")


def style(truth, *defects, meant=None, objective=None, shape="T", head="VD", also=(), **call):
    """A row for the loss below: what it trains, the ids of its mistake, and how its user calls the audit."""

    def add(loss):
        ids, others = frozenset(defects), frozenset(also)
        STYLES.append(Case(loss.__name__, loss, truth, call, ids, others, meant, objective, shape, head))
        return loss

    return add


def mean_valid(per_token: Objective) -> Objective:
    """The mean over valid tokens of `per_token(logits [N, V], target [N])`."""
    return lambda logits, target: per_token(logits[target != -100], target[target != -100]).mean()


def nll(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, target, reduction="none")


def ce_plus(penalty: Callable[[Tensor], Tensor]) -> Objective:
    return mean_valid(lambda z, y: nll(z, y) + penalty(z))


def mean_of_sequence_means(logits: Tensor, target: Tensor) -> Tensor:
    mean = ce_plus(lambda z: 1e-4 * z.logsumexp(-1) ** 2)
    return torch.stack([mean(row, y) for row, y in zip(logits, target, strict=True)]).mean()


def z_mean(log_z, target, coef=1e-4):
    """The Z of losses whose point is elsewhere."""
    return coef * log_z[target != -100].square().mean()


# ---- right ----


@style(ce(), ignore_index=-1)
def nanogpt(logits, targets):
    return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


@style(ce(shifted=True), shape="BT")
def hf_causal_lm(logits, labels):
    logits = logits.float()
    labels = F.pad(labels, (0, 1), value=-100)
    shift_labels = labels[..., 1:].contiguous().view(-1)
    loss = F.cross_entropy(logits.view(-1, logits.shape[-1]), shift_labels, ignore_index=-100)
    return CausalLMOutput(loss=loss, logits=logits)


@style(z(shifted=True), shape="BT", softcap=30.0, expect=EXPECTED)
def gemma_with_z(logits, labels):
    logits = 30.0 * torch.tanh(logits.float() / 30.0)
    shift_logits, shift_labels = logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
    flat, labels = shift_logits.view(-1, logits.size(-1)), shift_labels.view(-1)
    log_z = torch.logsumexp(flat[labels != -100], dim=-1)
    return nn.CrossEntropyLoss()(flat, labels) + 1e-4 * log_z.square().mean()


@style(z(1e-3, LOG_V, shifted=True), shape="BT", logit_scale=1 / 8, expect={"coef": 1e-3, "target": LOG_V})
def granite_with_z(logits, labels):
    logits = logits[:, :-1].float() / 8.0  # config.logits_scaling
    labels, vocab = labels[:, 1:], logits.size(-1)
    mask = labels.ne(-100)
    log_z = logits.logsumexp(-1)
    z_loss = ((log_z - math.log(vocab)) ** 2 * mask).sum() / mask.sum().clamp(min=1)
    loss = F.cross_entropy(logits.reshape(-1, vocab), labels.reshape(-1)) + 1e-3 * z_loss
    return {"loss": loss, "logits": logits, "z_loss": z_loss.detach(), "log_z": log_z.detach().mean()}


@style(z(), shape="BT")
def megatron(logits, labels):
    logits = logits.transpose(0, 1).float()  # [s, b, V], as the model returns them
    labels = labels.transpose(0, 1)
    logits_max = logits.detach().amax(dim=-1)
    log_z = (logits - logits_max.unsqueeze(-1)).exp().sum(dim=-1).log() + logits_max
    predicted_logits = logits.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    losses = (log_z - predicted_logits + 1e-4 * log_z.square()).transpose(0, 1).contiguous()  # [b, s]
    loss_mask = (labels != -100).transpose(0, 1).reshape(-1).float()
    return torch.sum(losses.view(-1) * loss_mask) / loss_mask.sum()


@style(z(2e-4), linear=True, expect={"coef": 2e-4, "target": 0.0})
def torchtitan_chunks(hidden, weight, target):
    def chunk_loss(h, y):
        logits = (h @ weight.T).float()
        z_loss = torch.where(y != -100, logits.logsumexp(-1).square(), 0.0).sum()
        return F.cross_entropy(logits, y, reduction="sum", ignore_index=-100) + 2e-4 * z_loss

    global_valid_tokens = (target != -100).sum()
    total = hidden.new_zeros((), dtype=torch.float32)
    for h, y in zip(hidden.chunk(8), target.chunk(8), strict=True):
        total = total + checkpoint(chunk_loss, h, y, use_reentrant=False)
    return total / global_valid_tokens


LMOutput = namedtuple("LMOutput", "logits loss ce_loss z_loss")


@style(z(1e-5 / 512, ce_scale=1 / 512, ce_denominator="sum", z_denominator="sum"), expect={"coef": 1e-5, "target": 0.0})
def olmo_core(logits, labels, batch_num_tokens=512):
    """Sums over the micro-batch, divided by the tokens of the whole batch."""
    logits, labels = logits.view(-1, logits.size(-1)).float(), labels.view(-1)
    ce_loss = F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
    z_loss = 1e-5 * (logits.logsumexp(dim=-1).pow(2) * (labels != -100)).sum()
    ce_loss, z_loss = ce_loss / batch_num_tokens, z_loss / batch_num_tokens
    return LMOutput(None, ce_loss + z_loss, ce_loss.detach(), z_loss.detach())


@style(z(label_smoothing=0.1))
def label_smoothing(logits, target):
    return F.cross_entropy(logits, target, label_smoothing=0.1) + z_mean(logits.logsumexp(-1), target)


@style(z(5e-4))
def gather_and_logsumexp(logits, target):
    mask = (target >= 0).to(logits.dtype)
    log_z = torch.logsumexp(logits, dim=-1)
    nll = log_z - torch.gather(logits, -1, target.clamp_min(0)[..., None])[..., 0]
    denominator = mask.sum().clamp_min(1.0)
    return (nll * mask).sum() / denominator + 5e-4 * (log_z**2 * mask).sum() / denominator


@style(z())
def packed_documents(logits, target):
    """Documents of one packed row, each its own kernel call; one count for all."""
    first, loss = len(target) // 3, logits.new_zeros(())
    lengths = [first, len(target) - first]
    for z_doc, y_doc in zip(logits.split(lengths), target.split(lengths), strict=True):
        log_z = z_doc.logsumexp(-1)[y_doc != -100]
        loss = loss + F.cross_entropy(z_doc, y_doc, reduction="sum") + 1e-4 * (log_z**2).sum()
    return loss / (target != -100).sum()


@style(z(ce_denominator="groups", z_denominator="groups"), objective=mean_of_sequence_means, shape="BT")
def sequence_means(logits, labels):
    mask = labels != -100
    log_z = logits.logsumexp(-1)
    logp = logits.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1) - log_z
    per_token = -logp + 1e-4 * log_z.square()
    return ((per_token * mask).sum(-1) / mask.sum(-1).clamp(min=1)).mean()


class CEWithZ(torch.autograd.Function):
    """CE + λ log²Z over valid tokens with its gradient by hand; `factor` is 2 for the derivative of the square."""

    @staticmethod
    def forward(ctx, logits, target, coef, factor):
        keep = target != -100
        log_z = logits.logsumexp(-1)
        ctx.save_for_backward(logits, target, log_z, keep)
        ctx.coef, ctx.factor = coef, factor
        nll = log_z - logits.gather(-1, target.clamp(min=0)[:, None])[:, 0]
        return ((nll + coef * log_z**2) * keep).sum() / keep.sum()

    @staticmethod
    def backward(ctx, upstream):
        logits, target, log_z, keep = ctx.saved_tensors
        grad = (logits - log_z[:, None]).exp() * (1 + ctx.factor * ctx.coef * log_z)[:, None]
        grad -= F.one_hot(target.clamp(min=0), logits.size(-1))
        return grad * (keep * upstream / keep.sum())[:, None], None, None, None


@style(z(), expect=EXPECTED)
def custom_function(logits, target):
    return CEWithZ.apply(logits, target, 1e-4, 2.0)


class FusedHead(torch.autograd.Function):
    """Loss and both gradients chunk by chunk in the forward pass; the backward pass only scales them."""

    @staticmethod
    def forward(ctx, hidden, weight, target, coef):
        count = (target != -100).sum().clamp(min=1)
        loss, d_hidden, d_weight = hidden.new_zeros(()), torch.empty_like(hidden), torch.zeros_like(weight)
        for start in range(0, len(hidden), 64):
            h, y = hidden[start : start + 64], target[start : start + 64]
            keep, rows = (y != -100)[:, None], torch.arange(len(y))
            logits = h @ weight.T
            log_z = logits.logsumexp(-1, keepdim=True)
            nll = log_z - logits[rows, y.clamp(min=0)][:, None]
            loss += ((nll + coef * log_z**2) * keep).sum() / count
            source = (logits - log_z).exp() * (1 + 2 * coef * log_z)
            source[rows, y.clamp(min=0)] -= 1
            source *= keep / count
            d_hidden[start : start + 64] = source @ weight
            d_weight += source.T @ h
        ctx.save_for_backward(d_hidden, d_weight)
        return loss

    @staticmethod
    def backward(ctx, upstream):
        d_hidden, d_weight = ctx.saved_tensors
        return upstream * d_hidden, upstream * d_weight, None, None


@style(z(), linear=True)
def fused_head(hidden, weight, target):
    return FusedHead.apply(hidden, weight, target, 1e-4)


@style(z(1e-3, LOG_V, "centered"), linear=True, expect={"coef": 1e-3, "target": LOG_V, "coordinate": "centered"})
def checkpointed_centered_z(hidden, weight, target):
    """Z of mean-centered logits; CE does not see the difference."""

    def sums(h, y):
        logits = F.linear(h, weight)
        logits = logits - logits.mean(dim=-1, keepdim=True)
        excess = logits.logsumexp(-1) - math.log(weight.size(0))
        return F.cross_entropy(logits, y, reduction="sum"), (excess**2)[y != -100].sum()

    rows = zip(hidden.split(48), target.split(48), strict=True)
    parts = [checkpoint(sums, h, y, use_reentrant=False) for h, y in rows]
    n = (target != -100).sum()
    return sum(ce_sum for ce_sum, _ in parts) / n + 1e-3 * sum(z_sum for _, z_sum in parts) / n


@style(z())
def dict_with_total(logits, target):
    keep = target != -100
    ce_loss, z_loss = F.cross_entropy(logits, target), z_mean(logits.logsumexp(-1), target)
    logged = {"loss": ce_loss.detach(), "z_loss": z_loss.detach(), "z_sum": 1e4 * z_loss.detach() * keep.sum()}
    logged |= {"accuracy": (logits.argmax(-1) == target)[keep].float().mean(), "perplexity": ce_loss.detach().exp()}
    return logged | {"total_loss": ce_loss + z_loss}


@torch.compile(backend="aot_eager", dynamic=True)
def nll_of_log_softmax(logits, target):
    log_probs = F.log_softmax(logits.float(), dim=-1)
    log_z = (logits.float() - log_probs)[..., 0]
    keep = target != -100
    return F.nll_loss(log_probs, target, ignore_index=-100) + 1e-4 * (log_z.square() * keep).sum() / keep.sum()


@style(z(), expect=EXPECTED)
def compiled(logits, target):
    return nll_of_log_softmax(logits, target)


@style(z(), linear=True, head="DV")
def flax_head(hidden, weight, target):
    """An einsum over a kernel [D, V]."""
    logits = torch.einsum("...d,dv->...v", hidden, weight)
    keep, log_z = target != -100, torch.logsumexp(logits, -1)
    weights = keep / keep.sum()
    nll = log_z - torch.einsum("...v,...v->...", logits, F.one_hot(target * keep, logits.shape[-1]).to(logits.dtype))
    return (weights * (nll + 1e-4 * log_z**2)).sum(), {"z": 1e-4 * (weights * log_z**2).sum(), "tokens": keep.sum()}


@style(z(1e-2), linear=True, also=("low_precision_source",))
def autocast_head(hidden, weight, target):
    """The product in bf16 as mixed precision does it, softmax and log Z in fp32."""
    with torch.autocast(hidden.device.type, dtype=torch.bfloat16):
        logits = F.linear(hidden, weight)
    logits = logits.float()
    return F.cross_entropy(logits, target) + z_mean(logits.logsumexp(-1), target, 1e-2)


@style(ce(), objective=mean_valid(lambda z, y: (-nll(z, y)).exp().detach() * nll(z, y)))
def dft(logits, labels):
    """TRL's loss_type="dft": a token counts by its probability."""
    mask = labels != -100
    log_probs = torch.gather(logits.log_softmax(-1), -1, labels.masked_fill(~mask, 0).unsqueeze(-1)).squeeze(-1)
    return -(log_probs.exp().detach() * log_probs * mask).sum() / mask.sum()


@style(z(), objective=mean_valid(lambda z, y: (1 - (-nll(z, y)).exp()) ** 2 * nll(z, y) + 1e-4 * z.logsumexp(-1) ** 2))
def focal_with_z(logits, target):
    keep = target != -100
    logits, target = logits[keep], target[keep]
    ce_loss = F.cross_entropy(logits, target, reduction="none")
    p_t = torch.exp(-ce_loss)
    return ((1 - p_t) ** 2 * ce_loss).mean() + 1e-4 * torch.logsumexp(logits, dim=1).square().mean()


@style(Truth(True), objective=ce_plus(lambda z: 1e-4 * z.mean(-1) ** 2))
def mu_loss(logits, target):
    """Output embedding centering's μ-loss: only the mean logit is penalized."""
    return F.cross_entropy(logits, target) + 1e-4 * logits.mean(-1)[target != -100].square().mean()


@style(Truth(None), objective=ce_plus(lambda z: 2e-4 * z.amax(-1) ** 2))
def baichuan_max_z(logits, target):
    max_logits = logits.max(dim=-1).values[target != -100]
    return nn.CrossEntropyLoss()(logits, target) + 2e-4 * torch.pow(max_logits, 2).mean()


@style(ce())
def mixture_of_experts(logits, target):
    """CE plus load balancing and router Z, both of the router's own logits."""
    router_logits = torch.linspace(-2, 3, 16 * 8).view(16, 8).requires_grad_()
    share = F.one_hot(router_logits.topk(2).indices, 8).float().mean((0, 1))
    aux_loss = 8 * (share * router_logits.softmax(-1).mean(0)).sum()
    router_z = router_logits.logsumexp(-1).pow(2).mean()
    loss = F.cross_entropy(logits, target) + 0.01 * aux_loss + 1e-3 * router_z
    return loss, {"aux_loss": aux_loss, "router_z_loss": router_z}


class HeadWithSchedule(nn.Module):
    """λ warms up with the optimizer's step, a buffer; the running mean of the loss is a baseline and trains nothing."""

    def __init__(self):
        super().__init__()
        self.register_buffer("progress", torch.tensor(500 / 2000))
        self.register_buffer("ema", torch.tensor(3.25))

    def forward(self, logits, target):
        keep = (target != -100).float()
        z_loss = (keep * logits.logsumexp(-1) ** 2).sum() / keep.sum()
        return F.cross_entropy(logits, target) + 1e-3 * self.progress.clamp(max=1) * z_loss - self.ema


@style(z(2.5e-4))
def buffers_and_schedule(logits, target):
    return HeadWithSchedule()(logits, target)


@style(OTHER, objective=ce_plus(lambda z: 1e-3 * (z.logsumexp(-1) - 12).relu() ** 2), also=("unexplained_source",))
def hinge(logits, target):
    """Only log Z above 12 is pulled back."""
    return F.cross_entropy(logits, target) + z_mean(F.relu(logits.logsumexp(-1) - 12.0), target, 1e-3)


@style(
    OTHER,
    objective=ce_plus(
        lambda z: 1e-4 * z.logsumexp(-1) ** 2 + 5e-4 * (z.log_softmax(-1).mean(-1) + math.log(z.shape[-1])) ** 2
    ),
    also=("unexplained_source",),
)
def raw_plus_centered(logits, target):
    log_z, mu = logits.logsumexp(-1), logits.mean(-1)
    loss = F.cross_entropy(logits, target) + z_mean(log_z, target)
    return loss + z_mean(log_z - mu - math.log(logits.size(-1)), target, 5e-4)


@style(z(8e-4, ce_scale=8.0), expect=EXPECTED)
def world_size_scaled(logits, target):
    """DDP averages over ranks, so the sum over ranks is restored; metrics are those of the micro-batch."""
    keep = target != -100
    count = keep.sum()
    z_sum = logits.logsumexp(-1).pow(2)[keep].sum()
    ce_sum = F.cross_entropy(logits, target, reduction="sum")
    loss = (ce_sum + 1e-4 * z_sum) / count * 8
    return loss, (ce_sum.detach(), z_sum.detach(), count)


@style(z(), expect=EXPECTED)
def rewrapped_with_gradient(logits, target):
    """Loss and gradient on a detached fp32 leaf (pipeline engines do this), then attached to the graph again."""
    leaf = logits.detach().float().requires_grad_()
    with torch.enable_grad():
        loss = F.cross_entropy(leaf, target) + z_mean(leaf.logsumexp(-1), target)
    (grad,) = torch.autograd.grad(loss, leaf)
    return loss.detach() + (grad * (logits - logits.detach())).sum()


@style(z(), valid_vocab=50)
def padded_vocabulary(logits, target):
    """A table padded for the hardware: 50 real tokens, the rest masked before the softmax."""
    padding = torch.arange(logits.size(-1), device=logits.device) >= 50
    logits = logits.masked_fill(padding, torch.finfo(logits.dtype).min)
    keep = target != -100
    return F.cross_entropy(logits, target) + 1e-4 * torch.where(keep, logits.logsumexp(-1) ** 2, 0).sum() / keep.sum()


# Read as label smoothing of 0.3 with another c, it has the same gradient: an answer may say that both explain it.
@style(z(1e-2, LOG_V, "centered", ce_scale=0.7))
def weighted_ce_centered_z(logits, target):
    weights = {"ce": 0.7, "z": 1e-2}
    log_z = (logits - logits.mean(-1, keepdim=True)).logsumexp(-1)
    losses = {"ce": F.cross_entropy(logits, target), "z": z_mean(log_z - math.log(logits.size(-1)), target, 1.0)}
    return sum(weights[name] * value for name, value in losses.items())


# ---- one mistake ----


@style(None, "size_dependent", "tail_never_trained", meant=z(), linear=True)
def tail_of_chunks(hidden, weight, target):
    """T // 8 rows per chunk: the remainder is never trained."""
    size, total = len(target) // 8, hidden.new_zeros(())
    for i in range(8):
        y = target[i * size : (i + 1) * size]
        logits = hidden[i * size : (i + 1) * size] @ weight.T
        total = total + F.cross_entropy(logits, y, reduction="sum")
        total = total + 1e-4 * logits.logsumexp(-1)[y != -100].square().sum()
    return total / (target != -100).sum()


@style(None, "size_dependent", "tail_counted_twice", meant=z())
def tail_of_vocabulary(logits, target):
    """Blocks of 128 columns; the last one is moved back to fit, so its first columns count twice."""
    vocab, block = logits.size(-1), min(128, logits.size(-1))
    starts = [min(start, vocab - block) for start in range(0, vocab, block)]
    log_z = torch.stack([logits[:, start : start + block].logsumexp(-1) for start in starts]).logsumexp(0)
    keep = target != -100
    nll = log_z - logits.gather(-1, target.clamp(min=0)[:, None])[:, 0]
    return ((nll + 1e-4 * log_z**2) * keep).sum() / keep.sum()


@style(ce(), "zero_gradient_z", meant=z(), expect=EXPECTED)
def z_of_log_probs(logits, target):
    log_probs = logits.log_softmax(-1)
    return F.nll_loss(log_probs, target) + z_mean(log_probs.logsumexp(-1), target)


@style(z(ce_scale=1 / 8), "differs_from_expected", meant=z(1e-4 / 8, ce_scale=1 / 8), expect=EXPECTED)
def accumulation_divides_ce_only(logits, target):
    """λ is eight times what it should be next to CE."""
    return F.cross_entropy(logits, target) / 8 + z_mean(logits.logsumexp(-1), target)


@style(
    z(target=math.log(32000)), "differs_from_expected", meant=z(target=LOG_V), expect={"coef": 1e-4, "target": LOG_V}
)
def log_v_of_the_old_tokenizer(logits, target):
    return F.cross_entropy(logits, target) + z_mean(logits.logsumexp(-1) - math.log(32000), target)


@style(z(z_denominator="all", z_tokens="all"), "denominator_mismatch", "ignored_tokens_leak", meant=z())
def z_of_prompt_tokens_too(logits, labels):
    return F.cross_entropy(logits.float(), labels) + 1e-4 * torch.logsumexp(logits.float(), dim=-1).pow(2).mean()


@style(z(z_denominator="sum", z_tokens="all"), "denominator_mismatch", "ignored_tokens_leak", meant=z())
def mask_broadcast_to_a_square(logits, target):
    """[T] times [T, 1] is [T, T]: every log Z counts once for every valid token."""
    mask = (target != -100).float().unsqueeze(-1)
    log_z = logits.logsumexp(-1)
    return F.cross_entropy(logits, target) + 1e-4 * (log_z.square() * mask).sum() / mask.sum()


@style(z(coordinate="max_shifted"), "max_shifted", meant=z())
def maximum_never_added_back(logits, target):
    logits = logits - logits.amax(dim=-1, keepdim=True)
    sum_exp = logits.exp().sum(-1)
    return F.cross_entropy(logits, target) + z_mean(sum_exp.log(), target)


@style(z(2e-4), "counted_twice", "differs_from_expected", meant=z(), expect=EXPECTED)
def added_to_a_loss_that_has_it(logits, target):
    z_loss = z_mean(logits.logsumexp(-1), target)
    loss = CEWithZ.apply(logits, target, 1e-4, 2.0)  # the kernel was given lse_square_scale too
    return {"loss": loss + z_loss, "z_loss": z_loss.detach()}


@style(z(1e-5), "not_off", off=lambda logits, target: zero_switches_the_default_on(logits, target, 0.0))
def zero_switches_the_default_on(logits, target, z_loss_multiplier=1e-5):
    coef = z_loss_multiplier or 1e-4
    return F.cross_entropy(logits, target) + z_mean(logits.logsumexp(-1), target, coef)


class VocabParallelCE(torch.autograd.Function):
    """Works in place on `logits.float()`, which for fp32 logits is the caller's tensor."""

    @staticmethod
    def forward(ctx, logits, target):
        logits, keep, classes = logits.float(), target != -100, target.clamp(min=0)[:, None]
        logits -= logits.amax(-1, keepdim=True)
        predicted = logits.gather(-1, classes)[:, 0].clone()
        sum_exp = torch.exp(logits, out=logits).sum(-1)
        grad = logits / sum_exp[:, None] - F.one_hot(classes[:, 0], logits.size(-1))
        ctx.save_for_backward(grad * (keep / keep.sum())[:, None])
        return ((sum_exp.log() - predicted) * keep).sum() / keep.sum()

    @staticmethod
    def backward(ctx, upstream):
        (grad,) = ctx.saved_tensors
        return grad * upstream, None


@style(ce(), "overwrites_input")
def in_place_softmax(logits, target):
    return VocabParallelCE.apply(logits, target)


class UnscaledHead(FusedHead):
    @staticmethod
    def backward(ctx, upstream):
        return *ctx.saved_tensors, None, None


@style(z(), "upstream_ignored", linear=True)
def gradient_not_scaled(hidden, weight, target):
    """The scale of fp16 and of gradient accumulation is lost."""
    return UnscaledHead.apply(hidden, weight, target, 1e-4)


@style(z(5e-5), "forward_backward_mismatch", meant=z(), also=("differs_from_expected",), expect=EXPECTED)
def square_without_its_two(logits, target):
    return CEWithZ.apply(logits, target, 1e-4, 1.0)


class Softcap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, cap):
        return cap * torch.tanh(logits / cap)

    @staticmethod
    def backward(ctx, upstream):
        return upstream, None


@style(None, "forward_backward_mismatch", meant=z(), softcap=15.0)
def softcap_without_its_derivative(logits, target):
    logits = Softcap.apply(logits, 15.0)
    return F.cross_entropy(logits, target) + z_mean(logits.logsumexp(-1), target)


@style(None, "forward_backward_mismatch", "detached_mu", meant=z(1e-2, 0.0, "centered"), expect=CENTERED)
def detached_mean(logits, target):
    with torch.no_grad():
        mu = logits.mean(-1)
    return F.cross_entropy(logits, target) + z_mean(logits.logsumexp(-1) - mu, target, 1e-2)


@style(None, "no_gradient", "unexplained_source", meant=z())
def rewrapped_without_gradient(logits, target):
    """As `rewrapped_with_gradient`, but nobody carries the gradient of the leaf back."""
    leaf = logits.detach().float().requires_grad_()
    return F.cross_entropy(leaf, target) + z_mean(leaf.logsumexp(-1), target)


@style(None, "low_precision_source", meant=z(1e-3))
def softmax_in_bf16(logits, target):
    """The copy that was to be fp32 is bf16, log Z and softmax too."""
    logits = logits.bfloat16()
    return F.cross_entropy(logits, target) + z_mean(logits.logsumexp(-1), target, 1e-3)


@style(None, "probabilities_not_logits", meant=z(1e-2))
def z_of_probabilities(logits, target):
    probs = logits.softmax(dim=-1)
    return F.cross_entropy(logits, target) + z_mean(probs.logsumexp(-1), target, 1e-2)


@style(z(), "overflow")
def exponentials_of_raw_logits(logits, target):
    log_z = torch.log(torch.exp(logits).sum(-1))
    return F.cross_entropy(logits, target) + z_mean(log_z, target)


@style(None, "padding_in_log_z", meant=z(), valid_vocab=50)
def padding_counts_in_z(logits, target):
    """CE leaves out the padding of the table, Z does not."""
    return F.cross_entropy(logits[..., :50], target) + z_mean(logits.logsumexp(-1), target)


@style(None, "other_ignore_index", "ignored_tokens_leak", meant=z())
def masks_minus_one_only(logits, target):
    """Written for labels of −1; those of −100 are clamped to class 0 and trained."""
    mask = (target != -1).float()
    log_z = logits.logsumexp(-1)
    nll = log_z - logits.gather(-1, target.clamp(min=0)[:, None])[:, 0]
    return ((nll + 1e-4 * log_z**2) * mask).sum() / mask.sum()


@style(None, "targets_moved", "shifted_twice", meant=z(shifted=True), shape="BT")
def shifted_twice(logits, labels):
    """The collator's shift was copied into the loss, which shifts already."""
    labels = F.pad(labels, (0, 1), value=-100)[..., 1:]
    logits, labels = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return F.cross_entropy(logits, labels) + z_mean(logits.logsumexp(-1), labels)


@style(None, "targets_moved", meant=z(shifted=True), shape="BT")
def rolled_across_sequences(logits, labels):
    """The last token of a sequence is trained on the first of the next."""
    logits, labels = logits.flatten(0, 1), labels.flatten().roll(-1)
    return F.cross_entropy(logits, labels) + z_mean(logits.logsumexp(-1), labels)


@style(None, "targets_moved", "pad_label_trained", meant=z(shifted=True), shape="BT")
def padded_with_class_zero(logits, labels):
    """F.pad's default: the last position of each sequence is trained on class 0."""
    labels = F.pad(labels, (0, 1))[..., 1:].reshape(-1)
    logits = logits.reshape(-1, logits.size(-1))
    return F.cross_entropy(logits, labels) + z_mean(logits.logsumexp(-1), labels)


@style(None, "differs_from_expected", "unexplained_source", meant=z(1e-2, 0.0, "centered"), expect=CENTERED)
def centered_over_tokens(logits, target):
    """The mean over the batch is taken, not that over the vocabulary."""
    log_z = (logits - logits.mean(dim=0)).logsumexp(-1)
    return F.cross_entropy(logits, target) + z_mean(log_z, target, 1e-2)


@style(ce(), "zero_gradient_z", "differs_from_expected", meant=z(), expect=EXPECTED)
def fp32_takes_the_path_without_z(logits, target):
    if logits.dtype == torch.float32:
        return F.cross_entropy(logits, target)  # "fused" path, not yet given its Z
    return F.cross_entropy(logits, target) + z_mean(logits.logsumexp(-1), target)


@style(None, "z_missing_on_tokens", "denominator_mismatch", "unexplained_source", meant=z(), shape="BT")
def z_of_the_first_sequence(logits, labels):
    """Tested with a batch of one."""
    loss = F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1))
    return loss + z_mean(logits[0].logsumexp(-1), labels[0])


@style(None, "size_dependent", meant=z())
def count_in_eight_bits(logits, target):
    keep = target != -100
    count = keep.sum(dtype=torch.uint8)  # 256 tokens are 0
    log_z = logits.logsumexp(-1)
    nll = F.cross_entropy(logits, target, reduction="none")
    return (nll + 1e-4 * (log_z**2).masked_fill(~keep, 0)).sum() / count.clamp(min=1)


@style(None, "z_of_part_of_vocabulary", "unexplained_source", meant=z(1e-3))
def z_of_the_top_logits(logits, target):
    """The sampler's top-k truncation is on while the loss is computed."""
    log_z = logits.topk(min(20, logits.size(-1)), dim=-1).values.logsumexp(-1)
    return F.cross_entropy(logits, target) + z_mean(log_z, target, 1e-3)


CALLS = itertools.count(1)


@style(None, "not_repeatable")
def schedule_by_calls(logits, target):
    """λ warms up, with restarts, by forward calls: evaluation, recomputation and accumulation advance it as well."""
    coef = 1e-2 * (next(CALLS) % 100) / 100
    return F.cross_entropy(logits, target) + z_mean(logits.logsumexp(-1), target, coef)
