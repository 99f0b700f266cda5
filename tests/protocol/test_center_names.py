"""`zloss center` on folders whose file names come from somebody else: it writes nothing outside its copy."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_models import save_model
from zloss.cli.main import main

QUICK = ["--blocks", "2", "--block-size", "32", "--quiet"]
INDEX = "model.safetensors.index.json"


def entries(folder: Path, *left_out: Path) -> dict[str, bytes | str]:
    """Every path below `folder` with its content, or the target of a link."""
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if (path.is_symlink() or path.is_file()) and not any(place in (path, *path.parents) for place in left_out)
    }


def sharded(folder: Path, kind: str = "neox") -> Path:
    """A tiny model in several files."""
    from transformers import AutoModelForCausalLM

    save_model(kind, folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="40KB")
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {kind: sharded(root / kind, kind) for kind in ("neox", "granite")} | {
        "single": save_model("neox", root / "single")
    }


@pytest.fixture
def model(models: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(models["neox"], tmp_path / "work" / "model"))


def weight_map(model: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((model / INDEX).read_text())["weight_map"]
    return found


def write_index(model: Path, names: dict[str, Any]) -> None:
    (model / INDEX).write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": names}))


def rename_shards(model: Path, name_of: Callable[[int, int], str]) -> None:
    """Give shard i of n the name `name_of(i, n)`, in the folder and in its index."""
    names = weight_map(model)
    shards = sorted(set(names.values()))
    new = {shard: name_of(number, len(shards)) for number, shard in enumerate(shards)}
    for shard, name in new.items():
        place = model / name
        place.parent.mkdir(parents=True, exist_ok=True)
        (model / shard).rename(place)
    write_index(model, {key: new[shard] for key, shard in names.items()})


def center(model: Path, out: Path, *more: str) -> int:
    return main(["center", str(model), *QUICK, "--out", str(out), *more])


def check_copy(model: Path, out: Path) -> None:
    """The copy is made of plain files with our names, has every tensor, and is the centered model."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    assert all(path.is_file() and not path.is_symlink() for path in out.iterdir())
    weights = sorted(path.name for path in out.glob("*.safetensors"))
    if (out / INDEX).exists():
        count = len(weights)
        assert weights == [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
        names = weight_map(out)
        assert sorted(set(names.values())) == weights
        assert all(key in load_file(out / name) for key, name in names.items())
    else:
        assert weights == ["model.safetensors"]
    assert json.loads((out / "centering.json").read_text())["verified"] is True
    before, after = (AutoModelForCausalLM.from_pretrained(place).state_dict() for place in (model, out))
    changed = [key for key, value in before.items() if not value.equal(after[key])]
    assert changed == ["lm_head.weight"]
    assert float(after["lm_head.weight"].mean(0).abs().max()) < 1e-6


@pytest.mark.parametrize(
    "name_of",
    [
        lambda number, count: f"weights/part {number}.safetensors",
        lambda number, count: f"a/b/c{number}/model.safetensors",
        lambda number, count: f"./x{number}.safetensors",
        lambda number, count: f"..\\..\\x{number}.safetensors",
        lambda number, count: f"C:\\x{number}.safetensors",
        lambda number, count: f"x\n\x1b[31m{number}.safetensors",
        lambda number, count: f"...{number}.safetensors",
        lambda number, count: f"model-{count - number:05d}-of-{count:05d}.safetensors.safetensors",
        # Names of files that a copy has: the copy's own file replaced the weights.
        lambda number, count: "centering.json" if number == count - 1 else f"a{number}.safetensors",
        lambda number, count: "README.md" if number == count - 1 else f"A{number}.safetensors",
        lambda number, count: ".zloss-lock" if number == count - 1 else f"-{number}.safetensors",
        lambda number, count: "zloss.json" if number == count - 1 else f"a{number}.safetensors",
        lambda number, count: "weights.dat" if number == count - 1 else f"a{number}.safetensors",
        lambda number, count: "sub/config.json" if number == count - 1 else f"a{number}.safetensors",
    ],
)
def test_a_name_that_transformers_loads_is_not_a_name_in_the_copy(
    model: Path, tmp_path: Path, name_of: Callable[[int, int], str]
) -> None:
    """A file in a sub-folder ended with an error, and `centering.json` replaced the weights after they were measured."""
    rename_shards(model, name_of)
    out = tmp_path / "work" / "out"
    before = entries(tmp_path)
    assert center(model, out) == 0
    assert entries(tmp_path, out) == before
    check_copy(model, out)
    assert not (out / "weights.dat").exists()


@pytest.mark.parametrize("kind", ["neox", "granite"])
@pytest.mark.parametrize(
    "name", ["../precious/x", "/precious/x", "sub/../../precious/x", "../precious/../precious/x", "sub/../x"]
)
def test_a_name_that_leaves_the_folder_overwrote_files_outside_the_copy(
    models: dict[str, Path], tmp_path: Path, kind: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights that the index places elsewhere were replaced there by the centered ones, with exit code 0."""
    model, out = Path(shutil.copytree(models[kind], tmp_path / "work" / "model")), tmp_path / "work" / "out"
    (tmp_path / "work" / "precious").mkdir()
    (model / "sub").mkdir()
    absolute = f"{tmp_path / 'work' if name.startswith('/') else ''}{name}.safetensors"
    shards = sorted(set(weight_map(model).values()))
    head = shards.index(weight_map(model)["embed_out.weight" if kind == "neox" else "model.embed_tokens.weight"])
    rename_shards(model, lambda number, count: absolute if number == head else f"a{number}.safetensors")
    before = entries(tmp_path)
    for more in ([], ["--force"]):
        code = center(model, out, *more)
        assert entries(tmp_path, out) == before
        assert code == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert f"{INDEX} names the file {absolute!r}" in error
        assert "save_pretrained" in error
        assert not out.exists()


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "/",
        "a\0b",
        "absent.safetensors",
        "config.json",
        "tokenizer.json",
        5,
        None,
        ["a"],
        {"a": "b"},
        "x" * 300,
    ],
)
def test_a_name_that_is_no_file_of_weights_is_one_sentence(
    model: Path, tmp_path: Path, name: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    names = weight_map(model)
    write_index(model, names | {"embed_out.weight": name})
    before = entries(tmp_path)
    assert center(model, tmp_path / "work" / "out") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    assert entries(tmp_path) == before
    assert not (tmp_path / "work" / "out").exists()


@pytest.mark.parametrize(
    "damage", ["another file", "unknown tensor", "left out", "beside the single file", "transformers_weights"]
)
def test_the_copy_has_the_tensors_that_transformers_loads(model: Path, tmp_path: Path, damage: str) -> None:
    """An index that is wrong about a tensor ended in a traceback; one next to a single file was read instead of it."""
    names, out = weight_map(model), tmp_path / "work" / "out"
    if damage == "another file":
        first, last = min(names.values()), max(names.values())
        write_index(model, {key: {first: last, last: first}.get(name, name) for key, name in names.items()})
    elif damage == "unknown tensor":
        write_index(model, names | {"nowhere": max(names.values())})
    elif damage == "left out":
        write_index(
            model,
            {key: name for key, name in names.items() if key != "embed_out.weight"} | {"x": names["embed_out.weight"]},
        )
    elif damage == "beside the single file":
        other = save_model("neox", tmp_path / "other", seed=1)
        shutil.copyfile(other / "model.safetensors", model / "model.safetensors")
    else:
        (model / "sub").mkdir()
        other = save_model("neox", tmp_path / "other", seed=1)
        shutil.copyfile(other / "model.safetensors", model / "sub" / "x.safetensors")
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"transformers_weights": "sub/x.safetensors"}))
    before = entries(tmp_path)
    assert center(model, out) == 0
    assert entries(tmp_path, out) == before
    check_copy(model, out)
    assert "transformers_weights" not in json.loads((out / "config.json").read_text())
    if damage in ("beside the single file", "transformers_weights"):
        assert [path.name for path in out.glob("*.safetensors")] == ["model.safetensors"]


def test_links_in_the_folder_are_read_and_never_written_through(model: Path, tmp_path: Path) -> None:
    """As in the cache of the Hub, where every file is a link to another folder."""
    store, out = tmp_path / "store", tmp_path / "work" / "out"
    store.mkdir()
    for number, path in enumerate(sorted(path for path in model.iterdir() if path.is_file())):
        path.rename(store / f"{number:064x}")
        path.symlink_to(store / f"{number:064x}")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "notes.txt").write_text("important")
    for name in ("notes.txt", "README.md", "centering.json"):
        (model / name).symlink_to(tmp_path / "outside" / "notes.txt")
    os.link(tmp_path / "outside" / "notes.txt", model / "hard.txt")
    (model / "folder").symlink_to(tmp_path / "outside")
    (model / "folder.json").symlink_to(tmp_path / "outside")
    (model / "dangling.json").symlink_to(tmp_path / "work" / "new.json")
    (model / "loop.txt").symlink_to(model / "loop.txt")
    os.mkfifo(model / "pipe.txt")
    before = entries(tmp_path)
    assert center(model, out) == 0
    assert entries(tmp_path, out) == before
    check_copy(model, out)
    assert (out / "notes.txt").read_text() == (out / "hard.txt").read_text() == "important"
    assert all(path.stat().st_nlink == 1 for path in out.iterdir())
    assert {path.name for path in out.iterdir()}.isdisjoint(
        {"folder", "folder.json", "dangling.json", "loop.txt", "pipe.txt"}
    )
    assert (out / "README.md").read_text().startswith("# model, row-centered")
    assert not (tmp_path / "work" / "new.json").exists()


@pytest.mark.parametrize("place", ["the folder", "a file in it", "a file below it"])
def test_weights_in_a_linked_sub_folder_were_removed_with_the_folder_that_was_replaced(
    model: Path, tmp_path: Path, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "work" / "out"
    rename_shards(model, lambda number, count: f"sub/deep/x{number}.safetensors")
    if place == "the folder":
        (model / "sub").rename(out)
        (model / "sub").symlink_to(out)
    elif place == "a file in it":
        out.mkdir()
        (model / "sub" / "deep" / "x0.safetensors").rename(out / "x")
        (model / "sub" / "deep" / "x0.safetensors").symlink_to(out / "x")
    else:
        out.mkdir()
        (model / "sub" / "deep").rename(out / "deep")
        (model / "sub" / "deep").symlink_to(out / "deep")
    before = entries(tmp_path)
    assert center(model, out, "--force") == 2
    assert "--out contains" in capsys.readouterr().err
    assert entries(tmp_path) == before


@pytest.mark.parametrize(
    "changes",
    [
        {"vocab_file": "../precious/vocab.json", "tokenizer_file": "../precious/tokenizer.json"},
        {"fast_tokenizer_files": ["../precious/tokenizer.4.0.0.json", "tokenizer.json"]},
        {"chat_template": "../precious/template.jinja", "name_or_path": "/precious"},
    ],
)
@pytest.mark.parametrize(
    "file", ["tokenizer_config.json", "config.json", "generation_config.json", "special_tokens_map.json"]
)
def test_names_inside_other_files_are_copied_as_text_and_not_followed(
    models: dict[str, Path], tmp_path: Path, file: str, changes: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = Path(shutil.copytree(models["single"], tmp_path / "work" / "model")), tmp_path / "work" / "out"
    (tmp_path / "work" / "precious").mkdir()
    for name in ("vocab.json", "tokenizer.json", "tokenizer.4.0.0.json", "template.jinja"):
        (tmp_path / "work" / "precious" / name).write_text("{}")
    path = model / file
    plain = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(plain | changes))
    before = entries(tmp_path)
    code = center(model, out)
    assert entries(tmp_path, out) == before
    if code:
        assert code == 2
        assert capsys.readouterr().err.count("\n") == 1
        assert not out.exists()
    else:
        check_copy(model, out)
        if file != "config.json":
            assert (out / file).read_bytes() == path.read_bytes()


def test_an_index_of_files_that_are_not_copied_was_in_the_copy(models: dict[str, Path], tmp_path: Path) -> None:
    model, out = Path(shutil.copytree(models["single"], tmp_path / "work" / "model")), tmp_path / "work" / "out"
    for name in (INDEX, "pytorch_model.bin.index.json", "model.fp16.safetensors.index.json"):
        (model / name).write_text(json.dumps({"metadata": {}, "weight_map": {"embed_out.weight": "../precious/x"}}))
    assert center(model, out) == 0
    assert not list(out.glob("*index*"))
    check_copy(model, out)
