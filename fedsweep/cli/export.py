"""The commands `fedsweep export` and `fedsweep predict`."""

from __future__ import annotations

import csv
import io
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.table import Column, Table
from rich.text import Text
from typer import Argument, Option

from fedsweep.cli import completion, json_output
from fedsweep.cli.json_output import FormatOption
from fedsweep.cli.options import DEFAULT_STORE, MlflowOption, StoreOption, check_format
from fedsweep.cli.output import awaiting, loading_torch, progress_console, relative, result_console
from fedsweep.common.errors import UserError
from fedsweep.common.files import inert_cell, write_atomically
from fedsweep.results import Store

if TYPE_CHECKING:
    from fedsweep.export.card import ExportCard
    from fedsweep.export.predict import Predictions
    from fedsweep.export.which_trial import Named
    from fedsweep.tracking import Registration

MANY = 20  # from this number of images on, the predictions of single images are not printed as a table


def export(
    trial: Annotated[
        str,
        Argument(
            metavar="TRIAL",
            help="trial to export: a trial's key or the start of its key, an arm of a sweep as `SPACE[@SWEEP][:ARM]`, "
            "or an experiment that you ran with `fedsweep run`",
            autocompletion=completion.sweeps,
        ),
    ],
    to: Annotated[Path, Option("--to", metavar="DIR", help="folder to write; it must be new or empty")],
    client: Annotated[
        str | None,
        Option(
            help="id of a client whose own model to export, if the method trains one model per client; by default, the "
            "global model is exported"
        ),
    ] = None,
    unfinished: Annotated[
        bool, Option("--unfinished", help="also accept trials that have not finished or were pruned")
    ] = False,
    register: Annotated[
        str | None,
        Option(metavar="NAME", help="also add the model to MLflow's model registry, as a new version of NAME"),
    ] = None,
    store: StoreOption = DEFAULT_STORE,
    mlflow: MlflowOption = None,
    format: FormatOption = "terminal",
) -> None:
    """Export a trained model to a folder that timm, or transformers with PEFT, can load without fedsweep.

    If TRIAL matches several trials, the trial with the best value of the objective is exported. As a check, the
    exported model is loaded again. The export fails if the loaded model predicts differently from the original model.

    Example: `fedsweep export ablations/lora_rank:lora.rank=4 --to rank4`
    """
    check_format(format, ("terminal", "json"))
    with loading_torch("fedsweep.export.write"):
        from fedsweep.export.which_trial import find_trial
        from fedsweep.export.write import check_target
        from fedsweep.export.write import export as write

    check_target(to)
    home = Store.at(store)
    named = find_trial(home, trial, unfinished)
    registration = None if register is None else _registration(register, home, named, mlflow)
    target, version = to.absolute(), None
    with awaiting("Building the model of the run, and checking the exported model"):
        card = write(named, target, client)
    if registration is not None:
        with awaiting("Registering the model in MLflow"):
            version = registration.add(target, *version_of(card))
    if format == "json":
        json_output.document(
            "export",
            **{"folder": target, "model": card.what, "key": card.origin.key, "seed": card.seed, "round": card.round},
            **{"outcome": card.outcome, "metrics": card.metrics, "chosen": named.why or None},
            registered=None if version is None else {"name": register, "version": version},
        )
    else:
        _show_export(card, named, target, None if version is None else f"{register}, version {version}")


def _show_export(card: ExportCard, named: Named, target: Path, registered: str | None) -> None:
    console = result_console()
    taken = f", {named.why}" if named.why else ""
    arm = f"{named.record.plan.label}, " if card.origin.arm else ""
    console.print(f"Exported {card.what} ({arm}seed {card.seed}){taken}.", soft_wrap=True)
    scores = [f"{name} {score:.2%}" for name, score in card.scores.items()][:1] or ["not tested in the run"]
    console.print(f"Written to {relative(target)}: state after round {card.round} ({card.outcome}), {scores[0]}.")
    if registered is not None:
        console.print(f"Registered in MLflow as {registered}.")
    console.print(f"{relative(target / 'README.md')} shows how to load the model without fedsweep.", soft_wrap=True)


def _registration(model: str, home: Store, named: Named, mlflow: str | None) -> Registration:
    """Return the registration of a trial as a version of `model`. The MLflow server is checked."""
    from fedsweep.tracking import Destination, Registration

    shown = named.sweep.folder if named.sweep else named.trial.folder
    sweep = named.sweep.manifest().id if named.sweep else None
    destination = Destination.of_sweep(home.root, shown, mlflow)
    return Registration(destination, model, named.name, named.record.plan.key, sweep)


def version_of(card: ExportCard) -> tuple[str, dict[str, str]]:
    """Return the name of the artifact folder and the tags for a new version in MLflow's model registry.

    The folder is named after the round, e.g. `export-5`. If the model is a client's own model, the folder name ends
    with the id of the client.
    """
    whose = f"-{card.origin.client}" if card.origin.client else ""
    tags = {"method": card.method, "seed": str(card.seed), "round": str(card.round), "trial": card.origin.key}
    return f"export-{card.round}{whose}", {f"fedsweep.{name}": value for name, value in tags.items()}


