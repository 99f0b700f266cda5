"""Implementations of CE + Z by name (ours, PyTorch's, those of other packages), and their gradients at several λ.

Each is one function of tensors and λ, sum-reduced so that a 1/N cannot push 16-bit gradients below their range:

    logits:  loss(logits [T, V], label [T], coef, target)
    linear:  loss(hidden [T, D], weight [V, D], label [T], coef, target)

Packages are imported when an implementation is loaded. Triton decides on import whether kernels are compiled or
interpreted, so without a GPU they run in a child process that lives as long as this one; tensors are passed as files.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TextIO

import torch
import torch.nn.functional as F
from torch import Tensor

from zloss.errors import InputError, MissingDependencyError, UnknownNameError, first_line
from zloss.head.loss import head_loss, logits_loss
from zloss.measure.bf16_products import ISA_VARIABLE, SAFE_ISA, native_bf16_products_work
from zloss.objectives import StandardZLoss

Loss = Callable[..., Tensor]
Takes = Literal["logits", "linear"]
EXTRAS = {"triton": "triton", "liger_kernel": "peers", "cut_cross_entropy": "peers"}
"""Package → the extra of zloss that installs it."""


@dataclass(frozen=True)
class Implementation:
    """One way to compute CE + λ(log Z − c)², and what it needs to run."""

    name: str
    title: str
    takes: Takes
    load: Callable[[], Loss]
    package: str | None = None
    """Package that provides it; None: this package or torch."""
    has_z: bool = True
    fixed_target: float | None = None
    """The only c it supports; None: any."""
    kernel: bool = False
    """Whether it runs Triton kernels, which need a GPU or Triton's interpreter in a separate process."""
    backend: str | None = None
    """The backend of this package that it runs."""
    torch_function: str | None = None
    """Function of `torch.nn.functional` that it calls, if older versions of torch lack it."""

    @property
    def installed(self) -> bool:
        """Whether it can be loaded on this machine."""
        return not self._missing_packages() and self._torch_has_it()

    def require(self) -> None:
        """Raise an error that says what is missing."""
        for package in self._missing_packages():
            if package in EXTRAS:
                raise MissingDependencyError(package, f"Auditing {self.title}", EXTRAS[package])
            raise InputError(
                f"auditing {self.title} needs the package {package!r}, which is not installed and which no extra of zloss "
                f"installs: install it, or leave {self.name!r} out."
            )
        if not self._torch_has_it():
            raise InputError(
                f"auditing {self.title} needs a torch with torch.nn.functional.{self.torch_function}, but torch "
                f"{torch.__version__} has none: use a newer one, or leave {self.name!r} out."
            )

    def _missing_packages(self) -> list[str]:
        needed = [*([self.package] if self.package else []), *(["triton"] if self.kernel else [])]
        return [name for name in needed if importlib.util.find_spec(name) is None]

    def _torch_has_it(self) -> bool:
        return self.torch_function is None or hasattr(F, self.torch_function)


def _ours(function: Callable[..., Any], backend: str) -> Callable[[], Loss]:
    """`logits_loss` or `head_loss` on one backend."""

    def loss(*arguments: Any) -> Tensor:
        *inputs, coef, target = arguments
        objective = StandardZLoss(coef, target)
        out: Tensor = function(*inputs, objective, reduction="sum", statistics="light", backend=backend).loss
        return out

    return lambda: loss


def _manual_z(logits: Tensor, coef: float, target: float) -> Tensor:
    """The penalty as people write it: fp32 logsumexp of the logits as they are stored."""
    return coef * ((torch.logsumexp(logits.float(), dim=-1) - target) ** 2).sum()


def _torch_ce(logits: Tensor, label: Tensor, coef: float, target: float) -> Tensor:
    return F.cross_entropy(logits, label, reduction="sum") + _manual_z(logits, coef, target)


def _log_softmax(logits: Tensor, label: Tensor, coef: float, target: float) -> Tensor:
    log_p = F.log_softmax(logits.float(), dim=-1)
    return -log_p.gather(1, label.unsqueeze(1)).sum() + _manual_z(logits, coef, target)


def _torch_projection(hidden: Tensor, weight: Tensor, label: Tensor, coef: float, target: float) -> Tensor:
    return _torch_ce(F.linear(hidden, weight), label, coef, target)


