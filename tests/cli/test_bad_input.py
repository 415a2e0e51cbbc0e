"""Every mistake of a user gives a one-sentence error message and exit code 2, before training or Ray starts."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fedsweep.common.errors import DivergenceError, UserError
from fedsweep.results import Store
from fedsweep.sweep.cluster.cluster import available_cpus, decided
from fedsweep.sweep.plan import plan as plan_module
from fedsweep.sweep.plan.plan import Plan
from fedsweep.sweep.running.open_sweep import new_sweep, resumed_sweep
from fedsweep.sweep.space.requested_space import read as read_space
from fedsweep.tracking import single_run as recorded_run
from tests.cli.conftest import EXPERIMENT, GRID, METHODS, SAMPLED, Call, Refused, write
from tests.places import without_place

SPACE = "ablations/lora_rank"
LISTED = "; run `fedsweep list all` to see all names."
NINES = "9" * 5000


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["tune", "ablations/lora_rnk"],
            f"there is no search space `ablations/lora_rnk`; did you mean `{SPACE}` or `ablations/lora_rank_clip` "
            "or `ablations/lora_rank_tuned`?",
        ),
        (["tune", "lora_rank"], f"there is no search space `lora_rank`; did you mean `{SPACE}`?"),
        (["tune", "zzz"], f"there is no search space `zzz`{LISTED}"),
        (["tune", ""], f"there is no search space ``{LISTED}"),
        (
            ["run", "fedra_digit"],
            "there is no experiment `fedra_digit`; did you mean `fedra_digits` or `fedag_digits` or `fedms_digits`?",
        ),
        (
            ["run", "fedra_digits.yaml"],
            "there is no experiment `fedra_digits.yaml`; did you mean `fedra_digits`?",
        ),
        (
            ["run", "experiments/fedra_digits.yaml"],
            "there is no experiment `experiments/fedra_digits.yaml`; did you mean `fedra_digits`?",
        ),
        (["run", "../fedra"], f"there is no experiment `../fedra`{LISTED}"),
        (
            ["tune", "fedra_digits"],
            "there is no search space `fedra_digits`; "
            "to use the experiment of that name, run `fedsweep run fedra_digits`.",
        ),
        (
            ["run", SPACE],
            f"there is no experiment `{SPACE}`; to use the search space of that name, run `fedsweep tune {SPACE}`.",
        ),
        (["show", "lora_rank"], f"there is no experiment or search space `lora_rank`; did you mean `{SPACE}`?"),
        (["show", "zzz"], f"there is no experiment or search space `zzz`{LISTED}"),
    ],
)
def test_the_error_for_an_unknown_name_suggests_similar_names(refused: Refused, words, sentence):
    assert refused(*words) == sentence


# The rules of single hyperparameters are in tests/golden/refusals.yaml; these are examples on the command line.
@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("lora.rnk=4", "`lora.rnk` is not a hyperparameter of this run; did you mean `lora.rank` or `lora` or "
         "`lora.rank_scaling`?"),
        ("rank=4", "`rank` is not a hyperparameter of this run; did you mean `lora.rank`?"),
        ("zzz.zzz=4", "`zzz.zzz` is not a hyperparameter of this run."),
        ("lora.rank=0", "`lora.rank` must be greater than 0, but it is 0."),
        ("lora.rank=65", "`lora.rank` must be at most 64, the smallest dimension of the layers that LoRA adapts in "
         "digits_vit, but it is 65."),
        ("lora.rank=four", '`lora.rank` must be an integer, but it is "four".'),
        ("lora.rank=", "`lora.rank` must be an integer, but it is null."),
        ("lora=4", "`lora` must be a mapping of names to values, but it is 4."),
        ("optimizer.lr=.nan", "`optimizer.lr` must be a finite number, but it is NaN."),
        ("optimizer.lr=1e999", "`optimizer.lr` must be a finite number, but it is Infinity."),
        ("federation.depths=[12, 6]", "`federation.depths` must have one depth for each of the 6 clients, or one for "
         "all clients, but it has 2: [12, 6]."),
        ("federation.depths=[13, 10, 8, 6, 4, 3]", "`federation.depths` must contain numbers from 1 to 12, the "
         "number of blocks of digits_vit, but one is 13."),
        ("federation.depths=[12, 10, 8, 6, 4, 0]", "`federation.depths` must contain numbers from 1 to 12, the "
         "number of blocks of digits_vit, but one is 0."),
        ("method=fedrs", "`method.name` must be one of fedra, all_large, all_small, inclusivefl, depthfl, fedbrick, "
         "fedms, ft, lfft, promptfl, fedag, fedclip, fedot, zero_shot, hetlora, flexlora, raflora, flora, fedex_lora, "
         "rolora, fedsa_lora, but it is `fedrs`; did you mean `fedra` or `fedms` or `fedbrick`?"),
    ],
)  # fmt: skip
def test_run_and_tune_reject_an_invalid_override(refused: Refused, override, sentence):
    assert refused("run", "fedra_digits", override) == f"experiment fedra_digits: {sentence}"
    if "lora.rank" not in override:
        sentence = sentence.replace(
            "`optimizer.lr`", "`fixed.optimizer.lr`"
        )  # a search space checks its own values first
        assert refused("tune", SPACE, override) == f"search space {SPACE}: {sentence}"


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["federation.ranks=[9]"],
         "`federation.ranks` must contain numbers from 1 to 8, `lora.rank`, but one is 9."),
        (["method=fedbrick", "partition.proxy_share=0.05", "federation.ranks=[4]"],
         "`federation.ranks` must be null, because `method` fedbrick needs adapters of one rank, but it is [4]."),
        (["federation.depths=null", "federation.capacity=[0.01]"],
         "`federation.capacity` must be at least 0.1024 for `federation.fit` depth, because a client with one block "
         "takes this share of the full model's bytes sent in a round, but one is 0.01."),
    ],
)  # fmt: skip
def test_run_and_tune_reject_invalid_ranks_and_budgets(refused: Refused, overrides, sentence):
    space = "ablations/learning_rate"
    assert refused("run", "fedra_digits", *overrides) == f"experiment fedra_digits: {sentence}"
    assert refused("tune", space, *overrides) == f"search space {space}: {sentence}"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["lora.rank"],
         "an override must have the form NAME=VALUE, as in `federation.rounds=5`, but it is `lora.rank`."),
        (["=4"], "an override must have the form NAME=VALUE, as in `federation.rounds=5`, but it is `=4`."),
        (["seed: 4"], "an override must have the form NAME=VALUE, as in `federation.rounds=5`, but it is `seed: 4`."),
        (["a=1", "a=2"], "the override `a` is given twice."),
        (["a=[4"], "the override `a=[4` is not valid YAML at line 1, column 3: expected ',' or ']', but got "
         "'<stream end>'."),
        ([f"seed={NINES}"], f"the override `seed={NINES[:52]}...` is not valid YAML at line 1, column 1: an "
         "integer of 5000 digits is too long."),
    ],
)  # fmt: skip
def test_a_malformed_override_is_rejected(refused: Refused, words, sentence):
    assert refused("run", "fedra_digits", *words) == sentence


@pytest.mark.parametrize("verb", [("tune", SPACE), ("show", "fedra_digits"), ("data", "partition", "fedra_digits")])
def test_every_command_rejects_a_malformed_override(refused: Refused, verb):
    assert refused(*verb, "a=1", "a=2") == "the override `a` is given twice."


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["lora.rank=4"], f"`lora.rank` is varied by search space {SPACE} and cannot be overridden."),
        (["seed=4"], f"`seed` cannot be overridden in search space {SPACE}; use --seeds instead."),
        (["--sweep", "x"], "`--sweep` selects the sweep to resume or join and needs `--resume` or `--join`."),
        (["--samples", "3"],
         f"--samples needs `search` tpe or random, but search space {SPACE} has `search` grid."),
        (["--subsets", "all"],
         f"search space {SPACE}: `subsets` all needs components in `ablate`, but there are none."),
        (["--scheduler", "ahsa"],
         f"search space {SPACE}: `scheduler.name` must be one of none, asha, asha_async, median, arms, pbt, but it is "
         "`ahsa`; did you mean `asha`?"),
        (["--seeds", "0,0"],
         f"search space {SPACE}: `seeds` must be distinct and not negative, but they are [0, 0]."),
        (["--seeds", "-1"], f"search space {SPACE}: `seeds` must be distinct and not negative, but they are [-1]."),
        (["--seeds", "a,b"], "`--seeds` must be a list of whole numbers such as 0,1,2, but it is `a,b`."),
        (["--seeds", "0,1.5"], "`--seeds` must be a list of whole numbers such as 0,1,2, but it is `0,1.5`."),
        (["--seeds", "true"], "`--seeds` must be a list of whole numbers such as 0,1,2, but it is `true`."),
        (["--seeds", "0]"],
         "`--seeds` is not valid YAML at line 1, column 4: expected '<document start>', but found ']'."),
        (["--cpus-per-trial", "0"],
         f"search space {SPACE}: `resources.cpus_per_trial` must be greater than or equal to 0.1, but it is 0.0."),
        (["--cpus-per-trial", "-1"],
         f"search space {SPACE}: `resources.cpus_per_trial` must be greater than or equal to 0.1, but it is -1.0."),
        (["--cpus-per-trial", "nan"],
         f"search space {SPACE}: `resources.cpus_per_trial` must be a finite number, but it is NaN."),
        (["--cpus-per-trial", "9999"], f"`cpus_per_trial` is 9999, but this machine has {available_cpus()} cores."),
        (["--gpus-per-trial", "0.5"],
         "`gpus_per_trial` is 0.5, but the number of GPUs available on this machine is 0; "
         "use `--gpus-per-trial 0` to run on the CPU."),
        (["--gpus-per-trial", "1.5"],
         "`gpus_per_trial` must be a fraction of one GPU or a whole number, but it is 1.5."),
        (["--gpus-per-trial", "-1"],
         f"search space {SPACE}: `resources.gpus_per_trial` must be greater than or equal to 0, or 'auto', "
         "but it is -1.0."),
        (["--gpus-per-trial", "atuo"],
         f"search space {SPACE}: `resources.gpus_per_trial` must be a number, or 'auto', but it is \"atuo\"."),
        (["--gpus-per-trial", "auto"],
         "`gpus_per_trial` is auto, but no GPU is available on this machine; "
         "use `--gpus-per-trial 0` to run on the CPU, or set FEDSWEEP_LOGICAL_GPUS=1 and FEDSWEEP_LOGICAL_GPU_GB to "
         "simulate a GPU."),
        (["--gpus-per-trial", "inf"],
         f"search space {SPACE}: `resources.gpus_per_trial` must be a finite number, but it is Infinity."),
    ],
)  # fmt: skip
def test_tune_rejects_an_invalid_option(refused: Refused, words, sentence):
    assert refused("tune", SPACE, *words) == sentence


def test_a_fraction_of_more_than_one_gpu_is_rejected_even_with_two_gpus(refused: Refused, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    sentence = "`gpus_per_trial` must be a fraction of one GPU or a whole number, but it is 1.5."
    assert refused("tune", SPACE, "--gpus-per-trial", "1.5") == sentence


def test_a_sampled_search_needs_one_seed_and_at_least_one_sample(refused: Refused):
    where = "search space tuning/fedra"
    assert refused("tune", "tuning/fedra", "--seeds", "0,1") == (
        f"{where}: `seeds` must be a single seed for `search` tpe, but they are [0, 1]."
    )
    assert refused("tune", "tuning/fedra", "--samples", "0") == (
        f"{where}: `search.samples` must be greater than 0, but it is 0."
    )


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (("  rank: 8", "  rnk: 8"), "`lora.rnk` is not a hyperparameter of this run; did you mean `lora.rank` or "
         "`lora` or `lora.rank_scaling`?"),
        (("federation:", "federaton:"),
         "`federaton` is not a hyperparameter of this run; did you mean `federation` or `federation.fit` or "
         "`federation.ranks`?"),
        (("missing_layers:", "mising_layers:"), "`method.mising_layers` is not a hyperparameter of this run; did you "
         "mean `method.missing_layers` or `method.name`?"),
        (("seed: 0", "lr: 0.1"), "`lr` is not a hyperparameter of this run; did you mean `lora`?"),
        (("name: digits_vit", "name: clip"), "`backbone.model` is missing."),
        (("  depths: [12, 10, 8, 6, 4, 3]", "  # "),
         "exactly one of `federation.depths` and `federation.capacity` must be given, but neither is."),
        (("  name: fedra ", "  title: fedra "), "`method` must have a `name`."),
        (("  rank: 8", "  rank: 0"), "`lora.rank` must be greater than 0, but it is 0."),
        (("  rank: 8", "  rank: 65"),
         "`lora.rank` must be at most 64, the smallest dimension of the layers that LoRA adapts in digits_vit, but "
         "it is 65."),
        (("[12, 10, 8, 6, 4, 3]", "[12, 10]"), "`federation.depths` must have one depth for each of the 6 clients, or "
         "one for all clients, but it has 2: [12, 10]."),
        (("[12, 10, 8, 6, 4, 3]", "[13, 10, 8, 6, 4, 3]"), "`federation.depths` must contain numbers from 1 to "
         "12, the number of blocks of digits_vit, but one is 13."),
    ],
)  # fmt: skip
def test_a_wrong_experiment_file_is_rejected(refused: Refused, change, sentence):
    write("experiments", "mine", EXPERIMENT, change)
    assert without_place(refused("run", "mine")) == sentence


# Unreadable files are tested in tests/common/test_yaml_values.py.
@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "experiments/mine.yaml:1:1: the file must contain a mapping of names to values, but it is empty."),
        (b"a: 1\nb: 2\na: 3\n", "experiments/mine.yaml:3:1: the key `a` occurs in line 1 and in line 3."),
    ],
)
def test_a_file_without_a_mapping_is_rejected(refused: Refused, content, sentence):
    write("experiments", "mine", content.decode())
    assert refused("run", "mine") == sentence


def test_a_search_space_with_a_repeated_key_is_rejected(refused: Refused):
    write("search_spaces", "mine", "a: 1\nb: 2\na: 3\n")
    assert refused("tune", "mine") == "search_spaces/mine.yaml:3:1: the key `a` occurs in line 1 and in line 3."


def test_a_file_that_refers_to_itself_is_rejected(refused: Refused):
    write("experiments", "mine", "a: &a {b: *a}\n")
    assert refused("run", "mine") == (
        "experiments/mine.yaml:1:1: the file contains a value that no hyperparameter can have: Circular reference "
        "detected."
    )


def test_folders_and_dangling_links_are_not_experiments(call: Call, refused: Refused):
    Path("experiments/folder.yaml").mkdir(parents=True)
    Path("experiments/nowhere.yaml").symlink_to("gone.yaml")
    for name in ("folder", "nowhere"):
        assert refused("run", name) == f"there is no experiment `{name}`{LISTED}"
    answer = call("list")
    assert answer.code == 0
    assert "folder" not in answer.out


RANKS = "{grid: [1, 4, 8, 16]}"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (("[1, 4, 8, 16]", "[1, 4, 8, 65]"), ", arm lora.rank=65: `lora.rank` must be at most 64, "
         "the smallest dimension of the layers that LoRA adapts in digits_vit, but it is 65."),
        (("[1, 4, 8, 16]", "[0, 4, 8]"), ", arm lora.rank=0: `lora.rank` must be greater than 0, but it is 0."),
        (("[1, 4, 8, 16]", "[1, 8, four]"),
         ', arm lora.rank=four: `lora.rank` must be an integer, but it is "four".'),
        (("[1, 4, 8, 16]", "[.nan, 8]"), ": `space.lora.rank.grid.0` must be a finite number, but it is NaN."),
        (("[1, 4, 8, 16]", "[8, 8]"), ": the values of `grid` must be distinct, but they are [8, 8]."),
        (("[1, 4, 8, 16]", "[]"), ": `space.lora.rank.grid` must have at least 1 item, but it "
         "is []."),
        ((f"\n  lora.rank: {RANKS}", " {}"), ": at least one of `space`, `named` and `ablate` must be given, but none "
         "is."),
        ((f"\n  lora.rank: {RANKS}", ""), ": `space` must be a mapping of names to values, but it is null."),
        ((RANKS, "[1, 8]"), ": each axis of `space` must name its kind; write `lora.rank: {grid: [1, 8]}` instead of "
         "`lora.rank: [1, 8]`."),
        ((RANKS, "8\n  optimizer.lr: [0.1, 0.03]"), ": each axis of `space` must name its kind; write "
         "`lora.rank: {grid: [8]}` instead of `lora.rank: 8`, and `optimizer.lr: {grid: [0.1, 0.03]}` instead "
         "of `optimizer.lr: [0.1, "
         "0.03]`."),
        ((RANKS, "{uniform: [1, 8]}"), ": `search` grid needs `grid` values for each axis, but `space.lora.rank` has "
         "`uniform`; to sample from ranges, write `search: {name: tpe, samples: 24}`."),
        ((RANKS, "{grd: [1, 8]}"), ": `space.lora.rank.grd` is not an entry of a search space; did you mean "
         "`space.lora.rank.grid` or `space.lora.rank` or `space.lora.rank.integer`?"),
        (("  lora.rank: {grid", "  seed: {grid"),
         ": `seed` must not be a hyperparameter of the search space; list the seeds in `seeds`."),
        (("  lora.scaling: 1.0", "  lora.scale: 1.0"), ": `lora.scale` is not a hyperparameter of this run; did you "
         "mean `lora.scaling` or `lora.alpha` or `lora.rank_scaling`?"),
        (("  lora.scaling: 1.0", "  lora.rank: 8"), ": `lora.rank` is varied by the search space and cannot also "
         "be in `fixed`."),
        (("experiment: fedra_digits", "experiment: fedra_digit"),
         ": there is no experiment `fedra_digit`; did you mean `fedra_digits` or `fedag_digits` or `fedms_digits`?"),
        (("experiment: fedra_digits", "experimnt: fedra_digits"),
         ": `experimnt` is not an entry of a search space; did you mean `experiment`?"),
        (("experiment: fedra_digits", ""), ": `experiment` is missing."),
        (("accuracy/mean", "accuracy/avg"), ": `objective.metric` accuracy/avg is not reported by this run; did you "
         "mean `accuracy/mean` or `accuracy/domain/inverted` or `accuracy/worst_domain`?"),
        (("accuracy/mean", "f1"), ": `objective.metric` f1 is not reported by this run; it reports accuracy/mean, "
         "accuracy/worst_domain, accuracy/domain_spread, accuracy/domain/plain, accuracy/domain/rotated, "
         "accuracy/domain/inverted, accuracy/domain/noisy, accuracy/domain/thick, accuracy/domain/textured, loss/test, "
         "evaluation/images, "
         "loss/train, allocation/gamma, allocation/gamma_star, allocation/idle, lora/residual, lora/relative_norm, "
         "bytes/down, bytes/up, parameters/held, parameters/trained."),
        (("mode: max", "mode: best"), ": `objective.mode` must be 'max' or 'min', but it is \"best\"."),
        (("{lora.rank: 8}", "{lora.rank: 7}"), ": `baseline` must be one of the arms, but {'lora.rank': 7} is not; "
         "write "
         "`baseline: {lora.rank: 1}` or `baseline: {lora.rank: 4}` or `baseline: {lora.rank: 8}` or `baseline: "
         "{lora.rank: 16}`."),
        (("[0, 1, 2]", "[0, 0]"), ": `seeds` must be distinct and not negative, but they are [0, 0]."),
        (("[0, 1, 2]", "[a]"), ': `seeds.0` must be an integer, but it is "a".'),
        (
            ("[0, 1, 2]", "3"),
            ": `seeds` must be a list, `{list: [0, 1, 2], ...}` or `{until: decided, ...}`, but it is 3.",
        ),
        (("name: grid", "name: gird"),
         ": `search.name` must be one of grid, tpe, random, but it is `gird`; did you mean `grid`?"),
        (("{name: none}", "{name: hyperband}"),
         ": `scheduler.name` must be one of none, asha, asha_async, median, arms, pbt, but it is `hyperband`."),
        (("cpus_per_trial: 1", "cpus_per_trial: 0"),
         ": `resources.cpus_per_trial` must be greater than or equal to 0.1, but it is 0."),
    ],
)  # fmt: skip
def test_a_wrong_search_space_file_is_rejected(refused: Refused, change, sentence):
    write("search_spaces", "mine", GRID, change)
    assert without_place(refused("tune", "mine")) == sentence.lstrip(":, ")


def test_all_mistakes_of_a_search_space_file_are_listed_at_once(call: Call):
    text = "experimnt: fedra_digits\nspace:\n  lora.rank: {grd: [2, 8]}\nseeds: [a, 1]\nsearch: gird\n"
    write("search_spaces", "mine", text)
    answer = call("tune", "mine")
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.splitlines() == [
        "fedsweep: search space mine has 4 mistakes:",
        "- search_spaces/mine.yaml:3:15: `space.lora.rank.grd` is not an entry of a search space; did you mean "
        "`space.lora.rank.grid` or `space.lora.rank` or `space.lora.rank.integer`?",
        '- search_spaces/mine.yaml:4:9: `seeds.0` must be an integer, but it is "a".',
        "- search_spaces/mine.yaml:5:9: `search.name` must be one of grid, tpe, random, but it is `gird`; did you mean "
        "`grid`?",
        "- search_spaces/mine.yaml:1:1: `experimnt` is not an entry of a search space; did you mean `experiment`?",
    ]


def test_a_search_space_without_search_scheduler_and_resources_is_the_same_sweep_on_a_machine_without_a_gpu(
    call: Call, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    short = GRID[: GRID.index("search: {name: grid}")]
    write("search_spaces", "short", short)
    write("search_spaces", "whole", GRID)
    left_out, whole = (read_space(name, {}, {}).space for name in ("short", "whole"))
    assert (left_out.search.name, left_out.scheduler.name) == ("grid", "none")
    assert left_out.resources.gpus_per_trial is None
    assert left_out.model_copy(update={"resources": decided(left_out.resources)}) == whole


def test_a_misspelt_hyperparameter_of_the_space_is_rejected(refused: Refused):
    write("search_spaces", "mine", GRID, ("  lora.rank: {grid", "  lora.rnk: {grid"), ("baseline: {lora.rank: 8}", ""))
    assert without_place(refused("tune", "mine")) == (
        "`lora.rnk` is not a hyperparameter of this run; did you mean `lora.rank` or `lora.rank_scaling` or "
        "`lora.scaling`?"
    )


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (("[0.003, 0.5]", "[0.5, 0.003]"), ": the bounds of `loguniform` must be in ascending order, but they are "
         "[0.5, 0.003]."),
        (("[0.003, 0.5]", "[0, 0.5]"), ": the bounds of `loguniform` must be positive, but they are [0.0, 0.5]."),
        (("[0.003, 0.5]", "[0.1, .inf]"),
         ": `space.optimizer.lr.loguniform.1` must be a finite number, but it is Infinity."),
        (("{uniform: [0.0, 0.5]}", "{uniform: [0.0, 1.5]}"),
         ", arm lora.dropout=1.5: `lora.dropout` must be less than 1, but it is 1.5."),
        (("{choice: [1, 2, 4, 8, 16]}", "{choice: [1, 65]}"), ", arm lora.rank=65: `lora.rank` must be at most 64, the "
         "smallest dimension of the layers that LoRA adapts in digits_vit, but it is 65."),
        (("{choice: [1, 2, 4, 8, 16]}", "{integer: [0, 8]}"),
         ", arm lora.rank=0: `lora.rank` must be greater than 0, but it is 0."),
        (("{choice: [1, 2, 4, 8, 16]}", "{grid: [1, 8]}"), ": `search` tpe needs a range or a `choice` for each "
         "axis, but `space.lora.rank` has `grid`."),
        (("seeds: [0]", "baseline: {lora.rank: 8}\nseeds: [0]"),
         ": `baseline` needs `search` grid, but it is tpe."),
        (("grace_rounds: 3", "grace_rounds: 0"), ": `scheduler.grace_rounds` must be greater than 0, but it is 0."),
        (("reduction_factor: 3", "reduction_factor: 1"),
         ": `scheduler.reduction_factor` must be greater than 1, but it is 1."),
    ],
)  # fmt: skip
def test_a_wrong_sampled_search_is_rejected(refused: Refused, change, sentence):
    write("search_spaces", "mine", SAMPLED, change)
    assert without_place(refused("tune", "mine")) == sentence.lstrip(":, ")


PRINTED = """reference:
  source: Table 1
  arms:
    - arm: {method: all_large}
      values: {accuracy/mean: 77.17, accuracy/domain/plain: 85}
    - arm: {method: fedra}
      values: {loss/test: 1.5}
