"""The example package `examples/fedprox_a`, which adds a method, a data source, an aggregation rule and a metric."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import fedsweep.methods
from fedsweep.data.data_config import data_sources
from fedsweep.federation.rounds import Federation, federate
from fedsweep.methods.base import FederatedMethod
from fedsweep.testing.compare import identical_rounds
from fedsweep.training.aggregation_rules import aggregation_rules
from fedsweep.training.round_metrics import round_metrics
from tests.plugin_packages import forget, write_metadata

EXAMPLE = Path(__file__).parents[2] / "examples" / "fedprox_a"
SMALL = {"federation.rounds": 2, "local.steps": 2, "federation.depths": [4, 2], "data.domains": ["plain", "noisy"]}


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Install the example in this process."""
    write_metadata(tmp_path / "site", (EXAMPLE / "pyproject.toml").read_text())
    for folder in (tmp_path / "site", EXAMPLE):
        monkeypatch.syspath_prepend(folder)
    forget()
    yield
    forget()


@pytest.fixture
def prox(installed: None) -> Callable[..., FederatedMethod]:
    """Return the class of the method."""
    found: Any = fedsweep.methods.ALL[-1]
    assert found.model_fields["name"].default == "fedprox_a"
    return found


def test_the_four_classes_are_found(installed: None) -> None:
    assert fedsweep.methods.ALL[-1].__module__ == "fedsweep_fedprox_a.method"
    assert data_sources()[-1].__module__ == "fedsweep_fedprox_a.data"
    assert aggregation_rules()[-1].__module__ == "fedsweep_fedprox_a.aggregation"
    assert [*round_metrics()] == ["update_norm"]


def test_without_its_term_the_method_equals_fedra_bit_for_bit(
    federation: Callable[..., Federation], prox: Callable[..., FederatedMethod]
) -> None:
    fedra = federation({"method": "fedra"})
    ours = replace(federation({"method": "fedra"}), method=prox(mu=0.0))
    plain = list(federate(fedra))
    assert identical_rounds(plain, federate(ours))
    assert not identical_rounds(plain, federate(replace(federation({"method": "fedra"}), method=prox(mu=10.0))))


def test_the_term_has_the_gradient_of_its_formula(
    federation: Callable[..., Federation], prox: Callable[..., FederatedMethod]
) -> None:
    small = federation({"method": "fedra"})
    model, method = small.model, prox(mu=0.5)
    start = {name: tensor.clone() for name, tensor in model.adapter().items()}
    row = next(
        iter(method.allocate(small.initial_state(), small.cohort(1), small.server, np.random.default_rng(0)).values())
    )
    trained = {name: one for name, one in model.trainable().items() if ".lora_A." in name}
    assert len(row.trained) == small.cohort(1)[0].capacity
    with torch.no_grad():
        for one in trained.values():
            one.add_(2.0)
    images, labels = small.clients[0].train.take(torch.arange(4))
    losses = [
        objective(model, images, labels, row.held)
        for objective in (method.proximal(start, row), prox(mu=0).proximal(start, row))
    ]
    of_blocks = [one for name, one in trained.items() if int(name.split("blocks.")[1].split(".")[0]) in row.trained]
    assert of_blocks
    expected = 0.5 / 2 * sum(4.0 * one.numel() for one in of_blocks)
    assert (losses[0] - losses[1]).item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("count", [1, 2, 5, 6])
def test_the_rule_is_the_median_of_numpy(installed: None, count: int) -> None:
    tensors = torch.randn(count, 3, 4, generator=torch.Generator().manual_seed(count))
    found = aggregation_rules()[-1]().combine(torch.full((count,), 1 / count), tensors)  # type: ignore[attr-defined]
    np.testing.assert_array_equal(found.numpy(), np.median(tensors.numpy(), axis=0))


def test_the_metric_is_the_norm_of_the_difference(installed: None) -> None:
    from types import SimpleNamespace

    names = ("blocks.0.lora_A.default", "blocks.0.lora_B.default", "head.bias")
    before, after = ({name: torch.full((4,), value) for name in names} for value in (0.0, 1.5))
    states = SimpleNamespace(before=SimpleNamespace(adapter=before), after=SimpleNamespace(adapter=after))
    found = round_metrics()["update_norm"]().measure(states)  # type: ignore[arg-type]
    assert found == pytest.approx({"update_norm/lora_a": 3.0, "update_norm/lora_b": 3.0, "update_norm/all": 27**0.5})


