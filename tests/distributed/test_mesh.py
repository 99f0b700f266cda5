"""A vocabulary-parallel head with an FSDP2 body: losses, parameters, gradient norms and Adam state equal one process."""

from __future__ import annotations

import json

from tests.distributed.launch import needs_fsdp2_means
from tests.distributed.mesh_cases import main
from tests.forked import forked_ranks


@needs_fsdp2_means
def test_head_and_body_on_two_meshes_equal_one_process() -> None:
    found = json.loads(forked_ranks(4, main))
    assert found["clipped"]
    wrong = {name: value for name, value in found["differences"].items() if not value <= 1e-5}
    assert not wrong
    assert len(found["differences"]) == 15
    # The recipe of FSDP2 with tensor parallelism, as the page has it.
    assert set(found["recipes"]) == {"fsdp_tp"}
    assert found["recipes"]["fsdp_tp"] <= 1e-5
