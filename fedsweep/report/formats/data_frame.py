"""The ablation table in full precision: DataFrame, CSV and Parquet; and other tables of the report as CSV."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Mapping, Sequence

import pandas as pd

from fedsweep.common.files import inert_cell
from fedsweep.common.yaml_values import Json
from fedsweep.report.arm_statistics import ArmStatistics, asked_columns, domain_metric, ended, notes, printed
from fedsweep.report.holm_corrected_tests import Comparison
from fedsweep.report.table import AblationTable
from fedsweep.report.tuned_arms import tuned_values
from fedsweep.report.units_and_labels import IN_DOMAIN, OUT_OF_DOMAIN, settings
from fedsweep.results.arms import IN_WORDS, arm_label
from fedsweep.results.records import SYNTHETIC, TrialRecord
from fedsweep.results.table_columns import BY_MEAN, COLUMNS, SEEDS, TARGETS

COUNTS = ("n_common", "seeds_of_verdict", "seeds_needed", "seeds_needed_low", "seeds_needed_high", "last_round")
PREFIXES = dict(zip((IN_DOMAIN, OUT_OF_DOMAIN), BY_MEAN, strict=True))
"""Prefixes of the columns with the statistics of the means in and out of domain, by the means' headings."""
TESTED = ("effect", "detectable", "seeds_needed")
"""The fields of `Comparison` that are columns with the same name."""
DROPPED = ("mean_over_domains", "worst_domain", "out_of_domain", "worst_client", "megabytes")
"""Columns that are left out, like those of domains, because the data frame contains them under a longer name."""


def data_frame(table: AblationTable) -> pd.DataFrame:
    """Return the table as a data frame with one row per arm.

    Accuracies range from 0 to 1. Intervals and differences have the unit of the objective.
    """
    return of_records(records(table))


def records(table: AblationTable) -> list[dict[str, object]]:
    """Return the rows of `data_frame(table)`, one dict from column to value for each arm."""
    return [_record(table, one) for one in table.arms]


def of_records(records: Sequence[Mapping[str, object]]) -> pd.DataFrame:
    """Return a data frame with one row per record.

    Columns of counts have an integer type even if some counts are missing.
    """
    found = pd.DataFrame(records)
    counts = [f"{prefix}{name}" for prefix in ("", *PREFIXES.values()) for name in COUNTS]
    return found.astype({name: "Int64" for name in counts if name in found})


def rounds(trials: Sequence[TrialRecord]) -> pd.DataFrame:
    """Return a data frame with one row per trial and round.

    The columns are the hyperparameters of the arm, the seed, the outcome of the trial (missing while it runs), the
    round, and the metrics.
    """
    return pd.DataFrame(
        [
            {
                **{name: _cell(value) for name, value in trial.plan.arm.items()},
                "seed": trial.plan.seed,
                "outcome": trial.outcome.outcome if trial.outcome else None,
                "round": record.round,
                **record.metrics,
            }
            for trial in trials
            for record in trial.history
        ]
    )


def csv(table: AblationTable) -> str:
    """Return `data_frame(table)` as CSV, with enough digits to recover the numbers exactly."""
    return inert_csv(data_frame(table))


def inert_csv(found: pd.DataFrame) -> str:
    """Return a data frame as CSV, in which no text starts like a formula of a spreadsheet (see `inert_cell`)."""
    texts = [name for name in found if not pd.api.types.is_numeric_dtype(found[name])]
    cells = {str(name): [inert_cell(value) for value in found[name]] for name in texts}
    return found.assign(**{name: pd.Series(one, found.index, dtype=object) for name, one in cells.items()}).to_csv(
        index=False
    )


def declared_csv(table: AblationTable) -> str | None:
    """Return the declared comparisons as CSV in full precision, or None if there are none."""
    if not table.declared:
        return None
    rows = [
        {
            "arm": arm_label(row.one.arm.values),
            "against": arm_label(row.other.arm.values),
            "metric": row.test.pair.metric,
            **comparison_columns(row.found, table.manifest.until_decided is not None, declared=True),
        }
        for row in table.declared
    ]
    return inert_csv(of_records(rows))


