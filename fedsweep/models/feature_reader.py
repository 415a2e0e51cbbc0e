"""Images as a model sees them: as pixels, or from where its frozen steps leave them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from fedsweep.models.activation_cache import FrozenFunction, FrozenRows, walk_key
from fedsweep.models.layered import Images, LayeredModel, Path
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

    def prefix(self, path: Path, steps: int, adapter: AdapterState) -> FrozenFunction:
        """What leaves the first steps of a walk; the model holds the adapter, and lets them be frozen."""
        model, ahead = self.model, self.model.ahead(adapter, path, steps)
        key = walk_key(self.identity, tuple(path[:steps]), steps == len(path), ahead, model.mean.device)
        if steps == len(path):
            return FrozenFunction(key, lambda images: model.passed(images, path))
        return FrozenFunction(key, lambda images: model.walk(images, path[:steps]))

    def batch(
        self, images: ImageSet, index: Tensor, function: FrozenFunction | None, done: int, beside: Mapping[str, Tensor]
    ) -> Images:
        """The examples at `index`: their pixels, unless more is known of them."""
        if function is None and not beside:
            return images.take(index)[0]
        rows = {name: known[index] for name, known in beside.items()}
        tokens = None if function is None else self.kept.rows(function, images, index)
        return Batch(images, index, tokens, done, rows)
