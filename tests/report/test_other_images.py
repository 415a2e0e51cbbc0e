"""The interval over seeds and images, compared with textbook formulas, and the places of a report that show it."""

import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats

from fedsweep.report import write_report
from fedsweep.report.arm_statistics import summarise
from fedsweep.report.compare_sweeps import Pairing, Side
from fedsweep.report.declared_comparisons import TITLE
from fedsweep.report.formats import data_frame
from fedsweep.report.formats.latex import latex
from fedsweep.report.holm_corrected_tests import mirrored
from fedsweep.report.intervals_and_power import negated, t_interval
from fedsweep.report.other_images import crossed
from fedsweep.report.sequential_tests import Verdict
from fedsweep.report.table import AblationTable
from fedsweep.results import Outcome, TrialPlan, TrialRecord
from fedsweep.results.declared_comparisons import DeclaredComparison
from fedsweep.results.history import RoundRecord
from fedsweep.results.records import RIGHT
from fedsweep.results.right_images import RightImages, packed_bits
from fedsweep.results.seeds import UntilDecided
from tests.report.helpers import accepts_columns, printed, tabulate

COLUMN, BY_DOMAIN = "95% seeds and images", "Differences from the baseline by domain"
BALANCED = st.tuples(st.integers(2, 5), st.integers(2, 8), st.integers(1, 3)).flatmap(
    lambda shape: arrays(np.int8, shape, elements=st.integers(-1, 1))
)
"""Differences by seed, group and domain: every group has one image in every domain."""


def crossed_interval(differences: np.ndarray, sizes: list[int], groups: np.ndarray) -> tuple[float, float] | None:
    """Return the interval over seeds and images of a fixed number of seeds."""
    found = crossed(differences, sizes, groups)
    return None if found is None else found.interval()


def by_hand(cells: list[list[float]]) -> tuple[float, float, float]:
    """Return the mean and the mean squares of seeds, and of groups beyond the interaction, by sums over all cells."""
    seeds, groups = len(cells), len(cells[0])
    mean = sum(map(sum, cells)) / (seeds * groups)
    rows = [sum(row) / groups for row in cells]
    columns = [sum(row[group] for row in cells) / seeds for group in range(groups)]
    of_seeds = sum(groups * (row - mean) ** 2 for row in rows) / (seeds - 1)
    of_groups = sum(seeds * (column - mean) ** 2 for column in columns) / (groups - 1)
    rest = sum(
        (cells[seed][group] - rows[seed] - columns[group] + mean) ** 2
        for seed in range(seeds)
        for group in range(groups)
    ) / ((seeds - 1) * (groups - 1))
    return mean, of_seeds, max(of_groups - rest, 0.0)


def ends(interval: tuple[float, float] | None) -> Any:
    """Return the ends of an interval for a comparison up to rounding."""
    return None if interval is None else pytest.approx(interval, abs=1e-9)


@given(BALANCED)
def test_the_interval_is_that_of_the_analysis_of_variance(given_cells: np.ndarray) -> None:
    seeds, groups, domains = given_cells.shape
    differences = given_cells.transpose(0, 2, 1).reshape(seeds, -1)
    found = crossed_interval(differences, [groups] * domains, np.tile(np.arange(groups), domains))
    # With a group in every domain, the cell of a group is its mean over domains, up to a constant of each domain.
    mean, of_seeds, more = by_hand(given_cells.mean(axis=2).tolist())
    if of_seeds < 1e-20:
        assert found is None
        return
    size = seeds * groups
    squares = stats.t.ppf(0.975, seeds - 1) ** 2 * of_seeds + stats.t.ppf(0.975, groups - 1) ** 2 * more
    assert found == ends((mean - (squares / size) ** 0.5, mean + (squares / size) ** 0.5))


