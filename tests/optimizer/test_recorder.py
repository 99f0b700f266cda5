"""The recorder against straight recomputation from saved gradients, parameters and optimizer state."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from zloss.errors import InputError
from zloss.optimizer.endpoints import endpoints, spike_rate
from zloss.optimizer.recorder import PIECE, Recorder, first_direction, inf_norm, l2_norm
from zloss.results.record import to_plain
from zloss.results.steps import StepRecord

CLIP, STEPS, EVERY = 1.0, 12, 5
RELATIVE = 1e-6


def build(seed: int = 0) -> nn.Module:
    """Tied and frozen parameters, one longer than a piece."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Embedding(300, 160), nn.Linear(160, 40), nn.Tanh(), nn.Linear(40, 160), nn.Linear(160, 300)
    )
    model[4].weight = model[0].weight
    model[4].bias.requires_grad_(False)
    assert model[0].weight.numel() > PIECE
    return model


def flat(tensors: Any) -> torch.Tensor:
    return torch.cat([tensor.detach().double().reshape(-1) for tensor in tensors])


def train(clip: str = "recorder") -> tuple[Recorder, list[dict[str, Any]]]:
    """A short run, everything that a recorder could read saved with it; clipping "by hand" goes without a recorder."""
    model = build()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    recorder = Recorder(model.parameters(), optimizer, clip=CLIP, adam_every=EVERY)
    saved: list[dict[str, Any]] = []
    for index in range(1, STEPS + 1):
        optimizer.zero_grad()
        losses = []
        for _ in range(2):
            ids = torch.randint(300, (8,))
            loss = 10 * nn.functional.cross_entropy(model(ids), torch.randint(300, (8,))) / 2
            loss.backward()
            losses.append(float(loss.detach()))
            if clip != "by hand":
                recorder.micro_batch(loss)
        record: dict[str, Any] = {"losses": losses, "grad": flat(p.grad for p in parameters), "theta": flat(parameters)}
        with nullcontext() if clip == "by hand" else recorder.step(index) as step:
            if clip == "recorder":
                step.clip_()
            elif clip == "torch":
                nn.utils.clip_grad_norm_(parameters, CLIP)
            else:
                norm = float(l2_norm([p.grad for p in parameters]))
                for p in parameters:
                    p.grad.mul_(min(1.0, CLIP / norm))
            optimizer.step()
        record |= {"clipped": flat(p.grad for p in parameters), "theta_after": flat(parameters)}
        record["state"] = [copy.deepcopy(optimizer.state[p]) for p in parameters]
        saved.append(record)
    return recorder, saved


def straight(saved: list[dict[str, Any]]) -> dict[str, float]:
    """The definitions, in fp64 on whole vectors."""
    norm = np.array([float(s["grad"].norm()) for s in saved])
    ratio = norm / np.array([float(s["theta"].norm()) for s in saved])
    inf = np.array([float(s["grad"].abs().max()) for s in saved])
    post = np.array([float(s["clipped"].norm()) for s in saved])
    post_inf = np.array([float(s["clipped"].abs().max()) for s in saved])
    loss = np.array([sum(s["losses"]) for s in saved])
    samples = [(i, s) for i, s in enumerate(saved, start=1) if i % EVERY == 0]
    v_inf, proxy, corrected, theta = [], [], [], []
    for t, s in samples:
        m, v = (flat(state[key] for state in s["state"]) for key in ("exp_avg", "exp_avg_sq"))
        assert all(float(state["step"]) == t for state in s["state"])
        v_inf.append(float(v.max()))
        proxy.append(m / (v.sqrt() + 1e-8))
        corrected.append((m / (1 - 0.9**t)) / ((v / (1 - 0.95**t)).sqrt() + 1e-8))
        theta.append(float(s["theta_after"].norm()))
    q = lambda values, level=0.99: float(np.quantile(values, level))  # noqa: E731
    return {
        "grad_norm_p99": q(norm), "grad_norm_p999": q(norm, 0.999), "grad_norm_max": float(norm.max()),
        "grad_inf_p99": q(inf), "grad_param_ratio_p99": q(ratio),
        "postclip_norm_p99": q(post), "postclip_inf_p99": q(post_inf),
        "clip_rate": float((norm > CLIP).mean()),
        **{f"phi_{tau}": float((norm > tau).mean()) for tau in (10, 50, 100)},
        "loss_p99": q(loss), "loss_max": float(loss.max()), "spike_rate": float((np.diff(loss) > 0.5).mean()),
        "adam_v_max": max(v_inf), "adam_v_p99": q(v_inf),
        "adam_d_inf_p99": q([float(d.abs().max()) for d in proxy]),
        "adam_d_ratio_p99": q([float(d.norm()) / n for d, n in zip(proxy, theta, strict=True)]),
        "adam_corrected_d_inf_p99": q([float(d.abs().max()) for d in corrected]),
        "adam_corrected_d_ratio_p99": q([float(d.norm()) / n for d, n in zip(corrected, theta, strict=True)]),
        "nonfinite_gradient": 0.0, "nonfinite_microbatch": 0.0,
    }  # fmt: skip


