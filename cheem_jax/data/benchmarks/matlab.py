"""Variables of MATLAB files (the lists of Stanford Cars), read by SciPy in a process of its own.

SciPy's reader is compiled, and some corrupted files end its process with a segmentation fault.
"""

import json
import os
import subprocess
import sys
from typing import Any

SECONDS = 60
"""An intact list is read in less than one."""
MAX_BYTES = 2**31
"""Memory that the reading process may take."""

_PROGRAM = """
import contextlib, io, json, sys
with contextlib.suppress(ImportError, ValueError):  # not every system has this limit
    import resource
    resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[2]),) * 2)
import numpy, scipy.io
variables = scipy.io.loadmat(io.BytesIO(sys.stdin.buffer.read()), squeeze_me=True, variable_names=[sys.argv[1]])
found = numpy.atleast_1d(variables[sys.argv[1]])
rows = found.ravel(order="F").tolist()  # MATLAB's order
if found.dtype.names:
    rows = [dict(zip(found.dtype.names, row)) for row in rows]
print(json.dumps(rows, default=lambda value: value.tolist()))
"""


def read_variable(data: bytes, name: str, where: str) -> list[Any]:
    """The elements of a variable of a `.mat` file in MATLAB's order; those of a struct array are dicts by field.

    Raises ValueError for a file that is corrupted, has no such variable, or takes too much time or memory; `where`
    names the file in it.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _PROGRAM, name, str(MAX_BYTES)],
            input=data,
            capture_output=True,
            timeout=SECONDS,
            # each thread of OpenBLAS would take address space, which is limited
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        )
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"{where}: variable {name!r} was not read within {SECONDS} seconds") from error
    if done.returncode != 0:
        last_line = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        reason = last_line or f"signal {-done.returncode}"
        raise ValueError(f"{where}: variable {name!r} cannot be read: {reason}; download it again")
    return json.loads(done.stdout)
