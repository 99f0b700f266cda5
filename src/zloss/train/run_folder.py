"""The folder of one run: whose it is, and whether the run in it is finished."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

from zloss.errors import InputError
from zloss.results.run_metrics import METRICS_FILE
from zloss.results.writing import write_json
from zloss.train.config import TrainConfig
from zloss.train.start import Start


def claim_folder(folder: Path, config: TrainConfig, start: Start) -> str:
    """Write config.json, or check that the one in `folder` is of the same run. The result identifies the run."""
    record = config_record(config, start)
    file = folder / "config.json"
    if file.is_file():
        try:
            before = json.loads(file.read_text(encoding="utf-8"))
        except ValueError:
            before = None
        if before is not None and before != record:
            names = [key for key in {**before, **record} if before.get(key) != record.get(key)]
            raise InputError(
                f"{folder} holds a run with other settings ({', '.join(sorted(names))} differ): "
                "choose another folder, or remove that one."
            )
    write_json(file, record)
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:16]


def config_record(config: TrainConfig, start: Start) -> dict[str, Any]:
    """config.json: every field, with texts by name and checksum instead of by path."""
    record: dict[str, Any] = json.loads(json.dumps(asdict(config)))
    if config.moe is None:
        del record["moe"]
    for key in ("texts", "valid_texts"):
        record[key] = [Path(text).name for text in record[key]]
    for holder, key in ((record, "model"), (record, "from_config"), (record.get("moe") or {}, "tokenizer")):
        if holder.get(key) and Path(holder[key]).exists():
            holder[key] = Path(holder[key]).name
    record["schema"] = "zloss.train-config/1"
    record["data"] = json.loads(json.dumps(start.data.provenance))
    record["initial_weights"] = weight_fingerprint(start.checkpoint.model) if config.pretrained else "seed"
    return record


def weight_fingerprint(model: nn.Module) -> str:
    """A checksum of the name, the shape and the first 64 entries of every tensor: cheap, and different between checkpoints."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        sample = tensor.detach().reshape(-1)[:64].double().tolist()
        digest.update(f"{name} {list(tensor.shape)} {sample}".encode())
    return digest.hexdigest()[:16]


def is_finished(folder: Path) -> bool:
    """Whether the folder holds the metrics of a finished run."""
    return (folder / METRICS_FILE).is_file()
