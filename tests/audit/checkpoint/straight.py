"""An audit by its definitions: whole fp64 logits, autograd gradients, numpy-style quantiles. Shares no code with the product."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


def load_fp64(folder: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # The grouped expert product has no fp64; the eager one does, and dense models ignore the choice.
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager")
    return model.eval(), AutoTokenizer.from_pretrained(folder)


def token_stream(tokenizer: Any, text: str, count: int) -> Tensor:
    return torch.tensor(tokenizer(text, add_special_tokens=False).input_ids[:count])


def straight_audit(
    model: Any, ids: Tensor, *, size: int, bos: int | None, rows: int, coef: float = 1e-4
) -> dict[str, Any]:
    """Numbers of every token from the model's own logits, for all blocks of `ids`."""
    config = model.config
    scale = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
    cap = getattr(config, "final_logit_softcapping", None)
    weight = scale * model.get_output_embeddings().weight.detach()[:rows]
    c, mean = math.log(rows), weight.mean(0)
    columns: list[dict[str, Tensor]] = []
    for block in range((len(ids) - 1) // size):
        x, y = ids[block * size : (block + 1) * size], ids[block * size + 1 : (block + 1) * size + 1]
        if bos is not None:
            x = torch.cat([torch.tensor([bos]), x])
        with torch.no_grad():
            z = model(input_ids=x.unsqueeze(0), use_cache=False).logits[0, -size:, :rows]
        p = z.softmax(-1)
        slope = 1.0 if cap is None else 1 - (z / cap) ** 2
        shape, norm = (p * slope) @ weight, p.norm(dim=1)
        log_z, mu = z.logsumexp(1), z.mean(1)
        columns.append(
            {
                "ce": log_z - z.gather(1, y.unsqueeze(1)).squeeze(1),
                "log_z": log_z,
                "mu": mu,
                "gain": shape.norm(dim=1) / norm,
                "gain_centered": (shape - mean).norm(dim=1) / norm,
                "max": z.amax(1),
                "norm": norm,
                "lead": leading(shape, weight) / norm**2,
                "lead_centered": leading(shape - mean, weight - mean) / norm**2,
            }
        )
    t = {name: torch.cat([column[name] for column in columns]) for name in columns[0]}

    def side(log_z: Tensor, gain: Tensor, row_max: Tensor, lead: Tensor, head: Tensor) -> dict[str, float]:
        violation, sigma = (log_z - c).abs(), torch.linalg.svdvals(head)
        energy = sigma.square()
        return {
            "diag_z": float(coef * violation.square().mean()),
            "p_z_999": float(violation.quantile(0.999)),
            "a_p_mean": float(gain.mean()),
            "a_p_99": float(gain.quantile(0.99)),
            "log_z_mean": float(log_z.mean()),
            "delta_u_99": float((2 * coef * violation * t["norm"] * gain).quantile(0.99)),
            "row_max_999": float(row_max.quantile(0.999)),
            "sigma_1": float(sigma[0]),
            "e_1": float(energy[0] / energy.sum()),
            "e_16": float(energy[:16].sum() / energy.sum()),
            "f_16": float((lead / gain**2).mean()),
            "rho_16": float(torch.corrcoef(torch.stack([lead, gain**2]))[0, 1]),
        }

    found = {"ppl": float(t["ce"].mean().exp()), "raw": side(t["log_z"], t["gain"], t["max"], t["lead"], weight)}
    if cap is None:
        found["raw"]["mu_abs_99"] = float(t["mu"].abs().quantile(0.99))
        found["centered"] = side(
            t["log_z"] - t["mu"], t["gain_centered"], t["max"] - t["mu"], t["lead_centered"], weight - mean
        )
    return found


def leading(shape: Tensor, head: Tensor) -> Tensor:
    directions = torch.linalg.svd(head, full_matrices=False)[2][:16]
    return (shape @ directions.T).square().sum(1)


def straight_gradients(
    model: Any, ids: Tensor, *, size: int, blocks: int, rows: int, coef: float = 1e-4
) -> dict[str, Any]:
    """R_Z, C_Z and the tied paths by autograd on untied copies of the head."""
    config = model.config
    cap, c = getattr(config, "final_logit_softcapping", None), math.log(rows)
    scale = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
    head, table = model.get_output_embeddings(), model.get_input_embeddings().weight
    tied = table is head.weight
    caught: list[Tensor] = []
    handle = head.register_forward_pre_hook(lambda module, inputs: caught.append(inputs[0]))
    x, y = ids[: blocks * size].view(blocks, size), ids[1 : blocks * size + 1]
    gradients = {}
    for kind in ("ce", "raw", "centered"):
        model.zero_grad(set_to_none=True)
        caught.clear()
        model(input_ids=x, use_cache=False)
        output = nn.Parameter(head.weight.detach().clone())
        bias = 0 if getattr(head, "bias", None) is None else head.bias[:rows]
        z = scale * (caught[0].reshape(-1, output.shape[1]) @ output[:rows].T + bias)
        z = z if cap is None else cap * torch.tanh(z / cap)
        log_z = z.logsumexp(1)
        loss = {
            "ce": nn.functional.cross_entropy(z, y),
            "raw": (coef * (log_z - c) ** 2).mean(),
            "centered": (coef * (log_z - z.mean(1) - c) ** 2).mean(),
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
    found: dict[str, Any] = {}
    for kind in ("raw", "centered"):
        found[kind] = {
            "r_z": float(whole[kind].norm() / whole["ce"].norm()),
            "c_z": cosine(whole[kind], whole["ce"]),
        }
        out, inside, _ = gradients[kind]
        if tied:
            found[f"paths.{kind}"] = {
                "output_norm": float(out.norm()),
                "input_norm": float(inside.norm()),
                "cosine": cosine(out, inside),
            }
    model_wide = {kind: torch.cat([whole[kind].flatten(), body]) for kind, (_, _, body) in gradients.items()}
    found["whole_model"] = {
        "r_z": float(model_wide["raw"].norm() / model_wide["ce"].norm()),
        "c_z": cosine(model_wide["raw"], model_wide["ce"]),
    }
    return found