def _torch_linear(hidden: Tensor, weight: Tensor, label: Tensor, coef: float, target: float) -> Tensor:
    linear: Any = F.linear_cross_entropy
    options: Any = torch.nn.LinearCrossEntropyOptions
    out: Tensor = linear(
        hidden, weight, label, reduction="sum", options=options(batch_chunk_size=256, chunking_method=None)
    )
    return out


def _of_package(module: str, name: str) -> Any:
    """A function of an optional package, imported now."""
    return getattr(importlib.import_module(module), name)


def _liger() -> Loss:
    liger_cross_entropy = _of_package("liger_kernel.transformers.functional", "liger_cross_entropy")

    def loss(logits: Tensor, label: Tensor, coef: float, target: float) -> Tensor:
        # It writes the gradient over its input; the copy keeps the caller's logits.
        out: Tensor = liger_cross_entropy(logits.clone(), label, reduction="sum", lse_square_scale=coef)
        return out

    return loss


def _liger_linear() -> Loss:
    fused = _of_package("liger_kernel.transformers.functional", "liger_fused_linear_cross_entropy")

    def loss(hidden: Tensor, weight: Tensor, label: Tensor, coef: float, target: float) -> Tensor:
        out: Tensor = fused(hidden, weight, label, reduction="sum", lse_square_scale=coef)
        return out

    return loss


def _cut() -> Loss:
    linear_cross_entropy = _of_package("cut_cross_entropy", "linear_cross_entropy")

    def loss(hidden: Tensor, weight: Tensor, label: Tensor, coef: float, target: float) -> Tensor:
        impl = "cce" if hidden.device.type == "cuda" else "torch_compile"
        out: Tensor = linear_cross_entropy(hidden, weight, label, reduction="sum", impl=impl)
        return out

    return loss


def _flash() -> Loss:
    cross_entropy_loss = _of_package("flash_attn.ops.triton.cross_entropy", "cross_entropy_loss")

    def loss(logits: Tensor, label: Tensor, coef: float, target: float) -> Tensor:
        losses, _ = cross_entropy_loss(logits, label, lse_square_scale=coef)
        out: Tensor = losses.sum()
        return out

    return loss


IMPLEMENTATIONS = {
    implementation.name: implementation
    for implementation in (
        Implementation("dense", "zloss, dense", "logits", _ours(logits_loss, "dense"), backend="dense"),
        Implementation("chunked", "zloss, chunked", "logits", _ours(logits_loss, "chunked"), backend="chunked"),
        Implementation(
            "triton", "zloss, Triton", "logits", _ours(logits_loss, "triton"), kernel=True, backend="triton"
        ),
        Implementation("torch-ce", "F.cross_entropy + manual Z", "logits", lambda: _torch_ce),
        Implementation("log-softmax", "fp32 log_softmax CE + manual Z", "logits", lambda: _log_softmax),
        Implementation("liger", "Liger cross-entropy", "logits", _liger, "liger_kernel", True, 0.0, True),
        Implementation("flash-attn", "flash-attn cross-entropy", "logits", _flash, "flash_attn", True, 0.0, True),
        Implementation(
            "dense-linear", "zloss, dense, from hidden states", "linear", _ours(head_loss, "dense"), backend="dense"
        ),
        Implementation(
            "chunked-linear",
            "zloss, chunked, from hidden states",
            "linear",
            _ours(head_loss, "chunked"),
            backend="chunked",
        ),
        Implementation(
            "triton-linear",
            "zloss, Triton, from hidden states",
            "linear",
            _ours(head_loss, "triton"),
            kernel=True,
            backend="triton",
        ),
        Implementation("torch-projection", "F.linear, F.cross_entropy + manual Z", "linear", lambda: _torch_projection),
        Implementation(
            "torch-linear",
            "F.linear_cross_entropy",
            "linear",
            lambda: _torch_linear,
            has_z=False,
            torch_function="linear_cross_entropy",
        ),
        Implementation(
            "liger-linear", "Liger fused linear cross-entropy", "linear", _liger_linear, "liger_kernel", True, 0.0, True
        ),
        Implementation("cut-cross-entropy", "cut-cross-entropy", "linear", _cut, "cut_cross_entropy", has_z=False),
    )
}
"""By name, in the order of tables."""


def find_implementation(name: str) -> Implementation:
    """Raises an error that lists the known names if `name` is unknown."""
    if name not in IMPLEMENTATIONS:
        raise UnknownNameError("implementation", name, IMPLEMENTATIONS)
    return IMPLEMENTATIONS[name]


