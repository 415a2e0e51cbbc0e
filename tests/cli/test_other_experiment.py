"""`fedsweep tune SPACE --experiment NAME`: any search space on another experiment, told and remembered."""

import pytest

from fedsweep.common.errors import UserError
from fedsweep.results import Store
from fedsweep.sweep.plan.plan import Plan
from fedsweep.sweep.running import time_estimate
from fedsweep.sweep.running.open_sweep import new_sweep
from tests.cli.conftest import EXPERIMENT, GRID, Call, Refused, write

SPACE = "ablations/lora_rank"
OWN = {"experiment": "own"}


@pytest.fixture
def own(call: Call, monkeypatch: pytest.MonkeyPatch) -> Call:
    """The command line beside an experiment with another batch size, and with two of the six domains."""
    write(
        "experiments",
        "own",
        EXPERIMENT,
        ("[plain, rotated, inverted, noisy, thick, textured]", "[plain, rotated]"),
        ("[12, 10, 8, 6, 4, 3]", "[12, 3]"),
        ("batch_size: 32", "batch_size: 4"),
    )
    monkeypatch.setattr(time_estimate, "estimate", lambda *_: (60.0, 1))
    return call


def test_its_hyperparameters_are_those_of_the_trials(own: Call):
    theirs, ours = Plan.read(SPACE, {}, {}), Plan.read(SPACE, {}, OWN)
    assert (theirs.base.local.batch_size, ours.base.local.batch_size) == (32, 4)
    assert [trial.arm for trial in ours.grid()] == [trial.arm for trial in theirs.grid()]
    assert not {trial.key for trial in ours.grid()} & {trial.key for trial in theirs.grid()}
    assert "batch_size: 4" in ours.files["experiment.yaml"]


def test_a_dry_run_says_which_one_it_is(own: Call):
    answer = own("tune", SPACE, "local.steps=1", "--experiment", "own", "--dry-run")
    assert (answer.code, answer.err) == (0, "")
    assert "12 trials of own with 12 rounds each (144 rounds in all)" in answer.out
    assert "12 trials of fedra_digits with 12 rounds" in own("show", SPACE).out


@pytest.mark.parametrize("words", [(), ("--experiment", "own")])
def test_a_resume_keeps_it(own: Call, tmp_path, words):
    sweep = new_sweep(Plan.read(SPACE, {"local.steps": 1}, OWN), Store(tmp_path / "mlruns"))
    assert (sweep.manifest().experiment, sweep.manifest().options) == ("own", OWN)
    answer = own("tune", SPACE, "--resume", "--dry-run", *words)
    assert (answer.code, answer.err) == (0, "")
    assert "12 trials of own with 12 rounds each (144 rounds in all)" in answer.out


def test_a_resume_on_another_one_is_refused(own: Call, refused: Refused, tmp_path):
    sweep = new_sweep(Plan.read(SPACE, {}, OWN), Store(tmp_path / "mlruns"))
    assert refused("tune", SPACE, "--resume", "--experiment", "fedra_digits") == (
        f"sweep {sweep.folder.name} of {SPACE} cannot be resumed because its YAML files or overrides have changed "
        "since; start a new sweep, or undo the change."
    )


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "fedra_digit",
            "there is no experiment `fedra_digit`; did you mean `fedra_digits` or `fedag_digits` or `fedms_digits`?",
        ),
        ("zzz", "there is no experiment `zzz`; run `fedsweep list` to see all names."),
        ("", "there is no experiment ``; run `fedsweep list` to see all names."),
        (
            SPACE,
            f"there is no experiment `{SPACE}`; to use the search space of that name, run `fedsweep tune {SPACE}`.",
        ),
    ],
)
def test_an_unknown_one_is_refused(refused: Refused, name, sentence):
    assert refused("tune", SPACE, "--experiment", name) == sentence
    with pytest.raises(UserError) as error:
        Plan.read(SPACE, {}, {"experiment": name})
    assert str(error.value) == sentence


def test_an_arm_that_does_not_fit_it_is_refused(own: Call, refused: Refused):
    write("search_spaces", "mine", GRID, ("fixed:", "fixed:\n  data.domains: [plain, rotated, noisy]"))
    assert refused("tune", "mine", "--experiment", "own") == (
        "search space mine: `federation.depths` must name one depth for each of the 3 clients, or one for all, "
        "but it has 2: [12, 3]."
    )
