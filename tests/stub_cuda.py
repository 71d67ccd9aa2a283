"""Triton's own launcher on a machine without a GPU: its libcuda writes down what is launched.

What the launcher's C code makes of its arguments, and what stub_cuda.c writes down, are numbers.
"""

from __future__ import annotations

import ctypes
import os
import re
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SIZES = {"CUdeviceptr": 8, "CUtensorMap": 128}
SIZES |= {f"{sign}int{bits}_t": bits // 8 for sign in ("", "u") for bits in (8, 16, 32, 64)}


class StubCuda:
    """The library, built in ``folder`` and loaded, so that Triton finds it as the system's."""

    def __init__(self, folder: Path) -> None:
        from triton.backends.nvidia.driver import include_dirs

        # What Triton builds is linked with it.
        os.environ["TRITON_CACHE_DIR"] = os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
        path = folder / "libcuda.so.1"
        source = Path(__file__).with_suffix(".c")
        options = ["-shared", "-fPIC", f"-Wl,-soname,{path.name}", "-o", path]
        subprocess.run(["cc", source, *options, *(f"-I{x}" for x in include_dirs)], check=True)
        self._library = ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
        self._length = ctypes.c_size_t.in_dll(self._library, "length")
        self._kernels: list[ctypes.Array[ctypes.c_int]] = []

    def kernel(self, source: str) -> int:
        """The handle of a kernel that the launcher with this source code launches."""
        declaration = re.search(r"static void _launch\((.*)\)", source)
        assert declaration is not None
        sizes = [SIZES[name] for name in re.findall(r"(\w+) arg\d+", declaration[1])]
        self._kernels.append((ctypes.c_int * (len(sizes) + 1))(*sizes, 0))
        return ctypes.addressof(self._kernels[-1])

    def launches(self) -> Iterator[tuple[Any, ...]]:
        """Those since the last call of this: what :file:`stub_cuda.c` writes down of each."""
        written = (ctypes.c_ubyte * self._length.value).in_dll(self._library, "written")
        numbers = memoryview(bytes(written))
        self._length.value = 0
        while numbers:
            facts = struct.unpack_from("8Q", numbers)
            numbers, parameters = numbers[64:], []
            while size := struct.unpack_from("Q", numbers)[0]:
                kind = {1: "B", 2: "H", 4: "I", 8: "Q", 128: "16Q"}[size]
                parameters.append(struct.unpack_from(kind, numbers, 8))
                numbers = numbers[8 + size :]
            numbers = numbers[8:]
            yield *facts, *parameters
