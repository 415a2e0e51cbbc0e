"""Measure how optimistic a search is if it chooses its best trial by test images or by validation images.

    python -m benchmarks.optimism [--searches 10] [--samples 24] [--rounds 12] [--seeds 3] [--work FOLDER] [--to FILE]

For each search seed, the script runs `fedsweep tune` with `tuning/fedra` (TPE and ASHA) twice: once as it is shipped,
so that search and pruning use the validation images, and once with the test images in their place. It then runs
`fedsweep confirm`, which trains the chosen arm and the experiment's own values with fresh seeds. A last sweep trains
the experiment's own values with the seed of the searches: a seed that is lucky for all arms is no optimism. With
`--work`, the sweeps stay in this folder, and running the script again continues with the searches that are missing.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from fedsweep.common.paths import find
from fedsweep.report.arm_statistics import ArmTrials, group_by_arm, summarise
from fedsweep.report.choice import chosen_arms
from fedsweep.report.intervals_and_power import t_interval
from fedsweep.report.text_tables import markdown_table
from fedsweep.results import Store, SweepStore
from fedsweep.results.arms import identity

SPACE = "tuning/fedra"
METRICS = {"test": "accuracy/mean", "validation": "validation/accuracy/mean"}
CHOICES = ("chosen by", "value of the choice %", "same images, fresh seeds %", "other images, fresh seeds %")
PARTS = ("on the test images", "chosen by test, points", "chosen by validation, points")
Array = np.ndarray


class Search(NamedTuple):
    """A search and its confirmation; all values are in percent, by the images on which they are measured."""

    chosen: dict[str, float]
    """The chosen trial."""
    fresh: dict[str, float]
    """The mean of the chosen arm over the fresh seeds."""
    experiment: dict[str, float]
    """The mean of the experiment's own values over the same seeds."""
    start: dict[str, float]
    """The experiment's own values with the seed of the search."""


def main() -> None:
    """Run the searches and their confirmations, print the tables and, with `--to`, write them to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("searches", 10), ("samples", 24), ("rounds", 12), ("seeds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--to", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = given.work or Path(temporary)
        found: dict[str, list[Search]] = {by: [] for by in METRICS}
        own = write_own_values(work, given.rounds)
        command(work, own, "tune", own)
        for seed in range(given.searches):
            for by in METRICS:
                name = write_space(work, by, seed, given.samples, given.rounds)
                command(work, name, "tune", name)
                command(work, f"confirm/{name}", "confirm", name, "--seeds", str(given.seeds))
                found[by].append(read(work, name, own))
    page = tables(found)
    print(page)
    if given.to is not None:
        given.to.write_text(f"{page}\n", encoding="utf-8")


def write_space(work: Path, by: str, seed: int, samples: int, rounds: int) -> str:
    """Write the search space that chooses by the given images, with its own search seed, and return its name."""
    space, name = yaml.safe_load(find("search_spaces", SPACE).read_text(encoding="utf-8")), f"by_{by}/seed{seed}"
    space["fixed"]["federation.rounds"] = rounds
    space["search"] |= {"samples": samples, "startup": min(samples, space["search"]["startup"]), "seed": seed}
    if by == "test":
        del space["fixed"]["evaluation.test_rounds"]
        space["objective"]["metric"] = METRICS[by]
    return write(work, name, space)


def write_own_values(work: Path, rounds: int) -> str:
    """Write the search space whose only arm is the experiment with its own values, and return its name."""
    space = yaml.safe_load(find("search_spaces", SPACE).read_text(encoding="utf-8"))
    changes = {"federation.rounds": rounds, "evaluation.test_rounds": "all"}
    kept = {"experiment": space["experiment"], "fixed": space["fixed"] | changes, "seeds": space["seeds"]}
    return write(work, "own_values", {**kept, "named": {"own_values": {}}, "search": "grid", "scheduler": "none"})


def write(work: Path, name: str, space: dict[str, Any]) -> str:
    """Write a search space to the work folder, and return its name."""
    file = work / "search_spaces" / f"{name}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump(space, sort_keys=False), encoding="utf-8")
    return name


def command(work: Path, name: str, *words: str) -> None:
    """Run a command of fedsweep in the folder, resume its sweep, or do nothing if the sweep is finished."""
    if sweep := newest(work, name):
        manifest, trials = sweep.manifest(), sweep.trials()
        if not manifest.name.startswith("confirm/"):
            check_same(work, sweep)
        if len(trials) == manifest.trials and all(one.outcome for one in trials):
            return
        words = ("tune", manifest.name, "--resume")
    print(*words, file=sys.stderr)
    subprocess.run([sys.executable, "-m", "fedsweep", *words], cwd=work, check=True, stdout=sys.stderr)


def check_same(work: Path, sweep: SweepStore) -> None:
    """Raise an error if a sweep in the work folder had other settings than this call."""
    name = sweep.manifest().name
    asked = (work / "search_spaces" / f"{name}.yaml").read_text(encoding="utf-8")
    if asked != (sweep.folder / "search_space.yaml").read_text(encoding="utf-8"):
        raise RuntimeError(f"{work} has a sweep of {name} with other settings; choose another folder")


def newest(work: Path, name: str) -> SweepStore | None:
    """Return the newest sweep of a search space, or of one in the folder with this name; None if there is none."""
    found = [one for one in Store(work / "mlruns").sweeps() if f"{one.manifest().name}/".startswith(f"{name}/")]
    return found[-1] if found else None


def read(work: Path, name: str, own: str) -> Search:
    """Return the results of a search, of its confirmation and of the sweep `own` with the experiment's own values."""
    sweep, again, start = (newest(work, one) for one in (name, f"confirm/{name}", own))
    if sweep is None or again is None or start is None:
        raise RuntimeError(f"{name} has left no sweep")
    best = chosen_arms(sweep.manifest(), summarise(sweep.manifest(), sweep.trials()))[0].arm
    baseline = identity(again.manifest().baseline or {})
    arms = {identity(one.values) == baseline: one for one in group_by_arm(again.trials())}
    return Search(values(best), values(arms[False]), values(arms[True]), values(group_by_arm(start.trials())[0]))


