"""The command `python -m fedsweep.testing`; `tests/examples/` runs it on the classes of a plug-in."""

import pytest

from fedsweep.testing.__main__ import main


def test_prepared_images_cannot_be_tested(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--data", "prepared"]) == 2
    sentence = "cannot be tested because it reads images from files that the tests do not have"
    assert capsys.readouterr().err == f"fedsweep: `--data` names `prepared`, which {sentence}.\n"


def test_an_unknown_name_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--data=digitss"]) == 2
    said = "fedsweep: `--data` names `digitss`, which does not exist; did you mean `digits`?\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(("of_pytest", "code"), [(0, 0), (1, 1), (2, 1), (3, 1), (4, 2), (5, 2)])
def test_the_exit_code_is_0_1_or_2(monkeypatch: pytest.MonkeyPatch, of_pytest: int, code: int) -> None:
    """Pytest ends with 2 if it is interrupted, 3 if it fails itself, 4 for a wrong option, and 5 without any test."""
    monkeypatch.setattr(pytest, "main", lambda words: of_pytest)
    assert main([]) == code


def test_without_pytest_the_command_that_installs_it_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fedsweep.testing.__main__.find_spec", lambda name: None)
    assert main(["--method", "fedra"]) == 2
    assert capsys.readouterr().err == (
        "fedsweep: the conformance tests need the package pytest; run `pip install pytest`.\n"
    )
