"""Whose run a folder holds, where its config.json or the manifest of a checkpoint is damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from zloss.errors import InputError
from zloss.jobs import Job
from zloss.train.folder import SavedState, earlier_settings, is_finished


@pytest.mark.parametrize("content", [None, "", '{"method": "ce", "se', "[]", '{"coef": NaN}'])
def test_a_finished_run_without_readable_settings_is_not_overwritten(tmp_path: Path, content: str | None) -> None:
    """It was trained over with other settings, and a kill on the way left those settings beside the old metrics."""
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert earlier_settings(tmp_path) is None  # only the beginning of a run: it is made anew
    (tmp_path / "metrics.json").write_text("{}")
    with pytest.raises(InputError, match=r"contains a finished run whose settings are unknown: .*config\.json"):
        earlier_settings(tmp_path)
    assert not is_finished(tmp_path)


@pytest.mark.parametrize(
    "content", ["", "[]", "3", '{"files": []}', '{"files": {}, "identity": "mine"}', '{"step": [], "files": {}}']
)
def test_a_checkpoint_with_a_damaged_manifest_is_passed_over(
    tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "checkpoints" / "step-0000004"
    place.mkdir(parents=True)
    (place / "manifest.json").write_text(content)
    assert SavedState(tmp_path, "mine", Job()).load(accelerator=None) == (0, [])
    assert "step-0000004 is damaged" in capsys.readouterr().err
