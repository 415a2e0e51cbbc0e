"""Error messages about YAML files begin with the line and the column of the mistake."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from fedsweep.cli import early_check
from fedsweep.cli.early_check import check, check_space
from fedsweep.common.errors import UserError
from fedsweep.common.places import placed
from fedsweep.common.yaml_values import read_yaml
from fedsweep.sweep.space.requested_space import read
from tests.cli.conftest import EXPERIMENT, GRID, ROOT, Call, Refused, write

WRONG = "zzz_wrong"
EXPERIMENTS = sorted((ROOT / "experiments").glob("*.yaml"))
PRETRAININGS = sorted((ROOT / "experiments" / "pretrain").glob("*.yaml"))
SPACES = sorted((ROOT / "search_spaces").rglob("*.yaml"))


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch, read_once):
    monkeypatch.chdir(tmp_path)
    stored = early_check._stored()["declarations"]
    monkeypatch.setattr(early_check, "declarations", lambda: stored)  # computed for every error message otherwise


def corrupted(text: str) -> Iterator[str]:
    """Yield the text once for each name and each value, with this name or value replaced by `WRONG`."""
    for token in yaml.scan(text):
        if isinstance(token, yaml.ScalarToken):
            yield f"{text[: token.start_mark.index]}{WRONG}{text[token.end_mark.index :]}"


def place_of(text: str, path: Path, token: str = WRONG) -> str:
    """Return the place of a token that occurs once in the text."""
    assert text.count(token) == 1
    before = text[: text.index(token)]
    return f"{path}:{before.count(chr(10)) + 1}:{len(before) - before.rfind(chr(10))}: "


def lines_about(kind: str, text: str) -> list[str]:
    """Return the error messages about a file with this text; an empty list if it is valid."""
    path = write({"search_spaces": "search_spaces", "RunConfig": "experiments"}.get(kind, "pretrain"), "mine", text)
    try:
        if kind == "search_spaces":
            check_space(read("mine", {}, {}))
        else:
            check(kind, read_yaml(path), "mine", {}, path)
    except UserError as error:
        first, *others = str(error).splitlines()
        return [line.removeprefix("- ") for line in others] or [first]
    return []


ABOUT_OTHERS = ("must be among `data.domains`", "must be one of the arms", "must have a `name`")
"""Parts of messages about a list or a mapping that a wrong name or value in it causes, or about another value."""


def about_the_token(messages: list[str]) -> bool:
    """Return whether at least one message must have the place of the wrong name or value."""
    return any(not any(part in line for part in ABOUT_OTHERS) for line in messages)


@pytest.mark.parametrize("kind", ["RunConfig", "PretrainConfig"])
def test_the_place_is_that_of_the_wrong_name_or_value(kind):
    paths = EXPERIMENTS if kind == "RunConfig" else PRETRAININGS
    relative = Path("experiments" if kind == "RunConfig" else "pretrain", "mine.yaml")
    chosen, checked = random.Random(0), 0
    for path in paths:
        cases = list(corrupted(path.read_text()))
        for text in chosen.sample(cases, 12):
            found = lines_about(kind, text)
            if about_the_token(found):  # some values may be any text
                checked += 1
                assert any(line.startswith(place_of(text, relative)) for line in found), (path, found)
    assert checked > 8 * len(paths)


def test_the_place_in_a_search_space_is_that_of_the_wrong_name_or_value():
    chosen, checked = random.Random(0), 0
    for path in chosen.sample(SPACES, 60):
        cases = list(corrupted(path.read_text()))
        for text in chosen.sample(cases, 3):
            found = lines_about("search_spaces", text)
            if about_the_token(found):
                checked += 1
                expected = place_of(text, Path("search_spaces/mine.yaml"))
                assert any(line.startswith(expected) for line in found), (path, expected, found)
    assert checked > 100


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        ("  rank: 8", "  rnk: 8", "rnk:"),  # an unknown name
        ("  rank: 8", "  rank: -8", "-8"),  # an invalid value
        ("  rank: 8", "  rank: 65", "65"),  # a value that breaks a rule of several hyperparameters
        ("name: fedra ", "name: fedrra ", "fedrra"),  # an unknown kind
        ("name: fedra ", "title: fedra ", "method:"),  # a mapping without a kind
        ("name: digits_vit", "name: clip", "backbone:"),  # a missing name: the mapping that lacks it
        ("  depths: [12, 10, 8, 6, 4, 3]", "", "null                  # instead"),  # a rule of two hyperparameters
        ("[12, 10, 8, 6, 4, 3]", "[12, 10, 8, a, 4, 3]", "a, 4"),  # an item of a list
        ("[12, 10, 8, 6, 4, 3]", "[12, 10, 8, 13, 4, 3]", "13, 4"),  # an item that breaks a rule
        ("[12, 10, 8, 6, 4, 3]", "[12, 10]", "[12, 10]"),  # a list that breaks a rule
        ("evaluation:", "evaluation_of:", "evaluation_of:"),  # an unknown name and a missing name
    ],
)
def test_the_place_in_an_experiment(refused: Refused, old, new, place):
    write("experiments", "mine", EXPERIMENT, (old, new))
    text = EXPERIMENT.replace(old, new)
    assert refused("run", "mine").startswith(place_of(text, Path("experiments/mine.yaml"), place))


def test_a_missing_part_of_an_experiment_has_the_place_of_the_first_key(refused: Refused):
    text = EXPERIMENT[: EXPERIMENT.index("evaluation:")] + "precision: float32\n"
    write("experiments", "mine", text)
    first = place_of(text, Path("experiments/mine.yaml"), "seed: 0")
    assert refused("run", "mine") == f"{first}`evaluation` is missing."


SPACE = """# Which rank?
experiment: fedra_digits
fixed:
  federation.rounds: 5
