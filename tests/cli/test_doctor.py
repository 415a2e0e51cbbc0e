"""The command `fedsweep doctor`."""

import importlib
import io
import json
from importlib import metadata
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from fedsweep.common import plugins
from fedsweep.common.errors import UserError
from tests.cli.conftest import Call
from tests.plugin_packages import install
from tests.sweep.helpers import fedsweep

__all__ = ["install"]
doctor = importlib.import_module("fedsweep.cli.doctor")  # the package exports the function of this name
WITHOUT_RAY = {name: look for name, look in doctor.CHECKS.items() if name != "Ray"}


def failing(_: str) -> str:
    raise UserError("the moon is full; wait for a week.")


def broken(_: str) -> str:
    raise RuntimeError("a\nb")


def test_every_check_states_facts_about_this_machine(call: Call, monkeypatch):
    monkeypatch.setattr(doctor, "CHECKS", WITHOUT_RAY)
    answer = call("doctor", "--format", "json")
    said = {one["check"]: one["sentence"] for one in json.loads(answer.out)["checks"]}
    assert answer.code == 0
    assert [*said] == [*WITHOUT_RAY]
    assert f"torch {metadata.version('torch')}" in said["packages"]
    assert "digits in 6 styles" in said["shipped data"]
    assert "`fedsweep data prepare` adds data sets" in said["prepared data sets"]
    assert said["results folder"].startswith("mlruns is writable")
    assert not Path("mlruns").exists()


def test_a_failed_check_is_named_with_its_remedy_and_does_not_stop_the_others(call: Call, monkeypatch):
    monkeypatch.setattr(doctor, "CHECKS", {"moon": failing, "code": broken, "packages": doctor.CHECKS["packages"]})
    answer = call("doctor")
    assert answer.code == 1
    moon, code, packages = answer.out.splitlines()
    assert moon == "\u2717 moon: the moon is full; wait for a week."
    assert code == "\u2717 code: RuntimeError: a b"
    assert packages.startswith("\u2713 packages: fedsweep ")


def test_a_terminal_indents_the_further_lines_of_a_long_sentence():
    text = io.StringIO()
    doctor._print(
        Console(file=text, width=20, force_terminal=True, color_system=None), Text("x"), "one: two three four 5"
    )
    assert [line.rstrip() for line in text.getvalue().splitlines()] == ["x one: two three", "  four 5"]


def test_the_cache_is_shown_below_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.delenv("FEDSWEEP_CACHE", raising=False)
    sentence = doctor.found("cache", doctor.CHECKS["cache"], "").sentence
    assert sentence.startswith("~/.cache/fedsweep/activations, ")
    monkeypatch.setenv("FEDSWEEP_CACHE", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path / "elsewhere"))
    assert doctor.found("cache", doctor.CHECKS["cache"], "").sentence.startswith(f"{tmp_path}, ")


def test_a_results_folder_that_cannot_be_written_is_found(call: Call, monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "CHECKS", {"results folder": doctor.CHECKS["results folder"]})
    (tmp_path / "file").write_text("")
    answer = call("doctor", "--store", str(tmp_path / "file"))
    assert answer.code == 1
    assert "cannot be written" in answer.out
    assert "choose another results folder with `--store`" in answer.out


def test_a_full_disk_is_found(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "LEAST_SPACE", float("inf"))
    assert "GB free; delete files, or use another disk" in doctor.found("cache", doctor.CHECKS["cache"], "").sentence


@pytest.mark.slow
def test_ray_starts_and_a_worker_answers(tmp_path):
    assert "\u2713 Ray: starts on this machine, and a worker of it answers" in fedsweep(tmp_path, "doctor").stdout


def test_the_plugins_are_listed_or_the_broken_one_is_named(install, call: Call, monkeypatch):
    monkeypatch.setattr(doctor, "CHECKS", {"plug-ins": doctor.CHECKS["plug-ins"]})
    assert call("doctor").out == "\u2713 plug-ins: none installed\n"
    install()
    version = plugins.versions()["odd-package"]
    assert call("doctor").out == f"\u2713 plug-ins: odd-package {version}, methods: odd\n"
    install("1 / 0")
    answer = call("doctor")
    assert answer.code == 1
    assert answer.out.startswith("\u2717 plug-ins: the entry point `odd` in group fedsweep.methods")
    assert answer.out.endswith("repair it, or uninstall odd-package.\n")


def test_checks_that_need_plugins_are_skipped_if_one_is_broken(call: Call, monkeypatch):
    monkeypatch.setattr(doctor, "CHECKS", {"plug-ins": failing, "shipped data": broken, "cache": broken, "Ray": broken})
    answer = call("doctor")
    assert answer.code == 1
    _, shipped, cache, ray = answer.out.splitlines()
    skipped = "not checked, because a plug-in is broken; see `plug-ins`."
    assert (shipped, ray) == (f"\u2717 shipped data: {skipped}", f"\u2717 Ray: {skipped}")
    assert cache == "\u2717 cache: RuntimeError: a b"
