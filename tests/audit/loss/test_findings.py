"""Every finding: one loss has it, a near miss has not, and without its measurement it is not reported."""

from __future__ import annotations

import re
import runpy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.audit.loss.finding_pairs import PAIRS
from zloss.audit.loss import findings
from zloss.audit.loss.findings import FINDINGS, Evidence
from zloss.audit.loss.audit import audit_loss
from zloss.cli.main import main
from zloss.results.loss_audit import Finding, LossAudit, Witness

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/audit_loss.md").read_text(encoding="utf-8")


def test_every_finding_has_a_pair() -> None:
    assert PAIRS.keys() == FINDINGS.keys(), (
        "a finding needs a pair in finding_pairs.py, and a pair its function in findings.py"
    )


def test_the_page_says_which_findings_are_warnings() -> None:
    (sentence,) = re.findall(r"^(`.*`) are warnings\.$", PAGE, re.MULTILINE)
    warnings = {id for id, check in FINDINGS.items() if check.severity == "warning"}
    assert set(re.findall(r"`(\w+)`", sentence)) == warnings, (
        "name it in the sentence below the table of docs/audit_loss.md"
    )


def titles(heading: str) -> list[str]:
    """First cells of the table under a heading of the page."""
    section = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return [line.split("|")[1].strip() for line in section.splitlines() if line.startswith("| ")][1:]


def test_every_line_of_the_tables_of_the_page_is_measured_by_the_benchmark_on_losses_that_exist() -> None:
    bench = runpy.run_path(str(ROOT / "benchmarks/bench_audit_loss.py"))
    can, cannot = titles("What it can identify"), titles("What it cannot tell")
    assert min(len(can), len(cannot)) > 10
    beginnings = list(bench["LINES"])
    assert [title for title in can if not any(title.startswith(begin) for begin in beginnings)] == []
    assert [begin for begin in beginnings if not any(title.startswith(begin) for title in can + cannot)] == []
    for names in bench["LINES"].values():
        for name in names:
            bench["case"](name)


@pytest.mark.parametrize("id", PAIRS)
def test_a_loss_has_the_finding_and_it_goes_away_with_its_measurement(
    id: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = PAIRS[id]
    audit = audit_loss(pair.has, **pair.options)
    named = {one.id: one for one in audit.found}
    assert id in named
    further = {one for one, finding in named.items() if finding.severity != "note"} - {id} - pair.also
    assert not further, (
        "declare what is true of this loss in `also` of its pair; what is not must answer not_applicable"
    )
    for one in audit.found:
        assert (one.witness is None) == (one.severity == "note"), one
        if one.witness is not None:
            assert differs(one.witness), one
            exec(one.witness.code(linear=bool(pair.options.get("linear"))), {"my_loss": pair.has})
            assert capsys.readouterr().out.endswith(f"\n{one.witness.line}\n")
    blind = replace(FINDINGS[id], measure=lambda evidence: Finding(id, "pass", "Nothing was measured."))
    monkeypatch.setitem(findings.FINDINGS, id, blind)
    assert id not in {one.id for one in audit_loss(pair.has, **pair.options).found}


@pytest.mark.parametrize("id", PAIRS)
def test_a_near_miss_has_no_error_and_no_warning(id: str) -> None:
    pair = PAIRS[id]
    audit = audit_loss(pair.misses, **pair.options_of_near_miss)
    assert [one.sentence for one in audit.found if one.severity != "note"] == []


def differs(witness: Witness) -> bool:
    """Whether the two numbers of a witness are apart by more than their noise; one that is not finite always is."""
    if witness.measured is None or witness.expected is None:
        return True
    return abs(witness.measured - witness.expected) > (witness.noise or 0.0)


def leaky(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits, target) + 1e-3 * logits.logsumexp(-1).square().mean()


def test_the_lines_of_a_witness_reproduce_it() -> None:
    """The batch that they draw is the one that was measured."""
    audit = audit_loss(leaky)
    witness = next(one.witness for one in audit.findings if one.id == "ignored_tokens_leak")
    assert witness is not None
    space: dict[str, object] = {"my_loss": leaky}
    exec(witness.code(), space)
    logits, target = space["logits"], space["target"]
    assert isinstance(logits, torch.Tensor)
    assert isinstance(target, torch.Tensor)
    assert logits.grad is not None
    ignored = target == -100
    assert float(logits.grad[ignored].norm() / logits.grad[~ignored].norm()) == pytest.approx(
        witness.measured, rel=1e-9
    )
    assert witness.line in witness.code()


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


def test_an_audit_prints_in_one_line() -> None:
    """It printed every field of every check."""
    assert str(audit_loss(leaky)) == (
        "LossAudit(the loss 'leaky': 3 findings (all_ignored_nonfinite, denominator_mismatch, ignored_tokens_leak); "
        "λ = 0.001, c = 0 [raw])"
    )


def test_a_loss_that_refuses_infinite_logits_is_still_checked_on_a_batch_without_targets() -> None:
    def careful(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if not bool(torch.isfinite(logits).all()):
            raise ValueError("logits are not finite")
        valid = target >= 0
        ce = torch.nn.functional.cross_entropy(logits, target, reduction="sum")
        z = logits[valid].logsumexp(-1).square().sum()
        return (ce + 1e-3 * z) / valid.sum().clamp(min=1)

    checked = next(one for one in audit_loss(careful).findings if one.id == "all_ignored_nonfinite")
    assert checked.verdict == "pass"
    assert "infinite logits could not be tried" in checked.sentence


def test_witness_and_curve_survive_the_file() -> None:
    audit = audit_loss(lambda z, y: torch.nn.functional.cross_entropy(z, y) + 1e-3 * z.logsumexp(-1).abs().mean())
    again = LossAudit.from_dict(audit.to_dict())
    assert again == audit
    assert audit.identified.coordinate == "other"
    assert audit.identified.curve is not None
    points = torch.tensor(audit.identified.curve)
    assert bool((points[1:, 0] > points[:-1, 0]).all())
    assert points[:, 1].tolist() == pytest.approx(torch.sign(points[:, 0]).mul(1e-3).tolist(), abs=1e-7)


def test_an_accusation_needs_the_second_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """A finding that only the first draw shows is not reported, and `unexplained_source` has its numbers."""
    plain = FINDINGS["overflow"]

    def once(evidence: Evidence) -> Finding:
        if evidence.draw is evidence.ident.first:
            return Finding("overflow", "finding", "Seen.", 1.0, witness=evidence.witness("x", 1.0))
        return plain.measure(evidence)

    monkeypatch.setitem(findings.FINDINGS, "overflow", replace(plain, measure=once))
    audit = audit_loss(lambda z, y: torch.nn.functional.cross_entropy(z, y, reduction="sum"))
    found = {one.id: one for one in audit.found}
    assert "overflow" not in found
    assert "Two draws of the probes disagree. overflow" in found["unexplained_source"].sentence
