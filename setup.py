"""Builds the extension ``relu2ir._C`` from csrc/ and from C++ generated from ops.yaml. No torch is needed to build.

What is compiled, and what the variables RELU2IR_BUILD, CXX and TORCH_CUDA_ARCH_LIST say, is in relu2ir/building.py.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
# The package itself is not imported, since that imports torch: an empty parent with its path stands in for it.
package = types.ModuleType("relu2ir")
package.__path__ = [str(ROOT / "relu2ir")]
sys.modules["relu2ir"] = package
from relu2ir import building, specfile  # noqa: E402
from relu2ir.errors import BuildError  # noqa: E402


def run(command: Sequence[Any]) -> None:
    print(shlex.join(map(str, command)), flush=True)
    subprocess.run(command, check=True)


class BuildExtension(build_ext):
    """Compiles by relu2ir/building.py; setuptools' own compiler knows neither nvcc nor hipcc."""

    def build_extension(self, ext: Extension) -> None:
        try:
            self.build_as(CHOICE, ext)
        except subprocess.CalledProcessError as error:
            if CHOICE == "cpp" or building.asked() != "auto":
                raise SystemExit(str(error)) from None
            print(f"warning: relu2ir is built without GPU kernels; {error}", file=sys.stderr)
            self.build_as("cpp", ext)

    def build_as(self, choice: str, ext: Extension) -> None:
        specs, tools = specfile.read(ROOT / "ops.yaml").ops, building.toolchain(choice)
        building.compile_binary(specs, tools, ROOT / "build", Path(self.get_ext_fullpath(ext.name)), run)


class BuildPython(build_py):
    """Puts ops.yaml and csrc/ into the built package; a checkout reads those beside it."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            package = Path(self.build_lib, "relu2ir")
            self.copy_file(str(ROOT / "ops.yaml"), str(package / "ops.yaml"))
            self.copy_tree(str(ROOT / "csrc"), str(package / "csrc"))


class Wheel(bdist_wheel):
    def finalize_options(self) -> None:
        if self.distribution.ext_modules:
            self.py_limited_api = "cp310"  # one binary for CPython 3.10 and every later one
        super().finalize_options()


try:
    problem = building.cxx_problem()
    CHOICE = building.chosen(problem)
except BuildError as error:
    raise SystemExit(str(error)) from None
if CHOICE == "none" and building.asked() == "auto":
    print(f"warning: relu2ir is built without compiled kernels; {problem}", file=sys.stderr)
setup(
    ext_modules=[Extension("relu2ir._C", [], py_limited_api=True)] if CHOICE != "none" else [],
    cmdclass={"build_ext": BuildExtension, "build_py": BuildPython, "bdist_wheel": Wheel},
)
