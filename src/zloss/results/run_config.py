"""config.json of a training run: its configuration, and what identifies its data and its initial weights.

The configuration's fields stand at the top level of the file. Texts and models are named by the last part of their path;
checksums identify them.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar

from zloss.errors import InputError
from zloss.results.moe_config import MoeRun
from zloss.results.named_path import without_folders
from zloss.results.reading import read_json
from zloss.results.record import from_plain, to_plain
from zloss.results.train_config import TrainConfig
from zloss.results.writing import write_json

CONFIG_FILE = "config.json"
_AGAIN = "remove that run's folder and run it again"
ABSENT_IF_NONE = ("moe", "optimizer_state")
"""Keys that are left out of the file where they are None."""
TEXT_KEYS = (
    *("texts", "corpus", "text_field", "blocks", "offset", "valid_texts", "valid_blocks", "valid_offset"),
    *("block_size", "bos"),
)
"""Written after `seed`, as in every earlier file, although `TextOptions` puts most of them first among the fields."""


@dataclass(frozen=True)
class TextPart:
    """The blocks of one text that a run trains or validates on."""

    name: str
    """File names, or the name of a corpus."""
    blocks: int
    """Number of blocks."""
    offset: int
    """First block."""
    tokens: int
    """Predictions in all blocks."""
    fingerprint: str
    """Checksum of the token ids."""
    extra: dict[str, Any] = field(default_factory=dict)
    """What else identifies the text: files with size and checksum, or dataset and split."""


@dataclass(frozen=True)
class RunData:
    """Both texts of a run."""

    train: TextPart
    """The blocks that are trained on."""
    valid: TextPart
    """The blocks on which the trained model is measured."""


@dataclass(frozen=True)
class RunConfig:
    """One config.json."""

    SCHEMA: ClassVar[str] = "zloss.train-config/1"

    config: TrainConfig
    """The configuration, paths by their last part."""
    data: RunData
    """Both texts."""
    initial_weights: str
    """Checksum of the pretrained weights; "seed" for weights that are drawn from the run's seed."""

    def to_dict(self) -> dict[str, Any]:
        """The file as plain JSON values; a dense run has no key `moe`, a fresh Adam no `optimizer_state`."""
        settings: dict[str, Any] = to_plain(self.config)
        for key in ABSENT_IF_NONE:
            if settings[key] is None:
                del settings[key]
        texts = {key: settings.pop(key) for key in TEXT_KEYS}
        written: dict[str, Any] = {}
        for key, value in settings.items():
            written |= {key: value, **texts} if key == "seed" else {key: value}
        rest = {"schema": self.SCHEMA, "data": to_plain(self.data), "initial_weights": self.initial_weights}
        return written | rest

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> RunConfig:
        """The inverse of `to_dict`; a key that is missing, unknown or of another type is refused by its name."""
        if data.get("schema") != cls.SCHEMA:
            raise InputError(f"`schema` is expected to be {cls.SCHEMA!r}, but is {data.get('schema')!r}.")
        rest = {key: value for key, value in data.items() if key not in ("schema", "data", "initial_weights")}
        _check_keys(TrainConfig, rest, optional=ABSENT_IF_NONE)
        if rest.get("moe") is not None:
            _check_keys(MoeRun, rest["moe"], path="moe.")
        if not isinstance(data.get("initial_weights"), str):
            raise InputError(f"`initial_weights` is expected to be text, but is {data.get('initial_weights')!r}.")
        return cls(
            config=from_plain(TrainConfig, rest),
            data=from_plain(RunData, data.get("data"), path="data"),
            initial_weights=data["initial_weights"],
        )


def read_run_config(folder: Path) -> RunConfig:
    """config.json of a run's folder."""
    file = folder / CONFIG_FILE
    data = read_json(file, advice=_AGAIN)
    try:
        if not isinstance(data, dict):
            raise InputError(f"an object is expected, but it holds a {type(data).__name__}")
        return RunConfig.from_dict(data)
    except InputError as error:
        raise InputError(f"{file} cannot be read ({str(error).rstrip('.')}): {_AGAIN}.") from error


def write_run_config(folder: Path, record: RunConfig) -> None:
    """Write config.json of a run's folder, whole or not at all."""
    write_json(folder / CONFIG_FILE, record.to_dict())


def without_paths(config: TrainConfig) -> TrainConfig:
    """`config` with files and folders named by the last part of their path: a result tells nothing of a machine."""
    moe = config.moe
    if moe is not None:
        moe = replace(moe, tokenizer=_last_part(moe.tokenizer))
    return replace(
        config,
        model=without_folders(config.model),
        from_config=_last_part(config.from_config),
        texts=tuple(Path(text).name for text in config.texts),
        valid_texts=tuple(Path(text).name for text in config.valid_texts),
        optimizer_state=_checksum(config.optimizer_state),
        moe=moe,
    )


def _last_part(name: str | None) -> str | None:
    return None if name is None else without_folders(name)


def _checksum(file: str | None) -> str | None:
    """Name and checksum of a file; what is no file here stays as it is."""
    if file is None or not Path(file).is_file():
        return file
    with Path(file).open("rb") as content:
        return f"{Path(file).name} sha256:{hashlib.file_digest(content, 'sha256').hexdigest()[:16]}"


def _check_keys(record_type: Any, data: Any, *, path: str = "", optional: tuple[str, ...] = ()) -> None:
    """Refuse the first key that `record_type` does not have, or lacks."""
    known = {found.name for found in fields(record_type)}
    for key in data if isinstance(data, dict) else ():
        if key not in known:
            raise InputError(f"`{path}{key}` is not a key of {RunConfig.SCHEMA}.")
    for key in known - set(optional):
        if isinstance(data, dict) and key not in data:
            raise InputError(f"`{path}{key}` is missing.")
