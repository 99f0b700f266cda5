"""The report.json of an audit by its definitions: whole fp64 logits, autograd gradients, numpy quantiles.

Imports nothing from the package. `straight_audit`, `straight_gradients` and `straight_router` give plain dicts with the
keys of report.json; `differences` compares a report with them. Where a report cannot be compared key by key, because fp32
and fp64 may order two equal tokens differently, the dicts hold what is needed to check it: the value of every token for
a histogram, the score of every token for a table of extremes.

Axes: T tokens, N tokens of a block, V vocabulary, D width, E experts, L layers with a router.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

FP32, FP64 = 2e-4, 2e-11
"""Relative error that an audit in either precision may have in a number of these models."""
KEPT_IN_FP32 = 2e-5
"""Of the places in the plane, whose vectors are kept in fp32 by every audit."""
ROUNDED_OTHERWISE = 2e-3
"""Of the noise of 16-bit logits."""
LOGIT_ERROR = 3e-7
"""Error of an fp32 logit, relative to 1 + |z|."""
BINS, EXTREMES, CONTEXT, SAMPLE = 256, 20, 16, 5000


def load_fp64(folder: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # The grouped expert product has no fp64; the eager one does, and dense models ignore the choice.
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager")
    return model.eval(), AutoTokenizer.from_pretrained(folder)


def token_stream(tokenizer: Any, text: str, count: int) -> Tensor:
    return torch.tensor(tokenizer(text, add_special_tokens=False).input_ids[:count])


@dataclass(frozen=True)
class Values:
    """The value of every token in one histogram."""

    quantity: str
    coordinate: str
    values_T: np.ndarray


@dataclass(frozen=True)
class Ranking:
    """The score of every token, and the row that a table of extremes has to show for each."""

    quantity: str
    coordinate: str
    score_T: np.ndarray
    rows_T: list[dict[str, Any]]


class Rounded(float):
    """A number of 16-bit logits. In fp32 it may be anything from `low` to `high`: a logit next to the middle of two 16-bit
    numbers may be rounded to either."""

    low: float
    high: float


def conventions(model: Any) -> tuple[float, float | None]:
    """(scale, cap) in z = cap·tanh(s(Wu + b)/cap)."""
    config = model.config
    scale = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
    return scale, getattr(config, "final_logit_softcapping", None)


def straight_audit(
    model: Any,
    tokenizer: Any,
    ids: Tensor,
    *,
    size: int,
    bos: int | None,
    rows: int,
    coef: float = 1e-4,
    beta: float = 1e-2,
    planned_coef: float = 1e-4,
    planned_target: float | None = None,
) -> dict[str, Any]:
    """Everything but gradients and routers, from the model's own logits on all blocks of `ids`."""
    scale, cap = conventions(model)
    head = model.get_output_embeddings()
    weight = scale * head.weight.detach()[:rows]
    c, mean, blocks = math.log(rows), weight.mean(0), (len(ids) - 1) // size
    logits, hidden = [], list[Tensor]()
    handle = head.register_forward_pre_hook(lambda module, inputs: hidden.append(inputs[0][0, -size:]))
    for block in range(blocks):
        x = ids[block * size : (block + 1) * size]
        if bos is not None:
            x = torch.cat([torch.tensor([bos]), x])
        with torch.no_grad():
            logits.append(model(input_ids=x.unsqueeze(0), use_cache=False).logits[0, -size:, :rows])
    handle.remove()
    z = torch.cat(logits)
    has_mu = cap is None and bool(z.isfinite().all())
    y = ids[1 : blocks * size + 1]
    p, log_z, mu = z.softmax(1), z.logsumexp(1), z.mean(1)
    ce, norm = log_z - z.gather(1, y.unsqueeze(1)).squeeze(1), p.norm(dim=1)
    q = (p if cap is None else p * (1 - (z / cap) ** 2)) @ weight

    def side(z: Tensor, log_z: Tensor, q: Tensor, weight: Tensor) -> dict[str, Any]:
        """Columns of tokens and numbers of one coordinate."""
        _, sigma, directions = torch.linalg.svd(weight, full_matrices=False)
        violation, gain, energy = (log_z - c).abs(), q.norm(dim=1) / norm, sigma.square()
        delta_z = 2 * coef * violation * norm
        delta_u = 2 * coef * violation * q.norm(dim=1)
        rank16 = (q @ directions[:16].T).square().sum(1) / norm**2
        shift, row_max = z.mean(1), z.amax(1)
        numbers = {
            "diag_z": float(coef * violation.square().mean()),
            "p_z_999": quantile(violation, 0.999),
            "a_p_mean": float(gain.mean()),
            "a_p_99": quantile(gain, 0.99),
            "log_z_mean": float(log_z.mean()),
            "mu_abs_99": quantile(shift.abs(), 0.99) if has_mu else None,
            "mu_rms": float(shift.square().mean().sqrt()) if has_mu else None,
            "delta_u_99": quantile(delta_u, 0.99),
            "delta_u_99_gain_aware": quantile(delta_u / (1 + beta * gain**2), 0.99),
            "row_max_999": quantile(row_max, 0.999),
            "sigma_1": float(sigma[0]),
            "e_1": float(energy[0] / energy.sum()),
            "e_16": float(energy[:16].sum() / energy.sum()),
            "f_16": float((rank16 / gain**2).mean()),
            "rho_16": float(torch.corrcoef(torch.stack([rank16, gain**2]))[0, 1]),
        }
        tokens = {"violation": violation, "gain": gain, "shift": shift.abs(), "delta_u": delta_u}
        panels = {"a2": gain**2, "rank16": rank16, "delta_z": delta_z, "delta_u": delta_u}
        return {"numbers": numbers, "sigma": sigma.tolist(), "tokens": tokens, "panels": panels}

    found = {"raw": side(z, log_z, q, weight)}
    if has_mu:
        found["centered"] = side(z - mu[:, None], log_z - mu, q - mean, weight - mean)
    shown = {
        "log_z": log_z,
        "log_z_centered": log_z - mu if has_mu else None,
        "mu": mu if has_mu else None,
        "gain": found["raw"]["tokens"]["gain"],
        "gain_centered": found["centered"]["tokens"]["gain"] if has_mu else None,
        "ce": ce,
    }
    listed = {name: [None] * len(y) if column is None else column.tolist() for name, column in shown.items()}
    rows_T = [
        {
            "block": index // size,
            "position": index % size,
            "target": tokenizer.decode([int(y[index])]),
            "context": tokenizer.decode(ids[max(index - index % size, index + 1 - CONTEXT) : index + 1].tolist()),
            **{name: column[index] for name, column in listed.items()},
        }
        for index in range(len(y))
    ]
    missing = dict.fromkeys(found["raw"]["numbers"])
    kept = sampled(len(y))
    heads = {name: found[name]["numbers"] if name in found else missing for name in ("raw", "centered")}
    return {
        "schema": "zloss.audit/1",
        "model": {
            "vocab": head.weight.shape[0],
            "width": head.weight.shape[1],
            "tied": model.get_input_embeddings().weight is head.weight,
            "bias": getattr(head, "bias", None) is not None,
            "logit_scale": scale,
            "softcap": cap,
            "valid_vocab": rows,
            "rows_beyond_tokenizer": head.weight.shape[0] - len(tokenizer),
            "class": type(model).__name__,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
        },
        "corpus": {"blocks": blocks, "block_size": size, "predictions": len(y), "bos": bos is not None, "offset": 0},
        "ppl": float(ce.mean().exp()),
        "mu_abs_99": heads["raw"]["mu_abs_99"],
        "heads": heads,
        "diag_coef": coef,
        "gain_beta": beta,
        "target": c,
        "precision": {name: spacing(numbers["row_max_999"]) for name, numbers in heads.items()},
        "logit_noise": straight_noise(
            head, scale, z, torch.cat(hidden), y, rows=rows, size=size, blocks=blocks, centered=has_mu, cap=cap
        ),
        "planned": {
            "coef": planned_coef,
            "target": c if planned_target is None else planned_target,
            "logits": "bf16",
            "delta_u_99": quantile(
                2 * planned_coef * (log_z - (c if planned_target is None else planned_target)).abs() * q.norm(dim=1),
                0.99,
            ),
            "delta_u_ce_99": quantile((q - capped_rows(weight, y, z, cap)).norm(dim=1), 0.99),
            "router_coef": None,
            "router_convention": None,
            "router_share": None,
        },
        "nonfinite": {"nan": int(log_z.isnan().sum()), "inf": int(log_z.isinf().sum())},
        "quantile_bounds": {},
        "status": "complete",
        "finished_blocks": blocks,
        "figures": {
            "histograms": [
                Values(quantity, name, values.numpy())
                for name, each in found.items()
                for quantity, values in each["tokens"].items()
                # Centered logits have no shift.
                if quantity != "shift" or (name == "raw" and has_mu)
            ],
            "spectrum": {
                **{name: found[name]["sigma"] if name in found else [] for name in ("raw", "centered")},
                "method": "exact",
            },
            "geometry": {
                **plane(q[kept], mean, drawn=tuple(found) if cap is None else ()),
                **{
                    f"{panel}_{name}": found[name]["panels"][panel][kept].tolist() if name in found else []
                    for name in ("raw", "centered")
                    for panel in ("a2", "rank16", "delta_z", "delta_u")
                },
                "mean_row_norm": float(mean.norm()),
                "drawn_from": len(y),
            },
        },
        "extreme_tokens": [
            Ranking(quantity, name, each["tokens"][quantity].numpy(), rows_T)
            for quantity in ("violation", "gain")
            for name, each in found.items()
        ],
    }


