"""Columns of the paper's tables are written as the table of quantities writes them."""

from __future__ import annotations

import pytest

from zloss.results.quantities import define
from zloss_paper.engine.registry import find_recipe, labels


@pytest.mark.parametrize("label", labels())
def test_every_column_of_a_recipe_has_a_symbol(label: str) -> None:
    assert not [column for column in find_recipe(label).columns if define(column) is None]
