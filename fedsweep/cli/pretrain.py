"""The command `fedsweep pretrain`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from fedsweep.cli import completion
from fedsweep.cli.early_check import check
from fedsweep.cli.options import DeviceOption, checked_device
from fedsweep.cli.output import awaiting, loading_torch, progress_console, relative
from fedsweep.common.errors import UserError
from fedsweep.common.paths import find
from fedsweep.common.places import placed
from fedsweep.common.yaml_values import parse_overrides, read_yaml

PretrainOverrides = Annotated[
    list[str] | None,
    Argument(
        metavar="[NAME=VALUE]...",
        help="hyperparameters to change, by dotted name, e.g. `optimizer.lr=5e-4`",
        autocompletion=completion.overrides,
    ),
]


def pretrain(
    experiment: Annotated[
        str,
        Argument(
            metavar="EXPERIMENT",
            help="pre-training configuration, e.g. `tinyimagenet_vit`",
            autocompletion=completion.files("pretrain"),
        ),
    ],
    overrides: PretrainOverrides = None,
    out: Annotated[
        Path | None, Option(help="weights file; by default, `backbones/EXPERIMENT.safetensors` in the data folder")
    ] = None,
    device: DeviceOption = "cpu",
    threads: Annotated[
        int | None, Option(min=1, help="number of CPU threads; it slightly affects the weights  [default: 1]")
    ] = None,
    resume: Annotated[bool, Option("--resume", help="continue after the last saved epoch")] = False,
) -> None:
    """Train a backbone from scratch on a data set that `fedsweep data prepare` has prepared.

    Example: `fedsweep pretrain tinyimagenet_vit epochs=1`
    """
    changes = parse_overrides(overrides or [])
    file, where = find("pretrain", experiment), f"pre-training {experiment}"
    content = read_yaml(file)
    check("PretrainConfig", content, where, changes, file)
    checked_device(device)

    with loading_torch("fedsweep.pretraining.loop"):
        import torch

        from fedsweep.pretraining.config import PretrainConfig
        from fedsweep.pretraining.loop import EpochTable, default_out, exclusively, start, train, write_result

    torch.set_num_threads(threads or 1)
    config = PretrainConfig.of(content, where, file=file).override(changes, where)
    target = (out or default_out(experiment)).absolute()
    console, finished = progress_console(), 0
    try:
        with exclusively(target):
            with awaiting("Reading the images"), placed(file, changes):
                session, saved = start(config, target, device, threads, resume)
            torch.set_num_threads(session.threads)
            finished = len(saved.history) if saved else 0
            with EpochTable(session, finished, console) as table:
                for record in train(session, saved, table.on_step):
                    finished = record.epoch
                    table.add(record)
            card = write_result(session, experiment, target)
    except KeyboardInterrupt:
        kept = f"{finished} of {config.epochs} epochs. To continue, run the same command with --resume."
        console.print(f"Stopped after {kept}" if finished else "Stopped before the end of the first epoch.")
        raise SystemExit(130) from None
    except BrokenPipeError:  # the reader of the pipe has ended
        raise
    except OSError as error:  # a full disk, for example; files written before are intact
        raise UserError(f"{target.parent} cannot be written: {error.strerror or error}.") from None
    console.print(f"Validation accuracy {card['validation_accuracy']:.2%}; weights written to {relative(target)}.")
