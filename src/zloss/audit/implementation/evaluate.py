"""The loss and its gradients at several λ, computed here or, for Triton kernels without a GPU, in an interpreted child.

Triton decides when it is imported whether kernels are compiled or interpreted, so interpretation needs a process of its
own: one child lives as long as this process, and tensors go there and come back as files.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from zloss.audit.implementation.implementations import Implementation, find_implementation
from zloss.errors import InputError, first_line
from zloss.measure.bf16_products import ISA_VARIABLE, SAFE_ISA, native_bf16_products_work


@dataclass(frozen=True)
class Evaluation:
    """One call: the scalar, and its gradient at every input, in the dtype the implementation returns it in."""

    value: float
    grads: tuple[Tensor, ...]


def evaluate(
    implementation: Implementation, inputs: Sequence[Tensor], label_T: Tensor, coefs: Sequence[float], target: float
) -> list[Evaluation]:
    """One evaluation per λ, where the implementation can run: here, on the GPU, or interpreted.

    Gradients come back on the device of the inputs.
    """
    implementation.require()
    if not implementation.kernel or _interpreted_here():
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
    """The evaluations, in this process; the inputs are left as they are."""
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
    """Whether it runs on Triton's interpreter here, which is slow."""
    return implementation.kernel and not torch.cuda.is_available()


def _interpreted_here() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


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
    """A child process with TRITON_INTERPRET=1 that answers one job at a time and ends with this process."""

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
        """Empty when the answer is written, else what went wrong."""
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


@functools.cache
def _running() -> list[_Interpreter]:
    return []


def _interpreter() -> _Interpreter:
    """The living child, or a new one."""
    running = _running()
    if not running or not running[0].alive:
        running[:] = [_Interpreter()]
    return running[0]


def _serve(jobs: TextIO, replies: TextIO) -> None:
    """The other side: one line in, one line out, until the parent closes its end."""
    for line in jobs:
        job, answer = line.rstrip("\n").split("\t")
        try:
            _answer(job, answer)
            reply = "done"
        except Exception as error:
            reply = first_line(error)
        print(reply, file=replies, flush=True)


def _answer(job: str, answer: str) -> None:
    record: dict[str, Any] = torch.load(job, weights_only=True)
    torch.set_num_threads(record["threads"])
    implementation = find_implementation(record["name"])
    evaluations = call(implementation, record["inputs"], record["label"], record["coefs"], record["target"])
    torch.save([{"value": evaluation.value, "grads": list(evaluation.grads)} for evaluation in evaluations], answer)


if __name__ == "__main__":
    # Whatever a package prints must not be taken for a reply.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _serve(sys.stdin, out)
