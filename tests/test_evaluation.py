"""Evaluation against a plain loop."""

import math

import pytest
import torch

from fedsweep.evaluation import EvaluationConfig, evaluate, metric_names
from fedsweep.types import Domain, ImageSet

PREDICTIONS = torch.tensor([[2.0, 0.0, 1.0], [0.0, 3.0, 0.0], [0.5, 0.1, 0.2], [1.0, 1.0, 4.0], [0.0, 9.0, 1.0]])


def domain(name: str, labels: list[int]) -> Domain:
    """Images whose first pixel is the row of PREDICTIONS; the training split would answer all wrong."""
    images = torch.zeros(len(labels), 3, 2, 2, dtype=torch.uint8)
    images[:, 0, 0, 0] = torch.arange(len(labels))
    test = ImageSet(images, torch.tensor(labels))
    return Domain(name, ImageSet(images, (test.labels + 1) % 3), test)


def predict(images: torch.Tensor) -> torch.Tensor:
    return PREDICTIONS[images[:, 0, 0, 0].long()]


DOMAINS = [domain("good", [0, 1, 0, 2, 1]), domain("bad", [0, 1, 1, 0])]


@pytest.mark.parametrize("batch_size", [1, 2, 5, 256])
def test_metrics_equal_a_plain_loop_for_every_batch_size(batch_size):
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

    metrics = evaluate(predict, DOMAINS, EvaluationConfig(batch_size=batch_size))
    assert metrics.pop("loss/test") == pytest.approx(sum(losses) / 2, rel=1e-6)
    assert metrics == {
        "accuracy/mean": 0.75, "accuracy/worst_domain": 0.5, "accuracy/domain/good": 1.0, "accuracy/domain/bad": 0.5,
    }  # fmt: skip


def test_names_are_known_before_anything_runs():
    metrics = evaluate(predict, DOMAINS, EvaluationConfig(batch_size=2))
    assert list(metrics) == metric_names(["good", "bad"])
    assert all(type(value) is float for value in metrics.values())


def test_batches_are_no_larger_than_asked_and_need_no_gradient():
    seen = []

    def noting(images):
        seen.append((len(images), torch.is_grad_enabled()))
        return predict(images)

    evaluate(noting, DOMAINS, EvaluationConfig(batch_size=2))
    assert seen == [(size, False) for size in (2, 2, 1, 2, 2)]


def test_the_models_batch_size_does_not_change_its_answers(federation):
    one_by_one, at_once = (federation({"evaluation.batch_size": size}) for size in (1, 256))
    first = one_by_one.evaluate(one_by_one.initial_state())
    assert first == pytest.approx(at_once.evaluate(at_once.initial_state()), rel=1e-5)


def test_evaluation_uses_the_states_adapter_and_not_the_models(federation):
    small = federation()
    state = small.initial_state()
    before = small.evaluate(state)
    small.model.load_adapter({name: torch.ones_like(tensor) for name, tensor in state.adapter.items()})
    assert small.evaluate(state) == before
