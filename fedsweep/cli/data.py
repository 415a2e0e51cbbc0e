"""The `fedsweep data` commands, which prepare and show data sets, plot partitions and generate synthetic images."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.text import Text
from typer import Argument, Option, Typer

from fedsweep.cli import completion, json_data, json_output
from fedsweep.cli.json_output import FormatOption
from fedsweep.cli.options import (
    DeviceOption,
    FileArgument,
    Overrides,
    WorkersOption,
    check_experiment,
    check_format,
    checked_device,
    read_experiment,
    read_space,
    worker_count,
)
from fedsweep.cli.output import progress_console, relative, result_console
from fedsweep.common.errors import UserError
from fedsweep.common.paths import data_folder, find, find_either
from fedsweep.common.places import placed
from fedsweep.common.progress import waiting
from fedsweep.common.yaml_values import parse_overrides

if TYPE_CHECKING:
    from fedsweep.preparation.plan import Plan
    from fedsweep.preparation.prepare import Prepared


app = Typer(name="data", no_args_is_help=True, help="Prepare and inspect data sets.")

OutOption = Annotated[Path | None, Option(metavar="PNG", help="PNG file to write")]


@app.command()
def prepare(
    name: Annotated[str, Argument(metavar="NAME", help="name for the prepared data set, e.g. `pacs`")],
    root: Annotated[Path, Option(metavar="DIR", help="folder with the images")],
    layout: Annotated[
        str | None, Option(help="one of the folder layouts that `fedsweep data list` prints; detected by default")
    ] = None,
    size: Annotated[int, Option(help="height and width of the decoded images in pixels")] = 224,
    backbone: Annotated[
        str | None, Option(metavar="TIMM_NAME", help="resize and crop images as in the evaluation of this timm model")
    ] = None,
    test_fraction: Annotated[
        float, Option(help="share of each class held out for testing, if the data set has no split of its own")
    ] = 0.2,
    classes: Annotated[
        int | None, Option(help="number of classes to prepare, starting with the first; all by default")
    ] = None,
    skip_corrupt: Annotated[bool, Option("--skip-corrupt", help="skip images that cannot be decoded")] = False,
    workers: WorkersOption = None,
    force: Annotated[bool, Option("--force", help="replace an existing data set of the same name and size")] = False,
    strict: Annotated[bool, Option("--strict", help="end with an error instead of warnings about the images")] = False,
    format: FormatOption = "terminal",
) -> None:
    """Decode the images of a data set once, so that all trials can share them in memory.

    Each image is resized (bicubic) so that its short side has `--size` pixels, and is then cropped to its central
    square. With `--backbone`, images are resized and cropped as in timm's evaluation of that backbone. As in
    torchvision, palette, greyscale and CMYK images are converted to RGB, alpha channels are dropped, and EXIF
    orientation is ignored. If the data set comes with a split into training and test images, this split is used. To
    continue after an interruption, run the same command again.

    Example: `fedsweep data prepare pacs --root pacs-64 --size 64`
    """
    check_format(format, ("terminal", "json"))

    from fedsweep.preparation.plan import Options, make_plan

    processes, console = worker_count(workers), progress_console()
    with waiting(console, "Listing the images"):  # DomainNet has 0.6 million
        plan = make_plan(Options(name, size, layout, backbone, test_fraction, classes), root)

    from fedsweep.preparation.prepare import prepare as make_store
    from fedsweep.preparation.tables import ImageBar

    with _resumable("decoded"), ImageBar(console) as bar:
        made = make_store(plan, processes, skip_corrupt, force, strict, bar, bar.compared)
    for warning in made.warnings:
        console.print(f"Warning: {warning}.", style="yellow", soft_wrap=True)
    if format == "json":
        json_data.print_prepared(made)
    else:
        _print_prepared(made, plan)


@contextlib.contextmanager
def _resumable(done: str) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        print(
            f"fedsweep: stopped; the images {done} so far are kept. To continue, run the same command again.",
            file=sys.stderr,
        )
        raise


def _print_prepared(made: Prepared, plan: Plan) -> None:
    from fedsweep.preparation.decode import MADE_WITH
    from fedsweep.preparation.tables import experiment_lines, headline, megabytes, split_words, summary

    console, card = result_console(), made.card
    console.print(headline(card))
    console.print(summary(card), "")
    console.print(f"Layout {card.layout}; {split_words(card)}.")
    if plan.listing.absent:
        console.print(f"Domains left out, because they are not in the folder: {', '.join(plan.listing.absent)}.")
    if card.skipped:
        named = ", ".join(card.skipped[:10]) + (" ..." if len(card.skipped) > 10 else "")
        console.print(f"Skipped images, which cannot be decoded: {len(card.skipped)} ({named})")
    verb = "Already prepared" if made.already else "Prepared"
    console.print(f"{verb}: {relative(made.folder)}, {megabytes(card.bytes)} MB, digest {card.digest[:12]}")
    if made.already and card.copies is None:
        console.print("An older version prepared it without looking for exact copies; use `--force` to look for them.")
    if made.already and card.validation is None and plan.validation_images:
        console.print(
            "An older version prepared it without recording which of its test images are listed for validation; use "
            "`--force` to record them."
        )
    if made.already and card.made_with != MADE_WITH:
        console.print(
            f"It was decoded with {card.made_with}, but {MADE_WITH} is installed; use `--force` to decode it again."
        )
    console.print("To use it in an experiment:", "", f"  {experiment_lines(card)}", sep="\n", soft_wrap=True)


@app.command("list")
def list_stores(format: FormatOption = "terminal") -> None:
    """List the prepared data sets, and the folder layouts that `fedsweep data prepare` can read.

    Example: `fedsweep data list`
    """
    check_format(format, ("terminal", "json"))

    from fedsweep.data.prepared.card import read_card, stores, unfinished
    from fedsweep.preparation.tables import layouts_table, stores_table

    console, cards, damaged = result_console(), [], []
    for folder in stores():
        try:
            cards.append(read_card(folder))
        except UserError as error:
            damaged.append(str(error))
    if format == "json":
        json_data.print_list(cards, damaged)
        return
    if cards:
        console.print(stores_table(cards), "")
    elif not damaged:
        console.print(f"No data set is prepared yet in the folder {relative(data_folder())}.", "", sep="\n")
    for sentence in damaged:
        console.print(f"Damaged: {sentence}", "", sep="\n", style="yellow")
    for folder in unfinished():
        console.print(
            f"Unfinished: {relative(folder)}. To continue, run the same `fedsweep data prepare` command again.",
            "",
            sep="\n",
        )
    console.print(layouts_table())


@app.command()
def show(
    name: Annotated[
        str, Argument(metavar="NAME", help="prepared data set, e.g. `pacs`", autocompletion=completion.prepared_sets)
    ],
    size: Annotated[
        int | None, Option(help="image size in pixels; required if the data set is prepared at several sizes")
    ] = None,
    out: OutOption = None,
    every: Annotated[bool, Option("--all", help="list every class, even if there are more than 40")] = False,
    verify: Annotated[
        bool, Option("--verify", help="read all pixels and check that their digest is unchanged")
    ] = False,
    split: Annotated[
        str | None,
        Option(
            help="only list the images of this split, `train`, `test` or `validation` (the test images that the data "
            "set lists for validation): domain, class and path, separated by tabs"
        ),
    ] = None,
    format: FormatOption = "terminal",
) -> None:
    """Print the number of images in each domain and class of a prepared data set, and draw sample images.

    With `--split test`, the held-out images are listed instead. Their paths are relative to the folder from which the
    data set was prepared.

    The sample images are drawn in one picture, in which wrong crops and wrong labels are easy to see. The picture is
    written next to the data set, or to the file given by `--out`.

    Example: `fedsweep data show pacs --size 64 --verify`
    """
    check_format(format, ("terminal", "json"))
    if split is not None:
        check_format(split, ("train", "test", "validation"), "--split")
    from fedsweep.data.prepared.card import find_store, read_card

    folder = find_store(name, size)
    card = read_card(folder)

    from fedsweep.data.prepared.arrow_files import verify as verify_pixels
    from fedsweep.preparation.figures import contact_sheet
    from fedsweep.preparation.tables import MOST_ROWS, counts_table, headline, label_counts, listed_images, split_words

    if verify:
        with waiting(progress_console(), "Reading all pixels"):
            verify_pixels(folder)
    if split is not None and format == "json":
        json_data.print_images(listed_images(folder, card, split))
        return
    if split is not None:
        sys.stdout.writelines(f"{chr(9).join(row)}\n" for row in listed_images(folder, card, split))
        return
    path = out or folder.with_name(f"{folder.name}.png")
    if format == "json":
        contact_sheet(folder, card, path)
        json_data.print_counts(folder, card, verify, path.absolute())
        return
    console = result_console()
    console.print(f"{headline(card)}: train / test")
    console.print(counts_table(card, label_counts(folder, card), every), "")
    if not every and len(card.class_names) > MOST_ROWS:
        console.print(f"Use `--all` to list all {len(card.class_names)} classes.")
    how = f"{card.interpolation}, {card.crop_mode} crop of {card.crop_pct:g}"
    console.print(f"Layout {card.layout}; {how}; {split_words(card)}; skipped images: {len(card.skipped)}.")
    console.print(f"Digest {card.digest}{' (verified)' if verify else ''}", soft_wrap=True)
    shown = contact_sheet(folder, card, path)
    console.print(f"Contact sheet of {shown} classes: {relative(path.absolute())}")


@app.command()
def partition(
    name: FileArgument,
    overrides: Overrides = None,
    out: OutOption = None,
    format: FormatOption = "terminal",
) -> None:
    """Print the number of images and classes of each client, and plot the number of images by client and class.

    The column `distance` is the total-variation distance between the label distributions of a client and of the
    client's domain. The skew of a partition is the mean of the column `distance` over all clients. The skew is 0 if
    all clients of a domain have the same label distribution. For a search space, the partitions are drawn with the
    first seed, and the plot has a panel for each distinct partition.

    Example: `fedsweep data partition fedra_digits partition=feature_label_skew partition.alpha=0.1`
    """
    check_format(format, ("terminal", "json"))
    changes = parse_overrides(overrides or [])
    kind, _ = find_either(name)
    if kind == "experiments":
        configs = [read_experiment(name, changes)]
    else:
        request = read_space(name, changes)

        from fedsweep.sweep.plan.plan import Plan as SweepPlan

        configs = [config for _, config in SweepPlan.of(request).configs]

    from fedsweep.cli.partition_table import distinct_panels, of_panel, partition_table
    from fedsweep.preparation.figures import draw_partitions, missing_classes

    panels, class_names = distinct_panels(configs)
    path = out or Path(f"partition-{name.replace('/', '-')}.png")
    draw_partitions(panels, class_names, path)
    if format == "json":
        described = [of_panel(panel, class_names) for panel in panels]
        json_output.document("data partition", partitions=described, picture=path.absolute())
        return
    console = result_console()
    for panel in panels:
        notes = map(Text, missing_classes(panel.clients, class_names))
        console.print(partition_table(panel, class_names), *notes, "", sep="\n")
    console.print(f"Picture: {relative(path.absolute())}")


@app.command()
def generate(
    experiment: Annotated[
        str,
        Argument(
            metavar="EXPERIMENT",
            help="experiment whose `synthetic.name` is `diffusers`",
            autocompletion=completion.files("experiments"),
        ),
    ],
    overrides: Overrides = None,
    device: DeviceOption = "cpu",
    workers: WorkersOption = None,
    format: FormatOption = "terminal",
) -> None:
    """Generate the synthetic images of an experiment with its text-to-image model, and prepare them as a data set.

    The images depend only on the model, the prompt and `synthetic.seed`, so all runs and methods share them. To
    continue after an interruption, run the same command again.

    The number of generated images of each domain is `synthetic.share` times the number of its training images. If you
    increase `synthetic.share`, only the additional images are generated.

    Example: `fedsweep data generate fedag_office_home --device cuda`
    """
    check_format(format, ("terminal", "json"))
    changes = parse_overrides(overrides or [])
    check_experiment(experiment, changes)  # report a mistake before importing torch, which is slow
    checked_device(device)
    processes = worker_count(workers)

    from fedsweep.preparation.generate import generate as make_images
    from fedsweep.preparation.generate import plan_generation, prepare_generated
    from fedsweep.preparation.tables import ImageBar, headline, megabytes, summary

    console = progress_console()
    config = read_experiment(experiment, changes)
    with placed(find("experiments", experiment), changes):
        generation = plan_generation(config)
    with _resumable("generated"):
        with ImageBar(console, "generating", "generated") as bar:
            made = make_images(generation, device, bar)
        with ImageBar(console) as bar:
            prepared = prepare_generated(generation, processes, bar, bar.compared)
    if format == "json":
        json_output.document("data generate", data_set=prepared.card, folder=prepared.folder, new=made)
        return
    console, card = result_console(), prepared.card
    console.print(headline(card))
    console.print(summary(card), "")
    console.print(f"Generated: {relative(generation.folder)}, {made} of {len(generation.images)} images are new")
    console.print(f"Prepared: {relative(prepared.folder)}, {megabytes(card.bytes)} MB, digest {card.digest[:12]}")
