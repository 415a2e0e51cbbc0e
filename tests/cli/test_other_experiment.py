"""The option `--experiment` of `fedsweep tune`, which runs a search space with another experiment."""

import os
import subprocess
import sys

import pytest

from fedsweep.common.errors import UserError
from fedsweep.results import Outcome, Store
from fedsweep.results.checkpoint import Checkpoint, save
from fedsweep.results.history import RoundRecord
from fedsweep.sweep.plan.plan import Plan
from fedsweep.sweep.running import time_estimate
from fedsweep.sweep.running.open_sweep import new_sweep
from fedsweep.types import ServerState
from tests.cli.conftest import EXPERIMENT, GRID, Call, Refused, write

SPACE = "ablations/lora_rank"
OWN = {"experiment": "own"}


@pytest.fixture
def own(call: Call, monkeypatch: pytest.MonkeyPatch) -> Call:
    """Write the experiment `own` with another batch size and two of the six domains, and return the fixture `call`."""
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


def test_trials_have_the_hyperparameters_of_the_given_experiment(own: Call):
    theirs, ours = Plan.read(SPACE, {}, {}), Plan.read(SPACE, {}, OWN)
    assert (theirs.base.local.batch_size, ours.base.local.batch_size) == (32, 4)
    assert [trial.arm for trial in ours.grid()] == [trial.arm for trial in theirs.grid()]
    assert not {trial.key for trial in ours.grid()} & {trial.key for trial in theirs.grid()}
    assert "batch_size: 4" in ours.files["experiment.yaml"]


def test_a_dry_run_prints_the_experiment(own: Call):
    answer = own("tune", SPACE, "local.steps=1", "--experiment", "own", "--dry-run")
    assert (answer.code, answer.err) == (0, "Measuring one round of the experiment ...\n")
    assert "At most 32 trials of own with 10 rounds each (320 rounds in all)" in answer.out
    assert "At most 32 trials of fedra_digits with 10 rounds" in own("show", SPACE).out


@pytest.mark.slow
def test_a_dry_run_with_recorded_rounds_imports_neither_timm_nor_ray_nor_mlflow(tmp_path):
    store = Store(tmp_path / "mlruns")
    plan = Plan.read(SPACE, {}, {"seeds": [0, 1, 2]})  # the forecast of seeds until decided imports the report
    sweep = new_sweep(plan, store)
    for one in plan.grid():
        trial = sweep.trial(one.key)
        trial.plan(one)
        records = tuple(RoundRecord(number, {}, 2.0) for number in range(13))
        save(trial.checkpoint, Checkpoint(12, ServerState({}, (0,)), records))
        trial.end(Outcome(outcome="finished", round=12))
    code = (
        "import sys; from fedsweep.cli import main\n"
        "main()\n"
        "print(sorted({'ray', 'mlflow', 'optuna', 'timm', 'peft', 'pandas'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code, "tune", SPACE, "--seeds", "0,1,2", "--dry-run"]
    wide = {**os.environ, "COLUMNS": "200"}  # the sentence in one line
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env=wide)
    *_, estimate, imported = done.stdout.splitlines()
    assert estimate == f"Estimated time: 2 min 24 s, from the rounds of sweep {sweep.folder.name} on this machine."
    assert imported == "[]"
    assert done.stderr == "Loading PyTorch ...\n"


def test_a_dry_run_warns_about_an_untrained_backbone(own: Call):
    assert "untrained" not in own("tune", SPACE, "--dry-run").err
    backbone = "{name: timm, model: vit_tiny_patch16_224, pretrained: none, img_size: 16, patch_size: 4}"
    answer = own("tune", SPACE, f"backbone={backbone}", "--dry-run")
    assert answer.err.count("The backbone is untrained (`backbone.pretrained` is none)") == 1


def test_a_dry_run_names_a_scaling_that_changes_with_the_rank(own: Call):
    alone = own("tune", SPACE, "--dry-run").out
    both = own("tune", SPACE, "lora.alpha=8.0", "lora.scaling=null", "--dry-run").out
    assert "differs between arms" not in alone
    assert "\nscaling differs between arms: 8, 2, 1, 0.5 (lora.alpha / lora.rank).\n" in both


@pytest.mark.parametrize("words", [(), ("--experiment", "own")])
def test_a_resumed_sweep_keeps_the_experiment(own: Call, tmp_path, words):
    sweep = new_sweep(Plan.read(SPACE, {"local.steps": 1}, OWN), Store(tmp_path / "mlruns"))
    assert (sweep.manifest().experiment, sweep.manifest().options) == ("own", OWN)
    answer = own("tune", SPACE, "--resume", "--dry-run", *words)
    assert (answer.code, answer.err) == (0, "Measuring one round of the experiment ...\n")
    assert "At most 32 trials of own with 10 rounds each (320 rounds in all)" in answer.out


def test_a_sweep_cannot_be_resumed_with_another_experiment(own: Call, refused: Refused, tmp_path):
    sweep = new_sweep(Plan.read(SPACE, {}, OWN), Store(tmp_path / "mlruns"))
    assert refused("tune", SPACE, "--resume", "--experiment", "fedra_digits") == (
        f"sweep {sweep.folder.name} of {SPACE} cannot be resumed because its YAML files or overrides have changed "
        "since the sweep was started; undo the change, or start a new sweep."
    )


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "fedra_digit",
            "there is no experiment `fedra_digit`; did you mean `fedra_digits` or `fedag_digits` or `fedms_digits`?",
        ),
        ("zzz", "there is no experiment `zzz`; run `fedsweep list all` to see all names."),
        ("", "there is no experiment ``; run `fedsweep list all` to see all names."),
        (
            SPACE,
            f"there is no experiment `{SPACE}`; to use the search space of that name, run `fedsweep tune {SPACE}`.",
        ),
    ],
)
def test_an_unknown_experiment_is_rejected(refused: Refused, name, sentence):
    assert refused("tune", SPACE, "--experiment", name) == sentence
    with pytest.raises(UserError) as error:
        Plan.read(SPACE, {}, {"experiment": name})
    assert str(error.value) == sentence


def test_an_arm_that_is_invalid_for_the_experiment_is_rejected(own: Call, refused: Refused):
    write("search_spaces", "mine", GRID, ("fixed:", "fixed:\n  data.domains: [plain, rotated, noisy]"))
    assert refused("tune", "mine", "--experiment", "own") == (
        "search space mine: `federation.depths` must have one depth for each of the 3 clients, or one for all "
        "clients, but it has 2: [12, 3]."
    )
