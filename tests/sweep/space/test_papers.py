"""The search spaces of the papers, run on tiny data sets in the layout of the published data."""

import csv
import io
from pathlib import Path

import pytest

from fedsweep.preparation.plan import Options, make_plan
from fedsweep.preparation.prepare import prepare
from fedsweep.sweep.plan.plan import Plan
from tests.preparation.layouts.trees import grow
from tests.sweep.helpers import fedsweep, newest, table

DOMAINNET = ["clipart", "infograph", "painting", "quickdraw", "real", "sketch"]
NICO = ["autumn", "dim", "grass", "outdoor", "rock", "water"]
TINY = {"img_size": 32, "patch_size": 16, "embed_dim": 24, "num_blocks": 12, "pretrained": "none", "name": "timm"}
VIT, MIXER = {**TINY, "model": "vit_tiny_patch16_224", "num_heads": 2}, {**TINY, "model": "mixer_s16_224"}
QUICK = ["data.size=32", "federation.rounds=1", "local.batch_size=8", "lora.rank=2", "lora.alpha=2.0"]
METHODS = ["all_large", "all_small", "inclusivefl", "depthfl", "fedra"]


def plant(root: Path, domains: list[str], folder: str, lists: str) -> None:
    """Write three classes with four training and two test images each, and the split lists of the data set."""
    texts = {}
    for domain in domains:
        for split, images in (("train", range(4)), ("test", range(4, 6))):
            lines = [
                f"{folder}{domain}/class_{label}/{domain}_{image}.jpg {label}" for label in range(3) for image in images
            ]
            texts[f"{lists}/{domain}_{split}.txt"] = "\n".join(lines) + "\n"
    named = {line.rsplit(" ", 1)[0] for text in texts.values() for line in text.splitlines()}
    grow(root, named, texts)


def test_the_search_over_fedbricks_weights_contains_the_weight_of_the_printed_norm():
    plan = Plan.read("ablations/brick_lambda", {}, {})
    assert (plan.base.method.name, plan.base.method.distillation_norm) == ("fedbrick", "mean")
    low, high = plan.space.space["method.lambda_d"].loguniform
    tokens, features = 17, 64  # of digits_vit: the sum of Eq. 24 has this many times the size of the mean
    assert low <= plan.base.method.lambda_d < plan.base.method.lambda_d * tokens * features <= high / 2


def test_the_search_space_of_table_1_finds_the_mixer_and_its_data(tmp_path, monkeypatch):
    plant(tmp_path / "raw", NICO, "NICO_DG/", "NICO_DG_official")
    monkeypatch.setenv("FEDSWEEP_DATA", str(tmp_path / "data"))
    prepare(make_plan(Options("nico", 32), tmp_path / "raw"), workers=1)
    changes = {"backbone": MIXER, "data.size": 32, "lora.rank": 2, "lora.alpha": 2.0}
    plan = Plan.read("papers/fedra/table1_nico_mixer", changes, {"seeds": [0]})
    plan.preflight()
    paper = [plan.reference.value(arm, "accuracy/mean") for arm in plan.arms]
    assert paper == pytest.approx([0.8419, 0.3921, 0.6938, 0.7228, 0.7757])


@pytest.mark.slow
def test_one_command_runs_table_1(tmp_path, monkeypatch):
    space = "papers/fedra/table1_domainnet"
    plant(tmp_path / "raw", DOMAINNET, "", "splits")
    monkeypatch.setenv("FEDSWEEP_DATA", str(tmp_path / "data"))
    fedsweep(tmp_path, "data", "prepare", "domainnet", "--root", "raw", "--size", "32")

    change = "backbone={" + ", ".join(f"{name}: {value}" for name, value in VIT.items()) + "}"
    done = fedsweep(tmp_path, "tune", space, change, *QUICK, "--seeds", "0", "--gpus-per-trial", "0", "--at-once", "1")
    rows = {row["method"]: row for row in csv.DictReader(io.StringIO(table(tmp_path, space)))}
    assert list(rows) == METHODS
    paper = [float(rows[method]["reference"]) for method in METHODS]
    assert paper == pytest.approx([0.7717, 0.3230, 0.5597, 0.5500, 0.6390])
    assert all(0 <= float(row["mean"]) <= 1 and row["finished"] == "1" for row in rows.values())
    assert "Paper: values as printed in FedRA (Su, Li and Xue), Table 1, DomainNet" in " ".join(done.stdout.split())
    page = (newest(tmp_path, space).folder / "report" / "table.md").read_text()
    assert page.count("*paper*") == 5
    assert all(f"| {domain} |" in page for domain in DOMAINNET)
