"""Kernels for a user's own spec file: `relu2ir build`, and finding what it built again."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from requirements import tool

import relu2ir
from relu2ir import binaries, eager, specfile, testing
from relu2ir.errors import BuildError
from relu2ir.registry import PROVIDERS

ROOT = Path(__file__).parent.parent
FILE = ROOT / "tests/own_ops.yaml"
EXTRA_OPS = relu2ir.load(FILE)
VARIABLES = ("RELU2IR_BUILD", "RELU2IR_CACHE", "CXX", "TORCH_CUDA_ARCH_LIST")
ONE_OP = "namespace: {namespace}\nops: {{doubled: {{inputs: [x], expr: {expr}}}}}\n"


def compiler(folder: Path, compiling: str = "") -> str:
    """A C++ compiler that writes down what it compiles, after the shell commands ``compiling``."""
    script = folder / "cxx"
    script.write_text(
        f'#!/bin/sh\ncase " $* " in *" -c "*) echo "$*" >> {folder}/compiled; {compiling} ;; esac\n'
        f'exec {tool("cxx")} "$@"\n'
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return str(script)


def compilations(folder: Path) -> int:
    return len((folder / "compiled").read_text().splitlines())


def reason(spec: specfile.OpSpec, provider: str = "cpp") -> str | None:
    """Why the provider refuses a small call of ``spec``."""
    device = torch.device("cpu" if provider == "cpp" else "cuda")
    relu2ir.refresh()
    return PROVIDERS[provider].refuses(spec, [relu2ir.registry.Imagined((2,), torch.float32, device)])


def cli(*args: str | Path, **environment: str) -> subprocess.Popen[str]:
    kept = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    return subprocess.Popen(
        [sys.executable, *args],
        cwd=ROOT,
        env=kept | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where this module's cache is and its compiler; nothing is built yet."""
    folder = tmp_path_factory.mktemp("own")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"CACHE": folder / "cache", "BUILD": "cpp"}.items():
            patch.setenv(f"RELU2IR_{name}", str(value))
        patch.setenv("CXX", compiler(folder))
        relu2ir.refresh()
        yield folder
    relu2ir.refresh()


@pytest.fixture(scope="module")
def built(folder: Path) -> Path:
    """The binary of `FILE`."""
    return relu2ir.build(FILE)


