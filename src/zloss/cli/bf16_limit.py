"""bf16 products on CPUs that announce AMX and then trap on it: what a command does before it loads torch."""

from __future__ import annotations

import sys


def limit_bf16_products(*, quiet: bool) -> None:
    """Limit oneDNN before torch is loaded; where torch is loaded already, the products run without oneDNN."""
    if "torch" in sys.modules:
        return
    from zloss.measure.bf16_products import make_bf16_safe

    note = make_bf16_safe()
    if note and not quiet:
        print(note, file=sys.stderr)
