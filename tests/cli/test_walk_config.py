"""The dotted name `lora.rank`, which is the same in YAML, in overrides and in a run, and sets the tensors' rank."""

import pytest

from fedsweep.common.config import flat
from fedsweep.federation.run_config import RunConfig
from fedsweep.models import build_model
from fedsweep.sweep.plan.plan import Plan
from tests.cli.conftest import GRID, write

WIDTH, HIDDEN, BLOCKS = 64, 128, 12


@pytest.mark.parametrize("rank", [1, 4])
def test_a_rank_in_the_yaml_is_the_rank_of_every_tensor(tmp_path, monkeypatch, rank):
    monkeypatch.chdir(tmp_path)
    write("search_spaces", "mine", GRID, ("[1, 4, 8, 16]", f"[{rank}, 8]"))
    trials = Plan.read("mine", {}, {}).grid()
    trial = next(one for one in trials if one.arm == {"lora.rank": rank} and one.seed == 1)
    config = RunConfig.of(trial.config, "trial")
    assert flat(config)["lora.rank"] == rank
    assert (config.lora.rank, config.seed) == (rank, 1)

    adapter = build_model(config.backbone, config.lora, num_classes=10, seed=config.seed).adapter()

    shapes = {name: tuple(tensor.shape) for name, tensor in adapter.items() if ".lora_" in name}
    expected = {}
    for block in range(BLOCKS):
        for linear, inputs in (("attn.proj", WIDTH), ("mlp.fc2", HIDDEN)):
            expected[f"backbone.blocks.{block}.{linear}.lora_A.default.weight"] = (rank, inputs)
            expected[f"backbone.blocks.{block}.{linear}.lora_B.default.weight"] = (WIDTH, rank)
    assert shapes == expected


def test_the_flat_names_of_a_run_are_the_dotted_names_of_its_overrides(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base = Plan.read("ablations/lora_rank", {}, {}).base
    names = flat(base)
    assert {"seed", "method.name", "lora.rank", "optimizer.lr", "federation.depths"} <= set(names)
    assert base.override(names, "the same values") == base
