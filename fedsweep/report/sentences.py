"""The sentences of a report: the findings, and the legend of the table."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from fedsweep.common.randomness import STREAMS
from fedsweep.common.yaml_values import Json
from fedsweep.report.arm_statistics import (
    ArmStatistics,
    asked_columns,
    ended,
    same_images,
)
from fedsweep.report.choice import by_validation, chosen_arms, efficient_arms, on_test_images
from fedsweep.report.family_of_tests import family_size
from fedsweep.report.holm_corrected_tests import Comparison
from fedsweep.report.intervals_and_power import LEVEL
from fedsweep.report.population_schedule import schedule_sentences
from fedsweep.report.text_tables import MARK, texts
from fedsweep.report.units_and_labels import Units, arm_words, names, shown_p, shown_seeds
from fedsweep.results import SweepManifest, TrialRecord
from fedsweep.results.arms import IN_WORDS, Arm, is_accuracy, setting, shown_setting
from fedsweep.results.history import ACCUMULATED, MEAN_ACCURACY, SIMULATED, TESTED, uses_test_images
from fedsweep.results.records import stand_in, warning
from fedsweep.results.unnamed_changes import ResolvedArm, unnamed_changes

SECOND_UNITS = {
    "megabytes/sent": " MB",
    "bytes/up": " bytes",
    "bytes/down": " bytes",
    "seconds/round": " s",
    SIMULATED: " s",
}
NEW_SEEDS = "New seeds do not remove this bias: they average out the luck of seeds, but the test images stay the same."
LABELLED = 8  # a sentence names at most this many efficient arms; the table marks all of them


def findings(manifest: SweepManifest, arms: Sequence[ArmStatistics]) -> list[str]:
    """Return the findings of the report.

    If the sweep has a baseline, the findings state the result of each comparison with the baseline. Otherwise, they
    name the best arm. If the sweep has two objectives, the findings list the Pareto-efficient arms, and no arm is named
    best.
    """
    dotted, units = names(manifest, arms), Units.of(manifest.metric, arms)
    if manifest.baseline is None or not any(one.is_baseline for one in arms):
        return _about_best(manifest, arms, dotted, units)
    by_key, found = {one.key: one for one in arms}, list[str]()
    for one in arms:
        if one.comparison is not None and one.counterpart is not None:
            other = by_key[one.counterpart]
            pair = pair_label(one.arm.values, other.arm.values, dotted, manifest.baseline)
            if one.comparison.seeds and not same_images(manifest.metric, [one, other]):
                pair += ", on different images"
            found.append(f"{pair}: {about_comparison(manifest, one.comparison, units)}")
    return [*found, *_about_efficient(manifest, arms), *_about_choice(manifest, arms, dotted, units)]


def _about_efficient(manifest: SweepManifest, arms: Sequence[ArmStatistics]) -> list[str]:
    best = efficient_arms(manifest, arms)
    if manifest.against is None or not best:
        return []
    metric, dotted, units = manifest.against.metric, names(manifest, arms), Units.of(manifest.metric, arms)
    second = Units.fit(is_accuracy(metric), (one.second for one in arms))
    percent, unit = "%" * units.percent, "%" if is_accuracy(metric) else SECOND_UNITS.get(metric, "")
    said = [
        f"{arm_words(one.arm.values, dotted)} ({units.value(one.mean)}{percent}, {second.value(one.second)}{unit})"
        for one in best[:LABELLED]
    ]
    more = f" and {len(best) - LABELLED} more" if len(best) > LABELLED else ""
    count = sum(one.second is not None for one in arms)
    return [f"Efficient arms by {manifest.metric} and {metric} ({len(best)} of {count}): {'; '.join(said)}{more}."]


def caption(manifest: SweepManifest, arms: Sequence[ArmStatistics], shown: Collection[str]) -> list[str]:
    """Return the legend of the table, as a list of sentences.

    The legend names the objective, rounds, seeds, baseline and test. It also explains the columns that the search
    space adds, and counts the trials that did not finish.

    Args:
        manifest: The sweep.
        arms: The arms of the table.
        shown: The headings of the columns of the table.
    """
    dotted, trials = names(manifest, arms), [trial for one in arms for trial in one.arm.trials]
    compared = [one.comparison for one in arms if one.comparison is not None]
    tested = [one for one in compared if one.p is not None]
    return texts(
        "caption",
        manifest=manifest,
        percent=is_accuracy(manifest.metric),
        accumulated=ACCUMULATED,
        stand_ins=_about_stand_ins(arms, dotted),
        unnamed=_unnamed(manifest, arms),
        baseline=_baseline(manifest.baseline, arms, dotted),
        tested=tested,
        family=family_size(manifest, compared),
        columns=asked_columns(manifest),
        held_out_columns=[
            column.heading
            for column in asked_columns(manifest)
            if column.of_domain and any(one.n and column.name in one.held_out for one in arms)
        ],
        mark=MARK,
        shown=shown,
        held_out=any(one.held_out for one in arms),
        same_images=same_images(MEAN_ACCURACY, arms),
        hold_out=_have_or_hold_out(arms),
        evaluated=evaluated_images(trials),
        population=schedule_sentences(manifest, trials),
        new_seeds=NEW_SEEDS,
        counts=Counter(map(ended, trials)),
        streams=[STREAMS[name].meaning for name in manifest.seed_streams or ()],
        survivors=any(one.n and any(ended(trial) == "pruned" for trial in one.arm.trials) for one in arms),
    )


def evaluated_images(trials: Sequence[TrialRecord]) -> str | None:
    """Return sentences that say which rounds are evaluated on fewer test images, or not at all.

    Return None if all rounds are evaluated on all images.
    """
    fewer, whole, skipped, pruned = set[int](), set[int](), False, False
    for trial in trials:
        first = trial.history[0].metrics.get(TESTED) if trial.history else None
        for record in trial.history[1:] if first is not None else ():
            count = record.metrics.get(TESTED)
            skipped |= count is None
            if first is not None and count is not None and count < first:
                fewer.add(int(count))
                whole.add(int(first))
                pruned |= ended(trial) == "pruned"
    found = []
    if fewer:
        of_all, of_some = (", ".join(f"{count:,}" for count in sorted(counts)) for counts in (whole, fewer))
        found.append(
            f"The last round and the untuned model are evaluated on all {of_all} test images, and the rounds between "
            f"on {of_some} of them."
        )
    if pruned:
        found.append("The values of pruned trials come from the smaller set.")
    if skipped:
        found.append("Not every round is evaluated.")
    return " ".join(found) or None


def _baseline(baseline: Arm | None, arms: Sequence[ArmStatistics], dotted: Sequence[str]) -> str | None:
    """Return a phrase that describes the baseline, or None if no arm is a baseline.

    `baseline` contains the hyperparameter values that define the baseline. If several arms have these values, each arm
    is compared with the one whose other hyperparameters are the same. The phrase then lists these hyperparameters.
    """
    baselines = [one for one in arms if one.is_baseline]
    if baseline is None or not baselines:
        return None
    there = {name for one in baselines for name in one.arm.values}
    shared = ", ".join(name for name in dotted if name in there and name not in baseline)
    named = ", ".join(setting(name, value) for name, value in baseline.items()) or "the experiment without changes"
    return f"{named} with the same {shared} as the arm" if shared else named


def _about_stand_ins(arms: Sequence[ArmStatistics], dotted: Sequence[str]) -> list[str]:
    found: dict[str, list[str]] = {}
    for one in arms:
        if made := stand_in(one.marks):
            found.setdefault(made, []).append(arm_words(one.arm.values, dotted))
    return [
        warning(made, "all arms" if len(named) == len(arms) else f"arm{'s' * (len(named) > 1)}: {'; '.join(named)}")
        for made, named in found.items()
    ]


def _unnamed(manifest: SweepManifest, arms: Sequence[ArmStatistics]) -> list[str]:
    plans, stage = [one.arm.trials[0].plan for one in arms], manifest.stage
    named = [plan.arm if stage is None else stage.named(plan.arm, plan.config) for plan in plans]
    return unnamed_changes(
        [ResolvedArm(arm, plan.config, plan.derived) for arm, plan in zip(named, plans, strict=True)]
    )


def _have_or_hold_out(arms: Sequence[ArmStatistics]) -> str:
    """Return how the arms use different domains: they `hold out` different domains, or `have` different domains."""
    return "hold out" if len({one.held_out for one in arms}) > 1 else "have"


def _about_best(
    manifest: SweepManifest, arms: Sequence[ArmStatistics], dotted: Sequence[str], units: Units
) -> list[str]:
    if not (finished := [one for one in arms if one.n]):
        return []
    if not same_images(manifest.metric, finished):
        return [
            f"No arm is the best: the arms {_have_or_hold_out(finished)} different domains, so "
            f"{manifest.metric} is computed on different images."
        ]
    if manifest.against is not None:
        found = _about_efficient(manifest, arms)
        arms_were, means_are, them = "These arms were", "their means on the test images, which are", "them"
    else:
        words, value = arm_words(finished[0].arm.values, dotted), units.value(finished[0].mean) + "%" * units.percent
        found = [f"Best: {words} with {manifest.metric} {value} (n = {finished[0].n})."]
        if finished[0].n < (most := max(one.n for one in finished)):
            found.append(f"Other arms have up to {most} finished seeds, so the means are over different seeds.")
        arms_were, means_are, them = "This arm was", "its mean on the test images, which is", "it"
    if by_validation(manifest):
        return [*found, *_about_choice(manifest, arms, dotted, units)]
    if len(arms) > 1 and any(map(uses_test_images, manifest.objectives)):
        found.append(
            f"{arms_were} chosen from {len(arms)} arms by {means_are} therefore optimistic. "
            f"{NEW_SEEDS} Choose {them} by validation images instead (guides/tuning.md in the documentation)."
        )
    return found


def _about_choice(
    manifest: SweepManifest, arms: Sequence[ArmStatistics], dotted: Sequence[str], units: Units
) -> list[str]:
    """Return a sentence for each arm that was chosen by validation images, with its value on the test images."""
    found, on_test = [], on_test_images(manifest, arms)

    def apart(amount: float) -> str:
        return f"{units.value(abs(amount))}{' points' * units.percent} {'worse' if amount > 0 else 'better'}"

    for one in chosen_arms(manifest, arms)[:LABELLED]:
        if (measured := on_test.get(one.key)) is None or measured.optimism is None:
            continue
        value, optimism = units.value(measured.value) + "%" * units.percent, measured.optimism
        untuned = "" if measured.untuned is None else f" (the untuned model: {apart(measured.untuned)})"
        found.append(
            f"On the test images, which had no part in the choice, {arm_words(one.arm.values, dotted)} has {value}: "
            f"{apart(optimism)} than the value by which it was chosen from {len(arms)} arms{untuned}."
        )
    return found


def pair_label(
    arm: Mapping[str, Json], other: Mapping[str, Json], dotted: Sequence[str], baseline: Collection[str] | None = None
) -> str:
    """Return the label of a comparison of `arm` with `other`, such as `rank 4 against 8`.

    `dotted` lists the varied hyperparameters. Those that are not in `baseline` have the same values in both arms. The
    label begins with these common values, as in `lr 0.1, rank 4 against 8`. Without `baseline`, it begins with all
    common values.
    """
    differing = [name for name in dotted if (name in arm, arm.get(name)) != (name in other, other.get(name))]
    apart = differing if baseline is None else baseline
    shared = [name for name in dotted if name in arm and name in other and name not in apart]
    here = f"{arm_words(arm, shared)}, " if shared else ""
    if len(differing) == 1 and differing[0] not in IN_WORDS and differing[0] in arm and differing[0] in other:
        return f"{here}{arm_words(arm, differing)} against {shown_setting(other[differing[0]])}"
    return f"{here}{arm_words(arm, differing)} against {arm_words(other, differing)}"


def about_comparison(manifest: SweepManifest, found: Comparison, units: Units, other: str = "the baseline") -> str:
    """Return sentences that state the result of a comparison with an arm that the sentences call `other`.

    In the report, the sentences follow a label such as `rank 4 against 8:`.
    """
    doubts = []  # raised by the tests that do not assume normality
    if found.bootstrap is not None and found.bootstrap[0] <= 0 <= found.bootstrap[1]:
        doubts.append(f"the bootstrap interval {units.interval(found.bootstrap)} contains zero")
    if found.exact_can_tell and found.p_exact_holm is not None and found.p_exact_holm > LEVEL:
        p = shown_p(found.p_exact_holm)
        doubts.append(f"the exact test does not detect the difference (p {p} after {found.correction}'s correction)")
    (said,) = texts(
        "comparison",
        found=found,
        units=units,
        minimised=manifest.mode == "min",
        of_seeds=len(manifest.seeds),
        needed=shown_seeds(found.seeds_range, beyond="more than 10,000"),
        doubts=doubts,
        until=manifest.until_decided,
        other=other,
        only_equal_here=_only_equal_here(manifest, found),
    )
    if manifest.comparisons and found.direction_only:
        zero = f"its simultaneous 95% interval {units.interval(found.simultaneous)} contains zero"
        said += f" Only the direction is significant: {zero}."
    return said


def _only_equal_here(manifest: SweepManifest, found: Comparison) -> bool:
    """Return whether two arms are equivalent on the test images, but perhaps not on other images."""
    effect = manifest.until_decided.effect(manifest.metric) if manifest.until_decided else None
    if effect is None or found.verdict != "within" or found.images_equivalence is None:
        return False
    return max(map(abs, found.images_equivalence)) >= effect
