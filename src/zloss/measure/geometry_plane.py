"""The plane in which the gradient-geometry figure draws the hidden sources (paper fig:gradient_geometry, panel a).

The plane is that of the sampled tokens, which are spread over the whole text. Their vectors Wᵀp are kept during the pass
over the text, so the plane needs no further forward pass, and it does not depend on batches.

Axes: T sampled tokens, D width.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from zloss.measure.measurement import Measurement
from zloss.results.coordinate import Coordinate


def has_plane(measurement: Measurement) -> bool:
    """False where the mean row vanishes, which leaves no first axis, and for softcapped logits."""
    mean_row_D = measurement.mean_row_D
    return measurement.head.softcap is None and mean_row_D.numel() > 1 and bool(mean_row_D.norm() > 0)


def geometry_plane(cloud_TD: Tensor, mean_row_D: Tensor) -> Tensor:
    """[2, D] in fp64: w̄/‖w̄‖, and the leading principal direction of the centered cloud of Wᵀp orthogonal to it."""
    first_D = mean_row_D.double() / mean_row_D.double().norm()
    cloud_TD = cloud_TD.double()
    cloud_TD = cloud_TD - cloud_TD.mean(dim=0)
    cloud_TD = cloud_TD - torch.outer(cloud_TD @ first_D, first_D)
    second_D = torch.linalg.eigh(cloud_TD.T @ cloud_TD).eigenvectors[:, -1]
    # The sign of a singular vector is arbitrary; its largest entry is made positive, so that figures can be compared.
    return torch.stack([first_D, second_D * torch.sign(second_D[second_D.abs().argmax()])])


def places_in_plane(
    cloud_TD: Tensor, mean_row_D: Tensor, coordinates: Collection[Coordinate]
) -> dict[str, tuple[float, ...]]:
    """x and y of every token in the plane of all of them, by coordinate: of Wᵀp, and centered of Wᵀp − w̄."""
    if not len(cloud_TD):
        return {}
    mean_row_D = mean_row_D.cpu()
    plane_2D = geometry_plane(cloud_TD, mean_row_D)
    found: dict[str, tuple[float, ...]] = {}
    for coordinate in coordinates:
        placed_TD = cloud_TD.double() if coordinate == "raw" else cloud_TD.double() - mean_row_D
        x_T, y_T = (placed_TD @ plane_2D.T).unbind(dim=1)
        found |= {f"x_{coordinate}": tuple(x_T.tolist()), f"y_{coordinate}": tuple(y_T.tolist())}
    return found