"""


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (("  source: Table 1\n", ""), "`reference.source` is missing."),
        (("Table 1", "' '"), "`reference.source` must name the paper and its table, but it is ` `."),
        (("source: Table", "sauce: Table"), "`reference.sauce` is not an entry of a search space; did you mean "
         "`reference.source`"),
        (("method: all_large", "method: all_medium"),
         "`reference.arms.0.arm` must be one of the arms, but {'method': 'all_medium'} is not; write `arm: "),
        (("{method: fedra}", "{method: {name: fedra}}"),
         "`reference.arms.1.arm` must be one of the arms, but {'method': {'name': 'fedra'}} is not; write "),
        (("method: fedra", "method: all_large"),
         "`reference` must list each arm once, but it lists method=all_large twice."),
        (("{loss/test: 1.5}", "{}"), "`reference.arms.1.values` must have at least 1 item"),
        (("loss/test: 1.5", "loss/tset: 1.5"),
         "`reference` loss/tset is not reported by this run; did you mean `loss/test`"),
        (("accuracy/domain/plain: 85", "accuracy/domain/plan: 85"),
         "`reference` accuracy/domain/plan is not reported by this run; did you mean `accuracy/domain/plain`"),
        (("77.17", "107.17"), "`reference` must give accuracies in percent, from 0 to 100, but `accuracy/mean` of "
         "method=all_large is 107.17."),
        (("77.17", "-0.5"), "`reference` must give accuracies in percent, from 0 to 100, but `accuracy/mean` of "
         "method=all_large is -0.5."),
        (("77.17", "77,17"), "`reference.arms.0.values.17` must be a number, but it is null."),
        (("77.17", "77.17 (2)"),
         '`reference.arms.0.values.accuracy/mean` must be a number, but it is "77.17 (2)".'),
        (("77.17", ".nan"), "`reference.arms.0.values.accuracy/mean` must be a finite number, but it is NaN."),
    ],
)  # fmt: skip
def test_wrong_values_of_a_paper_are_rejected(refused: Refused, change, sentence):
    write("search_spaces", "mine", METHODS + PRINTED.replace(*change))
    assert PRINTED.count(change[0]) == 1
    assert without_place(refused("tune", "mine")).startswith(sentence)


def test_a_sampled_search_has_no_arms_for_values_of_a_paper(refused: Refused):
    write("search_spaces", "mine", SAMPLED + PRINTED)
    assert without_place(refused("tune", "mine")) == ("`reference` needs `search` grid, but it is tpe.")


@pytest.mark.parametrize("override", ["lora.rank=4", "lora.dropout=0.5"])
def test_a_field_of_a_record_that_the_space_varies_cannot_be_overridden(refused: Refused, override):
    whole = "experiment: fedra_digits\nsearch: {name: grid}\nscheduler: {name: none}\nspace:\n  lora: {grid: [%s]}\n"
    write("search_spaces", "mine", whole % "{rank: 4, scaling: 1.0}, {rank: 8, scaling: 1.0}")
    name = override.split("=")[0]
    assert refused("tune", "mine", override) == (f"`{name}` is varied by search space mine and cannot be overridden.")


RUN, TUNE = ("run", "fedra_digits"), ("tune", SPACE)


@pytest.mark.parametrize(
    ("words", "fault", "reason"),
    [
        (RUN, "a file", "File exists"),
        (TUNE, "a file", "File exists"),
        (RUN, "below a file", "Not a directory"),
        (RUN, "no database", "file is not a database (mlflow.db)"),
        (TUNE, "a folder", "unable to open database file (mlflow.db)"),
    ],
)
def test_a_store_that_cannot_be_written_is_rejected(refused: Refused, tmp_path, words, fault, reason):
    # Errors that also occur for root, who can ignore permissions.
    store = tmp_path / "store"
    match fault:
        case "a file":
            store.write_text("")
        case "below a file":
            store.write_text("")
            store = store / "inner"
        case "no database":
            store.mkdir()
            (store / "mlflow.db").write_text("not a database, and longer than the header of one\n" * 40)
        case "a folder":
            (store / "mlflow.db").mkdir(parents=True)
    assert refused(*words, "--store", str(store)) == f"the results folder {store} cannot be written: {reason}."


@pytest.mark.parametrize("option", ["--dry-run", "--detach"])
def test_a_folder_that_cannot_be_created_is_an_error_before_a_sweep_runs(refused: Refused, option):
    sentence = "the results folder /dev/null/x cannot be written: Not a directory."
    assert refused("tune", SPACE, option, "--store", "/dev/null/x") == sentence


@pytest.mark.parametrize("words", [(), ("--dry-run",)])
def test_a_missing_sweep_cannot_be_resumed(refused: Refused, tmp_path, words):
    sentence = refused("tune", SPACE, "--resume", *words)
    assert sentence == f"there is no sweep of {SPACE} in {tmp_path / 'mlruns'}."
    assert not (tmp_path / "mlruns").exists()


def start(store: Store, *changes: str) -> Path:
    """Write the files that a sweep of the search space `mine` has before Ray starts, and return the sweep's folder."""
    return new_sweep(Plan.read("mine", {}, {}), store).folder