@given(BALANCED, st.randoms(use_true_random=False))
def test_the_interval_contains_that_of_seeds_and_depends_on_no_order(cells: np.ndarray, random: Any) -> None:
    seeds, groups, domains = cells.shape
    differences = cells.transpose(0, 2, 1).reshape(seeds, -1)
    sizes, numbers = [groups] * domains, np.tile(np.arange(groups), domains)
    found = crossed_interval(differences, sizes, numbers)
    of_seeds = t_interval(differences.mean(axis=1).tolist())
    if found is None:
        assert np.ptp(differences.mean(axis=1)) < 1e-9
        return
    assert of_seeds is not None
    assert found[0] <= of_seeds[0] + 1e-9
    assert found[1] >= of_seeds[1] - 1e-9
    rows, names, places = (random.sample(range(count), count) for count in (seeds, groups, domains))
    moved = cells[rows][:, :, places].transpose(0, 2, 1).reshape(seeds, -1)
    assert crossed_interval(moved, sizes, np.array(names)[numbers]) == ends(found)
    assert crossed_interval(-differences, sizes, numbers) == ends((-found[1], -found[0]))


def test_domains_of_unequal_size_count_the_same_and_add_no_variance() -> None:
    """Each domain has a constant difference of its own on all images, so only the seeds vary."""
    by_seed = np.array([[0, 1], [0, 1], [1, 1]], np.int8)
    differences = np.repeat(by_seed, [4, 16], axis=1)
    found = crossed_interval(differences, [4, 16], np.arange(20))
    assert found is not None
    assert found == ends(t_interval([0.5, 0.5, 1.0]))


def test_copies_of_an_image_tell_no_more_than_the_image() -> None:
    rng = np.random.default_rng(0)
    right = rng.integers(-1, 2, (4, 30)).astype(np.int8)
    alone = crossed_interval(right, [30], np.arange(30))
    copied = np.repeat(right, 5, axis=1)
    assert crossed_interval(copied, [150], np.repeat(np.arange(30), 5)) == ends(alone)
    (low, high), (least, most) = alone or (0, 0), crossed_interval(copied, [150], np.arange(150)) or (0, 0)
    assert most - least < high - low


@pytest.mark.parametrize(
    ("differences", "sizes", "groups"),
    [
        (np.ones((1, 4), np.int8), [4], np.arange(4)),  # one seed
        (np.array([[1, 1], [0, 0]], np.int8), [2], np.zeros(2, int)),  # one group
        (np.zeros((3, 4), np.int8), [4], np.arange(4)),  # identical arms
        (np.ones((3, 4), np.int8), [4], np.arange(4)),  # the baseline is always wrong, and the arm is always right
        (np.zeros((3, 0), np.int8), [0], np.arange(0)),
        (np.array([[0, 1], [1, 1]], np.int8), [2, 0], np.arange(2)),  # a domain without images
    ],
)
def test_without_variation_there_is_no_interval(differences: np.ndarray, sizes: list[int], groups: np.ndarray) -> None:
    assert crossed_interval(differences, sizes, groups) is None


def test_many_images_need_little_memory() -> None:
    rng = np.random.default_rng(0)
    differences = rng.integers(-1, 2, (20, 176_000)).astype(np.int8)
    tracemalloc.start()
    try:
        assert crossed_interval(differences, [44_000] * 4, np.arange(176_000)) is not None
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 50 * differences.nbytes


