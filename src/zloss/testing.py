"""Checks of losses for test suites."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from zloss.errors import InputError, LossCheckError, UnknownNameError, ZlossError
from zloss.results.loss_audit import Finding, Identified, LossAudit

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


def pytest_file(audit: LossAudit, place: str, *, strict: bool = False, **options: Any) -> str:
    """The source of a pytest file that pins what an audit identified, and its findings as expected ones.

    `place` is the loss as MODULE:FUNCTION or FILE.py:FUNCTION; `options` are arguments of `check_loss` that were given to the
    audit. A `coef` or `target` among them is pinned instead of the identified one, so that its finding stays.
    """
    arguments = {**_identified(audit.identified), **options, **({"strict": True} if strict else {})}
    expected = {one.id: one.sentence for one in (audit.found if strict else audit.errors)}
    lines = [f"    {key}={_literal(value)}," for key, value in arguments.items()]
    if expected:
        lines += [
            "    expected={",
            *(f"        {_literal(id)}: {_literal(why)}," for id, why in expected.items()),
            "    },",
        ]
    name = re.sub(r"\W", "_", place.rpartition(":")[2])
    return "\n".join(
        [
            f'"""Written by `zloss audit-loss {place} --write-test`: run it in the same folder."""',
            "",
            "from zloss.testing import parametrize_with_checks",
            "",
            "",
            "@parametrize_with_checks(",
            f"    {_literal(place)},",
            *lines,
            ")",
            f"def test_{name}(check):",
            "    check()",
            "",
        ]
    )


def _identified(got: Identified) -> dict[str, Any]:
    """What was identified, as arguments of `check_loss`."""
    if got.has_z is None:
        return {}
    if not got.has_z:
        return {"coef": 0.0, "ce_denominator": got.ce_denominator}
    coef, target = (None if x is None else float(f"{x:.6g}") for x in (got.coef_relative_to_ce, got.target))
    if got.target is not None and abs(got.target) < 1e-6:
        target = 0.0
    follows = got.target_rule == "log_v" and got.target is not None and got.vocab is not None
    log_v = follows and abs((got.target or 0.0) - math.log(got.vocab or 1)) < 1e-3
    named: dict[str, Any] = {"coef": coef, "target": "log_v" if log_v else target, "coordinate": got.coordinate}
    named |= {"ce_denominator": got.ce_denominator, "z_denominator": got.z_denominator}
    return {key: value for key, value in named.items() if value not in (None, "unknown")}


def _literal(value: Any) -> str:
    """Python source of a string, with double quotes, or of a number."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
