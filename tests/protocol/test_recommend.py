"""The whole protocol on a model trained by us: its answer follows the diagnosed shift, and a killed command resumes.

About a minute on a quiet core: twenty runs of 100 steps, which every test here shares.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.forked import Forked, forked_ranks
from tests.protocol.trained_model import shift_model, tiny_recommendation, train_model
from tests.train.killing_view import KillingView
from zloss.decide.thresholds import Thresholds
from zloss.errors import InputError, OutputError
from zloss.jobs import StoppedError, open_job
from zloss.protocol import recommend, recommend_runs
from zloss.protocol.recommend import make_plan, run_recommendation
from zloss.protocol.recommend_answer import SHOWN
from zloss.results.comparison import Comparison
from zloss.results.files import read_record
from zloss.results.recommendation import Recommendation, RecommendPlan
from zloss.train.finished import load_runs

Made = tuple[Recommendation, Path, list[str]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def shifted_model(model: Path) -> Path:
    return shift_model(model, model.parents[1] / "shifted")


def recommended(model: Path, folder: Path, **changes: Any) -> Made:
    said: list[str] = []
    return run_recommendation(tiny_recommendation(model, **changes), folder, say=said.append), folder, said


@pytest.fixture(scope="module")
def plain(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return recommended(model, tmp_path_factory.mktemp("plain"), max_arms=1)


@pytest.fixture(scope="module")
def shifted(shifted_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return recommended(shifted_model, tmp_path_factory.mktemp("shifted"))


def test_a_shift_of_250_is_answered_by_centering_and_no_shift_is_not(plain: Made, shifted: Made) -> None:
    """The paper: a common shift is for the centered coordinate, where raw Z-loss transports it; without one nothing is."""
    assert shifted[0].objective == "centered-head"
    assert plain[0].objective not in ("centered-head", "centered")
    assert "Source coordinate fired" in " ".join(shifted[0].why)
    assert "Source coordinate fired" not in " ".join(plain[0].why)
    assert shifted[0].verdict is not None
    assert (shifted[0].verdict.action, shifted[0].action) == ("center", "Center the output head and use no Z-loss.")
    # One confirming seed confirms no Z-loss, so there is nothing to paste.
    assert plain[0].verdict is not None
    assert plain[0].verdict.action in ("not_enough_evidence", "nothing")
    assert (plain[0].level != "confirmed here", plain[0].paste) == (True, ())


def test_time_that_is_left_confirms_on_more_fresh_seeds_and_stops(
    plain: Made, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The budget would have room for many more; without one the given seeds are all. Three instead of five, for time."""
    monkeypatch.setattr("zloss.decide.recommend.MOST_CONFIRMING", 3)
    assert plain[0].confirmation_seeds == (2,)
    folder = Path(shutil.copytree(plain[1], tmp_path / "out"))
    config = tiny_recommendation(model, max_arms=1, budget="30m")
    said: list[str] = []
    found = run_recommendation(config, folder, say=said.append)
    assert found.confirmation_seeds == (2, 3, 4)
    assert said[0].endswith(
        " of the 30 min were already spent in this folder; 4 finished runs are kept and cost no more time"
    )
    assert [line for line in said if "time left" in line] == [
        f"seed {seed} confirms too, because there is time left" for seed in (3, 4)
    ]
    confirmation = read_record(folder / "confirmation" / "comparison.json", Comparison)
    assert (confirmation.seeds, confirmation.steps) == ((2, 3, 4), 100)
    (carried,) = (arm for arm in found.arms if arm.confirmed)
    assert carried.confirmed == next(one.verdict for one in found.confirmation if one.method == carried.method)
    assert "on 3 fresh seeds, 100 steps of 64 tokens each, at learning rate 0.0001" in found.confidence
    acts = found.verdict is not None and found.verdict.action == "train"
    assert acts == (found.level == "confirmed here" and found.objective != "ce") == bool(found.paste)
    # An answer on one seed was shown before.
    plain[0].write(folder / Recommendation.FILE)
    later = run_recommendation(config, folder)
    assert (found.added_seeds, later.added_seeds) == (None, (3, 4))
    assert "Seeds 3 and 4 were added after an earlier answer" in later.confidence
    (folder / Recommendation.FILE).unlink()
    # A seed that was begun before the budget ended is finished by the same command.
    shutil.rmtree(folder / "runs" / f"{carried.method}-{carried.coef:g}-s4")
    (folder / ".spent.json").write_text('{"seconds": 1799.9}')
    assert numbers(run_recommendation(config, folder)) == numbers(found)
    # One that was not begun has no room.
    monkeypatch.setattr(recommend, "run_training", lambda *_, **__: pytest.fail("a run began"))
    for run in (folder / "runs").glob("*-s[4]"):
        shutil.rmtree(run)
    assert run_recommendation(config, folder).confirmation_seeds == (2, 3)


