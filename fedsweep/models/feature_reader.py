"""Reader, which gives a model its images as pixels, or as cached outputs of its frozen steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from fedsweep.models.activation_cache import FrozenFunction, FrozenRows, walk_key
from fedsweep.models.layered import Images, LayeredModel, Walk
from fedsweep.types import AdapterState, Batch, ImageSet


@dataclass(frozen=True)
class Reader:
    """A resident model's access to images: its frozen steps are run once for each image.

    `identity` is a key of the model's origin; `batch_size` is used in evaluation.
    """

    model: LayeredModel
    identity: str
    kept: FrozenRows = field(default_factory=FrozenRows)
    batch_size: int = 256

    def prefix(self, walk: Walk, steps: int, adapter: AdapterState) -> FrozenFunction:
        """Return the frozen function of the first steps of a walk; `adapter` is the one that the model holds."""
        model, ahead = self.model, self.model.ahead(adapter, walk, steps)
        key = walk_key(self.identity, tuple(walk[:steps]), steps == len(walk), ahead, model.mean.device)
        if steps == len(walk):
            return FrozenFunction(key, lambda images: model.passed(images, walk))
        return FrozenFunction(key, lambda images: model.walk(images, walk[:steps]))

    def batch(
        self,
        images: ImageSet,
        index: Tensor,
        function: FrozenFunction | None,
        done: int,
        side_inputs: Mapping[str, Tensor],
    ) -> Images:
        """Return the examples at `index`: their pixels, unless cached tokens or side inputs are known."""
        if function is None and not side_inputs:
            return images.take(index)[0]
        rows = {name: known[index] for name, known in side_inputs.items()}
        tokens = None if function is None else self.kept.rows(function, images, index)
        return Batch(images, index, tokens, done, rows)
