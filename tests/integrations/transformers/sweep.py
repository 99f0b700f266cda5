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

import torch

from tests.integrations.transformers.small_models import (
    OBJECTIVE,
    batch,
    loss_and_gradients,
    loss_of,
    relative_difference,
    truth,
)
from tests.integrations.transformers.tiny_configs import build_tiny, causal_classes
from tools.docs.tables import support_page
from zloss.errors import ZlossError
from zloss.integrations.transformers import apply
from zloss.integrations.transformers.apply import SUPPORT, ModelSupport

PAGE = Path(__file__).parents[3] / "docs" / "support_transformers.md"
LOSS_LIMIT, GRADIENT_LIMIT = 1e-5, 1e-4


@dataclass(frozen=True)
class SweepOutcome(ModelSupport):
    """What came of one class; the state may also be "different" (which must not happen)."""

    loss_error: float | None = None
    gradient_error: float | None = None
    z_part: float | None = None


@functools.cache
def try_class(name: str, model_type: str) -> SweepOutcome:
    """Build, run the model's own loss, the truth from its real logits, and ours; once per process."""
    try:
        model = build_tiny(name, model_type).train()
        own = loss_of(model, batch())
    except Exception as error:
        return SweepOutcome(name, "not built", f"{type(error).__name__}: {str(error).splitlines()[0][:120]}")
    if not math.isfinite(float(own)):
        return SweepOutcome(name, "not built", "the loss of the small model is not finite")
    wanted, wanted_gradients = truth(model, batch())
    try:
        with apply(model, OBJECTIVE):
            got, gradients = loss_and_gradients(model, batch())
    except ZlossError as error:
        return SweepOutcome(name, "refused", str(error))
    loss_error = abs(float(got - wanted)) / max(1.0, abs(float(wanted)))
    gradient_error = relative_difference(gradients, wanted_gradients)
    z_part = float(wanted - own)
    exact = loss_error <= LOSS_LIMIT and gradient_error <= GRADIENT_LIMIT and abs(z_part) > 1e-6
    return SweepOutcome(name, "exact" if exact else "different", "", loss_error, gradient_error, z_part)


def write_table(outcomes: list[SweepOutcome]) -> None:
    """The table of `support()` and the page made of it."""
    import transformers

    classes = [{"name": o.name, "state": o.state, "detail": o.detail} for o in outcomes]
    table = {"transformers": transformers.__version__, "classes": classes}
    SUPPORT.write_text(json.dumps(table, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    PAGE.write_text(support_page(), encoding="utf-8")


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
