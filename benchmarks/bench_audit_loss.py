"""Run times of `zloss.audit_loss` by kind of loss: the table of docs/audit_loss.md.

    python benchmarks/bench_audit_loss.py [--thorough] [--repeat 3]

Each loss is audited `repeat` times, interleaved; the table has the smallest and the largest wall time, in seconds, and the
number of calls of the loss. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import zloss

COEF = 1e-3


def valid_mean(rows: Tensor, y: Tensor) -> Tensor:
    keep = y != -100
    return torch.where(keep, rows, torch.zeros_like(rows)).sum() / keep.sum().clamp(min=1)


def cross_entropy(z: Tensor, y: Tensor) -> Tensor:
    return valid_mean(F.cross_entropy(z, y, reduction="none"), y)


def eager(z: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(z, y) + COEF * valid_mean(z.logsumexp(-1).square(), y)


def without_z(z: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(z, y)


def fp32_inside(z: Tensor, y: Tensor) -> Tensor:
    return eager(z.float(), y)


def stored_in_bf16(z: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(z, y) + COEF * valid_mean(z.bfloat16().to(z.dtype).logsumexp(-1).square(), y)


def focal(z: Tensor, y: Tensor) -> Tensor:
    ce = F.cross_entropy(z, y, reduction="none")
    return valid_mean((1 - torch.exp(-ce)) ** 2 * ce + COEF * z.logsumexp(-1).square(), y)


def one_sided(z: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(z, y) + COEF * valid_mean((z.logsumexp(-1) - 6).clamp(min=0).square(), y)


def scaled_and_capped(z: Tensor, y: Tensor) -> Tensor:
    return eager(30 * torch.tanh(0.5 * z / 30), y)


def entropy_bonus(z: Tensor, y: Tensor) -> Tensor:
    p = z.softmax(-1)
    return eager(z, y) + 0.01 * valid_mean((p * p.clamp(min=1e-30).log()).sum(-1), y)


def our_head_loss(h: Tensor, w: Tensor, y: Tensor) -> Any:
    return zloss.head_loss(h, w, y, zloss.CenteredZLoss(COEF))


def our_gain_aware(h: Tensor, w: Tensor, y: Tensor) -> Any:
    return zloss.head_loss(h, w, y, zloss.GainAwareZLoss(COEF))


def cases(compiled: bool) -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """Title → (loss, options of the audit)."""
    found: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
        "CE + Z, eager": (eager, {}),
        "CE alone": (without_z, {}),
        "CE + Z in fp32": (fp32_inside, {}),
        "logits stored in bf16": (stored_in_bf16, {}),
        "focal CE + Z": (focal, {}),
        "one-sided Z": (one_sided, {}),
        "scale and softcap": (scaled_and_capped, {}),
        "entropy bonus (cannot say)": (entropy_bonus, {}),
        "`zloss.head_loss`, centered, linear": (our_head_loss, {"linear": True}),
        "`zloss.head_loss`, gain-aware, linear": (our_gain_aware, {"linear": True}),
    }
    if compiled:
        found["CE + Z, `torch.compile`"] = (torch.compile(eager), {})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3, help="Audits of each loss.")
    parser.add_argument("--thorough", action="store_true", help="Also many tokens and a large vocabulary at once.")
    parser.add_argument("--compile", action="store_true", help="Also a compiled loss; minutes, once.")
    options = parser.parse_args()
    chosen = cases(options.compile)
    seconds: dict[str, list[float]] = {title: [] for title in chosen}
    calls: dict[str, int] = {}
    for _ in range(options.repeat):
        for title, (loss, more) in chosen.items():
            started = time.perf_counter()
            audit = zloss.audit_loss(loss, thorough=options.thorough, **more)
            seconds[title].append(time.perf_counter() - started)
            calls[title] = audit.provenance["calls"]
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {options.repeat} audits of each loss\n")
    print("| loss | seconds, least | most | calls |\n|---|---:|---:|---:|")
    for title, times in seconds.items():
        print(f"| {title} | {min(times):.1f} | {max(times):.1f} | {calls[title]} |")


if __name__ == "__main__":
    main()
