"""Copies of image tensors on a GPU; a second tensor on the CPU stands for the copy."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedsweep.data.image_sets import pool
from fedsweep.models.resident_images import ResidentImages
from fedsweep.types import ImageSet

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


def test_each_tensor_is_copied_once_and_only_if_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    real = torch.Tensor.to

    def to(tensor: torch.Tensor, *given: object, **named: object) -> torch.Tensor:
        if tensor.dtype == torch.uint8:
            copied.append(len(tensor))
            return tensor.clone()
        return real(tensor, *given, **named)  # type: ignore[call-overload]

    monkeypatch.setattr(torch.Tensor, "to", to)
    resident = ResidentImages(CPU, FIRST.parts[0].nbytes + 1)
    for _ in range(3):
        for images in (FIRST, FIRST.select(torch.tensor([2])), SECOND, POOLED):
            resident.take(images, torch.tensor([0]))
    assert (copied, resident.left) == ([7], 1)


def test_a_model_on_the_cpu_needs_no_copies() -> None:
    assert ResidentImages.on(CPU) is None
