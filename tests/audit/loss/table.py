"""Every loss of the corpora: is the audit right, honestly open, "other", or wrong?

    python -m tests.audit.loss.table              the table, and the time per audit; exit code 1 where one is wrong
    python -m tests.audit.loss.table --wrong      only what is open or wrong, with the reasons
    python -m tests.audit.loss.table NAME ...     these losses, or whole sets: zoo, trap, further, unseen, styles, drawn, 16 bits

Open: the answer is incomplete, and nothing in it is false. Other: the penalty is a function of log Z that is not a
square; the audit has its measured curve, and does not name its form. A loss that the audit refuses to call counts as open.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import pytest
import torch

from tests.audit.loss import corpus
from tests.audit.loss.corpus import LOG_V, Truth
from tests.audit.loss.faulty import ALSO_TRUE, TRAPS, UNLISTED
from tests.audit.loss.further import FURTHER, judge
from tests.audit.loss.generated import GENERATED
from tests.audit.loss.sixteen_bits import SIXTEEN_BITS
from tests.audit.loss.styles import STYLES
from tests.audit.loss.unseen import UNSEEN
from tests.audit.loss.zoo import ZOO, Answer
from zloss.audit.loss.audit import audit_loss
from zloss.audit.loss.calls import LossCallError
from zloss.results.loss_audit import Identified, LossAudit

Verdict = tuple[str, list[str]]
BESIDES = {"all_ignored_nonfinite"}
"""What a loss with the right objective can earn."""


def wrong_with(audit: LossAudit, answer: Answer) -> list[str]:
    """Every way in which the audit differs from the answer, in words."""
    got, wrong = audit.identified, []
    if got.has_z is not answer.has_z:
        wrong.append(f"has_z is {got.has_z}, not {answer.has_z} ({got.reason})")
    named, errors = {finding.id for finding in audit.found}, {finding.id for finding in audit.errors}
    if not answer.ids <= named:
        wrong.append(f"missed {set(answer.ids - named)}")
    if not errors <= answer.ids:
        wrong.append(f"errors {errors - answer.ids}")
    warnings = {finding.id for finding in audit.found if finding.severity == "warning"} - BESIDES
    if warnings and not answer.ids and answer.has_z is got.has_z is not None:
        wrong.append(f"warnings {warnings}")
    wanted: dict[str, Any] = dict(answer.more)
    if not answer.ids and answer.has_z:
        wanted = {"coef": answer.coef, "coordinate": answer.coordinate, **wanted}
        if answer.target is not None:
            wanted["target"] = answer.target
    if answer.has_z is None and not (got.coef is got.target is got.coordinate is None and got.reason):
        wrong.append("an open answer has figures, or no reason")
    for key, value in wanted.items():
        found = getattr(got, key)
        close = isinstance(value, (float, dict)) and found is not None
        # λ is small: what counts is its relative error, within what the audit states and below 1 %.
        slack = min(got.uncertainty.coef or 0.0, 1e-2 * abs(value)) if key == "coef" and close else 1e-5
        if not (found == pytest.approx(value, rel=1e-5, abs=slack) if close else found == value):
            wrong.append(f"{key} is {found}, not {value}")
    text = " ".join([got.penalty, got.reason or "", *(finding.sentence for finding in audit.findings)])
    if answer.words not in text:
        wrong.append(f"does not say {answer.words!r}")
    return wrong


def of_zoo(audit: LossAudit, answer: Answer) -> Verdict:
    """The zoo owes one answer: an open one is right where the answer is open, and only open where it is not."""
    got, wrong = audit.identified, wrong_with(audit, answer)
    harmless = not {f.id for f in audit.errors} - answer.ids
    if not wrong:
        return "right", []
    if harmless and is_other(audit) and answer.has_z and answer.ids <= {f.id for f in audit.found}:
        return "other", wrong
    without_numbers = got.has_z is answer.has_z and got.coef is got.target is None and got.reason is not None
    seen = without_numbers and answer.ids <= {f.id for f in audit.found}
    less = got.has_z is None and answer.has_z is not None
    return ("open" if harmless and (less or seen) else "wrong"), wrong


def is_other(audit: LossAudit) -> bool:
    """Whether the audit says "a function of log Z that is not a square", with its curve and without numbers."""
    got = audit.identified
    named = got.has_z and got.coordinate == "other" and got.coef is got.target is None
    return bool(named and got.curve and "unexplained_source" in {f.id for f in audit.found})


def of_trap(audit: LossAudit, must: set[str], may: set[str]) -> Verdict:
    named = {finding.id for finding in audit.found if finding.severity != "note" or finding.id in must}
    wrong = [f"missed {id}" for id in sorted(must - named)] + [f"blamed for {id}" for id in sorted(named - must - may)]
    return ("wrong" if wrong else "right"), wrong


def of_case(audit: LossAudit, case: corpus.Case) -> Verdict:
    """A loss with a mistake owes one of its ids; a right one no error or warning; what is stated has to be true of either."""
    got, truth = audit.identified, case.truth
    named = {finding.id for finding in audit.found}
    loud = {finding.id for finding in audit.found if finding.severity != "note"}
    without_numbers = truth is None or truth.has_z is None or (truth.has_z and truth.coef is None) or got.has_z is None
    allowed = case.defects | case.also | ({"unexplained_source"} if without_numbers else set())
    false = [f"blamed for {id}" for id in sorted(loud - allowed)]
    missing = ["missed each of " + ", ".join(sorted(case.defects))] if case.defects and not case.defects & named else []
    if truth is not None and got.has_z is None:
        missing += [f"has_z is open: {got.reason}"] if truth.has_z is not None else []
    elif truth is not None:
        false += _false_numbers(got, truth)
    return ("wrong" if false else "open" if missing else "right"), false + missing


def _false_numbers(got: Identified, truth: Truth) -> list[str]:
    if truth.has_z is None or got.has_z is not truth.has_z:
        return [f"has_z is {got.has_z}, not {truth.has_z}; λ {got.coef}"]
    wanted: dict[str, Any] = {"ce_denominator": truth.ce_denominator, "ce_scale": truth.ce_scale}
    if truth.coef is not None:
        c = math.log(got.vocab or 1) if truth.target == LOG_V else truth.target
        coordinate = "other" if truth.coordinate == "factorized" else truth.coordinate
        wanted |= {"coef": truth.coef, "target": c, "coordinate": coordinate, "z_denominator": truth.z_denominator}
    slack = {"coef": got.uncertainty.coef, "target": max(1e-3, got.uncertainty.target or 0.0), "ce_scale": 0.0}
    false = []
    for key, value in wanted.items():
        said = getattr(got, key)
        if "groups" in (value, got.ce_weights) or (key == "ce_scale" and got.ce_weights != "uniform"):
            continue  # means of means have no single count, and weights of tokens no scale
        if key not in slack:
            right = said in (value, "unknown")
        else:
            right = said is None or abs(said - value) <= max(2e-3 * abs(value), slack[key] or 0.0)
        false += [] if right else [f"{key} is {said}, not {value}"]
    return false


NO_GRADIENT = {"rewrapped_without_gradient"}
"""Losses that an audit is right to refuse."""
Row = tuple[str, str, Callable[..., Any], Mapping[str, Any], Callable[[LossAudit], Verdict]]


def cases() -> Iterator[Row]:
    """(set, name, loss, options, verdict) of every loss."""
    for name, (loss, options, answer) in ZOO.items():
        yield "zoo", name, loss, options, partial(of_zoo, answer=answer)
    for name, (loss, options, must) in {**TRAPS, **UNLISTED}.items():
        yield "trap", name, loss, options, partial(of_trap, must=must, may=ALSO_TRUE.get(name, set()))
    for group, losses in (("further", FURTHER), ("unseen", UNSEEN)):
        for name, case in losses.items():
            yield group, name, case.loss, case.options, partial(judge, case=case)
    for group, rows in (("styles", STYLES), ("drawn", GENERATED), ("16 bits", SIXTEEN_BITS)):
        for row in rows:
            yield group, row.name, row.loss, row.call, partial(of_case, case=row)


def verdict_on(row: Row) -> tuple[str, list[str], LossAudit | None]:
    _, name, loss, options, verdict_of = row
    try:
        audit = audit_loss(loss, **options)
    except LossCallError as error:
        return ("right" if name in NO_GRADIENT else "open"), [f"refused: {error}"], None
    return *verdict_of(audit), audit


def main(arguments: list[str]) -> int:
    torch.set_num_threads(1)
    only, names = "--wrong" in arguments, {one for one in arguments if not one.startswith("--")}
    counts: Counter[tuple[str, str]] = Counter()
    seconds: list[float] = []
    for row in cases():
        group, name = row[:2]
        if names and name not in names and group not in names:
            continue
        started = time.process_time()
        verdict, reasons, audit = verdict_on(row)
        seconds.append(time.process_time() - started)
        counts[group, verdict] += 1
        if only and verdict == "right":
            continue
        found = "refused" if audit is None else ", ".join(f.id for f in audit.found) or "no finding"
        print(f"{group:8}{verdict:7}{name:44}{seconds[-1]:6.2f} s  {found}", flush=True)
        for reason in reasons:
            print(f"               {reason}")
    verdicts = ("right", "open", "other", "wrong")
    print(f"\n{'':8}" + "".join(f"{verdict:>7}" for verdict in verdicts))
    for group in dict.fromkeys(group for group, _ in counts):
        print(f"{group:8}" + "".join(f"{counts[group, verdict]:7}" for verdict in verdicts))
    print(f"CPU time: sum {sum(seconds):.1f} s, median {statistics.median(seconds):.2f} s over {len(seconds)} audits")
    return 1 if any(verdict == "wrong" for _, verdict in counts) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
