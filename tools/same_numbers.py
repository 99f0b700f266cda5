"""Do two checkouts of this repository give the same results? Runs the product in both and compares every result file.

    python tools/same_numbers.py --text TEXT [--before CHECKOUT] [--after CHECKOUT] [--keep FOLDER] [JOB ...]

Every scalar of every JSON file is compared by its path. Exit code 1 if a number differs by more than --tolerance
(relative; 0 requires equal bits), or if a text, a boolean, a null or the set of keys differs, unless a line of
`same_numbers_allowed.txt` names the difference. Changed texts are listed by kind: the same place in other files or list
entries is one kind, with the number of changes and the first of them. What depends on the clock, the machine or the checkout
(`NOT_COMPARED`) is left out, and the folders of both sides are replaced by `{out}` and `{inputs}`. Models, texts and
losses come from the checkout that holds this file, so both sides see the same input.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = "69e49bde016ceb14e0b99f064cb32845b53b0473"
"""The commit that is compared with unless --before names a checkout."""
ALLOWED = Path(__file__).with_name("same_numbers_allowed.txt")
NOT_COMPARED = {
    *("provenance", "timings", "command", "seconds", "started", "finished", "made_by", "zloss", "torch", "host"),
    *("wall_seconds", "tokens_per_second", "train_seconds", "step_seconds", "run_seconds", "python"),
}
NOT_RESULTS = {"tokenizer", "model", "checkpoints", "state", "base"}
"""Folders below a result that hold models, not results."""

TINY = [
    *("--from-config", "tiny", "--train-tokenizer", "300", "--block-size", "24", "--valid-blocks", "6"),
    *("--micro-batch", "2", "--accumulate", "2", "--adam-every", "4", "--steps", "12", "--warmup", "2"),
    *("--seeds", "1,2", "--corpus", "pydoc"),
]
SHORT = ["--corpus", "pydoc", "--blocks", "16", "--block-size", "64", "--quiet"]
PYTHON = [sys.executable]
ZLOSS = [*PYTHON, "-m", "zloss"]
TWO_RANKS = [*PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "zloss"]
JOBS: dict[str, list[list[str]]] = {
    "audit": [[*ZLOSS, "audit", "smollm2", "--text", "{text}", "--blocks", "4", "--out", "{out}", "--quiet"]],
    "audits": [
        [*ZLOSS, "audit", f"{{inputs}}/{kind}", *SHORT, "--out", f"{{out}}/{kind}"]
        for kind in ("gpt2", "neox", "phi", "cohere", "gemma2", "mixtral")
    ],
    "ranks": [[*TWO_RANKS, "audit", "{inputs}/gpt2", *SHORT, "--out", "{out}"]],
    "center": [
        [*ZLOSS, "center", f"{{inputs}}/{kind}", *SHORT, "--out", f"{{out}}/{kind}", *more]
        for kind, more in (("gpt2", ["--keep-tied"]), ("neox", []), ("phi", ["--valid-vocab", "500"]))
    ],
    "drift": [[*ZLOSS, "drift", "{inputs}/run", *SHORT, "--out", "{out}"]],
    "recommend": [
        [*ZLOSS, "recommend", "{inputs}/gpt2", "--corpus", "pydoc", "--steps", "100", "--seeds", "1,2", "--max-arms", "2",
         "--block-size", "32", "--blocks", "200", "--valid-blocks", "64", "--audit-blocks", "8", "--out", "{out}", "--quiet"]
    ],
    "router-scale": [
        [*ZLOSS, "router-scale", "--out", "{out}/default.json"],
        [*ZLOSS, "router-scale", "--layers", "6", "--top-k", "2", "--tokens", "1000", "--valid-tokens", "900",
         "--model-layers", "12", "--micro-batches", "4", "--out", "{out}/other.json"],
    ],
    "train": [
        [*ZLOSS, "train", *TINY, "--methods", "ce,centered-head,standard,centered,factorized,gain-aware", "--coef", "1e-3",
         "--out", "{out}", "--quiet"],
        [*ZLOSS, "compare", "{out}"],
    ],
    "moe": [
        [*ZLOSS, "train", "--moe", "--top-k", "2", "--experts", "4", "--moe-layers", "2", "--moe-width", "32",
         "--moe-heads", "2", "--router", "none,token_layer_mean,active_route_sum:matched", "--train-tokenizer", "300",
         "--block-size", "24", "--valid-blocks", "6", "--micro-batch", "2", "--steps", "8", "--warmup", "2",
         "--seeds", "1,2", "--corpus", "pydoc", "--out", "{out}", "--quiet"],
        [*ZLOSS, "compare", "{out}"],
    ],
    **{
        job: [[*ZLOSS, "reproduce", *labels, "--profile", "smoke", "--out", "{out}", "--quiet"]]
        for job, labels in {
            "heads": ["tab:pretrained"],
            "implementations": ["tab:source_audit", "tab:update_audit"],
            "training": ["tab:finetune"],
            "router": ["tab:router"],
            "moe-table": ["tab:moe"],
        }.items()
    },
    "losses": [[*PYTHON, str(Path(__file__).resolve()), "--audit-losses", "{out}"]],
}  # fmt: skip


def make_inputs(folder: Path) -> None:
    """Tiny models of several architectures, and three checkpoints of one run whose head shifts more and more."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    sys.path.insert(0, str(ROOT))
    from tests.tiny_models import save_model

    for kind in ("gpt2", "neox", "phi", "cohere", "gemma2", "mixtral"):
        save_model(kind, folder / kind)
    for step in (10, 20, 30):
        checkpoint = save_model("neox", folder / "run" / f"checkpoint-{step}")
        model = AutoModelForCausalLM.from_pretrained(checkpoint)
        with torch.no_grad():
            model.get_output_embeddings().weight.add_(0.05 * step)
        model.save_pretrained(checkpoint)


