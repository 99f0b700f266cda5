"""The straight audits: independent of the package, equal to a real audit, and true to the identities of the paper."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.audit.checkpoint.straight import differences, load_fp64, token_stream
from tests.straight_audit import Tokens, comparison, loss_audit, run_tiny, straight_report, tiny_model, tiny_report
from tests.tiny_models import save_model
from zloss.audit.checkpoint.run import run_audit
from zloss.audit.config import AuditConfig
from zloss.results.audit import AuditReport, GeometrySample
from zloss.results.comparison import Comparison
from zloss.results.loss_audit import LossAudit
from zloss.text import pydoc_topics

TESTS = Path(__file__).parent
STRAIGHT = sorted(str(file.relative_to(TESTS.parent)) for file in TESTS.rglob("straight*.py"))
OURS = ("zloss", "zloss_paper")


def imports(file: Path, module: str) -> Iterator[str]:
    """Every module that `file` imports, inside functions too, and the packages it lies in."""
    yield from (module.rsplit(".", level)[0] for level in range(1, module.count(".") + 1))
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = module.rsplit(".", node.level)[0] if node.level else ""
            base = ".".join(filter(None, (package, node.module)))
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Name | ast.Attribute):
            name = node.id if isinstance(node, ast.Name) else node.attr
            if name in ("import_module", "__import__"):
                yield f"{OURS[0]} (perhaps, by {name})"


def ways_to_the_package(root: Path, file: str) -> list[str]:
    """Chains of imports from `file` to the package, through any module of the tests."""
    found, seen, pending = [], set(), [(file,)]
    while pending:
        way = pending.pop()
        for name in imports(root / way[-1], way[-1].removesuffix(".py").replace("/", ".")):
            if name.split(".")[0].split(" ")[0] in OURS:
                found.append(" → ".join((*way, name)))
            place = name.replace(".", "/")
            for other in (f"{place}.py", f"{place}/__init__.py"):
                if other not in seen and (root / other).is_file():
                    seen.add(other)
                    pending.append((*way, other))
    return found


def test_a_straight_audit_that_imports_the_package_would_move_with_it() -> None:
    assert {"tests/straight_audit.py", "tests/straight_histogram.py"} < set(STRAIGHT)
    assert {file: ways for file in STRAIGHT if (ways := ways_to_the_package(TESTS.parent, file))} == {}


@pytest.mark.parametrize(
    ("line", "helper"),
    [
        ("import zloss", ""),
        ("from zloss.results import audit", ""),
        ("def f():\n    import zloss_paper.recipes", ""),
        ("import importlib\nimportlib.import_module('zloss')", ""),
        ("from tests.helper import something", "import zloss"),
        ("from tests import helper", "def f():\n    from zloss import head_loss"),
        ("from .helper import something", "import zloss"),
        ("from . import helper", "import zloss"),
    ],
)
def test_every_way_to_the_package_is_seen(tmp_path: Path, line: str, helper: str) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/straight_x.py").write_text(line)
    (tmp_path / "tests/helper.py").write_text(helper)
    (way,) = ways_to_the_package(tmp_path, "tests/straight_x.py")[:1]
    assert ("tests/helper.py" in way) == bool(helper)
    (tmp_path / "tests/helper.py").write_text("import math")
    (tmp_path / "tests/straight_x.py").write_text("import torch\nfrom tests import helper\nNAME = 'zloss.audit/1'")
    assert ways_to_the_package(tmp_path, "tests/straight_x.py") == []
    (tmp_path / "tests/__init__.py").write_text("import zloss")
    assert ways_to_the_package(tmp_path, "tests/straight_x.py") == ["tests/straight_x.py → tests/__init__.py → zloss"]


def test_the_dicts_have_the_keys_of_the_files() -> None:
    """A key that a file does not have would be dropped on reading, or kept as unknown."""
    tokens, _, _ = run_tiny(tiny_model())
    for record_type, plain in (
        (AuditReport, tiny_report()),
        (LossAudit, loss_audit(tokens, torch.bfloat16)),
        (Comparison, comparison({"ce": 0.0, "standard": 1e-2})),
    ):
        record = record_type.from_dict(plain)
        assert list(differences(record.to_dict(), plain)) == []
        if isinstance(record, AuditReport):
            parts = (record, record.model, record.corpus, record.figures, record.gradient, record.provenance)
            assert all(part is not None and not part.extra for part in parts)


@pytest.mark.parametrize("kind", ["gpt2", "neox"])
def test_it_is_the_audit_that_the_package_makes(kind: str, tmp_path: Path) -> None:
    size, blocks, rest = 48, 13, ("target", "diag_coef", "gain_beta", "nonfinite", "finished_blocks")
    folder, text = save_model(kind, tmp_path / kind), tmp_path / "topics.txt"
    text.write_text("\n\n".join(pydoc_topics()[:20]))
    config = AuditConfig(model=str(folder), texts=(str(text),), blocks=blocks, block_size=size, gradient_blocks=0)
    report = run_audit(config).to_dict()
    model, tokenizer = load_fp64(folder)
    ids = token_stream(tokenizer, text.read_text(), blocks * size + 1)
    with torch.no_grad():
        states = model(ids[:-1].view(blocks, size), output_hidden_states=True).hidden_states[-1].flatten(0, 1)
    texts = [tokenizer.decode([index]) for index in ids[1:].tolist()]
    tokens = Tokens(states, model.get_output_embeddings().weight.detach(), ids[1:], texts, size)

    def compared(tokens: Tokens) -> list[str]:
        straight = straight_report(tokens, name=kind, corpus="topics", gradient={}, paths={})
        same = {key: straight[key] for key in ("ppl", "mu_abs_99", "heads", "precision", *rest)}
        figures = {"spectrum": straight["figures"]["spectrum"]}
        return list(differences(report, {**same, "figures": figures}))

    assert compared(tokens) == []
    # The same comparison sees a head that is not quite the right one.
    wrong = compared(replace(tokens, weight_VD=tokens.weight_VD * 1.001))
    assert any(line.startswith("heads.raw.p_z_999") for line in wrong)


def holds(sample: GeometrySample) -> bool:
    """Centering translates along e₁ by ‖w̄‖ and nothing along e₂; ‖δ_u‖ = a‖δ_z‖; a rank-16 part is a part."""
    x, x_c = np.array(sample.x_raw), np.array(sample.x_centered)
    y, y_c = np.array(sample.y_raw), np.array(sample.y_centered)
    moved = np.allclose(x - x_c, sample.mean_row_norm, atol=2e-4) and np.allclose(y, y_c, atol=2e-4)
    gain = all(
        np.allclose(np.array(u), np.sqrt(a2) * np.array(z), rtol=1e-3)
        for u, a2, z in (
            (sample.delta_u_raw, sample.a2_raw, sample.delta_z_raw),
            (sample.delta_u_centered, sample.a2_centered, sample.delta_z_centered),
        )
    )
    part = all(np.all(np.array(r) <= np.array(a) * 1.001) for r, a in ((sample.rank16_raw, sample.a2_raw),))
    return bool(moved and gain and part)


def test_the_sample_obeys_the_identities_of_the_paper(report: AuditReport) -> None:
    sample = report.figures.geometry
    assert sample is not None
    assert holds(sample)
    assert not holds(replace(sample, x_centered=sample.x_raw))
    assert not holds(replace(sample, delta_u_raw=sample.delta_z_raw))


def test_histograms_count_every_token_once(report: AuditReport) -> None:
    assert len(report.figures.histograms) == 7
    for histogram in report.figures.histograms:
        assert sum(histogram.counts) == report.corpus.predictions
        assert len(histogram.edges) == len(histogram.counts) + 1


def test_the_spectrum_agrees_with_the_numbers(report: AuditReport) -> None:
    spectrum = report.figures.spectrum
    assert spectrum is not None
    assert spectrum.raw[0] == pytest.approx(report.heads.raw.sigma_1)
    energy = np.square(spectrum.centered)
    assert energy[:16].sum() / energy.sum() == pytest.approx(report.heads.centered.e_16)