def predict(
    folder: Annotated[Path, Argument(metavar="DIR", help="folder written by `fedsweep export`")],
    images: Annotated[Path, Argument(metavar="IMAGES", help="folder of images; subfolders are searched too")],
    form: Annotated[str, Option("--format", help="output format: `table`, `csv` or `json`")] = "table",
    top: Annotated[int, Option(min=1, help="number of classes to list for each image, the most probable first")] = 1,
    output: Annotated[
        Path | None, Option(metavar="FILE", help="file to write the predictions to, instead of printing them")
    ] = None,
) -> None:
    """Classify the images of a folder with an exported model.

    The images are decoded, resized and cropped in the same way as the images on which the model was trained. If some
    images cannot be read, their names are printed, the other images are classified, and the exit code is 1. If every
    image is in a folder named after its class, the accuracy and a table by class are printed first. The predictions of
    single images are printed only if there are fewer than 20 images, or with `--format csv` or `--format json`.

    Example: `fedsweep predict rank4 photos --format csv --output photos.csv`
    """
    check_format(form, ("table", "csv", "json"))

    with loading_torch("fedsweep.export.predict"):
        from fedsweep.export.predict import load, pictures
        from fedsweep.export.predict import predict as classify
        from fedsweep.preparation.tables import ImageBar

    names, console = pictures(images), progress_console()
    with awaiting("Loading the model"):
        model = load(folder)
    with ImageBar(console, "classifying", "classifying") as bar:
        found = classify(model, images, names, top, bar)
    text = {"table": as_text, "csv": as_csv, "json": as_json}[form](found)
    if output is not None:
        try:
            write_atomically(output.absolute(), text.encode())
        except OSError as error:
            raise UserError(f"`--output` {output} cannot be written: {error.strerror or error}.") from None
        console.print(
            f"Predictions for {len(found.images)} images written to {relative(output.absolute())}", soft_wrap=True
        )
    elif form == "table":
        show_predictions(found, model.card)
    else:
        sys.stdout.write(text)
    if found.accuracy is not None and (form == "csv" or (form == "table" and output is not None)):
        print(accuracy_sentence(found, model.card), file=sys.stderr)
    for name, reason in found.broken.items():
        print(f"fedsweep: {images / name} cannot be read: {reason}.", file=sys.stderr)
    if found.broken:
        raise SystemExit(1)


def show_predictions(found: Predictions, card: ExportCard) -> None:
    """Print the accuracy, a table by class and, if there are fewer than 20 images, the prediction of each image.

    If there is no accuracy, the table by class contains only the numbers of predicted images.
    """
    console, counts = result_console(), found.by_class()
    if found.accuracy is not None:
        console.print(accuracy_sentence(found, card), soft_wrap=True)
        table = Table("class", *(Column(name, justify="right") for name in ("images", "correct", "accuracy")), box=None)
        for name, (correct, images) in counts.items():
            table.add_row(Text(name), str(images), str(correct), f"{correct / images:.2%}")
    else:
        table = Table("predicted class", Column("images", justify="right"), box=None)
        for name, images in sorted(Counter(guesses[0].name for guesses in found.images.values()).items()):
            table.add_row(Text(name), str(images))
    console.print(table)
    if len(found.images) >= MANY:
        console.print("Use `--format csv` or `--format json` for the prediction of each image.")
        return
    header, *rows = table_rows(found)
    table = Table(*header, box=None)
    for row in rows:
        table.add_row(*map(Text, row))
    console.print("", table, sep="\n")


def accuracy_sentence(found: Predictions, card: ExportCard) -> str:
    """Return the accuracy over all images as text, and how it differs from the run's mean accuracy over domains."""
    images_read = "1 image" if len(found.images) == 1 else f"{len(found.images)} images"
    sentence = f"Accuracy {found.accuracy or 0.0:.2%} on {images_read}, with the folders' names as labels."
    if (mean := card.scores.get("accuracy/mean")) is not None:
        sentence += (
            f" This is a mean over images, whereas the accuracy/mean of the run ({mean:.2%}) is a mean over domains."
        )
    return sentence


def table_rows(found: Predictions) -> list[list[str]]:
    """Return a header row, and one row per image with its path and the name and probability of each predicted class."""
    most = max((len(guesses) for guesses in found.images.values()), default=1)
    numbers = ["", *(f" {place}" for place in range(2, most + 1))]
    header = ["path", *(f"{name}{number}" for number in numbers for name in ("class", "probability"))]
    rows = [
        [name, *(text for one in guesses for text in (one.name, f"{one.probability:.6f}"))]
        for name, guesses in found.images.items()
    ]
    return [header, *rows]


def as_csv(found: Predictions) -> str:
    """Return predictions as CSV text with a header row."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([*map(inert_cell, row)] for row in table_rows(found))
    return text.getvalue()


def as_text(found: Predictions) -> str:
    """Return predictions as text in left-aligned columns."""
    rows = table_rows(found)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines) + "\n"


def as_json(found: Predictions) -> str:
    """Return the predictions, the unreadable images and the accuracy as JSON text."""
    images = [
        {"path": name, "predictions": [{"class": one.name, "probability": one.probability} for one in guesses]}
        for name, guesses in found.images.items()
    ]
    broken = [{"path": name, "reason": reason} for name, reason in found.broken.items()]
    return json_output.text("predict", images=images, broken=broken, accuracy=found.accuracy)
