"""The plane in which the gradient-geometry figure draws the hidden sources (paper fig:gradient_geometry, panel a).

Axes: T tokens, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zloss.measure.hidden_source import shaped_chunks
from zloss.measure.measurement import Measurement


@torch.no_grad()
def geometry_plane(measurement: Measurement, hidden_TD: Tensor, target_T: Tensor) -> Tensor | None:
    """[2, D]: w̄/‖w̄‖, and the leading principal direction of the centered cloud of Wᵀp orthogonal to it.

    None where the mean row vanishes, which leaves no first axis, and for softcapped logits.
    """
    first_D = measurement.mean_row_D.double()
    if measurement.head.softcap is not None or not first_D.norm() > 0 or first_D.numel() < 2:
        return None
    first_D = first_D / first_D.norm()
    problem = measurement.problem(hidden_TD, target_T)
    cloud_TD = torch.nan_to_num(torch.cat([shape_CD.double() for _, shape_CD in shaped_chunks(problem)]))
    cloud_TD = cloud_TD - cloud_TD.mean(dim=0)
    cloud_TD = cloud_TD - torch.outer(cloud_TD @ first_D, first_D)
    second_D = torch.linalg.eigh(cloud_TD.T @ cloud_TD).eigenvectors[:, -1]
    # The sign of a singular vector is arbitrary; its largest entry is made positive, so that figures can be compared.
    return torch.stack([first_D, second_D * torch.sign(second_D[second_D.abs().argmax()])])
