"""Copies of image tensors on a GPU. A pretended GPU, or the CPU, stands for the GPU."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedsweep.data.image_sets import pool
from fedsweep.models.resident_images import ResidentImages
from fedsweep.types import ImageSet
from tests.pretended_gpu import GPU, DeviceTensor, PretendedGPU

CPU = torch.device("cpu")


def made(count: int, seed: int) -> ImageSet:
    drawn = torch.Generator().manual_seed(seed)
    return ImageSet(torch.randint(256, (count, 3, 4, 4), dtype=torch.uint8, generator=drawn), torch.arange(count))


FIRST, SECOND = made(7, 0), made(5, 1)
POOLED = pool([FIRST.select(torch.tensor([6, 1, 1])), SECOND])


@given(st.sampled_from([FIRST, FIRST.select(torch.tensor([3, 0])), POOLED]), st.data())
def test_a_batch_is_that_of_the_host(images: ImageSet, data: st.DataObject) -> None:
    index = torch.tensor(data.draw(st.lists(st.integers(0, len(images) - 1), min_size=1, max_size=12)))
    limit = data.draw(st.sampled_from([0, FIRST.parts[0].nbytes, 10_000]))
    assert torch.equal(ResidentImages(CPU, limit).take(images, index), images.take(index)[0])


def test_the_images_of_several_tensors_are_in_the_order_of_the_index() -> None:
    for index in map(torch.tensor, ([3, 4, 0], [0, 3, 1, 4, 2], [7, 0, 6, 1, 5])):
        assert torch.equal(ResidentImages(CPU, 10_000).take(POOLED, index), POOLED.take(index)[0])


def test_each_tensor_is_copied_once_and_only_if_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    real = torch.Tensor.to

    def to(tensor: torch.Tensor, *given: object, **named: object) -> torch.Tensor:
        if any(tensor is part for part in POOLED.parts):
            copied.append(len(tensor))
            return tensor.clone()
        return real(tensor, *given, **named)  # type: ignore[call-overload]

    monkeypatch.setattr(torch.Tensor, "to", to)
    resident = ResidentImages(CPU, FIRST.parts[0].nbytes + 1)
    for _ in range(3):
        for images in (FIRST, FIRST.select(torch.tensor([2])), SECOND, POOLED):
            resident.take(images, torch.tensor([0]))
    assert (copied, resident.left) == ([7], 1)


def test_the_batch_is_on_the_gpu_whether_or_not_the_images_fit() -> None:
    with PretendedGPU():
        resident = ResidentImages(GPU, FIRST.parts[0].nbytes)
        batches = [resident.take(images, torch.tensor([0, 2])) for images in (FIRST, SECOND, POOLED)]
        assert {type(one) for one in batches} == {DeviceTensor}
        expected = [images.take(torch.tensor([0, 2]))[0] for images in (FIRST, SECOND, POOLED)]
        assert [one.cpu().tolist() for one in batches] == [one.tolist() for one in expected]


def test_a_tensor_at_the_address_of_another_one_is_not_mistaken_for_it() -> None:
    resident = ResidentImages(CPU, 10**9)
    for seed in range(20):  # without the reference to the host's tensor, torch would reuse its memory
        images = made(7, seed)
        index = torch.arange(7)
        assert torch.equal(resident.take(images, index), images.take(index)[0])


def test_a_gpu_without_room_gathers_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    real, tried = torch.Tensor.to, []

    def to(tensor: torch.Tensor, *given: object, **named: object) -> torch.Tensor:
        if tensor is FIRST.images:
            tried.append(given)
            raise torch.OutOfMemoryError
        return real(tensor, *given, **named)  # type: ignore[call-overload]

    monkeypatch.setattr(torch.Tensor, "to", to)
    resident = ResidentImages(CPU, 10_000)
    for _ in range(2):
        assert torch.equal(resident.take(FIRST, torch.tensor([3])), FIRST.take(torch.tensor([3]))[0])
    assert (len(tried), resident.left) == (1, 10_000)


def test_a_batch_that_the_host_gathers_leaves_page_locked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy from other memory would make the host wait until the GPU has finished its earlier work."""
    locked: list[torch.Tensor] = []
    sent: list[tuple[torch.Tensor, object, bool]] = []

    def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
        locked.append(tensor.clone())
        return locked[-1]

    def to(tensor: torch.Tensor, device: object, non_blocking: bool = False) -> torch.Tensor:
        sent.append((tensor, device, non_blocking))
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(torch.Tensor, "to", to)
    device, index = torch.device("cuda"), torch.tensor([4, 1])
    assert torch.equal(ResidentImages(device, 0).take(FIRST, index), FIRST.images[index])
    assert [(one is locked[0], *rest) for one, *rest in sent] == [(True, device, True)]


def test_a_model_on_the_cpu_needs_no_copies() -> None:
    assert ResidentImages.on(CPU) is None
