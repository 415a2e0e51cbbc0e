"""The columns that result tables can show in addition to the objective.

A column is one of the named columns in `COLUMNS`, the first round that reaches a target, or any metric of a round.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from fedsweep.common.errors import UserError, near
from fedsweep.results import TrialRecord
from fedsweep.results.arms import is_accuracy, short_names
from fedsweep.results.history import last, simulated_seconds, total_megabytes, uses_test_images
from fedsweep.results.pareto import Mode

TARGETS = ("rounds_to=", "simulated_hours_to=")
"""The beginnings of the names of columns that tell when the objective reached a target."""
ALWAYS_SHOWN = {
    *("arm", "n", "mean", "paper", "sd", "difference", "95% interval", "Holm p", "efficient", "note"),
    *("pairs", "95% of mean", "95% t", "95% bootstrap", "p", "exact p", "effect", "detectable", "seeds needed"),
    *("seeds", "95% one arm", "90% equivalence", "seeds_of_verdict", "equivalence_low"),
    *("equivalence_high", "on test", "optimism", "test_mean", "chosen_by"),
    *("mean_low", "mean_high", "mean_of_last_4_rounds", "reference", "reference_source", "baseline", "synthetic"),
    *("n_common", "interval_low", "interval_high", "bootstrap_low", "bootstrap_high", "verdict"),
    *("95% seeds and images", "images_low", "images_high"),
    *("95% simultaneous", "simultaneous_low", "simultaneous_high", "direction_only"),
    *("p_holm", "p_exact", "p_exact_holm", "seeds_needed", "seeds_needed_low", "seeds_needed_high"),
    *("finished", "pruned", "diverged", "failed", "unfinished", "last_round", "value_at_last_round"),
}
"""Columns that every report or every `table.csv` contains, whether or not they are requested."""
OF_OTHER_TABLES = {
    *("95% of difference", "degrees of freedom", "F", "forests", "hyperparameter", "level", "share"),
    *("against", "domain", "member", "metric", "outcome", "round", "seed", "trial"),
    *("n of A", "n of B", "mean of A", "mean of B", "Bonferroni p", "p_bonferroni", "p_exact_bonferroni"),
    *(f"{name}_{side}" for name in ("arm", "mean", "n", "sd", "space", "sweep") for side in "ab"),
    "same_images",
}
"""Columns of the report's other tables and files, and of `fedsweep compare`. A request for them adds nothing."""
BY_MEAN = ("in_domain_", "out_of_domain_")
"""Prefixes of columns of `table.csv` with the statistics of the means in and out of domain."""
ON_DOMAIN = ("accuracy/domain/", "accuracy/out_of_domain/")
"""Prefixes of the accuracies on a single domain, whose name is also the name of a column."""
SEEDS = "_seeds"  # ends the name of a column of `table.csv` that counts the seeds that reached a target


@dataclass(frozen=True)
class Column:
    """A column of result tables.

    The column has one value for each trial. Tables show the mean of these values over the finished trials of an arm.
    """

    name: str
    """The name in a search space, in `--columns` and in table.csv."""
    heading: str
    of: Callable[[TrialRecord], float | None]
    """A function that returns the value of a trial: an accuracy from 0 to 1, MB (10^6 bytes), seconds, or a number."""
    meaning: str
    """The definition, which is shown in parentheses after the heading."""
    percent: bool = False
    digits: int | None = None
    """Number of decimals to show; None for four significant digits."""
    measured: bool = False
    """True if the value changes when a run is repeated, like time and memory."""
    of_domain: bool = False
    """True for the accuracy on a domain. Arms may hold out the domain, so their values can differ in kind."""
    on_test: bool = False
    """True if the value is measured on test images."""


def _last(metric: str, trial: TrialRecord) -> float | None:
    found = last(trial.history, metric)
    return found if found is not None and math.isfinite(found) else None


def _on_domain(domain: str, trial: TrialRecord) -> float | None:
    found = [_last(f"{prefix}{domain}", trial) for prefix in ON_DOMAIN]
    return next((value for value in found if value is not None), None)


