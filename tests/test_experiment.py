"""A run as its configuration says, and as it goes on after a stop."""

import pytest

from fedsweep.checkpoint import Checkpoint, load, load_history, save
from fedsweep.experiment import RunConfig, build, run, run_durably
from fedsweep.federation import federate
from tests.compare import identical, identical_rounds


@pytest.fixture
def short(tiny) -> RunConfig:
    """One client of four blocks on whole domain data."""
    return tiny.override({"data.domains": ["plain"], "federation.depths": [4]}, "test")


def test_a_built_federation_holds_what_its_config_says(tiny):
    built = build(tiny.override({"seed": 9}, "test"))
    assert [(client.id, client.capacity, len(client.train)) for client in built.clients] == [
        ("plain", 12, 1438), ("inverted", 6, 1438), ("noisy", 3, 1438),
    ]  # fmt: skip
    assert (built.seed, built.trainer.seed, built.server.num_layers, len(built.domains)) == (9, 9, 12, 3)
    assert not built.model.training


def test_a_run_is_its_federation_played(short):
    config = short.override({"federation.rounds": 1}, "test")
    assert identical_rounds(run(config), federate(build(config)))


def test_a_run_resumes_from_a_checkpoint(short, tmp_path):
    untuned, first, second = run(short)
    save(tmp_path / "checkpoint", Checkpoint(1, first.state, ()))
    resumed = list(run(short, resume=load(tmp_path / "checkpoint", like=untuned.state)))
    assert identical_rounds(resumed, [second])
    assert list(run(short, resume=Checkpoint(2, second.state, ()))) == []


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_a_durable_run_goes_on_where_it_was_stopped(short, tmp_path, stop):
    expected = [(result.round, dict(result.metrics)) for result in run(short)]
    path = tmp_path / "trial" / "checkpoint.safetensors"
    stopped = run_durably(short, path)
    begun = [next(stopped) for _ in range(stop)]
    stopped.close()
    assert identical(load_history(path), begun)

    whole = list(run_durably(short, path))
    assert identical(whole[:stop], begun)
    assert [(record.round, dict(record.metrics)) for record in whole] == expected
    assert identical(load_history(path), whole)
