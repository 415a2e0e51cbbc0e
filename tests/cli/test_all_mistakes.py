"""All mistakes of a search space or an experiment are reported at once, without mistakes that follow from others."""

import json
from itertools import combinations
from typing import Any

import pytest
import yaml

from fedsweep.cli import early_check
from fedsweep.cli.early_check import check_space
from fedsweep.common.errors import UserError
from fedsweep.sweep.plan.plan import Plan
from fedsweep.sweep.space.requested_space import read
from tests.cli.conftest import EXPERIMENT, Call, Refused, write
from tests.places import without_place

SOUND: dict[str, Any] = {
    "experiment": "fedra_digits",
    "fixed": {"federation.rounds": 5},
    "space": {
        "optimizer.momentum": {"grid": [0.0, 0.9]},
        "local.batch_size": {"grid": [8, 16], "when": {"optimizer.momentum": 0.9}},
    },
    "baseline": {"optimizer.momentum": 0.9, "local.batch_size": 8},
    "seeds": [0],
}
MISTAKES: dict[str, dict[str, Any]] = {
    "`lora.rnak` is not a hyperparameter of this run": {"space": {"lora.rnak": {"grid": [2, 8]}}},
    "`local.stps` is not a hyperparameter of this run": {"space": {"local.stps": {"grid": [1, 2]}}},
    "arm lora.position=lo: `lora.position` must be": {"space": {"lora.position": {"grid": ["l0", "lo"]}}},
    "`federation.seconds` is not a hyperparameter of this run": {"fixed": {"federation.seconds": 5}},
    "`lora.dropout` must be less than 1, but it is 7": {"fixed": {"lora.dropout": 7}},
    "`aggregation.weights` must be": {"fixed": {"aggregation.weights": "equal"}},
    "`when` of `space.base_optimizer.mu` requires that base_optimizer.name is scaffold": {
        "space": {"base_optimizer.mu": {"grid": [0.1, 0.2], "when": {"base_optimizer.name": "scaffold"}}}
    },
    "`baseline` must be one of the arms, but": {"baseline": {"optimizer.momentum": 0.7}},
    "`comparisons.0.against` must match an arm, but {optimizer.momentum: 0.7} matches none": {
        "comparisons": [{"arm": {"optimizer.momentum": 0.0}, "against": {"optimizer.momentum": 0.7}}]
    },
    "`objective.metric` accuracy/avg is not reported by this run": {"objective": {"metric": "accuracy/avg"}},
    "`columns` lists `worst_domian`, which is not a column": {"columns": ["worst_domian"]},
}
"""Changes to `SOUND`, each with one mistake, keyed by a part of the error message about it."""
OF_FORM: dict[str, dict[str, Any]] = {
    "each axis of `space` must name its kind; write `lora.rank: {grid: [2, 8]}` instead of `lora.rank: [2, 8]`.": {
        "space": {"lora.rank": [2, 8]}
    },
    "`space.local.epochs.grd` is not an entry of a search space": {"space": {"local.epochs": {"grd": [1, 2]}}},
    "`seeds` must be a list, `{list: [0, 1, 2], ...}` or `{until: decided, ...}`, but it is 3.": {"seeds": 3},
    "`baselin` is not an entry of a search space; did you mean `baseline`": {"baselin": {"optimizer.momentum": 0.9}},
    "`objective.mode` must be 'max' or 'min', but it is \"maximal\".": {"objective": {"mode": "maximal"}},
    "`resources` must be a mapping of names to values, but it is 1.": {"resources": 1},
    "`scheduler.name` must be one of none, asha, asha_async, median, arms, pbt, but it is `hyperband`.": {
        "scheduler": "hyperband"
    },
    "`subsets` all needs components in `ablate`, but there are none.": {"subsets": "all"},
}
"""Changes to `SOUND`, each with one mistake in the form of the file, keyed by the error message about it."""
FOLLOWING: list[tuple[dict[str, Any], str]] = [
    (
        {
            "space": {
                "lora.rnak": {"grid": [2, 8]},
                "lora.dropout": {"grid": [0.0, 0.1], "when": {"lora.rank": 8}},
            },
            "baseline": {"lora.rank": 8, "lora.dropout": 0.0},
            "columns": ["lora.rank"],
        },
        "`lora.rnak` is not a hyperparameter of this run",
    ),
    (
        {"fixed": {"method": "depthfI", "method.heads": [4]}, "space": {"method.distil": {"grid": [True, False]}}},
        "`method.name` must be one of",
    ),
    (
        {"space": {"method": {"grid": ["fedr", "all_large"]}}, "baseline": {"method": "fedra"}},
        "arm method=fedr: `method.name` must be one of",
    ),
    (
        {"fixed": {"evaluation.metrics": ["drft"]}, "objective": {"metric": "drift/representation"}},
        "`evaluation.metrics.0` must be",
    ),
    (
        {"ablate": {"lora.rnak": 4, "lora.dropout": 0.3}, "baseline": {"without": ["lora.rnak"]}, "space": {}},
        "`lora.rnak` is not a hyperparameter of this run",
    ),
]
FOLLOWING += [
    (
        {"space": None, "columns": ["optimizer.momentum"]},
        "`space` must be a mapping of names to values, but it is null.",
    ),
    (
        {"space": {"optimizer.momentum": {"grd": [0.0, 0.9]}}, "columns": ["optimizer.momentum"]},
        "`space.optimizer.momentum.grd` is not an entry",
    ),
    ({"space": {"optimizer.lr": {"uniform": [0.1, 0.2]}}, "search": "gird"}, "`search.name` must be one of grid,"),
    ({"space": {"local.epochs": {"uniform": [1, 2]}}}, "`search` grid needs `grid` values for each axis, but "),
    (
        {"fixed": {"lora.rank": 4, "federation.ranks": [8]}, "columns": ["lora/energy_beyond_least_rank"]},
        "`federation.ranks` must contain numbers from 1 to 4, `lora.rank`, but one is 8",
    ),
    ({"ablate": 3, "subsets": "all"}, "`ablate` must be a mapping of names to values, but it is 3."),
    ({"seeds": [0, 0]}, "`seeds` must be distinct and not negative, but they are [0, 0]."),
    (
        {"experiment": None, "space": {"lora.rnak": {"grid": [2, 8]}}},
        "`experiment` must be a valid string, but it is null.",
    ),
]
"""Changes to `SOUND` with one mistake from which other error messages would follow, and a part of the only message."""