space:
  lora.rank: {grid: [2, 4]}
  method:
    grid:
      - fedra
      - all_small
  lora.alpha, lora.scaling: {grid: [[1, null], [null, 2]]}
  local.epochs: {grid: [1, 2], when: {method.name: fedra}}
baseline: {lora.rank: 2}
columns: [worst_domain]
seeds: [0]
"""


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        ("[2, 4]", "[2, 0]", "0]}\n  meth"),  # an invalid value of an axis
        ("all_small", "all_smal", "all_smal"),  # an unknown kind among the values of an axis
        ("- all_small", "- {name: fedra, missing: 3}", "missing: 3"),  # an unknown name in a value of an axis
        ("all_small", "fedbrick", "fedbrick"),  # a value that does not fit the experiment
        ("[null, 2]", "[null, -2]", "-2]]"),  # a value of an axis with two names
        ("lora.alpha, lora.scaling", "lora.alpha, lora.scalin", "lora.alpha, lora.scalin:"),
        ("federation.rounds: 5", "federation.rounds: 0", "0\nspace"),  # a fixed value
        ("federation.rounds: 5", "method: fedms", "grid:\n"),  # a fixed value that an axis also sets
        ("method.name: fedra", "method.name: fedrra", "{method.name: fedrra"),  # a condition
        ("grid: [1, 2]", "grd: [1, 2]", "grd: [1, 2]"),
        ("grid: [1, 2]", "uniform: [1, 2]", "[1, 2]"),
        ("grid: [1, 2]", "grid: [1, 1]", "[1, 1]"),
        ("{lora.rank: 2}", "{lora.rank: 3}", "{lora.rank: 3}"),  # a baseline that is no arm
        ("worst_domain", "worst_domin", "worst_domin"),
        ("[0]", "[0, 0]", "[0, 0]"),  # a rule of several entries
        ("seeds: [0]", "objective: {metric: accuracy/men}\nseeds: [0]", "accuracy/men"),
        ("experiment: fedra_digits", "experiment: fedra_digit", "fedra_digit\n"),
    ],
)
def test_the_place_in_a_search_space(refused: Refused, old, new, place):
    write("search_spaces", "mine", SPACE, (old, new))
    text = SPACE.replace(old, new)
    expected = place_of(text, Path("search_spaces/mine.yaml"), place)
    assert refused("tune", "mine").startswith(expected)


def test_values_from_the_command_line_have_no_place(call: Call):
    write("search_spaces", "mine", SPACE)
    words = ("federation.rounds=0", "lora.dropot=1", "optimizer=sgdd", "--seeds", "0,0", "--cpus-per-trial", "0")
    first, *others = call("tune", "mine", *words).err.splitlines()
    assert first == "fedsweep: search space mine has 5 mistakes:"
    assert all(line.startswith("- `") for line in others)
    assert ".yaml" not in "".join(others)


@pytest.mark.parametrize("override", ["lora.rank=0", "lora.rank=65", "lora.rnk=3", "method=fedbrick", "lora.alpha=2"])
def test_overrides_of_an_experiment_have_no_place(refused: Refused, override):
    write("experiments", "mine", EXPERIMENT)
    assert refused("run", "mine", override).startswith("experiment mine: ")


def test_a_value_of_the_file_that_does_not_fit_an_override_is_not_blamed(refused: Refused):
    write("search_spaces", "mine", GRID, ("fixed:", "fixed:\n  evaluation.test_rounds: all"))
    found = refused("tune", "mine", "evaluation.test_rounds=last")
    assert found.startswith("search space mine: `evaluation.test_rounds` last measures only")


def test_an_error_about_the_data_has_the_place_of_the_value_if_it_is_in_the_file(refused: Refused):
    prepared = "data:\n  name: prepared\n  set: nothing\n  size: 16\n  domains: [a]\n"
    text = EXPERIMENT.replace(EXPERIMENT[EXPERIMENT.index("data:") : EXPERIMENT.index("partition:")], prepared)
    write("experiments", "mine", text)
    path = Path("experiments/mine.yaml")
    with pytest.raises(UserError) as error, placed(path, ()):
        raise UserError("`data.set` nothing is not prepared.")
    assert str(error.value) == f"{place_of(text, path, 'nothing')}`data.set` nothing is not prepared."
    for sentence, changed in (
        ("`data.set` nothing is not prepared.", {"data.set"}),  # from the command line
        ("`data.set` nothing is not prepared.", {"data"}),
        ("`synthetic.share` must be larger.", ()),  # a default value
        ("the data set `nothing` is not prepared.", ()),  # no name of a value
    ):
        with pytest.raises(UserError) as error, placed(path, changed):
            raise UserError(sentence)
        assert str(error.value) == sentence


def test_a_wrong_experiment_is_blamed_and_not_its_search_space(refused: Refused):
    write("experiments", "mine", EXPERIMENT, ("  rank: 8", "  rank: 0"))
    write("search_spaces", "mine", GRID, ("experiment: fedra_digits", "experiment: mine"))
    text = (Path("experiments") / "mine.yaml").read_text()
    place = place_of(text, Path("experiments/mine.yaml"), "0\n  alpha: null")
    assert refused("tune", "mine") == f"{place}`lora.rank` must be greater than 0, but it is 0."
