"""Runs that are built from a configuration, and that continue after a stop."""

import pytest

from fedsweep.common.config import flat
from fedsweep.common.errors import UserError
from fedsweep.common.randomness import STREAMS, StreamName, stream
from fedsweep.federation.build_and_run import build, run, run_resumably, split
from fedsweep.federation.derived_values import derived_values
from fedsweep.federation.rounds import federate
from fedsweep.federation.run_checks import undrawn
from fedsweep.federation.run_config import RunConfig
from fedsweep.results.checkpoint import Checkpoint, load, load_history, save
from fedsweep.results.unnamed_changes import COHORT_SHARE, DERIVED, IMAGES, SCALING, STEPS, TRAINED_SHARE
from fedsweep.testing.compare import identical, identical_rounds
from fedsweep.training.attacks import malicious_clients
from fedsweep.training.local_training import batches
from fedsweep.types import RoundResult

pytestmark = pytest.mark.usefixtures("federation")
"""The fixture `federation` copies models that earlier tests built, which saves time."""


@pytest.fixture
def short(tiny) -> RunConfig:
    """Return the configuration of a run whose only client holds four blocks and its domain's training images."""
    return tiny.override({"data.domains": ["plain"], "federation.depths": [4], "data.test_fraction": 0.02}, "test")


def test_a_built_federation_matches_its_configuration(tiny):
    built = build(tiny.override({"seed": 9}, "test"))
    assert [(client.id, client.capacity, len(client.train)) for client in built.clients] == [
        ("plain", 12, 1617), ("inverted", 6, 1617), ("noisy", 3, 1617),
    ]  # fmt: skip
    assert (built.seed, built.trainer.seed, built.server.num_layers, len(built.domains)) == (9, 9, 12, 3)
    assert not built.model.training


@pytest.mark.parametrize(
    ("partition", "depths", "expected"),
    [
        ({"name": "feature_skew"}, [9, 6, 3], {"plain": 9, "inverted": 6, "noisy": 3}),
        ({"name": "feature_skew"}, [7], {"plain": 7, "inverted": 7, "noisy": 7}),
        ({"name": "iid", "clients": 2}, [5, 4], {"client-0": 5, "client-1": 4}),
        (
            {"name": "feature_label_skew", "clients_per_domain": 2},
            [9, 6, 3],
            {"plain/0": 9, "plain/1": 9, "inverted/0": 6, "inverted/1": 6, "noisy/0": 3, "noisy/1": 3},
        ),
        (
            {"name": "feature_label_skew", "clients_per_domain": 2},
            [1, 2, 3, 4, 5, 6],
            {"plain/0": 1, "plain/1": 2, "inverted/0": 3, "inverted/1": 4, "noisy/0": 5, "noisy/1": 6},
        ),
    ],
)
def test_depths_can_be_listed_by_client_by_domain_or_once(tiny, partition, depths, expected):
    config = tiny.override({"partition": partition, "federation.depths": depths}, "test")
    assert {client.id: client.capacity for client in build(config).clients} == expected


@pytest.mark.parametrize("depths", ["dynamic", [12, 6, 3], [7]])
def test_the_depths_of_a_configuration_are_those_that_its_rounds_draw(tiny, depths):
    config = tiny.override({"federation.depths": depths}, "test")
    built = build(config)
    assert {client.capacity for round in range(1, 101) for client in built.cohort(round)} == config.depths()


def test_the_split_does_not_depend_on_the_method_or_the_backbone(tiny):
    skew = {"partition": {"name": "feature_label_skew", "proxy_share": 0.1, "validation_share": 0.2}}
    others = [{"method": "all_small"}, {"lora.rank": 2}, {"optimizer.lr": 1.0}]
    (_, first), *rest = [split(tiny.override({**skew, **more}, "test")) for more in [{}, *others]]
    for _, again in rest:
        assert identical([one.train.rows for one in first.clients], [one.train.rows for one in again.clients])
        assert identical([one.validation.rows for one in first.clients], [one.validation.rows for one in again.clients])
        assert identical([one.rows for one in first.proxy.values()], [one.rows for one in again.proxy.values()])


def test_the_server_holds_the_proxy_images(tiny):
    built = build(tiny.override({"partition.proxy_share": 0.05}, "test"))
    assert {name: len(images) for name, images in built.server.proxy.items()} == dict.fromkeys(tiny.data.domains, 81)
    assert build(tiny).server.proxy == {}


def test_clients_with_pooled_data_train(tiny):
    changes = {"partition": {"name": "label_skew", "clients": 3}, "federation.rounds": 1, "local.steps": 1}
    changes["data.test_fraction"] = 0.02
    _, result = run(tiny.override(changes, "test"))
    assert result.metrics["loss/train"] > 0


