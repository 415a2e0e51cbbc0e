"""Random streams derived from a seed, a purpose and a key. All random numbers of a run come from this module.

Every purpose in a run belongs to one of the groups in `STREAMS`. The seed of a run determines all groups, or only some
of them (`PartialSeed`).

A key, such as the round and the client in ``stream(seed, "batches", round, client)``, never contains the arm. Arms with
the same seed therefore have the same split, cohort, batch order and initial adapter. This technique is known as common
random numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, Self

if TYPE_CHECKING:
    import numpy as np

StreamName = Literal["partition", "cohort", "allocation", "batches", "initial", "synthetic", "evaluation"]
COMMON_SEED = 0
"""The seed of the random streams that a `PartialSeed` does not determine."""


class StreamGroup(NamedTuple):
    """Random streams of a run that belong together."""

    meaning: str
    """The values that are drawn from the streams."""
    purposes: frozenset[str]
    """The purposes of the streams (see `derived_seed`)."""


STREAMS: Final[dict[StreamName, StreamGroup]] = {
    "partition": StreamGroup(
        "the split of the images among clients and server, and the choice of malicious clients",
        frozenset({"dirichlet", "iid", "proxy", "test", "tuning", "validation", "malicious"}),
    ),
    "cohort": StreamGroup("the cohorts, and dynamic depths and ranks", frozenset({"cohort", "depth", "rank"})),
    "allocation": StreamGroup("the blocks that each client trains", frozenset({"allocation"})),
    "batches": StreamGroup(
        "the order of the training images and dropout",
        frozenset({"batches", "dropout", "distillation", "adapter warm-up", "mutual learning"}),
    ),
    "initial": StreamGroup(
        "the initial values of weights",
        frozenset({"adapter", "adapter attention", "backbone", "brick", "context", "domain adapter", "gate", "head"})
        | {"fresh adapter", "image adapter"},
    ),
    "synthetic": StreamGroup("the synthetic images", frozenset({"surrogate", "synthetic"})),
    "evaluation": StreamGroup(
        "the choice of images on which metrics are measured",
        frozenset({"evaluation", "jacobian", "probe", "structural bias", "tsne"}),
    ),
}
"""All random streams of a run, by group."""


class PartialSeed(int):
    """A seed that determines only some groups of random streams. The other streams are those of `COMMON_SEED`.

    A partial seed differs from the integer with the same value, and so does its text, because seeds and their texts
    serve as keys of caches.
    """

    streams: frozenset[StreamName]

    def __new__(cls, seed: int, streams: Collection[StreamName]) -> Self:
        """Return `seed`, which determines only the groups in `streams`."""
        self = super().__new__(cls, seed)
        self.streams = frozenset(streams)
        return self

    def of(self, purpose: str) -> int:
        """Return the seed of the streams for `purpose`; raise ValueError if the purpose belongs to no group."""
        for name, group in STREAMS.items():
            if purpose in group.purposes:
                return int(self) if name in self.streams else COMMON_SEED
        raise ValueError(f"the random stream `{purpose}` belongs to no group in fedsweep.common.randomness.STREAMS")

    def __reduce__(self) -> tuple[type[Self], tuple[int, frozenset[StreamName]]]:
        return type(self), (int(self), self.streams)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PartialSeed) and (int(self), self.streams) == (int(other), other.streams)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((int(self), self.streams))

    def __repr__(self) -> str:
        return f"{int(self)} of {', '.join(sorted(self.streams))}"


def derived_seed(seed: int, purpose: str, *key: int | str) -> int:
    """Return a 63-bit seed derived from all arguments. The seed is the same on every machine and Python version."""
    if isinstance(seed, PartialSeed):
        seed = seed.of(purpose)
    text = "\x1f".join([str(seed), purpose, *(f"{type(part).__name__}:{part}" for part in key)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def stream(seed: int, purpose: str, *key: int | str) -> np.random.Generator:
    """Return a NumPy generator whose stream is independent of the streams for other arguments.

    >>> stream(0, "cohort", 3).integers(1000, size=3).tolist()
    [745, 622, 895]
    """
    import numpy as np  # `fedsweep --help` needs the names in this module, but no numpy

    return np.random.Generator(np.random.PCG64(derived_seed(seed, purpose, *key)))
