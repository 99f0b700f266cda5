"""Router variants of a configuration: what they apply, what they are called, what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from zloss.errors import InputError, UnknownNameError
from zloss.results.moe_config import MoeRun
from zloss.results.train_config import TrainConfig
from zloss.train.moe.router_variant import absolute_coef, applied_coef, relative_scale


@pytest.mark.parametrize(
    ("router", "coef", "relative"),
    [
        ("token_layer_mean", 1e-3, 1.0),
        ("active_route_mean", 1e-3, 0.25),
        ("active_route_mean:matched", 4e-3, 1.0),
        ("active_route_sum", 1e-3, 4.0),
        ("active_route_sum:matched", 2.5e-4, 1.0),
    ],
)
def test_matching_converts_the_coefficient(router: str, coef: float, relative: float) -> None:
    moe = MoeRun(top_k=4, router=router, router_coef=1e-3)
    assert applied_coef(moe) == coef
    assert relative_scale(moe) == relative
    assert absolute_coef(moe, 512) == pytest.approx(relative * 1e-3 / (512 * 4), rel=1e-15)


def test_off_applies_nothing() -> None:
    moe = MoeRun()
    assert (moe.convention, applied_coef(moe), relative_scale(moe), absolute_coef(moe, 512)) == (None, 0.0, 0.0, 0.0)


def test_folders_show_the_variant() -> None:
    def name(method: str = "ce", coef: float = 0.0, **moe: Any) -> str:
        return TrainConfig(method=method, coef=coef, seed=2, moe=MoeRun(**moe)).name

    assert name() == "none-0-s2"
    assert name(router="active_route_sum:matched", router_coef=1e-3) == "active_route_sum-matched-0.001-s2"
    assert name("centered", 1e-4) == "none-0-centered-0.0001-s2"
    assert TrainConfig(seed=2).name == "ce-0-s2"


@pytest.mark.parametrize("router", ["active_route", "none:matched", "active_route_sum:match", "active_route_sum:", ""])
def test_unknown_variants_are_refused(router: str) -> None:
    with pytest.raises(UnknownNameError, match="router variant"):
        MoeRun(router=router, router_coef=1e-3)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"router_coef": 1e-3}, "`none` has no penalty"),
        ({"router": "token_layer_mean", "router_coef": -1.0}, "finite number ≥ 0"),
        ({"load_balance": float("nan")}, "finite number ≥ 0"),
        ({"capacity_factor": 0.0}, "finite number > 0"),
        ({"router_target": float("inf")}, "finite number"),
    ],
)
def test_bad_numbers_are_one_sentence(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        MoeRun(**fields)
