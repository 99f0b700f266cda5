"""Every mistake is one sentence and exit code 2, before anything long begins and without touching earlier results;
an interruption is exit code 130 and says how to resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Refused
from tests.protocol.tiny_drift_run import save_run
from tests.straight_audit import tiny_report
from tests.tiny_models import save_model
from tests.train.tiny_run import SCRATCH
from zloss.cli.main import main
from zloss.protocol import drift, recommend, recommend_runs
from zloss.protocol.recommend_runs import RunCost
from zloss.results.io import write_json

MOE = (
    "--moe --top-k 2 --experts 4 --moe-layers 2 --moe-width 32 --expert-width 16 --train-tokenizer 300 --block-size 24"
)
QUICK = {
    "audit": "--blocks 6 --block-size 32 --gradient-blocks 2",
    "audit-implementation": "--blocks 2 --block-size 24",
    "drift": "--blocks 16 --block-size 64 --gradient-blocks 0",
    "recommend": "--block-size 64 --valid-blocks 32 --audit-blocks 4 --blocks 100 --micro-batch 1",
}
"""Options of a command, unless a mistake sets one of them."""
MISTAKES = [
    ("audit nobody/nothing", "not found"),
    ("audit {gpt2} --text {place}/none.txt", "cannot read the text"),
    ("audit {gpt2} --text {place}/latin.txt", "not UTF-8"),
    ("audit {gpt2} --text {place}/short.txt", "blocks of 32"),
    ("audit {place}/broken", "cannot be loaded"),
    ("audit {place}/broken.gguf", "GGUF"),
    ("audit {place}/ckpt.pt", "ckpt.pt is a bare state dict, which lacks the config that says how to build the model"),
    (
        "audit {place}/ckpt.pth",
        "pass a folder in the Hugging Face format (config.json, model.safetensors, tokenizer.json)",
    ),
    ("audit {place}/ckpt.safetensors", "call zloss.audit_model(model, tokens, head=..., hidden_of=...)"),
    ("audit {gpt2}/model.safetensors", "is one file of a checkpoint: pass its folder, {gpt2}"),
    ("audit {gpt2} --tokenizer {place}/none", "none' cannot be loaded (no such folder): pass a folder with"),
    ("audit {gpt2} --tokenizer {place}/latin.txt", "(no such folder)"),
    ("audit {gpt2} --tokenizer {place}/rubbish", "rubbish' cannot be loaded"),
    ("audit {gpt2} --out {place}/file/x", "not a writable folder"),
    ("audit {gpt2} --diag-coef -1", "--diag-coef is expected"),
    ("audit {gpt2} --valid-vocab 99999", "--valid-vocab"),
    ("audit {gpt2} --text {place}/short.txt --corpus pydoc", "--text and --corpus cannot be combined"),
    ("audit {gpt2} --out {place}/rubbish --resume", "cannot be read"),
    ("audit --batch-blocks 0", "zloss audit: --batch-blocks is expected to be a whole number ≥ 1, but got 0."),
    ("audit --batch-blocks 9999999999999999999", "--batch-blocks is expected to be a whole number below 2^62"),
    ("audit --gain-beta -0.1", "--gain-beta is expected to be a finite number ≥ 0"),
    ("audit --diag-coef 1e308", "--diag-coef is expected to be between 1e-10 and 1e10, but got 1e+308."),
    ("audit --coef 1e308", "--coef is expected to be 0 or between 1e-10 and 1e10, but got 1e+308."),
    ("audit --coef 5e-324", "--coef is expected to be 0 or between"),
    ("audit --target 1e308", "--target is expected to be a number between -1e6 and 1e6, but got 1e+308."),
    ("audit --seed 99999999999999999999", "--seed is expected to be a whole number between"),
    ("audit-loss {place}/loss.py:loss --out {place}/loop", "cannot write to {place}/loop: Too many levels of symbolic"),
    *(
        (
            f"audit-loss {{place}}/loss.py:loss --out {{place}}/new {option}",
            f"{option.split()[0]} is expected to be a {kind}",
        )
        for option, kind in (
            ("--valid-vocab 99999999999999", "whole number"),
            ("--vocab 1", "whole number"),
            ("--tokens 0", "whole number"),
            ("--ignore-index 100000000000000000000000", "whole number"),
            ("--seed 9223372036854775808", "whole number"),
            ("--softcap 0", "positive number"),
            ("--logit-scale nan", "positive number"),
            ("--time-limit nan", "positive number"),
        )
    ),
    ("audit-loss {place}/loss.py:loss --out {place}/new --target e", "--target"),
    ("audit-loss {place}/loss.py:loss --out {place}/new --coef inf", "--coef is expected to be a finite number"),
    ("audit-loss {place}/loss.py:lose --out {place}/new", "Did you mean 'loss'?"),
    ("audit-loss {place}/loss.py:loss --out {place}/new --off {place}/loss.py:of", "unknown name in"),
    ("audit-implementation nowhere", "model 'nowhere' not found"),
    ("audit-implementation {gpt2} --implementations lige", "Did you mean 'liger'?"),
    ("audit-implementation {gpt2} --methods ce,standrad", "Did you mean 'standard'?"),
    ("audit-implementation {gpt2} --device mps", "--device is expected"),
    ("audit-implementation {gpt2} --logit-scales 0", "--logit-scales are expected"),
    ("audit-implementation {gpt2} --blocks 0", "--blocks is expected"),
    ("audit-implementation {gpt2} --blocks 100000", "use fewer blocks"),
    ("recommend {gpt2} --blocks 100000", "set --blocks to 0 for all blocks (it has"),
    ("audit-implementation {gpt2} --out /dev/null/x", "Set it with --out"),
    ("drift {place}/none", "does not exist"),
    ("drift {place}/ckpt.pt", "is a bare state dict"),
    ("drift {run}/checkpoint-5", "CHECKPOINT... is expected to name at least two"),
    ("drift", "CHECKPOINT... is expected to name folders"),
    ("drift {run} --out {place}/file/x", "not a writable folder"),
    ("drift {run} --text {place}/short.txt", "blocks of 64"),
    ("drift {run} --block-size 8", "--blocks times --block-size"),
    ("drift {run} --revisions step1,step2", "--revisions needs a"),
    ("recommend {neox} --budget 2m", "--budget is 2 min, but CE and one arm on two seeds, 4 runs of 100 steps"),
    ("recommend {neox} --budget soon", "--budget is expected to be a time"),
    ("recommend {neox} --text {place}/short.txt", "blocks of 64"),
    ("recommend {neox} --text {place}/none.txt", "none.txt"),
    ("recommend {neox} --out {place}/file/x", "not a writable folder"),
    ("recommend {neox} --steps 20", "--steps is expected to be at least 100"),
    ("recommend {neox} --seeds 1", "--seeds is expected to list at least two seeds"),
    ("recommend {neox} --optimizer-state {place}/none.pt", "does not exist"),
    ("recommend {neox} --optimizer-state {place}/file", "cannot be read"),
    ("recommend {neox} --runs {place}/none", "does not exist"),
    ("recommend {neox} --router-convention mine", "unknown"),
    ("report", "no result was given"),
    ("report {place}/none", "none"),
    ("report {audit} --out {place}/file/out", "cannot write"),
    ("report {audit} --gain-99 -1", "--gain-99"),
    ("router-scale --from megatrn", "Did you mean 'megatron'"),
    ("router-scale --to olmoee", "Did you mean 'olmoe'"),
    ("router-scale --top-k 0", "--top-k"),
    (
        "router-scale --coef 1e308",
        "the coefficient under 'active_route_mean' is too large for a float: use a smaller --coef",
    ),
    ("router-scale --coef 1e308 --to lm_engine", "is too large for a float"),
    ("router-scale --layers 99999999999999", "--layers is expected to be at most 100000"),
    (
        "router-scale --tokens 100 --valid-tokens 200",
        "--valid-tokens is expected to be at most --tokens, 100, but got 200",
    ),
    ("train {scratch} --methods standrd", "Did you mean 'standard'"),
    ("train {scratch} --methods ce,ce", "without duplicates"),
    ("train {scratch} --diag-coef 1e-300", "--diag-coef is expected to be between"),
    ("train {scratch} --seeds 99999999999999999999", "is expected to be a whole number below 2^62"),
    ("train {scratch} --steps 5 --warmup 5", "shorter than the run"),
    ("train {scratch} --text missing.txt", "cannot read the text"),
    ("train {scratch} --from-config missing.json", "no config 'missing.json'"),
    ("train {scratch} --trackers nothing-known", "unknown tracker"),
    ("train --head-shift 3", "zloss train: --head-shift needs --untie"),
    ("train --train-tokenizer 300", "--train-tokenizer is for a model from scratch: pass --from-"),
    ("train {gemma2} --methods ce,standard,centered --block-size 16", "centered cannot be trained on"),
    ("train {moe} --router active_route_som", "Did you mean 'active_route_sum'"),
    ("train {moe} --router none,none", "without duplicates"),
    ("train {moe} --top-k 5", "at most 4"),
    ("train {moe} --moe-heads 3", "--moe-width is expected to be a multiple of --moe-heads"),
    ("train {moe} --from-config tiny", "leave --from-config out"),
    ("train {moe} --tokenizer no/such/folder", "cannot be loaded"),
    ("train {moe} --capacity-factor -1", "--capacity-factor"),
    ("train some-model {moe}", "leave 'some-model' out"),
    ("train --router active_route_sum", "--router is for a mixture of experts: pass --moe"),
    ("train --capacity-factor 1.5", "--capacity-factor is for a mixture of experts: pass --moe"),
    ("train --top-k 2", "--top-k is for a mixture of experts: pass --moe"),
]


@pytest.fixture(scope="module")
def places(gpt2: Path, neox: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The values of the names in braces."""
    place = tmp_path_factory.mktemp("mistakes")
    (place / "latin.txt").write_bytes("Käse ".encode("latin1") * 5000)
    (place / "short.txt").write_text("too short")
    (place / "file").write_text("in the way")
    (place / "loop").symlink_to("loop")
    (place / "loss.py").write_text("from torch.nn.functional import cross_entropy as loss\n")
    (place / "broken.gguf").write_bytes(b"GGUF" + b"\x00" * 40)
    (save_model("gpt2", place / "broken") / "model.safetensors").write_bytes(b"\x00" * 64)
    for name in ("ckpt.pt", "ckpt.pth", "ckpt.safetensors"):
        (place / name).write_bytes(b"never opened")
    (place / "rubbish" / "audit-parts").mkdir(parents=True)
    (place / "rubbish" / "audit-parts" / "part-000000000-000000004.npz").write_bytes(b"rubbish")
    models = {"gpt2": str(gpt2), "neox": str(neox), "gemma2": str(save_model("gemma2", place / "gemma2"))}
    run = str(save_run(place / "run", (0, 0), steps=(5, 20)))
    write_json(place / "audit" / "report.json", tiny_report())
    return {
        "place": str(place),
        "run": run,
        "scratch": " ".join(SCRATCH),
        "moe": MOE,
        "audit": f"{place}/audit",
        **models,
    }


