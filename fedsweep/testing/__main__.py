"""The command `python -m fedsweep.testing`, which runs the conformance tests of the named classes."""

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import chain, pairwise

from fedsweep.common.errors import UserError, near
from fedsweep.testing import KINDS

HELP = """usage: python -m fedsweep.testing [--method NAME] [--data NAME] [--aggregation NAME] [--metric NAME]
                                  [--set NAME=VALUE] [PYTEST OPTION]...

Test that a method, a data source, an aggregation rule or a metric has the properties that fedsweep relies on. Each
option can be given several times. Without options, all classes of fedsweep and of the installed plug-ins are tested.
The option --set changes a hyperparameter of the tested run, as in `--set method.mu=0.1`.

The exit code is 0 if all tests pass, 2 if the command line is invalid or selects no test, and 1 otherwise.
"""


def main(words: Sequence[str]) -> int:
    """Run the conformance tests, and return the exit code.

    Returns:
        0 if all tests pass; 2 if the command line is invalid or selects no test; 1 if a test fails, or if pytest is
        interrupted or fails itself.
    """
    if {"-h", "--help"} & {*words}:
        print(HELP, end="")
        return 0
    if find_spec("pytest") is None:
        print("fedsweep: the conformance tests need the package pytest; run `pip install pytest`.", file=sys.stderr)
        return 2
    import pytest

    try:
        chosen = [own for kind, (own, _) in KINDS.items() if any(_gives(word, kind) for word in words)]
        modules = chain.from_iterable(chosen or [own for own, _ in KINDS.values()])
        _check(words)
    except UserError as error:
        print(f"fedsweep: {error}", file=sys.stderr)
        return 2
    plugins = ["-p", "fedsweep.testing.options", "-p", "no:cacheprovider"]
    ended = pytest.main([*plugins, *words, "--pyargs", *(f"fedsweep.testing.{module}" for module in modules)])
    invalid = (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED)
    return 2 if ended in invalid else int(ended != pytest.ExitCode.OK)


def _gives(word: str, kind: str) -> bool:
    return word == f"--{kind}" or word.startswith(f"--{kind}=")


def _check(words: Sequence[str]) -> None:
    """Raise UserError if an option names a class that cannot be tested, or if an entry point is broken."""
    from fedsweep.testing.cases import EXCLUDED, known_names

    spaced = [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    for option, name in pairwise(spaced):
        if (kind := option.removeprefix("--")) in KINDS and option.startswith("--"):
            known = known_names(kind)
            if reason := EXCLUDED.get((kind, name)):
                raise UserError(f"`{option}` names `{name}`, which cannot be tested because {reason}.")
            if name not in known:
                choices = f"; choose from {', '.join(known)}."
                raise UserError(f"`{option}` names `{name}`, which does not exist{near(name, known) or choices}")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
