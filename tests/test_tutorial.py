"""docs/tutorial.ipynb: it was run, names nothing that is not there, and runs again without an
error."""

import ast
import importlib
import os
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="needs the extra `test`")

FILE = Path(__file__).parents[1] / "docs" / "tutorial.ipynb"
MOST_BYTES = 400_000


def code_cells() -> list:
    return [cell for cell in nbformat.read(FILE, as_version=4).cells if cell.cell_type == "code"]


def names_in(source: str) -> set[str]:
    """Return every name of cheem_jax that a cell uses, in full."""
    result = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.ImportFrom(module=str(module), names=names) if (
                module.split(".")[0] == "cheem_jax"
            ):
                result |= {f"{module}.{alias.name}" for alias in names}
            case ast.Attribute(value=ast.Name(id="cheem_jax"), attr=name):
                result.add(f"cheem_jax.{name}")
    return result


def test_the_notebook_is_small_valid_and_contains_the_outputs_of_one_run_from_top_to_bottom():
    book = nbformat.read(FILE, as_version=4)
    nbformat.validate(book)
    assert FILE.stat().st_size < MOST_BYTES
    assert [cell.execution_count for cell in code_cells()] == list(range(1, len(code_cells()) + 1))
    outputs = [output for cell in code_cells() for output in cell.outputs]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 5
    assert not any(
        output.output_type == "error" or output.get("name") == "stderr" for output in outputs
    )
    assert "equal bit for bit:  True" in "".join(output.get("text", "") for output in outputs)


def test_every_name_of_the_library_that_the_notebook_uses_is_there():
    names = {name for cell in code_cells() for name in names_in(cell.source)}
    assert {"cheem_jax.create", "cheem_jax.open", "cheem_jax.core.settings.COLOURS"} <= names
    for name in names:
        module, attribute = name.rsplit(".", 1)
        assert hasattr(importlib.import_module(module), attribute), name


def test_names_are_found_in_imports_and_uses():
    assert names_in(
        "from cheem_jax.core.ops import Skip as S\nimport cheem_jax\ncheem_jax.open(x).learn(y)"
    ) == {"cheem_jax.core.ops.Skip", "cheem_jax.open"}


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom(tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient", reason="needs the extra `test`")
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # where the notebook makes its folder
    path = [str(FILE.parents[1]), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
    book = nbformat.read(FILE, as_version=4)
    nbclient.NotebookClient(
        book, timeout=900, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    printed = "".join(
        output.get("text", "") for cell in book.cells for output in cell.get("outputs", ())
    )
    assert (
        printed.count("equal bit for bit:  True")
        + printed.count("textures equal bit for bit: True")
        == 2
    )