def test_an_arm_that_the_user_names_is_tried_before_those_of_the_audit(
    plain: Made, model: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(plain[1], tmp_path / "out"))
    found, _, said = recommended(model, folder, methods=("mu-loss:0.1",), max_arms=1)
    assert "CE, seed 1: kept from before" in said
    (arm,) = (arm for arm in found.arms if arm.method not in ("ce", "centered-head"))
    assert (arm.method, arm.coef, arm.note, arm.delta_ce is not None) == ("mu-loss", 0.1, "requested", True)
    plan = read_record(folder / "plan.json", RecommendPlan)
    assert [one.code for one in plan.arms[1:]] == ["zloss.mu_loss_(model.lm_head.weight, 0.1)"]
    for methods, error in (
        (("mu-los",), "Did you mean 'mu-loss'"),
        (("mu-loss:x",), "METHOD:COEFFICIENT"),
        (("mu-centering",), "is tied"),
    ):
        with pytest.raises(InputError, match=error):
            recommended(model, tmp_path / "refused", methods=methods)


def test_a_shift_that_is_harmless_is_not_answered_by_centering(
    shifted: Made, shifted_model: Path, tmp_path: Path
) -> None:
    """The stage fires all the same; the error of 16-bit logits is below a limit that was set high."""
    folder = Path(shutil.copytree(shifted[1], tmp_path / "out"))
    harmless = Thresholds(shift_noise=100.0)
    found = run_recommendation(tiny_recommendation(shifted_model), folder, thresholds=harmless)
    source = found.stages[0]
    assert (source.fired, source.consequence is not None and source.consequence.matters) == (True, False)
    assert found.objective != "centered-head"
    (head,) = (arm for arm in found.arms if arm.method == "centered-head")
    assert (head.state, head.confirmed) == ("passed", None)
    assert "centered-head" not in {one.method for one in found.confirmation}
    assert found.paste == ()


def test_raw_z_loss_on_the_shifted_model_is_stopped_for_its_gradients(shifted: Made) -> None:
    (standard,) = (arm for arm in shifted[0].arms if arm.method == "standard")
    assert standard.state == "stopped"
    assert standard.steps < 100
    assert "‖g‖" in standard.reason
    runs, unfinished = load_runs(shifted[1] / "runs")
    assert {run.key for run in runs} == {("ce", 0.0), ("centered", 0.001)}
    assert len(unfinished) == 1


def test_the_answer_says_what_it_rests_on(shifted: Made, shifted_model: Path) -> None:
    found = shifted[0]
    assert found.confidence == (
        "Centering does not change predictions, so the runs only check that nothing else does. Not confirmed: seen on 1 fresh "
        "seed, 100 steps of 64 tokens, at learning rate 0.0001, on validation blocks that selection had not seen: shifted on "
        "text.txt, 6,400 tokens per run. Assuming a cosine schedule, a fresh Adam state and bf16 logits in deployment (those of "
        "the runs, which stage 5 audits, are fp32), because the checkpoint does not say. Longer training and other scales were "
        "not tested"
    )
    assert (found.selection_seed, found.confirmation_seeds) == (1, (2,))
    assert any("nothing can be confirmed" in note for note in found.notes)
    assert [each.fired is None for each in found.stages] == [False] * 8
    assert {paste.where for paste in found.paste} >= {"any stack", *SHOWN}
    # No result holds a path of the machine.
    for file in shifted[1].rglob("*.json"):
        assert str(shifted_model.parent) not in file.read_text(encoding="utf-8"), file.name


def test_only_further_seeds_and_the_other_half_are_quoted_and_its_progress_is_said(plain: Made) -> None:
    found, folder, said = plain
    text = "\n".join(said)
    for line in (
        "s per step of 64 tokens",
        "on seed 1; the best one and CE on 2; about",
        "CE, seed 1: 4 runs left, about",
    ):
        assert line in text
    assert "passes so far" in text or "not at least 1 % lower" in text
    confirmation = read_record(folder / "confirmation" / "comparison.json", Comparison)
    assert confirmation.seeds == (2,)
    carried = next(arm for arm in found.arms if arm.confirmed)
    assert [one.method for one in found.confirmation] == [carried.method]
    assert all(one in confirmation.quality.methods for one in found.confirmation)
    selection = read_record(folder / "selection" / "comparison.json", Comparison)
    assert selection.seeds == (1,)
    (quoted,) = found.confirmation
    assert quoted.parts.quality.numbers["delta_ce"] != carried.delta_ce


