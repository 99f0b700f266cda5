"""The glossary on a terminal."""

from __future__ import annotations

import pytest

from zloss.cli.main import main
from zloss.decide.stages import STAGES
from zloss.errors import InputError
from zloss.report.glossary import entries
from zloss.results.quantities import QUANTITIES


@pytest.mark.parametrize("word", ["p_z_999", "P_Z^99.9"])
def test_a_key_and_its_symbol_name_the_same_entry(word: str) -> None:
    ((name, meaning),) = entries((word,))
    assert name == "P_Z^99.9 (p_z_999)"
    assert "p99.9 of |log Z − c|" in meaning
    assert "nat" in meaning


def test_every_key_is_found() -> None:
    for quantity in QUANTITIES:
        assert any(quantity.meaning in meaning for _, meaning in entries((quantity.key,)))


def test_a_letter_is_explained_without_all_that_contain_it() -> None:
    names = [name for name, _ in entries(("μ",))]
    assert names == ["μ", "μ (mu)"]


def test_a_part_finds_all_that_have_it() -> None:
    assert {"p99 ‖g‖₂ (grad_norm_p99)", "max ‖g‖₂ (grad_norm_max)"} <= {name for name, _ in entries(("grad_norm_",))}


def test_the_first_words_of_a_report_are_explained() -> None:
    for stage in STAGES:
        ((name, meaning),) = entries((stage.name,))
        assert name == stage.name
        assert stage.trigger in meaning
    assert entries(("token-layer",))


def test_one_quantity_under_two_keys_is_explained_once() -> None:
    assert len(entries(("s_rel",))) == 1


def test_an_unknown_word_is_an_input_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match="no 'nothing of the kind'"):
        entries(("nothing of the kind",))
    assert main(["glossary", "nothing of the kind"]) == 2
    assert main(["glossary", "a_p_99"]) == 0
    assert "A_p^99 (a_p_99): p99 output-to-hidden gain" in capsys.readouterr().out
