"""The start of a sweep in the background, which goes on after its terminal is closed."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time

from fedsweep.cli import json_output
from fedsweep.cli.output import awaiting, relative
from fedsweep.common.errors import UserError
from fedsweep.results import Store

LOOK_SECONDS = 0.1
LOG = "output.log"
"""The file in the folder of a sweep with the output of the background process."""


def detach(words: list[str], store: str, as_json: bool = False) -> None:
    """Start the command `fedsweep WORDS` in the background, and return once its sweep has been created.

    The output of the command is written to `output.log` in the folder of the sweep. If the command ends before it
    creates a sweep, its output is printed, and SystemExit is raised with its exit status.

    Args:
        words: The command, which must contain neither `--detach` nor `--id-file`.
        store: The results folder of the sweep.
        as_json: Whether to print a JSON document instead of sentences.

    Raises:
        UserError: The results folder is remote or cannot be written.
    """
    home = Store.at(store)
    if home.uri is not None:
        raise UserError(f"`--detach` needs a results folder on this machine, but `--store` is {home.where}.")
    stamp = secrets.token_hex(4)
    log, id_file = home.root / f".detached-{stamp}.log", home.root / f".detached-{stamp}.id"
    try:
        home.root.mkdir(parents=True, exist_ok=True)
        output = log.open("wb")
    except OSError as error:
        raise UserError(f"the results folder {home.root} cannot be written: {error.strerror or error}.") from None
    with output:
        command = [sys.executable, "-m", "fedsweep", *words, "--id-file", str(id_file)]
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    try:
        with awaiting("Starting the sweep in the background", always=True):
            while child.poll() is None and not id_file.exists():
                time.sleep(LOOK_SECONDS)
        if not id_file.exists():
            said = log.read_text(errors="replace").splitlines(keepends=True)
            log.unlink()
            if as_json:  # the last line is the document about the error
                sys.stdout.write("".join(said[-1:]))
            sys.stderr.write("".join(said[:-1] if as_json else said))
            raise SystemExit(child.returncode)
        sweep = home.find(id_file.read_text().strip())
    except KeyboardInterrupt:
        child.terminate()
        log.unlink(missing_ok=True)
        raise
    finally:
        id_file.unlink(missing_ok=True)
    place, number = sweep.folder / LOG, 1
    while place.exists():  # of an earlier session
        number += 1
        place = sweep.folder / f"output-{number}.log"
    os.replace(log, place)
    manifest = sweep.manifest()
    if as_json:
        background = {"space": manifest.name, "id": sweep.folder.name, "process": child.pid, "log": place}
        json_output.document("tune", background=background)
        return
    name = manifest.label
    print(f"Process {child.pid} runs sweep {name} in the background; its output is in {relative(place)}.")
    print(f"Watch it with `fedsweep attach {name}`, or stop it with `fedsweep stop {name}`.")
