"""The loss and its gradients at several λ, computed here or, for Triton kernels without a GPU, in an interpreted child.

Triton decides when it is imported whether kernels are compiled or interpreted, so interpretation needs a process of its
own: tensors go there and come back as files.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zloss.audit.checkpoint import first_line
from zloss.audit.implementation.bf16_products import ISA_VARIABLE, SAFE_ISA, native_bf16_products_work
from zloss.audit.implementation.implementations import Implementation, find_implementation
from zloss.errors import InputError


@dataclass(frozen=True)
class Outcome:
    """One call: the scalar, and its gradient at every input, in the dtype the implementation returns it in."""

    value: float
    grads: tuple[Tensor, ...]


def evaluate(
    implementation: Implementation, inputs: Sequence[Tensor], label_T: Tensor, coefs: Sequence[float], target: float
) -> list[Outcome]:
    """One outcome per λ, where the implementation can run: here, on the GPU, or interpreted."""
    implementation.require()
    if not implementation.kernel or _interpreted_here():
        return call(implementation, inputs, label_T, coefs, target)
    if torch.cuda.is_available():
        moved = [tensor.cuda() for tensor in inputs]
        outcomes = call(implementation, moved, label_T.cuda(), coefs, target)
        return [Outcome(outcome.value, tuple(grad.cpu() for grad in outcome.grads)) for outcome in outcomes]
    return _in_child(implementation, inputs, label_T, coefs, target)


def call(
    implementation: Implementation, inputs: Sequence[Tensor], label_T: Tensor, coefs: Sequence[float], target: float
) -> list[Outcome]:
    """The outcomes, in this process; the inputs are left as they are."""
    loss_of = implementation.load()
    outcomes = []
    for coef in coefs:
        leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
        with torch.enable_grad():
            loss = loss_of(*leaves, label_T, coef, target)
            grads = torch.autograd.grad(loss, leaves)
        outcomes.append(Outcome(float(loss.detach()), tuple(grad.detach() for grad in grads)))
    return outcomes


def _interpreted_here() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _in_child(
    implementation: Implementation, inputs: Sequence[Tensor], label_T: Tensor, coefs: Sequence[float], target: float
) -> list[Outcome]:
    with tempfile.TemporaryDirectory(prefix="zloss-interpreted-") as folder:
        job, answer = Path(folder, "job.pt"), Path(folder, "answer.pt")
        record = {"name": implementation.name, "inputs": list(inputs), "label": label_T, "coefs": list(coefs)}
        torch.save({**record, "target": target, "threads": torch.get_num_threads()}, job)
        environment = {**os.environ, "TRITON_INTERPRET": "1"}
        if any(tensor.dtype == torch.bfloat16 for tensor in inputs) and not native_bf16_products_work():
            environment |= {ISA_VARIABLE: SAFE_ISA}
        done = subprocess.run(
            [sys.executable, "-m", __name__, str(job), str(answer)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
            raise InputError(
                f"{implementation.title} cannot run on Triton's interpreter: {first_line(Exception(last[0]))}."
            )
        answers: list[dict[str, Any]] = torch.load(answer, weights_only=True)
    return [Outcome(item["value"], tuple(item["grads"])) for item in answers]


def _child(job: str, answer: str) -> None:
    """The other side of `_in_child`."""
    record: dict[str, Any] = torch.load(job, weights_only=True)
    torch.set_num_threads(record["threads"])
    implementation = find_implementation(record["name"])
    outcomes = call(implementation, record["inputs"], record["label"], record["coefs"], record["target"])
    torch.save([{"value": outcome.value, "grads": list(outcome.grads)} for outcome in outcomes], answer)


if __name__ == "__main__":
    _child(*sys.argv[1:])
