"""Execute the notebooks in docs/notebooks, and store their outputs in them.

    uv run python scripts/run_notebook.py

The notebooks run in a temporary folder, so that they leave no results in the repository.
"""

import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "docs" / "notebooks"
SECONDS = 600
"""Largest number of seconds that a cell may take."""


def executed(path: Path) -> nbformat.NotebookNode:
    """Return the notebook in a file after executing it; raise CellExecutionError if a cell fails.

    Warnings and empty outputs are left out.
    """
    notebook: nbformat.NotebookNode = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    with tempfile.TemporaryDirectory() as folder:
        metadata = {"metadata": {"path": folder}}
        NotebookClient(
            notebook, timeout=SECONDS, kernel_name="python3", resources=metadata, record_timing=False
        ).execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [one for one in cell.outputs if one.get("name") != "stderr"]
    return notebook


def main() -> None:
    """Execute all notebooks."""
    for path in sorted(FOLDER.glob("*.ipynb")):
        print(f"executing {path.name} ...", file=sys.stderr)
        nbformat.write(executed(path), path)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
