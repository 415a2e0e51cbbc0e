"""The export of every method, which gives the predictions of the evaluation or raises a UserError with the reason."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import fedsweep.export.write
from fedsweep.common.errors import UserError
from fedsweep.export.predict import load
from fedsweep.export.which_trial import Named
from fedsweep.export.write import check_exportable, export
from fedsweep.federation.rounds import Federation, federate
from fedsweep.federation.run_config import RunConfig
from fedsweep.methods.capabilities import ExportObstacle, FrozenBlocks, SeparateModels, predicted
from fedsweep.methods.depthfl import DepthFL
from fedsweep.methods.fedag.method import FedAG
from fedsweep.methods.fedbrick.method import FedBRICK
from fedsweep.methods.fedclip import FedCLIP
from fedsweep.methods.promptfl import PromptFL
from fedsweep.results import Outcome, TrialPlan, TrialStore
from fedsweep.results.checkpoint import Checkpoint, save
from fedsweep.results.history import RoundRecord
from tests.conformance.conftest import SMALL_SERVER

NO_PLACE = "which neither PEFT nor the backbone's library can load"
Played = Callable[..., tuple[Named, Federation, Checkpoint]]


@pytest.fixture
def played(
    federation: Callable[..., Federation], tiny: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Played:
    """Return a function that runs one round of a method on a few images and records it as a finished run."""

    def play(changes: dict) -> tuple[Named, Federation, Checkpoint]:
        changes = {"federation.rounds": 1, "federation.clients_per_round": 1, "lora.rank": 3, **changes}
        small = federation(changes)
        *_, last = federate(small)
        checkpoint = Checkpoint(1, last.state, (RoundRecord(1, dict(last.metrics), 0.0),))
        trial, config = TrialStore(tmp_path / "run"), tiny.override(changes, "test").model_dump(mode="json")
        trial.plan(TrialPlan(key="k1", number=0, arm={}, seed=0, config=config))
        save(trial.checkpoint, checkpoint)
        trial.end(Outcome(outcome="finished", round=1))
        monkeypatch.setattr(fedsweep.export.write, "build", lambda config: small)
        return Named(trial, trial.read(), "tiny", None, ""), small, checkpoint

    return play


def refusal_of(small: Federation) -> str | None:
    """Return the error message if the global model cannot be exported, or else None."""
    method, called = small.method, f"`method` {small.method.name}"
    if not small.fresh:
        return f"{called} trains nothing, so there is nothing to export."
    obstacle = ExportObstacle.of_method(method).export_obstacle(small.server.depths, small.server.num_layers)
    own = "; `--client` exports a client's own model" if isinstance(method, SeparateModels) else ""
    return obstacle and f"{called} cannot be exported: the global model predicts with {obstacle}, {NO_PLACE}{own}."


def test_a_method_exports_the_logits_of_its_evaluation_or_raises_an_error(played: Played, chosen, tmp_path):
    named, small, checkpoint = played(chosen)
    if (expected_refusal := refusal_of(small)) is not None:
        with pytest.raises(UserError) as refusal:
            export(named, tmp_path / "out")
        assert str(refusal.value) == expected_refusal
        assert sorted(one.name for one in tmp_path.iterdir()) == ["run"]
        return
    card, layers = export(named, tmp_path / "out"), checkpoint.state.layers
    above = [] if len(layers) == small.server.num_layers else [f"blocks above the first {len(layers)}"]
    added = sorted({name.partition(".")[0] for name in small.fresh} - {"backbone"})
    assert card.form == ("peft" if small.method.needs.lora else "whole")
    assert card.left_out == (*above, *added)
    assert (card.round, card.outcome, card.metrics) == (1, "finished", dict(checkpoint.history[0].metrics))
    small.model.load_adapter(checkpoint.state.adapter)
    test = small.domains[1].test  # the export itself compares logits on other images
    expected = predicted(small.method, checkpoint.state, small.trainer.reader, test)
    found = load(tmp_path / "out").logits(test.take(torch.arange(len(test)))[0])
    rounding = 1e-5 * max(1.0, float(expected.abs().max()))  # the largest logit of this random CLIP is 1,345
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=rounding)
    assert torch.equal(found.argmax(1), expected.argmax(1))
    small.model.load_adapter(small.fresh)
    untuned = predicted(small.method, checkpoint.state, small.trainer.reader, test)
    if FrozenBlocks.of_method(small.method).num_frozen_blocks(checkpoint.state) < len(layers):
        assert (found - untuned).abs().max() > 100 * (found - expected).abs().max()


@pytest.mark.parametrize(
    ("method", "obstacle"),
    [
        (PromptFL(), "learned vectors before the classes' names"),
        (FedCLIP(), "an adapter after the image encoder"),
        (DepthFL(), "heads after 3, 6, 9 blocks"),
        (FedBRICK(over=DepthFL()), "heads after 3, 6, 9 blocks"),
        (FedAG(), "an adapter for each domain and an attention over them, after the server's CLIP"),
    ],
)
def test_a_method_names_the_obstacle_to_its_export(method, obstacle):
    assert method.export_obstacle({3, 6, 12}, 12) == obstacle


def test_a_clients_own_model_is_exported_if_it_has_one(played: Played, tiny, random_clip, tmp_path):
    fedag = {"name": "fedag", **SMALL_SERVER, "clip": {"name": "clip", "model": str(random_clip)}}
    synthetic = {"synthetic": {"name": "surrogate", "share": 0.01}, "partition.proxy_share": 0.2}
    named, small, checkpoint = played({"method": fedag, **synthetic, "federation.clients_per_round": None})
    card = export(named, tmp_path / "out", "noisy")
    assert card.metrics == card.scores == {}  # the recorded accuracies are of the server's model, not of the client's
    assert "| results | none, because the run did not test this model" in (tmp_path / "out" / "README.md").read_text()
    assert (card.form, card.origin.client, card.left_out) == ("whole", "noisy", ("server",))
    client = next(one for one in small.clients if one.id == "noisy")
    others, test = small.method.client_adapter(checkpoint.state, "plain"), small.domains[1].test
    small.model.load_adapter(small.method.client_adapter(checkpoint.state, "noisy"))
    expected = predicted(small.method, checkpoint.state, small.trainer.reader, test, client)
    found = load(tmp_path / "out").logits(test.take(torch.arange(len(test)))[0])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
    small.model.load_adapter(others)
    assert not torch.allclose(predicted(small.method, checkpoint.state, small.trainer.reader, test, client), expected)


@pytest.mark.parametrize(
    ("changes", "client", "sentence"),
    [
        ({}, "noisy", "`--client` requires a method whose clients have separate models, but the clients of `method` "
         "fedra share one model."),
        ({}, "nosy", "`--client`: there is no client `nosy`; did you mean `noisy`?"),
        ({}, "x", "`--client`: there is no client `x`; the clients are plain, inverted, noisy."),
        ({"method": "depthfl", "method.prediction": "last", "federation.depths": [6, 4, 3]}, None,
         "`method` depthfl cannot be exported: the global model predicts with heads after 6 blocks, "
         f"{NO_PLACE}."),
    ],
)  # fmt: skip
def test_an_export_obstacle_is_reported_before_a_model_is_built(tiny, changes, client, sentence):
    with pytest.raises(UserError) as refusal:
        check_exportable(tiny.override(changes, "test"), client)
    assert str(refusal.value) == sentence


def test_depthfl_is_exported_if_only_the_models_own_head_predicts(played: Played, tmp_path):
    named, *_ = played({"method": "depthfl", "method.prediction": "last"})
    assert export(named, tmp_path / "out").left_out == ("heads",)
