"""Change the YAML files, the images or the code of a sweep between its death and its resume.

    python -m benchmarks.faults.changes_before_resume
    python -m benchmarks.faults.changes_before_resume --changes code

A sweep over own images is killed with SIGKILL. Before each resume, one input of the sweep is changed. The sweep must
refuse to continue with one sentence that names the changed input. Then the change is undone. At the end, the sweep must
resume, and its results must be the same as those of an undisturbed sweep. The exit code is 1 if anything differs.

The last change replaces pixels of the prepared images without changing the size of the file. fedsweep does not notice
this change without an option, so the script only reports what happens.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import yaml
from PIL import Image

import fedsweep
from fedsweep.common.paths import find
from fedsweep.common.yaml_values import read_yaml
from tests.sweep.helpers import GRID, command, environment, histories, kill, newest, start, wait_for_rounds, write_space

NAME = "changes"
DOMAINS, CLASSES, IMAGES = ("art", "photo"), ("cup", "lamp", "shoe"), 6
FIXED = {"federation.rounds": 3, "federation.depths": [12, 3], "local.steps": 1, "local.batch_size": 8}
SPACE = {**GRID, "experiment": "own", "fixed": FIXED}
CHANGED = {
    "search space": "its YAML files or overrides have changed",
    "experiment": "its YAML files or overrides have changed",
    "code": "fedsweep's code has changed",
    "images": "its data or weights have changed",
}
"""The words by which the error message names each change."""


def write_images(folder: Path, shade: int = 0) -> None:
    """Write random images of every domain and class, which are brighter by `shade`."""
    rng = np.random.default_rng(0)
    for domain in DOMAINS:
        for label in CLASSES:
            (folder / domain / label).mkdir(parents=True, exist_ok=True)
            for number in range(IMAGES):
                pixels = rng.integers(0, 200, (64, 64, 3), dtype=np.uint8) + np.uint8(shade)
                Image.fromarray(pixels).save(folder / domain / label / f"{number}.png")


def prepare(folder: Path, code: Path, force: bool = False) -> None:
    """Prepare the images of a working directory."""
    words = ["data", "prepare", "own", "--root", "photos", "--size", "64", "--test-fraction", "0.34"]
    done = call(folder, code, *words, *(["--force"] if force else []))
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)


def set_up(folder: Path, code: Path) -> None:
    """Write the images, the experiment and the search space of a working directory."""
    write_images(folder / "photos")
    prepare(folder, code)
    experiment = read_yaml(find("experiments", "fedra_pacs"))
    experiment["backbone"]["pretrained"] = "none"
    experiment["data"] |= {"set": "own", "domains": list(DOMAINS)}
    experiment["federation"]["depths"] = [12, 3]
    (folder / "experiments").mkdir()
    (folder / "experiments" / "own.yaml").write_text("# own images\n" + yaml.safe_dump(experiment, sort_keys=False))
    write_space(folder, NAME, SPACE)


def call(folder: Path, code: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the command line of the copy of fedsweep in `code`."""
    variables = {**environment(), "PYTHONPATH": str(code)}
    return subprocess.run(command(*words), cwd=folder, env=variables, capture_output=True, text=True, timeout=600)


def swap_text(path: Path, old: str, new: str) -> Callable[[], object]:
    """Replace text in a file, and return the function that undoes this."""
    before = path.read_text()
    if old not in before:
        raise ValueError(f"{path} does not contain {old}")
    path.write_text(before.replace(old, new))
    return lambda: path.write_text(before)


def change(name: str, folder: Path, code: Path) -> Callable[[], object]:
    """Make one of the changes in `CHANGED`, and return the function that undoes it."""
    if name == "search space":
        return swap_text(folder / "search_spaces" / f"{NAME}.yaml", "seeds:\n- 0\n- 1", "seeds:\n- 0\n- 2")
    if name == "experiment":
        return swap_text(folder / "experiments" / "own.yaml", "dropout: 0.1", "dropout: 0.2")
    if name == "code":
        return swap_text(code / "fedsweep" / "training" / "aggregation.py", "import torch", "import torch  # changed")
    write_images(folder / "photos", shade=5)
    prepare(folder, code, force=True)

    def undo() -> None:
        write_images(folder / "photos")
        prepare(folder, code, force=True)

    return undo


def brighten(folder: Path) -> Callable[[], object]:
    """Change bytes in the middle of the prepared images of a domain, and return the function that undoes this."""
    path = next(folder.rglob("photo.arrow"))
    before = path.read_bytes()
    middle = len(before) // 2
    path.write_bytes(
        before[:middle] + bytes(255 - one for one in before[middle : middle + 3000]) + before[middle + 3000 :]
    )
    return lambda: path.write_bytes(before)


def main() -> int:
    """Run the cases, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--changes", nargs="*", default=[*CHANGED], choices=CHANGED)
    given = parser.parse_args()
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as root:
        code = Path(root) / "code"
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(Path(fedsweep.__file__).parent, code / "fedsweep", ignore=ignored)
        os.environ["PYTHONPATH"] = str(code)
        calm, folder = Path(root) / "calm", Path(root) / "killed"
        for one in (calm, folder):
            one.mkdir()
            set_up(one, code)
        process = start(folder, "tune", NAME)
        wait_for_rounds(folder, NAME, 2, process)
        kill(process)
        for name, words in ((name, CHANGED[name]) for name in given.changes):
            undo = change(name, folder, code)
            done = call(folder, code, "tune", NAME, "--resume")
            last = (done.stderr.strip().splitlines() or [""])[-1]
            good = done.returncode == 2 and words in last and "Traceback" not in done.stderr
            print(
                f"{name} changed: {'refused' if good else 'NOT REFUSED'}, exit code {done.returncode}: {last}",
                flush=True,
            )
            wrong += [] if good else [name]
            undo()
        undo = brighten(folder)
        done = call(folder, code, "tune", NAME, "--resume", "--dry-run")
        print(f"pixels replaced at equal length: {'not noticed' if done.returncode == 0 else done.stderr}", flush=True)
        undo()
        for one, words in ((folder, ["--resume"]), (calm, [])):
            done = call(one, code, "tune", NAME, *words)
            wrong += [] if done.returncode == 0 else [done.stderr]
        same = histories(newest(folder, NAME)) == histories(newest(calm, NAME))
        print(f"after undoing all changes, the results are {'the same' if same else 'NOT the same'}")
        wrong += [] if same else ["results"]
    print("verdict: " + ("every noticed change was refused" if not wrong else f"FAILED: {wrong}"))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
