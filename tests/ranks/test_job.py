"""The job of a process: what its environment says, and errors in it."""

from __future__ import annotations

import pytest

from zloss.errors import InputError
from zloss.ranks.job import open_job


@pytest.mark.parametrize("value", ["soon", "0", "-5", "nan", "1e300"])
def test_a_timeout_that_cannot_be_used_is_named(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ZLOSS_RANK_TIMEOUT=soon` was a traceback of `float`."""
    for name, text in (("RANK", "0"), ("WORLD_SIZE", "2"), ("ZLOSS_RANK_TIMEOUT", value)):
        monkeypatch.setenv(name, text)
    with pytest.raises(InputError, match="ZLOSS_RANK_TIMEOUT is expected to be a number of seconds"), open_job():
        pass