@dataclass(frozen=True)
class Evaluation:
    """One call: the scalar loss, and its gradients at the inputs in the dtype the implementation returns."""

    value: float
    grads: tuple[Tensor, ...]


def evaluate(
    implementation: Implementation, inputs: Sequence[Tensor], label_T: Tensor, coefs: Sequence[float], target: float
) -> list[Evaluation]:
    """One evaluation per λ, wherever the implementation can run: in this process, on the GPU, or interpreted.

    Gradients come back on the device of the inputs.
    """
    implementation.require()
    if not implementation.kernel or os.environ.get("TRITON_INTERPRET") == "1":
        return call(implementation, inputs, label_T, coefs, target)
    if torch.cuda.is_available():
        moved = [tensor.cuda() for tensor in inputs]
        evaluations = call(implementation, moved, label_T.cuda(), coefs, target)
        return [
            Evaluation(evaluation.value, tuple(grad.to(inputs[0].device) for grad in evaluation.grads))
            for evaluation in evaluations
        ]
    return _in_child(implementation, inputs, label_T, coefs, target)


def call(
    implementation: Implementation, inputs: Sequence[Tensor], label_T: Tensor, coefs: Sequence[float], target: float
) -> list[Evaluation]:
    """One evaluation per λ in this process; the inputs are not modified."""
    loss_of = implementation.load()
    evaluations = []
    for coef in coefs:
        leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
        with torch.enable_grad():
            loss = loss_of(*leaves, label_T, coef, target)
            grads = torch.autograd.grad(loss, leaves)
        evaluations.append(Evaluation(float(loss.detach()), tuple(grad.detach() for grad in grads)))
    return evaluations


def interpreted(implementation: Implementation) -> bool:
    """Whether it runs on Triton's interpreter on this machine, which is slow."""
    return implementation.kernel and not torch.cuda.is_available()


def _in_child(
    implementation: Implementation, inputs: Sequence[Tensor], label_T: Tensor, coefs: Sequence[float], target: float
) -> list[Evaluation]:
    with tempfile.TemporaryDirectory(prefix="zloss-interpreted-") as folder:
        job, answer = Path(folder, "job.pt"), Path(folder, "answer.pt")
        record = {"name": implementation.name, "inputs": list(inputs), "label": label_T, "coefs": list(coefs)}
        torch.save({**record, "target": target, "threads": torch.get_num_threads()}, job)
        failure = _interpreter().run(job, answer)
        if failure:
            raise InputError(f"{implementation.title} cannot run on Triton's interpreter: {failure}.")
        answers: list[dict[str, Any]] = torch.load(answer, weights_only=True)
    return [Evaluation(item["value"], tuple(item["grads"])) for item in answers]


class _Interpreter:
    """A child process with TRITON_INTERPRET=1 that runs one job at a time and ends with this process."""

    def __init__(self) -> None:
        environment = {**os.environ, "TRITON_INTERPRET": "1"}
        if not native_bf16_products_work():
            environment |= {ISA_VARIABLE: SAFE_ISA}
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def run(self, job: Path, answer: Path) -> str:
        """An empty string once the answer is written, otherwise what went wrong."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(f"{job}\t{answer}\n")
            self._process.stdin.flush()
            reply = self._process.stdout.readline()
        except BrokenPipeError:
            reply = ""
        if not reply:
            return f"its process ended with code {self._process.wait()}"
        return reply.strip().removeprefix("done").strip()


_children: list[_Interpreter] = []
"""The child process, once there is one."""


def _interpreter() -> _Interpreter:
    """The running child process, or a new one."""
    if not _children or not _children[0].alive:
        _children[:] = [_Interpreter()]
    return _children[0]


def _serve(jobs: TextIO, replies: TextIO) -> None:
    """What the child process does: one line in, one line out, until the parent closes its end."""
    for line in jobs:
        job, answer = line.rstrip("\n").split("\t")
        try:
            record: dict[str, Any] = torch.load(job, weights_only=True)
            torch.set_num_threads(record["threads"])
            implementation = find_implementation(record["name"])
            evaluations = call(implementation, record["inputs"], record["label"], record["coefs"], record["target"])
            torch.save([{"value": found.value, "grads": list(found.grads)} for found in evaluations], answer)
            reply = "done"
        except Exception as error:
            reply = first_line(error)
        print(reply, file=replies, flush=True)


if __name__ == "__main__":
    # Output of other packages must not be mistaken for a reply.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _serve(sys.stdin, out)
