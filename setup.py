"""Builds the extension ``relu2ir._C`` from csrc/ and from C++ generated from ops.yaml. No torch is needed to build.

RELU2IR_BUILD says what is compiled; a choice by name fails where its compiler is missing, `auto` takes what there is:
  auto   cuda if nvcc is found, else hip if hipcc is, else cpp if a C++ compiler is, else none; cpp, with a warning,
         where the GPU compiler fails
  cuda   the CPU and the CUDA kernels; TORCH_CUDA_ARCH_LIST chooses the architectures
  hip    the CPU kernels and the CUDA ones through HIP; PYTORCH_ROCM_ARCH chooses the architectures
  cpp    the CPU kernels
  none   nothing: a pure Python package, in which PyTorch and Triton run every op
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
SOURCES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").glob("*.cpp"))
CHOICES = ("auto", "cuda", "hip", "cpp", "none")
# No fast math: contraction alone changes the result of a multiply and add. That floating-point exceptions need not be
# raised changes no value, and lets the compiler vectorise a choice.
CXX_FLAGS = ["-std=c++17", "-O3", "-ffp-contract=off", "-fno-trapping-math", "-fvisibility=hidden"]
NVCC_FLAGS = ["-std=c++17", "-O3", "--fmad=false", "-Xcompiler=-fPIC,-ffp-contract=off,-fvisibility=hidden"]
HIPCC_FLAGS = [*CXX_FLAGS, "-x", "hip", "-fPIC"]
CUDA_ARCHS, ROCM_ARCHS = ("80", "90", "100", "120"), ("gfx90a",)


def compiler() -> list[str]:
    """The C++ compiler: CXX, else c++, g++ or clang++ on PATH."""
    if "CXX" in os.environ:
        return shlex.split(os.environ["CXX"])
    return [next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), "c++")]


def compiles() -> bool:
    """Whether the compiler makes a shared object that includes Python.h: a failed build would leave a pure package in a
    wheel with a platform tag, so this is asked before an extension is declared."""
    if not sys.platform.startswith("linux"):
        return False
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.cpp")
        source.write_text("#include <Python.h>\n#include <cmath>\n")
        command = [*compiler(), "-std=c++17", "-shared", "-fPIC", f"-I{sysconfig.get_path('include')}"]
        try:
            return not subprocess.run([*command, source, "-o", f"{source}.so"], capture_output=True).returncode
        except OSError:
            return False


def found(program: str) -> str | None:
    """``nvcc`` or ``hipcc``: on PATH, or where CUDA_HOME or ROCM_PATH says."""
    home = {"nvcc": os.environ.get("CUDA_HOME"), "hipcc": os.environ.get("ROCM_PATH")}[program]
    at = Path(home, "bin", program) if home else None
    return str(at) if at and at.exists() else shutil.which(program)


def chosen(asked: str) -> str:
    """What is compiled where RELU2IR_BUILD is ``asked``; SystemExit when it asks for what cannot be."""
    if asked not in CHOICES:
        raise SystemExit(f"unknown RELU2IR_BUILD={asked!r}; use one of {', '.join(CHOICES)}")
    if asked == "none":
        return asked
    problems = {}
    if not compiles():
        at = shlex.join(compiler())
        problems = dict.fromkeys(CHOICES, f"{at!r} compiles no extension: install a C++ compiler and Python's headers")
    for choice, program in ("cuda", "nvcc"), ("hip", "hipcc"):
        if not found(program):
            problems.setdefault(choice, f"{program} was not found: put it on PATH")
    if asked != "auto":
        if asked in problems:
            raise SystemExit(f"RELU2IR_BUILD={asked} cannot be built; {problems[asked]}, or set RELU2IR_BUILD=auto")
        return asked
    choice = next((c for c in ("cuda", "hip", "cpp") if c not in problems), "none")
    if choice == "none":
        print(f"warning: relu2ir is built without compiled kernels; {problems['cpp']}", file=sys.stderr)
    return choice


def gencode(nvcc: str) -> list[str]:
    """nvcc's flags for TORCH_CUDA_ARCH_LIST ("8.0;9.0+PTX"), else for the defaults it knows, the last also as PTX."""
    listed = os.environ.get("TORCH_CUDA_ARCH_LIST")
    if listed:
        archs = [word.replace(".", "") for word in re.split(r"[;,\s]+", listed) if word]
    else:
        known = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True, check=True).stdout.split()
        archs = [arch for arch in CUDA_ARCHS if f"sm_{arch}" in known]
        archs[-1] += "+PTX"
    flags = []
    for arch in archs:
        number, _, ptx = arch.partition("+")
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if ptx:
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    if "--compress-mode" in subprocess.run([nvcc, "--help"], capture_output=True, text=True).stdout:
        flags.append("--compress-mode=size")  # 1.2 MB become 0.25
    return flags


