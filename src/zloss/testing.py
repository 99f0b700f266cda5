"""Checks of losses for test suites."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zloss.errors import LossCheckError
from zloss.results.loss_audit import LossAudit


def check_loss(
    fn: Callable[..., Any],
    *,
    coef: float | None = None,
    target: float | str | None = None,
    coordinate: str | None = None,
    linear: bool = False,
    jax: bool = False,
    strict: bool = False,
) -> LossAudit:
    """Audit a loss; raise `LossCheckError` if any finding is an error, or with `strict` any warning or note.

    The error has one line per finding and one per witness: the input that shows it, and the expected and the measured number.
    `coef`, `target` (a number, or "log_v") and `coordinate` are what the loss is meant to apply; None is not checked. In the
    losses of zloss, `target=None` is c = log V: check that with `target="log_v"`.
    `linear` and `jax` are as for `zloss.audit_loss`.

    >>> import torch.nn.functional as F
    >>> def loss(logits, target):
    ...     keep = target != -100
    ...     z = logits.logsumexp(-1)[keep].square().sum() / keep.sum().clamp(min=1)
    ...     return F.cross_entropy(logits, target, reduction="sum") / keep.sum().clamp(min=1) + 1e-4 * z
    >>> check_loss(loss, coef=1e-4, target=0.0, coordinate="raw", strict=True).found
    ()
    """
    from zloss.audit.loss.audit import audit_loss

    expect = {"coef": coef, "target": target, "coordinate": coordinate}
    expect = {name: value for name, value in expect.items() if value is not None}
    audit = audit_loss(fn, expect=expect, linear=linear, jax=jax)
    lines = []
    for one in audit.found if strict else audit.errors:
        lines.append(f"{one.severity} {one.id}: {one.sentence}")
        lines += [f"    {one.witness.line}"] if one.witness is not None else []
    if lines:
        raise LossCheckError("\n".join([f"{audit.provenance['loss']} does not pass its audit:", *lines]))
    return audit
