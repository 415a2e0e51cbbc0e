"""Short pre-trainings, which learn, are reproducible and can be resumed."""

import multiprocessing
import os
import signal
import time

import pytest
import torch
from safetensors.torch import load_file

from fedsweep.common.config import flat
from fedsweep.common.errors import UserError
from fedsweep.pretraining.config import load_images
from fedsweep.pretraining.loop import checkpoint_path, default_out, start, train, write_result
from fedsweep.pretraining.network import Saved
from tests.pretraining.conftest import CLASSES, Run, quiet, without_seconds, write_store

LEARNING = {
    "epochs": 8,
    "images_per_epoch": None,
    "batch_size": 16,
    "drop_path": 0.0,
    "label_smoothing": 0.0,
    "mix": {"mixup": 0.0, "cutmix": 0.0},
    "augmentation.brightness": 0.0,
    "augmentation.contrast": 0.0,
    "ema_decay": None,
    "optimizer.lr": 5e-3,
}


def test_training_improves_the_accuracy(play: Run):
    session, records = play(LEARNING)
    losses = [record.train_loss for record in records]
    assert losses[-1] < 0.7 * losses[0]
    assert records[-1].accuracy > 0.65 > 1.9 / CLASSES  # chance is 1 / CLASSES
    assert [record.epoch for record in records] == list(range(1, 9))
    assert session.images == len(session.data.train) // 16 * 16
    assert records[-1].lr < records[2].lr < 5e-3


def test_results_are_bit_identical_for_the_same_seed_only(play: Run):
    torch.manual_seed(1)
    first, records = play({"epochs": 2})
    state = torch.random.get_rng_state()
    second, again = play({"epochs": 2}, name="second")
    assert torch.equal(torch.random.get_rng_state(), state)  # the global generator is unchanged
    assert without_seconds(records) == without_seconds(again)
    one, two = load_file(first.checkpoint), load_file(second.checkpoint)
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert without_seconds(play({"epochs": 2, "seed": 1}, name="third")[1]) != without_seconds(records)


@pytest.mark.parametrize("changes", [{}, {"precision": "bf16", "ema_decay": None, "augmentation": "glyphs"}])
def test_a_resumed_training_equals_an_uninterrupted_one(toy, play: Run, changes):
    changes = {"epochs": 2, **changes}
    straight, records = play(changes)
    session, _ = start(toy.override(changes, "toy"), default_out("stopped"))
    epochs = train(session, None, quiet)
    next(epochs)
    epochs.close()
    resumed, again = play(changes, name="stopped", resume=True)
    assert without_seconds(again) == without_seconds(records)
    one, two = load_file(straight.checkpoint), load_file(resumed.checkpoint)
    assert len(one) == len(two) > 60
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_killed_process_can_be_resumed(toy, play: Run):
    """The process is killed in the middle of an epoch."""
    _, records = play({"epochs": 2})
    out = default_out("killed")

    def train_slowly() -> None:
        session, saved = start(toy.override({"epochs": 2}, "toy"), out)
        list(train(session, saved, lambda images, loss: time.sleep(0.3)))

    child = multiprocessing.get_context("fork").Process(target=train_slowly)
    child.start()
    deadline = time.monotonic() + 120
    while not checkpoint_path(out).exists() and child.is_alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    child.kill()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert not out.exists()
    assert len(Saved.read(checkpoint_path(out)).history) < 2
    session, again = play({"epochs": 2}, name="killed", resume=True)
    assert without_seconds(again) == without_seconds(records)
    write_result(session, "killed", out)
    assert not checkpoint_path(out).exists()


def test_every_epoch_is_saved_as_plain_tensors_before_it_is_reported(toy):
    session, saved = start(toy, default_out("toy"))
    for record in train(session, saved, quiet):
        found = Saved.read(session.checkpoint)
        assert found.history[-1] == record
        assert found.threads == 1
        assert flat(found.config) == flat(toy)
    parts = {name.partition("/")[0] for name in load_file(session.checkpoint)}
    assert parts == {"network", "average", "exp_avg", "exp_avg_sq", "step"}
    assert [path.name for path in session.checkpoint.parent.iterdir()] == ["toy.checkpoint.safetensors"]


def test_epochs_see_other_images_in_another_order(toy):
    seen: list[int] = []
    session, _ = start(toy, default_out("toy"))
    list(train(session, None, lambda images, loss: seen.append(images)))
    assert seen == [32] * 9  # three epochs of 96 images


def test_several_domains_become_one_set(toy, play: Run):
    write_store(["plain", "inverted", "thick"], name="three", images=50)
    changes = {"data.set": "three", "data.domains": ["thick", "plain"], "pool_domains": True}
    config = toy.override(changes, "toy")
    data = load_images(config)
    parts = [domain.train for domain in config.data.load().domains]
    assert len(data.train) == len(parts[0]) + len(parts[1]) == 100
    order = torch.tensor([99, 0, 50, 49])
    images, labels = data.train.take(order)
    for place, row in enumerate(order.tolist()):
        part = parts[row // 50]
        assert torch.equal(images[place], part.images[row % 50])
        assert labels[place] == part.labels[row % 50]
    _, records = play({**changes, "epochs": 1})
    assert len(records) == 1


def test_validation_images_of_later_runs_are_left_out(toy):
    """Otherwise, a search would choose by images that the backbone has seen."""
    write_store(["plain"], name="one", images=50)
    whole = toy.override(
        {"data.set": "one", "data.domains": ["plain"], "batch_size": 8, "images_per_epoch": None}, "toy"
    )
    divided = whole.override({"data.validation_fraction": 0.2}, "toy")
    assert (len(load_images(whole).train), len(load_images(divided).train)) == (50, 40)
    assert len(load_images(whole).validation) == len(load_images(divided).validation)


def test_a_loss_that_is_not_finite_is_an_error_in_one_sentence(play: Run):
    with pytest.raises(UserError, match=r"the loss became (nan|inf) in epoch 1; try a smaller `optimizer.lr` or"):
        play({"optimizer.lr": 1e30, "optimizer.clip_norm": None, "schedule.warmup": 0.0, "optimizer.betas": [0.0, 0.0]})


def test_the_number_of_threads_is_kept_on_resume(toy, play: Run):
    session, _ = start(toy, default_out("toy"), threads=2)
    next(train(session, None, quiet))
    resumed, _ = start(toy, default_out("toy"), resume=True)
    assert resumed.threads == 2
    assert os.path.samefile(resumed.checkpoint, session.checkpoint)


@pytest.mark.gpu
def test_training_and_resuming_on_a_gpu(toy, play: Run):
    changes = {**LEARNING, "precision": "bf16", "ema_decay": 0.9}
    _, records = play(changes, device="cuda")
    assert records[-1].accuracy > 0.6
    session, _ = start(toy.override(changes, "toy"), default_out("stopped"), device="cuda")
    epochs = train(session, None, quiet)
    next(epochs)
    epochs.close()
    session, again = play(changes, name="stopped", device="cuda", resume=True)
    assert again[-1].accuracy > 0.6
    assert write_result(session, "stopped", default_out("stopped"))["device"] == "cuda"
