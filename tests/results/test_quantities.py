"""Every number of a written file has a symbol, a sentence and, where the paper defines it, a label that the paper has."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from tests.laws.example_results import implementation_example
from tests.measured_reports import weighed
from tests.train.tiny_moe import run_variants, tiny_moe_config
from tests.train.tiny_run import tiny_config
from zloss.results.audit import AuditReport
from zloss.results.quantities import QUANTITIES, define, symbol
from zloss.statistics import TokenStats
from zloss.train.grid import Grid, run_grid
from zloss.train.run import RunOptions

PAPER = """
    eq:zloss eq:source eq:transport eq:causal_pipeline eq:transport_bound eq:ce_shift_direction eq:z_shift_direction
    eq:centered_head eq:tied_decomp eq:hidden_injection eq:hidden_bound eq:ap eq:ap_svd eq:removed_source_general
    eq:removed_source eq:centered_raw_adjoint eq:z_expand eq:factorized eq:gain_aware eq:gain_aware_source
    eq:router_loss eq:overflow_proxy eq:precision_link eq:source_mismatch eq:backward_deltas eq:centered_raw
    prop:router_effective_coefficient cor:router_topk_active_mean cor:router_topk_active_sum fig:transport
    fig:gradient_geometry tab:pretrained tab:finetune tab:stress_diag tab:list_notation
    tab:diagnostic_intervention_map tab:fineweb_pretrained tab:spectral_audit tab:source_audit tab:triton_fused
    tab:update_audit tab:fineweb_ft tab:fineweb_medium_ft tab:gpt2_diag tab:medium_ft tab:medium_long tab:pythia_ft
    tab:fineweb_noclip_stress tab:fineweb_update_outlier tab:fineweb_update_outlier_sweep tab:adam_state_stress
    tab:overflow_audit tab:router tab:moe app:related_work app:factorized_objective app:router_scale_derivations
    app:diagnostic_conventions app:setup_details app:seed_details app:additional_results app:tied_path_diagnostics
    app:source_deployment app:implementation_audits app:stress_endpoints app:moe_training_results sec:precision_link
"""
"""Every label of the paper."""
LABELS = frozenset(PAPER.split())
NOT_QUANTITIES = {"figures", "decisions", "thresholds", "timings", "provenance", "quantile_bounds", "extra", "reasons"}
"""Parts of a report that hold data of figures, settings or times."""


SECTIONS = {"router", "gradient", "tied_paths", "diagnostic_tied_paths", "adam", "lambda_budget"}
"""A null under one of these stands for a whole record."""
STEP_FACTS = {"lr", "seconds", "micro_batches", "micro_nan", "micro_inf"}
"""Settings, times and counts of a step record."""


def numbers(value: Any, path: str = "") -> Iterator[str]:
    """Dotted paths of the numbers, and of the nulls that stand for one; a list counts as its items."""
    if isinstance(value, dict):
        for key, item in value.items():
            if key not in NOT_QUANTITIES:
                yield from numbers(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for item in value:
            yield from numbers(item, path)
    elif value is None or (isinstance(value, (int, float)) and not isinstance(value, bool)):
        yield path


def test_every_number_of_an_audit_and_of_an_implementation_audit_has_an_entry(report: AuditReport) -> None:
    planned = {"router_coef": 1e-3, "router_convention": "megatron", "router_share": 0.1}
    for record, least in ((weighed(report, **planned), 50), (implementation_example(report), 30)):
        found = set(numbers(record.to_dict())) - SECTIONS
        assert len(found) > least
        assert not [path for path in sorted(found) if define(path) is None]


def test_every_number_of_a_run_and_of_its_steps_has_an_entry(tmp_path: Path) -> None:
    dense = tiny_config(tmp_path / "dense", steps=4, adam_every=2)
    run_grid(Grid(dense, ("standard",), (1e-3,), (1,)), tmp_path / "runs", options=RunOptions(checkpoint_every=0))
    experts = tiny_moe_config(tmp_path / "moe", moe={"capacity_factor": 1.0}, steps=4, gradient_blocks=2)
    run_variants(experts, tmp_path / "runs", routers=("active_route_sum",))
    folders = sorted(path.parent for path in (tmp_path / "runs").glob("*/metrics.json"))
    assert len(folders) == 2
    for folder in folders:
        data = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
        steps = [json.loads(line) for line in (folder / "steps.jsonl").read_text(encoding="utf-8").splitlines()]
        found = set(numbers(data)) | {path for step in steps for path in numbers(step)}
        found -= SECTIONS | STEP_FACTS
        assert len(found) > 100
        unknown = [path for path in sorted(found) if define(path) is None]
        assert not unknown, unknown


def test_entries_are_complete_and_their_labels_are_the_papers() -> None:
    assert len({entry.key for entry in QUANTITIES}) == len(QUANTITIES)
    for entry in QUANTITIES:
        assert entry.symbol
        assert entry.meaning
        assert not entry.meaning.endswith("."), entry
        assert not entry.equation or entry.equation in LABELS, entry
    properties = {name for name, value in vars(TokenStats).items() if isinstance(value, property)}
    assert not [name for name in {f.name for f in fields(TokenStats)} | properties if define(name) is None]


def test_a_number_without_an_entry_is_seen_and_one_key_of_two_meanings_is_told_by_its_path() -> None:
    assert define("heads.raw.a_p_50") is define("nowhere") is None
    assert list(numbers({"heads": {"raw": {"a_p_50": 1.0, "name": "x", "exact": True}}})) == ["heads.raw.a_p_50"]
    found = [define(path) for path in ("tied_paths.raw.cosine", "source.cosine")]
    assert [entry and entry.equation for entry in found] == ["eq:tied_decomp", "eq:backward_deltas"]
    assert symbol("unheard_of") == "unheard_of"