def test_a_sweep_is_resumed_by_its_exact_id_only(refused: Refused, tmp_path):
    write("search_spaces", "mine", GRID)
    folder = start(Store(tmp_path / "mlruns"))
    wrong = folder.name[:-1] + "x"
    assert refused("tune", "mine", "--resume", "--sweep", wrong) == (
        f"there is no sweep `{wrong}` of mine in {tmp_path / 'mlruns'}; did you mean `{folder.name}`?"
    )
    assert refused("tune", SPACE, "--resume") == f"there is no sweep of {SPACE} in {tmp_path / 'mlruns'}."


@pytest.mark.parametrize("what", ["search space", "experiment", "override", "seeds"])
def test_a_sweep_whose_definition_has_changed_is_not_resumed(refused: Refused, tmp_path, what):
    write("experiments", "base", EXPERIMENT)
    grid = GRID.replace("experiment: fedra_digits", "experiment: base")
    write("search_spaces", "mine", grid)
    folder = start(Store(tmp_path / "mlruns"))
    words: tuple[str, ...] = ()
    match what:
        case "search space":
            write("search_spaces", "mine", grid, ("[1, 4, 8, 16]", "[1, 8]"))
        case "experiment":
            write("experiments", "base", EXPERIMENT, ("  momentum: 0.9", "  momentum: 0.8"))
        case "override":
            words = ("federation.rounds=5",)
        case "seeds":
            words = ("--seeds", "0,1")
    assert refused("tune", "mine", "--resume", *words) == (
        f"sweep {folder.name} of mine cannot be resumed because its YAML files or overrides have changed since the "
        "sweep was started; undo the change, or start a new sweep."
    )


