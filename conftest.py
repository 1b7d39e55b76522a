"""Settings of all tests: check shapes, refuse reused PRNG keys, count compiled functions."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "PYTEST_XDIST_WORKER" not in os.environ:  # which has it from the process that started it
    import atexit
    import shutil
    import tempfile

    # what one test compiled no other compiles again; no test writes to a user's home
    programs = tempfile.mkdtemp(prefix="cheem-programs-")
    atexit.register(shutil.rmtree, programs, ignore_errors=True)
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", programs)
    # with a limit JAX reads thousands of files whenever it writes a program
    os.environ["JAX_COMPILATION_CACHE_MAX_SIZE"] = "-1"
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.05"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import contextlib
import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import jax
import pytest
from compiling import Compilations, count_compilations
from jaxtyping import install_import_hook

# imports create millions of objects that stay; `pytest_collection_finish` enables collection again
gc.disable()
# Only what is imported from here on is checked, so nothing above may lead to these packages.
# As pyright has it, an int will do for a float.
_BEARTYPE = "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))"
install_import_hook(["cheem_jax", "convert", "experiments"], _BEARTYPE)
jax.config.update("jax_debug_key_reuse", True)
# a first example compiles and the later ones do not, so a deadline per example says nothing
hypothesis.settings.register_profile("cheem_jax", deadline=None)
hypothesis.settings.load_profile("cheem_jax")


def pytest_collection_finish() -> None:
    """Collect garbage from here on, and look only at what tests make."""
    gc.freeze()
    gc.enable()


@pytest.fixture
def compilations() -> Callable[[], contextlib.AbstractContextManager[Compilations]]:
    """`with compilations() as programs: ...`, then `programs.count`; blocks may be nested."""
    return count_compilations


@pytest.fixture(scope="module", autouse=True)
def bounded_memory_maps() -> Iterator[None]:
    """Between modules, free the compiled functions once they take a third of the memory maps.

    Each takes a hundred or more, and Linux ends a process that asks for over `vm.max_map_count`.
    """
    yield
    # imported late: what is imported before the hook above is not checked
    from cheem_jax.engine.whole import memory_map_limit, memory_maps

    if memory_maps() > memory_map_limit() // 3:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="session")
def shared() -> Path:
    """Real data and weights beside the project; a test without it is skipped, or fails in CI."""
    directory = Path(os.environ.get("CHEEM_SHARED", "../shared")).resolve()
    if not directory.is_dir():
        reason = f"no folder {directory}: set CHEEM_SHARED to that of the data and weights"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return directory
