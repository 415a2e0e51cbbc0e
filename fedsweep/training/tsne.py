"""The t-SNE embedding of test images, computed from the model's features after the last round of a run."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from fedsweep.common.errors import UserError
from fedsweep.common.randomness import derived_seed, stream
from fedsweep.models.layered import LayeredModel, Walk
from fedsweep.results.tsne_files import Embedding, Point
from fedsweep.training.evaluation import features
from fedsweep.types import Domain, ImageSet

PERPLEXITY = 30.0
"""The perplexity, which is scikit-learn's default; fewer than 91 images get a smaller perplexity."""


def draw(
    domains: Sequence[Domain], class_names: Sequence[str], classes: int, images: int, seed: int
) -> dict[str, ImageSet]:
    """Draw at most `images` test images of the first `classes` classes, as evenly over domains and classes as possible.

    The draw does not depend on the method or the model, so all arms with the same seed show the same images.

    Args:
        domains: The domains whose test images are drawn.
        class_names: The names of all classes of the data set.
        classes: The number of classes to draw from.
        images: The largest number of images.
        seed: The seed of the run.

    Returns:
        The drawn images, keyed by domain.

    Raises:
        UserError: The data set has fewer than `classes` classes, or the drawn images do not allow silhouettes.
            Silhouettes need images of at least two classes, and more images than classes.
    """
    if classes > len(class_names):
        raise UserError(
            f"`evaluation.tsne_classes` must be at most {len(class_names)}, the number of classes of the data, "
            f"but it is {classes}."
        )
    queue: list[tuple[int, int, int, int]] = []
    cells = [(place, label) for place in range(len(domains)) for label in range(classes)]
    turns = stream(seed, "tsne", "cells").permutation(len(cells)).tolist()
    for turn, (place, label) in zip(turns, cells, strict=True):
        rows = np.flatnonzero(domains[place].test.labels.numpy() == label)
        shuffled = stream(seed, "tsne", domains[place].name, label).permutation(rows).tolist()
        queue += [(lap, turn, place, row) for lap, row in enumerate(shuffled)]
    chosen = sorted(queue)[:images]  # one image of every cell, then a second one, and so on
    rows_of = {place: sorted(row for *_, at, row in chosen if at == place) for place in range(len(domains))}
    parts = {
        domains[place].name: domains[place].test.select(torch.tensor(rows)) for place, rows in rows_of.items() if rows
    }
    present = {int(label) for part in parts.values() for label in part.labels}
    if not 2 <= len(present) < len(chosen):
        raise UserError(
            f"`evaluation.tsne_classes` {classes} needs test images of at least two classes, and more images than "
            f"classes, but there are {len(chosen)} images, and the number of their classes is {len(present)}."
        )
    return parts


def embed(
    model: LayeredModel, walk: Walk, sample: Mapping[str, ImageSet], classes: Sequence[str], batch_size: int, seed: int
) -> Embedding | None:
    """Return the t-SNE embedding of the images' features, which are the inputs of the head.

    Args:
        model: The model, with its trained adapter loaded.
        walk: The blocks to run, in order.
        sample: The images, keyed by domain.
        classes: The names of the classes.
        batch_size: The number of images per forward pass.
        seed: The seed of the run.

    Returns:
        The embedding, or None if a feature is not finite or if all images have the same features. A run that diverged
        can therefore still finish.
    """
    with torch.inference_mode():
        parts = [features(model, walk, images, batch_size).float().cpu() for images in sample.values()]
    found = torch.cat(parts).numpy()
    if not np.isfinite(found).all() or np.ptp(found, axis=0).max() == 0:
        return None
    labels = np.concatenate([part.labels.numpy() for part in sample.values()])
    places = np.repeat(np.arange(len(sample)), [len(part) for part in sample.values()])
    plane, silhouettes = _plane(found, labels, seed)
    names, points = list(sample), []
    for i in np.lexsort((places, labels)):
        x, y = plane[i].tolist()
        points.append(Point(x, y, classes[labels[i]], names[places[i]], float(silhouettes[i])))
    return Embedding(tuple(points))


def _plane(found: np.ndarray, labels: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the t-SNE positions (images, 2) and the silhouettes (images,) of the features `found` (images, width).

    The silhouettes measure how well the features separate the classes in `labels`.
    """
    from sklearn.manifold import TSNE
    from sklearn.metrics import silhouette_samples
    from threadpoolctl import threadpool_limits

    perplexity = min(PERPLEXITY, (len(found) - 1) / 3)
    state = derived_seed(seed, "tsne", "start") % 2**32  # scikit-learn takes 32 bits
    with threadpool_limits(1):  # several threads add in varying order, and t-SNE amplifies rounding errors
        plane = TSNE(2, init="pca", perplexity=perplexity, random_state=state).fit_transform(found)
        return plane, silhouette_samples(found, labels)
