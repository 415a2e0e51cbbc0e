"""The selection of the run or trial to export by name, and the errors for names without a trial."""

from pathlib import Path

import pytest

from fedsweep.common.errors import UserError
from fedsweep.export.which_trial import find_trial
from fedsweep.results import Outcome, Store, SweepStore, TrialPlan
from tests.export.helpers import planned
from tests.tracking.helpers import MANIFEST


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Return a results folder with two sweeps of a search space and two runs of an experiment.

    The newer sweep has a trial of each outcome.
    """
    home = Store(tmp_path_factory.mktemp("mlruns"))
    older, newer = (home.sweep("ablations/rank", one) for one in ("20260101-000000-old1", "20260102-000000-new1"))
    for sweep, mode in ((older, "max"), (newer, "max")):
        about = {"id": sweep.folder.name, "name": "ablations/rank", "created": sweep.folder.name, "mode": mode}
        sweep.create(MANIFEST.model_copy(update=about), {})
    fill(older, newer)
    lowest = home.sweep("lowest", "s1")
    lowest.create(MANIFEST.model_copy(update={"id": "s1", "name": "lowest", "mode": "min"}), {})
    planned(lowest, 7, {"lora.rank": 4}, 0, 0.4, "finished")
    planned(lowest, 8, {"lora.rank": 8}, 0, 0.3, "finished")
    for stamp, end in (("20260101-000000-aaaa", True), ("20260102-000000-bbbb", True), ("20260103-000000-cccc", False)):
        name = "fedra_digits" if end else "stopped"
        run = home.run(name, stamp)
        run.plan(TrialPlan(key=stamp, number=0, arm={}, seed=0, config={}))
        write_rounds(home, name, stamp)
        if end:
            run.end(Outcome(outcome="finished", round=2))
    return home


def write_rounds(home: Store, name: str, stamp: str) -> None:
    source = home.sweep("lowest", "s1").trial("c00000000000007").checkpoint
    home.run(name, stamp).checkpoint.write_bytes(source.read_bytes())


def fill(older: SweepStore, newer: SweepStore) -> None:
    planned(older, 0, {"lora.rank": 4}, 0, 0.4, "finished")
    planned(older, 1, {"lora.rank": 4}, 1, 0.45, "finished")
    planned(newer, 0, {"lora.rank": 4}, 0, 0.1, "finished")
    planned(newer, 2, {"lora.rank": 8}, 0, 0.3, "finished")
    planned(newer, 3, {"lora.rank": 8}, 1, 0.3, "finished")
    planned(newer, 4, {"lora.rank": 16}, 0, 0.5, "pruned")
    planned(newer, 5, {"lora.rank": 16}, 1, None, None)


BY_MEAN = "finished trials by accuracy/mean"


@pytest.mark.parametrize(
    ("text", "key", "why"),
    [
        ("ablations/rank", "c00000000000002", f"the best of 3 {BY_MEAN} (mean of its arm over 2 seeds: 0.6000)"),
        ("ablations/rank@20260101-000000-old1", "ab00000000000001",
         f"the best of 2 {BY_MEAN} (mean of its arm over 2 seeds: 0.8500)"),
        ("ablations/rank:lora.rank=4", "ab00000000000000", ""),
        ("ablations/rank:lora.rank=8", "c00000000000002",
         f"the best of 2 {BY_MEAN} (mean of its arm over 2 seeds: 0.6000)"),
        ("ablations/rank:lora.rank=8,seed=1", "c00000000000003", ""),
        ("ablations/rank:seed=1", "c00000000000003", ""),
        ("ablations/rank@20260101-000000-old1:seed=0", "ab00000000000000", ""),
        ("20260101-000000-old1:seed=0", "ab00000000000000", ""),
        ("ablations/rank:rank 8 · seed 1", "c00000000000003", ""),
        ("ablations/rank:lora.rank=8 · seed 1", "c00000000000003", ""),
        ("ablations/rank:lora.rank=8.0, seed=1", "c00000000000003", ""),
        ("lowest", "c00000000000008", f"the best of 2 {BY_MEAN}"),
        ("c00000000000003", "c00000000000003", ""),
        ("ab00000000000001", "ab00000000000001", ""),  # of the older sweep
        ("fedra_digits", "20260102-000000-bbbb", "the newest of 2 runs"),
        ("fedra_digits@20260101-000000-aaaa", "20260101-000000-aaaa", ""),
    ],
)  # fmt: skip
def test_a_name_selects_a_trial(store: Store, text: str, key: str, why: str):
    found = find_trial(store, text)
    assert (found.record.plan.key, found.why) == (key, why)
    assert found.by_test == why.startswith("the best")
    assert found.trial.checkpoint.exists()


@pytest.mark.parametrize(
    ("metric", "by_test"), [("accuracy/mean", True), ("validation/accuracy/mean", False), ("loss/train", False)]
)
def test_only_a_choice_by_test_images_makes_the_results_optimistic(tmp_path: Path, metric: str, by_test: bool):
    home = Store(tmp_path / "mlruns")
    sweep = home.sweep("search", "s1")
    sweep.create(MANIFEST.model_copy(update={"id": "s1", "name": "search", "metric": metric}), {})
    for number, value in enumerate((0.3, 0.4)):
        planned(sweep, number, {"lora.rank": number}, 0, value, "finished")
    found = find_trial(home, "search")
    assert found.why.startswith("the best of 2 finished trials by ")
    assert found.by_test == by_test


@pytest.mark.parametrize(("scheduler", "by_test"), [("none", False), ("asha", True)])
def test_pruning_by_test_images_makes_the_results_of_the_only_trial_optimistic(
    tmp_path: Path, scheduler: str, by_test: bool
):
    home = Store(tmp_path / "mlruns")
    sweep = home.sweep("search", "s1")
    about = {"id": "s1", "name": "search", "metric": "accuracy/mean", "scheduler": scheduler, "search": "grid"}
    sweep.create(MANIFEST.model_copy(update=about), {})
    planned(sweep, 0, {"lora.rank": 4}, 0, 0.4, "finished")
    planned(sweep, 1, {"lora.rank": 8}, 0, 0.3, "pruned")
    assert find_trial(home, "search").by_test == by_test


def test_a_key_in_several_sweeps_selects_the_newest_sweep(store: Store):
    found = find_trial(store, "ab00000000000000")
    assert found.sweep is not None
    assert found.sweep.folder.name == "20260102-000000-new1"


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("ablations/rank", "c00000000000004"),
        ("ablations/rank:lora.rank=16,seed=0", "c00000000000004"),
        ("stopped", "20260103-000000-cccc"),
    ],
)
def test_unfinished_trials_are_selected_on_request(store: Store, text: str, key: str):
    assert find_trial(store, text, unfinished=True).record.plan.key == key


WHERE = "ablations/rank@20260102-000000-new1"
ARMS = "its arms are lora.rank=4; lora.rank=8; lora.rank=16, and its seeds are 0, 1."
STANDS = "`--unfinished` exports its state after round 2."


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("ablations/rnk", "there is no trial `ablations/rnk` in {root}; did you mean `ablations/rank`?"),
        ("zzz", "there is no trial `zzz` in {root}; it must be a trial's key, SPACE[@SWEEP][:ARM] such as "
         "`ablations/lora_rank:lora.rank=4,seed=0`, or an experiment that was run."),
        ("", "there is no trial `` in {root}; it must be a trial's key, SPACE[@SWEEP][:ARM] such as "
         "`ablations/lora_rank:lora.rank=4,seed=0`, or an experiment that was run."),
        ("ablations/rank@20260102-000000-new", "there is no sweep `20260102-000000-new` of ablations/rank in {root}; "
         "did you mean `20260102-000000-new1` or `20260101-000000-old1`?"),
        ("fedra_digits@x", "there is no run `x` of fedra_digits in {root}."),
        ("c0", "`c0` must be the beginning of one trial's key, but 6 keys begin with it: c00000000000002, "
         "c00000000000003, c00000000000004, "
         "c00000000000005, c00000000000007, c00000000000008."),
        ("ablations/rank:lora.rank=5", f"no trial of {WHERE} has the arm `lora.rank=5`; {ARMS}"),
        ("ablations/rank:rank", f"no trial of {WHERE} has the arm `rank`; {ARMS}"),
        ("ablations/rank:", f"no trial of {WHERE} has the arm ``; {ARMS}"),
        ("ablations/rank:lora.rank=[4", f"no trial of {WHERE} has the arm `lora.rank=[4`; {ARMS}"),
        ("c00000000000004", f"trial c00000000000004 of {WHERE} has the outcome `pruned`; {STANDS}"),
        ("ablations/rank:lora.rank=16", f"none of the 2 trials of {WHERE} has finished; `--unfinished` also accepts "
         "other trials."),
        ("c00000000000005", f"trial c00000000000005 of {WHERE} has not ended and has no recorded round."),
        ("stopped", f"the run stopped@20260103-000000-cccc has not ended; {STANDS}"),
    ],
)  # fmt: skip
def test_a_name_without_a_trial_is_an_error_in_one_sentence(store: Store, text: str, sentence: str):
    with pytest.raises(UserError) as refusal:
        find_trial(store, text)
    assert str(refusal.value) == sentence.format(root=store.root)


def test_a_trial_without_a_round_has_nothing_to_export(store: Store):
    with pytest.raises(UserError, match="has no recorded round yet, so there is nothing to export"):
        find_trial(store, "ablations/rank:lora.rank=16,seed=1", unfinished=True)


def test_an_empty_results_folder_has_no_trial(tmp_path: Path):
    with pytest.raises(UserError, match="there is no trial `fedra_digits` in "):
        find_trial(Store(tmp_path), "fedra_digits")
