"""The report's warning about surrogate images, which replace the images of a text-to-image generator."""

import csv
import io
import re
from dataclasses import replace

import pytest

from fedsweep.report.formats import data_frame
from fedsweep.results import TrialPlan
from fedsweep.results.records import STAND_INS, SYNTHETIC
from tests.report.helpers import printed, tabulate

SENTENCE = f"Synthetic images: {STAND_INS['surrogate']} "


def marked(trials, sources):
    """Add two finished seeds for each rank in `sources`, which maps ranks to the source of their synthetic images."""
    for rank, source in sources.items():
        for seed in range(2):
            trials.add(rank, seed, [0.2, 0.5 + seed / 100], marks={SYNTHETIC: source} if source else {})
    return trials


@pytest.mark.parametrize(
    ("sources", "where"),
    [
        ({4: "surrogate", 8: "surrogate"}, "(all arms)."),
        ({4: "surrogate", 8: None}, "(arm: rank 4)."),
        ({4: "folder", 8: "surrogate", 16: "surrogate"}, "(arms: rank 8; rank 16)."),
    ],
)
@pytest.mark.parametrize("width", [60, 120])
def test_surrogate_images_are_named_with_their_arms_in_every_format(manifest, trials, sources, where, width):
    table = tabulate(manifest(), marked(trials, sources))
    for text in (printed(table, width), table.markdown()):
        assert re.sub(r"\s+", " ", text).count(SENTENCE + where) == 1
    rows = csv.DictReader(io.StringIO(data_frame.csv(table)))
    assert {int(row["lora.rank"]): row[SYNTHETIC] or None for row in rows} == sources


def test_images_of_a_real_generator_appear_only_in_the_csv(manifest, trials):
    table = tabulate(manifest(), marked(trials, {4: "folder", 8: None}))
    assert "Synthetic" not in table.markdown() + printed(table)
    assert [row[SYNTHETIC] for row in csv.DictReader(io.StringIO(data_frame.csv(table)))] == ["folder", ""]


def test_without_synthetic_images_none_are_mentioned(manifest, trials):
    table = tabulate(manifest(), marked(trials, {4: None, 8: None}))
    assert "synthetic" not in (table.markdown() + printed(table) + data_frame.csv(table)).lower()


def test_a_sweep_over_the_source_keeps_its_own_column(manifest, trials):
    marked(trials, {4: "surrogate", 8: None})
    for place, trial in enumerate(trials.records):
        source = {"name": "surrogate", "share": 0.1} if trial.plan.marks else {"name": "folder", "set": "mine"}
        trials.records[place] = replace(trial, plan=trial.plan.model_copy(update={"arm": {SYNTHETIC: source}}))
    table = tabulate(manifest(varied=(SYNTHETIC,), baseline=None), trials)
    assert sorted(row[SYNTHETIC][:18] for row in csv.DictReader(io.StringIO(data_frame.csv(table)))) == [
        '{"name": "folder",',
        '{"name": "surrogat',
    ]
    assert f"{SENTENCE}(arm: synthetic surrogate (share 0.1))." in table.markdown()


def test_plans_of_older_trials_can_be_read(trials):
    trials.add(4, 0, [0.2], marks={SYNTHETIC: "surrogate"})
    now = trials.records[0].plan
    older = now.model_dump(mode="json")
    assert TrialPlan.of(older, "trial.json") == now
    del older["marks"]
    assert TrialPlan.of(older, "trial.json").marks == {}