def argv(words: str, places: dict[str, str], out: Path) -> list[str]:
    given = words.format(**places).split()
    quick = QUICK.get(given[0], "").split()
    for flag, value in zip(quick[::2], quick[1::2], strict=True):
        given += [] if flag in given else [flag, value]
    return given if "--out" in given else [*given, "--out", str(out)]


@pytest.mark.parametrize(("words", "sentence"), MISTAKES, ids=[words for words, _ in MISTAKES])
def test_a_mistake_is_one_sentence_and_exit_code_two(
    words: str, sentence: str, places: dict[str, str], tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in ((drift, "run_audit_of"), (recommend, "run_audit_of"), (recommend, "run_training")):
        monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("something long began"))
    slow = RunCost(step=2.0, checkpoint=0.0, valid_block=0.1, rest=1.0)
    monkeypatch.setattr(recommend, "probe_cost", lambda *_, **__: slow)
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "notes.txt").write_text("of somebody else")
    refused(argv(words, places, kept), sentence.format(**places))
    assert [path.name for path in kept.iterdir()] == ["notes.txt"]
    assert (kept / "notes.txt").read_text() == "of somebody else"


@pytest.mark.parametrize(
    "words", ["train --steps many", "train --stress none", "train --steps", "train --no-such-option"]
)
def test_words_that_the_options_cannot_read_are_exit_code_two(words: str) -> None:
    with pytest.raises(SystemExit) as stop:
        main(words.split())
    assert stop.value.code == 2


