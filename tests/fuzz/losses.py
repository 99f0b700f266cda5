"""Random calls of the public losses: valid ones against autograd in fp64, and ones with an argument of a foreign type.

A valid call has the value and the gradients of the dense definition. A call with a foreign argument works or raises an error
of `zloss.errors`; nothing else.
"""

from __future__ import annotations

import math
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import zloss
from tests.fuzz.contract import BrokenContractError
from tests.laws.definitions import Case, measured, reference
from zloss.errors import ZlossError


def case(random: Random, folder: Path) -> None:
    """One valid call in two, one call with foreign arguments otherwise."""
    (_valid_call if random.random() < 0.5 else _foreign_call)(random)


def _valid_call(random: Random) -> None:
    """A head loss of random shape, options and objective against its definition in fp64."""
    tokens, width, vocab = random.randrange(1, 40), random.randrange(1, 24), random.randrange(2, 300)
    dtype = random.choice((torch.float64, torch.float32, torch.float32, torch.bfloat16))
    valid_vocab = random.choice((None, None, random.randrange(1, vocab + 1)))
    softcap = random.choice((None, None, None, 5.0))
    smoothing = random.choice((0.0, 0.0, 0.1)) if softcap is None else 0.0
    objective = _objective(random, softcap)
    scale, reduction = random.choice((1.0, 0.3, -2.0)), random.choice(("mean", "sum", "none"))
    size = random.choice((0.1, 1.0, 5.0))
    hidden, weight = (size * torch.randn(tokens, width)).to(dtype), torch.randn(vocab, width).to(dtype)
    bias = torch.randn(vocab).to(dtype) if random.random() < 0.4 else None
    target = torch.randint(valid_vocab or vocab, (tokens,))
    target[torch.rand(tokens) < random.choice((0.0, 0.3, 1.0))] = -100
    options: dict[str, Any] = {"valid_vocab": valid_vocab, "softcap": softcap, "label_smoothing": smoothing}
    options |= {"token_weight": torch.rand(tokens) if random.random() < 0.3 else None}
    options |= {"logit_scale": scale, "reduction": reduction}
    backend = random.choice(("auto", "dense", "chunked"))
    chunk = random.choice((None, 1, 7)) if backend != "dense" else None
    case = Case(hidden, weight, target, objective, bias, **options)
    said = f"{objective}, T {tokens}, D {width}, V {vocab}, {dtype}, {options}, {backend}, chunk {chunk}"
    got, wanted = measured(case, backend, chunk), reference(case)
    _check_close("loss", got["loss"], wanted["loss"], 1e-9 if dtype == torch.float64 else 2e-4, said)
    # bf16 gradients are rounded once, to 8 bits; the sums inside are in fp32.
    tolerance = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 2e-2}[dtype]
    # Each gradient is a sum of these; with one class it is zero, and has the rounding of their products with 1 − 1.
    summed = {"hidden.grad": float(weight.norm()), "weight.grad": float(hidden.norm()), "bias.grad": tokens**0.5}
    for name in summed.keys() & got.keys():
        _check_close(name, got[name], wanted[name], tolerance, said, summed[name])


def _objective(random: Random, softcap: float | None) -> Any:
    coef, target = random.choice((None, 0.0, 1e-4, 0.1)), random.choice((None, 0.0, 2.5))
    made: list[Any] = [zloss.CrossEntropy(), zloss.StandardZLoss(coef, target)]
    if softcap is None:
        made += [zloss.CenteredHead(), zloss.CenteredZLoss(coef, target), zloss.FactorizedZLoss(coef, 1e-2)]
    return random.choice(made)


def _check_close(name: str, got: Tensor, want: Tensor, tolerance: float, said: str, whole: float = 1.0) -> None:
    if got.shape != want.shape:
        raise BrokenContractError(f"{name} has shape {list(got.shape)}, not {list(want.shape)}: {said}")
    got, want = got.detach().double(), want.detach()
    error, size = float((got - want).norm()), float(want.norm())
    # What is zero by cancellation has the rounding of what cancels, which is of the size `whole`.
    if not error <= tolerance * max(size, 1e-2 * max(whole, 1.0)):
        raise BrokenContractError(f"{name} is off by {error:.3g} of {size:.3g}: {said}")


def _foreign_call(random: Random) -> None:
    """A sound call of one public function in which one or two arguments are foreign."""
    function, arguments = random.choice(_sound_calls())
    names = random.sample(sorted(arguments), k=min(len(arguments), random.choice((1, 1, 2))))
    changed = arguments | {name: _foreign(random, arguments[name]) for name in names}
    said = f"{function.__name__}({', '.join(f'{name}={_short(changed[name])}' for name in names)})"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out = function(**changed)
            loss = getattr(out, "loss", None)
            if isinstance(loss, Tensor) and loss.requires_grad:
                loss.sum().backward()
    except ZlossError:
        return
    except Exception as error:
        raise BrokenContractError(f"{said} raised a foreign error\n{traceback.format_exc()}") from error