def test_a_sweep_of_another_engine_is_not_resumed(refused: Refused, tmp_path, monkeypatch):
    write("search_spaces", "mine", GRID)
    folder = start(Store(tmp_path / "mlruns"))
    monkeypatch.setattr(plan_module, "engine_digest", lambda: "another")
    assert refused("tune", "mine", "--resume") == (
        f"sweep {folder.name} of mine cannot be resumed because fedsweep's code has changed since the sweep was "
        "started; undo the change, or start a new sweep."
    )


def test_comments_and_resources_may_change_before_a_resume(call: Call, tmp_path):
    write("search_spaces", "mine", GRID)
    store = Store(tmp_path / "mlruns")
    folder = start(store)
    write("search_spaces", "mine", "# another remark\n" + GRID, ("cpus_per_trial: 1", "cpus_per_trial: 2"))
    assert resumed_sweep(Plan.read("mine", {}, {}), store, store.find("mine")).folder == folder


@pytest.mark.parametrize("words", [(), ("--sweep", "x")])
def test_a_report_needs_a_sweep(refused: Refused, tmp_path, words):
    sweep = "`x` " if words else ""
    assert refused("report", SPACE, *words) == f"there is no sweep {sweep}of {SPACE} in {tmp_path / 'mlruns'}."


def test_the_error_of_report_suggests_existing_sweeps(refused: Refused, tmp_path):
    write("search_spaces", "mine", GRID)
    start(Store(tmp_path / "mlruns"))
    assert refused("report", "mined") == f"there is no sweep of mined in {tmp_path / 'mlruns'}; did you mean `mine`?"


