"""The t-SNE of the global model's features, with its images, points and files."""

import hashlib
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.manifold import TSNE
from sklearn.metrics import silhouette_score

from fedsweep.common.errors import UserError
from fedsweep.common.randomness import derived_seed
from fedsweep.federation.build_and_run import check_content, run, run_resumably
from fedsweep.federation.rounds import federate
from fedsweep.results import TrialPlan, TrialStore
from fedsweep.results.checkpoint import load, save
from fedsweep.results.records import RIGHT
from fedsweep.results.tsne_files import COLOURS, FILES, Embedding, Look, Point, palette
from fedsweep.training import tsne
from fedsweep.training.tsne import draw, embed, features
from fedsweep.types import Domain, ImageSet

ASKED = {"evaluation.tsne_classes": 4, "evaluation.tsne_images": 36}
NAMES = ("ant", "bee", "cat", "dog")


def domain(name: str, labels: list[int]) -> Domain:
    images = torch.arange(len(labels), dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 2, 2)
    test = ImageSet(images, torch.tensor(labels))
    return Domain(name, ImageSet(images[:0], test.labels[:0]), test)


def counts(sample) -> dict[str, list[int]]:
    """Return the number of sampled images of each class, keyed by domain."""
    return {name: np.bincount(part.labels, minlength=2).tolist() for name, part in sample.items()}


def drawn_rows(sample) -> dict[str, list[int]]:
    return {name: part.rows.tolist() for name, part in sample.items()}


def test_images_are_drawn_evenly_over_classes_and_domains_if_there_are_enough():
    domains = [domain("a", [0, 1, 2] * 10), domain("b", [1, 0, 2] * 10)]
    assert counts(draw(domains, NAMES, 2, 20, seed=0)) == {"a": [5, 5], "b": [5, 5]}
    uneven = counts(draw(domains, NAMES, 2, 18, seed=0))
    assert Counter(number for row in uneven.values() for number in row) == {4: 2, 5: 2}
    scarce = [domain("a", [0, 0, 0, 1]), domain("b", [0] * 10 + [1] * 10)]
    assert counts(draw(scarce, NAMES, 2, 16, seed=0)) == {"a": [3, 1], "b": [6, 6]}
    assert counts(draw(scarce, NAMES, 2, 500, seed=0)) == {"a": [3, 1], "b": [10, 10]}
    assert list(draw([domain("a", [2] * 9), scarce[1]], NAMES, 2, 10, seed=0)) == ["b"]


def test_the_draw_depends_on_the_seed_alone():
    domains = [domain("a", [0, 1] * 40), domain("b", [0, 1] * 40)]
    first, again, other = (draw(domains, NAMES, 2, 20, seed) for seed in (0, 0, 1))
    assert drawn_rows(first) == drawn_rows(again) != drawn_rows(other)
    assert all(len(set(rows)) == 10 for rows in drawn_rows(first).values())
    assert sum(map(len, first.values())) == 20


@pytest.mark.parametrize(
    ("labels", "classes", "sentence"),
    [
        (
            [0, 1] * 9,
            5,
            "`evaluation.tsne_classes` must be at most 4, the number of classes of the data, but it is 5.",
        ),
        (
            [0, 3] * 9,
            3,
            "`evaluation.tsne_classes` 3 needs test images of at least two classes, and more images than classes, "
            "but there are 9 images, and the number of their classes is 1.",
        ),
        (
            [0, 1, 2, 3],
            4,
            "`evaluation.tsne_classes` 4 needs test images of at least two classes, and more images than classes, "
            "but there are 4 images, and the number of their classes is 4.",
        ),
    ],
)
def test_too_few_classes_or_images_are_rejected(labels, classes, sentence):
    with pytest.raises(UserError) as refusal:
        draw([domain("a", labels)], NAMES, classes, 20, seed=0)
    assert str(refusal.value) == sentence


