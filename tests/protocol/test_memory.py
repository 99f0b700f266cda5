"""How much memory is free, from what the system says."""

from __future__ import annotations

from pathlib import Path

from zloss.protocol.recommend_runs import free_bytes


def test_free_memory_is_what_the_kernel_and_the_control_group_leave(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    assert free_bytes(tmp_path) == 0
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    4096 kB\n")
    assert free_bytes(tmp_path) == 4096 * 1024
    (tmp_path / "sys/fs/cgroup/memory.current").write_text("1000\n")
    for limit, free in (("3000\n", 2000), ("max\n", 4096 * 1024)):
        (tmp_path / "sys/fs/cgroup/memory.max").write_text(limit)
        assert free_bytes(tmp_path) == free