def test_a_model_that_does_not_fit_is_refused_before_it_is_loaded(
    places: dict[str, str], tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recommend_runs, "free_bytes", lambda: 1000)
    monkeypatch.setattr(recommend, "prepare_start", lambda *_: pytest.fail("the model was loaded"))
    refused(argv("recommend {neox}", places, tmp_path / "out"), "training neox needs at least")


@pytest.mark.parametrize(
    ("words", "function", "sentences"),
    [
        ("drift {run}", "zloss.protocol.drift.run_audit_of", ["the same command resumes"]),
        ("recommend {neox} --plan", "zloss.protocol.recommend.run_audit_of", ["the same command resumes"]),
        (
            "train {gpt2} --steps 6 --block-size 16 --valid-blocks 6 --trackers none --methods ce",
            "zloss.train.grid.run_training",
            ["interrupted: finished runs", "zloss train {gpt2} --steps 6", "--out '{out}'"],
        ),
    ],
)
def test_an_interruption_says_how_to_resume(
    words: str,
    function: str,
    sentences: list[str],
    places: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(function, interrupted)
    out = tmp_path / "some runs"
    assert main(argv(words, places, out)) == 130
    error = capsys.readouterr().err
    assert all(sentence.format(**places, out=out) in error for sentence in sentences)


@pytest.mark.parametrize(
    "words",
    [
        "audit {gpt2} --no-figures",
        "audit-implementation {gpt2} --update-blocks 0 --overflow-blocks 0 --implementations none --blocks 1",
    ],
)
def test_quiet_is_quiet(words: str, places: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*argv(words, places, tmp_path), "--quiet"]) == 0
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""
