"""Every causal class against CE + Z of its own logits: loss and gradients, or the refusal.

    python -m tests.integrations.transformers.sweep [--write] [CLASS ...]

`--write` puts the outcomes into the table that `support()` shows.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zloss
from tests.integrations.transformers.tiny_configs import build_tiny, causal_classes
from zloss.errors import ZlossError
from zloss.integrations.transformers import apply, support
from zloss.integrations.transformers.support_table import FILE, support_page

OBJECTIVE = zloss.StandardZLoss(1e-2, target=0.0)
PAGE = Path(__file__).parents[3] / "docs" / "support_transformers.md"
LOSS_LIMIT, GRADIENT_LIMIT = 1e-5, 1e-4


@dataclass(frozen=True)
class SweepOutcome:
    """What came of one class."""

    name: str
    state: str
    """"exact", "refused", "not built" or "different" (which must not happen)."""
    detail: str = ""
    loss_error: float | None = None
    gradient_error: float | None = None
    z_part: float | None = None


def batch_for(model: nn.Module) -> dict[str, Tensor]:
    """Two sequences with ignored labels."""
    ids = torch.randint(3, 120, (2, 16), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :4] = -100
    return {"input_ids": ids, "labels": labels}


def try_class(name: str, model_type: str) -> SweepOutcome:
    """Build, run the model's own loss, the truth from its real logits, and ours."""
    try:
        model = build_tiny(name, model_type).train()
        batch = batch_for(model)
        own = _loss(model, batch)
    except Exception as error:
        return SweepOutcome(name, "not built", f"{type(error).__name__}: {str(error).splitlines()[0][:120]}")
    if not math.isfinite(float(own)):
        return SweepOutcome(name, "not built", "the loss of the small model is not finite")
    parameters = [p for p in model.parameters() if p.requires_grad]
    with mock.patch.object(F, "cross_entropy", cross_entropy_plus_z):
        wanted = _loss(model, batch)
    wanted_grads = torch.autograd.grad(wanted, parameters, allow_unused=True)
    try:
        with apply(model, OBJECTIVE):
            got = _loss(model, batch)
            grads = torch.autograd.grad(got, parameters, allow_unused=True)
    except ZlossError as error:
        return SweepOutcome(name, "refused", str(error))
    loss_error = abs(float(got - wanted)) / max(1.0, abs(float(wanted)))
    gradient_error = relative_difference(grads, wanted_grads)
    z_part = float(wanted - own)
    exact = loss_error <= LOSS_LIMIT and gradient_error <= GRADIENT_LIMIT and abs(z_part) > 1e-6
    return SweepOutcome(name, "exact" if exact else "different", "", loss_error, gradient_error, z_part)


@functools.cache
def outcome_of(name: str, model_type: str) -> SweepOutcome:
    """The same, tried once per process."""
    return try_class(name, model_type)


def cross_entropy_plus_z(logits: Tensor, target: Tensor, *_args: Any, **options: Any) -> Tensor:
    """The truth: CE + Z of the logits that the model hands to its loss."""
    chosen = {name: options[name] for name in ("ignore_index", "reduction", "label_smoothing") if name in options}
    return zloss.logits_loss(logits, target, OBJECTIVE, **chosen).loss


def relative_difference(got: Any, wanted: Any) -> float:
    """‖got − wanted‖ / ‖wanted‖ over all parameters; infinite where one side has a gradient and the other has not."""
    if any((a is None) != (b is None) for a, b in zip(got, wanted, strict=True)):
        return math.inf
    pairs = [(a.double(), b.double()) for a, b in zip(got, wanted, strict=True) if a is not None]
    gap = math.sqrt(sum(float((a - b).square().sum()) for a, b in pairs))
    return gap / math.sqrt(sum(float(b.square().sum()) for _, b in pairs))


def _loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    torch.manual_seed(0)
    loss: Tensor = model(**batch).loss
    return loss


def write_table(outcomes: list[SweepOutcome]) -> None:
    """The table of `support()` and the page made of it."""
    import transformers

    classes = [{"name": o.name, "state": o.state, "detail": o.detail} for o in outcomes]
    table = {"transformers": transformers.__version__, "classes": classes}
    FILE.write_text(json.dumps(table, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    PAGE.write_text(support_page(support()), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="CLASS")
    parser.add_argument("--write", action="store_true", help="write the table of support()")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    torch.set_num_threads(1)
    classes = causal_classes()
    outcomes = []
    for name in options.names or classes:
        outcomes.append(try_class(name, classes[name]))
        print(outcomes[-1], flush=True)
    counts = {
        state: sum(o.state == state for o in outcomes) for state in ("exact", "refused", "not built", "different")
    }
    print(counts)
    if options.write:
        write_table(outcomes)
    return 1 if counts["different"] else 0


if __name__ == "__main__":
    sys.exit(main())