EXPERIMENT_MISTAKES: dict[str, tuple[str, Any]] = {
    "`lora.rank` must be greater than 0, but it is 0.": ("lora.rank", 0),
    '`federation.rounds` must be an integer, but it is "two".': ("federation.rounds", "two"),
    "`optimizer.lr` must be greater than 0, but it is -1.": ("optimizer.lr", -1),
    "`local.batch_size` must be greater than 0, but it is 0.": ("local.batch_size", 0),
    "`federation.roundz` is not a hyperparameter of this run; did you mean `federation.rounds` or ": (
        "federation.roundz",
        3,
    ),
    "`method.name` must be one of ": ("method", "fedr"),
    "`data` must be a mapping of names to values, but it is null.": ("data", None),
}
"""Changes of an experiment, each with one mistake, keyed by the beginning of the error message about it."""


def changed(*changes: dict[str, Any]) -> dict[str, Any]:
    """Return `SOUND` with some changes, which extend `space`, `fixed` and `objective` and replace other entries."""
    file = {**SOUND, "fixed": {**SOUND["fixed"]}, "space": {**SOUND["space"]}}
    for change in changes:
        for entry, value in change.items():
            extended = entry in ("space", "fixed", "objective") and value
            file[entry] = {**file.get(entry, {}), **value} if extended else value
    return file


def messages(file: dict[str, Any]) -> list[str]:
    """Return the error messages about a search space, or an empty list if it has no mistake."""
    write("search_spaces", "mine", yaml.safe_dump(file, sort_keys=False))
    try:
        request = read("mine", {}, {})
        check_space(request)
        Plan.of(request)
    except UserError as error:
        first, *others = str(error).removeprefix("search space mine").lstrip(":, ").splitlines()
        assert not others or first == f"has {len(others)} mistakes:"
        return [line.removeprefix("- ") for line in others] or [first]
    return []


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch, read_once):
    monkeypatch.chdir(tmp_path)
    stored = early_check._stored()["declarations"]
    monkeypatch.setattr(early_check, "declarations", lambda: stored)  # computed for every error message otherwise


def test_each_of_several_independent_mistakes_is_named_once():
    assert messages(SOUND) == []
    chosen = [*combinations(MISTAKES, 2)][::4] + [*combinations(MISTAKES, 3)][::12] + [(*MISTAKES,)]
    assert len(chosen) == 29
    assert {part for parts in chosen[:-1] for part in parts} == {*MISTAKES}
    for parts in chosen:
        found = messages(changed(*(MISTAKES[part] for part in parts)))
        assert [sum(part in one for one in found) for part in parts] == [1] * len(parts), (parts, found)
        assert len(found) == len(parts), found