def test_ui_of_a_sweep_that_has_only_begun_says_when_the_database_is_created(refused: Refused, tmp_path):
    write("search_spaces", "mine", GRID)
    start(store := Store(tmp_path / "mlruns"))
    assert refused("ui") == (
        f"MLflow has no database in {store.root} yet. A sweep creates it when its first trial starts, and "
        "`fedsweep ui --deliver` creates it from finished sweeps and runs."
    )


def test_ui_needs_recorded_results_and_a_free_port(refused: Refused, tmp_path):
    store = tmp_path / "mlruns"
    nothing = f"nothing is recorded in {store} yet; start with `fedsweep tune {SPACE}`."
    assert refused("ui") == nothing
    store.mkdir()
    assert refused("ui") == nothing
    assert refused("ui", SPACE) == f"there is no sweep of {SPACE} in {store}."
    assert refused("ui", "--sweep", "s1") == (
        "`--sweep` needs a search space, as in `fedsweep ui SEARCH_SPACE --sweep ID`."
    )
    (store / "mlflow.db").touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert refused("ui", "--port", str(port)) == (
            f"port {port} is already in use on this machine; try `--port {port % 65535 + 1}`."
        )


@pytest.mark.parametrize(
    ("words", "start", "end"),
    [
        (["tunee"], "no such command 'tunee'", "'tune'?"),
        (["tune"], "missing argument 'SEARCH_SPACE'", "see `fedsweep tune --help`."),
        (
            ["run", "fedra_digits", "--seed", "1"],
            "no such option: --seed",
            "see `fedsweep run --help`.",
        ),
        (["ui", "--port", "70000"], "invalid value for '--port'", "see `fedsweep ui --help`."),
        (["tune", SPACE, "--samples", "x"], "invalid value for '--samples'", "see `fedsweep tune --help`."),
        (
            ["tune", SPACE, "--cpus-per-trial", "x"],
            "invalid value for '--cpus-per-trial'",
            "see `fedsweep tune --help`.",
        ),
    ],
)
def test_a_wrong_command_line_is_one_error_message(refused: Refused, words, start, end):
    # The rest of the sentence comes from the command-line library.
    sentence = refused(*words)
    assert sentence.startswith(start)
    assert sentence.endswith(end)


