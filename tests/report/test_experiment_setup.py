"""The head of the page and of the Markdown table: what was run, on which data, with which code, and for how long."""

from dataclasses import replace
from typing import Any

import pytest

from fedsweep.common.paths import shipped_folder
from fedsweep.common.yaml_values import read_yaml
from fedsweep.report.experiment_setup import Fact
from fedsweep.report.formats import page
from fedsweep.results import Start, SweepManifest, TrialPlan
from fedsweep.results.records import TAKEN_FROM
from tests.report.helpers import tabulate
from tests.report.test_page import Page

DIGITS = read_yaml(shipped_folder() / "experiments" / "fedra_digits.yaml")
VIT = {"name": "timm", "model": "vit_base_patch16_224", "pretrained": "timm"}
RECORDED = {"version": "0.1.0", "commit": "0123456789abcdef0123456789abcdef01234567+"}


@pytest.fixture
def swept(trials):
    """Return a function that adds one finished trial per given change to the plan, of ranks 4, 8, ..."""

    def add(*changes: dict[str, Any]):
        for place, change in enumerate(changes):
            trials.add(4 * (place + 1), 0, [0.2, 0.5, 0.6])
            plan = trials.records[-1].plan.model_copy(update=change)
            trials.records[-1] = replace(trials.records[-1], plan=plan)
        return trials

    return add


def config(**sections: Any) -> dict[str, Any]:
    return {"config": {**DIGITS, **sections}}


def head(table) -> dict[str, str]:
    """Return the facts at the head of the Markdown table, after a check that the page shows the same facts."""
    trials = [trial for one in table.arms for trial in one.arm.trials]
    above = table.markdown().partition("\n|")[0].splitlines()
    assert above[0].startswith("# ")
    facts = dict(line.removeprefix("- ").split(": ", 1) for line in above[2:] if line)
    found = Page(page.html(table, (), trials))
    shown = dict(zip(found.words("dt"), found.words("dd", "time", "code"), strict=False))
    assert {**shown, **{name: value.strip("`") for name, value in facts.items()}} == shown
    return facts


def test_the_head_states_what_was_run(manifest, swept):
    sweep = manifest(overrides={"federation.rounds": 4}, options={"seeds": [0]}, **RECORDED)
    counts = {"images": {"train": 8622, "test": 2160}}
    assert head(tabulate(sweep, swept(config() | counts, config() | counts))) == {
        "Method": "fedra",
        "Backbone": "digits_vit, weights from fedsweep",
        "Data": "digits, 6 domains",
        "Images": "8,622 training, 2,160 test",
        "Partition": "feature_skew",
        "Duration": "1 s, summed over all rounds of 2 trials",
        "Code": "fedsweep 0.1.0, commit 0123456789ab with uncommitted changes",
        "Command": "`fedsweep tune ablations/lora_rank federation.rounds=4 --seeds 0`",
    }


def test_facts_that_differ_between_arms_list_their_values(manifest, swept):
    ways = [
        config(method={"name": name}, partition={"name": "label_skew", "alpha": alpha, "proxy_share": 0.0})
        for name, alpha in [("fedra", 0.1), ("fedms", 0.1), ("all_small", 1.0), ("fedra", 2.0), ("fedag", 5.0)]
    ]
    found = head(tabulate(manifest(), swept(*ways)))
    assert found["Method"] == "differs between arms: fedra; fedms; all_small; fedag"
    assert found["Partition"] == (
        "differs between arms: label_skew (alpha 0.1); label_skew (alpha 1); label_skew (alpha 2); label_skew (alpha 5)"
    )
    assert found["Data"] == "digits, 6 domains"
    ways += [config(method={"name": name}) for name in ("ft", "lfft")]
    assert head(tabulate(manifest(), swept(*ways)))["Method"].endswith("all_small; fedag; 2 more")


