"""The glossary on a terminal."""

from __future__ import annotations

import pytest

from zloss.cli.main import main
from zloss.decide.stages import STAGES
from zloss.report.glossary import entries
from zloss.results.quantities import QUANTITIES


def test_every_key_symbol_and_stage_is_found() -> None:
    for quantity in QUANTITIES:
        assert any(quantity.meaning in meaning for _, meaning in entries((quantity.key,)))
    for stage in STAGES:
        ((name, meaning),) = entries((stage.name,))
        assert name == stage.name
        assert stage.trigger in meaning
    for word in ("p_z_999", "P_Z^99.9"):
        ((name, meaning),) = entries((word,))
        assert name == "P_Z^99.9 (p_z_999)"
        assert meaning.startswith("p99.9 of |log Z − c|")
        assert meaning.endswith("in nat")


def test_a_name_is_exact_before_it_is_a_part_and_one_quantity_is_explained_once() -> None:
    assert [name for name, _ in entries(("μ",))] == ["μ", "μ (mu)"]
    assert {"p99 ‖g‖₂ (grad_norm_p99)", "max ‖g‖₂ (grad_norm_max)"} <= {name for name, _ in entries(("grad_norm_",))}
    assert entries(("token-layer",))
    assert len(entries(("s_rel",))) == 1


def test_the_words_of_a_recommendation_are_found() -> None:
    for word in ("λ_μ", "λ_rel", "c_μ", "c_rel", "factorized", "common shift", "tolerance", "arm", "holds", "open"):
        assert entries((word,)), word
    assert [name for name, _ in entries(("arm",))] == ["arm"]
    assert [name for name, _ in entries(("open",))] == ["holds, fails, open"]


def test_the_command_explains_a_word_and_refuses_an_unknown_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["glossary", "nothing of the kind"]) == 2
    assert "no 'nothing of the kind'" in capsys.readouterr().err
    assert main(["glossary", "a_p_99"]) == 0
    assert "A_p^99 (a_p_99): p99 output-to-hidden gain" in capsys.readouterr().out