def test_run_yields_the_rounds_of_its_federation(short):
    config = short.override({"federation.rounds": 1}, "test")
    assert identical_rounds(run(config), federate(build(config)))


def test_a_run_resumes_from_a_checkpoint(short, tmp_path):
    untuned, first, second = run(short)
    save(tmp_path / "checkpoint", Checkpoint(1, first.state, ()))
    found = load(tmp_path / "checkpoint", like=untuned.state)
    resumed = list(federate(build(short), RoundResult(found.round, found.state)))
    assert identical_rounds(resumed, [second])
    assert list(federate(build(short), second)) == []


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_a_stopped_run_continues_with_identical_results(short, tmp_path, stop):
    expected = [(result.round, dict(result.metrics)) for result in run(short)]
    path = tmp_path / "trial" / "checkpoint.safetensors"
    stopped = run_resumably(short, path)
    begun = [next(stopped) for _ in range(stop)]
    stopped.close()
    assert identical(load_history(path), begun)

    whole = list(run_resumably(short, path))
    assert identical(whole[:stop], begun)
    assert [(record.round, dict(record.metrics)) for record in whole] == expected
    assert identical(load_history(path), whole)


POOLED = {"name": "iid", "clients": 4}
PAIRS = {"name": "feature_label_skew", "clients_per_domain": 2}
SYNTHETIC = {
    "partition": {"name": "centralized", "with_synthetic": True, "proxy_share": 0.1},
    "federation.depths": [6],
    "synthetic": {"name": "surrogate", "share": 0.05},
}


@pytest.mark.parametrize(
    ("changes", "name", "value"),
    [
        ({"lora.alpha": 8, "lora.scaling": None, "lora.rank": 2}, SCALING, 4.0),
        ({"lora.alpha": None, "lora.scaling": 2.0, "lora.rank": 2}, SCALING, 2.0),
        ({"method": "fedot", "backbone": "digits_clip", "federation.depths": [6]}, SCALING, None),
        ({"partition": POOLED, "federation.depths": [4], "federation.clients_per_round": 1}, COHORT_SHARE, 0.25),
        ({"partition": POOLED, "federation.depths": [4], "federation.clients_per_round": None}, COHORT_SHARE, 1.0),
        ({"partition": PAIRS, "federation.clients_per_round": "one_per_domain"}, COHORT_SHARE, 0.5),
        ({"local": {"batch_size": 16, "steps": 5}}, IMAGES, 80),
        ({"local": {"batch_size": 16, "steps": "epoch", "epochs": 2}}, STEPS, 125.0),
        ({"local": {"batch_size": 16, "steps": "epoch", "epochs": 2}}, IMAGES, None),
        ({"partition.proxy_share": 0.5, "partition.test_share": 0.2}, TRAINED_SHARE, 0.4),
        ({"partition.test_share": 0.2, "partition.tuning_share": 0.5}, TRAINED_SHARE, 0.4),
    ],
)
def test_values_that_a_run_derives_from_its_settings(tiny, changes, name, value):
    assert derived_values(tiny.override(changes, "test")).get(name) == value


def test_the_settings_that_state_a_derived_value_exist(tiny):
    stated = {one for derived in DERIVED.values() for one in derived.stated_by}
    assert len(stated) == 6
    assert stated <= {*flat(tiny), "local.epochs"}


def test_only_a_backbone_with_random_weights_is_called_untrained(tiny):
    assert tiny.untrained_backbone() is None
    backbone = {"name": "timm", "model": "vit_tiny_patch16_224", "pretrained": "none", "img_size": 16, "patch_size": 4}
    said = tiny.override({"backbone": backbone}, "test").untrained_backbone()
    assert said is not None
    assert said.startswith(
        "The backbone is untrained (`backbone.pretrained` is none), so accuracies may stay at chance"
    )


def drawn(config: RunConfig) -> dict[StreamName, list[object]]:
    """Return values that are drawn from each group of random streams, in a form that can be compared."""
    built = build(config)
    rngs = [stream(built.seed, "allocation", round) for round in range(1, 5)]
    state, malicious = built.initial_state(), config.federation.malicious_share
    split = [one.train.labels.tolist() for one in built.clients if not config.trains_on_synthetic]
    cohorts = [built.cohort(round) for round in range(1, 9)]
    attackers = sorted(malicious_clients(config.capacities(), malicious, config.streams))
    orders = [stream(built.trainer.seed, "batches", 1, client.id) for client in built.clients]
    return {
        "partition": [*split, *(one.labels.tolist() for one in built.server.proxy.values()), attackers],
        "cohort": [[(client.id, client.capacity, client.rank) for client in cohort] for cohort in cohorts],
        "allocation": [repr(built.method.allocate(state, built.clients, built.server, rng)) for rng in rngs],
        "batches": [next(batches(99, 9, 1, rng)).tolist() for rng in orders],
        "initial": [tensor.tolist() for name, tensor in sorted(built.fresh.items())],
        "synthetic": [one.images.tolist() for one in built.server.synthetic.values()],
        "evaluation": [one.test.labels.tolist() for one in built.tested(1)[0]],
    }