def generate(folder: Path, gpu: bool) -> list[Path]:
    """Write the C++ of ops.yaml into ``folder``; the generated sources that are compiled.

    The package itself is not imported, since that imports torch: an empty parent with its path stands in for it.
    """
    package = types.ModuleType("relu2ir")
    package.__path__ = [str(ROOT / "relu2ir")]
    sys.modules["relu2ir"] = package
    from relu2ir import codegen, specfile

    files = codegen.generate(specfile.read(ROOT / "ops.yaml").ops, gpu)
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.iterdir():
        stale.unlink()
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in files if name.endswith((".cpp", ".cu"))]


class BuildExtension(build_ext):
    """Compiles the sources side by side and links them; setuptools' own compiler knows neither nvcc nor hipcc."""

    def build_extension(self, ext: Extension) -> None:
        try:
            self.build_as(CHOICE, ext)
        except subprocess.CalledProcessError as error:
            if CHOICE == "cpp" or ASKED != "auto":
                raise SystemExit(str(error)) from None
            print(f"warning: relu2ir is built without GPU kernels; {error}", file=sys.stderr)
            self.build_as("cpp", ext)

    def build_as(self, choice: str, ext: Extension) -> None:
        objects = Path(self.build_temp)
        objects.mkdir(parents=True, exist_ok=True)
        generated = ROOT / "build" / "generated"
        sources = [*map(Path, ext.sources), *generate(generated, gpu=choice != "cpp")]
        includes = [f"-I{folder}" for folder in (ROOT / "csrc", generated, sysconfig.get_path("include"))]
        cxx = [*compiler(), *CXX_FLAGS, "-fPIC", "-Wall", *includes]
        gpu: list[str] = []
        if choice == "cuda":
            nvcc = found("nvcc")
            gpu = [nvcc, *NVCC_FLAGS, *gencode(nvcc), *includes]
        elif choice == "hip":
            os.environ["HIP_PLATFORM"] = "amd"  # where nvcc is found too, hipcc would call it
            archs = re.split(r"[;,\s]+", os.environ.get("PYTORCH_ROCM_ARCH") or ";".join(ROCM_ARCHS))
            gpu = [found("hipcc"), *HIPCC_FLAGS, *(f"--offload-arch={arch}" for arch in archs if arch), *includes]
        if gpu:
            cxx.append(f'-DRELU2IR_GPU="{choice}"')

        def compile_one(source: Path) -> str:
            target = objects / f"{source.name}.o"
            run([*(gpu if source.suffix == ".cu" else cxx), "-c", source, "-o", target])
            return str(target)

        with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)) as pool:
            # The GPU sources take longest.
            compiled = list(pool.map(compile_one, sorted(sources, key=lambda source: source.suffix != ".cu")))
        output = Path(self.get_ext_fullpath(ext.name))
        output.parent.mkdir(parents=True, exist_ok=True)
        # The GPU compilers link their own runtime in; nvcc takes the static one, which runs beside any torch's.
        linker = compiler() if choice == "cpp" else [gpu[0]]
        run([*linker, "-shared", *compiled, *torch_stubs(objects / "stubs"), "-o", output])


def torch_stubs(folder: Path) -> list[str]:
    """Linker flags for torch's libraries without torch: empty ones that carry only their names.

    --no-as-needed, because nothing in them is seen to be used: without it libtorch is dropped, and beside it the weak
    CUDA symbol would stay null on a torch that has it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    empty = folder / "empty.cpp"
    empty.write_text("")
    for name in ("libtorch.so", "libtorch_cpu.so"):
        run([*compiler(), "-shared", "-fPIC", empty, "-o", folder / name, f"-Wl,-soname,{name}"])
    return [f"-L{folder}", "-Xlinker", "--no-as-needed", "-ltorch", "-ltorch_cpu"]


def run(command: list) -> None:
    print(shlex.join(map(str, command)), flush=True)
    subprocess.run(command, check=True)


class BuildPython(build_py):
    """Puts ops.yaml into the built package; a checkout reads the one above it."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            self.copy_file(str(ROOT / "ops.yaml"), str(Path(self.build_lib, "relu2ir", "ops.yaml")))


class Wheel(bdist_wheel):
    def finalize_options(self) -> None:
        if self.distribution.ext_modules:
            self.py_limited_api = "cp310"  # one binary for CPython 3.10 and every later one
        super().finalize_options()


ASKED = os.environ.get("RELU2IR_BUILD") or "auto"
CHOICE = chosen(ASKED)
setup(
    ext_modules=[Extension("relu2ir._C", SOURCES, py_limited_api=True)] if CHOICE != "none" else [],
    cmdclass={"build_ext": BuildExtension, "build_py": BuildPython, "bdist_wheel": Wheel},
)
