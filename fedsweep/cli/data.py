"""`fedsweep data`: prepare, list and show data sets, draw partitions, and generate synthetic images."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.table import Table
from rich.text import Text
from typer import Argument, Option, Typer

from fedsweep.cli.options import DeviceOption, Overrides, WorkersOption, checked_device, read_experiment, worker_count
from fedsweep.cli.output import progress_console, relative, result_console
from fedsweep.common.config import flat
from fedsweep.common.errors import UserError
from fedsweep.common.paths import data_folder, find, find_either
from fedsweep.common.yaml_values import parse_overrides

if TYPE_CHECKING:
    from fedsweep.federation.run_config import RunConfig
    from fedsweep.preparation.figures import Panel
    from fedsweep.preparation.plan import Plan
    from fedsweep.preparation.prepare import Prepared


app = Typer(name="data", no_args_is_help=True, help="Prepare data sets and look at them.")

OutOption = Annotated[Path | None, Option(metavar="PNG", help="where the picture goes")]


@app.command()
def prepare(
    name: Annotated[str, Argument(metavar="NAME", help="what the set will be called, e.g. `pacs`")],
    root: Annotated[Path, Option(metavar="DIR", help="folder that the images lie in")],
    layout: Annotated[str | None, Option(help="one that `fedsweep data list` names; else found by itself")] = None,
    size: Annotated[int, Option(help="height and width of the decoded images, pixels")] = 224,
    backbone: Annotated[
        str | None, Option(metavar="TIMM_NAME", help="crop and resize as timm evaluates this model")
    ] = None,
    test_fraction: Annotated[
        float, Option(help="share of each class held out for testing, where the data set says nothing")
    ] = 0.2,
    classes: Annotated[int | None, Option(help="take only the first so many classes")] = None,
    skip_corrupt: Annotated[bool, Option("--skip-corrupt", help="leave out images that cannot be decoded")] = False,
    workers: WorkersOption = None,
    force: Annotated[bool, Option("--force", help="replace a prepared set of that name and size")] = False,
) -> None:
    """Decode a data set once, so that all trials read its pixels from one memory map.

    The short side is resized to `--size` (bicubic) and the centre is cropped; `--backbone` follows a model's own
    evaluation instead. Palette, grey and CMYK become RGB, alpha is dropped, EXIF orientation is ignored, as torchvision
    does it. A split that comes with the data is kept. The same command goes on where it was stopped.

    Example: `fedsweep data prepare pacs --root pacs-64 --size 64`
    """
    from fedsweep.preparation.plan import Options, make_plan

    processes, console = worker_count(workers), progress_console()
    with console.status("looking at the files"):  # DomainNet has 0.6 million
        plan = make_plan(Options(name, size, layout, backbone, test_fraction, classes), root)

    from fedsweep.preparation.prepare import prepare as make_store
    from fedsweep.preparation.tables import ImageBar

    with _resumable("decoded"), ImageBar(console) as bar:
        made = make_store(plan, processes, skip_corrupt, force, bar)
    _print_prepared(made, plan)


@contextlib.contextmanager
def _resumable(done: str) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        print(f"fedsweep: stopped; what is {done} is kept, and the same command goes on from there.", file=sys.stderr)
        raise


def _print_prepared(made: Prepared, plan: Plan) -> None:
    from fedsweep.preparation.decode import MADE_WITH
    from fedsweep.preparation.tables import experiment_lines, headline, megabytes, split_words, summary

    console, card = result_console(), made.card
    console.print(headline(card))
    console.print(summary(card), "")
    console.print(f"Layout {card.layout}; {split_words(card)}.")
    if plan.listing.absent:
        console.print(f"Not there, and left out: {', '.join(plan.listing.absent)}.")
    if card.skipped:
        named = ", ".join(card.skipped[:10]) + (" ..." if len(card.skipped) > 10 else "")
        console.print(f"Skipped {len(card.skipped)} that cannot be decoded: {named}")
    verb = "Already prepared" if made.already else "Prepared"
    console.print(f"{verb}: {relative(made.folder)}, {megabytes(card.bytes)} MB, digest {card.digest[:12]}")
    if made.already and card.made_with != MADE_WITH:
        console.print(f"It was decoded with {card.made_with}; here is {MADE_WITH}, `--force` decodes anew with it.")
    console.print("In an experiment:", "", f"  {experiment_lines(card)}", sep="\n", soft_wrap=True)


@app.command("list")
def list_stores() -> None:
    """Name the data sets that are prepared, and the layouts that `prepare` reads.

    Example: `fedsweep data list`
    """
    from fedsweep.data.prepared.card import read_card, stores, unfinished
    from fedsweep.preparation.tables import layouts_table, stores_table

    console, cards, damaged = result_console(), [], []
    for folder in stores():
        try:
            cards.append(read_card(folder))
        except UserError as error:
            damaged.append(str(error))
    if cards:
        console.print(stores_table(cards), "")
    elif not damaged:
        console.print(f"Nothing is prepared in {relative(data_folder())} yet.", "", sep="\n")
    for sentence in damaged:
        console.print(f"Damaged: {sentence}", "", sep="\n", style="yellow")
    for folder in unfinished():
        console.print(f"Unfinished: {relative(folder)}; the same `fedsweep data prepare` goes on.", "", sep="\n")
    console.print(layouts_table())


@app.command()
def show(
    name: Annotated[str, Argument(metavar="NAME", help="a prepared data set, e.g. `pacs`")],
    size: Annotated[int | None, Option(help="which, where it is prepared at several sizes")] = None,
    out: OutOption = None,
    every: Annotated[bool, Option("--all", help="a row for each class, even of more than 40")] = False,
    verify: Annotated[bool, Option("--verify", help="read all pixels and compute the digest again")] = False,
) -> None:
    """Count a prepared set's images per domain and class, and draw a contact sheet of them.

    Look at the sheet: a wrong crop or a wrong label is seen at once. It goes beside the set, or where `--out` says.

    Example: `fedsweep data show pacs --size 64 --verify`
    """
    from fedsweep.data.prepared.card import find_store, read_card

    folder = find_store(name, size)
    card = read_card(folder)

    from fedsweep.data.prepared.arrow_files import stored_digest
    from fedsweep.preparation.figures import contact_sheet
    from fedsweep.preparation.tables import MOST_ROWS, counts_table, headline, label_counts, split_words

    if verify:
        with progress_console().status("reading all pixels"):
            found = stored_digest(folder, card)
    if verify and found != card.digest:
        raise UserError(
            f"{folder} has changed since it was prepared: its digest is {found[:12]}, but its card says "
            f"{card.digest[:12]}; `fedsweep data prepare {card.name} --root DIR --size {card.size} --force` would make "
            "it again."
        )
    console = result_console()
    console.print(f"{headline(card)}: train / test")
    console.print(counts_table(card, label_counts(folder, card), every), "")
    if not every and len(card.class_names) > MOST_ROWS:
        console.print(f"`--all` lists the {len(card.class_names)} classes.")
    how = f"{card.interpolation}, {card.crop_mode} crop of {card.crop_pct:g}"
    console.print(f"Layout {card.layout}; {how}; {split_words(card)}; {len(card.skipped)} skipped.")
    console.print(f"Digest {card.digest}{' (verified)' if verify else ''}", soft_wrap=True)
    path = out or folder.with_name(f"{folder.name}.png")
    shown = contact_sheet(folder, card, path)
    console.print(f"Contact sheet of {shown} classes: {relative(path.absolute())}")


@app.command()
def partition(
    name: Annotated[str, Argument(metavar="NAME", help="an experiment or a search space")],
    overrides: Overrides = None,
    out: OutOption = None,
) -> None:
    """Show which client holds how many images of which class, as a table and as a picture.

    A search space gets a panel for each partition that its arms have, drawn with its first seed. The skew is the mean
    total-variation distance of the clients' labels from those of their domain: 0 where all are alike.

    Example: `fedsweep data partition ablations/lora_rank federation.rounds=5`
    """
    changes = parse_overrides(overrides or [])
    kind, _ = find_either(name)  # a wrong name is told before torch is imported

    from fedsweep.preparation.figures import draw_partitions
    from fedsweep.sweep.plan.plan import Plan as SweepPlan

    if kind == "experiments":
        configs = [read_experiment(name, changes)]
    else:
        configs = [config for _, config in SweepPlan.read(name, changes, {}).configs]
    panels, class_names = _panels(configs)
    path = out or Path(f"partition-{name.replace('/', '-')}.png")
    draw_partitions(panels, class_names, path)
    console = result_console()
    for panel in panels:
        console.print(_partition_table(panel, class_names), "")
    console.print(f"Picture: {relative(path.absolute())}")


DECIDES = ("data", "partition", "seed")  # the parts of an experiment that determine its partition


def _panels(configs: Iterable[RunConfig]) -> tuple[list[Panel], tuple[str, ...]]:
    """Return one panel per distinct partition, and the names of the classes."""
    from fedsweep.federation.build_and_run import split
    from fedsweep.preparation.figures import Panel

    different: dict[str, RunConfig] = {}
    for config in configs:
        different.setdefault(config.model_dump_json(include=set(DECIDES)), config)
    values = [
        {key: value for key, value in flat(config).items() if key.split(".")[0] in DECIDES}
        for config in different.values()
    ]
    varied = [key for key in values[0] if any(one.get(key) != values[0][key] for one in values)]
    varied += sorted({key for one in values for key in one} - set(values[0]))
    panels: list[Panel] = []
    class_names: tuple[str, ...] = ()
    for config, own in zip(different.values(), values, strict=True):
        data, parts = split(config)
        class_names = data.class_names
        title = ", ".join(f"{key.rsplit('.', 1)[-1]} {own[key]}" for key in varied if key in own)
        panels.append(Panel(title or config.partition.name.replace("_", " "), parts.clients))
    return panels, class_names


def _partition_table(panel: Panel, class_names: tuple[str, ...]) -> Table:
    """Return a table of images, classes and skew by client."""
    from fedsweep.preparation.figures import class_counts, distances, skew

    clients, classes = panel.clients, len(class_names)
    title = Text(f"{panel.title} (skew {skew(clients, classes):.2f})")
    table = Table("client", title=title, title_justify="left", box=None)
    for heading in ("images", "classes"):
        table.add_column(heading, justify="right")
    table.add_column("most of")
    table.add_column("distance", justify="right")
    for client, row, distance in zip(clients, class_counts(clients, classes), distances(clients, classes), strict=True):
        most = int(row.argmax())
        share = f"{class_names[most]} {row[most] / max(1, row.sum()):.0%}"
        table.add_row(Text(client.id), str(row.sum()), str((row > 0).sum()), Text(share), f"{distance:.2f}")
    return table


@app.command()
def generate(
    experiment: Annotated[str, Argument(metavar="EXPERIMENT", help="one whose `synthetic` is diffusers")],
    overrides: Overrides = None,
    device: DeviceOption = "cpu",
    workers: WorkersOption = None,
) -> None:
    """Make the synthetic images of an experiment with its text-to-image model, and prepare them.

    The same command goes on where it was stopped, and a larger `synthetic.share` only adds. The images are a function
    of the model, the prompt and `synthetic.seed`: all runs and methods share them.

    Example: `fedsweep data generate fedag_animals --device cuda`
    """
    changes = parse_overrides(overrides or [])
    find("experiments", experiment)  # a wrong name is told before torch is imported
    checked_device(device)
    processes = worker_count(workers)

    from fedsweep.preparation.generate import generate as make_images
    from fedsweep.preparation.generate import plan_generation, prepare_generated
    from fedsweep.preparation.tables import ImageBar, headline, megabytes, summary

    console = progress_console()
    generation = plan_generation(read_experiment(experiment, changes), f"experiment {experiment}")
    with _resumable("made"):
        with ImageBar(console, "generating", "generated") as bar:
            made = make_images(generation, device, bar)
        with ImageBar(console) as bar:
            prepared = prepare_generated(generation, processes, bar)
    console, card = result_console(), prepared.card
    console.print(headline(card))
    console.print(summary(card), "")
    console.print(f"Generated: {relative(generation.folder)}, {made} of {len(generation.images)} images made now")
    console.print(f"Prepared: {relative(prepared.folder)}, {megabytes(card.bytes)} MB, digest {card.digest[:12]}")
