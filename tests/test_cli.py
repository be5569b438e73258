"""The command line: its texts word for word, its errors, and its two long commands as a user runs them.

``tests/golden/*.txt`` are transcripts. ``python tests/test_cli.py`` writes them anew after a change that is meant.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch

import relu2ir
from relu2ir import eager, library, registry
from relu2ir.__main__ import main
from relu2ir.registry import Imagined, Provider

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden"
PROMPT = "$ relu2ir "

# A model that computes an op of the user's own file, in the folder in which the command is run.
OPS = "namespace: mine\nops:\n  double_relu: {inputs: [x], expr: relu(x) + relu(x)}\n"
MODEL = """
import torch
import torch.nn.functional as F

class Doubled(torch.nn.Linear):
    def forward(self, x):
        h = F.linear(x, self.weight)
        return F.relu(h) + F.relu(h)

class Squared(torch.nn.Linear):
    def forward(self, x):
        return torch.square(F.relu(F.linear(x, self.weight)))

def doubled():
    return Doubled(4, 8), (torch.randn(2, 4),)

def squared():
    return Squared(4, 8), {"x": torch.randn(2, 4)}

def one_tensor():
    return Squared(4, 8), torch.randn(2, 4)

def nothing_to_fuse():
    return torch.nn.Linear(4, 4), (torch.randn(2, 4),)

def only_a_model():
    return Squared(4, 8)