class Sweep:
    """A sweep in which every trial keeps its correctly predicted images of the domains photo and sketch."""

    def __init__(self, folder: Path, groups: np.ndarray, held_out: str = "") -> None:
        self.folder, self.groups, self.held_out = folder, groups, held_out
        self.records: list[TrialRecord] = []

    def add(
        self,
        rank: int,
        seed: int,
        right: np.ndarray,
        data: str = "d",
        earlier: Sequence[np.ndarray] | None = None,
        tested: np.ndarray | None = None,
    ) -> None:
        """Add a trial with the given images of photo, then of sketch, after the last round and after earlier rounds.

        The earlier rounds tested only the images in `tested`, if given.
        """
        half = len(right) // 2
        parts = {"photo": right[:half], "sketch": right[half:]}
        number = len(self.records)
        groups = [self.groups[:half], self.groups[half:]]
        chosen = np.full(len(right), True) if tested is None else tested
        packed = None if earlier is None else [packed_bits([one[chosen]]) for one in earlier]
        sample = None if tested is None else [tested[:half], tested[half:]]
        kept = RightImages.of_domains(data, parts, {self.held_out}, groups, packed, sample)
        path = self.folder / str(number) / RIGHT
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(kept.content())
        shares = {name: float(one.mean()) for name, one in parts.items()}
        inside = {name: share for name, share in shares.items() if name != self.held_out}
        metrics = {
            "accuracy/mean": float(np.mean(list(inside.values()))),
            "accuracy/worst_domain": min(inside.values()),
            **{
                f"accuracy/{'out_of_domain' if name == self.held_out else 'domain'}/{name}": share
                for name, share in shares.items()
            },
            **({"accuracy/out_of_domain_mean": shares[self.held_out]} if self.held_out else {}),
        }
        weights = [chosen] * len(earlier or ()) + [np.full(len(right), True)]
        domains = [part for name, part in (("photo", slice(half)), ("sketch", slice(half, None))) if name in inside]
        metrics["accuracy/last_rounds"] = float(
            np.mean(
                [
                    one[part][weight[part]].mean()
                    for one, weight in zip((*(earlier or ()), right), weights, strict=True)
                    for part in domains
                ]
            )
        )
        plan = TrialPlan(key=str(number), number=number, arm={"lora.rank": rank}, seed=seed, config={})
        history = [RoundRecord(0, dict.fromkeys(metrics, 0.1), 0.1), RoundRecord(4, metrics, 0.1)]
        self.records.append(TrialRecord(plan, Outcome(outcome="finished", round=4), history, right=path))


def draw(folder: Path, better: float, groups: int = 40, seeds: int = 4, held_out: str = "") -> Sweep:
    """Return a sweep with ranks 4 and 8 (the baseline); `better` is the share of the images that only rank 4 knows."""
    rng = np.random.default_rng(1)
    numbers = np.tile(np.arange(groups), 2)
    known = np.tile(rng.random(groups) < 0.5, 2)
    own = np.tile(rng.random(groups) < better, 2)
    sweep = Sweep(folder, numbers, held_out)
    for seed in range(seeds):
        for rank in (4, 8):
            flipped = rng.random(2 * groups) < 0.02
            sweep.add(rank, seed, ((known | own) if rank == 4 else known) ^ flipped)
    return sweep


def expected(sweep: Sweep, part: slice = slice(None)) -> tuple[float, float] | None:
    """Return the interval of rank 4 against 8, from the bits that the sweep was made of."""
    half = len(sweep.groups) // 2
    rows = {4: [], 8: []}  # type: dict[int, list[np.ndarray]]
    for trial in sweep.records:
        assert trial.right is not None
        kept = RightImages.model_validate_json(trial.right.read_bytes())
        rows[int(str(trial.plan.arm["lora.rank"]))].append(np.concatenate([kept.of_domain(0), kept.of_domain(1)]))
    differences = np.array(rows[4], np.int8)[:, part] - np.array(rows[8], np.int8)[:, part]
    sizes = [half, half] if part == slice(None) else [half]
    return crossed_interval(differences, sizes, sweep.groups[part])


def test_the_report_shows_the_interval_in_all_tables(tmp_path: Path, manifest: Any) -> None:
    sweep = draw(tmp_path, better=0.1)
    table = tabulate(manifest, sweep)
    four, _ = summarise(table.manifest, sweep.records)
    assert four.comparison is not None
    assert four.comparison.images == ends(expected(sweep))
    assert four.comparison.interval is not None
    assert four.comparison.difference == pytest.approx(sum(four.comparison.images or ()) / 2)
    (row, other) = data_frame.data_frame(table).to_dict("records")
    assert (row["images_low"], row["images_high"]) == four.comparison.images
    assert np.isnan(other["images_low"])
    section = next(one for one in table.sections if one.title.startswith("Comparisons"))
    low, high = (100 * end for end in four.comparison.images or ())
    assert section.rows[0][section.head.index(COLUMN)] == f"{low:.2f} to {high:.2f}"
    assert "other test images" in section.explained

    domains = next(one for one in table.sections if one.title == BY_DOMAIN)
    assert [row[:2] for row in domains.rows] == [["4", "photo"], ["4", "sketch"]]
    for cells, part in zip(domains.rows, (slice(0, 40), slice(40, 80)), strict=True):
        low, high = (100 * end for end in expected(sweep, part) or ())
        assert cells[domains.head.index(COLUMN)] == f"{low:.2f} to {high:.2f}"
        assert cells[domains.head.index("pairs")] == "4"