def _sound_calls() -> list[tuple[Callable[..., Any], dict[str, Any]]]:
    """(function, keyword arguments) of every public loss and what goes with it."""
    hidden, weight = torch.randn(6, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    logits, target = torch.randn(6, 9, requires_grad=True), torch.randint(9, (6,))
    shared: dict[str, Any] = {
        "objective": zloss.StandardZLoss(1e-4), "ignore_index": -100, "reduction": "mean", "normalizer": 3.0,
        "token_weight": torch.rand(6), "valid_vocab": 9, "logit_scale": 1.0, "softcap": None, "label_smoothing": 0.0,
        "backend": "chunked", "products": "auto", "chunk_size": 2, "memory_budget": 10**6,
    }  # fmt: skip
    head = {"hidden": hidden, "weight": weight, "target": target, "bias": torch.randn(9)} | shared
    router = {
        "router_logits": torch.randn(2, 5, 4, requires_grad=True), "coef": 1e-3, "convention": "megatron", "top_k": 2,
        "target": 0.0, "mask": torch.ones(5, dtype=torch.bool), "weight": torch.randn(2, 4, 3), "capacity": 4,
        "normalizer": 5.0,
    }  # fmt: skip
    scale = {"layers": 2, "tokens": 8, "top_k": 2, "coef": 1e-3, "micro_batches": 1, "valid_tokens": 5}
    match = {"coef": 1e-3, "source": "megatron", "target": "olmoe", "layers": 4, "top_k": 2, "tokens": 4}
    return [
        (zloss.head_loss, head | {"statistics": "full"}),
        (zloss.head_source, head | {"part": "z"}),
        (zloss.logits_loss, {"logits": logits, "target": target, "weight": weight, "statistics": "full"} | shared),
        (_module_call, {"hidden": hidden, "weight": weight, "target": target, "bias": torch.randn(9)}),
        (zloss.router_loss, router),
        (zloss.router_scale, scale | {"convention": "olmoe"}),
        (zloss.match_coefficient, match),
        (zloss.z_loss_source, {"logits": logits, "coef": 1e-4, "target": 0.0, "reduction": "mean"}),
        (
            zloss.centered_logits_from_raw,
            {"raw_logits": logits, "hidden": hidden, "weight": weight, "bias": torch.randn(9)},
        ),
        (zloss.StandardZLoss, {"coef": 1e-4, "target": 0.0}),
        (zloss.CenteredZLoss, {"coef": 1e-4, "target": 0.0}),
        (zloss.GainAwareZLoss, {"coef": 1e-4, "beta": 1e-2, "target": 0.0}),
        (zloss.FactorizedZLoss, {"shift_coef": 1e-4, "relative_coef": 1e-4, "shift_target": 0.0}),
        (zloss.make_objective, {"name": "standard", "coef": 1e-4}),
        (zloss.explain, {"objective": zloss.StandardZLoss(1e-4), "vocab": 9}),
        (zloss.center_head_, {"linear": nn.Linear(4, 9), "model": None, "valid_vocab": 9}),
        (zloss.shift_head_, {"linear": nn.Linear(4, 9), "shift": torch.randn(4), "valid_vocab": 9}),
    ]


def _module_call(**arguments: Any) -> Any:
    return zloss.HeadLoss(zloss.CenteredZLoss(1e-4))(**arguments)


def _foreign(random: Random, sound: Any) -> Any:
    """A value of another type, layout, dtype or shape than the sound one."""
    plain: list[Any] = [None, "x", "", b"x", 0, -1, 1.5, math.nan, math.inf, -math.inf, True, [], {}, (1, 2), object()]
    plain += [np.float32(1.5), np.int64(2), np.float64(0.5), np.bool_(True), np.ones(3), 10**400, 1 + 2j, len, int]
    tensors: list[Any] = [torch.tensor(1.0), torch.tensor(2), torch.empty(0), torch.randn(3), torch.randn(2, 3, 4)]
    if isinstance(sound, Tensor):
        tensors += _odd_tensors(sound.detach()) * 2
    return random.choice(tensors + plain)


def _odd_tensors(sound: Tensor) -> list[Any]:
    """The same values in another layout or dtype, or on the meta device."""
    made: list[Any] = [sound.numpy(), sound.tolist(), sound.to("meta"), sound.to(torch.complex64), sound.bool()]
    made += [sound.to(torch.int32), sound.float(), sound.unsqueeze(0), sound[:0]]
    made.append(sound.T if sound.dim() == 2 else sound)
    if sound.dim() and sound.is_floating_point():
        made += [sound.to_sparse(), torch.quantize_per_tensor(sound, 0.1, 0, torch.qint8)]
        made.append(sound.to(torch.float8_e4m3fn))
        made.append(torch.nested.nested_tensor(list(sound)))
        made.append(sound.to_sparse_csr() if sound.dim() == 2 else sound)
    with torch.inference_mode():
        made.append(sound.clone())
    made.append(nn.Parameter(sound) if sound.is_floating_point() else sound)
    return made


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"<{value.layout}, {value.dtype}, {tuple(value.shape) if not value.is_nested else 'nested'}>"
    return repr(value)[:60]
