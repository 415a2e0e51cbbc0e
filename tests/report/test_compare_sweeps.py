"""Comparisons of two sweeps or two arms, with their pairs, differing hyperparameters and errors."""

from dataclasses import replace

import pytest

from fedsweep.common.errors import UserError
from fedsweep.report.arm_statistics import summarise
from fedsweep.report.compare_sweeps import Pairing, Side
from fedsweep.results.arms import arm_argument
from fedsweep.results.seeds import UntilDecided
from tests.report.conftest import Trials


@pytest.fixture
def ranks(trials):
    return trials.arms({4: [0.50, 0.52, 0.49], 8: [0.60, 0.62, 0.58]})


def side(manifest, trials, arm=None, name="ablations/lora_rank", **changes) -> Side:
    return Side.of(name, manifest(**changes), trials.records, arm and arm_argument(arm))


def other_sweep() -> Trials:
    return Trials().arms({4: [0.55, 0.56, 0.57], 8: [0.60, 0.62, 0.58], 16: [0.7, 0.7, 0.7]})


def test_comparing_two_arms_gives_the_numbers_of_the_table(manifest, ranks):
    found = Pairing.of(side(manifest, ranks, {"lora.rank": 8}), side(manifest, ranks, {"lora.rank": 4}), by_arm=False)
    (four, _) = summarise(manifest(), ranks.records)
    assert found.comparisons == (four.comparison,)
    (row,) = found.section().rows
    assert row[:5] == ["lora.rank=8 / lora.rank=4", "3", "60.00", "3", "50.33"]


def test_a_picked_pair_is_corrected_for_all_pairs_that_could_have_been_picked(manifest, ranks):
    """Four arms have six pairs; with another sweep of three arms, there are twelve."""
    ranks.arms({1: [0.40, 0.43, 0.41], 16: [0.61, 0.60, 0.60]})
    here = [side(manifest, ranks, {"lora.rank": rank}) for rank in (4, 8)]
    there = side(manifest, other_sweep(), {"lora.rank": 8}, id="b")
    for sides, choices in ((here, 6), ((here[0], there), 12)):
        found = Pairing.of(*sides, by_arm=False)
        (one,) = found.comparisons
        assert one.p_holm == pytest.approx(choices * one.p)
        assert one.p_exact_holm == min(1, choices * one.p_exact)
        assert one.level == pytest.approx(0.05 / choices)
        assert found.findings()[0] == (
            f"The compared pair is one of {choices} pairs of arms that you could have picked, so its p-values are "
            f"multiplied by {choices}."
        )
        assert {"Bonferroni p"} == {name for name in found.section().head if name.endswith(" p") and name != "exact p"}
        assert {"p_bonferroni", "p_exact_bonferroni"} < {*found.csv().splitlines()[0].split(",")}
        assert f"Bonferroni p: p times {choices}, the number of pairs of arms" in found.section().explained
    assert Pairing.of(side(manifest, ranks), side(manifest, other_sweep(), id="b"), by_arm=True).choices == 1


@pytest.mark.parametrize("ends", [[0.51, 0.53, 0.50], [0.51]])
def test_a_picked_pair_without_a_test_has_the_same_columns(manifest, trials, ends):
    trials.arms({4: [0.50, 0.52, 0.49], 8: ends, 16: [0.6, 0.6, 0.6]})
    found = Pairing.of(*(side(manifest, trials, {"lora.rank": rank}) for rank in (4, 8)), by_arm=False)
    assert [one.p for one in found.comparisons] == [None]
    assert "Bonferroni p" in found.section().head
    assert "Holm p" not in found.section().head
    assert {"p_bonferroni", "p_exact_bonferroni"} < {*found.csv().splitlines()[0].split(",")}
    assert "multiplied" not in " ".join(found.findings()), "there is no p-value to multiply"


def test_two_sweeps_are_compared_over_their_common_arms(manifest, ranks):
    found = Pairing.of(side(manifest, ranks), side(manifest, other_sweep(), id="b"), by_arm=True)
    assert [row[0] for row in found.section().rows] == ["lora.rank=4", "lora.rank=8"]
    assert found.comparisons[0].difference == pytest.approx(0.17 / 3)
    assert found.comparisons[1].difference == 0.0
    assert found.comparisons[0].level == 0.025


def test_exchanging_the_sides_changes_the_sign_of_the_differences(manifest, ranks):
    here, there = side(manifest, ranks), side(manifest, other_sweep(), id="b")
    one, back = Pairing.of(here, there, by_arm=True), Pairing.of(there, here, by_arm=True)
    for a, b in zip(one.comparisons, back.comparisons, strict=True):
        assert (a.difference, a.p_holm) == (-b.difference, b.p_holm)


def test_compare_says_whose_seeds_determine_only_some_streams(manifest, ranks):
    def first(**changes) -> str:
        other = side(manifest, other_sweep(), id="b", **changes)
        return Pairing.of(side(manifest, ranks), other, by_arm=True).findings()[0]

    assert first(seed_streams=("batches",)).startswith("The seeds of B determine only some of the random streams")
    assert "seed_streams" not in first()