def _megabytes(metric: str, trial: TrialRecord) -> float:
    return sum(record.metrics.get(metric, 0.0) for record in trial.history) / 1e6


def _mean_of_rounds(metric: str, trial: TrialRecord) -> float | None:
    values = [record.metrics[metric] for record in trial.history if record.round and metric in record.metrics]
    return sum(values) / len(values) if values else None


def _gpu_seconds(trial: TrialRecord) -> float | None:
    if not trial.attempts:
        return None
    seconds, gpus = 0.0, [(one.gpus, one.round) for one in trial.attempts]
    for record in trial.history:
        # The attempt that ran the round is the first one that reached it, or the last one, whose report may be missing.
        share = next((given for given, reached in gpus if reached is not None and record.round <= reached), gpus[-1][0])
        seconds += share * record.seconds
    return seconds


def _most_megabytes(numbers_of_bytes: Iterable[int | None]) -> float | None:
    known = [number for number in numbers_of_bytes if number is not None]
    return max(known) / 1e6 if known else None


def _rounds_to(target: float, metric: str, mode: Mode, trial: TrialRecord) -> float | None:
    """Return the first round whose metric is at least as good as the target, or None if there is no such round."""
    sign = 1 if mode == "max" else -1
    known = ((record.round, record.metrics.get(metric, math.nan)) for record in trial.history)
    return next((float(number) for number, found in known if sign * found >= sign * target), None)


def _simulated_hours(trial: TrialRecord) -> float | None:
    seconds = simulated_seconds(trial.history)
    return None if seconds is None else seconds / 3600


def _hours_to(target: float, metric: str, mode: Mode, trial: TrialRecord) -> float | None:
    """Return the simulated hours until `_rounds_to`, or None if there is no such round or no simulated time."""
    last = _rounds_to(target, metric, mode, trial)
    if last is None or _simulated_hours(trial) is None:
        return None
    return (simulated_seconds([one for one in trial.history if one.round <= last]) or 0.0) / 3600


COLUMNS: Mapping[str, Column] = {
    column.name: column
    for column in (
        Column("mean_over_domains", "mean of domains", partial(_last, "accuracy/mean"),
               "accuracy in percent, averaged over domains with equal weights", percent=True, on_test=True),
        Column("worst_domain", "worst domain", partial(_last, "accuracy/worst_domain"),
               "accuracy in percent on the worst domain of each seed", percent=True, on_test=True),
        Column("domain_spread", "sd of domains", partial(_last, "accuracy/domain_spread"),
               "standard deviation of the accuracy over domains, with divisor n, in percentage points",
               percent=True, on_test=True),
        Column("out_of_domain", "out of domain", partial(_last, "accuracy/out_of_domain_mean"),
               "accuracy in percent, averaged over the domains of which no client of the arm has images",
               percent=True, on_test=True),
        Column("mean_client", "mean client", partial(_last, "accuracy/clients/mean"),
               "accuracy in percent on each client's own test images, averaged over honest clients",
               percent=True, on_test=True),
        Column("worst_client", "worst client", partial(_last, "accuracy/clients/worst"),
               "accuracy in percent of each seed's worst honest client on its own test images",
               percent=True, on_test=True),
        Column("bottom_clients", "bottom 10% clients", partial(_last, "accuracy/clients/bottom_10"),
               "accuracy in percent on own test images, averaged over each seed's worst 10% of the honest clients",
               percent=True, on_test=True),
        Column("megabytes", "MB sent", lambda trial: total_megabytes(trial.history),
               "10^6 bytes sent in both directions in the whole run"),
        Column("megabytes_up", "MB up", partial(_megabytes, "bytes/up"),
               "10^6 bytes sent by clients in the whole run"),
        Column("megabytes_down", "MB down", partial(_megabytes, "bytes/down"),
               "10^6 bytes sent to clients in the whole run"),
        Column("parameters_trained", "trained parameters", partial(_mean_of_rounds, "parameters/trained"),
               "number per client, averaged over clients and rounds", digits=0),
        Column("parameters_held", "held parameters", partial(_mean_of_rounds, "parameters/held"),
               "number per client, including frozen ones, averaged over clients and rounds", digits=0),
        Column("simulated_hours", "simulated hours", _simulated_hours,
               "time that the whole run would take on the clients' devices"),
        Column("seconds", "seconds", lambda trial: sum(one.seconds for one in trial.history),
               "measured time of training and evaluation in the whole run", measured=True),
        Column("gpu_seconds", "GPU seconds", _gpu_seconds,
               "measured time of training and evaluation, multiplied by the trial's share of a GPU", measured=True),
        Column("peak_memory", "peak MB", lambda trial: _most_megabytes(one.memory for one in trial.history),
               "peak main memory of the process during the trial, in 10^6 bytes", measured=True),
        Column("gpu_memory", "peak GPU MB", lambda trial: _most_megabytes(one.peak for one in trial.attempts),
               "peak GPU memory during the trial, in 10^6 bytes", measured=True),
    )
}  # fmt: skip
"""The named columns. `rounds_to=NUMBER`, `simulated_hours_to=NUMBER` and all metrics are columns, too."""


