"""The identities of the paper on the reports the other tests draw: they carry real numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from zloss.results.audit import AuditReport
from zloss.results.figure_data import GeometrySample


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