def test_only_common_seeds_are_paired(manifest, ranks):
    other = other_sweep()
    other.records = [one for one in other.records if one.plan.seed]
    found = Pairing.of(side(manifest, ranks), side(manifest, other, id="b"), by_arm=True)
    assert {one.seeds for one in found.comparisons} == {(1, 2)}
    assert "over 2 of 3 seeds" in found.findings()[0]


def configured(trials, digest="d", **values) -> Trials:
    trials.records = [
        replace(one, plan=one.plan.model_copy(update={"config": {"seed": one.plan.seed, **values},
                                                       "digests": {"data": digest}}))
        for one in trials.records
    ]  # fmt: skip
    return trials


def test_compare_lists_differing_hyperparameters_and_warns_about_different_images(manifest, ranks):
    here = side(manifest, configured(ranks, lr=0.1, method={"name": "fedra"}))
    there = side(manifest, configured(other_sweep(), "e", lr=0.2, method={"name": "fedra"}, extra=1), id="b")
    images, *_, apart = Pairing.of(here, there, by_arm=True).findings()
    assert apart == "A and B differ in lr (0.1 and 0.2); extra (not set and 1)."
    assert images.startswith("A and B were tested on different images")


def test_comparing_arms_with_different_held_out_domains_warns_about_different_images(manifest):
    trials = Trials()
    for seed in range(3):
        trials.add({"held_out": "photo"}, seed, [0.3, 0.5 + seed / 100], held_out=["photo"])
        trials.add({"held_out": "sketch"}, seed, [0.3, 0.6], held_out=["sketch"])
    here, there = (side(manifest, trials, {"held_out": name}, varied=("held_out",)) for name in ("photo", "sketch"))
    caution, pair, *_ = Pairing.of(here, there, by_arm=False).findings()
    assert caution.startswith("A and B were tested on different images")
    assert "B against A, on different images: +9.00 points" in pair
    assert ",False," in Pairing.of(here, there, by_arm=False).csv().splitlines()[1]


def test_equal_hyperparameters_are_reported_as_equal(manifest, ranks):
    here, there = side(manifest, configured(ranks)), side(manifest, configured(other_sweep()), id="b")
    assert Pairing.of(here, there, by_arm=True).findings()[-1].startswith("All hyperparameters of A and B are equal")


@pytest.mark.parametrize(
    ("arm", "words"),
    [
        (
            {"lora.rank": 5},
            "must name one arm by its values, but no arm has these values. The arms are: lora.rank=4; lora.rank=8.",
        ),
        ({"seed": 0}, "no arm has"),
    ],
)
def test_unknown_arms_raise(manifest, ranks, arm, words):
    with pytest.raises(UserError) as error:
        side(manifest, ranks, arm)
    assert words in str(error.value)


def test_values_that_match_several_arms_raise(manifest, trials):
    for rank in (4, 8):
        trials.add({"lora.rank": rank, "optimizer.lr": 0.1}, 0, [0.1, 0.2])
    with pytest.raises(UserError, match="2 arms of that sweep have these values"):
        side(manifest, trials, {"optimizer.lr": 0.1})


def test_arms_of_two_sweeps_are_the_same_if_their_numbers_are_equal(manifest):
    here, there = Trials(), Trials()
    for rank, trials in ((1, here), (1.0, there)):
        trials.add({"lora.rank": rank}, 0, [0.1, 0.2])
    found = Pairing.of(side(manifest, here), side(manifest, there, id="b"), by_arm=True)
    assert [row[0] for row in found.section().rows] == ["lora.rank=1"]


def test_arms_that_print_alike_are_listed_with_all_digits(manifest, trials):
    for lr in (0.12345678, 0.12345679):
        trials.add({"optimizer.lr": lr}, 0, [0.1, 0.2])
    with pytest.raises(UserError, match=r"values: optimizer\.lr=0\.12345678; optimizer\.lr=0\.12345679"):
        Side.of("tiny", manifest(), trials.records, "optimizer.lr=0.123457")
    found = Side.of("tiny", manifest(), trials.records, "optimizer.lr=0.12345679")
    assert [one.arm.values for one in found.arms] == [{"optimizer.lr": 0.12345679}]


def test_different_objectives_no_common_arm_and_equal_sides_raise(manifest, ranks):
    here = side(manifest, ranks)
    with pytest.raises(UserError, match="must have the same objective"):
        Pairing.of(here, side(manifest, ranks, id="b", mode="min"), by_arm=True)
    alone = Trials().arms({32: [0.5, 0.5]})
    with pytest.raises(UserError, match=r"have no arm in common\. You can compare one arm of each"):
        Pairing.of(here, side(manifest, alone, id="b"), by_arm=True)
    with pytest.raises(UserError, match="are the same"):
        Pairing.of(here, side(manifest, ranks), by_arm=True)


def test_sides_with_seeds_until_decided_are_compared_with_a_caution(manifest, ranks):
    until = UntilDecided(at_least=3, at_most=6)
    sides = [side(manifest, ranks, {"lora.rank": rank}, until_decided=until) for rank in (8, 4)]
    first, *_ = Pairing.of(*sides, by_arm=False).findings()
    assert first.startswith(
        "The seeds of A or B ran until a comparison was decided, so the intervals and p-values here"
    )
    plain = [side(manifest, ranks, {"lora.rank": rank}) for rank in (8, 4)]
    assert not any("until a comparison" in one for one in Pairing.of(*plain, by_arm=False).findings())
