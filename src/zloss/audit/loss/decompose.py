"""The logit gradient of each token in the three directions an objective of this family has.

    δ_t = a_t p_t − b_t onehot(y_t) − u_t 1/V + rest

Cross-entropy with the weight w_t and label smoothing ε has a = w, b = w(1 − ε), u = wε; a penalty on log Z adds its source
s_t to a, one on log Z − μ adds it to a and to u. Nothing about weights or penalties is assumed: every token is solved alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zloss.audit.loss.fit import ROUNDING
from zloss.audit.loss.measured import Measured


@dataclass(frozen=True)
class Rows:
    """One number per token; tokens whose p is parallel to onehot(y) or to 1/V cannot be solved and are left out."""

    a_T: Tensor
    b_T: Tensor
    u_T: Tensor
    solved_T: Tensor
    """bool: the three directions are independent."""
    inside_T: Tensor
    """bool: nothing but rounding lies outside the three directions."""
    tolerance_T: Tensor
    """Rounding of a, b and u."""

    @property
    def exact(self) -> bool:
        """Whether every token lies in the three directions."""
        return bool(self.inside_T[self.solved_T].all()) and bool(self.solved_T.any())


def decompose(data: Measured) -> Rows:
    """Least squares per token in the warped coordinates of `data`."""
    r = data.reference
    basis = torch.stack([data.transport(x) for x in (r.p_TV, -r.onehot_TV, -r.uniform_TV)], dim=1)  # [T, 3, V]
    g = data.grad_TV
    size = basis.norm(dim=-1).clamp(min=1e-300)
    unit = basis / size.unsqueeze(-1)
    gram = unit @ unit.transpose(1, 2)
    right = (unit @ g.unsqueeze(-1)).squeeze(-1)
    solved_T = torch.linalg.eigvalsh(gram)[:, 0] > 1e-5
    safe = torch.where(solved_T[:, None, None], gram, torch.eye(3, dtype=gram.dtype))
    x = torch.linalg.solve(safe, right.unsqueeze(-1))
    left = g.unsqueeze(-1) - unit.transpose(1, 2) @ x
    # One refinement step: the normal equations square the condition number.
    x = x + torch.linalg.solve(safe, unit @ left)
    rest = (g.unsqueeze(-1) - unit.transpose(1, 2) @ x).squeeze(-1).norm(dim=-1)
    a, b, u = (x.squeeze(-1) / size).unbind(-1)
    scale_T = (a * size[:, 0]).abs() + (b * size[:, 1]).abs()
    rounding_T = ROUNDING * data.eps * data.noise_T * scale_T
    # A millionth of the row is no structure, whatever the arithmetic.
    inside_T = rest <= torch.maximum(rounding_T, 1e-6 * g.norm(dim=-1)) + 1e-300
    return Rows(a, b, u, solved_T, inside_T, torch.maximum(4 * rounding_T, 1e-9 * scale_T))