def by_domain_csv(table: AblationTable) -> str | None:
    """Return the differences by domain as CSV in full precision, or None if there are none."""
    if not table.domain_differences:
        return None
    rows = []
    for row in table.domain_differences:
        (low, high), (images_low, images_high) = (ends or (None, None) for ends in (row.interval, row.images))
        rows.append(
            {
                **_identity(table, row.one),
                "against": arm_label(row.baseline.arm.values),
                "domain": row.domain,
                "metric": row.metric,
                "n_common": row.pairs,
                "difference": row.difference,
                "interval_low": low,
                "interval_high": high,
                "images_low": images_low,
                "images_high": images_high,
            }
        )
    return inert_csv(of_records(rows))


def parquet(table: AblationTable) -> bytes:
    """Return `data_frame(table)` as Parquet, with the sweep's manifest in the metadata entry `fedsweep.manifest`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    found = data_frame(table)
    for name in found:
        if len({type(value) for value in found[name].dropna()}) > 1:
            # A Parquet column has one type, so mixed values are written as JSON.
            found[name] = [None if pd.isna(value) else json.dumps(value) for value in found[name]]
    content = pa.Table.from_pandas(found, preserve_index=False)
    manifest = {b"fedsweep.manifest": table.manifest.model_dump_json().encode()}
    file = io.BytesIO()
    pq.write_table(content.replace_schema_metadata({**(content.schema.metadata or {}), **manifest}), file)
    return file.getvalue()


def _record(table: AblationTable, one: ArmStatistics) -> dict[str, object]:
    targets = [column for column in asked_columns(table.manifest) if column.name.startswith(TARGETS)]
    paper = table.manifest.reference
    value = printed(table.manifest, one, table.manifest.metric)
    furthest, reached = one.arm.reached(table.manifest.metric)
    counts = Counter(ended(trial) for trial in one.arm.trials)
    low, high = one.interval or (None, None)
    tested = table.on_test.get(one.key)
    on_test = one.key in table.tested
    by_looks, declared = table.manifest.until_decided is not None, bool(table.manifest.comparisons)
    compared = comparison_columns(one.comparison, by_looks, declared)
    # If the source of synthetic images is a varied hyperparameter, it already has a column.
    synthetic = SYNTHETIC not in table.names and any(SYNTHETIC in other.marks for other in table.arms)
    return {
        **_identity(table, one),
        "n": one.n,
        "mean": one.mean,
        "sd": one.sd,
        "mean_low": low,
        "mean_high": high,
        "mean_of_last_4_rounds": one.mean_of_last,
        **({"chosen_by": table.manifest.chosen_by} if table.manifest.chosen_by else {}),
        **({"test_mean": tested.value if tested else None} if table.on_test else {}),
        **({"optimism": tested.optimism if tested else None} if table.on_test else {}),
        **({"reference": value, "reference_source": paper.source if value is not None else None} if paper else {}),
        **({"baseline": one.is_baseline, **compared} if table.compared else {}),
        "worst_client_accuracy": one.columns["worst_client"] if on_test else None,
        "worst_domain_accuracy": one.columns["worst_domain"] if on_test else None,
        "worst_domain": one.worst_domain_name if on_test else None,
        **{metric: one.accuracies.get(metric) if on_test else None for metric in _accuracies(table)},
        **_by_mean(table, one),
        **({SYNTHETIC: one.marks.get(SYNTHETIC)} if synthetic else {}),
        "megabytes_sent": one.columns["megabytes"],
        **dict.fromkeys(table.second_column, one.second),
        **({"efficient": one.key in table.efficient} if table.manifest.against else {}),
        **_columns(table, one),
        **{f"{target.name}{SEEDS}": table.reached(one, target) for target in targets},
        **{how: counts[how] for how in ("finished", "pruned", "diverged", "failed", "unfinished")},
        "last_round": furthest if furthest >= 0 else None,
        "value_at_last_round": reached,
        "note": "; ".join(notes(one.arm, table.manifest.metric)),
    }


def _identity(table: AblationTable, one: ArmStatistics) -> dict[str, Json]:
    """Return the values of an arm, which identify it, with the hyperparameters that were tuned for it."""
    values = {name: _cell(value) for name, value in one.arm.values.items()}
    return {
        **{name: values.get(name) for name in table.names if name not in IN_WORDS},
        **({"arm": settings(one, table.names)["arm"]} if {*IN_WORDS} & {*table.names} else {}),
        **{name: _cell(value) for name, value in tuned_values(table.manifest, one).items()},
    }


def _columns(table: AblationTable, one: ArmStatistics) -> dict[str, float | None]:
    """Return the values of the columns of costs and accuracies that have no longer name in the data frame."""
    asked = {column.name: column for column in (*COLUMNS.values(), *asked_columns(table.manifest))}
    left_out = (*DROPPED, *table.manifest.domains)
    return {name: table.column_value(one, asked[name]) for name in one.columns if name not in left_out}


def _cell(value: Json) -> Json:
    """Return the value of a hyperparameter, as JSON text if it is a list or an object."""
    return json.dumps(value) if isinstance(value, list | dict) else value


def _by_mean(table: AblationTable, one: ArmStatistics) -> dict[str, object]:
    """Return the statistics and the comparison of an arm by the means in and out of domain, with prefixed columns."""
    columns: dict[str, object] = {}
    for name, other in table.by_mean.items():
        (own,) = (arm for arm in other.arms if arm.key == one.key)
        low, high = own.interval or (None, None)
        spread = {"n": own.n, "sd": own.sd, "mean_low": low, "mean_high": high}
        found = spread | comparison_columns(own.comparison)
        columns |= {f"{PREFIXES[name]}{column}": value for column, value in found.items()}
    return columns


def comparison_columns(found: Comparison | None, by_looks: bool = False, declared: bool = False) -> dict[str, object]:
    """Return a dict from column to value for a comparison with the baseline; all values are None if `found` is None.

    If `by_looks` is true, the sweep has seeds until decided, and the columns are those of the sequential tests. If
    `declared` is true, the sweep has declared comparisons. In both cases, there are columns with the simultaneous
    interval.
    """
    own = found or Comparison((), None)
    low, high = own.interval or (None, None)
    all_low, all_high = own.simultaneous or (None, None)
    simultaneous = {"simultaneous_low": all_low, "simultaneous_high": all_high, "direction_only": own.direction_only}
    return {
        "n_common": len(own.seeds) if found else None,
        "difference": own.difference,
        "interval_low": low,
        "interval_high": high,
        **(simultaneous if declared or by_looks else {}),
        **(_sequential_columns(own) if by_looks else _test_columns(own)),
        "verdict": own.verdict if found else None,
    }


def _sequential_columns(own: Comparison) -> dict[str, object]:
    low, high = (own.sequential.equivalence_interval if own.sequential else None) or (None, None)
    images_low, images_high = own.images or (None, None)
    near_low, near_high = own.images_equivalence or (None, None)
    return {
        "equivalence_low": low,
        "equivalence_high": high,
        "images_low": images_low,
        "images_high": images_high,
        "images_equivalence_low": near_low,
        "images_equivalence_high": near_high,
        "effect": own.effect,
        "seeds_of_verdict": own.sequential.seeds if own.sequential else None,
    }


def _test_columns(own: Comparison) -> dict[str, object]:
    bootstrap_low, bootstrap_high = own.bootstrap or (None, None)
    images_low, images_high = own.images or (None, None)
    fewest, most = own.seeds_range or (None, None)
    exact = own.exact_can_tell  # if not, the report shows no exact p-value either
    corrected = own.correction.lower()
    return {
        "bootstrap_low": bootstrap_low,
        "bootstrap_high": bootstrap_high,
        "images_low": images_low,
        "images_high": images_high,
        "p": own.p,
        f"p_{corrected}": own.p_holm,
        "p_exact": own.p_exact if exact else None,
        f"p_exact_{corrected}": own.p_exact_holm if exact else None,
        **{name: getattr(own, name) for name in TESTED},
        "seeds_needed_low": fewest,
        "seeds_needed_high": most,
    }


def _accuracies(table: AblationTable) -> list[str]:
    found = {metric for one in table.arms for metric in one.accuracies}
    domains = [domain_metric(name, held_out) for held_out in (False, True) for name in table.manifest.domains]
    return [metric for metric in [*table.means.values(), *domains] if metric in found]
