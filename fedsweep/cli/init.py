"""The command `fedsweep init`, which writes the files of a new project."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

from typer import Argument, Option

from fedsweep.cli.output import awaiting, result_console
from fedsweep.common.errors import UserError, summarise_list
from fedsweep.common.paths import FOR_EDITORS, MARKER, shipped_folder

if TYPE_CHECKING:
    from fedsweep.preparation.plan import Plan

SIZE = 64
"""Height and width in pixels to which the command that `init` prints prepares the images."""
CLIENTS = 4
"""Number of clients if all images belong to a single domain."""
SPACE = "lora_rank"
DIGITS = "my_digits"


class Project(NamedTuple):
    """The experiment of a new project."""

    name: str
    about: str
    """A sentence about the experiment."""
    experiment: str
    """The text of the experiment's YAML file, without the comments at its beginning."""
    prepare: str = ""
    """The command that prepares the images; empty if the images are shipped."""


def init(
    folder: Annotated[
        Path, Argument(metavar="[DIR]", help="folder of the project; it is created if it does not exist")
    ] = Path(),
    images: Annotated[
        Path | None,
        Option(
            "--images",
            metavar="FOLDER",
            help="folder of images, in a layout that `fedsweep data prepare` can read; without it, the project uses "
            "the shipped images of digits",
        ),
    ] = None,
) -> None:
    """Write the files of a new project: an experiment, an ablation on it, and a README with the first commands.

    The file `fedsweep.toml` marks the root folder of the project. In the root folder and in all folders below it, the
    commands use the project's experiments, search spaces, results and prepared data sets. No existing file is
    overwritten. The last line of the output is the next command to type.

    Example: `fedsweep init animals --images photos`
    """
    target = folder.expanduser().absolute()
    check_free(target)
    project = of_digits() if images is None else of_images(images, target)
    contents = files(project)
    write(target, contents)
    console = result_console()
    for name in contents:
        console.print(f"Written: {folder / name}", soft_wrap=True)
    enter = "" if target == Path.cwd() else f"cd {shlex.quote(str(folder))} && "
    console.print("Next:", f"{enter}{project.prepare or f'fedsweep tune {SPACE}'}", sep="\n", soft_wrap=True)


def check_free(target: Path) -> None:
    """Raise UserError if `target` is a file, or a folder that contains a file or folder of a project."""
    if target.exists() and not target.is_dir():
        raise UserError(f"DIR must be a folder, but {target} is a file.")
    names = (MARKER, "README.md", ".gitignore", "experiments", "search_spaces", "schemas")
    if taken := [name for name in names if os.path.lexists(target / name)]:
        raise UserError(
            f"`fedsweep init` overwrites nothing, but {target} already contains {summarise_list(taken)}; name a new "
            "folder, as in `fedsweep init DIR`."
        )


def of_digits() -> Project:
    """Return a project with the shipped experiment on digits."""
    about = "FedRA on the digits that fedsweep contains, in six styles: one client per style."
    return Project(DIGITS, about, _shipped_experiment("fedra_digits"))


def of_images(images: Path, target: Path) -> Project:
    """Return a project with an experiment on the images in a folder. The folder of the project is `target`.

    Raises:
        UserError: The images cannot be read, or do not have a layout that `fedsweep data prepare` can read.
    """
    from fedsweep.preparation.plan import Options, make_plan

    root = images.expanduser().absolute()
    name = re.sub(r"[^\w+-]+", "_", root.resolve().name, flags=re.ASCII).strip("_+-")[:100] or "images"
    if not root.is_dir():
        raise UserError(f"`--images` must be a folder with images, but {root} is not a folder.")
    with awaiting("Listing the images"):
        plan = make_plan(Options(name, SIZE), root)
    counted = (
        f"{len(plan.listing.items)} images of {len(plan.listing.class_names)} classes in {len(plan.domains)} domain"
        f"{'s' * (len(plan.domains) > 1)}"
    )
    words = ["fedsweep", "data", "prepare", name, "--root", os.path.relpath(root, target), "--size", str(SIZE)]
    clients = "one client per domain" if len(plan.domains) > 1 else f"{CLIENTS} clients"
    return Project(name, f"FedRA on {counted}: {clients}.", _of_plan(plan), shlex.join(words))


