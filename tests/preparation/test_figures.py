"""The figures of data sets and partitions, which are complete and reproducible, and the skew that they show."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image

from fedsweep.common.errors import UserError
from fedsweep.data.prepared.card import read_card
from fedsweep.preparation import figures as pictures
from fedsweep.preparation.figures import (
    Panel,
    contact_sheet,
    distances,
    draw_partitions,
    missing_classes,
    shorten,
    skew,
)
from fedsweep.preparation.prepare import prepare
from fedsweep.types import Client, ImageSet
from tests.preparation.helpers import plan_of


def client(name: str, domain: str, labels: list[int]) -> Client:
    return Client(name, domain, ImageSet(torch.zeros(len(labels), 3, 1, 1, dtype=torch.uint8), torch.tensor(labels)), 3)


def some_clients(domains: int, each: int, classes: int, alpha: float = 0.5) -> list[Client]:
    rng = np.random.default_rng(0)
    made = []
    for domain in range(domains):
        for number in range(each):
            labels = rng.choice(classes, size=100 + 10 * number, p=rng.dirichlet([alpha] * classes))
            made.append(client(f"domain_{domain}/{number}", f"domain_{domain}", labels.tolist()))
    return made


def test_the_skew_is_the_total_variation_distance_from_the_domain():
    clients = [client("a/0", "a", [0, 0]), client("a/1", "a", [1, 1]), client("b", "b", [0, 1, 1])]
    assert distances(clients, 2).tolist() == [0.5, 0.5, 0.0]
    assert skew(clients, 2) == pytest.approx(1 / 3)
    # Of 6 images of class 0 and 2 images of class 1, the first client holds 4 and 0.
    clients = [client("a/0", "a", [0] * 4), client("a/1", "a", [0, 0, 1, 1])]
    assert distances(clients, 3).tolist() == [0.25, 0.25]


def test_classes_without_training_test_or_tuning_images_are_named():
    names = ("bus", "cat", "dog", "owl")
    clients = [client("a", "a", [0, 1]), client("b", "b", [0, 0])]
    assert missing_classes(clients, names) == []
    tests, validation = (client("", "", labels).train for labels in ([0, 2], [1, 1]))
    reason = "because images are held out without regard to their classes."
    assert missing_classes([replace(clients[0], test=tests), clients[1]], names) == [
        f"No client has a training image of `dog`, {reason}",
        f"No client has a test image of `cat`, {reason}",
    ]
    assert missing_classes([replace(clients[1], test=tests, validation=validation)], names) == [
        f"No client has a training image of `cat`, `dog`, {reason}",
        f"No client has a test image of `cat`, {reason}",
    ]
    assert missing_classes([replace(clients[0], test=clients[0].train, tuning=tests), clients[1]], names) == [
        f"No client has a training image of `dog`, {reason}",
        f"No client has a test image of `dog`, {reason}",
        f"No client has a tuning image of `cat`, {reason}",
    ]


def test_one_client_per_domain_has_no_skew():
    assert skew(some_clients(4, 1, 7), 7) == 0


def test_skew_falls_with_alpha():
    values = [skew(some_clients(4, 5, 7, alpha), 7) for alpha in (0.1, 0.5, 1, 10, 100)]
    assert values == sorted(values, reverse=True)
    assert values[0] > 0.4
    assert values[-1] < 0.1


def pixels_of(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


def assert_a_picture(path: Path) -> None:
    """Check that a PNG file is not blank and has a white margin, so that nothing is cut off."""
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    pixels = pixels_of(path)
    assert (pixels < 250).any(axis=2).mean() > 0.1
    edges = [pixels[:8], pixels[-8:], pixels[:, :8], pixels[:, -8:]]
    assert all((edge == 255).all() for edge in edges)


@pytest.mark.parametrize(("domains", "each", "classes"), [(4, 1, 7), (6, 5, 100)])
def test_partitions_are_drawn(tmp_path, domains, each, classes):
    names = [f"class number {label}" for label in range(classes)]
    panels = [Panel(f"alpha {alpha}", some_clients(domains, each, classes, alpha)) for alpha in (0.1, 100)]
    draw_partitions(panels, names, tmp_path / "one.png")
    assert_a_picture(tmp_path / "one.png")


def test_the_same_clients_give_the_same_picture(tmp_path):
    for name in ("one.png", "other.png"):
        draw_partitions([Panel("x", some_clients(2, 2, 3))], ("bus", "cat", "dog"), tmp_path / name)
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "other.png").read_bytes()


@pytest.mark.parametrize("classes", [7, 100])
def test_a_panel_counts_every_image_and_shows_its_skew(monkeypatch, tmp_path, classes):
    kept = []
    monkeypatch.setattr(pictures, "save", lambda figure, path: kept.append(figure))
    clients = some_clients(4, 3, classes)
    draw_partitions([Panel("alpha 0.5", clients)], [f"c{label}" for label in range(classes)], tmp_path / "x.png")
    axes = kept[0].axes[0]
    assert axes.get_title(loc="left") == f"alpha 0.5  (skew {skew(clients, classes):.2f})"
    counts = pictures.class_counts(clients, classes)
    if classes == 7:
        heights = np.array([bar.get_height() for bar in axes.patches]).reshape(7, 12)
        assert np.array_equal(heights.T, counts)
    else:
        assert np.array_equal(np.ma.getdata(axes.images[0].get_array()).T, counts)
    assert [text.get_text() for text in axes.texts] == [f"domain_{domain}" for domain in range(4)]


def test_the_contact_sheet_shows_the_first_image_of_each_class(tree, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("fedsweep.preparation.figures._draw", lambda page, *rest: drawn.append(page))
    made = prepare(plan_of(tree))
    assert contact_sheet(made.folder, made.card, tmp_path / "sheet.png") == 3
    step = 17  # 16 pixels and a gap of one
    (page,) = drawn
    assert page.shape == (4 * step - 1, 3 * step - 1, 3)  # two rows for each of the two domains
    tiles = [page[row * step : row * step + 16, col * step : col * step + 16] for row in (0, 2) for col in range(3)]
    expected = []
    for domain in ("photo", "sketch"):
        batch = pa.ipc.open_file(str(made.folder / f"{domain}.arrow")).get_batch(0)
        labels, paths = batch.column("label").to_pylist(), batch.column("path").to_pylist()
        expected += [paths[labels.index(label)] for label in range(3)]
    for tile, path in zip(tiles, expected, strict=True):
        with Image.open(tree / path) as image:
            assert np.array_equal(tile, np.asarray(image)[:, 2:18])


def test_sixteen_of_many_classes_are_shown(tree, tmp_path):
    for name in ("photo", "sketch"):
        for number in range(15):
            (tree / name / f"class {number:02}").mkdir()
            for image in range(2):
                content = (tree / name / "bus" / f"{image}.png").read_bytes()
                (tree / name / f"class {number:02}" / f"{image}.png").write_bytes(content)
    made = prepare(plan_of(tree))
    assert read_card(made.folder) == made.card
    assert contact_sheet(made.folder, made.card, tmp_path / "new" / "sheet.png") == 16
    assert_a_picture(tmp_path / "new" / "sheet.png")


def test_a_figure_that_cannot_be_written_is_an_error_in_one_sentence(tree, tmp_path):
    made = prepare(plan_of(tree))
    with pytest.raises(UserError, match=r"cannot be written: .*\.$"):
        contact_sheet(made.folder, made.card, tree / "photo" / "bus" / "0.png" / "sheet.png")


AWKWARD = ("from $5 to $10_^{", "\u732b", "\U0001f431", "a\\$b$")


def test_names_are_not_formulas_and_may_have_missing_glyphs(tmp_path):
    for classes in (len(AWKWARD), 12):  # bars and a heat map
        names = [*AWKWARD, *map(str, range(classes - len(AWKWARD)))]
        clients = [client(f"{name}/{number}", name, [0, 1]) for name in AWKWARD for number in range(2)]
        panels = [Panel(AWKWARD[0], clients), Panel("one", clients[:2]), Panel("singles", clients[::2])]
        draw_partitions(panels, names, tmp_path / "partition.png")
        assert (pixels_of(tmp_path / "partition.png") < 250).any()


def test_names_on_a_contact_sheet_are_not_formulas(tree, tmp_path):
    for new, old in zip(AWKWARD, ("bus", "cat", "dog"), strict=False):
        for domain in ("photo", "sketch"):
            (tree / domain / old).rename(tree / domain / new)
    (tree / "photo").rename(tree / "$a$\u732b_^")
    made = prepare(plan_of(tree))
    contact_sheet(made.folder, made.card, tmp_path / "sheet.png")
    assert_a_picture(tmp_path / "sheet.png")


def test_names_are_drawn_unchanged():
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    for name in AWKWARD:
        text, is_math = Text(0, 0, shorten(name), figure=Figure())._preprocess_math(shorten(name))
        assert (text, is_math) == (name, False)