def test_too_many_classes_are_rejected_before_a_run(tiny):
    check_content(tiny.override({"evaluation.tsne_classes": 10}, "test"))
    with pytest.raises(UserError, match=r"at most 10, the number of classes of the data, but it is 11\.$"):
        check_content(tiny.override({"evaluation.tsne_classes": 11}, "test"))


@torch.no_grad()
def all_features(model, layers, sample, size: int) -> np.ndarray:
    return torch.cat([features(model, layers, part, size) for part in sample.values()]).numpy()


@pytest.mark.parametrize("held", [tuple(range(12)), (0, 3)])
def test_features_are_the_heads_inputs_after_the_blocks_of_the_state(federation, held):
    small = federation(ASKED, test=40)
    sample = draw(small.domains, small.class_names, 4, 36, small.seed)
    one_by_one, at_once = (all_features(small.model, held, sample, size) for size in (1, 256))
    assert at_once.shape == (36, 64)
    np.testing.assert_allclose(one_by_one, at_once, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        logits = torch.cat([small.model(part.take(torch.arange(len(part)))[0], held) for part in sample.values()])
        torch.testing.assert_close(small.model.backbone.head(torch.from_numpy(at_once)), logits)


def test_positions_are_those_of_scikit_learn_with_a_third_of_few_images_as_perplexity():
    found = np.random.default_rng(0).normal(size=(31, 5)).astype(np.float32)
    state = derived_seed(0, "tsne", "start") % 2**32
    plane, _ = tsne._plane(found, np.arange(31) % 3, 0)
    assert (plane == TSNE(2, init="pca", perplexity=10, random_state=state).fit_transform(found)).all()


def test_points_carry_their_class_domain_and_silhouette(federation):
    small = federation(ASKED, test=60)
    state = small.initial_state()
    found = small.embed(state)
    sample = draw(small.domains, small.class_names, 4, 36, small.seed)
    assert len(found.points) == sum(map(len, sample.values())) == 36
    assert (list(Look.of([found]).colours), list(Look.of([found]).markers)) == (["0", "1", "2", "3"], list(sample))
    expected = Counter((str(int(one)), name) for name, part in sample.items() for one in part.labels)
    assert Counter((point.label, point.domain) for point in found.points) == expected
    labels = torch.cat([part.labels for part in sample.values()])
    score = silhouette_score(all_features(small.model, state.layers, sample, 256), labels)
    assert found.silhouette == pytest.approx(score, rel=1e-5)


def test_separated_classes_have_a_high_silhouette_and_neighbours_in_the_plane(federation, monkeypatch):
    small = federation(ASKED, test=60)
    sample = draw(small.domains, small.class_names, 4, 36, small.seed)
    labels = torch.cat([part.labels for part in sample.values()])
    noise = 0.1 * torch.randn(36, 8, generator=torch.Generator().manual_seed(0))
    apart = torch.nn.functional.one_hot(labels, 8) + noise
    parts = iter(apart.split([len(part) for part in sample.values()]))
    monkeypatch.setattr("fedsweep.training.tsne.features", lambda *given: next(parts))
    found = embed(small.model, (), sample, small.class_names, 256, seed=0)
    assert found.silhouette > 0.6
    for point in found.points:
        others = [one for one in found.points if one is not point]
        nearest = min(others, key=lambda one: math.dist((one.x, one.y), (point.x, point.y)))
        assert nearest.label == point.label


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, 0.0])
def test_a_diverged_model_has_no_figure_and_raises_no_error(federation, broken):
    small = federation(ASKED, test=60)
    state = small.initial_state()
    small.model.backbone.norm.weight.data.fill_(broken)
    assert small.embed(state) is None


def test_the_figure_uses_the_adapter_and_layers_of_the_state(federation):
    small = federation(ASKED, test=60)
    state = small.initial_state()
    before = small.embed(state)
    small.model.load_adapter({name: torch.ones_like(tensor) for name, tensor in state.adapter.items()})
    assert small.embed(state) == before
    assert small.embed(replace(state, layers=(0, 1))) != before