PRINTED = {
    **{column.heading: column.name for column in COLUMNS.values()},
    "in domain": "accuracy/mean",
    "mean in domain": "accuracy/mean",
    "mean out of domain": "out_of_domain",
    "worst_domain_accuracy": "worst_domain",
    "worst_client_accuracy": "worst_client",
    "megabytes_sent": "megabytes",
    "megabytes/sent": "megabytes",
}
"""The name of each column, keyed by its heading in tables, or by its name in `table.csv` or in MLflow."""
_REACHED = re.compile(r"(?P<what>rounds|simulated hours) to (?P<target>[^%]+)(?P<percent>%?)")


def column_name(printed: str) -> str:
    """Return the name of a column that is given by its name or its heading.

    >>> column_name("worst domain"), column_name("rounds to 70%"), column_name("loss/test")
    ('worst_domain', 'rounds_to=0.7', 'loss/test')
    """
    if printed.startswith(TARGETS):
        return printed.removesuffix(SEEDS)
    if found := _REACHED.fullmatch(printed):
        with suppress(ValueError):
            target = float(found["target"])
            share = round(target / 100, 12) if found["percent"] else target
            return f"{found['what'].replace(' ', '_')}_to={share:g}"
    return PRINTED.get(printed, printed)


def requested(names: Sequence[str], varied: Collection[str] = ()) -> list[str]:
    """Return the names of the requested columns, without those that every report shows or that only other tables have.

    `varied` are the hyperparameters that vary, each of which has a column.

    >>> requested(["mean", "lora.rank", "rank", "worst domain", "MB up"], varied=["lora.rank"])
    ['worst_domain', 'megabytes_up']
    """
    shown = {name for name in names if _adds_nothing(name, varied)}
    return list(dict.fromkeys(column_name(name) for name in names if name not in shown))


def _adds_nothing(name: str, varied: Collection[str]) -> bool:
    """Return whether a column is not among the columns that can be chosen, because it is always or never shown."""
    bare = next((name.removeprefix(prefix) for prefix in BY_MEAN if name.startswith(prefix)), name)
    if bare in ALWAYS_SHOWN or name in OF_OTHER_TABLES or name in varied:
        return True
    return column_name(name) not in COLUMNS and name in short_names(varied).values()


