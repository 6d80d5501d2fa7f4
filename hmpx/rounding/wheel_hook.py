"""What hatchling runs when it builds a wheel: with a C compiler at hand, the wheel carries the C kernels.

It is a platform's wheel then. Without a compiler, or where the compiler fails, it is the pure one, and kernels are
compiled on first use. An editable install always compiles them on first use: its source may change.
"""

from __future__ import annotations

import runpy
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class KernelsHook(BuildHookInterface):
    """Compiles the C kernels and adds them to a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the libraries and the platform's tag to what is built."""
        self._folder = tempfile.TemporaryDirectory()
        if version == "editable":
            return
        kernels = runpy.run_path(str(Path(__file__).with_name("native_library.py")))  # hmpx would import torch
        try:
            libraries = dict(kernels["libraries_of_wheel"]())
        except (kernels["NoCompiler"], OSError, subprocess.SubprocessError) as error:
            self.app.display_warning(f"hmpx: a wheel without C kernels: {error}")
            return
        for name, built in libraries.items():
            path = Path(self._folder.name, name)
            path.write_bytes(built)
            build_data["force_include"][str(path)] = f"hmpx/rounding/{name}"
        if libraries:
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data.update(pure_python=False, tag=f"py3-none-{platform}")  # a library knows nothing of Python

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the libraries that are in the wheel now."""
        self._folder.cleanup()
