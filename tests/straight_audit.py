"""A small audit by straight fp64 definitions: dense logits, plain autograd, numpy quantiles.

Imports nothing from the package, so no change there can change a number here. Results are plain dicts with the keys of
report.json, comparison.json and the file of a loss audit; a test that needs a record reads it with `from_dict`.
Axes: T tokens, V vocabulary, D width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.straight_histogram import count, log_edges

COEF = 1e-4
BETA = 1e-2
MAX_SAMPLE = 5000
MAX_SINGULAR_VALUES = 256


@dataclass(frozen=True)
class Tokens:
    """Predictions of a model: hidden states, head, targets, and how the tokens read."""

    hidden_TD: Tensor
    weight_VD: Tensor
    target_T: Tensor
    text_T: list[str]
    block_size: int


@dataclass(frozen=True)
class TinyModel:
    """Tied causal model in four lines: running mean of embeddings, one tanh layer, the embedding table as head."""

    table_VD: Tensor
    layer_DD: Tensor
    scale: float

    def hidden(self, ids_NB: Tensor, table_VD: Tensor) -> Tensor:
        embedded = table_VD[ids_NB]
        steps = torch.arange(1, ids_NB.shape[1] + 1, dtype=embedded.dtype)[None, :, None]
        return self.scale * torch.tanh((embedded.cumsum(1) / steps + embedded) @ self.layer_DD)


WORDS = ("the", "norm", "of", "<b>source</b>", "μ", "is", "transport", "&amp;", "a", "head", "\n", "gain", "Z", "tail")


def tiny_model(seed: int = 0, *, vocab: int = 307, width: int = 24, shift: float = 0.8) -> TinyModel:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    # Unequal column scales give the head an anisotropic spectrum; the shared row gives it a common shift.
    table = 0.4 * normal(vocab, width) * torch.linspace(2.0, 0.2, width) + shift * normal(width)
    return TinyModel(table.float().double(), normal(width, width) / math.sqrt(width), scale=2.0)


def run_tiny(
    model: TinyModel, *, blocks: int = 12, block_size: int = 64, seed: int = 1
) -> tuple[Tokens, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    vocab = model.table_VD.shape[0]
    stream = torch.randint(vocab, (blocks * block_size + 1,), generator=generator)
    ids_NB, target_NB = stream[:-1].view(blocks, block_size), stream[1:].view(blocks, block_size)
    hidden = model.hidden(ids_NB, model.table_VD)
    text = [f" {WORDS[i % len(WORDS)]}{i}" for i in target_NB.reshape(-1).tolist()]
    tokens = Tokens(hidden.reshape(-1, hidden.shape[-1]), model.table_VD, target_NB.reshape(-1), text, block_size)
    return tokens, ids_NB, target_NB


def quantile(values: Tensor, q: float) -> float:
    return float(np.quantile(values.numpy(), q))


@dataclass(frozen=True)
class Columns:
    """Token statistics of one coordinate."""

    log_z: Tensor
    mu: Tensor
    row_max: Tensor
    gain: Tensor
    delta_z: Tensor
    delta_u: Tensor
    rank16: Tensor
    transported_TD: Tensor
    singular: Tensor
    e_1: float
    e_16: float


def columns(tokens: Tokens, *, centered: bool, chunk: int = 512) -> tuple[Columns, Tensor]:
    weight = tokens.weight_VD.double()
    head = weight - weight.mean(0) if centered else weight
    _, sigma, right_DD = torch.linalg.svd(head, full_matrices=False) if head.shape[0] < 4096 else _by_gram(head)
    target_c = math.log(weight.shape[0])
    parts: dict[str, list[Tensor]] = {name: [] for name in ("log_z", "mu", "row_max", "p_norm", "q", "ce")}
    for hidden, target in zip(tokens.hidden_TD.double().split(chunk), tokens.target_T.split(chunk), strict=True):
        z = hidden @ head.T
        log_z = torch.logsumexp(z, -1)
        p = torch.softmax(z, -1)
        parts["log_z"].append(log_z)
        parts["mu"].append(z.mean(-1))
        parts["row_max"].append(z.max(-1).values)
        parts["p_norm"].append(p.norm(dim=-1))
        parts["q"].append(p @ head)
        parts["ce"].append(log_z - z.gather(-1, target[:, None])[:, 0])
    joined = {name: torch.cat(items) for name, items in parts.items()}
    gain = joined["q"].norm(dim=-1) / joined["p_norm"]
    delta_z = 2 * COEF * (joined["log_z"] - target_c).abs() * joined["p_norm"]
    energy = sigma.square().sum()
    made = Columns(
        log_z=joined["log_z"],
        mu=joined["mu"],
        row_max=joined["row_max"],
        gain=gain,
        delta_z=delta_z,
        delta_u=2 * COEF * (joined["log_z"] - target_c).abs() * joined["q"].norm(dim=-1),
        rank16=(joined["q"] @ right_DD[:16].T).norm(dim=-1) ** 2 / joined["p_norm"] ** 2,
        transported_TD=joined["q"],
        singular=sigma,
        e_1=float(sigma[0] ** 2 / energy),
        e_16=float(sigma[:16].square().sum() / energy),
    )
    return made, joined["ce"]


def _by_gram(head: Tensor) -> tuple[None, Tensor, Tensor]:
    values, vectors = torch.linalg.eigh(head.T @ head)
    return None, values.flip(0).clamp(min=0).sqrt(), vectors.flip(1).T


def head_numbers(c: Columns, target_c: float) -> dict[str, float]:
    violation = c.log_z - target_c
    return {
        "diag_z": COEF * float(violation.square().mean()),
        "p_z_999": quantile(violation.abs(), 0.999),
        "a_p_mean": float(c.gain.mean()),
        "a_p_99": quantile(c.gain, 0.99),
        "log_z_mean": float(c.log_z.mean()),
        "mu_abs_99": quantile(c.mu.abs(), 0.99),
        "mu_rms": float(c.mu.square().mean().sqrt()),
        "delta_u_99": quantile(c.delta_u, 0.99),
        "delta_u_99_gain_aware": quantile(c.delta_u / (1 + BETA * c.gain**2), 0.99),
        "row_max_999": quantile(c.row_max, 0.999),
        "sigma_1": float(c.singular[0]),
        "e_1": c.e_1,
        "e_16": c.e_16,
        "f_16": float((c.rank16 / c.gain**2).mean()),
        "rho_16": float(torch.corrcoef(torch.stack([c.rank16, c.gain**2]))[0, 1]),
    }


def spacing(value: float) -> dict[str, float]:
    def gap(dtype: torch.dtype) -> float:
        here = torch.tensor(value, dtype=dtype)
        return float(torch.nextafter(here, torch.tensor(math.inf, dtype=dtype)).double() - here.double())

    return {"row_max_999": value, "bf16_spacing": gap(torch.bfloat16), "fp16_spacing": gap(torch.float16)}


def cosine(a: Tensor, b: Tensor) -> float:
    return float((a * b).sum() / (a.norm() * b.norm()))


def gradients(model: TinyModel, ids_NB: Tensor, target_NB: Tensor) -> tuple[dict[str, Any], dict[str, Any]]:
    """CE and Z gradients of the tied table by autograd; the paths by giving input and output a table of their own."""
    rows, paths = {}, {}
    for centered in (False, True):
        table_in = model.table_VD.clone().requires_grad_()
        table_out = model.table_VD.clone().requires_grad_()
        z = model.hidden(ids_NB, table_in) @ (table_out - table_out.mean(0) if centered else table_out).T
        ce = torch.nn.functional.cross_entropy(z.reshape(-1, z.shape[-1]), target_NB.reshape(-1))
        aux = COEF * (torch.logsumexp(z, -1) - math.log(z.shape[-1])).square().mean()
        ce_in, ce_out = torch.autograd.grad(ce, (table_in, table_out), retain_graph=True)
        z_in, z_out = torch.autograd.grad(aux, (table_in, table_out))
        g_ce, g_z = ce_in + ce_out, z_in + z_out
        name = "centered" if centered else "raw"
        rows[name] = {"r_z": float(g_z.norm() / g_ce.norm()), "c_z": cosine(g_z, g_ce)}
        paths[name] = {
            "output_norm": float(z_out.norm()),
            "input_norm": float(z_in.norm()),
            "cosine": cosine(z_out, z_in),
        }
    # The table is the only trained tensor, so its gradient is that of the whole model.
    info = {"coef": COEF, "blocks": ids_NB.shape[0], **rows, "whole_model": rows["raw"]}
    return {**info, "scope": "output_head", "reduction": "mean"}, paths


def geometry(raw: Columns, centered: Columns, mean_row: Tensor, keep: Tensor) -> dict[str, Any]:
    first = mean_row / mean_row.norm()
    cloud = centered.transported_TD
    rest = cloud - (cloud @ first)[:, None] * first
    second = torch.linalg.svd(rest - rest.mean(0), full_matrices=False)[2][0]

    def column(values: Tensor) -> list[float]:
        # Six digits draw the same picture in a third of the bytes.
        return [float(f"{value:.6g}") for value in values[keep].tolist()]

    return {
        "x_raw": column(raw.transported_TD @ first),
        "y_raw": column(raw.transported_TD @ second),
        "x_centered": column(centered.transported_TD @ first),
        "y_centered": column(centered.transported_TD @ second),
        "a2_raw": column(raw.gain**2),
        "rank16_raw": column(raw.rank16),
        "a2_centered": column(centered.gain**2),
        "rank16_centered": column(centered.rank16),
        "delta_z_raw": column(raw.delta_z),
        "delta_u_raw": column(raw.delta_u),
        "delta_z_centered": column(centered.delta_z),
        "delta_u_centered": column(centered.delta_u),
        "mean_row_norm": float(mean_row.norm()),
        "drawn_from": len(raw.gain),
        "note": "evenly spaced tokens, and all tokens of the tables of extremes",
    }


def extremes(tokens: Tokens, raw: Columns, centered: Columns, ce: Tensor, k: int) -> list[dict[str, Any]]:
    target_c = math.log(tokens.weight_VD.shape[0])

    def row(index: int) -> dict[str, Any]:
        start = max(index - index % tokens.block_size, index - 12)
        return {
            "block": index // tokens.block_size,
            "position": index % tokens.block_size,
            "target": tokens.text_T[index],
            "context": "".join(tokens.text_T[start:index]),
            "log_z": float(raw.log_z[index]),
            "log_z_centered": float(centered.log_z[index]),
            "mu": float(raw.mu[index]),
            "gain": float(raw.gain[index]),
            "gain_centered": float(centered.gain[index]),
            "ce": float(ce[index]),
        }

    def table(quantity: str, coordinate: str, values: Tensor) -> dict[str, Any]:
        top = [row(i) for i in values.topk(k).indices.tolist()]
        return {"quantity": quantity, "coordinate": coordinate, "tokens": top}

    return [
        table("violation", "raw", (raw.log_z - target_c).abs()),
        table("violation", "centered", (centered.log_z - target_c).abs()),
        table("gain", "raw", raw.gain),
        table("gain", "centered", centered.gain),
    ]


def straight_report(
    tokens: Tokens,
    *,
    name: str,
    corpus: str,
    gradient: dict[str, Any],
    paths: dict[str, Any],
    k: int = 12,
    sample: int = MAX_SAMPLE,
) -> dict[str, Any]:
    """The report.json of `tokens` under a tied head, without decisions."""
    raw, ce = columns(tokens, centered=False)
    centered, _ = columns(tokens, centered=True)
    count_T, (vocab, width) = len(ce), tokens.weight_VD.shape
    target_c = math.log(vocab)
    heads = {"raw": head_numbers(raw, target_c), "centered": head_numbers(centered, target_c)}
    tables = extremes(tokens, raw, centered, ce, k)
    special = {t["block"] * tokens.block_size + t["position"] for table in tables for t in table["tokens"]}
    even = torch.linspace(0, count_T - 1, max(min(count_T, sample) - len(special), 1)).long().tolist()
    keep = torch.tensor(sorted(special | set(even)))
    pairs = (
        ("violation", (raw.log_z - target_c).abs(), (centered.log_z - target_c).abs()),
        ("gain", raw.gain, centered.gain),
        ("delta_u", raw.delta_u, centered.delta_u),
    )
    histograms = []
    for quantity, a, b in pairs:
        edges = log_edges(a.numpy(), b.numpy())
        histograms += [count(quantity, "raw", a.numpy(), edges), count(quantity, "centered", b.numpy(), edges)]
    histograms.append(count("shift", "raw", raw.mu.abs().numpy(), log_edges(raw.mu.abs().numpy())))
    return {
        "schema": "zloss.audit/1",
        "model": {
            "name": name,
            "vocab": vocab,
            "width": width,
            "tied": True,
            "bias": False,
            "logit_scale": 1.0,
            "softcap": None,
            "valid_vocab": None,
            "rows_beyond_tokenizer": None,
        },
        "corpus": {
            "name": corpus,
            "blocks": count_T // tokens.block_size,
            "block_size": tokens.block_size,
            "predictions": count_T,
            "bos": False,
        },
        "ppl": float(ce.mean().exp()),
        "mu_abs_99": heads["raw"]["mu_abs_99"],
        "heads": heads,
        "gradient": gradient,
        "tied_paths": paths,
        "provenance": {
            "zloss": "0.1.0",
            "torch": torch.__version__,
            "transformers": None,
            "command": f"zloss audit {name}",
            "started": "2026-01-01T00:00:00Z",
            "seconds": 1.0,
            "seed": 0,
        },
        "diag_coef": COEF,
        "gain_beta": BETA,
        "target": target_c,
        "precision": {coordinate: spacing(numbers["row_max_999"]) for coordinate, numbers in heads.items()},
        "nonfinite": {"nan": 0, "inf": 0},
        "quantile_bounds": {},
        "decisions": [],
        "lambda_budget": None,
        "thresholds": {},
        "router": None,
        "status": "complete",
        "finished_blocks": count_T // tokens.block_size,
        "timings": {"pass": 1.0},
        "reasons": {},
        "notes": [],
        "figures": {
            "histograms": histograms,
            "spectrum": {
                "raw": raw.singular[:MAX_SINGULAR_VALUES].tolist(),
                "centered": centered.singular[:MAX_SINGULAR_VALUES].tolist(),
                "method": "exact",
            },
            "geometry": geometry(raw, centered, tokens.weight_VD.double().mean(0), keep),
        },
        "extreme_tokens": tables,
    }


def tiny_report(seed: int = 0, *, name: str = "tiny-tied", blocks: int = 12, shift: float = 0.8) -> dict[str, Any]:
    """A complete report.json of the tiny model."""
    model = tiny_model(seed, shift=shift)
    tokens, ids_NB, target_NB = run_tiny(model, blocks=blocks)
    gradient, paths = gradients(model, ids_NB[:8], target_NB[:8])
    return straight_report(tokens, name=name, corpus="uniform random tokens", gradient=gradient, paths=paths)


def loss_audit(tokens: Tokens, storage: torch.dtype) -> dict[str, Any]:
    """The audit of Z-loss on logits stored in `storage`, against fp64: paper Δ_src, measured."""
    z = (tokens.hidden_TD @ tokens.weight_VD.double().T).detach()
    stored = z.to(storage).double()

    def value_and_source(logits: Tensor) -> tuple[Tensor, Tensor]:
        violation = torch.logsumexp(logits, -1, keepdim=True) - math.log(logits.shape[-1])
        return COEF * violation.square().mean(), 2 * COEF * violation * torch.softmax(logits, -1) / len(logits)

    (value, source), (value_stored, source_stored) = value_and_source(z), value_and_source(stored)
    delta = float((source_stored - source).norm() / source.norm())
    sentence = f"logits are rounded to {storage} before the source is built: <relative error {delta:.3g}>"
    return {
        "schema": "zloss.loss-audit/2",
        "identified": {
            "has_z": True,
            "coef": COEF,
            "target": math.log(z.shape[-1]),
            "coordinate": "raw",
            "ce_denominator": "valid",
            "z_denominator": "valid",
            "uncertainty": {"coef": None, "coef_relative": None, "target": None, "unexplained": None},
            "penalty": "none",
            "target_rule": None,
            "vocab": None,
            "ce_scale": 1.0,
            "label_smoothing": 0.0,
            "ce_weights": "uniform",
            "z_weights": None,
            "targets": "given",
            "computes_in": "float64",
            "extra": {},
            "reason": None,
        },
        "findings": [
            {
                "id": "low_precision_source",
                "verdict": "finding" if delta > 1e-3 else "pass",
                "sentence": sentence,
                "figure": delta,
                "severity": "error" if delta > 1e-3 else None,
                "remedy": "keep the logits in fp32",
                "consequence": "the source is rounded",
            },
            {
                "id": "overflow",
                "verdict": "not_applicable",
                "sentence": "pass a linear loss",
                "figure": None,
                "severity": None,
            },
        ],
        "source": {
            "forward_rel_error": float((value_stored - value).abs() / value),
            "delta_src": delta,
            "cosine": cosine(source_stored, source),
            "of": "total",
            "delta_total": None,
            "tokens": 0,
            "dtype": "float32",
            "reason": None,
        },
        "provenance": {"loss": "straight Z-loss"},
        "target_model": None,
    }


def comparison(coefficients: dict[str, float], *, steps: int = 25, lr: float = 0.2) -> dict[str, Any]:
    """The comparison.json of really trained tiny models: plain gradient descent on the table, same start and data."""
    start = tiny_model(3)
    _, ids_NB, target_NB = run_tiny(start, blocks=6)
    methods: list[dict[str, Any]] = []
    ppl: list[float] = []
    for method, coef in coefficients.items():
        table = start.table_VD.clone().requires_grad_()
        norms, ce = [], torch.zeros(())
        for _ in range(steps):
            z = start.hidden(ids_NB, table) @ table.T
            ce = torch.nn.functional.cross_entropy(z.flatten(0, 1), target_NB.flatten())
            aux = coef * (torch.logsumexp(z, -1) - math.log(z.shape[-1])).square().mean()
            (gradient,) = torch.autograd.grad(ce + aux, table)
            norms.append(gradient.norm())
            table = (table - lr * gradient).detach().requires_grad_()
        all_norms = torch.stack(norms)
        metrics = {
            "ppl": float(ce.detach().exp()),
            "grad_norm_p99": quantile(all_norms, 0.99),
            "phi_10": float((all_norms > 10).double().mean()),
            "nonfinite_gradient": float((~all_norms.isfinite()).sum()),
        }
        methods.append(
            {
                "method": method,
                "coef": coef,
                "coordinate": "raw",
                "seeds": [0],
                "metrics": {key: {"mean": value, "std": None, "n": 1} for key, value in metrics.items()},
                "heads": {"raw": {}, "centered": {}},
                "paired": None,
            }
        )
        ppl.append(metrics["ppl"])
    verdicts = [
        {"method": method["method"], "coef": method["coef"], "delta_ppl": each - ppl[0], "accepted": None, "reason": ""}
        for method, each in zip(methods[1:], ppl[1:], strict=True)
    ]
    return {
        "schema": "zloss.comparison/1",
        "baseline": methods[0]["method"],
        "baseline_coef": methods[0]["coef"],
        "seeds": [0],
        "steps": steps,
        "std": "sample standard deviation over seeds (n − 1)",
        "methods": methods,
        "quality": {"tolerance_ppl": None, "tolerance": "", "diagnosed": "", "methods": verdicts},
        "tokens": {"available": None, "consumed": None, "reuse": None},
        "unpaired": [],
        "unfinished": [],
        "provenance": None,
        "curves": [],
    }
