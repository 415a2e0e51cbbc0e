"""The file with the correctly predicted test images, compared with the metrics of the run that writes it."""

import numpy as np
import pytest
import torch

from fedsweep.federation.build_and_run import build, run_resumably
from fedsweep.federation.build_and_run import save_checkpoint as save
from fedsweep.results.checkpoint import Checkpoint, load
from fedsweep.results.folders import read_right
from fedsweep.results.records import RIGHT

PATH = "checkpoint.safetensors"
HELD_OUT = {"data.held_out_domains": ["noisy"], "federation.depths": [12], "federation.rounds": 2}
AVERAGED = {
    **HELD_OUT,
    "federation.rounds": 5,
    "federation.evaluate_every": 2,
    "evaluation.last_rounds": 4,
    "evaluation.images_per_domain": None,
}
"""The averaged rounds are 2, 4 and 5."""


def test_the_accuracies_are_the_shares_of_the_bits(tiny, tmp_path):
    config = tiny.override({**HELD_OUT, "evaluation.images_per_domain": 4}, "test")
    *_, last = run_resumably(config, tmp_path / PATH)
    found, federation = read_right(tmp_path / RIGHT), build(config)
    domains = [*federation.domains, *federation.held_out]
    assert [one.name for one in found.domains] == [one.name for one in domains]
    assert [one.images for one in found.domains] == [len(one.test) for one in domains]
    assert [one.name for one in found.domains if one.held_out] == ["noisy"]
    shares = []
    for place, one in enumerate(found.domains):
        bits = found.of_domain(place)
        share = int(bits.sum()) / len(bits)
        metric = "out_of_domain" if one.held_out else "domain"
        assert last.metrics[f"accuracy/{metric}/{one.name}"] == share
        shares += [] if one.held_out else [share]
        start = found.starts[place]
        groups = found.group_numbers[start : start + one.images]
        assert np.array_equal(groups, found.group_numbers[: one.images])  # the same scans in every style
    assert last.metrics["accuracy/mean"] == sum(shares) / len(shares)
    assert len(set(shares)) > 1
    assert found.data == federation.data_digest != ""


def test_the_bits_are_those_of_the_images_in_order(federation):
    small = federation({}, test=60)
    state, domain = small.initial_state(), small.domains[0]
    labels = domain.test.labels.clone()

    def right():
        small.evaluate(state, 0, found := {})
        return found[domain.name].clone()

    bits, as_class = right(), []
    for label in range(10):  # if all labels are `label`, the images whose prediction is `label` are right
        domain.test.labels.fill_(label)
        as_class.append(right())
    domain.test.labels.copy_(labels)
    predictions = torch.stack(as_class)
    assert predictions.sum(0).tolist() == [1] * len(labels)
    assert bits.tolist() == (predictions.int().argmax(0) == labels).tolist()
    assert 0 < bits.sum() < len(labels)


def test_the_file_is_written_before_the_last_checkpoint_and_is_the_same_after_a_resume(tiny, tmp_path, monkeypatch):
    config = tiny.override(HELD_OUT, "test")
    list(run_resumably(config, tmp_path / "straight" / PATH))
    stopped = run_resumably(config, tmp_path / "resumed" / PATH)
    next(stopped), next(stopped)
    stopped.close()
    assert not (tmp_path / "resumed" / RIGHT).exists()

    def killed(path, checkpoint):
        if checkpoint.round == 2:
            raise KeyboardInterrupt
        save(path, checkpoint)

    with monkeypatch.context() as patch:
        patch.setattr("fedsweep.federation.build_and_run.save_checkpoint", killed)
        with pytest.raises(KeyboardInterrupt):
            list(run_resumably(config, tmp_path / "resumed" / PATH))
    content = (tmp_path / "straight" / RIGHT).read_bytes()
    assert (tmp_path / "resumed" / RIGHT).read_bytes() == content
    (tmp_path / "resumed" / RIGHT).unlink()
    list(run_resumably(config, tmp_path / "resumed" / PATH))
    assert (tmp_path / "resumed" / RIGHT).read_bytes() == content