def numbers(found: Recommendation) -> Any:
    """Everything but times."""
    data = found.to_dict()
    for key in ("seconds", "provenance", "cost"):
        del data[key]
    del data["verdict"]["changes"]
    return data


def test_a_killed_command_resumes_to_the_same_answer(
    shifted: Made, shifted_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, folder = tiny_recommendation(shifted_model), tmp_path / "out"

    def work() -> None:
        run_recommendation(config, folder, view=KillingView(60, runs="centered"))

    killed = Forked(work).wait()
    assert killed.killed, killed.error[-2000:]
    assert (folder / "runs" / "ce-0-s1" / "metrics.json").is_file()
    assert not (folder / "runs" / "centered-0.001-s1" / "metrics.json").is_file()
    assert not list(folder.glob("recommendation*"))
    monkeypatch.setattr(recommend, "run_audit_of", lambda *_, **__: pytest.fail("the audit was made again"))
    said: list[str] = []
    found = run_recommendation(config, folder, say=said.append)
    assert "resuming with the plan in the folder" in said
    assert "CE, seed 1: kept from before" in said
    assert numbers(found) == numbers(shifted[0])


def test_a_machine_that_became_slow_leaves_arms_and_seeds_out_and_keeps_the_budget(
    plain: Made, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan had room for a second arm and a third seed; when their turn comes the time is over."""
    folder = Path(shutil.copytree(plain[1], tmp_path / "out"))
    planned = recommend_runs.plan_time
    monkeypatch.setattr(recommend, "plan_time", lambda *_, **__: None)
    monkeypatch.setattr(
        recommend_runs, "plan_time", lambda *given, **options: planned(*given, **{**options, "budget": None})
    )
    # Timed steps still run.
    monkeypatch.setattr(recommend, "run_training", lambda *_, **__: pytest.fail("a run began"))
    said: list[str] = []
    config = tiny_recommendation(model, max_arms=2, seeds=(1, 2, 3), budget="1s")
    found = run_recommendation(config, folder, say=said.append)
    # Another request on the same runs: they are kept, and so are their steps.
    assert "CE, seed 1: kept from before" in said
    assert found.confirmation == plain[0].confirmation
    left_out = [arm for arm in found.arms if arm.state == "left out"]
    assert [arm.reason for arm in left_out] == ["the budget has no room for it"]
    assert "the budget had no room for seed 3" in found.notes
    # The plan had named the arm and the seed, and nothing was said when they were dropped.
    dropped = [line for line in said if ": left out, " in line]
    assert [line.split(":")[0] for line in dropped] == [left_out[0].label, "seed 3"]
    assert all(line.endswith("and the budget has 0 s left") for line in dropped)
    # Two runs of seed 2 are kept, those of seed 3 are not.
    assert "its run and 2 of the confirmation would take about" in dropped[0]
    assert found.confirmation_seeds == (2,)


def test_a_finished_recommendation_is_made_again_from_its_files_and_another_training_refused(
    plain: Made, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recommend, "run_training", lambda *_, **__: pytest.fail("a run was made again"))
    monkeypatch.setattr(recommend, "run_audit_of", lambda *_, **__: pytest.fail("the audit was made again"))
    again = run_recommendation(tiny_recommendation(model, max_arms=1), plain[1])
    assert numbers(again) == numbers(plain[0])
    with pytest.raises(InputError, match="contains a recommendation for another model, text or training setup"):
        run_recommendation(tiny_recommendation(model, max_arms=1, lr=3e-4), plain[1])


def test_the_recommendation_of_another_model_is_not_overwritten(
    plain: Made, shifted_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from zloss.decide.answer import decide_results
    from zloss.report.files import write_result

    monkeypatch.setattr(recommend, "prepare_start", lambda *_: pytest.fail("the model was loaded"))
    write_result(tmp_path, decide_results(recommendations=(plain[0],)))
    runs = (str(plain[1] / "runs"),)
    for changes in ({}, {"runs": runs}):
        with pytest.raises(OutputError, match="and this is a recommendation for shifted on") as refused:
            run_recommendation(tiny_recommendation(shifted_model, max_arms=1, **changes), tmp_path)
        assert f"holds a recommendation for {plain[0].tested.model} on {plain[0].tested.text}" in str(refused.value)
        assert "pass `force`" in str(refused.value)


def test_runs_of_another_trainer_give_the_same_answer(plain: Made, model: Path, tmp_path: Path) -> None:
    config = replace(tiny_recommendation(model, max_arms=1), runs=(str(plain[1] / "runs"),))
    found = run_recommendation(config, tmp_path / "own")
    assert (found.objective, found.coef, found.level) == (plain[0].objective, plain[0].coef, plain[0].level)
    assert found.confirmation == plain[0].confirmation
    # What another trainer did is known from its files; nothing was assumed.
    assert found.tested == replace(plain[0].tested, assumed=())
    assert "another trainer" in found.notes[0]


def test_recorded_runs_with_another_target_were_answered_with_log_v(plain: Made, model: Path, tmp_path: Path) -> None:
    """Runs with c = 0 may pass, but the lines to paste train towards log V, which no run had tested."""
    runs = tmp_path / "runs"
    shutil.copytree(plain[1] / "runs", runs)
    for file in runs.glob("*/config.json"):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"target": 0.0}))
    config = replace(tiny_recommendation(model, max_arms=1), runs=(str(runs),))
    with pytest.raises(InputError, match=r"trains with a target of 0, .* use `zloss compare` on these runs"):
        run_recommendation(config, tmp_path / "own")


def test_the_plan_alone_has_the_arms_as_settings_and_trains_nothing(
    shifted: Made, shifted_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recommend, "probe_cost", lambda *_, **__: pytest.fail("steps were timed"))
    plan = make_plan(tiny_recommendation(shifted_model, max_arms=None), tmp_path / "out")
    assert plan == read_record(tmp_path / "out" / "plan.json", RecommendPlan)
    assert [arm.method for arm in plan.arms][:3] == ["ce", "centered", "standard"]
    assert plan.arms[1].code == "zloss.CenteredZLoss(coef=0.001)"
    assert plan.settings["steps"] == 100
    assert plan.settings["optimizer_state"] == "fresh"
    assert not (tmp_path / "out" / "runs").exists()


def test_two_processes_give_the_recommendation_of_one_which_resumes_in_their_folder(
    shifted_model: Path, tmp_path: Path
) -> None:
    config = tiny_recommendation(shifted_model, micro_batch=2)

    def work() -> int:
        with open_job() as job:
            # Every process has the record; the first one prints it.
            found = run_recommendation(config, tmp_path / "out", job=job)
            assert job.all_gather(found.action) == [found.action] * 2
            if job.first:
                print(json.dumps(found.to_dict()))
        return 0

    two = Recommendation.from_dict(json.loads(forked_ranks(2, work).splitlines()[-1]))
    # An arm that is stopped early ends on both processes, and the next one begins.
    assert [(arm.state, arm.confirmed) for arm in two.arms] == [
        ("passed", "inconclusive"),
        ("not passed", None),
        ("stopped", None),
    ]
    remade = tmp_path / "out" / "runs" / "centered-0.001-s1"
    shutil.rmtree(remade)
    one = run_recommendation(config, tmp_path / "out")
    assert (remade / "metrics.json").is_file()
    assert [(arm.method, arm.state) for arm in one.arms] == [(arm.method, arm.state) for arm in two.arms]
    changes = [(before.delta_ce, after.delta_ce) for before, after in zip(two.arms, one.arms, strict=True)]
    assert changes[1][0] not in (None, 0)
    assert changes[1][0] == pytest.approx(changes[1][1], abs=1e-5)
    assert (one.action, one.confidence, one.confirmation) == (two.action, two.confidence, two.confirmation)


def test_an_error_of_the_first_process_ends_the_others(
    shifted_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One block a step cannot be divided over two processes; a full disk is known to the first process alone."""

    def disk_full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    def ending(**changes: Any) -> str:
        def work() -> int:
            with open_job() as job:
                try:
                    run_recommendation(tiny_recommendation(shifted_model, **changes), tmp_path / "out", job=job)
                except (InputError, OSError) as error:
                    assert job.first
                    print(error)
                    return 0
                except StoppedError:
                    assert not job.first
                    return 0
            return 1

        return forked_ranks(2, work)

    assert "a step has 1 blocks" in ending(micro_batch=1)
    monkeypatch.setattr(RecommendPlan, "write", disk_full)
    assert "No space left" in ending(micro_batch=2)