@pytest.mark.parametrize(
    ("device", "sentence"),
    [
        ("gpu", "`--device` must be cpu or cuda, but it is `gpu`."),
        ("cuda", "`--device` is cuda, but torch finds no GPU."),
    ],
)
def test_an_unavailable_device_is_rejected(refused: Refused, device, sentence):
    assert refused("run", "fedra_digits", "--device", device) == sentence


def test_the_error_of_a_diverged_run_suggests_a_remedy(call: Call, monkeypatch):
    def diverge(*arguments: object) -> None:
        raise DivergenceError("the loss of client plain became nan in round 1; try a smaller `optimizer.lr`")

    monkeypatch.setattr(recorded_run, "record_run", diverge)
    answer = call("run", "fedra_digits", "--json")
    assert answer.code == 2
    assert answer.err == ("fedsweep: the loss of client plain became nan in round 1; try a smaller `optimizer.lr`.\n")


@pytest.mark.slow
def test_a_rejected_command_imports_neither_ray_nor_torch(tmp_path):
    (tmp_path / "mlruns").write_text("")
    code = (
        "import sys; from fedsweep.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: print(end.code, *sorted({'ray', 'mlflow', 'optuna', 'torch'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code, "tune", SPACE]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout == "2\n"
    reason = f"the results folder {tmp_path / 'mlruns'} cannot be written: File exists."
    assert done.stderr == f"fedsweep: {reason}\n"


def test_the_call_fixture_fails_a_command_that_starts(call: Call):
    with pytest.raises(AssertionError, match="not rejected"):
        call("tune", SPACE)
    with pytest.raises(AssertionError, match="not rejected"):
        call("run", "fedra_digits")
    with pytest.raises(UserError):
        Plan.read("zzz", {}, {})


def test_the_objective_must_be_a_metric_of_every_arm(refused: Refused):
    text = (Path(__file__).parents[2] / "search_spaces/ablations/brick_over_depth_methods.yaml").read_text()
    write("search_spaces", "mine", text, ("accuracy/mean", "structural_bias/brick_error"))
    assert without_place(refused("tune", "mine")) == (
        "`objective.metric` structural_bias/brick_error is not reported by the arm "
        "method.over=fedra, method.brick=false."
    )


@pytest.mark.parametrize("words", [["list"], ["status"], ["tune", SPACE, "--dry-run"], ["list", "--format", "json"]])
def test_a_deleted_working_directory_is_one_sentence(call: Call, tmp_path, monkeypatch, words):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    answer = call(*words)
    assert answer.code == 2
    assert answer.err == "fedsweep: the working directory no longer exists; change to another folder.\n"
    assert call("--version").code == call("tune", "--help").code == 0
