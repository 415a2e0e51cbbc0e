"""Images as a model sees them: as pixels, or from where its frozen steps leave them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from fedsweep.models.activation_cache import FrozenFunction, FrozenRows, walk_key
from fedsweep.models.layered import Images, LayeredModel, Walk
from fedsweep.types import AdapterState, Batch, ImageSet


@dataclass(frozen=True)
class Reader:
    """Looks at images through a resident model, whose frozen steps are run once for each image.

    `identity` is what the model was built from; `batch_size` images are looked at at a time in evaluation.
    """

    model: LayeredModel
    identity: str
    kept: FrozenRows = field(default_factory=FrozenRows)
    batch_size: int = 256

    def prefix(self, walk: Walk, steps: int, adapter: AdapterState) -> FrozenFunction:
        """What leaves the first steps of a walk; the model holds the adapter, and lets them be frozen."""
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
        """The examples at `index`: their pixels, unless more is known of them."""
        if function is None and not side_inputs:
            return images.take(index)[0]
        rows = {name: known[index] for name, known in side_inputs.items()}
        tokens = None if function is None else self.kept.rows(function, images, index)
        return Batch(images, index, tokens, done, rows)
