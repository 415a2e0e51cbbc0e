"""The losses of FedAG's server, compared with tests/references/fedag.py, and the tensors that each step changes."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from fedsweep.common.errors import DivergenceError
from fedsweep.methods.fedag.domain_adapters import AdaptersConfig, DomainAdapters, build_domain_adapters
from fedsweep.methods.fedag.mutual_learning import (
    Lesson,
    MutualLearning,
    ServerConfig,
    margin,
    mutual_divergence,
    normalised,
    warm_up,
)
from fedsweep.models.clip.backbone import DigitsClip
from fedsweep.models.layered import copy_into
from fedsweep.models.timm.digits_vit import DigitsViT
from fedsweep.testing.compare import copied, identical
from fedsweep.types import AdapterState, ImageSet
from tests.references import fedag as reference

DOMAINS = ("art", "photo", "sketch")
DIGITS = tuple("0123456789")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def numpy_of(*tensors: Tensor) -> list[np.ndarray]:
    return [one.detach().double().numpy() for one in tensors]


@pytest.fixture(params=["cosine", "product"])
def adapters(request: pytest.FixtureRequest) -> DomainAdapters:
    config = AdaptersConfig(hidden=24, attention=7, logits=request.param)
    return build_domain_adapters(DigitsClip(), config, DOMAINS, DIGITS, seed=0)


@pytest.fixture
def cosines() -> DomainAdapters:
    return build_domain_adapters(DigitsClip(), AdaptersConfig(attention=7), DOMAINS, DIGITS, seed=0)


def expected_logits(adapters: DomainAdapters, features: Tensor) -> np.ndarray:
    """Return the logits phi (domains, n, classes) of all domains' adapters, computed by the reference."""
    texts, scale = adapters.text.double().numpy(), float(adapters.scale)
    given = scale if adapters.logits == "cosine" else None
    found = []
    for place in range(len(DOMAINS)):
        adapter = adapters.adapters[place]
        w2, b2, w1, b1 = numpy_of(*adapter.parameters())
        rows = [reference.adapted(one, w2, b2, w1, b1) for one in features.double().numpy()]
        found.append([reference.logits(row, texts, given) for row in rows])
    return np.array(found)


@pytest.mark.usefixtures("untouchable_gpu")
def test_adapters_are_built_without_a_gpu_and_without_changing_the_random_state():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        expected = torch.rand(4)
        torch.manual_seed(1)
        build_domain_adapters(DigitsClip(), AdaptersConfig(attention=7), DOMAINS, DIGITS, seed=0)
        assert torch.equal(torch.rand(4), expected)


def test_logits_are_equations_4_and_5(adapters):
    features = 3 * drawn(5, 64)
    phi = adapters.all_logits(features)
    assert phi.shape == (3, 5, 10)
    np.testing.assert_allclose(phi.detach().numpy(), expected_logits(adapters, features), rtol=2e-4, atol=2e-4)
    assert (phi[0] - phi[1]).abs().max() > 1e-4  # each domain has its own adapter