@pytest.mark.parametrize("clip", ["recorder", "torch"])
def test_every_endpoint_equals_its_definition(clip: str) -> None:
    recorder, saved = train(clip)
    found, wanted = to_plain(endpoints(recorder.records, clip=CLIP)), straight(saved)
    assert 0 < wanted["clip_rate"] <= 1
    for name, value in wanted.items():
        assert found[name] == pytest.approx(value, rel=RELATIVE, abs=1e-12), name
    # The oracle detects a wrong convention: θ before instead of after the step.
    mutated = copy.deepcopy(saved)
    for record in mutated:
        record["theta_after"] = record["theta"]
    assert found["adam_d_ratio_p99"] != pytest.approx(straight(mutated)["adam_d_ratio_p99"], rel=RELATIVE)


def test_recording_changes_nothing() -> None:
    """The same run without a recorder, clipped by its norm in fp64, ends in the same weights, bit for bit."""
    (_, recorded), (_, plain) = train(), train("by hand")
    assert torch.equal(plain[-1]["theta_after"], recorded[-1]["theta_after"])


def test_norms_of_long_tensors_keep_their_digits_and_finite_ones_do_not_overflow() -> None:
    """A plain fp32 norm of this tensor is off by more than the tolerance."""
    x = torch.rand(2**24) + 0.5
    exact = float(x.double().norm())
    assert float(l2_norm([x])) == pytest.approx(exact, rel=2e-7)
    assert abs(float(torch.linalg.vector_norm(x)) / exact - 1) > 1e-6
    large = [torch.full((3, 5), 1e18), torch.full((7,), -3e18)]
    assert float(l2_norm(large)) == pytest.approx(math.sqrt(15e36 + 7 * 9e36), rel=1e-6)


@pytest.mark.parametrize("place", [5, PIECE + 1, 2 * PIECE + 3])
@pytest.mark.parametrize("value", [-7e5, math.nan, -math.inf])
def test_no_entry_of_a_long_tensor_is_missed(place: int, value: float) -> None:
    x = torch.randn(2 * PIECE + 10)
    x[place] = value
    tensors, exact = [torch.randn(3), torch.empty(0), x.view(2, -1)], x.double()
    l2, inf = float(l2_norm(tensors)), float(inf_norm(tensors))
    if math.isfinite(value):
        assert l2 == pytest.approx(float(exact.norm()), rel=1e-6)
        assert inf == 7e5
    else:
        assert math.isnan(value) == math.isnan(l2) == math.isnan(inf)
        assert not math.isfinite(l2)


@pytest.mark.parametrize(("value", "kind"), [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "inf")])
def test_nonfinite_steps_are_events_and_stay_out_of_tails(value: float, kind: str) -> None:
    parameter = nn.Parameter(torch.ones(10))
    recorder = Recorder([parameter])
    for index in range(1, 5):
        parameter.grad = torch.full((10,), float(index))
        loss = torch.tensor(float(index))
        if index == 3:
            parameter.grad[4] = value
            loss = torch.tensor(value)
        recorder.micro_batch(loss)
        with recorder.step(index) as step:
            assert step.finite == (index != 3)
    found = to_plain(endpoints(recorder.records, clip=1e8))
    assert recorder.records[2].gradient == kind
    assert found["nonfinite_gradient"] == found["clip_rate"] == found["phi_100"] == 0.25
    assert found["nonfinite_microbatch"] == found[f"nonfinite_microbatch_{kind}"] == 0.25
    assert found[f"nonfinite_gradient_{kind}"] == 0.25
    assert found["nonfinite_gradient_nan"] + found["nonfinite_gradient_inf"] == 0.25
    assert found["grad_norm_max"] == pytest.approx(4 * math.sqrt(10))
    assert found["loss_max"] == 4.0


