"""Every check: its first loss has the finding, its second has no error or warning, and without the check nothing is found."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.audit.loss import faulty
from tests.audit.loss.zoo import ZOO, ce, lse, mean, zl
from zloss.audit.loss.audit import audit_loss
from zloss.audit.loss.checks import CHECKS, Found
from zloss.audit.loss.evidence import Evidence
from zloss.audit.loss.probes import Space, draw
from zloss.cli.main import main
from zloss.results.loss_audit import Finding, LossAudit, Witness

PAGE = (Path(__file__).parents[3] / "docs/audit_loss.md").read_text(encoding="utf-8")
CONTRACT = {
    "zero_gradient_z", "low_precision_source", "forward_backward_mismatch", "all_ignored_nonfinite", "denominator_mismatch",
    "max_shifted", "not_off", "counted_twice", "overwrites_input", "reported_z_no_gradient", "upstream_ignored",
    "probabilities_not_logits", "overflow", "filtered_source", "padding_in_log_z", "inconsistent_softmax", "chunk_accumulation",
    "constant_in_value", "other_ignore_index", "depends_on_dtype",
}  # fmt: skip
GONE = {"reported_z_value", "reported_z_dtype", "returned_values", "not_squared"}


def test_the_ids_are_those_of_the_contract() -> None:
    assert CHECKS.keys() >= CONTRACT
    assert not CHECKS.keys() & GONE


def test_the_page_names_every_check_and_none_that_is_gone() -> None:
    named = set(re.findall(r"`(\w+)`", PAGE))
    assert CHECKS.keys() <= named
    assert not GONE & named


@pytest.mark.usefixtures("bf16_only")
@pytest.mark.parametrize("id", CHECKS)
def test_a_loss_has_the_finding_and_it_goes_away_with_its_check(
    id: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one = CHECKS[id]
    found = {each.id: each for each in audit_loss(one.has, **one.options).found}
    assert id in found
    assert (found[id].remedy, found[id].consequence) == (one.remedy, one.consequence)
    assert one.remedy
    assert one.consequence
    assert one.question.endswith("?")
    assert found[id].severity == one.severity
    for each in found.values():
        if each.severity != "note":
            assert each.witness is not None
            assert differs(each.witness), each
            exec(each.witness.code(linear=bool(one.options.get("linear"))), {"my_loss": one.has})
            assert capsys.readouterr().out.endswith(f"\n{each.witness.line}\n")

    # Only what this loss was found to have is asked again: the other checks answered otherwise already.
    for other in CHECKS:
        if other == id or other not in found:
            monkeypatch.setitem(CHECKS, other, replace(CHECKS[other], measure=lambda e: None))
    assert id not in {each.id for each in audit_loss(one.has, **one.options).found}


@pytest.mark.usefixtures("bf16_only")
@pytest.mark.parametrize("id", CHECKS)
def test_a_near_miss_has_no_error_and_no_warning(id: str) -> None:
    one = CHECKS[id]
    options = dict(one.options) | ({"off": faulty.only_cross_entropy} if "off" in one.options else {})
    found = audit_loss(one.misses, **options).found
    assert [each.sentence for each in found if each.severity != "note" or each.id == id] == []


def differs(witness: Witness) -> bool:
    """Whether the two numbers of a witness are apart by more than their noise; one that is not finite always is."""
    if witness.measured is None or witness.expected is None:
        return True
    return abs(witness.measured - witness.expected) > (witness.noise or 0.0)


def leaky(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, target) + 1e-3 * logits.logsumexp(-1).square().mean()


def test_an_audit_prints_in_one_line_and_its_witness_reproduces_what_it_says() -> None:
    audited = audit_loss(leaky)
    assert str(audited) == (
        "LossAudit(the loss 'leaky': 3 findings (ignored_tokens_leak, denominator_mismatch, all_ignored_nonfinite); "
        "λ = 0.001, c = 0 [raw])"
    )
    witness = next(one.witness for one in audited.findings if one.id == "ignored_tokens_leak")
    assert witness is not None
    space: dict[str, Any] = {"my_loss": leaky}
    exec(witness.code(), space)
    grad, ignored = space["logits"].grad, space["target"] == -100
    assert float(grad[ignored].norm() / grad[~ignored].norm()) == pytest.approx(witness.measured, rel=1e-3)


def test_the_printed_code_of_a_witness_runs_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It called a `my_loss` that it had not imported, printed nothing, and failed for a loss that returns a tuple."""
    file = tmp_path / "padded.py"
    file.write_text(
        "import torch.nn.functional as F\n\n\n"
        "def pair(logits, target):\n"
        "    ce, z = F.cross_entropy(logits, target, ignore_index=0), 1e-3 * logits.logsumexp(-1).square().mean()\n"
        "    return ce + z, ce.detach()\n"
    )
    assert main(["audit-loss", f"{file}:pair", "--ignore-index", "0", "--verbose"]) == 1
    printed = capsys.readouterr().out
    lines = [line[2:] for line in printed[printed.index("  # ") :].splitlines()]
    snippets = "\n".join(lines).split("# ")[1:]
    assert len(snippets) > 1
    for snippet in snippets:
        exec(snippet.partition("\n")[2], {})
        assert "expected" in capsys.readouterr().out.splitlines()[1]


