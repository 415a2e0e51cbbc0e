"""`fedsweep export`. Nothing heavy is imported at the top: mistakes are told at once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedsweep.cli.options import DEFAULT_STORE, MlflowOption, StoreOption

if TYPE_CHECKING:
    from fedsweep.export.card import ExportCard


def export(
    trial: Annotated[
        str,
        typer.Argument(
            metavar="TRIAL",
            help="a trial's key or how it begins, `SPACE[@SWEEP][:ARM]`, or an experiment that was run",
        ),
    ],
    to: Annotated[Path, typer.Option("--to", metavar="DIR", help="the folder that is made; it must be new or empty")],
    client: Annotated[
        str | None, typer.Option(help="a client's own model, where the method gives it one, instead of the global one")
    ] = None,
    unfinished: Annotated[
        bool, typer.Option("--unfinished", help="take a trial also as it stands before its end, or after a pruning")
    ] = False,
    register: Annotated[
        str | None, typer.Option(metavar="NAME", help="also make it a version of this model in MLflow's registry")
    ] = None,
    store: StoreOption = DEFAULT_STORE,
    mlflow: MlflowOption = None,
) -> None:
    """Write a trained model as a folder that timm or transformers and PEFT load without fedsweep.

    Of several trials that the name means, the best by the sweep's objective is taken. What is in the folder is loaded
    again and compared with the run's own evaluation before the folder gets its name.

    Example: `fedsweep export ablations/lora_rank:lora.rank=4 --to rank4`
    """
    from fedsweep.export.exportable import check_target
    from fedsweep.export.which_trial import find_trial
    from fedsweep.results import Store

    check_target(to)
    home = Store.at(store)
    named = find_trial(home, trial, unfinished)
    if register is not None:
        from fedsweep.tracking import Destination, Registration

        shown = named.sweep.folder if named.sweep else named.trial.folder
        sweep = named.sweep.manifest().id if named.sweep else None
        destination = Destination.of_sweep(home.root, shown, mlflow)
        registration = Registration.of(destination, register, named.name, named.record.plan.key, sweep)

    from fedsweep.export.write import export as write
    from fedsweep.terminal import progress_console, relative, result_console

    console, target = result_console(), to.absolute()
    with progress_console().status("building the model of the run"):
        card = write(named, target, client)
    taken = f", {named.why}" if named.why else ""
    seed = f"seed {card.seed}"
    arm = f"{named.record.plan.label}, {seed}" if card.origin.arm else seed
    console.print(f"Exported {card.what} ({arm}){taken}.", soft_wrap=True)
    scores = [f"{name} {score:.2%}" for name, score in card.scores.items()][:1] or ["not tested in the run"]
    console.print(f"After round {card.round} ({card.outcome}), {scores[0]}: {relative(target)}")
    if register is not None:
        with progress_console().status("registering in MLflow"):
            version = registration.add(target, *version_of(card))
        console.print(f"Registered in MLflow as {register}, version {version}.")
    console.print(f"{relative(target / 'README.md')} has the lines that load it without fedsweep.", soft_wrap=True)


def version_of(card: ExportCard) -> tuple[str, dict[str, str]]:
    """Where a version's files lie among its run's artifacts, another place for each round and client; its tags."""
    whose = f"-{card.origin.client}" if card.origin.client else ""
    tags = {"method": card.method, "seed": str(card.seed), "round": str(card.round), "trial": card.origin.key}
    return f"export-{card.round}{whose}", {f"fedsweep.{name}": value for name, value in tags.items()}
