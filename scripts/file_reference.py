"""The page of the reference that lists the shipped search spaces, experiments and pre-trainings."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from fedsweep.common.paths import Kind, available, summary
from fedsweep.results.arms import Arm, agrees
from fedsweep.sweep.space.requested_space import read
from fedsweep.sweep.space.search_space import SearchSpace

FOLDERS = {
    "ablations": "Each of these search spaces answers one question about a method or a setting.",
    "tuning": "These search spaces look for good values of several hyperparameters.",
    "papers/fedag": "The tables and figures of the FedAG paper.",
    "papers/fedbrick": "The tables and figures of the FedBRICK paper.",
    "papers/fedms": "The tables and figures of the FedMS paper.",
    "papers/fedra": "The tables and figures of the FedRA paper.",
}
"""The folders of `search_spaces/`, in the order of the page, with a sentence about each."""
OTHERS: dict[Kind, tuple[str, str]] = {
    "experiments": ("Experiments", "An experiment describes one federated run. Run it with `fedsweep run NAME`."),
    "pretrain": ("Pre-trainings", "A pre-training trains a backbone. Run it with `fedsweep pretrain NAME`."),
}
"""The other kinds of files, each with its heading on the page and a sentence about it."""


def lines() -> Iterator[str | list[list[str]]]:
    """Yield the paragraphs and tables of the page. A table is a list of rows, of which the first has the headings."""
    spaces = available("search_spaces")
    yield (
        f"fedsweep contains {len(spaces)} search spaces. Run one with `fedsweep tune FOLDER/NAME`, and list its arms "
        "with all values with `fedsweep show FOLDER/NAME`. `fedsweep list spaces WORD` finds search spaces by words."
    )
    yield (
        "An arm is one variant, and a trial is one arm with one seed. In search spaces with `until: decided`, arms get "
        "seeds until their comparisons are decided, so the number of trials is a maximum. If a search space samples "
        "values instead of listing them, it has no fixed arms. If the column says *counted*, no model is trained and "
        "only the parameters are counted."
    )
    folders = {folder: list(names) for folder, names in groupby(spaces, lambda name: name.rpartition("/")[0])}
    if {*folders} != {*FOLDERS}:
        raise ValueError(f"describe the folders {sorted({*folders} ^ {*FOLDERS})} in scripts/file_reference.py")
    for folder, about in FOLDERS.items():
        yield f"## {folder}"
        yield f"{about} Put the folder before the name, as in `fedsweep tune {folders[folder][0]}`."
        yield [
            ["name", "question", "arms", "trials", "experiment"],
            *(_row(name.removeprefix(f"{folder}/"), name, summary(spaces[name])) for name in folders[folder]),
        ]
    for kind, (title, about) in OTHERS.items():
        yield f"## {title}"
        yield about
        yield [["name", "description"], *([f"`{name}`", summary(path)] for name, path in available(kind).items())]


def _row(shown: str, name: str, question: str) -> list[str]:
    """Return the cells of a search space: name, question, number of arms, number of trials, and experiment."""
    space = read(name, {}, {}).space
    shown, experiment = f"`{shown}`", f"`{space.experiment}`"
    if space.search.name != "grid":
        return [shown, question, "sampled", str(space.search.samples), experiment]
    arms = len(grid_arms(space))
    if space.measure.name == "parameters":
        return [shown, question, str(arms), "counted", experiment]
    trials = f"{'at most ' * (space.until_decided is not None)}{arms * len(space.planned_seeds)}"
    if (tuned := space.tune_each) is not None:
        trials = f"{arms * tuned.samples * tuned.seeds} to tune, then {trials}"
    return [shown, question, str(arms), trials, experiment]


def grid_arms(space: SearchSpace) -> list[Arm]:
    """Return the arms of a grid without those that `exclude` leaves out, before each is tuned.

    The arms are not validated, so neither data nor weights are needed.

    Raises:
        ValueError: An axis has a condition, which can only be evaluated with the values of the experiment.
    """
    if conditional := [key for key, axis in space.space.items() if axis.when]:
        raise ValueError(f"the condition of {conditional[0]} needs the values of the experiment")
    return [arm for arm in space.arms(lambda part: part) if not any(agrees(one, arm) for one in space.exclude)]