def test_attention_over_adapters_is_equation_8(adapters):
    phi = 4 * drawn(3, 6, 10)
    eta, beta = adapters.attended(phi)
    weights = numpy_of(*adapters.attention.parameters())
    for image in range(6):
        expected, shares = reference.attention(phi[:, image].double().numpy(), *weights)
        np.testing.assert_allclose(eta[image].detach().numpy(), expected, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(beta[:, image].detach().numpy(), shares, rtol=1e-4)
    assert beta.std(0).min() > 1e-3


def test_mutual_divergence_of_a_whole_set_is_equation_6():
    client, server, alpha = 2 * drawn(12, 10), 2 * drawn(12, 10, seed=1), drawn(12, seed=2).abs()
    whole = mutual_divergence(client, server, normalised(alpha))
    expected = reference.divergence(*numpy_of(client, server), alpha.tolist())
    assert whole.item() == pytest.approx(expected, rel=1e-5)
    parts = [
        mutual_divergence(client[rows], server[rows], normalised(alpha)[rows]) for rows in torch.arange(12).split(4)
    ]
    assert torch.stack(parts).mean().item() == pytest.approx(expected, rel=1e-5)
    alike = mutual_divergence(client, server, torch.ones(12))
    assert alike.item() == pytest.approx(reference.divergence(*numpy_of(client, server), [1.0] * 12), rel=1e-5)
    assert abs(alike.item() - expected) > 1e-3


def test_scores_that_are_all_zero_become_equal_weights():
    assert normalised(torch.zeros(4)).tolist() == [1, 1, 1, 1]
    assert normalised(torch.tensor([0.0, 1.0, 3.0])).tolist() == [0.0, 0.75, 2.25]


@pytest.mark.parametrize("scale", [1e-4, 0.01, 1.0, 100.0])
def test_weights_have_the_mean_one_and_do_not_depend_on_the_scale_of_the_scores(scale):
    scores = drawn(5).abs()
    assert normalised(scale * scores).mean().item() == pytest.approx(1, rel=1e-5)
    torch.testing.assert_close(normalised(scale * scores), normalised(scores))
    assert normalised(scores).std() > 0.1


@pytest.mark.parametrize("delta", [0.0, 0.001, 0.3])
def test_the_margin_is_equation_9(delta):
    beta = torch.softmax(2 * drawn(3, 20), 0)
    for own in range(3):
        expected = [reference.regulariser(beta[:, image].double().numpy(), own, delta) for image in range(20)]
        assert margin(beta, own, delta).item() == pytest.approx(np.mean(expected), rel=1e-5)
        assert np.mean(expected) > 0
    assert margin(torch.ones(1, 5), 0, delta) == 0


class Server:
    """A small server with adapters and a ViT; for each of two domains, it has images and a copy of the ViT."""

    def __init__(self, adapters: DomainAdapters, **learning: object) -> None:
        self.adapters = adapters
        self.model = DigitsViT().build(10)
        self.model.add_module("server", adapters)
        self.model.eval().backbone.requires_grad_(True)
        server = ServerConfig(epochs=1, batch_size=5, lr=1e-3, update=learning.pop("update", "joint"))
        self.given = {"config": server, "cross": True, "strength": 0.5, "delta": 0.01, **learning}
        names = [name for name in self.model.movable() if not name.startswith("server.")]
        self.copies = [self._copy(names, seed) for seed in (0, 1)]
        self.lessons = [self._lesson(0, 15), self._lesson(2, 5)]

    def _copy(self, names: list[str], seed: int) -> AdapterState:
        movable = self.model.movable()
        return {name: movable[name].detach() + 0.01 * drawn(*movable[name].shape, seed=seed) for name in names}

    def _lesson(self, place: int, count: int) -> Lesson:
        generator = torch.Generator().manual_seed(place)
        pixels = torch.randint(256, (count, 3, 16, 16), generator=generator, dtype=torch.uint8)
        images = ImageSet(pixels, torch.arange(count) % 10)
        alpha = torch.rand(count, generator=generator)
        return Lesson(place, np.random.default_rng(place), images, self.adapters.seen()(pixels), normalised(alpha))

    @property
    def learning(self) -> MutualLearning:
        """A new training session of the server for one round."""
        return MutualLearning(**self.given, model=self.model, copies=self.copies, lessons=self.lessons)

    def values(self) -> dict[str, AdapterState]:
        adapters = {
            name: dict(part.named_parameters()) for name, part in zip(DOMAINS, self.adapters.adapters, strict=True)
        }
        frozen = dict(self.adapters.clip.named_parameters()) | {"text": self.adapters.text}
        parts = {**adapters, "attention": dict(self.adapters.attention.named_parameters()), "clip": frozen}
        parts |= {f"copy {number}": copy for number, copy in enumerate(self.copies)}
        return {name: copied({key: one.detach() for key, one in part.items()}) for name, part in parts.items()}

    def moved_by(self, act) -> set[str]:
        before = self.values()
        act()
        after = self.values()
        return {name for name in before if not identical(before[name], after[name])}


ROWS = torch.arange(5)
NONE = torch.arange(0)
ALL = {*DOMAINS, "attention", "copy 0", "copy 1"}


def test_an_in_domain_step_moves_its_own_adapter_and_copy_and_nothing_else(cosines):
    server = Server(cosines)
    session = server.learning
    assert server.moved_by(partial(session.in_domain_step, 0, ROWS)) == {"art", "copy 0"}
    assert server.moved_by(partial(session.in_domain_step, 1, ROWS)) == {"sketch", "copy 1"}


def test_a_cross_domain_step_moves_all_adapters_and_their_attention_and_no_copy(cosines):
    server = Server(cosines)
    assert server.moved_by(partial(server.learning.cross_domain_step, [ROWS, ROWS])) == {*DOMAINS, "attention"}
    assert server.moved_by(partial(server.learning.cross_domain_step, [ROWS, NONE])) == {*DOMAINS, "attention"}


def test_a_joint_step_moves_everything_but_clip(cosines):
    server = Server(cosines)
    assert server.moved_by(partial(server.learning.joint_step, [ROWS, ROWS])) == ALL
    assert server.moved_by(partial(server.learning.joint_step, [NONE, ROWS])) == ALL - {"copy 0"}


def test_without_the_cross_domain_part_the_attention_does_not_change(cosines):
    server = Server(cosines, cross=False)
    assert server.moved_by(partial(server.learning.joint_step, [ROWS, ROWS])) == {"art", "sketch", "copy 0", "copy 1"}


@pytest.mark.parametrize("cross", [True, False])
def test_alternating_epochs_change_the_same_tensors_as_joint_epochs(cosines, cross):
    moved = []
    for update in ("joint", "alternating"):
        server = Server(cosines, update=update, cross=cross)
        moved.append(server.moved_by(server.learning.learn))
    assert moved[0] == moved[1] == (ALL if cross else {"art", "sketch", "copy 0", "copy 1"})


def test_warming_up_moves_the_adapters_of_the_lessons_and_lowers_their_loss(cosines):
    server = Server(cosines)
    config = ServerConfig(warmup_epochs=60, batch_size=5, lr=0.01)
    (lesson, _) = server.lessons

    def loss() -> float:
        found = cosines.logits_of(0, lesson.features)
        return torch.nn.functional.cross_entropy(found, lesson.images.labels).item()

    before = loss()
    assert server.moved_by(partial(warm_up, config, cosines, server.lessons)) == {"art", "sketch"}
    assert loss() < before / 2


def test_the_joint_loss_is_equation_10_with_means_over_images(cosines):
    server = Server(cosines)
    session, phis = server.learning, []
    weights = numpy_of(*cosines.attention.parameters())
    for number, lesson in enumerate(server.lessons):
        count = len(lesson.images)
        rows = torch.arange(count)
        loss = session._in_domain(number, rows) + session._cross_domain(number, rows)
        copy_into(session.trained, server.copies[number])
        theta = server.model(lesson.images.images).detach().double().numpy()
        phi = expected_logits(cosines, lesson.features)
        labels = lesson.images.labels.tolist()
        expected = reference.divergence(theta, phi[lesson.place], lesson.quality.tolist())
        for image, label in enumerate(labels):
            eta, beta = reference.attention(phi[:, image], *weights)
            own = reference.cross_entropy(phi[lesson.place, image], label) + reference.cross_entropy(eta, label)
            expected += (own + 0.5 * reference.regulariser(beta, lesson.place, 0.01)) / count
        assert loss.item() == pytest.approx(expected, rel=1e-4)
        phis.append(phi)
    assert np.abs(phis[0][0, 0] - phis[1][0, 0]).max() > 0.01


def test_a_joint_step_descends_the_mean_over_domains(cosines):
    """Adam's first step has the opposite sign of the gradient, which the test computes in one pass over all domains."""
    server = Server(cosines)
    session = server.learning
    total = torch.zeros(())
    for number in (0, 1):
        total = total + (session._in_domain(number, ROWS) + session._cross_domain(number, ROWS)) / 2
    gradients = [*torch.autograd.grad(total, session.shared, retain_graph=True)]
    trained = list(session.trained.values())
    for number in (0, 1):
        own = torch.autograd.grad(session._in_domain(number, ROWS), trained)
        gradients += own
    moving = [*session.shared, *(one for copy in server.copies for one in copy.values())]
    before = [one.detach().clone() for one in moving]
    server.learning.joint_step([ROWS, ROWS])
    for old, new, gradient in zip(before, moving, gradients, strict=True):
        large = gradient.abs() > 1e-5
        assert torch.equal((new - old).sign()[large], -gradient.sign()[large])


@pytest.mark.parametrize("update", ["joint", "alternating"])
def test_each_step_uses_all_domains_and_each_epoch_uses_every_image_once(cosines, update, monkeypatch):
    """The larger of two domains has three times as many images, and determines the number of steps per epoch."""
    server, seen = Server(cosines, update=update), []
    step = "joint_step" if update == "joint" else "cross_domain_step"
    done = getattr(MutualLearning, step)
    monkeypatch.setattr(MutualLearning, step, lambda self, batches: (seen.append(batches), done(self, batches)))
    server.learning.learn()
    assert len(seen) == 3
    for number, lesson in enumerate(server.lessons):
        rows = [batches[number] for batches in seen]
        assert all(map(len, rows))
        assert sorted(torch.cat(rows).tolist()) == list(range(len(lesson.images)))


def test_the_error_of_a_diverging_server_names_its_learning_rate(cosines):
    server = Server(cosines)
    wild = ServerConfig(epochs=1, warmup_epochs=3, batch_size=5, lr=1e30)
    with pytest.raises(DivergenceError, match=r"try a smaller `method\.server\.lr`"):
        replace(server.learning, config=wild).learn()
    with pytest.raises(DivergenceError, match=r"try a smaller `method\.server\.lr`"):
        warm_up(wild, cosines, server.lessons)
