"""Does the loss apply the same objective to many tokens and to a large vocabulary?"""

from __future__ import annotations

from zloss.audit.loss.evidence import CANNOT_TELL, Evidence, found, not_applicable, passed
from zloss.results.loss_audit import Finding

ID = "size_dependent"


def check(evidence: Evidence) -> Finding:
    """The sizes that were tried, worst first; sizes the loss refuses and those left out are named."""
    tried = evidence.reach
    if not evidence.ident.told:
        return not_applicable(ID, CANNOT_TELL)
    if not tried:
        return not_applicable(
            ID, "Other sizes were not tried: the gradient is filtered, in 16 bits, or of another form."
        )
    wrong = [one for one in tried if one.verdict == "differs"]
    if wrong:
        first = wrong[0]
        others = len(wrong) - 1
        more = f" So it is at {others} further size{'s' * (others > 1)}." if others else ""
        return found(ID, f"At {first.words}: {first.sentence}.{more}", first.figure)
    same = [one.words for one in tried if one.verdict == "same"]
    refused = [one.words for one in tried if one.verdict == "refused"]
    left_out = [one.words for one in tried if one.verdict == "left_out"]
    if not same:
        untried = "No other size was tried, for time (`thorough=True` tries them)."
        return not_applicable(ID, "The loss accepts no other size." if refused else untried)
    notes = f" It refuses {len(refused)} sizes." if refused else ""
    notes += f" Not tried, for time: {'; '.join(left_out)} (`thorough=True`)." if left_out else ""
    largest = _largest(same)
    return passed(ID, f"The same objective at {len(same)} other sizes, up to {largest}.{notes}")


def _largest(words: list[str]) -> str:
    """The largest T and the largest V among sizes written as "T = 1,000, V = 96"."""
    pairs = [tuple(int(x.replace(",", "").split("= ")[1]) for x in text.split(", ")[:2]) for text in words]
    return f"T = {max(t for t, _ in pairs):,} and V = {max(v for _, v in pairs):,}"
