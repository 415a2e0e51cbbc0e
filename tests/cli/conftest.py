"""Fixtures that call the command line in this process, from an empty working directory."""

import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest

from fedsweep import cli
from fedsweep.sweep.cluster import cluster, ray_session
from fedsweep.sweep.running import ray_tuner as tuner
from fedsweep.tracking import single_run as recorded_run

ROOT = Path(__file__).parents[2]
EXPERIMENT = (ROOT / "experiments" / "fedra_digits.yaml").read_text()
RANKS = (ROOT / "search_spaces" / "ablations" / "lora_rank.yaml").read_text()
GRID = re.sub(r"(?m)^  (federation|evaluation)\..*\n", "", RANKS).replace("accuracy/last_rounds", "accuracy/mean")
GRID = re.sub(r"seeds: +#.*\n(  .*\n)+", "seeds: [0, 1, 2]\n", GRID)
METHODS = (ROOT / "search_spaces" / "ablations" / "method_bounds.yaml").read_text()
SAMPLED = (ROOT / "search_spaces" / "tuning" / "fedra.yaml").read_text()


@dataclass(frozen=True)
class Answer:
    """The exit code and the output of a command."""

    code: int
    out: str
    err: str


Call = Callable[..., Answer]
Refused = Callable[..., str]


@pytest.fixture
def call(read_once: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Return a function that runs a command. The test fails if the command would start training or Ray."""

    def too_late(*arguments: object, **named: object) -> None:
        raise AssertionError("the command was not rejected before it started")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(ray_session, "started_early", lambda *_: nullcontext())
    monkeypatch.setattr(ray_session, "ray_session", too_late)
    monkeypatch.setattr(tuner, "Recorder", too_late)
    monkeypatch.setattr(recorded_run, "record_run", too_late)
    monkeypatch.setattr(cluster, "available_cpus", lambda: 2)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)

    def run(*words: str) -> Answer:
        monkeypatch.setattr(sys, "argv", ["fedsweep", *words])
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = int(end.code or 0)
        printed = capsys.readouterr()
        return Answer(code, printed.out, printed.err)

    return run


@pytest.fixture
def refused(call: Call) -> Refused:
    """Return a function that runs an invalid command and returns its error message without the program's name."""

    def run(*words: str) -> str:
        answer = call(*words)
        assert (answer.code, answer.out) == (2, ""), answer
        said = re.sub(r"\A(Loading .*\n)*", "", answer.err)  # printed unless another test has loaded the package
        assert said.startswith("fedsweep: ")
        assert said.count("\n") == 1
        sentence = said.removeprefix("fedsweep: ").removesuffix("\n")
        assert sentence[-1] in ".?"
        assert "Traceback" not in sentence
        return sentence

    return run


def write(kind: str, name: str, text: str, *changes: tuple[str, str]) -> Path:
    """Write `text` to the YAML file `name` in the folder `kind` of the working directory, and return its path.

    Each pair (old, new) in `changes` is replaced first; the old text must occur exactly once.
    """
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path = Path(kind) / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path.resolve()