@pytest.fixture
def copied(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The binary of `FILE` in a cache of its own, to be spoilt."""
    shutil.copytree(binaries.cache_folder(), tmp_path / "copied")
    monkeypatch.setenv("RELU2IR_CACHE", str(tmp_path / "copied"))
    yield binaries.binary(built.parent.name)
    monkeypatch.undo()
    relu2ir.refresh()


@pytest.mark.needs("cpp", "cxx")
def test_an_op_that_is_not_compiled_says_how_and_nothing_compiles_by_itself(folder: Path) -> None:
    x = torch.tensor([-1.0, 2.0])
    message = f"not compiled: owned::relu_squared is in no binary; run relu2ir build {FILE}"
    assert message in str(relu2ir.explain("owned::relu_squared", x, providers="cpp,native"))
    assert relu2ir.ops.owned.relu_squared(x, provider="cpp,native").tolist() == [0.0, 12.0]
    assert not binaries.cache_folder().exists()


@pytest.mark.needs("cpp", "cxx")
def test_after_a_build_the_ops_run_at_once_beside_the_librarys_own(built: Path) -> None:
    x = torch.tensor([-1.0, 2.0])
    assert relu2ir.explain("owned::relu_squared", x, providers="cpp,native").chosen == "cpp"
    assert relu2ir.ops.owned.relu_squared(x, provider="cpp").tolist() == [0.0, 12.0]
    assert relu2ir.ops.relu_squared(x, provider="cpp").tolist() == [0.0, 4.0]
    assert torch.ops.owned_cpp.relu_squared.kernel(x, 2.0).tolist() == [0.0, 8.0]


@pytest.mark.needs("cpp", "cxx")
@pytest.mark.parametrize(
    "cell", testing.cells([spec.qualname for spec in EXTRA_OPS], ["cpp"], ["cpu"], many=4000), ids=str
)
def test_an_own_op_is_right_however_its_tensors_lie(built: Path, cell: testing.Cell) -> None:
    assert cell.unavailable() is None
    cell.check()


@pytest.mark.needs("cpp", "cxx")
def test_the_eager_front_calls_the_kernel_of_an_own_binary_directly(built: Path) -> None:
    op, x = relu2ir.ops.owned.relu_squared, torch.tensor([-1.0, 2.0])
    with relu2ir.use("cpp"):
        for _ in range(2):  # the first call chooses, the second finds the choice
            assert op(x).tolist() == [0.0, 12.0]
        # What the table says from now on is not asked: the front has kept the kernel.
        choices, kernel = eager.table(relu2ir.library.find("owned::relu_squared")), lambda x, scale: -x
        choices.update(dict.fromkeys(choices, eager.Choice(kernel, kernel)))
        assert op(x).tolist() == [0.0, 12.0]
    relu2ir.refresh()


@pytest.mark.needs("cpp", "cxx")
def test_a_second_build_compiles_nothing(built: Path, folder: Path) -> None:
    before = compilations(folder)
    assert relu2ir.build(FILE) == built
    assert compilations(folder) == before


@pytest.mark.needs("cpp", "cxx")
def test_a_later_process_finds_the_binary_without_a_compiler(built: Path) -> None:
    code = (
        f"import relu2ir, torch; relu2ir.load({str(FILE)!r}); "
        "print(relu2ir.ops.owned.relu_squared(torch.ones(1), scale=5.0, provider='cpp'))"
    )
    out, err = cli("-c", code, RELU2IR_CACHE=str(binaries.cache_folder()), CXX="false", PATH="").communicate()
    assert out == "tensor([5.])\n", err


@pytest.mark.needs("cpp", "cxx")
def test_an_edited_spec_is_not_run_by_the_binary_of_before(built: Path, tmp_path: Path) -> None:
    edited = tmp_path / "edited.yaml"
    edited.write_text(FILE.read_text().replace("scale * square", "scale + square"))
    spec, unchanged = specfile.read(edited).ops
    assert reason(spec) == f"built from another definition of owned::relu_squared; run relu2ir build {edited}"
    assert reason(unchanged) is None


@pytest.mark.needs("cpp", "cxx")
def test_a_damaged_binary_is_rejected_and_built_anew(copied: Path, folder: Path) -> None:
    with copied.open("r+b") as file:
        file.truncate(copied.stat().st_size // 2)
    assert reason(EXTRA_OPS[0]) == f"its binary {copied} is damaged; run relu2ir build {FILE}"
    copied.unlink()
    assert f"its binary cannot be read: [Errno 2] No such file or directory: '{copied}'" in str(reason(EXTRA_OPS[0]))
    assert relu2ir.build(FILE) == copied
    assert reason(EXTRA_OPS[0]) is None


@pytest.mark.needs("cpp", "cxx")
def test_a_binary_that_does_not_load_is_rejected(copied: Path) -> None:
    foreign = copied.parent / "foreign" / "kernels.so"
    foreign.parent.mkdir()
    foreign.write_bytes(b"\x7fELF of another machine")
    binaries.keep(copied.parent.name, foreign)
    assert "file too short" in str(reason(EXTRA_OPS[0])) and f"run relu2ir build {FILE}" in str(reason(EXTRA_OPS[0]))


@pytest.mark.needs("cpp", "cxx")
def test_a_binary_without_gpu_kernels_says_so_on_a_gpu(built: Path) -> None:
    with_what = "hipcc" if torch.version.hip else "nvcc"
    assert reason(EXTRA_OPS[0], "cuda") == f"built without {with_what}; put it on PATH and run relu2ir build {FILE}"


@pytest.mark.needs("cxx")
def test_a_build_that_fails_shows_the_end_of_its_log_and_keeps_it(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler(tmp_path, compiling="echo 'error: out of ideas'; exit 3"))
    with pytest.raises(BuildError, match=r"failed with status 3\n    error: out of ideas\nThe whole log is ") as error:
        relu2ir.build(FILE)
    log = Path(str(error.value).partition("The whole log is ")[2].partition(";")[0])
    assert "error: out of ideas" in log.read_text() and f"{tmp_path}/cxx -std=c++17 -O3" in log.read_text()


@pytest.mark.needs("cpp", "cxx")
def test_beside_an_nvcc_that_fails_the_cpu_kernels_are_built(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "nvcc").symlink_to(shutil.which("false") or "/bin/false")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setenv("RELU2IR_BUILD", "cuda")
    with pytest.raises(BuildError, match=f"does not compile: {tmp_path}/nvcc failed with status 1"):
        relu2ir.build(FILE)
    monkeypatch.setenv("RELU2IR_BUILD", "auto")
    assert relu2ir.build(FILE) == built
    assert "warning: without GPU kernels, as those fail" in capfd.readouterr().err


@pytest.mark.needs("cxx")
@pytest.mark.parametrize(("variable", "value"), [("RELU2IR_BUILD", "none"), ("RELU2IR_BUILD", "gpu"), ("CXX", "/no")])
def test_what_cannot_be_built_says_what_to_do(
    folder: Path, variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    actions = {"none": "unset it", "gpu": "use one of auto, cuda, hip, cpp, none", "/no": "chosen by CXX"}
    with pytest.raises(BuildError, match=actions[value]):
        relu2ir.build(FILE)


@pytest.mark.needs("cxx")
def test_a_mistake_in_a_build_is_exit_code_2(tmp_path: Path) -> None:
    process = cli("-m", "relu2ir", "build", FILE, RELU2IR_BUILD="gpu")
    _, err = process.communicate()
    assert process.returncode == 2 and err.startswith("BuildError: unknown RELU2IR_BUILD='gpu'")


@pytest.mark.needs("cxx")
def test_two_processes_at_once_build_once(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(ONE_OP.format(namespace="raced", expr="x + x"))
    settings = {"RELU2IR_CACHE": str(tmp_path / "cache"), "RELU2IR_BUILD": "cpp", "CXX": compiler(tmp_path)}
    both = [cli("-m", "relu2ir", "build", tmp_path / "own.yaml", **settings) for _ in range(2)]
    (out, err), (other, _) = [process.communicate() for process in both]
    assert [process.returncode for process in both] == [0, 0], err
    assert out == other and Path(out.strip()).exists()
    assert compilations(tmp_path) == len(list((ROOT / "csrc").glob("*.cpp"))) + 1


@pytest.mark.needs("nvcc", "cpp")
def test_gpu_kernels_are_compiled_for_an_own_op(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.yaml").write_text(ONE_OP.format(namespace="with_gpu", expr="x + x"))
    for name, value in {"CACHE": tmp_path, "BUILD": "cuda"}.items():
        monkeypatch.setenv(f"RELU2IR_{name}", str(value))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    relu2ir.build(tmp_path / "own.yaml")
    (spec,) = specfile.read(tmp_path / "own.yaml").ops
    assert reason(spec, "cuda") is None
    result = torch.ops.with_gpu_cuda.doubled_backward.kernel(
        torch.ones(3, 4, device="meta"), torch.ones(3, 4, device="meta")
    )
    assert result.shape == (3, 4)
