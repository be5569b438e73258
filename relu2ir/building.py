"""Compiling ops into a binary: setup.py does it for ops.yaml, `build` for a user's spec file. Needs no torch.

RELU2IR_BUILD says what is compiled; a choice by name fails where its compiler is missing, `auto` takes what there is:
  auto   cuda if nvcc is found, else hip if hipcc is, else cpp if a C++ compiler is, else none; cpp, with a warning,
         where the GPU compiler fails
  cuda   the CPU and the CUDA kernels; TORCH_CUDA_ARCH_LIST chooses the architectures
  hip    the CPU kernels and the CUDA ones through HIP; PYTORCH_ROCM_ARCH chooses the architectures
  cpp    the CPU kernels
  none   nothing: PyTorch and Triton run every op
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
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from relu2ir import binaries, codegen, specfile
from relu2ir.errors import BuildError
from relu2ir.providers.compiled import identity
from relu2ir.spec import OpSpec

BUILD_VARIABLE = "RELU2IR_BUILD"
CHOICES = ("auto", "cuda", "hip", "cpp", "none")
# No fast math: contraction alone changes the result of a multiply and add. That floating-point exceptions need not be
# raised, nor errno set, changes no value, and lets the compiler vectorise a choice and a root.
EXACT_FLAGS = ("-ffp-contract=off", "-fno-trapping-math", "-fno-math-errno")
CXX_FLAGS = ("-std=c++17", "-O3", *EXACT_FLAGS, "-fvisibility=hidden")
NVCC_FLAGS = ("-std=c++17", "-O3", "--fmad=false", "-Xcompiler=-fPIC,-ffp-contract=off,-fvisibility=hidden")
HIPCC_FLAGS = (*CXX_FLAGS, "-x", "hip", "-fPIC")
CUDA_ARCHS, ROCM_ARCHS = ("80", "90", "100", "120"), ("gfx90a",)
LAST_LINES = 15  # of a failed command's output, in the error
Run = Callable[[Sequence[Any]], None]


def compiler() -> list[str]:
    """The C++ compiler: CXX, else c++, g++ or clang++ on PATH."""
    if "CXX" in os.environ:
        return shlex.split(os.environ["CXX"])
    return [next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), "c++")]


def cxx_problem() -> str | None:
    """Why the compiler makes no shared object that includes Python.h, or None.

    setup.py asks before it declares an extension: a failed build would leave a wheel with a platform tag and no binary.
    """
    problem = f"{shlex.join(compiler())!r} compiles no extension: install a C++ compiler and Python's headers"
    if not sys.platform.startswith("linux"):
        return problem
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.cpp")
        source.write_text("#include <Python.h>\n#include <cmath>\n")
        command = [*compiler(), "-std=c++17", "-shared", "-fPIC", f"-I{sysconfig.get_path('include')}"]
        try:
            failed = subprocess.run([*command, source, "-o", f"{source}.so"], capture_output=True).returncode
        except OSError:
            return problem
    return problem if failed else None


def found(program: str) -> str | None:
    """``nvcc`` or ``hipcc``: on PATH, or where CUDA_HOME or ROCM_PATH says."""
    home = {"nvcc": os.environ.get("CUDA_HOME"), "hipcc": os.environ.get("ROCM_PATH")}[program]
    at = Path(home, "bin", program) if home else None
    return str(at) if at and at.exists() else shutil.which(program)


def asked() -> str:
    """RELU2IR_BUILD; BuildError for an unknown choice."""
    choice = os.environ.get(BUILD_VARIABLE) or "auto"
    if choice not in CHOICES:
        raise BuildError(f"unknown {BUILD_VARIABLE}={choice!r}; use one of {', '.join(CHOICES)}")
    return choice


def chosen(cxx: str | None) -> str:
    """What is compiled here; BuildError when RELU2IR_BUILD asks for what cannot be.

    ``cxx`` is what is wrong with the C++ compiler, which every choice needs.
    """
    choice = asked()
    problems = {name: cxx for name in ("cuda", "hip", "cpp") if cxx}
    for gpu, program in ("cuda", "nvcc"), ("hip", "hipcc"):
        if not found(program):
            problems.setdefault(gpu, f"{program} was not found: put it on PATH")
    if choice == "auto":
        return next((name for name in ("cuda", "hip", "cpp") if name not in problems), "none")
    if choice in problems:
        raise BuildError(f"{BUILD_VARIABLE}={choice} cannot be built; {problems[choice]}, or set {BUILD_VARIABLE}=auto")
    return choice


def gencode(nvcc: str) -> list[str]:
    """nvcc's flags for TORCH_CUDA_ARCH_LIST ("8.0;9.0+PTX"), else for the defaults it knows, the lowest also as PTX.

    Every architecture is compiled from the PTX of the lowest: the kernels use nothing that came later, sm_90's machine
    code is the same to the instruction, and nvcc takes 14 s for an op where it took 21.
    """
    listed = os.environ.get("TORCH_CUDA_ARCH_LIST")
    if listed:
        words = [word.replace(".", "") for word in re.split(r"[;,\s]+", listed) if word]
    else:
        known = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True, check=True).stdout.split()
        words = [arch for arch in CUDA_ARCHS if f"sm_{arch}" in known]
        words[0] += "+PTX"
    archs = [word.removesuffix("+PTX") for word in words]
    # 90a and its like are not in order: their PTX runs nowhere else.
    lowest = min((arch for arch in archs if arch.isdigit()), key=int, default="")
    flags = []
    for word, arch in zip(words, archs):
        virtual = lowest if arch.isdigit() else arch
        flags.append(f"-gencode=arch=compute_{virtual},code=sm_{arch}")
        if word != arch:
            flags.append(f"-gencode=arch=compute_{virtual},code=compute_{virtual}")
    if "--compress-mode" in _output([nvcc, "--help"]):
        flags.append("--compress-mode=size")  # 1.2 MB become 0.25
    return flags


@dataclass(frozen=True)
class Toolchain:
    """The commands of one choice: for C++ sources, for CUDA sources (none without a GPU), and to link."""

    cxx: list[str]
    gpu: list[str]
    linker: list[str]

    def identity(self) -> str:
        """The commands with their flags, and what the compilers say they are."""
        said = [_output([*each, "--version"]) for each in (compiler(), self.linker)]
        return "\n".join([shlex.join(self.cxx), shlex.join(self.gpu), *said])


def toolchain(choice: str) -> Toolchain:
    cxx = [*compiler(), *CXX_FLAGS, "-fPIC", "-Wall", f'-DRELU2IR_SOURCES="{binaries.sources()}"']
    if choice == "cpp":
        return Toolchain(cxx, [], compiler())
    cxx.append(f'-DRELU2IR_GPU="{choice}"')
    # The GPU compilers link their own runtime in; nvcc takes the static one, which runs beside any torch's.
    if choice == "cuda":
        nvcc = found("nvcc") or "nvcc"
        return Toolchain(cxx, [nvcc, *NVCC_FLAGS, *gencode(nvcc)], [nvcc])
    hipcc = ["env", "HIP_PLATFORM=amd", found("hipcc") or "hipcc"]  # where nvcc is found too, hipcc would call it
    archs = re.split(r"[;,\s]+", os.environ.get("PYTORCH_ROCM_ARCH") or ";".join(ROCM_ARCHS))
    return Toolchain(cxx, [*hipcc, *HIPCC_FLAGS, *(f"--offload-arch={arch}" for arch in archs if arch)], hipcc)


def compile_binary(specs: Sequence[OpSpec], tools: Toolchain, folder: Path, output: Path, run: Run) -> None:
    """Make ``output`` of ``specs``: write the C++ into ``folder``/generated, compile side by side, link.

    ``run`` runs a command, and raises CalledProcessError where that fails.
    """
    generated, objects = folder / "generated", folder / "objects"
    for part in (generated, objects):
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
    csrc = binaries.shipped("csrc")
    sources = sorted(csrc.glob("*.cpp"))
    for name, text in codegen.generate(specs, gpu=bool(tools.gpu)).items():
        (generated / name).write_text(text, encoding="utf-8")
        if name.endswith((".cpp", ".cu")):
            sources.append(generated / name)
    includes = [f"-I{include}" for include in (csrc, generated, sysconfig.get_path("include"))]

    def compile_one(source: Path) -> Path:
        target = objects / f"{source.name}.o"
        command = tools.gpu if source.suffix == ".cu" else tools.cxx
        run([*command, *includes, "-c", source, "-o", target])
        return target

    with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)) as pool:
        # The GPU sources take longest.
        compiled = list(pool.map(compile_one, sorted(sources, key=lambda source: source.suffix != ".cu")))
    output.parent.mkdir(parents=True, exist_ok=True)
    run([*tools.linker, "-shared", *compiled, *_torch_stubs(objects, run), "-o", output])


def _torch_stubs(folder: Path, run: Run) -> list[str]:
    """Linker flags for torch's libraries without torch: empty ones that carry only their names.

    --no-as-needed, because nothing in them is seen to be used: without it libtorch is dropped, and beside it the weak
    CUDA symbol would stay null on a torch that has it.
    """
    empty = folder / "empty.cpp"
    empty.write_text("")
    for name in ("libtorch.so", "libtorch_cpu.so"):
        run([*compiler(), "-shared", "-fPIC", empty, "-o", folder / name, f"-Wl,-soname,{name}"])
    return [f"-L{folder}", "-Xlinker", "--no-as-needed", "-ltorch", "-ltorch_cpu"]


def _output(command: Sequence[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True).stdout


def build(path: str | os.PathLike[str]) -> Path:
    """Compile the ops of the spec file at ``path`` into a binary of the cache; its path.

    Nothing is compiled that was before, with equal text, flags and compilers. SpecError for a file with problems,
    BuildError with the end of its log when it does not compile.
    """
    file = specfile.read(os.fspath(path))
    choice = chosen(cxx=None)  # without a probe: what is wrong with the compiler stands in the log
    if choice == "none" or not file.ops:
        why = f"{BUILD_VARIABLE}=none: unset it" if file.ops else "it declares no op"
        raise BuildError(f"nothing to compile for {file.path}: {why}")
    try:
        return _cached(file, choice)
    except BuildError as error:
        if choice == "cpp" or asked() != "auto":
            raise
        print(f"warning: without GPU kernels, as those fail: {error}", file=sys.stderr)
        return _cached(file, "cpp")


def _cached(file: specfile.SpecFile, choice: str) -> Path:
    from filelock import FileLock  # torch's own dependency, which setup.py need not have

    log = None
    try:
        tools = toolchain(choice)
        texts = codegen.generate(file.ops, gpu=bool(tools.gpu))
        key = binaries.digest(tools.identity(), binaries.sources(), *(word for text in texts.items() for word in text))
        folder = binaries.folder(key)
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / "lock"):
            if binaries.damage(key) is not None:
                log = folder / "build.log"
                print(f"compiling {file.path} for {choice}, into the log {log}", file=sys.stderr, flush=True)
                with log.open("w", encoding="utf-8") as stream, tempfile.TemporaryDirectory(dir=folder) as work:
                    made = Path(work, "kernels.so")
                    compile_binary(file.ops, tools, Path(work), made, partial(_logged, stream))
                    binaries.keep(key, made)
            for spec in file.ops:
                binaries.record(spec.qualname, identity(spec), key)
    except subprocess.CalledProcessError as error:
        end = "".join(f"\n    {line}" for line in error.output.splitlines()[-LAST_LINES:])
        whole = f"\nThe whole log is {log}" if log else ""
        message = f"{file.path} does not compile: {error.cmd[0]} failed with status {error.returncode}"
        raise BuildError(f"{message}{end}{whole}; another compiler is chosen by CXX") from None
    except OSError as error:
        raise BuildError(f"{file.path} cannot be built: {error}; another compiler is chosen by CXX") from None
    return binaries.binary(key)


def _logged(stream: TextIO, command: Sequence[Any]) -> None:
    """Run ``command``; its output goes to ``stream`` in one piece, as others run beside it."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    stream.write(f"{shlex.join(map(str, command))}\n{done.stdout}")
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, [str(word) for word in command], done.stdout)