def _shipped_experiment(name: str) -> str:
    """Return the text of a shipped experiment without the comments at its beginning."""
    text = _shipped(f"experiments/{name}.yaml")
    return text[text.index("seed:") :]


def _shipped(name: str) -> str:
    return (shipped_folder() / name).read_text(encoding="utf-8")


def _of_plan(plan: Plan) -> str:
    """Return the shipped experiment on PACS, changed to other images and to weights that timm downloads."""
    from fedsweep.preparation.tables import yaml_word

    domains = [domain.name for domain in plan.domains]
    count = len(domains) if len(domains) > 1 else CLIENTS
    depths = [round(12 - 9 * place / (count - 1)) for place in range(count)]
    kind = ONE_PER_DOMAIN if len(domains) > 1 else POOLED.format(smallest=min(10, max(1, plan.domains[0].train // 8)))
    text = _shipped_experiment("fedra_pacs")
    text = _changed(text, r"^  model: .*\n  pretrained: .*\n", MODEL)
    text = _changed(text, r"^  patch_size: .*\n", "  patch_size: 8                   # timm resizes the weights\n")
    for name in ("embed_dim", "num_blocks", "num_heads"):
        text = _changed(text, rf"^  {name}: \d+\n", f"  {name}: null\n")
    text = _changed(text, r"^  mean: .*\n", "  mean: null                      # null: the weights' own values\n")
    text = _changed(text, r"^  scaling: .*\n", "  scaling: 1.0\n")
    text = _changed(text, r"^  set: .*\n", f"  set: {yaml_word(plan.options.name)}\n")
    text = _changed(text, r"^  domains: .*\n", f"  domains: [{', '.join(map(yaml_word, domains))}]\n")
    text = _changed(text, r"(?<=^partition:\n)  name: .*\n", kind)
    blocks = f"  # blocks that each client holds{', in the order of the domains' * (len(domains) > 1)}; or dynamic"
    return _changed(text, r"^  depths: .*\n", f"{f'  depths: {depths}':33}{blocks}\n")


MODEL = """\
  model: vit_tiny_patch16_224.augreg_in21k_ft_in1k   # a small Vision Transformer with 12 blocks, trained on ImageNet
  pretrained: timm                # downloaded once; or none, or a file that `fedsweep pretrain` has written
"""


ONE_PER_DOMAIN = """\
  name: feature_skew              # one client per domain; or feature_label_skew | label_skew | iid
"""
POOLED = f"""\
  name: label_skew                # or iid
  clients: {CLIENTS}
  alpha: 0.5                      # a small value gives each client few classes
  min_size: {{smallest:<20}}  # smallest number of images per client
"""


def _changed(text: str, pattern: str, new: str) -> str:
    """Return `text` with the only match of a pattern replaced."""
    changed, count = re.subn(pattern, lambda _: new, text, flags=re.MULTILINE)
    if count != 1:
        raise ValueError(f"{pattern!r} matches {count} times")
    return changed


def files(project: Project) -> dict[str, str]:
    """Return a dict from the path of each file of a new project, relative to the root folder, to its text."""
    first = [f"fedsweep show {project.name}", f"fedsweep run {project.name} federation.rounds=2"]
    if project.prepare:
        first = [project.prepare, f"fedsweep data partition {project.name}"]
    shown = [*first, *(f"fedsweep {words}" for words in COMMANDS)]
    width = min(max(map(len, shown)), 60)
    purposes = (PREPARED if project.prepare else SHIPPED) + SWEPT
    lines = (f"{command:{width}}  # {purpose}" for command, purpose in zip(shown, purposes, strict=True))
    before = f"#   {project.prepare}\n" if project.prepare else ""
    schemas = {f"schemas/{name}.json": _shipped(f"schemas/{name}.json") for name in ("experiment", "search_space")}
    header = f"{FOR_EDITOR.format('experiment')}# {project.about}\n#\n{before}#   fedsweep run {project.name}\n#\n"
    header += "# This file is complete: it lists every hyperparameter of the run.\n\n"
    return {
        f"experiments/{project.name}.yaml": header + project.experiment,
        f"search_spaces/{SPACE}.yaml": FOR_EDITOR.format("search_space") + ABLATION.replace("EXPERIMENT", project.name),
        **schemas,
        "README.md": README.format(commands="\n".join(lines), experiment=project.name),
        ".gitignore": GITIGNORE,
        MARKER: f"# {MARKER_TEXT}\n",
    }


def write(target: Path, contents: Mapping[str, str]) -> None:
    """Write the files of a project, or raise UserError and leave nothing behind if a file cannot be written."""
    above = next(one for one in (target, *target.parents) if one.exists())
    new = target.relative_to(above).parts[:1]
    tops, moved = list(dict.fromkeys(Path(name).parts[0] for name in contents)), list[Path]()
    try:
        target.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target, prefix=".fedsweep-") as staged:
            for name, text in contents.items():
                path = Path(staged, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
            for top in tops:  # the marker is last
                os.rename(Path(staged, top), target / top)
                moved.append(target / top)
    except BaseException as error:
        for path in [above / part for part in new] or moved:
            shutil.rmtree(path, ignore_errors=True)
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise UserError(f"the project cannot be written to {target}: {error.strerror or error}.") from None
        raise


SHIPPED = ("print all hyperparameters", "train one federated run of two rounds")
PREPARED = ("decode the images once, into data/", "print the clients and their images")
COMMANDS = (f"tune {SPACE} --dry-run", f"tune {SPACE}", f"report {SPACE}", "ui")
SWEPT = (
    "list the arms and estimate the time",
    "run all trials and print the table of results",
    "print the report again",
    "show all recorded metrics in MLflow",
)
MARKER_TEXT = (
    "This file marks the root folder of a fedsweep project. Commands below this folder use the project's files."
)
FOR_EDITOR = f"# {FOR_EDITORS} $schema=../schemas/{{}}.json\n"
"""The first line of a YAML file, by which editors find its schema."""
ABLATION = """\
# Does the LoRA rank matter? Ranks 2, 4 and 8.
#
#   fedsweep tune lora_rank
#   fedsweep tune lora_rank federation.rounds=2 --seeds 0

experiment: EXPERIMENT

space:
  lora.rank: {grid: [2, 4, 8]}    # any hyperparameter of the experiment, by its dotted name

seeds: [0, 1, 2]                  # shared by all arms, so differences are paired; or {until: decided}

baseline: {lora.rank: 8}          # the arm with which the others are compared

objective: {metric: accuracy/mean, mode: max}

search: {name: grid}              # every arm with every seed; or random | tpe

scheduler: {name: none}           # run every trial to its end

resources: {cpus_per_trial: 1, gpus_per_trial: 0}
"""
GITIGNORE = """\
# results, prepared images, downloaded weights, and figures of `fedsweep data partition`
/mlruns/
/data/
/partition-*.png
"""
README = """\
# A fedsweep project

```sh
{commands}
```

- `experiments/{experiment}.yaml` describes one federated run: data, clients, backbone, method and optimizer.
- `search_spaces/lora_rank.yaml` names the experiment, and the values to try for some of its hyperparameters.
- `mlruns/` holds the results, and `data/` the prepared images. The commands create these folders.
- `schemas/` lets editors complete and check these files.
- `fedsweep.toml` marks this folder as the root of the project, so the commands also work in the folders below it.

`fedsweep list` lists the files of this project, and counts those that fedsweep contains.
"""