def test_a_sentence_says_where_seeds_and_images_disagree(tmp_path: Path, manifest: Any) -> None:
    few, many = draw(tmp_path / "few", better=0.2), draw(tmp_path / "many", better=0.6)
    clause = "on these test images; on other images the difference may be zero (95% interval over seeds and images "
    for sweep, doubtful in ((few, True), (many, False)):
        table = tabulate(manifest, sweep, seeds=(0, 1, 2, 3))
        (said,) = (one for one in table.findings() if "significantly higher" in one)
        (four, _) = table.arms
        assert four.comparison is not None
        low, high = four.comparison.images or (0, 0)
        assert (low < 0) == doubtful == four.comparison.only_these_images == (clause in said)
        assert not doubtful or f"{clause}{100 * low:.2f} to {100 * high:.2f})." in said


@pytest.mark.parametrize("held_out", ["", "sketch"])
def test_a_file_has_the_differences_by_domain_in_full_precision(
    tmp_path: Path, manifest: Any, monkeypatch: pytest.MonkeyPatch, held_out: str
) -> None:
    monkeypatch.setattr("fedsweep.report.write_figures", lambda *_: ())
    sweep = draw(tmp_path / "trials", better=0.1, held_out=held_out)
    made = write_report(manifest(), sweep.records, tmp_path / "report")
    assert tmp_path / "report" / "by_domain.csv" in made.paths
    found = pd.read_csv(tmp_path / "report" / "by_domain.csv")
    assert found["metric"].tolist() == ["accuracy/domain/photo", f"accuracy/{'out_of_' * bool(held_out)}domain/sketch"]
    section = next(one for one in made.table.sections if one.title == BY_DOMAIN)
    assert len(found) == len(section.rows) == 2
    parts = slice(0, 40), slice(40, 80)
    for row, cells, part in zip(found.to_dict("records"), section.rows, parts, strict=True):
        assert [str(row["lora.rank"]), row["domain"], str(row["n_common"])] == cells[:3]
        assert row["against"] == "lora.rank=8"
        assert f"{100 * row['difference']:+.2f}" == cells[3]
        assert f"{100 * row['interval_low']:.2f} to {100 * row['interval_high']:.2f}" == cells[4]
        assert (row["images_low"], row["images_high"]) == ends(expected(sweep, part))
    accepts_columns(made.table.manifest, sweep.records, found)
    without = [replace(one, right=None) for one in sweep.records]
    again = write_report(manifest(), without, tmp_path / "report")
    assert tmp_path / "report" / "by_domain.csv" not in again.paths
    assert not (tmp_path / "report" / "by_domain.csv").exists()


def one_group(sweep: Sweep) -> None:
    sweep.records, sweep.groups = [], np.zeros(80, int)
    for seed in range(4):
        for rank in (4, 8):
            sweep.add(rank, seed, np.arange(80) % (3 + rank + seed % 2) == 0)


def no_files(sweep: Sweep) -> None:
    sweep.records = [replace(one, right=None) for one in sweep.records]


def with_metric(metric: str) -> Any:
    """Return a function that gives every trial another metric, whose value is its mean accuracy."""

    def change(sweep: Sweep) -> None:
        for place, one in enumerate(sweep.records):
            rounds = [replace(done, metrics={metric: done.metrics["accuracy/mean"]}) for done in one.history]
            sweep.records[place] = replace(one, history=rounds)

    return change


WHY = [
    ("nothing", "accuracy/mean", None),
    ("nothing", "accuracy/worst_domain", "the accuracy on the worst domain is no mean over domains"),
    ("no_file", "accuracy/mean", "not every trial has a record of its correctly predicted images"),
    ("no_files", "accuracy/domain/photo", "not every trial has a record of its correctly predicted images"),
    ("other_data", "accuracy/mean", "the trials were tested on different images"),
    ("other_groups", "accuracy/mean", "the trials were tested on different images"),
    ("one_group", "accuracy/mean", "all test images belong to one group"),
    ("", "validation/accuracy/mean", "the metric is measured on validation images"),
    ("", "accuracy/clients/mean", "the predictions of the clients' own models are not recorded"),
    ("", "loss/test", "the losses of single images are not recorded"),
    ("", "loss/train", None),  # depends on no test images
]
"""A change of the trials, the metric, and the reason why there is no interval."""