def column(name: str, metric: str, mode: Mode, titles: Mapping[str, str] | None = None) -> Column:
    """Return the column with this name or heading.

    Args:
        name: A name or heading in `COLUMNS`, a metric, a domain, `rounds_to=NUMBER` or `simulated_hours_to=NUMBER`,
            where NUMBER is a target for the objective. If the objective is an accuracy, the target is a share from 0 to
            1. Any other name without a slash is that of a domain, because all metrics have a slash in their names.
        metric: The objective of the sweep.
        mode: Whether larger (`max`) or smaller (`min`) values of the objective are better.
        titles: The labels and units of metrics that plug-ins report, keyed by metric.

    >>> column("loss/train", "accuracy/mean", "max").heading, column("rounds_to=0.7", "accuracy/mean", "max").heading
    ('loss/train', 'rounds to 70%')
    """
    name = column_name(name)
    if name in COLUMNS:
        return COLUMNS[name]
    if name.startswith(TARGETS):
        return _until(name, metric, mode)
    if "/" not in name:
        meaning = "accuracy in percent on this domain"
        return Column(name, name, partial(_on_domain, name), meaning, percent=True, of_domain=True, on_test=True)
    if titles and name in titles:
        return Column(name, name, partial(_last, name), f"{titles[name]}, after the last round")
    percent, tested = is_accuracy(name), uses_test_images(name)
    meaning = "after the last round" + ", in percent" * percent
    return Column(name, name, partial(_last, name), meaning, percent=percent, on_test=tested)


def _until(name: str, metric: str, mode: Mode) -> Column:
    """Return a column such as `rounds_to=0.7`."""
    target = _target(name)
    shown = f"{100 * target:g}%" if is_accuracy(metric) else f"{target:g}"
    some = "`by k of n` if only k of n seeds reach it"
    if name.startswith(TARGETS[0]):
        meaning = f"first round after which the objective reaches the target; {some}"
        return Column(name, f"rounds to {shown}", partial(_rounds_to, target, metric, mode), meaning, digits=1)
    meaning = f"simulated time until the first evaluated round after which the objective reaches the target; {some}"
    return Column(name, f"simulated hours to {shown}", partial(_hours_to, target, metric, mode), meaning)


def _target(name: str) -> float:
    return float(name.partition("=")[2])


def check_columns(
    names: Sequence[str], metrics: Collection[str], objective: str, where: str, varied: Collection[str] = ()
) -> None:
    """Raise UserError for the first mistake that `wrong_columns` finds."""
    for message in wrong_columns(names, metrics, objective, where, varied):
        raise UserError(message)


def wrong_columns(
    names: Sequence[str], metrics: Collection[str], objective: str, where: str, varied: Collection[str] = ()
) -> Iterator[str]:
    """Yield an error message for each unknown or repeated column, and for each invalid target in `rounds_to=TARGET`
    and `simulated_hours_to=TARGET`.

    Args:
        names: The names of the columns.
        metrics: The metrics that rounds report. Each of them is also the name of a column.
        objective: The metric to which the targets refer.
        where: The option or setting that lists the columns, as text for the error message.
        varied: The hyperparameters that vary, each of which has a column.
    """
    known = [*COLUMNS, *metrics]
    domains = {name.removeprefix(prefix) for name in metrics for prefix in ON_DOMAIN if name.startswith(prefix)}
    taken: set[tuple[str, float, bool]] = set()
    for name in names:
        asked = column_name(name)
        is_target = asked.startswith(TARGETS)
        if is_target and (problem := _wrong_target(asked, objective)):
            yield f"{where} needs {problem}, but it contains `{name}`."
            continue
        kind, target = (asked.partition("=")[0], _target(asked)) if is_target else (asked, 0.0)
        meant = kind, target, is_target and name.endswith(SEEDS)
        if meant in taken:
            yield f"{where} lists `{name}` twice."
        taken.add(meant)
        accepted = is_target or asked in {*known, *domains} or _adds_nothing(name, varied)
        if not accepted:
            choices = [*COLUMNS, *(f"{one}NUMBER" for one in TARGETS)]
            rest = f"; choose from {', '.join(choices)} and the metrics that rounds report."
            yield f"{where} lists `{name}`, which is not a column{near(name, known) or rest}"


def _wrong_target(name: str, objective: str) -> str | None:
    """Return what the target in a column such as `rounds_to=TARGET` must be instead, or None if it is valid."""
    kind = f"{name.partition('=')[0]}="
    try:
        value = _target(name)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        return f"a number after `{kind}`, as in `{kind}0.7`"
    if is_accuracy(objective) and not 0 <= value <= 1:
        return f"a share from 0 to 1 after `{kind}`, because the objective is {objective}"
    return None