a_number = 5
"""


def run(*arguments: str, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """``relu2ir`` as installed: a script of another folder than the one in which it is run."""
    script = "import sys; sys.path.pop(0); from relu2ir.__main__ import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=folder,
        # One thread: on a busy machine the threads of small layers wait for one another.
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | env,
        capture_output=True,
        text=True,
        check=False,
    )


def transcript(path: Path) -> dict[str, str]:
    """Each command of a golden file with what it prints."""
    parts = path.read_text().split(PROMPT)[1:]
    return {command: output.rstrip("\n") for command, _, output in (part.partition("\n") for part in parts)}


def printed(command: str) -> str:
    text = StringIO()
    with redirect_stdout(text):
        assert main(command.split()) == 0
    return text.getvalue().rstrip("\n")


def absent(name: str, reason: str) -> Provider:
    return replace(registry.PROVIDERS[name], missing=lambda: reason)


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a GPU, whatever this one has."""
    monkeypatch.setitem(registry.PROVIDERS, "cuda", absent("cuda", "torch finds no GPU here"))
    monkeypatch.setitem(registry.PROVIDERS, "triton", absent("triton", "no GPU was found"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, in which a user's model can be imported; afterwards it cannot."""
    (tmp_path / "my_model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_model", raising=False)
    return tmp_path


# ** show and explain **

TRANSCRIPTS = {path.stem: transcript(path) for path in sorted(GOLDEN.glob("*.txt"))}
COMMANDS = [(name, command) for name, commands in TRANSCRIPTS.items() for command in commands]


@pytest.mark.parametrize(("name", "command"), COMMANDS, ids=lambda value: value)
@pytest.mark.usefixtures("nowhere")
def test_a_command_prints_what_it_printed(name: str, command: str) -> None:
    assert printed(command) == TRANSCRIPTS[name][command]


@pytest.mark.parametrize("name", ["relu_squared", "silu_and_mul"])
@pytest.mark.parametrize("provider", registry.PROVIDERS)
def test_every_provider_shows_its_text_of_an_op_and_of_its_gradient(name: str, provider: str) -> None:
    spec = library.find(name)
    for op, option in ((spec, ""), (spec.backward, " --gradient")):
        shown = TRANSCRIPTS[f"show_{name}"][f"show {name} --provider {provider}{option}"]
        assert re.search(rf"(def|struct) ({op.name}|{op.name}_{op.hash})\b", shown)


@pytest.mark.usefixtures("nowhere")
def test_explain_alone_says_what_the_machine_has() -> None:
    text = printed("explain")
    assert text.startswith(f"relu2ir {relu2ir.__version__}, torch {torch.__version__}, platform here: ")
    blocks = {block.splitlines()[0]: block.splitlines()[1:] for block in text.split("\n\n")[1:]}
    assert [line.split()[0] for line in blocks["providers"]] == list(registry.PROVIDERS)
    assert "  cuda    torch finds no GPU here" in blocks["providers"]
    assert "  native  here" in blocks["providers"]
    assert blocks["platforms"] == [
        "  cuda    cuda, triton, native",
        "  rocm    cuda, triton, native",
        "  xpu     native",
        "  cpu     native",
    ]
    for spec in library.specs():
        first = next(i for i, line in enumerate(blocks["ops"]) if line.split()[0] == spec.qualname)
        lines = blocks["ops"][first + 1 : first + 1 + len(registry.PROVIDERS)]
        assert [line.split()[0] for line in lines] == list(registry.PROVIDERS)
        assert "    triton  rejected: no GPU was found" in lines
        assert "    native  accepted" in lines


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("explain relu_sqared", "OpError: unknown op 'relu_sqared'; did you mean 'relu_squared'?"),
        ("show relu_sqared", "OpError: unknown op 'relu_sqared'; did you mean 'relu_squared'?"),
        (
            "explain relu_squared --dtype float31",
            "Error: unknown dtype 'float31'; use a torch dtype such as float32, float16 or bfloat16",
        ),
        (
            "explain relu_squared --dtype nn",
            "Error: unknown dtype 'nn'; use a torch dtype such as float32, float16 or bfloat16",
        ),
        (
            "explain relu_squared --device gpu",
            "Error: unknown device 'gpu'; use a torch device such as cuda, cpu, xpu or mps",
        ),
        (
            "explain relu_squared --shape 8x4",
            "Error: cannot read shape '8x4'; give sizes with commas, such as 8,4096",
        ),
        (
            "explain relu_squared --shape 8,-1",
            "Error: cannot read shape '8,-1'; give sizes with commas, such as 8,4096",
        ),
        (
            "show relu_squared --provider cudda",
            "ProviderError: unknown provider 'cudda' in --provider cudda; did you mean 'cuda'?",
        ),
        (
            "fuse my_model",
            "FuseError: 'my_model' must be a function that returns (an nn.Module, its example inputs); found None",
        ),
        (
            "fuse my_modle:squared",
            "FuseError: cannot find 'my_modle:squared': No module named 'my_modle'. "
            "Pass package.module:function, importable from here.",
        ),
        (
            "fuse my_model:circled",
            "FuseError: cannot find 'my_model:circled': module 'my_model' has no attribute 'circled'. "
            "Pass package.module:function, importable from here.",
        ),
        (
            "fuse my_model:only_a_model",
            "FuseError: 'my_model:only_a_model' must be a function that returns (an nn.Module, its example inputs); "
            "found Squared(in_features=4, out_features=8, bias=True)",
        ),
        (
            "fuse my_model:a_number",
            "FuseError: 'my_model:a_number' must be a function that returns (an nn.Module, its example inputs); "
            "found None",
        ),
    ],
)
def test_a_mistake_exits_with_2_and_says_the_way_out(
    command: str, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == message + "\n"


@pytest.mark.parametrize("command", ["", "explode", "show", "fuse", "explain relu_squared --colour red"])
def test_an_unreadable_command_line_exits_with_2(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(command.split())
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith("usage: relu2ir ")


# ** fuse **


def test_a_users_op_is_fused_in_a_users_model_from_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(OPS)
    (tmp_path / "my_model.py").write_text(MODEL)
    done = run("fuse", "my_model:doubled", folder=tmp_path, RELU2IR_OPS="mine.yaml")
    assert done.returncode == 0, done.stderr
    assert "1 fused, 0 near misses" in done.stdout
    assert re.search(r"mine::double_relu .* native .*my_model\.py:8\n", done.stdout), done.stdout
    assert "outputs: equal; kernel calls: {'native': 1}" in done.stdout
    assert done.stdout.endswith("\nall equal\n")


@pytest.mark.parametrize("factory", ["squared", "one_tensor"])
def test_example_inputs_may_be_named_or_a_single_tensor(
    factory: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fuse", f"my_model:{factory}"]) == 0
    assert "1 fused" in capsys.readouterr().out


def test_a_model_whose_fused_output_differs_exits_with_1(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lower(spec: object) -> Callable[..., torch.Tensor]:
        return lambda x: torch.square(torch.relu(x)) + (x == x.max()) / 4

    wrong = Provider("wrong", missing=lambda: None, refuses=lambda spec, tensors: None, lower=lower)
    monkeypatch.setitem(registry.PROVIDERS, "wrong", wrong)
    monkeypatch.setitem(registry.ROWS, "cpu", ("wrong", "native"))
    eager.forget()
    try:
        assert main(["fuse", "my_model:squared"]) == 1
    finally:
        monkeypatch.undo()
        eager.forget()
    out, err = capsys.readouterr()
    assert "outputs: different; kernel calls: {'wrong': 1}" in out
    assert out.endswith("\nfailed\n")
    assert "FAILED: output 0 differs by up to 0.25\n" in err


def test_a_model_in_which_nothing_is_fused_exits_with_1(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fuse", "my_model:nothing_to_fuse"]) == 1
    assert "FAILED: no site was fused\n" in capsys.readouterr().err


# ** demo **


def test_without_transformers_the_demo_says_the_line_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["demo"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == 'The demo needs the transformers library. Install it with: pip install "relu2ir[demo]"\n'


@pytest.mark.needs("transformers module")
def test_the_demo_fuses_a_real_model_and_every_provider_that_was_asked_for_serves_it(tmp_path: Path) -> None:
    done = run("demo", folder=tmp_path)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    out = done.stdout
    titles = re.findall(r"^== (.*) ==$", out, re.MULTILINE)
    assert titles[:3] == ["one MLP as captured", "the same, fused", "lowered for this machine"]
    graphs = dict(zip(titles, re.split(r"^== .* ==$", out, flags=re.MULTILINE)[1:]))
    assert "torch.square(relu)" in graphs["one MLP as captured"]
    assert "torch.ops.relu2ir.relu_squared.default(up_proj)" in graphs["the same, fused"]
    for platform, lowered in (("cuda", "relu2ir_cuda"), ("rocm", "relu2ir_cuda"), ("xpu", "torch.square(relu)")):
        assert lowered in graphs[f"lowered as on a machine of platform '{platform}' (decided here, not run)"]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x = Imagined((2,), torch.float32, device)
    asked = [None] if device.type == "cuda" else [None, "cpp,native"]
    served = [registry.explain(library.find("relu_squared"), x, providers=names).chosen for names in asked]
    assert re.findall(r"kernel calls: (.*)", out) == [f"{{'{name}': 4}}" for name in served]
    assert out.count("4 fused, 0 near misses") == len(served)
    for layer in range(4):
        rows = re.findall(rf"model\.layers\.{layer}\.mlp\.act_fn .* (\w+) +\S*activations\.py", out)
        assert rows == served
    assert out.count("outputs: equal") == out.count("generate(): equal") == len(served)
    assert len(re.findall(r"forward: original [\d.]+ ms, fused [\d.]+ ms, ratio [\d.]+", out)) == len(served)
    assert out.endswith("\nall equal\n")


if __name__ == "__main__":
    for provider, why in (("cuda", "torch finds no GPU here"), ("triton", "no GPU was found")):
        registry.PROVIDERS[provider] = absent(provider, why)
    for stem, commands in TRANSCRIPTS.items():
        text = "\n\n".join(f"{PROMPT}{command}\n{printed(command)}" for command in commands)
        (GOLDEN / f"{stem}.txt").write_text(text + "\n")
