"""How much memory is free, from what the system says."""

from __future__ import annotations

from pathlib import Path

from zloss.protocol import recommend_runs


def test_free_memory_is_what_the_kernel_and_the_control_group_leave(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    4096 kB\n")
    assert recommend_runs._available(tmp_path / "meminfo") == 4096 * 1024
    assert recommend_runs._available(tmp_path / "missing") == 0
    (tmp_path / "memory.max").write_text("3000\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert recommend_runs._below_limit(tmp_path) == 2000
    (tmp_path / "memory.max").write_text("max\n")
    assert recommend_runs._below_limit(tmp_path) > 2**50
