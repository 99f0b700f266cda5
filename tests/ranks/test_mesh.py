"""A vocabulary-parallel head with an FSDP2 body: losses, parameters, gradient norms and Adam state equal one process."""

from __future__ import annotations

import json

from tests.ranks.launch import launched, needs_fsdp2_means


@needs_fsdp2_means
def test_head_and_body_on_two_meshes_equal_one_process() -> None:
    done = launched(4, "tests.ranks.mesh_cases")
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout[done.stdout.index("{") :])
    assert found["clipped"]
    wrong = {name: value for name, value in found["differences"].items() if not value <= 1e-5}
    assert not wrong
    assert len(found["differences"]) == 15
    # The recipe of FSDP2 with tensor parallelism, as the page has it.
    assert set(found["recipes"]) == {"fsdp_tp"}
    assert found["recipes"]["fsdp_tp"] <= 1e-5