def capped_rows(weight: Tensor, y: Tensor, z: Tensor, cap: float | None) -> Tensor:
    """The row of the target, times the slope of the cap there."""
    if cap is None:
        return weight[y]
    return weight[y] * (1 - (z.gather(1, y.unsqueeze(1)) / cap) ** 2)


def straight_noise(
    head: Any,
    scale: float,
    z: Tensor,
    hidden: Tensor,
    y: Tensor,
    *,
    rows: int,
    size: int,
    blocks: int,
    centered: bool,
    cap: float | None,
) -> dict[str, Any]:
    """δ = log p16 − log p in fp64 of the first blocks; the centered head is rounded to fp32, as these models are saved."""
    weight = head.weight.detach()[:rows]
    bias = torch.zeros(rows, dtype=z.dtype) if getattr(head, "bias", None) is None else head.bias.detach()[:rows]
    heads = {"raw": (weight, bias)}
    if centered:
        heads["centered"] = tuple((part - part.mean(0)).float().double() for part in (weight, bias))
    tokens = {"storage": min(8, blocks) * size, "product": min(2, blocks) * size, "operands": min(2, blocks) * size}
    formats = {"bf16": torch.bfloat16, "fp16": torch.float16}

    def capped(logits: Tensor) -> Tensor:
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def logits(side: str) -> Tensor:
        w, b = heads[side]
        return capped(scale * (hidden @ w.T + b)) if side == "centered" else z

    def stored(case: str, side: str, dtype: torch.dtype) -> Tensor:
        w, b = heads[side]
        if case == "storage":
            return logits(side).to(dtype).double()
        product = scale * (hidden.to(dtype).double() @ w.to(dtype).double().T + b.to(dtype).double())
        return capped(product) if case == "operands" else capped(product.to(dtype).double()).to(dtype).double()

    found = []
    for form, case, side in itertools.product(formats, tokens, ("raw", "centered", "softcapped")):
        if side in heads:
            found.append(noise_row(form, case, side, z, stored(case, side, formats[form]), y, tokens[case], size))
        if (case, side, cap) == ("storage", "softcapped", None):
            soft = 30 * torch.tanh(z / 30)
            found.append(
                noise_row(form, case, "softcapped", soft, soft.to(formats[form]).double(), y, tokens[case], size)
            )
    rms = {}
    for row in found:
        if row["case"] == "storage" and row["head"] in heads:
            bounds = rms_bounds(z, logits(row["head"]), y, tokens["storage"], formats[row["format"]])
            rms[row["format"], row["head"]] = either = Rounded(row["gap"]["rms"])
            either.low, either.high = bounds
    numbers = {name: {side: rms.get((name, side)) for side in ("raw", "centered")} for name in formats}
    return {"tokens": tokens["storage"], "saved_dtype": "float32", **numbers, "rows": found}


