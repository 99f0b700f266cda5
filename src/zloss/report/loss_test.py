"""A pytest file that pins what the audit of a loss identified and found (`zloss audit-loss --write-test`)."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from zloss.results.loss_audit import Identified, LossAudit


def pytest_file(audit: LossAudit, place: str, *, strict: bool = False, **options: Any) -> str:
    """The source of a pytest file that pins what an audit identified, and its findings as expected ones.

    `place` is the loss as MODULE:FUNCTION or FILE.py:FUNCTION; `options` are the arguments of `zloss.testing.check_loss` that
    were given to the audit. A `coef` or `target` among them is pinned instead of the identified one, so that its finding stays.
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
            '"""Written by `zloss audit-loss --write-test`: run pytest in the folder where that ran."""',
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
