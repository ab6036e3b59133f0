"""Runs a notebook of examples/notebooks/ in an empty folder, and writes it with its outputs.

    scripts/notebook                                      into a new temporary folder
    scripts/notebook --name your_model                    another of the notebooks
    scripts/notebook clothes.ipynb --pictures pictures    and each picture into a folder

If a cell fails, what there is until then is written all the same, with the error.
"""

import argparse
import base64
import tempfile
import time
from pathlib import Path

import jupytext
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent.parent / "examples" / "notebooks"
SECONDS = 600  # for one cell


def pictures(notebook):
    """The PNG images among the outputs, as bytes, in their order."""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                yield base64.b64decode(output["data"]["image/png"])


def main() -> None:
    """Runs the notebook, writes it, and prints its path."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", type=Path, nargs="?", help="of the .ipynb to write")
    names = sorted(path.stem for path in FOLDER.glob("*.py"))
    parser.add_argument("--name", choices=names, default="first_steps", help="of the notebook")
    parser.add_argument("--pictures", type=Path, metavar="DIR", help="where to write them, as PNG")
    arguments = parser.parse_args()
    name = arguments.name
    path = arguments.path or Path(tempfile.mkdtemp(prefix="jddp-")) / f"{name}.ipynb"

    notebook, start = jupytext.read(FOLDER / f"{name}.py"), time.monotonic()
    with tempfile.TemporaryDirectory() as empty:
        client = NotebookClient(notebook, timeout=SECONDS, resources={"metadata": {"path": empty}})
        try:
            client.execute()
        finally:
            path.parent.mkdir(parents=True, exist_ok=True)
            jupytext.write(notebook, path)
    print(f"{path}: {len(notebook.cells)} cells in {time.monotonic() - start:.0f} s")
    if arguments.pictures:
        arguments.pictures.mkdir(parents=True, exist_ok=True)
        for number, png in enumerate(pictures(notebook), start=1):
            file = arguments.pictures / f"{number}.png"
            file.write_bytes(png)
            print(file)


if __name__ == "__main__":
    main()
