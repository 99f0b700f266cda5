"""Checks of losses for test suites."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from zloss.errors import InputError, LossCheckError, UnknownNameError, ZlossError
from zloss.results.loss_audit import Finding, LossAudit

Loss = Callable[..., Any] | str
"""A loss, or where to find it: MODULE:FUNCTION or FILE.py:FUNCTION."""


def check_loss(
    fn: Loss,
    *,
    coef: float | None = None,
    target: float | str | None = None,
    coordinate: str | None = None,
    ce_denominator: str | None = None,
    z_denominator: str | None = None,
    strict: bool = False,
    expected: Mapping[str, str] | None = None,
    **options: Any,
) -> LossAudit:
    """Audit a loss; raise `LossCheckError` if any finding is an error, or with `strict` any warning or note.

    `fn` is the loss, or its place as MODULE:FUNCTION or FILE.py:FUNCTION. `coef` (relative to the weight on CE), `target` (a
    number, or "log_v"), `coordinate` and the denominators are what it is meant to apply; None is not checked. In the losses of
    zloss, `target=None` is c = log V: check that with `target="log_v"`.
    `expected` maps the id of a finding to the reason why it is accepted. Such a finding does not raise; its absence does.
    `options` are those of `zloss.audit_loss`: `linear`, `jax`, `off`, `per_token`, `ignore_index`, `valid_vocab`, `vocab`,
    `tokens`, `softcap`, `logit_scale`, `seed`, `time_limit`. `off` and `per_token` may be places too.
    The error has the consequence of each finding, its remedy, and a witness: an input with the expected and the measured number.

    >>> import torch.nn.functional as F
    >>> def loss(logits, target):
    ...     keep = target != -100
    ...     z = logits.logsumexp(-1)[keep].square().sum() / keep.sum().clamp(min=1)
    ...     return F.cross_entropy(logits, target, reduction="sum") / keep.sum().clamp(min=1) + 1e-4 * z
    >>> check_loss(loss, coef=1e-4, target=0.0, coordinate="raw", strict=True).found
    ()
    """
    accepted = _accepted(expected)
    audit = _audit(
        fn,
        coef=coef,
        target=target,
        coordinate=coordinate,
        ce_denominator=ce_denominator,
        z_denominator=z_denominator,
        **options,
    )
    lines = [line for one in audit.findings for line in _objections(one, strict, accepted)]
    if lines:
        raise LossCheckError("\n".join([f"{audit.provenance['loss']} does not pass its audit:", *lines]))
    return audit


def parametrize_with_checks(
    fn: Loss, *, strict: bool = False, expected: Mapping[str, str] | None = None, **options: Any
) -> Any:
    """Decorator of a pytest function `test_my_loss(check)`: one test per check of the audit of a loss.

    The arguments are those of `check_loss`. The audit runs once, in the first test. A check that does not apply is skipped.
    `expected` marks the tests of its ids as xfail(strict): they fail once the finding is gone.

        @parametrize_with_checks(my_loss, coef=1e-4, target=0.0, expected={"ignored_tokens_leak": "padding is cut off before"})
        def test_my_loss(check):
            check()
    """
    import pytest

    from zloss.audit.loss.checks import CHECKS

    accepted = _accepted(expected)
    ended: list[LossAudit | ZlossError] = []

    def check(id: str) -> None:
        if not ended:
            try:
                ended.append(_audit(fn, **options))
            except ZlossError as error:
                ended.append(error)
        if isinstance(ended[0], ZlossError):
            raise ended[0]
        (finding,) = (one for one in ended[0].findings if one.id == id)
        # An accepted finding fails as well: its mark turns that into xfail, and a pass into a failure.
        if lines := _objections(finding, strict or id in accepted, {}):
            raise LossCheckError("\n".join(lines))
        if finding.verdict == "not_applicable" and id not in accepted:
            pytest.skip(finding.sentence)

    def marks(id: str) -> Any:
        return pytest.mark.xfail(reason=accepted[id], raises=LossCheckError, strict=True) if id in accepted else ()

    return pytest.mark.parametrize("check", [pytest.param(partial(check, id), id=id, marks=marks(id)) for id in CHECKS])


def _accepted(expected: Mapping[str, str] | None) -> Mapping[str, str]:
    from zloss.audit.loss.checks import CHECKS

    if not isinstance(expected, Mapping | None):
        raise InputError(f"`expected` is expected to map ids of findings to reasons, but is {expected!r}.")
    for id in expected or {}:
        if id not in CHECKS:
            raise UnknownNameError("finding in `expected`", id, list(CHECKS))
    return expected or {}


def _audit(
    fn: Loss,
    *,
    coef: float | None = None,
    target: float | str | None = None,
    coordinate: str | None = None,
    ce_denominator: str | None = None,
    z_denominator: str | None = None,
    **options: Any,
) -> LossAudit:
    from zloss.audit.loss.audit import audit_loss
    from zloss.audit.loss.calls import load_function

    def loaded(loss: Loss) -> Callable[..., Any]:
        return load_function(loss) if isinstance(loss, str) else loss

    expect = {"coef": coef, "target": target, "coordinate": coordinate}
    expect |= {"ce_denominator": ce_denominator, "z_denominator": z_denominator}
    functions = {key: loaded(options[key]) for key in ("off", "per_token") if options.get(key) is not None}
    name = {"name": fn} if isinstance(fn, str) else {}
    stated = {key: value for key, value in expect.items() if value is not None}
    return audit_loss(loaded(fn), **{**name, **options, **functions, "expect": stated})


def _objections(finding: Finding, strict: bool, accepted: Mapping[str, str]) -> list[str]:
    """What is wrong with the answer of a check: a finding that nobody accepted, or one that was accepted and is not there."""
    present = finding.verdict == "finding"
    if finding.id in accepted:
        why = f"{finding.id} is in `expected` ({accepted[finding.id]}), but was not found: {finding.sentence}"
        return [] if present else [f"{why} Remove it from `expected`."]
    if not present or (finding.severity != "error" and not strict):
        return []
    return [
        f"{finding.severity} {finding.id}: {finding.sentence}",
        f"    consequence: {finding.consequence}",
        f"    to do: {finding.remedy}",
        *([f"    {finding.witness.line}"] if finding.witness is not None else []),
    ]
