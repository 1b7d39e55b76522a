"""The structure of the package: the order of imports, optional packages, and rules of design."""

import ast
import collections
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
PACKAGE = REPOSITORY / "cheem_jax"
# Each folder imports only from itself and from folders before it: in an earlier row or further left
ROWS = (
    ("core",),
    ("backbone",),
    ("engine",),
    ("data",),
    ("run",),
    ("report",),
    ("cheem",),
    ("baselines",),
    ("run_config", "continual"),
    ("export",),
    ("memory",),
    ("serve",),
    ("cli", "__main__"),
)
# the extras: imported where they are used, never with the package
OPTIONAL = (
    "tensorboardX",
    "torch",
    "tensorflow",
    "timm",
    "tensorflow_datasets",
    "grain",
    "array_record",
    "pyarrow",
    "pooch",
    "requests",
    "pillow_heif",
    "datasets",
    "starlette",
    "uvicorn",
    "prometheus_client",
    "jax2onnx",
    "onnx",
    "onnxruntime",
)
# made of classes of an extra's, so imported only by the function that needs them
NEEDS_AN_EXTRA = {
    "cheem_jax.data.benchmarks.download",
    "cheem_jax.serve.app",
    "cheem_jax.serve.service",
}


def modules(root: Path) -> dict[str, Path]:
    """Return the file of every module of the package at `root`, keyed by its dotted name."""
    files = {
        file.relative_to(root.parent).with_suffix(""): file for file in sorted(root.rglob("*.py"))
    }
    return {".".join(name.parts).removesuffix(".__init__"): file for name, file in files.items()}


def imported(name: str, file: Path) -> set[str]:
    """Return the dotted names that the module imports, at the top or inside functions, with
    relative ones resolved."""
    package = name.split(".") if file.name == "__init__.py" else name.split(".")[:-1]
    result = set()
    for node in ast.walk(ast.parse(file.read_text(), str(file))):
        if isinstance(node, ast.Import):
            result.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*start, *filter(None, [node.module])])
            # `import ops` names a module, `from cheem_jax.core.ops import Expert` a part of one
            result.update(f"{source}.{alias.name}" for alias in node.names)
    return result


def layer_errors(root: Path) -> list[str]:
    """Return one line for each import against the order and for each module without a row."""
    place = {layer: i for i, layer in enumerate(layer for row in ROWS for layer in row)}
    errors = []
    for name, file in modules(root).items():
        if name == root.name:
            continue  # the package's own __init__ is above all of them
        layer = name.split(".")[1]
        if layer not in place:
            errors.append(f"{name} is in no row: give {layer!r} a place in {Path(__file__).name}")
            continue
        for target in sorted(imported(name, file)):
            top, _, rest = target.partition(".")
            other = rest.split(".")[0]
            if target == f"{root.name}.__version__":
                continue
            if top in ("convert", "experiments", "tests"):
                errors.append(f"{name} imports {target}, which is not installed with the package")
            elif top == root.name and place.get(other, len(place)) > place[layer]:
                errors.append(f"{name} imports {target}, which is in a later row than {layer!r}")
    return errors


def test_each_module_imports_only_from_its_own_folder_and_from_earlier_ones():
    assert layer_errors(PACKAGE) == []