def test_without_classes_nothing_is_drawn(federation):
    assert federation().embed(federation().initial_state()) is None


def test_a_table_is_read_back_unchanged():
    points = (Point(1.25, -3.5, 'a, "b"', "x", 0.125), Point(0.0, 1e-7, "c", "y", -1.0))
    text = Embedding(points).csv()
    assert text.splitlines()[0] == "x,y,class,domain,silhouette"
    assert Embedding.of_csv(text) == Embedding(points)
    assert Embedding(points).silhouette == -0.4375


def test_every_class_has_a_colour_and_every_domain_a_marker():
    classes, domains = [str(one) for one in range(10)], ["a", "b", "c"]
    look = Look.of([Embedding(tuple(Point(0, 0, label, name, 0) for label in classes for name in domains))])
    assert list(look.colours) == classes
    assert len(set(look.colours.values())) == 10 == len(COLOURS)
    assert len(set(look.markers.values())) == 3
    assert len(set(palette(65))) == 65


@pytest.fixture
def with_tsne(tiny):
    """Return the configuration of a run of two rounds on one domain, with a t-SNE at the end."""
    return tiny.override({**ASKED, "data.domains": ["plain"], "federation.depths": [4]}, "test")


def digests(folder) -> list[str]:
    return [hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in FILES]


def test_a_run_writes_its_figure_before_its_last_checkpoint_and_changes_no_round(with_tsne, tmp_path):
    path = tmp_path / "straight" / "checkpoint.safetensors"
    durable = run_resumably(with_tsne, path)
    rounds = [next(durable), next(durable)]
    assert [one.name for one in path.parent.iterdir()] == [path.name]
    rounds += durable
    assert [one.round for one in rounds] == [0, 1, 2]
    assert {one.name for one in path.parent.iterdir()} == {path.name, RIGHT, *FILES}
    points = Embedding.of_csv((path.parent / "tsne.csv").read_text()).points
    assert len(points) == 36
    assert (path.parent / "tsne.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"

    TrialStore(path.parent).plan(TrialPlan(key="k", number=0, arm={}, seed=0, config={}))
    assert TrialStore(path.parent).read().artifacts == {name: path.parent / name for name in FILES}

    stopped = run_resumably(with_tsne, tmp_path / "resumed" / path.name)
    next(stopped), next(stopped)
    stopped.close()
    list(run_resumably(with_tsne, tmp_path / "resumed" / path.name))
    assert digests(tmp_path / "resumed") == digests(path.parent)

    plain = run_resumably(with_tsne.override({"evaluation.tsne_classes": None}, "test"), tmp_path / "plain" / path.name)
    assert [dict(one.metrics) for one in plain] == [dict(one.metrics) for one in rounds]
    assert {one.name for one in (tmp_path / "plain").iterdir()} == {path.name, RIGHT}


def test_a_run_killed_after_its_last_round_has_its_figure(with_tsne, tmp_path, monkeypatch):
    short = with_tsne.override({"federation.rounds": 1}, "test")

    def killed(path, checkpoint):
        if checkpoint.round == 1:
            raise KeyboardInterrupt
        save(path, checkpoint)

    monkeypatch.setattr("fedsweep.federation.build_and_run.save_checkpoint", killed)
    with pytest.raises(KeyboardInterrupt):
        list(run_resumably(short, tmp_path / "checkpoint"))
    assert all((tmp_path / name).exists() for name in FILES)
    untuned = next(run(short))
    assert load(tmp_path / "checkpoint", like=untuned.state).round == 0


def test_the_figure_uses_the_blocks_of_the_servers_model(federation):
    small = federation({**ASKED, "method": "all_small", "federation.rounds": 1}, test=60)
    *_, last = federate(small)
    assert last.state.layers == (0, 1, 2)
    assert len(small.embed(last.state).points) == 36