@pytest.mark.parametrize(
    ("backbone", "shown"),
    [
        (VIT, "vit_base_patch16_224, weights from timm"),
        ({**VIT, "pretrained": "none"}, "vit_base_patch16_224, untrained (random weights)"),
        ({**VIT, "pretrained": "mine/vit.pth"}, "vit_base_patch16_224, weights from mine/vit.pth"),
        ({"name": "clip", "model": "openai/clip-vit-base-patch32"}, "openai/clip-vit-base-patch32, weights from this"),
        ({"name": "digits_clip", "encoder": "large"}, "digits_clip (encoder large), weights from fedsweep"),
    ],
)
def test_the_backbone_is_named_with_its_weights(manifest, swept, backbone, shown):
    assert head(tabulate(manifest(), swept(config(backbone=backbone))))["Backbone"].startswith(shown)


def test_the_clip_of_the_server_is_named_with_its_weights(manifest, swept):
    method = {"name": "fedag", "clip": {"name": "digits_clip", "encoder": "large", "prompt": "a photo of a {}"}}
    found = head(tabulate(manifest(), swept(config(method=method), config())))
    assert found["CLIP of the server"] == "digits_clip (encoder large), weights from fedsweep"


def test_prepared_data_are_named_with_their_size_and_held_out_domains(manifest, swept):
    data = {"name": "prepared", "set": "mine", "size": 64, "domains": ["a", "b"], "held_out_domains": ["b"]}
    found = head(tabulate(manifest(), swept(config(data=data))))
    assert found["Data"] == "mine, 64 px, 2 domains, held out: b"


def test_sweeps_of_older_versions_leave_out_what_they_did_not_record(manifest, trials):
    trials.add(4, 0, [0.2, 0.5])
    older = manifest().model_dump(mode="json"), trials.records[0].plan.model_dump(mode="json")
    for name in ("version", "commit"):
        del older[0][name]
    del older[1]["images"]
    sweep = SweepManifest.of(older[0], "sweep.json")
    trials.records[0] = replace(trials.records[0], plan=TrialPlan.of(older[1], "trial.json"))
    assert head(tabulate(sweep, trials)) == {
        "Duration": "0 s, summed over all rounds of 1 trial",
        "Command": "`fedsweep tune ablations/lora_rank`",
    }
    assert head(tabulate(manifest(version="0.1.0"), trials))["Code"] == "fedsweep 0.1.0"


def test_rounds_that_a_trial_copied_from_another_are_counted_once(manifest, trials):
    trials.add(4, 0, [0.1] * 1001)
    trials.add(8, 0, [0.1] * 1001)
    start = {"start": Start(key="k0", round=499), "marks": {TAKEN_FROM: "20260101-b2"}}
    trials.records[1] = replace(trials.records[1], plan=trials.records[1].plan.model_copy(update=start))
    expected = "2 min 30 s, summed over all rounds of 2 trials, of which 1 was reused from an earlier sweep"
    assert head(tabulate(manifest(), trials))["Duration"] == expected


def test_settings_that_no_command_changes_are_listed(manifest, swept):
    found = head(tabulate(manifest(options={"objective.metric": "loss/test"}, overrides={"lora.rank": 4}), swept({})))
    assert "Command" not in found
    assert found["Changed settings"] == "lora.rank=4, objective.metric=loss/test"


def test_a_command_is_code_in_markdown_and_contains_no_html(manifest, swept):
    assert Fact("Command", "a ``b`` `c`", typed=True).markdown() == "- Command: ```a ``b`` `c````"
    evil = "<script>alert(1)</script>"
    sweep = manifest(overrides={"backbone.prompt": evil}, **RECORDED)
    markdown = tabulate(sweep, swept(config(backbone={**VIT, "pretrained": f"a\n\n{evil}"}))).markdown()
    assert markdown.count("&lt;script>") == 1
    assert f"'backbone.prompt={evil}'`\n" in markdown, "the command can be copied"
    assert markdown.count("<script>") == 1
    assert "\na" not in markdown
