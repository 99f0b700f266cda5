"""The closed form of Adam's first direction is what torch's Adam does in its first step."""

from __future__ import annotations

import torch

from zloss.optimizer.norms import first_direction


def test_equals_the_first_step_of_torch_adam_for_any_betas() -> None:
    torch.manual_seed(0)
    grad = torch.randn(50, dtype=torch.float64) * torch.logspace(-12, 2, 50, dtype=torch.float64)
    for betas in ((0.9, 0.95), (0.9, 0.999), (0.5, 0.3)):
        parameter = torch.zeros(50, dtype=torch.float64, requires_grad=True)
        parameter.grad = grad.clone()
        torch.optim.Adam([parameter], lr=1.0, betas=betas, eps=1e-8).step()
        torch.testing.assert_close(-parameter.detach(), first_direction(grad), rtol=1e-9, atol=0)


def test_the_uncorrected_proxy_is_another_vector() -> None:
    grad = torch.tensor([1e-8, 1.0], dtype=torch.float64)
    proxy = 0.1 * grad / ((0.05 * grad**2).sqrt() + 1e-8)
    direction = first_direction(grad)
    assert abs(float(proxy[0] / proxy[1]) - float(direction[0] / direction[1])) > 0.1
