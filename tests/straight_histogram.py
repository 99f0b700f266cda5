"""Histograms computed straight from token values held in memory, as report.json has them; nothing of the package."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

BINS = 80


def log_edges(*samples: npt.ArrayLike, bins: int = BINS) -> list[float]:
    """Logarithmic edges that serve all `samples` together, from the smallest 0.1 % quantile to the largest value.

    Raw and centered tails can differ by a factor of ten: only shared logarithmic bins show both.
    """
    finite = [values[np.isfinite(values) & (values > 0)] for values in map(_flat, samples)]
    finite = [values for values in finite if values.size]
    if not finite:
        return []
    low, high = (
        min(float(np.quantile(values, 1e-3)) for values in finite),
        max(float(values.max()) for values in finite),
    )
    if not low < high:
        low, high = low / 2, high * 2
    edges = np.geomspace(low, high, bins + 1)
    return [float(edge) for edge in edges]


def count(quantity: str, coordinate: str, values: npt.ArrayLike, edges: list[float]) -> dict[str, Any]:
    """Every finite value counted once: those outside the edges fall into the first or last bin."""
    counts: list[int] = []
    if edges:
        flat = _flat(values)
        inside = np.clip(flat[np.isfinite(flat)], edges[0], edges[-1])
        counts = np.histogram(inside, bins=np.asarray(edges))[0].tolist()
    return {"quantity": quantity, "coordinate": coordinate, "edges": edges, "counts": counts}


def _flat(values: npt.ArrayLike) -> npt.NDArray[np.float64]:
    return np.asarray(values, dtype=np.float64).reshape(-1)