@pytest.mark.parametrize("sample", [None, 4, 10_000])
def test_the_mean_over_the_last_rounds_is_that_of_the_shares(tiny, tmp_path, sample):
    config = tiny.override({**AVERAGED, "evaluation.images_per_domain": sample}, "test")
    records = list(run_resumably(config, tmp_path / PATH))
    found = read_right(tmp_path / RIGHT)
    assert len(found.earlier) == 2
    shares = np.split(found.values_of_rounds(), found.starts[1:-1])
    for share, domain in zip(shares, found.domains, strict=True):
        metric = f"accuracy/{'out_of_domain' if domain.held_out else 'domain'}/{domain.name}"
        averaged = [records[round].metrics[metric] for round in (2, 4, 5)]
        assert share.mean() == pytest.approx(np.mean(averaged), abs=1e-12)
    inside = [share.mean() for share, domain in zip(shares, found.domains, strict=True) if not domain.held_out]
    assert records[-1].metrics["accuracy/last_rounds"] == pytest.approx(np.mean(inside), abs=1e-12)
    assert len(np.unique(found.values_of_rounds())) > 2  # some predictions change from round to round


def test_the_file_says_which_images_the_earlier_rounds_tested(tiny, tmp_path):
    config = tiny.override({**AVERAGED, "evaluation.images_per_domain": 4}, "test")
    list(run_resumably(config, tmp_path / PATH))
    found, federation = read_right(tmp_path / RIGHT), build(config)
    parts = np.split(found.in_sample, found.starts[1:-1])
    whole, samples = ([one for sets in federation.tested(round) for one in sets] for round in (0, 1))
    assert [int(tested.sum()) for tested in parts] == [4, 4, 4]
    for tested, domain, sample in zip(parts, whole, samples, strict=True):
        chosen = domain.test.take(torch.from_numpy(np.flatnonzero(tested)))
        assert torch.equal(chosen[0], sample.test.take(torch.arange(4))[0])
        assert torch.equal(chosen[1], sample.test.labels)


@pytest.mark.parametrize("sample", [None, 4])
def test_the_file_is_the_same_after_interruptions_in_the_last_rounds(tiny, tmp_path, monkeypatch, sample):
    config = tiny.override({**AVERAGED, "evaluation.images_per_domain": sample}, "test")
    straight, stopped = tmp_path / "straight" / PATH, tmp_path / "stopped" / PATH
    list(run_resumably(config, straight))
    content = straight.with_name(RIGHT).read_bytes()
    state = build(config).initial_state()

    def recorded(path):
        return sorted(load(path, state).right)

    for until, rounds in ((1, []), (2, [2]), (3, [2]), (4, [2, 4])):
        list(run_resumably(config, stopped, until=until, compared=[3]))
        assert recorded(stopped) == rounds
        assert not stopped.with_name(RIGHT).exists()

    def killed(path, checkpoint):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("fedsweep.federation.build_and_run.save_checkpoint", killed)
        with pytest.raises(KeyboardInterrupt):
            list(run_resumably(config, stopped))
    assert stopped.with_name(RIGHT).read_bytes() == content
    stopped.with_name(RIGHT).unlink()
    list(run_resumably(config, stopped))
    assert stopped.with_name(RIGHT).read_bytes() == content
    assert recorded(stopped) == recorded(straight) == []  # the file has the bits now


@pytest.mark.parametrize(
    ("change", "earlier"),
    [
        ({"evaluation.images_per_domain": 4}, 2),
        ({"evaluation.images_per_domain": 10_000}, 2),  # all images
        ({"evaluation.last_rounds": None}, None),
        ({"federation.rounds": 1}, 0),
    ],
)
def test_the_earlier_rounds_are_recorded_if_they_are_averaged(tiny, tmp_path, change, earlier):
    list(run_resumably(tiny.override({**AVERAGED, **change}, "test"), tmp_path / PATH))
    found = read_right(tmp_path / RIGHT)
    assert (None if found.earlier is None else len(found.earlier)) == earlier
    assert (b"earlier" in (tmp_path / RIGHT).read_bytes()) == (earlier is not None)


def test_a_trial_that_an_older_version_began_has_no_shares(tiny, tmp_path):
    config, path = tiny.override(AVERAGED, "test"), tmp_path / PATH
    list(run_resumably(config, path, until=3))
    old = load(path, build(config).initial_state())
    save(path, Checkpoint(old.round, old.state, old.history))
    list(run_resumably(config, path))
    assert read_right(tmp_path / RIGHT).earlier is None