@pytest.mark.parametrize(("change", "metric", "reason"), WHY)
@pytest.mark.parametrize("until", [False, True])
def test_the_report_says_why_there_is_no_interval(
    tmp_path: Path, manifest: Any, change: str, metric: str, reason: str | None, until: bool
) -> None:
    sweep = draw(tmp_path, better=0.3)
    (globals()[change] if change else with_metric(metric))(sweep)
    rule = UntilDecided(at_least=4, at_most=6, smallest_effect=4.0)
    table = tabulate(manifest, sweep, metric=metric, **({"until_decided": rule, "seeds": rule.seeds} if until else {}))
    section = next(one for one in table.sections if one.title.startswith("Comparisons"))
    assert (COLUMN in section.head) == (change == "nothing" and reason is None)
    said = "No interval for other test images: "
    assert section.explained.count(said) == (reason is not None)
    assert reason is None or f" {said}{reason}. " in section.explained


def test_without_an_interval_over_seeds_the_report_does_not_speak_of_other_images(
    tmp_path: Path, manifest: Any
) -> None:
    table = tabulate(manifest, draw(tmp_path, better=0.3, seeds=1), seeds=(0,))
    assert "other test images" not in table.markdown()


def test_equal_differences_on_a_domain_have_no_interval(tmp_path: Path, manifest: Any) -> None:
    """The arm predicts one image of photo more on every seed, but the accuracies and their rounding vary."""
    sweep, rng = Sweep(tmp_path, np.tile(np.arange(39), 2)), np.random.default_rng(0)
    for seed, known in enumerate((3, 12, 30)):
        for rank, more in ((8, 0), (4, 1)):
            sweep.add(rank, seed, np.concatenate([np.arange(39) < known + more, rng.random(39) < 0.5]))
    section = next(one for one in tabulate(manifest, sweep).sections if one.title == BY_DOMAIN)
    photo, sketch = section.rows
    assert photo[3:] == ["+2.56", "-", "-"]
    assert "-" not in sketch


UNTIL = UntilDecided(at_least=3, at_most=6, smallest_effect=4.0)
DECIDED = {"until_decided": UNTIL, "seeds": UNTIL.seeds}


def widened(sweep: Sweep, found: Verdict, part: slice = slice(None)) -> tuple[float, float]:
    """Return the repeated interval of a verdict, widened by the variance over groups of images."""
    sweep.records = [one for one in sweep.records if one.plan.seed < found.seeds]
    low, high = expected(sweep, part) or (0.0, 0.0)
    narrow = [trial.history[-1].metrics["accuracy/mean"] for trial in sweep.records]
    by_seeds = t_interval([one - other for one, other in zip(narrow[::2], narrow[1::2], strict=True)])
    assert by_seeds is not None
    assert found.interval is not None
    squares = [((end - start) / 2) ** 2 for start, end in ((low, high), by_seeds, found.interval)]
    half = (squares[0] - squares[1] + squares[2]) ** 0.5
    return (low + high) / 2 - half, (low + high) / 2 + half


def test_seeds_until_decided_have_the_repeated_interval_widened_for_other_images(tmp_path: Path, manifest: Any) -> None:
    sweep = draw(tmp_path, better=0.2, seeds=6)
    table = tabulate(manifest, sweep, **DECIDED)
    four, _ = table.arms
    assert four.comparison is not None
    own = four.comparison.sequential
    assert own is not None
    assert 3 <= own.seeds < 6
    assert four.comparison.images == ends(widened(sweep, own))
    (row, other) = data_frame.data_frame(table).to_dict("records")
    assert (row["images_low"], row["images_high"]) == four.comparison.images
    assert np.isnan(other["images_low"])
    assert own.equivalence_interval is not None
    assert row["images_equivalence_low"] < own.equivalence_interval[0]
    assert row["images_equivalence_high"] > own.equivalence_interval[1]
    section = next(one for one in table.sections if one.title.startswith("Comparisons"))
    low, high = (100 * end for end in four.comparison.images or ())
    assert section.rows[0][section.head.index(COLUMN)] == f"{low:.2f} to {high:.2f}"
    assert "other test images" in section.explained

    domains = next(one for one in table.sections if one.title == BY_DOMAIN)
    assert domains.head[-2:] == ["95% interval", COLUMN]
    assert "valid at every look" in domains.explained
    for cells in domains.rows:
        assert cells[2] == str(own.seeds)
        (low, high), (least, most) = (tuple(map(float, cell.split(" to "))) for cell in cells[-2:])
        assert least < low < high < most


