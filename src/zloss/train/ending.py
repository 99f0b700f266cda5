"""A rule that may end a run without its result."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zloss.errors import ZlossError
from zloss.results.step_record import StepRecord

EndingRule = Callable[[Sequence[StepRecord]], str | None]
"""All steps so far to the reason why the run ends here, or None.

The first process of a job asks it after every step, the last one included, and when a run goes on from a checkpoint.
"""


class RunEndedError(ZlossError):
    """An ending rule ended the run, on all processes after the same step."""

    def __init__(self, step: int, reason: str) -> None:
        super().__init__(f"the run ended after step {step}: {reason}")
        self.step, self.reason = step, reason
