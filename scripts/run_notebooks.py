"""Run the notebooks from their first cell to their last, each in an empty folder.

python -m scripts.run_notebooks            # see that every cell runs
python -m scripts.run_notebooks --write    # and keep the outputs in the files, with tidy metadata
"""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Annotated

import nbformat
import typer
from nbclient import NotebookClient
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "notebooks"


def executed(path: Path, folder: Path) -> NotebookNode:
    """The notebook with the outputs of a run in ``folder``, offline.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised.
    """
    notebook = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]  # nbformat types none of its functions
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        "PYTHONWARNINGS": "ignore:IProgress not found",  # tqdm would like ipywidgets; no bar is shown here
    }
    client = NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        record_timing=False,
        coalesce_streams=True,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # jupyter's own, about event loops
        client.execute(env=environment)
    return tidied(notebook)


def tidied(notebook: NotebookNode) -> NotebookNode:
    """The same with nothing of the machine that ran it: no versions, no timings, HTML without plain text beside it."""
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for number, cell in enumerate(notebook.cells, 1):
        cell.metadata = {}
        cell.id = f"cell-{number}"
        for output in cell.get("outputs", ()):
            if "text/html" in output.get("data", ()):
                output.data = {"text/html": output.data["text/html"]}
    return notebook


def main(
    write: Annotated[bool, typer.Option("--write", help="Keep the outputs in the files.")] = False,
) -> None:
    """Run every notebook of ``notebooks/``."""
    for path in sorted(FOLDER.glob("*.ipynb")):
        with tempfile.TemporaryDirectory() as folder:
            notebook = executed(path, Path(folder))
        if write:
            nbformat.write(notebook, path)  # type: ignore[no-untyped-call]  # as above
        print(f"{path.relative_to(ROOT)}: {len(notebook.cells)} cells")


if __name__ == "__main__":
    typer.run(main)