def test_sentences_say_where_decided_comparisons_hold_only_on_these_images(tmp_path: Path, manifest: Any) -> None:
    clause = " on these test images; on other images the difference may be "
    for better, verdict, doubtful in ((0.2, "higher", True), (0.6, "higher", False), (0.0, "within", True)):
        sweep = draw(tmp_path / str(better), better, seeds=6)
        if verdict == "within":  # the arms differ on many images, but on average they do not
            swap_classes(sweep)
        table = tabulate(manifest, sweep, **DECIDED)
        found = table.arms[0].comparison
        assert found is not None
        assert found.verdict == verdict
        (said,) = (one for one in table.findings() if one.startswith("rank 4"))
        assert (clause in said) == doubtful
        kind, interval = ("larger (90%", found.images_equivalence) if better == 0 else ("zero (95%", found.images)
        low, high = (100 * end for end in interval or ())
        assert not doubtful or said.endswith(f"{clause}{kind} interval over seeds and images {low:.2f} to {high:.2f}).")
        mirror = mirrored(found)
        assert (mirror.images, mirror.images_equivalence) == (negated(found.images), negated(found.images_equivalence))


def swap_classes(sweep: Sweep) -> None:
    """Let rank 4 predict the first half of the groups better than rank 8, and the second half as much worse."""
    rng, half = np.random.default_rng(2), len(sweep.groups) // 2
    seeds, sweep.records = len(sweep.records) // 2, []
    first = np.tile(np.arange(half) < half // 2, 2)
    for seed in range(seeds):
        for rank in (4, 8):
            sweep.add(rank, seed, (first == (rank == 4)) ^ (rng.random(2 * half) < 0.02))


def test_held_out_domains_have_their_own_interval(tmp_path: Path, manifest: Any) -> None:
    sweep = draw(tmp_path, better=0.1, held_out="sketch")
    table = tabulate(manifest, sweep)
    assert table.arms[0].comparison is not None
    assert table.arms[0].comparison.images == ends(expected(sweep, slice(0, 40)))
    outside = table.by_mean["out of domain"].arms[0].comparison
    assert outside is not None
    assert outside.images == ends(expected(sweep, slice(40, 80)))
    row = data_frame.data_frame(table).to_dict("records")[0]
    assert (row["out_of_domain_images_low"], row["out_of_domain_images_high"]) == outside.images


def other_data(sweep: Sweep) -> None:
    sweep.records.pop()
    sweep.add(8, 3, np.arange(80) % 2 == 0, data="other")


def other_groups(sweep: Sweep) -> None:
    sweep.records.pop()
    sweep.groups = sweep.groups // 2
    sweep.add(8, 3, np.arange(80) % 2 == 0)


def no_file(sweep: Sweep) -> None:
    sweep.records[0] = replace(sweep.records[0], right=None)


def nothing(sweep: Sweep) -> None:
    pass


@pytest.mark.parametrize(
    ("change", "metric", "known"),
    [
        (nothing, "accuracy/mean", True),
        (nothing, "accuracy/worst_domain", False),
        (nothing, "accuracy/domain/photo", True),
        (no_file, "accuracy/mean", False),
        (other_data, "accuracy/mean", False),
        (other_groups, "accuracy/mean", False),
    ],
)
def test_the_interval_needs_the_same_images_in_all_trials(
    tmp_path: Path, manifest: Any, change: Any, metric: str, known: bool
) -> None:
    sweep = draw(tmp_path, better=0.3)
    change(sweep)
    table = AblationTable(made := manifest(metric=metric), summarise(made, sweep.records))
    comparison = table.arms[0].comparison
    assert comparison is not None
    assert comparison.interval is not None
    assert (comparison.images is not None) == known
    section = next(one for one in table.sections if one.title.startswith("Comparisons"))
    assert (COLUMN in section.head) == known == ("other seeds and other test images" in section.explained)
    by_domain = [one for one in table.sections if one.title == BY_DOMAIN]
    assert bool(by_domain) == (change is nothing and metric != "accuracy/domain/photo")
    if change is no_file:
        without = [replace(one, right=None) for one in sweep.records]
        assert table.markdown() == AblationTable(made, summarise(made, without)).markdown()
        assert table.findings() == AblationTable(made, summarise(made, without)).findings()


RANKS = (DeclaredComparison(arm={"lora.rank": 8}, against={"lora.rank": 4}),)
WORST = DeclaredComparison(arm={"lora.rank": 8}, against={"lora.rank": 4}, metric="accuracy/worst_domain")


@pytest.mark.parametrize("until", [{}, DECIDED])
def test_declared_comparisons_show_the_interval(tmp_path: Path, manifest: Any, until: dict[str, Any]) -> None:
    sweep = draw(tmp_path, better=0.2, seeds=6 if until else 4)
    table = tabulate(manifest, sweep, comparisons=RANKS if until else (*RANKS, WORST), **until)
    section = next(one for one in table.sections if one.title == TITLE)
    shown, *others = (row[section.head.index(COLUMN)] for row in section.rows)
    own = table.arms[0].comparison
    assert own is not None
    least, most = (100 * end for end in negated(own.images) or ())
    assert shown == f"{least:.2f} to {most:.2f}"
    assert others == ([] if until else ["-"])  # the smallest of several accuracies has no such interval
    assert "other test images" in section.explained
    assert f"[${least:.2f}$, ${most:.2f}$]" in latex(table).partition("\\end{table}")[2]
    assert shown in " ".join(printed(table, 250).split())
    narrow = printed(table, 64)
    assert "(see declared.csv)" in narrow
    assert shown not in " ".join(narrow.split())


def test_declared_comparisons_without_the_interval_have_no_column(tmp_path: Path, manifest: Any) -> None:
    table = tabulate(manifest, draw(tmp_path, better=0.2), comparisons=(WORST,))
    section = next(one for one in table.sections if one.title == TITLE)
    assert COLUMN not in section.head
    assert "other test images" not in section.explained
    assert COLUMN not in latex(table)


def draw_rounds(folder: Path, earlier: tuple[int, int], held_out: str = "") -> tuple[Sweep, np.ndarray]:
    """Return a sweep with ranks 4 and 8, and its shares of rounds by seed, rank and image, (4, 2, 80).

    The averaged rounds of rank 4 and of rank 8 are the last round and the given numbers of earlier rounds.
    """
    rng = np.random.default_rng(3)
    easy = np.tile(rng.random(40), 2)
    sweep, shares = Sweep(folder, np.tile(np.arange(40), 2), held_out), np.empty((4, 2, 80))
    for seed in range(4):
        for place, rank in enumerate((4, 8)):
            *before, last = [rng.random(80) < easy + 0.1 * (rank == 4) for _ in range(earlier[place] + 1)]
            sweep.add(rank, seed, last, earlier=before)
            shares[seed, place] = np.mean([*before, last], axis=0)
    return sweep, shares


@pytest.mark.parametrize("held_out", ["", "sketch"])
@pytest.mark.parametrize("earlier", [(0, 0), (2, 2), (5, 2)])
def test_the_mean_over_the_last_rounds_has_the_interval_of_the_shares(
    tmp_path: Path, manifest: Any, earlier: tuple[int, int], held_out: str
) -> None:
    sweep, shares = draw_rounds(tmp_path, earlier, held_out)
    table = AblationTable(made := manifest(metric="accuracy/last_rounds"), summarise(made, sweep.records))
    comparison = table.arms[0].comparison
    assert comparison is not None
    assert comparison.images is not None
    assert comparison.interval is not None
    images, sizes = (40, [40]) if held_out else (80, [40, 40])
    differences = (shares[:, 0] - shares[:, 1])[:, :images]
    assert comparison.images == ends(crossed_interval(differences, sizes, sweep.groups[:images]))
    assert comparison.difference == pytest.approx(sum(comparison.images) / 2, abs=1e-12)
    (low, high), (least, most) = comparison.images, comparison.interval
    assert low - 1e-12 <= least < most <= high + 1e-12
    section = next(one for one in table.sections if one.title.startswith("Comparisons"))
    assert COLUMN in section.head
    (by_domain,) = (one for one in table.sections if one.title == BY_DOMAIN)
    assert all(row[-1] != "-" for row in by_domain.rows)
    plain = AblationTable(made := manifest(metric="accuracy/mean"), summarise(made, sweep.records))
    of_last = plain.arms[0].comparison
    assert of_last is not None
    assert (of_last.images == comparison.images) == (earlier == (0, 0))


def test_without_the_earlier_rounds_of_a_trial_only_the_last_round_has_the_interval(
    tmp_path: Path, manifest: Any
) -> None:
    sweep, _ = draw_rounds(tmp_path, (2, 2))
    sweep.records.pop()
    sweep.add(8, 3, np.arange(80) % 2 == 0)
    for metric, known in (("accuracy/mean", True), ("accuracy/last_rounds", False)):
        table = AblationTable(made := manifest(metric=metric), summarise(made, sweep.records))
        reason = "not every trial has a record of the predictions in the earlier averaged rounds"
        assert any(reason in section.explained for section in table.sections) != known
        comparison = table.arms[0].comparison
        assert comparison is not None
        assert comparison.interval is not None
        assert (comparison.images is not None) == known


@pytest.mark.parametrize("held_out", ["", "sketch"])
def test_if_each_seed_tests_its_own_sample_before_the_last_round_the_mean_over_rounds_has_the_interval(
    tmp_path: Path, manifest: Any, held_out: str
) -> None:
    """The reference is the analysis of variance of the shares that each trial's file returns, of which others test."""
    rng = np.random.default_rng(5)
    easy, values = np.tile(rng.random(40), 2), np.empty((4, 2, 80))
    sweep = Sweep(tmp_path, np.tile(np.arange(40), 2), held_out)
    for seed in range(4):
        tested = rng.permutation(np.repeat([True, False], [30, 50]))
        for place, rank in enumerate((4, 8)):
            *before, last = [rng.random(80) < easy + 0.1 * (rank == 4) for _ in range(3)]
            sweep.add(rank, seed, last, earlier=before, tested=tested)
            kept = RightImages.model_validate_json((tmp_path / str(len(sweep.records) - 1) / RIGHT).read_bytes())
            values[seed, place] = kept.values_of_rounds()
    comparison = summarise(manifest(metric="accuracy/last_rounds"), sweep.records)[0].comparison
    assert comparison is not None
    assert comparison.images is not None
    assert comparison.interval is not None
    images, sizes = (40, [40]) if held_out else (80, [40, 40])
    differences = (values[:, 0] - values[:, 1])[:, :images]
    assert comparison.images == ends(crossed_interval(differences, sizes, sweep.groups[:images]))
    assert comparison.difference == pytest.approx(sum(comparison.images) / 2, abs=1e-12)
    (low, high), (least, most) = comparison.images, comparison.interval
    assert low - 1e-12 <= least < most <= high + 1e-12


@pytest.mark.parametrize(("change", "metric", "reason"), [one for one in WHY if one[0] != "nothing"] + [WHY[0]])
def test_compare_says_why_there_is_no_interval(
    tmp_path: Path, manifest: Any, change: str, metric: str, reason: str | None
) -> None:
    sweep = draw(tmp_path, better=0.3)
    (globals()[change] if change else with_metric(metric))(sweep)
    sides = [
        Side.of(f"lora.rank={rank}", manifest(metric=metric), sweep.records, f"lora.rank={rank}") for rank in (4, 8)
    ]
    section = Pairing.of(*sides, by_arm=False).section()
    assert (COLUMN in section.head) == (change == "nothing" and reason is None)
    said = "No interval for other test images: "
    assert section.explained.count(said) == (reason is not None)
    assert reason is None or f" {said}{reason}. " in section.explained