def test_a_seed_determines_only_the_streams_that_are_named(tiny):
    shares = {f"{use}_share": 0.1 for use in ("test", "tuning", "validation")}
    partition = {"name": "iid", "clients": 3, **shares}
    changes = {"partition": partition, "federation.clients_per_round": 1, "data.domains": ["plain"]}
    config = tiny.override({**changes, "evaluation.images_per_domain": 9}, "test")
    first, used = drawn(config), {*STREAMS} - {"synthetic"}
    for name in used:
        other = drawn(config.override({"seed": 5, "seed_streams": [name]}, "test"))
        assert {one for one in first if other[one] != first[one]} == {name}
    other = drawn(config.override({"seed": 5}, "test"))
    assert {one for one in first if other[one] != first[one]} == used


def test_the_seed_of_synthetic_images_changes_nothing_else(tiny):
    config = tiny.override(SYNTHETIC, "test")
    first, other = drawn(config), drawn(config.override({"seed": 5, "seed_streams": ["synthetic"]}, "test"))
    assert {one for one in first if other[one] != first[one]} == {"synthetic"}


@pytest.mark.parametrize(
    ("changes", "unused"),
    [
        ({}, "partition cohort synthetic"),
        ({"method": "all_small", "partition": {"name": "label_skew", "clients": 3}}, "cohort allocation synthetic"),
        ({"federation.depths": [12], "partition": {"name": "iid", "clients": 1}}, "partition cohort allocation"),
        ({"partition": {"name": "iid", "clients": 3}, "federation.clients_per_round": 3}, "cohort synthetic"),
        ({"federation.clients_per_round": "one_per_domain"}, "partition cohort synthetic"),
        ({"partition": PAIRS, "federation.clients_per_round": "one_per_domain"}, "synthetic"),
        ({"partition": {**PAIRS, "clients_per_domain": 1}}, "partition cohort synthetic"),
        ({"partition.proxy_share": 0.1, "federation.ranks": "dynamic"}, "synthetic"),
        ({"federation.malicious_share": 0.4, "federation.depths": "dynamic"}, "synthetic"),
        (
            {"method": "depthfl", "evaluation.images_per_domain": None},
            "partition cohort allocation synthetic evaluation",
        ),
        (SYNTHETIC, "cohort"),
    ],
)
def test_the_unused_streams_are_those_from_which_nothing_is_drawn(tiny, changes, unused):
    config = tiny.override({"federation.rounds": 3, **changes}, "test")
    first, other = drawn(config), drawn(config.override({"seed": 5}, "test"))
    without = {one for one in first if other[one] == first[one]}
    assert undrawn(config).keys() == without
    assert {*unused.split()} <= without


@pytest.mark.parametrize("wanted", [{"tsne_classes": 2}, {"metrics": ["structural_bias"]}, {"images_per_domain": 9}])
def test_the_stream_of_evaluations_is_used_by_several_options(tiny, wanted):
    named = {"seed": 5, "seed_streams": ["evaluation"], "evaluation.images_per_domain": None}
    changes = {f"evaluation.{name}": value for name, value in wanted.items()}
    assert tiny.override({**named, **changes}, "test").seed_streams == ("evaluation",)
    with pytest.raises(UserError, match=r"names only evaluation \(`evaluation.images_per_domain`, .* are not set\)"):
        tiny.override(named, "test")


def test_a_seed_of_unused_streams_alone_is_an_error_that_lists_the_used_streams(tiny):
    named = {"seed": 5, "method": "all_small", "seed_streams": ["partition", "cohort", "allocation", "synthetic"]}
    with pytest.raises(UserError) as raised:
        tiny.override(named, "test")
    assert str(raised.value).startswith(
        "test: `seed_streams` must name at least one of the random streams from which the run draws, batches, initial, "
        "evaluation, but it names only partition (`partition` feature_skew divides "
    )
    for reason in ("; cohort (all clients", "; allocation (`method` all_small does not", "; synthetic (the run trains"):
        assert reason in str(raised.value)
    assert tiny.override({**named, "seed_streams": ["partition", "batches"]}, "test")


def test_cached_outputs_of_random_blocks_belong_to_their_initial_values(tiny):
    config = tiny.override({"aggregation.lora": "freeze_a"}, "test")
    known = build(config).trainer.reader.identity
    for streams, seed, same in (("all", 1, False), (["initial"], 1, False), (["batches"], 1, True)):
        found = build(config.override({"seed": seed, "seed_streams": streams}, "test")).trainer.reader.identity
        assert (found == known) == same
