"""The evaluation of a model, compared with a plain loop."""

import math
from functools import partial

import pytest
import torch

from fedsweep.federation.rounds import federate
from fedsweep.methods.capabilities import predicted
from fedsweep.training.evaluation import (
    accuracy,
    client_metric_names,
    client_scores,
    evaluate,
    in_one_pass,
    metric_names,
)
from fedsweep.types import Domain, ImageSet

PREDICTIONS = torch.tensor([[2.0, 0.0, 1.0], [0.0, 3.0, 0.0], [0.5, 0.1, 0.2], [1.0, 1.0, 4.0], [0.0, 9.0, 1.0]])


def domain(name: str, labels: list[int]) -> Domain:
    """Return images whose first pixel is their row in PREDICTIONS; all predictions for the training split are wrong."""
    images = torch.zeros(len(labels), 3, 2, 2, dtype=torch.uint8)
    images[:, 0, 0, 0] = torch.arange(len(labels))
    test = ImageSet(images, torch.tensor(labels))
    return Domain(name, ImageSet(images, (test.labels + 1) % 3), test)


def predict(images: ImageSet, domain: str | None) -> torch.Tensor:
    return PREDICTIONS[images.take(torch.arange(len(images)))[0][:, 0, 0, 0].long()]


DOMAINS = [domain("good", [0, 1, 0, 2, 1]), domain("bad", [0, 1, 1, 0])]


def test_metrics_equal_a_plain_loop():
    correct, losses = {}, []
    for one in DOMAINS:
        hits, loss = 0, 0.0
        for row, label in enumerate(one.test.labels.tolist()):
            logits = PREDICTIONS[row].double().tolist()
            hits += logits.index(max(logits)) == label
            loss += math.log(sum(math.exp(logit) for logit in logits)) - logits[label]
        correct[one.name] = hits / len(one.test)
        losses.append(loss / len(one.test))
    assert correct == {"good": 1.0, "bad": 0.5}

    metrics = evaluate(predict, DOMAINS)
    assert metrics.pop("loss/test") == pytest.approx(sum(losses) / 2, rel=1e-6)
    assert metrics == {
        "accuracy/mean": 0.75, "accuracy/worst_domain": 0.5, "accuracy/domain_spread": 0.25,
        "accuracy/domain/good": 1.0, "accuracy/domain/bad": 0.5, "evaluation/images": 9.0,
    }  # fmt: skip


def test_the_names_of_the_metrics_are_known_before_the_evaluation():
    metrics = evaluate(predict, DOMAINS)
    assert list(metrics) == metric_names(["good", "bad"])
    assert all(type(value) is float for value in metrics.values())


def test_scores_of_clients_equal_a_plain_loop_and_have_the_promised_names():
    logits = {"b": PREDICTIONS[:3], "a": PREDICTIONS[3:], "c": PREDICTIONS}
    labels = {"b": torch.tensor([0, 1, 1]), "a": torch.tensor([2, 1]), "c": torch.tensor([2, 2, 2, 2, 2])}
    own = {client: accuracy(logits[client], labels[client]) for client in logits}
    assert own == {"b": pytest.approx(2 / 3), "a": 1.0, "c": 0.2}
    scores = client_scores(own, left_out={"c"})
    assert list(scores) == client_metric_names(["c", "a", "b"])
    assert scores["accuracy/clients/mean"] == pytest.approx((2 / 3 + 1) / 2)
    assert scores["accuracy/clients/worst"] == pytest.approx(2 / 3)
    assert scores["accuracy/client/c"] == 0.2


def test_batches_have_at_most_batch_size_images_and_no_gradient(federation):
    small = federation({"evaluation.batch_size": 4})
    seen = []
    small.model.register_forward_hook(lambda module, inputs, out: seen.append((len(out), out.requires_grad)))
    found = predicted(small.method, small.initial_state(), small.trainer.reader, small.domains[0].test)
    assert len(found) == 10
    assert seen == [(4, False), (4, False), (2, False)]


def test_the_batch_size_does_not_change_the_predictions(federation):
    one_by_one, at_once = (federation({"evaluation.batch_size": size}) for size in (1, 256))
    first = one_by_one.evaluate(one_by_one.initial_state(), 0)
    assert first == pytest.approx(at_once.evaluate(at_once.initial_state(), 0), rel=1e-5)


def test_evaluation_uses_the_adapter_of_the_state_and_not_of_the_model(federation):
    small = federation()
    state = small.initial_state()
    before = small.evaluate(state, 0)
    small.model.load_adapter({name: torch.ones_like(tensor) for name, tensor in state.adapter.items()})
    assert small.evaluate(state, 0) == before


@pytest.mark.parametrize("changes", [{}, {"method": "depthfl"}, {"evaluation.batch_size": 7}], ids=str)
def test_one_pass_over_all_domains_gives_the_logits_of_a_pass_for_each(federation, changes):
    small = federation({"federation.rounds": 1, **changes})
    _, last = federate(small)
    predict = partial(predicted, small.method, last.state, small.trainer.reader)
    small.model.load_adapter(last.state.adapter)
    together = in_one_pass(predict, small.domains)
    for domain in small.domains:
        alone = predict(domain.test, domain=domain.name)
        torch.testing.assert_close(together(domain.test, domain=domain.name), alone, rtol=1e-5, atol=1e-5)
