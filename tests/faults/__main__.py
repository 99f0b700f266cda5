"""`make faults`: the long campaigns of faults, counted.

python -m tests.faults kills 100     SIGKILL and SIGINT at random moments, and in front of random writes
python -m tests.faults pairs 40      two processes at once in one folder
python -m tests.faults disk 40       a disk that is full from a random write on, or takes no large file
"""

from __future__ import annotations

import collections
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from tests.faults.child import Child, debris, largest_file, run, warm_up
from tests.faults.scenarios import Scenario, recommendation, scenarios
from tests.faults.write_events import full_from_write, kill_at_write


def killed(scenario: Scenario, place: Path, rng: random.Random) -> str:
    """One kill, a check of what is left, and the same command again."""
    kind = rng.choice(("SIGKILL at a moment", "SIGKILL at a write", "SIGINT at a moment"))
    if kind == "SIGKILL at a write":
        child = Child(scenario.start_words(place), kill_at_write(place, rng.randrange(1, scenario.writes + 1)))
    else:
        child = Child(scenario.start_words(place))
        number = signal.SIGINT if kind.startswith("SIGINT") else signal.SIGKILL
        child.kill_at(rng.uniform(0.0, 1.1 * scenario.seconds), number)
    child.wait()
    scenario.check_untouched(place)
    scenario.check_again(place)
    return f"{scenario.name}, {kind}"


def paired(scenario: Scenario, place: Path, rng: random.Random) -> str:
    """Two at once: one may be refused; afterwards the results are those of one undisturbed run."""
    pair = []
    for second in (False, True):
        pair.append(Child(scenario.start_words(place, second=second)))
        time.sleep(rng.choice((0.0, 0.0, rng.uniform(0, scenario.seconds))))
    codes = sorted(child.wait().check_contract().code or 0 for child in pair)
    alone = scenario.partner(place) == place
    assert codes in ([[0, 0], [0, 2]] if alone else [[0, 0]]), codes
    for written in {place, scenario.partner(place)}:
        assert scenario.numbers(written) == scenario.reference
    assert debris(place) == []
    return f"{scenario.name}, {'one refused' if codes == [0, 2] else 'both done'}"


def full(scenario: Scenario, place: Path, rng: random.Random) -> str:
    """A disk that fills up: one sentence, nothing half-written, and the command resumes once there is space."""
    if rng.random() < 0.5:
        kind, setup = "full from a write on", full_from_write(place, rng.randrange(1, scenario.writes + 1))
    else:
        kind, setup = "no file beyond a size", largest_file(rng.choice((0, 100, 3000, 20_000, 100_000)))
    ended = run(scenario.start_words(place), setup).check_contract()
    assert ended.code in (0, 2), ended
    scenario.check_untouched(place)
    scenario.check_again(place)
    return f"{scenario.name}, {kind}: {'continued without' if ended.code == 0 else 'one sentence'}"


CAMPAIGNS: dict[str, Callable[[Scenario, Path, random.Random], str]] = {"kills": killed, "pairs": paired, "disk": full}


def main(words: list[str]) -> int:
    """0 if every case held."""
    campaign, wanted = words[0], int(words[1])
    rng = random.Random(int(words[2]) if len(words) > 2 else 1)
    warm_up()
    counts, failed = collections.Counter[str](), 0
    with tempfile.TemporaryDirectory(prefix="zloss-faults-") as scratch:
        folder = Path(scratch)
        known = scenarios(folder / "inputs")
        if campaign == "kills":
            known["recommend"] = recommendation(folder / "inputs")
        for name, scenario in known.items():
            scenario.learn(folder / "reference")
            print(f"{name}: {scenario.seconds:.1f} s, {scenario.writes} writes", flush=True)
        for number in range(wanted):
            name = list(known)[number % len(known)]
            place = folder / f"case{number}"
            try:
                counts[CAMPAIGNS[campaign](known[name], place, rng)] += 1
            except AssertionError:
                failed += 1
                print(f"--- case {number}, {name}\n{traceback.format_exc()}", flush=True)
            shutil.rmtree(place, ignore_errors=True)
    for what, count in sorted(counts.items()):
        print(f"{count:>4}  {what}")
    print(f"{campaign}: {wanted} cases, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