def audit_losses(folder: Path) -> None:
    """The audit of every loss that the tests hold, one JSON file each. Runs with the sources of the checkout under test."""
    sys.path.insert(0, str(ROOT))
    import zloss
    from tests.audit.loss import faulty, zoo

    losses = {f"zoo-{name}": case[:2] for name, case in zoo.ZOO.items()}
    losses |= {f"faulty-{name}": case[:2] for name, case in (faulty.TRAPS | faulty.UNLISTED).items()}
    folder.mkdir(parents=True, exist_ok=True)
    for name, (loss, options) in losses.items():
        try:
            result = zloss.audit_loss(loss, **options).to_dict()
        except zloss.errors.InputError as error:
            result = {"refused": str(error)}
        safe = "".join(letter if letter.isalnum() else "-" for letter in name)
        (folder / f"{safe}.json").write_text(json.dumps(result))


def run_job(checkout: Path, job: str, folder: Path, text: str, base: Path) -> None:
    """All commands of a job with the sources of one checkout. Exit code 1 is a verdict and counts as a result."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    environment = os.environ | {
        "PYTHONPATH": str(checkout / "src"),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "ZLOSS_CACHE": str(base / "cache"),
    }
    for argv in JOBS[job]:
        filled = [word.format(out=folder, text=text, inputs=base / "inputs") for word in argv]
        done = subprocess.run(filled, env=environment, cwd=folder.parent, capture_output=True, text=True)
        if done.returncode not in (0, 1) or "Traceback" in done.stderr:
            shutil.rmtree(folder)
            sys.exit(f"{checkout}: {' '.join(filled)} exited with {done.returncode}:\n{done.stderr}")


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, scalar) of every value of a parsed JSON file; an empty list or dict counts as one value."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            if key not in NOT_COMPARED:
                yield from leaves(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and value:
        for index, item in enumerate(value):
            yield from leaves(item, f"{path}.{index}")
    else:
        yield path, repr(value) if isinstance(value, (dict, list)) else value


def read(folder: Path, inputs: Path) -> dict[str, Any]:
    """Every scalar of every result below a folder, by file and path."""
    found: dict[str, Any] = {}
    for file in sorted(folder.rglob("*.json*")):
        name = file.relative_to(folder)
        if NOT_RESULTS & set(name.parts):
            continue
        lines = file.read_text().splitlines() if file.suffix == ".jsonl" else [file.read_text()]
        for number, line in enumerate(lines):
            prefix = f"{name}:{number}:" if file.suffix == ".jsonl" else f"{name}:"
            for path, value in leaves(json.loads(line)):
                if isinstance(value, str):
                    value = value.replace(str(folder), "{out}").replace(str(inputs), "{inputs}")
                found[prefix + path] = value
    return found


KINDS = ("number", "text", "value", "missing", "added")


class Difference(NamedTuple):
    kind: str
    """`number`, `text`, `value` (boolean, null, or a change of type), `missing` (only before) or `added` (only after)."""
    key: str
    gap: float
    """Relative difference of two numbers, otherwise infinite."""
    text: str


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[Difference]:
    """Every path whose values are not equal."""
    found = []
    for key in sorted(before.keys() | after.keys()):
        if key not in after:
            found.append(Difference("missing", key, float("inf"), f"was {before[key]!r}"))
        elif key not in before:
            found.append(Difference("added", key, float("inf"), f"is {after[key]!r}"))
        else:
            old, new = before[key], after[key]
            if old == new and isinstance(old, bool) == isinstance(new, bool):
                continue
            numbers = [isinstance(value, (int, float)) and not isinstance(value, bool) for value in (old, new)]
            gap = abs(new - old) / max(abs(old), abs(new)) if all(numbers) else float("inf")
            texts = isinstance(old, str) and isinstance(new, str)
            kind = "number" if all(numbers) else "text" if texts else "value"
            found.append(Difference(kind, key, gap, f"{old!r} -> {new!r}"))
    return found


def read_allowed(file: Path) -> list[tuple[str, str]]:
    """(kind, pattern) of each line `KIND JOB/FILE:PATH`; `*` matches anything, `#` starts a comment."""
    allowed = []
    for number, line in enumerate(file.read_text().splitlines(), 1):
        parts = line.split("#")[0].split()
        if not parts:
            continue
        if len(parts) != 2 or parts[0] not in KINDS:
            sys.exit(f"{file.name}:{number}: expected `KIND PATTERN` with KIND one of {', '.join(KINDS)}: {line!r}")
        allowed.append((parts[0], parts[1]))
    return allowed


def compare(
    job: str, before: dict[str, Any], after: dict[str, Any], tolerance: float, allowed: list[tuple[str, str]]
) -> bool:
    """Print how the values of a job agree; True if every difference is within the tolerance or allowed."""
    found = differences(before, after)
    close = {item for item in found if item.kind == "number" and item.gap <= tolerance}
    rest = [item for item in found if item not in close]
    named = {
        item
        for item in rest
        for kind, pattern in allowed
        if kind == item.kind and fnmatch.fnmatchcase(f"{job}/{item.key}", pattern)
    }
    wrong = [item for item in rest if item not in named]
    changed = sum(item.kind in ("number", "text", "value") for item in found)
    print(
        f"  {len(before)} values before, {len(after)} after: {len(before.keys() & after.keys()) - changed} equal, "
        f"{len(close)} numbers within the tolerance (largest {max((item.gap for item in close), default=0.0):.3g}), "
        f"{len(named)} allowed, {len(wrong)} not allowed"
    )
    for title, items in (("allowed", sorted(named)), ("NOT ALLOWED", wrong)):
        others = [item for item in items if item.kind != "text"]
        for item in sorted(others, key=lambda item: (item.kind, -item.gap))[: 8 if title == "allowed" else 40]:
            print(f"    {title}: {item.kind} {item.key}: {item.text[:200]}")
        for place, texts in by_kind([item for item in items if item.kind == "text"]):
            print(f"    {title}: {len(texts)} text{'s' * (len(texts) != 1)} {place}: {texts[0].text[:400]}")
    if not before or not after:
        print("    NOT ALLOWED: no result file was found")
    return not wrong and bool(before) and bool(after)


def by_kind(texts: Sequence[Difference]) -> list[tuple[str, list[Difference]]]:
    """The changed texts by their place in a result, whatever the file and the entry of a list; the most frequent first."""
    kinds: dict[str, list[Difference]] = defaultdict(list)
    for item in texts:
        file, _, path = item.key.partition(":")
        place = re.sub(r"(?<![^.:])\d+(?![^.:])", "*", path)
        kinds[f"{Path(file).name}:{place}"].append(item)
    return sorted(kinds.items(), key=lambda kind: -len(kind[1]))


def checked_out(commit: str, folder: Path) -> Path:
    """The files of a commit of this repository, in a new folder."""
    folder.mkdir()
    packed = subprocess.run(["git", "-C", str(ROOT), "archive", commit], capture_output=True)
    if packed.returncode:
        sys.exit(f"this clone does not have the commit {commit}: fetch its history, or pass --before.")
    subprocess.run(["tar", "-x", "-C", str(folder)], input=packed.stdout, check=True)
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="*", metavar="JOB", help=f"default: all of {', '.join(JOBS)}")
    parser.add_argument("--before", type=Path, help=f"checkout with the old sources (default: {REFERENCE[:8]})")
    parser.add_argument("--after", type=Path, default=Path(), help="checkout with the new sources (default: here)")
    parser.add_argument("--text", help="text of the SmolLM2 audit")
    parser.add_argument(
        "--tolerance", type=float, default=1e-6, help="largest relative difference that passes; 0: equal bits"
    )
    parser.add_argument("--allowed", type=Path, default=ALLOWED, help="file of the differences that are intended")
    parser.add_argument("--keep", type=Path, help="folder for the results; those of --before are reused from there")
    parser.add_argument("--audit-losses", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.audit_losses:
        audit_losses(options.audit_losses)
        return 0
    unknown = [job for job in options.jobs if job not in JOBS]
    if unknown or not options.text:
        parser.error(f"unknown job {unknown[0]!r}" if unknown else "--text is needed")
    allowed = read_allowed(options.allowed)
    equal = True
    with tempfile.TemporaryDirectory() as temporary:
        base = (options.keep or Path(temporary)).resolve()
        options.before = options.before or checked_out(REFERENCE, Path(temporary) / "reference")
        if not (base / "inputs").exists():
            make_inputs(base / "inputs")
        for job in options.jobs or JOBS:
            print(job, flush=True)
            for side in ("before", "after"):
                folder = base / side / job
                if folder.exists() and side == "before":
                    continue
                checkout: Path = getattr(options, side)
                run_job(checkout.resolve(), job, folder, str(Path(options.text).resolve()), base)
            results = [read(base / side / job, base / "inputs") for side in ("before", "after")]
            equal = compare(job, *results, options.tolerance, allowed) and equal
    print("the same" if equal else "NOT the same")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