def test_thresholds_are_strict() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    recorder = Recorder([parameter])
    for index, norm in enumerate((10.0, 10.5, 50.0, 51.0), start=1):
        parameter.grad = torch.tensor([norm])
        with recorder.step(index):
            pass
    found = to_plain(endpoints(recorder.records, clip=10.0))
    assert (found["clip_rate"], found["phi_10"], found["phi_50"], found["phi_100"]) == (0.75, 0.75, 0.25, 0.0)


def test_spikes_count_rises_only() -> None:
    assert spike_rate([1.0, 1.6, 1.0, 1.5, 3.0]) == 0.5
    assert spike_rate([1.0]) is None
    assert spike_rate([1.0, math.nan, 1.0]) == 0.5


def test_records_survive_their_line_of_json() -> None:
    recorder, _ = train()
    for record in recorder.records:
        assert StepRecord.from_json(record.to_json()) == record
    broken = StepRecord(1, math.nan, math.nan, 0.0, math.inf, math.inf, 1.0, math.nan, math.nan, gradient="inf")
    again = StepRecord.from_json(broken.to_json())
    assert again.gradient == "inf"
    assert math.isnan(again.grad_norm)
    assert endpoints([again]).phi["phi_100"] == 1.0


def test_no_transfer_per_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host reads three tensors per sampled step, however many parameters there are."""
    counts = []
    for layers in (2, 20):
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        recorder = Recorder(model.parameters(), optimizer, clip=1.0, adam_every=1)
        loss = model(torch.ones(1, 4)).sum()
        loss.backward()
        recorder.micro_batch(loss)
        step = recorder.step(1)
        with counted_transfers(monkeypatch) as entering:
            opened = step.__enter__()
        opened.clip_()
        optimizer.step()
        with counted_transfers(monkeypatch) as leaving:
            step.__exit__(None, None, None)
        counts.append((len(entering), len(leaving)))
    assert counts == [(1, 2), (1, 2)]


@contextmanager
def counted_transfers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Every way in which a tensor's value reaches Python, noted by name."""
    seen: list[str] = []

    def noting(name: str) -> Any:
        original = getattr(torch.Tensor, name)

        def call(self: torch.Tensor) -> Any:
            seen.append(name)
            return original(self)

        return call

    with monkeypatch.context() as patch:
        for name in ("tolist", "item", "__float__", "__bool__"):
            patch.setattr(torch.Tensor, name, noting(name))
        yield seen


def test_bad_recorders_are_refused() -> None:
    with pytest.raises(InputError, match="adam_every"):
        Recorder([nn.Parameter(torch.ones(1))], adam_every=5)
    recorder = Recorder([nn.Parameter(torch.ones(1))])
    with recorder.step(1) as step, pytest.raises(InputError, match="threshold"):
        step.clip_()
    momentum = torch.optim.SGD([nn.Parameter(torch.ones(1))], momentum=0.9)
    momentum.param_groups[0]["params"][0].grad = torch.ones(1)
    sampled = Recorder(momentum.param_groups[0]["params"], momentum, adam_every=1)
    with pytest.raises(InputError, match="moments"), sampled.step(1):
        momentum.step()
    empty = torch.optim.AdamW([nn.Parameter(torch.ones(1))])
    (parameter,) = empty.param_groups[0]["params"]
    assert not empty.state[parameter]  # reading it makes an entry
    with pytest.raises(InputError, match="no state yet"), Recorder([parameter], empty, adam_every=1).step(1) as step:
        step.skip()


def test_the_first_direction_is_that_of_torch_adam_for_any_betas() -> None:
    torch.manual_seed(0)
    grad = torch.randn(50, dtype=torch.float64) * torch.logspace(-12, 2, 50, dtype=torch.float64)
    for betas in ((0.9, 0.95), (0.9, 0.999), (0.5, 0.3)):
        parameter = torch.zeros(50, dtype=torch.float64, requires_grad=True)
        parameter.grad = grad.clone()
        torch.optim.Adam([parameter], lr=1.0, betas=betas, eps=1e-8).step()
        torch.testing.assert_close(-parameter.detach(), first_direction(grad), rtol=1e-9, atol=0)
