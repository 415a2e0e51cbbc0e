"""The origin of a run: package versions, platform and commit."""

import platform
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path

PACKAGES = ("fedsweep", "torch", "timm", "peft", "ray", "optuna", "mlflow", "numpy", "scikit-learn", "pyarrow")


def environment() -> dict[str, str]:
    """Package versions, Python and platform."""
    versions = {name: metadata.version(name) for name in PACKAGES}
    return {"python": platform.python_version(), "platform": platform.platform(), **versions}


def git_commit() -> str | None:
    """The commit of the checkout that the package is run from, with `+` where it has uncommitted changes."""
    where = Path(__file__).parent

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=where, capture_output=True, text=True, check=True).stdout.strip()

    try:
        tracked = git("ls-files", Path(__file__).name)
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "") if tracked else None
    except (OSError, subprocess.CalledProcessError):
        return None


@cache  # asked for every run; git is three processes
def origin() -> dict[str, str]:
    """Tags of every run: fedsweep's version, and the commit where there is one."""
    commit = git_commit()
    return {
        "fedsweep.version": metadata.version("fedsweep"),
        **({"mlflow.source.git.commit": commit} if commit else {}),
    }
