"""A vocabulary-parallel head with an FSDP2 body: losses, parameters, gradient norms and Adam state equal one process."""

from __future__ import annotations

import json
import subprocess
import sys


def test_head_and_body_on_two_meshes_equal_one_process() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    done = subprocess.run([*command, "-m", "tests.ranks.mesh_cases"], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout[done.stdout.index("{") :])
    assert found["clipped"]
    wrong = {name: value for name, value in found["differences"].items() if not value <= 1e-5}
    assert not wrong
    assert len(found["differences"]) == 15