def test_a_mistake_of_form_hides_no_other_mistake():
    for part, change in OF_FORM.items():
        (found,) = messages(changed(change))
        assert part in found
    mistakes = {**OF_FORM, **MISTAKES}
    chosen = [*([one, other] for one, other in zip(OF_FORM, MISTAKES, strict=False)), [*OF_FORM], [*mistakes]]
    for parts in chosen:
        found = messages(changed(*(mistakes[part] for part in parts)))
        assert [sum(part in one for one in found) for part in parts] == [1] * len(parts), (parts, found)
        assert len(found) == len(parts), found


@pytest.mark.parametrize(("change", "part"), FOLLOWING)
def test_a_mistake_that_follows_from_another_is_not_listed(change, part):
    (found,) = messages(changed(change))
    assert part in found


def test_the_command_lists_all_mistakes(call: Call):
    wrong = changed(*MISTAKES.values(), *OF_FORM.values())
    write("search_spaces", "mine", yaml.safe_dump(wrong, sort_keys=False))
    answer = call("tune", "mine")
    assert (answer.code, answer.out) == (2, "")
    first, *others = answer.err.splitlines()
    assert first == "fedsweep: search space mine has 19 mistakes:"
    assert len(others) == 19


def test_the_command_lists_all_mistakes_of_its_overrides_and_options(call: Call):
    answer = call("tune", "ablations/lora_rank", "lora.rank=4", "seed=1", "lora.dropout=7", "lr=1", "--samples", "3")
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.splitlines() == [
        "fedsweep: search space ablations/lora_rank has 5 mistakes:",
        "- `lora.rank` is varied by search space ablations/lora_rank and cannot be overridden.",
        "- `seed` cannot be overridden in search space ablations/lora_rank; use --seeds instead.",
        "- --samples needs `search` tpe or random, but search space ablations/lora_rank has `search` grid.",
        "- `lora.dropout` must be less than 1, but it is 7.",
        "- `lr` is not a hyperparameter of this run; did you mean `lora`?",
    ]


def test_an_option_for_a_wrong_search_is_no_further_mistake(refused: Refused):
    write("search_spaces", "mine", yaml.safe_dump(changed({"search": "gird"}), sort_keys=False))
    assert without_place(refused("tune", "mine", "--samples", "3")) == (
        "`search.name` must be one of grid, tpe, random, but it is `gird`; did you mean `grid`?"
    )


@pytest.mark.parametrize("as_file", [True, False], ids=["file", "overrides"])
def test_the_command_lists_all_mistakes_of_an_experiment(call: Call, as_file):
    def lines(*changes: tuple[str, Any]) -> list[str]:
        content, words, name = yaml.safe_load(EXPERIMENT), [f"{key}={json.dumps(one)}" for key, one in changes], "mine"
        for dotted, value in changes if as_file else ():
            home, _, leaf = dotted.rpartition(".")
            (content[home] if home else content)[leaf] = value
        write("experiments", name, yaml.safe_dump(content, sort_keys=False))
        answer = call("run", name, *([] if as_file else words))
        assert (answer.code, answer.out) == (2, "")
        return answer.err.splitlines()

    for start, change in EXPERIMENT_MISTAKES.items():
        (line,) = lines(change)
        if as_file:
            assert without_place(line.removeprefix("fedsweep: ")).startswith(start)
        else:
            assert line.startswith(f"fedsweep: experiment mine: {start}")
    first, *others = lines(*EXPERIMENT_MISTAKES.values())
    assert first == f"fedsweep: experiment mine has {len(EXPERIMENT_MISTAKES)} mistakes:"
    sentences = [line.removeprefix("- ") for line in others]
    sentences = [*map(without_place, sentences)] if as_file else sentences
    assert [sum(one.startswith(start) for one in sentences) for start in EXPERIMENT_MISTAKES] == [1] * len(others)


@pytest.mark.parametrize("other", [{}, {"seeds": 3}, {"seeds": [0, 0]}, {"baselin": 1}, {"design": "one_factor"}])
def test_the_arms_of_a_huge_grid_are_not_listed_in_order_to_find_other_mistakes(other: dict[str, Any], monkeypatch):
    monkeypatch.setattr("fedsweep.sweep.space.designs.Factorial.every", lambda self: pytest.fail("arms are listed"))
    names = ("optimizer.lr", "optimizer.momentum", "optimizer.weight_decay", "lora.dropout", "partition.alpha")
    axes = {name: {"grid": [step / 10 for step in range(1, 9)]} for name in names}
    found = messages({"experiment": "fedra_digits", "space": axes, **other})
    assert len(found) == 1 + bool(other) - (other == {"design": "one_factor"})
    limit = "a grid can have at most 10,000 arms, but this one has 32,768"
    assert any(("needs a `baseline`" if "design" in other else limit) in one for one in found)