@pytest.fixture
def command(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs a Python module in a process in which the example is installed."""
    write_metadata(tmp_path / "site", (EXAMPLE / "pyproject.toml").read_text())
    given = os.environ | {"PYTHONPATH": f"{tmp_path / 'site'}{os.pathsep}{EXAMPLE}", "COLUMNS": "160"}
    given["RAY_AUTH_MODE"] = "disabled"

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        called = [sys.executable, "-m", *words]
        return subprocess.run(called, cwd=tmp_path, env=given, capture_output=True, text=True, check=False)

    return run


@pytest.mark.slow
def test_the_four_classes_pass_the_conformance_tests(command: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    options = ("--method", "fedprox_a", "--data", "tilted_digits", "--aggregation", "median", "--metric", "update_norm")
    done = command("fedsweep.testing", *options, "-q")
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.splitlines()[-1].split(" passed")[0].split()[-1]) >= 30
    unknown = command("fedsweep.testing", "--method", "fedprox_b")
    assert unknown.returncode == 2
    assert unknown.stderr == "fedsweep: `--method` names `fedprox_b`, which does not exist; did you mean `fedprox_a`?\n"


@pytest.mark.slow
def test_an_ablation_over_the_method_and_fedra_runs_and_its_report_names_it(
    command: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    space = yaml.safe_load((EXAMPLE / "search_spaces" / "fedprox_a.yaml").read_text())
    space |= {"fixed": {**space["fixed"], **SMALL}, "seeds": [0, 1]}
    (tmp_path / "search_spaces").mkdir()
    (tmp_path / "search_spaces" / "fedprox_a.yaml").write_text(f"# a test\n{yaml.safe_dump(space)}")
    done = command("fedsweep", "tune", "fedprox_a")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "fedprox_a" in done.stdout
    shown = command("fedsweep", "report", "fedprox_a", "--format", "markdown")
    assert "fedprox_a" in shown.stdout, shown.stdout + shown.stderr
    assert "update_norm/lora_a" in shown.stdout
    assert "Update of LoRA's A (norm), after the last round" in shown.stdout
    (manifest,) = (path for path in (tmp_path / "mlruns").rglob("sweep.json") if (path.parent / "trials").is_dir())
    written = json.loads(manifest.read_text())
    assert written["digests"]["plugins"].startswith("fedsweep-fedprox-a 0.1 (code ")
    assert written["titles"]["update_norm/all"] == "Update of all tensors (norm)"
    assert [*(tmp_path / "mlruns").rglob("metrics.png")]


@pytest.mark.slow
def test_a_broken_entry_point_ends_with_one_sentence_and_exit_code_2(
    command: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    (points,) = tmp_path.rglob("entry_points.txt")
    points.write_text(points.read_text().replace("method:FedProxA", "method:FedProxB"))
    sentence = (
        "the entry point `fedprox_a` in group fedsweep.methods of the installed package fedsweep-fedprox-a 0.1 must be "
        "importable, but `fedsweep_fedprox_a.method:FedProxB` is not (AttributeError: module "
        "'fedsweep_fedprox_a.method' has no attribute 'FedProxB'); repair it, or uninstall fedsweep-fedprox-a.\n"
    )
    run = command("fedsweep", "run", "fedra_digits")
    assert (run.returncode, run.stderr.splitlines(keepends=True)[-1]) == (2, f"fedsweep: {sentence}")
    for words in (("--help",), ("list",)):
        assert command("fedsweep", *words).returncode == 0
    doctor = command("fedsweep", "doctor")
    assert doctor.returncode == 1
    assert f"\u2717 plug-ins: {sentence}" in doctor.stdout
    assert "\u2713 packages: " in doctor.stdout


@pytest.mark.slow
def test_the_plugin_runs_with_its_data_and_rule(command: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    changes = ("method=fedprox_a", "data=tilted_digits", "aggregation.rule=median", "federation.depths=[4, 2, 1]")
    done = command("fedsweep", "run", "fedra_digits", *changes, "federation.rounds=1", "local.steps=1")
    assert done.returncode == 0, done.stderr
    assert "lying" in done.stdout
