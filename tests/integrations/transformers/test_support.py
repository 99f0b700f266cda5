"""The table of outcomes: complete, without a silent difference, and true of the installed transformers."""

from __future__ import annotations

import pytest

from tests.integrations.transformers.sweep import PAGE, outcome_of
from tests.integrations.transformers.tiny_configs import causal_classes
from zloss.integrations.transformers import support
from zloss.integrations.transformers.support_table import support_page


def test_the_table_has_every_causal_class_and_no_third_outcome() -> None:
    transformers = pytest.importorskip("transformers")
    table = support()
    if transformers.__version__ != table.transformers:
        pytest.skip(f"the table is of transformers {table.transformers}")
    assert {model.name for model in table.classes} == set(causal_classes())
    assert {model.state for model in table.classes} <= {"exact", "refused", "not built"}
    assert table.count("exact") >= 150
    assert all(model.name in model.detail for model in table.classes if model.state == "refused")


def test_the_page_is_made_from_the_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == support_page(support())


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_sweep_gives_the_table() -> None:
    states = {name: outcome_of(name, model_type).state for name, model_type in causal_classes().items()}
    assert states == {model.name: model.state for model in support().classes}
