"""The points of a t-SNE and their table, `tsne.csv`. No torch: reports read it."""

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

TABLE = "tsne.csv"
PICTURE = "tsne.png"
FILES = (TABLE, PICTURE)
"""What a run leaves beside its checkpoint where its configuration asks for a t-SNE."""
COLUMNS = ("x", "y", "class", "domain", "silhouette")


@dataclass(frozen=True)
class Point:
    """A test image: its place in the plane (no unit), and how well its features sit among those of its class.

    `silhouette` lies between -1 and 1 (Rousseeuw 1987) and is computed on the features, not in the plane.
    """

    x: float
    y: float
    label: str
    domain: str
    silhouette: float


@dataclass(frozen=True)
class Embedding:
    """All points, by class and then by domain, in the order of the data set."""

    points: tuple[Point, ...]

    @property
    def classes(self) -> Sequence[str]:
        """Names of the classes that have points."""
        return list(dict.fromkeys(point.label for point in self.points))

    @property
    def domains(self) -> Sequence[str]:
        """Names of the domains that have points."""
        return list(dict.fromkeys(point.domain for point in self.points))

    @property
    def silhouette(self) -> float:
        """The silhouette score by class: the mean over the points. More discriminative features score higher."""
        return math.fsum(point.silhouette for point in self.points) / len(self.points)

    def csv(self) -> str:
        """One row per point, numbers in six significant digits."""
        table = io.StringIO()
        writer = csv.writer(table, lineterminator="\n")
        writer.writerow(COLUMNS)
        for point in self.points:
            numbers = [f"{number:.6g}" for number in (point.x, point.y, point.silhouette)]
            writer.writerow([*numbers[:2], point.label, point.domain, numbers[2]])
        return table.getvalue()

    @classmethod
    def of_csv(cls, text: str) -> "Embedding":
        """The points that `csv` wrote."""
        rows = list(csv.reader(io.StringIO(text)))[1:]
        return cls(tuple(Point(float(x), float(y), label, domain, float(near)) for x, y, label, domain, near in rows))