def values(arm: ArmTrials) -> dict[str, float]:
    """Return the mean over the seeds of an arm, after the last round, on each kind of images in percent."""
    return {images: 100 * float(np.mean([*arm.finals(metric, metric).values()])) for images, metric in METRICS.items()}


def tables(found: dict[str, list[Search]]) -> str:
    """Return the table of the two choices, and that of the parts of the optimism on the test images.

    The luck of the images is a mean over the two choices: the amount by which an arm is better on the images that chose
    it. The same difference of difficulty between the images has opposite signs in the two choices and cancels. The
    intervals are over the seeds of the search only: all searches train with the same seed and on the same images.
    """
    rows = []
    for by, searches in found.items():
        other = next(images for images in METRICS if images != by)
        cells = ([one.chosen[by] for one in searches], *([one.fresh[of] for one in searches] for of in (by, other)))
        rows.append([by, *(f"{np.mean(cell):.2f}" for cell in cells)])
    chosen, fresh, own, start = (
        {by: np.array([getattr(one, part)["test"] for one in searches]) for by, searches in found.items()}
        for part in ("chosen", "fresh", "experiment", "start")
    )
    gaps = [[one.fresh[by] - one.fresh[of] for one in found[by]] for by, of in (METRICS, reversed(METRICS))]
    images = {"test": np.mean(gaps, 0), "validation": np.zeros(len(gaps[0]))}
    of_value = {by: chosen[by] - fresh[by] + images[by] for by in found}
    parts = {
        "better than the experiment, seed of the search": {by: chosen[by] - start[by] for by in found},
        "better than the experiment, fresh seeds": {by: fresh[by] - own[by] for by in found},
        "luck of the seed: the chosen arm": {by: chosen[by] - fresh[by] for by in found},
        "luck of the seed: the experiment": {by: start[by] - own[by] for by in found},
        "luck of the images": images,
        "optimism of the accuracy": of_value,
        "optimism of the improvement": {by: of_value[by] - start[by] + own[by] for by in found},
    }
    second = [[name, *map(shown, part.values())] for name, part in parts.items()]
    made = ((CHOICES, rows), (PARTS, second))
    return "\n\n".join(markdown_table(head, of, [place == 0 for place in range(len(head))]) for head, of in made)


def shown(values: Array) -> str:
    """Return the mean of the values and its 95% t interval as text. Equal values have no interval."""
    interval = t_interval(values.tolist()) if np.ptp(values) > 1e-9 else None
    return f"{values.mean():+.2f}" + ("" if interval is None else f" ({interval[0]:.2f} to {interval[1]:.2f})")


if __name__ == "__main__":
    main()