@pytest.mark.parametrize(
    ("file", "line", "error"),
    [
        (
            "core/ops.py",
            "from cheem_jax.cheem.hee import psi",
            "imports cheem_jax.cheem.hee.psi, which is in a later row",
        ),
        (
            "core/ops.py",
            "from cheem_jax.cheem import hee",
            "imports cheem_jax.cheem.hee, which is in a later row",
        ),
        (
            "core/ops.py",
            "import cheem_jax.cheem.hee",
            "imports cheem_jax.cheem.hee, which is in a later row",
        ),
        (
            "core/ops.py",
            "from ..cheem.hee import table",
            "imports cheem_jax.cheem.hee.table, which is in a later row",
        ),
        (
            "cheem/hee.py",
            "def f():\n    import convert.timm_vit",
            "which is not installed with the package",
        ),
        ("helpers.py", "", "is in no row"),
    ],
)
def test_an_import_against_the_order_is_found(tmp_path, file, line, error):
    root = tmp_path / "cheem_jax"
    for folder in ("core", "cheem"):
        (root / folder).mkdir(parents=True)
    (root / "core" / "ops.py").write_text("")
    (root / "cheem" / "hee.py").write_text(
        "from . import supernet\nfrom ..core.ops import Expert\n"
    )
    (root / "cheem" / "supernet.py").write_text("")
    assert layer_errors(root) == []
    (root / file).write_text(line)
    [result] = layer_errors(root)
    assert error in result


def test_importing_every_module_needs_no_extra_and_no_device():
    names = sorted(set(modules(PACKAGE)) - {"cheem_jax.__main__"} - NEEDS_AN_EXTRA)
    program = (
        # scikit-learn imports pandas where it is installed, and that imports pyarrow
        "import importlib, sys; sys.modules['pandas'] = None; [importlib.import_module(name) for"
        f" name in {names}]; print([name for name in {OPTIONAL} if name in sys.modules])"
    )
    # a platform that does not exist: code that computes or looks for devices on import fails
    environment = {**os.environ, "JAX_PLATFORMS": "none"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("commands", "names"),
    [
        ("ask, cheem_jax.cli.memory", ("sklearn", "pandas", "matplotlib", "plotly", "onnx")),
        ("info", ("jax", "flax", "optax", "orbax", "scipy", "sklearn", "pandas", "matplotlib")),
    ],
)
def test_commands_of_a_memory_do_not_wait_for_packages_that_others_need(commands, names):
    program = (
        f"import sys; import cheem_jax.cli.{commands}; print([name for name in {names} if name in"
        " sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout == "[]\n", done.stdout + done.stderr


def trees() -> dict[str, ast.Module]:
    """The syntax tree of each module, by its dotted name."""
    return {name: ast.parse(file.read_text()) for name, file in modules(PACKAGE).items()}


def test_no_class_has_more_than_300_lines():
    classes = [
        f"{name}.{node.name}: {node.end_lineno - node.lineno + 1} lines"
        for name, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.end_lineno - node.lineno >= 300
    ]
    assert classes == []


def test_no_code_reads_a_private_attribute_of_another_object():
    # of NamedTuples; `os._exit` is documented
    public = {"_asdict", "_exit", "_field_defaults", "_fields", "_make", "_replace"}
    accesses = [
        f"{name}:{node.lineno}: {ast.unparse(node)}"
        for name, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and re.match(r"_[a-z]", node.attr)
        and node.attr not in public
        and ast.unparse(node.value) not in ("self", "cls", "super()")
    ]
    assert accesses == []


def test_a_name_for_a_type_is_defined_once():
    definitions = collections.defaultdict(list)
    for module, tree in trees().items():
        for node in tree.body:
            match node:
                case ast.ClassDef(name=name) | ast.Assign(targets=[ast.Name(id=name)]):
                    # `S`, `T` and the like are type variables
                    if re.fullmatch(r"[A-Z]\w*[a-z]\w*", name):
                        definitions[name].append(module)
    assert {name: where for name, where in definitions.items() if len(where) > 1} == {}


def test_a_feed_is_used_by_its_protocol_alone():
    feeds = {"AugmentedImages", "Cached", "Feed", "HostImages", "Subset"}
    checks = [
        f"{name}:{node.lineno}: {ast.unparse(node)}"
        for name, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call | ast.match_case)
        and (isinstance(node, ast.match_case) or ast.unparse(node.func) == "isinstance")
        and feeds
        & {
            part.id
            for part in ast.walk(node.pattern if isinstance(node, ast.match_case) else node)
            if isinstance(part, ast.Name)
        }
    ]
    assert checks == []
