"""The times of the papers' search spaces, which are computed from measured images per second."""

from pathlib import Path

import pytest

from benchmarks import paper_times
from fedsweep.common.paths import find
from fedsweep.common.yaml_values import read_yaml
from fedsweep.federation.run_config import RunConfig

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "papers.md"


def config(**changes: object) -> RunConfig:
    """Return the configuration of `fedra_domainnet` with changes, whose names have `__` instead of a dot."""
    base = RunConfig.of(read_yaml(find("experiments", "fedra_domainnet")), "fedra_domainnet")
    return base.override({name.replace("__", "."): value for name, value in changes.items()}, "a test")


@pytest.fixture
def plain(monkeypatch) -> dict[str, paper_times.Speed]:
    """Let `table1_domainnet` be the only search space, and return speeds of one image per second."""
    monkeypatch.setattr(paper_times, "spaces", lambda: ["papers/fedra/table1_domainnet"])
    return {"float32": paper_times.Speed((0.5, 1.0), 1.0)}


def test_the_page_contains_the_table():
    assert "\n".join(paper_times.page()) in PAGE.read_text()


def test_the_work_of_a_trial_is_counted():
    steps = 79  # of 10,000 images in batches of 128
    whole = 100 * 6 * steps * 128
    tested = 101 * 6 * 4000
    assert paper_times.work(config(method="all_large"), 10_000, 4000) == paper_times.Work(whole, tested)
    of_fedra = paper_times.work(config(), 10_000, 4000)
    assert of_fedra == paper_times.Work(whole * (12 + 10 + 8 + 6 + 4 + 3) / 72, tested)
    of_small = paper_times.work(config(method="all_small"), 10_000, 4000)
    assert of_small == paper_times.Work(whole * 3 / 12, tested * 3 / 12)
    seldom = config(method="all_large", local__epochs=2, federation__evaluate_every=10, partition__proxy_share=0.5)
    assert paper_times.work(seldom, 10_000, 4000) == paper_times.Work(100 * 6 * 2 * 40 * 128, 11 * 6 * 4000)


def test_only_one_client_of_each_domain_trains_if_the_cohort_says_so():
    changes = {"partition": {"name": "feature_label_skew", "clients_per_domain": 5, "alpha": 0.5, "min_size": 10}}
    found = paper_times.work(config(**changes, federation__clients_per_round="one_per_domain"), 10_000, 4000)
    assert found.trained == pytest.approx(100 * 16 * 128 * 43 / 12)  # 16 steps of 2,000 images


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"method": "depthfl"}, "method `depthfl`"),
        ({"base_optimizer": {"name": "feddyn", "alpha": 0.1}}, "base optimizer `feddyn`"),
        ({"lora__position": "l0"}, "`lora.position` l0"),
        ({"lora__patch_embed": True}, "`lora.patch_embed`"),
        ({"evaluation__metrics": ["drift"]}, "drift and bias"),
        ({"backbone__model": "mixer_b16_224.goog_in21k"}, "backbone `mixer_b16_224`"),
    ],
)
def test_a_run_that_was_not_measured_has_a_reason(changes, reason):
    assert paper_times.obstacle(config(**changes)) == reason


def test_arms_that_were_not_measured_have_no_part_in_the_times(plain):
    trials, training, testing, whole, reasons = paper_times.row("papers/fedra/table1_domainnet", plain, 128, 36)
    assert (trials, reasons) == ("12 of 15", "method `depthfl`")
    assert training == "2.7 to 21.3"  # hours: 100 rounds of 6 steps of 128 images, with 3 to 12 blocks
    assert testing == "1.5 to 6.1"
    blocks = (12 + 3 + 2 * 43 / 6) / 12  # of the four arms
    seconds = 100 * 6 * 128 * blocks, 101 * 6 * 36 * (3 + 3 / 12)
    assert whole == paper_times.hours([3 * (seconds[0] * speed + seconds[1]) for speed in (0.5, 1.0)])