def rms_bounds(exact: Tensor, logits: Tensor, y: Tensor, tokens: int, dtype: torch.dtype) -> tuple[float, float]:
    """The least and the largest RMS of δ where logits are off by the error of fp32 before they are rounded."""
    exact, logits, y = exact[:tokens], logits[:tokens], y[:tokens].unsqueeze(1)
    error = LOGIT_ERROR * (1 + logits.abs()).masked_fill(logits.isinf(), 0)
    ends = [(logits + sign * error).to(dtype).double() for sign in (-1, 1)]
    log_p = exact.log_softmax(1).gather(1, y)
    either = [z.gather(1, y) - norm.logsumexp(1, keepdim=True) - log_p for z in ends for norm in ends]
    squares = torch.cat(either, dim=1).square()
    return float(squares.amin(1).mean().sqrt()), float(squares.amax(1).mean().sqrt())


def noise_row(
    form: str, case: str, side: str, exact: Tensor, stored: Tensor, y: Tensor, tokens: int, size: int
) -> dict[str, Any]:
    exact, stored, y = exact[:tokens], stored[:tokens], y[:tokens]
    p, delta_all = exact.softmax(1), stored.log_softmax(1) - exact.log_softmax(1)
    delta = delta_all.gather(1, y.unsqueeze(1)).squeeze(1)
    ratio = delta.exp()
    outside = {
        name: float(((ratio < low) | (ratio > high)).double().mean())
        for name, low, high in (("outside_tight", 0.999, 1.002), ("outside_1", 0.99, 1.01), ("outside_5", 0.95, 1.05))
    }
    gap = {
        "tokens": tokens, "nonfinite": 0, "rms": float(delta.square().mean().sqrt()), "p99_abs": quantile(delta.abs(), 0.99),
        "mean": float(delta.mean()), "mean_se": float(delta.std() / math.sqrt(tokens)), **outside,
        "sequence_tokens": [size] * (tokens // size), "sequence_sums": delta.view(-1, size).sum(1).tolist(),
    }  # fmt: skip
    on_policy = float((p * delta_all**2).sum(1).mean().sqrt())
    kl = float((p * (exact.log_softmax(1) - stored.log_softmax(1))).sum(1).mean())
    return {"format": form, "case": case, "head": side, "gap": gap, "on_policy_rms": on_policy, "kl": kl}


def quantile(values: Tensor, q: float) -> float:
    return float(np.quantile(values.numpy(), q))


def spacing(value: float | None) -> dict[str, float | None]:
    """Distance from `value` to the next float of either format."""

    def gap(dtype: torch.dtype) -> float | None:
        if value is None:
            return None
        # Away from zero from the representable number below, so that rounding up to a power of two does not count.
        here = torch.tensor(value, dtype=dtype)
        below = here if float(here) <= value else torch.nextafter(here, torch.tensor(-math.inf, dtype=dtype))
        return float(torch.nextafter(below, torch.tensor(math.inf, dtype=dtype)).double() - below.double())

    return {"row_max_999": value, "bf16_spacing": gap(torch.bfloat16), "fp16_spacing": gap(torch.float16)}


def sampled(count: int) -> list[int]:
    """The tokens that the panels draw: those whose index has the smallest outputs of SplitMix64 started at 0."""

    def key(index: int) -> int:
        x = (index + 1) * 0x9E3779B97F4A7C15 % 2**64
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    return sorted(sorted(range(count), key=key)[:SAMPLE])


def plane(q: Tensor, mean: Tensor, *, drawn: tuple[str, ...]) -> dict[str, list[float]]:
    """Places of Wᵀp and of Wᵀp − w̄ along w̄, and along the widest direction of the cloud that is orthogonal to w̄."""
    first = mean / mean.norm()
    rest = (q - q.mean(0)) @ (torch.eye(len(mean), dtype=mean.dtype) - torch.outer(first, first))
    second = torch.linalg.svd(rest, full_matrices=False)[2][0]
    second = second * second[second.abs().argmax()].sign()
    clouds = {"raw": q, "centered": q - mean}
    return {
        f"{axis}_{name}": (cloud @ direction).tolist() if name in drawn else []
        for name, cloud in clouds.items()
        for axis, direction in (("x", first), ("y", second))
    }


def straight_gradients(
    model: Any,
    ids: Tensor,
    *,
    size: int,
    blocks: int,
    bos: int | None,
    rows: int,
    coef: float = 1e-4,
    budget: float = 0.05,
    planned_coef: float = 1e-4,
    planned_target: float | None = None,
) -> dict[str, Any]:
    """`gradient`, `tied_paths`, `lambda_budget` and the shares of `planned` by autograd on untied copies of the head."""
    (scale, cap), c = conventions(model), math.log(rows)
    head, table = model.get_output_embeddings(), model.get_input_embeddings().weight
    tied = table is head.weight
    caught: list[Tensor] = []
    handle = head.register_forward_pre_hook(lambda module, inputs: caught.append(inputs[0]))
    x, y = ids[: blocks * size].view(blocks, size), ids[1 : blocks * size + 1]
    if bos is not None:
        x = torch.cat([torch.full((blocks, 1), bos), x], dim=1)
    has_mu = cap is None and (getattr(head, "bias", None) is None or bool(head.bias[:rows].isfinite().all()))
    coordinates = ("raw", "centered") if has_mu else ("raw",)
    gradients = {}
    for kind in ("ce", *coordinates, "planned"):
        model.zero_grad(set_to_none=True)
        caught.clear()
        model(input_ids=x, use_cache=False)
        output = nn.Parameter(head.weight.detach().clone())
        bias = 0 if getattr(head, "bias", None) is None else head.bias[:rows]
        z = scale * (caught[0][:, -size:].reshape(-1, output.shape[1]) @ output[:rows].T + bias)
        z = z if cap is None else cap * torch.tanh(z / cap)
        log_z = z.logsumexp(1)
        loss = {
            "ce": nn.functional.cross_entropy(z, y),
            "raw": (coef * (log_z - c) ** 2).mean(),
            "centered": (coef * (log_z - z.mean(1) - c) ** 2).mean(),
            "planned": (planned_coef * (log_z - (c if planned_target is None else planned_target)) ** 2).mean(),
        }[kind]
        loss.backward()
        inside = table.grad.clone() if tied else torch.zeros_like(output)
        body = [
            p.grad.clone().flatten() for p in model.parameters() if p.grad is not None and not (tied and p is table)
        ]
        gradients[kind] = (output.grad, inside, torch.cat(body))
    handle.remove()

    def cosine(a: Tensor, b: Tensor) -> float:
        return float((a * b).sum() / (a.norm() * b.norm()))

    whole = {kind: out + inside for kind, (out, inside, _) in gradients.items()}
    model_wide = {kind: torch.cat([whole[kind].flatten(), body]) for kind, (_, _, body) in gradients.items()}
    numbers: dict[str, Any] = {"centered": {"r_z": None, "c_z": None}}
    paths: dict[str, Any] = {"centered": dict.fromkeys(("output_norm", "input_norm", "cosine"))}
    norms = {
        "ce": float(whole["ce"].norm()),
        "z": float(whole["raw"].norm()),
        "ce_model": float(model_wide["ce"].norm()),
        "z_model": float(model_wide["raw"].norm()),
    }
    if has_mu:
        norms["centered_z"] = float(whole["centered"].norm())
    for kind in coordinates:
        out, inside, _ = gradients[kind]
        numbers[kind] = {
            "r_z": float(whole[kind].norm() / whole["ce"].norm()),
            "c_z": cosine(whole[kind], whole["ce"]),
        }
        paths[kind] = {"output_norm": float(out.norm()), "input_norm": float(inside.norm())}
        paths[kind]["cosine"] = cosine(out, inside) if tied else None
    numbers["whole_model"] = {
        "r_z": float(model_wide["raw"].norm() / model_wide["ce"].norm()),
        "c_z": cosine(model_wide["raw"], model_wide["ce"]),
    }
    settings = {"coef": coef, "blocks": blocks, "scope": "output_head", "reduction": "mean"}
    # R_Z is linear in λ.
    solved = {key: None if each["r_z"] is None else coef * budget / each["r_z"] for key, each in numbers.items()}
    return {
        "gradient": {**settings, **numbers, "norms": norms},
        "tied_paths": paths if tied else None,
        "lambda_budget": {"r_z": budget, **solved},
        "planned": {
            "r_z": float(whole["planned"].norm() / whole["ce"].norm()),
            "r_z_model": float(model_wide["planned"].norm() / model_wide["ce"].norm()),
            "input_path": float(gradients["planned"][1].norm() / whole["ce"].norm()) if tied else None,
            "tokens": len(y),
        },
    }


def straight_router(model: Any, ids: Tensor, *, size: int, blocks: int, coef: float = 1e-3) -> dict[str, Any]:
    """`router` from the router logits that the model itself returns; None for a dense model."""
    gates = {name: module for name, module in model.named_modules() if name.endswith(".gate")}
    if not gates:
        return {"router": None}
    experts, top_k = model.config.num_local_experts, model.config.num_experts_per_tok
    with torch.no_grad():
        x = ids[: blocks * size].view(blocks, size)
        layers = model(input_ids=x, use_cache=False, output_router_logits=True).router_logits
    c, log_z, entropy, correction, load_cv, per_layer = math.log(experts), [], [], [], [], []
    for (name, gate), r in zip(gates.items(), layers, strict=True):
        p = r.softmax(1)
        log_z.append(r.logsumexp(1))
        entropy.append(-(p * p.log()).sum(1))
        source = 2 * coef * (log_z[-1] - c).abs() / (len(layers) * len(r))
        correction.append(source * (p @ gate.weight.detach()).norm(dim=1))
        load = torch.bincount(r.topk(top_k, dim=1).indices.flatten(), minlength=experts).double()
        load_cv.append(float(load.std(correction=0) / load.mean()))
        numbers = {"log_z_mean": float(log_z[-1].mean()), "entropy": float(entropy[-1].mean()), "load_cv": load_cv[-1]}
        per_layer.append({"name": name, **numbers})

    def tail(values: Tensor) -> dict[str, float]:
        return {
            "mean": float(values.mean()),
            **{name: quantile(values, q) for name, q in (("p50", 0.5), ("p99", 0.99), ("p999", 0.999))},
        }

    decisions = len(layers) * blocks * size
    found = {
        "scoring": "softmax",
        "softmax_normalizer": True,
        "layers": len(layers),
        "model_layers": model.config.num_hidden_layers,
        "experts": experts,
        "top_k": top_k,
        "decisions": decisions,
        "nonfinite": 0,
        "coef": coef,
        "coef_origin": "hypothetical",
        "coef_key": None,
        "convention": "token_layer_mean",
        "target": c,
        "absolute": coef / decisions,
        "relative": 1.0,
        "log_z": tail(torch.cat(log_z)),
        "violation": tail((torch.cat(log_z) - c).abs()),
        "entropy": float(torch.cat(entropy).mean()),
        "load_cv": sum(load_cv) / len(load_cv),
        "correction_norm": float(torch.cat(correction).mean()),
        "per_layer": per_layer,
        "applied": None,
    }
    return {"router": found}


def differences(report: Any, truth: Any, path: str = "", *, tolerance: float = FP32) -> Iterator[str]:
    """A sentence for every part of `report` that is not what `truth` says; keys that only the report has are ignored.

    In fp32 a logit next to the middle of two 16-bit numbers may be rounded to the other one, which moves sums that are near 0:
    the rows of `logit_noise` are compared in fp64 only.
    """
    if path == "logit_noise.rows" and tolerance == FP32:
        return
    if isinstance(truth, dict):
        for key, value in truth.items():
            inner = f"{path}.{key}" if path else key
            if not isinstance(report, dict) or key not in report:
                yield f"{inner} is missing"
            else:
                yield from differences(report[key], value, inner, tolerance=tolerance)
    elif isinstance(truth, Values):
        yield from (f"{path}: {reason}" for reason in histogram_differences(report, truth, tolerance))
    elif isinstance(truth, Ranking):
        yield from (f"{path}: {reason}" for reason in ranking_differences(report, truth, tolerance))
    elif isinstance(truth, list):
        if not isinstance(report, list) or len(report) != len(truth):
            yield f"{path}: {len(truth)} entries expected"
        elif truth and isinstance(truth[0], float):
            # Near zero an entry is the difference of large numbers, and its error is one of the whole column.
            close = max(tolerance, KEPT_IN_FP32) if path.rpartition(".")[2][:2] in ("x_", "y_") else tolerance
            if path.startswith("logit_noise"):
                close = 1e-6
            if not np.allclose(report, truth, rtol=close, atol=close / 20 * max(map(abs, truth))):
                yield f"{path}: {report[:3]}… instead of {truth[:3]}…"
        else:
            for index, (got, want) in enumerate(zip(report, truth, strict=True)):
                yield from differences(got, want, f"{path}.{index}", tolerance=tolerance)
    elif not same(report, truth, path, tolerance):
        yield f"{path}: {report} instead of {truth}"


def same(got: Any, want: Any, path: str, tolerance: float) -> bool:
    """Whether one number is right within `tolerance`, and anything else exactly."""
    if not isinstance(want, float) or isinstance(got, bool) or not isinstance(got, int | float):
        return type(got) is type(want) and bool(got == want)
    if path in ("heads.centered.mu_abs_99", "heads.centered.mu_rms"):
        return 0 <= got < tolerance / 20  # the rounding that centering leaves
    if path.startswith("logit_noise"):
        if isinstance(want, Rounded) and tolerance == FP32:
            return want.low * (1 - ROUNDED_OTHERWISE) <= got <= want.high * (1 + ROUNDED_OTHERWISE)
        tolerance = ROUNDED_OTHERWISE if tolerance == FP32 else 1e-6
        if path.endswith(".kl"):  # here a difference of large numbers
            return math.isclose(got, want, rel_tol=tolerance, abs_tol=1e-15)
    if path.startswith("planned"):
        # Norms inside these models compute in fp32, and the audit scales a gradient that was computed at another λ.
        tolerance = max(tolerance, 1e-7)
    return math.isclose(got, want, rel_tol=tolerance / 20 if path == "ppl" else tolerance)


def histogram_differences(drawn: Any, truth: Values, tolerance: float) -> Iterator[str]:
    """Bins of the smallest power-of-two width that needs at most 256 of them, and the tokens in each."""
    if (drawn["quantity"], drawn["coordinate"]) != (truth.quantity, truth.coordinate):
        yield f"{drawn['quantity']} {drawn['coordinate']} instead of {truth.quantity} {truth.coordinate}"
        return
    edges, counts, values = np.array(drawn["edges"]), np.array(drawn["counts"]), truth.values_T
    width = edges[1] - edges[0]
    if len(edges) != len(counts) + 1 or np.ptp(np.diff(edges)) or math.frexp(width)[0] != 0.5 or edges[0] % width:
        yield "the edges are not multiples of a power of two"
    slack = tolerance / 10 * np.abs(values).max()
    low, high = values.min(), values.max()
    if not (edges[0] - slack <= low < edges[1] + slack and edges[-2] - slack <= high < edges[-1] + slack):
        yield f"bins from {edges[0]} to {edges[-1]} for values from {low} to {high}"
    finer = math.floor((high - slack) / (width / 2)) - math.floor((low + slack) / (width / 2)) + 1
    if len(counts) > BINS or finer < BINS:
        yield f"{len(counts)} bins are not the finest that fit {BINS}"
    if counts.sum() != len(values) or (counts < 0).any():
        yield f"{counts.sum()} tokens instead of {len(values)}"
    below, ascending = np.concatenate([[0], counts.cumsum()]), np.sort(values)
    fewest, most = np.searchsorted(ascending, edges - slack), np.searchsorted(ascending, edges + slack)
    if not ((fewest <= below) & (below <= most)).all():
        yield "tokens are counted in the wrong bins"


def ranking_differences(table: Any, truth: Ranking, tolerance: float) -> Iterator[str]:
    """The tokens with the largest scores, largest first, each with its own values; equal scores may swap places."""
    if (table["quantity"], table["coordinate"]) != (truth.quantity, truth.coordinate):
        yield f"{table['quantity']} {table['coordinate']} instead of {truth.quantity} {truth.coordinate}"
        return
    best = np.sort(truth.score_T)[::-1][:EXTREMES]
    places = {(row["block"], row["position"]): index for index, row in enumerate(truth.rows_T)}
    found = [places.get((token["block"], token["position"])) for token in table["tokens"]]
    if len(found) != EXTREMES or len(set(found)) != EXTREMES or None in found:
        yield f"{len(set(found))} different tokens of the text instead of {EXTREMES}"
        return
    for rank, (index, token) in enumerate(zip(found, table["tokens"], strict=True)):
        assert index is not None
        if not math.isclose(truth.score_T[index], best[rank], rel_tol=tolerance / 10):
            yield f"token {rank} has a score of {truth.score_T[index]}, but the {rank}-th largest is {best[rank]}"
        yield from differences(token, truth.rows_T[index], f"tokens.{rank}", tolerance=tolerance)


def leaves(part: Any, path: str = "") -> Iterator[str]:
    """Dotted paths of all values of a report or of its truth; a list of numbers is one value, "*" any entry of others."""
    if isinstance(part, dict):
        for key, value in part.items():
            yield from leaves(value, f"{path}.{key}" if path else key)
    elif isinstance(part, list) and part and not isinstance(part[0], str | int | float):
        for value in part:
            yield from leaves(value, f"{path}.*")
    elif isinstance(part, Values):
        yield from (f"{path}.{key}" for key in ("quantity", "coordinate", "edges", "counts"))
    elif isinstance(part, Ranking):
        yield from (f"{path}.{key}" for key in ("quantity", "coordinate"))
        yield from (f"{path}.tokens.*.{key}" for key in part.rows_T[0])
    else:
        yield path