def test_the_result_is_the_contract_and_survives_the_file() -> None:
    audited = audit_loss(lambda z, y: ce(z, y) + 1e-3 * mean(lse(z).abs(), y))
    data = audited.to_dict()
    assert data["schema"] == "zloss.loss-audit/2"
    keys = {"has_z", "coef", "target", "coordinate", "ce_denominator", "z_denominator", "uncertainty"}
    assert keys <= set(data["identified"])
    assert {"forward_rel_error", "delta_src", "cosine"} <= set(data["source"])
    fields = {"id", "verdict", "sentence", "figure", "severity", "witness", "remedy", "consequence"}
    assert all(set(one) == fields for one in data["findings"])
    assert [one["id"] for one in data["findings"]] == list(CHECKS)
    assert LossAudit.from_dict(data) == audited
    assert audited.identified.coordinate == "other"
    assert audited.identified.curve is not None
    points = torch.tensor(audited.identified.curve)
    assert bool((points[1:, 0] >= points[:-1, 0]).all())
    assert points[:, 1].tolist() == pytest.approx(torch.sign(points[:, 0]).mul(1e-3).tolist(), abs=5e-7)


@pytest.mark.parametrize(
    ("id", "word"),
    [
        ("not_off", "`off=`"),
        ("counted_twice", "`expect="),
        ("differs_from_expected", "`expect="),
        ("padding_in_log_z", "`valid_vocab=`"),
        ("inconsistent_softmax", "`linear=True`"),
        ("chunk_accumulation", "`linear=True`"),
    ],
)
def test_a_check_whose_input_was_not_supplied_says_what_to_pass(id: str, word: str, passed: LossAudit) -> None:
    answer = finding(passed, id)
    assert answer.verdict == "not_applicable"
    assert word in answer.sentence


@pytest.fixture(scope="module")
def passed() -> LossAudit:
    return audit_loss(faulty.correct)


@pytest.mark.parametrize("name", ["every other token", "Z of capped logits"])
def test_a_check_of_a_z_that_is_not_known_passed(name: str) -> None:
    loss, options, _ = ZOO[name]
    audited = audit_loss(loss, **options)
    for id in ("max_shifted", "probabilities_not_logits", "negative_coefficient", "denominator_mismatch"):
        assert finding(audited, id).verdict == "not_applicable", id


# What one draw of the probes shows and a second does not.


def finding(audited: LossAudit, id: str) -> Finding:
    return next(one for one in audited.findings if one.id == id)


def test_an_accusation_needs_the_second_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = CHECKS["overflow"].measure

    def once(e: Evidence) -> Found:
        return Finding("", "finding", "Seen.", 1.0) if e.seed == 0 else plain(e)

    monkeypatch.setitem(CHECKS, "overflow", replace(CHECKS["overflow"], measure=once))
    answer = finding(audit_loss(faulty.correct), "overflow")
    assert answer.verdict == "not_applicable"
    assert answer.sentence == "One draw of the probes shows it and a second does not: Seen."


@pytest.fixture(scope="module")
def first() -> dict[str, Tensor]:
    """The first row of every batch of the first draw."""
    return {kind: draw(kind, Space(), 0).logits_TV[0] for kind in ("mixed", "saturated", "wide", "confident")}


def seen_in(z: Tensor, rows: list[Tensor]) -> bool:
    return z.shape[-1] == 96 and any(torch.equal(z[0].detach().double(), row) for row in rows)


def test_ignored_tokens_that_leak_in_one_batch_are_not_an_error(first: dict[str, Tensor]) -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        stray = 1e-3 * lse(z)[y == -100].square().sum() / len(y)
        return faulty.correct(z, y) + (stray if seen_in(z, [first["mixed"]]) else 0.0)

    audited = audit_loss(loss)
    assert audited.errors == ()
    assert "a second does not" in finding(audited, "ignored_tokens_leak").sentence


def test_a_penalty_that_one_draw_shows_is_not_reported(first: dict[str, Tensor]) -> None:
    audited = audit_loss(lambda z, y: ce(z, y) + zl(z, y, 3e-3 if seen_in(z, list(first.values())) else 1e-3))
    assert audited.identified.has_z is None
    assert audited.identified.reason
    assert audited.errors == ()
