"""The ops in torch: schema, transforms, compile caches, user files, layers; and what importing the package costs."""

import copy
import importlib
import os
import pickle
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import relu2ir
from relu2ir import library, registry, specfile
from relu2ir.counting import kernel_calls

X = torch.tensor([-1.0, -0.0, 0.5, 3.0, float("nan"), float("inf"), -float("inf")])
ROOT = Path(__file__).parent.parent


def python(code, **env):
    """Run ``code`` in a fresh process; its standard output."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ["relu_squared", "silu_and_mul"])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck_passes(name, requires_grad):
    op = getattr(torch.ops.relu2ir, name).default
    torch.library.opcheck(op, (torch.randn(4, 6, requires_grad=requires_grad),))


def test_the_op_equals_its_expression_in_every_bit():
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        expected = torch.square(torch.relu(X.to(dtype)))
        for y in (relu2ir.ops.relu_squared(X.to(dtype)), torch.ops.relu2ir.relu_squared(X.to(dtype))):
            assert torch.equal(y.view(torch.uint8), expected.view(torch.uint8))


def test_integers_do_what_pytorch_does_and_complex_raises_what_pytorch_raises():
    assert torch.equal(relu2ir.ops.relu_squared(torch.tensor([-2, 3])), torch.tensor([0, 9]))
    with pytest.raises(RuntimeError) as ours:
        relu2ir.ops.relu_squared(torch.ones(2, dtype=torch.complex64))
    with pytest.raises(RuntimeError) as theirs:
        torch.square(torch.relu(torch.ones(2, dtype=torch.complex64)))
    assert str(ours.value) == str(theirs.value)


def test_arguments_are_checked():
    with pytest.raises(TypeError, match=r"relu_squared takes \(Tensor x\); found 2 positional"):
        relu2ir.ops.relu_squared(X, X)
    with pytest.raises(TypeError, match=r"takes 'x' as a tensor; found list"):
        relu2ir.ops.relu_squared([1.0])
    with pytest.raises(ValueError, match=r"must be even; found shape \[2, 3\]"):
        relu2ir.ops.silu_and_mul(torch.ones(2, 3))
    assert torch.equal(relu2ir.ops.relu_squared(x=torch.tensor([2.0])), torch.tensor([4.0]))


@pytest.mark.needs("cpp")
def test_the_op_of_a_provider_is_strict_or_leaves_to_pytorch_what_it_cannot_run():
    op = torch.ops.relu2ir_cpp.relu_squared
    for name in ("default", "or_native"):
        for _ in range(2):  # the second count finds the op that the first one defined
            with kernel_calls() as calls:
                assert torch.equal(getattr(op, name)(X[:4]), torch.tensor([0.0, 0.0, 0.25, 9.0]))
            assert calls == {"cpp": 1}
    with torch.autocast("cpu", torch.bfloat16), kernel_calls() as calls:
        assert torch.equal(op.or_native(X[:4]), torch.tensor([0.0, 0.0, 0.25, 9.0]))
        with pytest.raises(relu2ir.ProviderError, match="only native can run: autocast is on for the device"):
            op.default(X[:4])
    assert calls == {"native": 1}


@pytest.mark.needs("cpp")
def test_counting_again_around_a_first_lowering_counts_again():
    code = """
        import torch, relu2ir
        from relu2ir.counting import kernel_calls
        captured = torch.fx.symbolic_trace(lambda x: torch.square(torch.relu(x)))
        for size in (3, 4):
            with kernel_calls() as calls:
                x = torch.randn(size)
                relu2ir.lower(relu2ir.fuse(captured).module, x, providers="cpp")(x)
            print(calls["cpp"])
    """
    assert python(code) == "1\n" * 2


def test_vmap_does_not_loop_over_the_batch():
    # The fallback's only sign is a C++ warning; with the fallback off it is an error.
    code = """
        import torch, relu2ir
        torch._C._functorch._set_vmap_fallback_enabled(False)
        x = torch.randn(5, 3, 4)
        for op in (relu2ir.ops.silu_and_mul, torch.ops.relu2ir.silu_and_mul):
            y = torch.vmap(torch.vmap(op), in_dims=1)(x)
            print(torch.equal(y, op(x.transpose(0, 1))))
    """
    assert python(code).split() == ["True", "True"]


def test_a_compiled_function_holds_one_node_and_follows_an_override():
    graphs = []

    def keep(gm, inputs):
        graphs.append(gm)
        return gm

    compiled = torch.compile(lambda x: relu2ir.ops.relu_squared(x) + 1, backend=keep, fullgraph=True)
    x = torch.randn(8)
    for _ in range(2):
        assert torch.equal(compiled(x), relu2ir.ops.relu_squared(x) + 1)
    assert len(graphs) == 1
    targets = [node.target for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert targets[0] is torch.ops.relu2ir.relu_squared.default
    with relu2ir.use(providers="native"):
        compiled(x)
    assert len(graphs) == 2, "another override is another compilation"
    compiled(x)
    assert len(graphs) == 2


def test_an_edited_expression_is_never_run_from_a_compile_cache(tmp_path):
    spec = tmp_path / "mine.yaml"
    code = """
        import torch, relu2ir
        from concurrent.futures import ThreadPoolExecutor
        f = torch.compile(lambda x: torch.ops.cached.edited(x) * 1.0, fullgraph=True)
        print(ThreadPoolExecutor(1).submit(f, torch.tensor([3.0])).result().item())
    """
    results = []
    for expr in ("square(relu(x))", "relu(x)"):
        spec.write_text(f"namespace: cached\nops:\n  edited: {{inputs: [x], expr: {expr}}}\n")
        cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "TORCHINDUCTOR_FX_GRAPH_CACHE": "1"}
        results.append(float(python(code, RELU2IR_OPS=str(spec), **cache)))
    assert results == [9.0, 3.0]


def test_compile_caches_know_the_ops_and_the_choice_in_every_thread():
    config, told = torch.compiler.config, library.find("relu_squared").hash

    def read():
        seen = {"plainly": config.cache_key_tag}
        with config.patch(cache_key_tag="mine"):
            seen["patched"] = config.cache_key_tag
        with relu2ir.use(providers="native"):
            seen["asked"] = config.cache_key_tag
        return seen | {"after": config.cache_key_tag}

    with ThreadPoolExecutor(1) as pool:
        for seen in (read(), pool.submit(read).result()):
            assert all(tag.count(told) == 1 for tag in seen.values())
            assert seen["patched"] == f"mine{seen['plainly']}"
            assert seen["asked"] == f"{seen['plainly']}*=native"
            assert seen["after"] == seen["plainly"]


def test_a_users_file_gives_callable_differentiable_ops(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("namespace: mine\nops:\n  double_relu: {inputs: [x], expr: relu(x) + relu(x)}\n")
    (spec,) = relu2ir.load(path)
    x = torch.randn(4, requires_grad=True)
    y = relu2ir.ops.mine.double_relu(x)
    y.sum().backward()
    assert torch.equal(y, 2 * x.relu())
    assert torch.equal(x.grad, 2.0 * (x > 0))
    assert torch.equal(torch.ops.mine.double_relu(x), y)
    assert relu2ir.nn.layer_for(spec)().extra_repr() == "double_relu(x) = relu(x) + relu(x)"
    assert relu2ir.load(path) == [], "loading again what is there changes nothing"


def test_a_gradient_that_is_constant_is_a_tensor(tmp_path):
    path = tmp_path / "constant.yaml"
    path.write_text("namespace: constant\nops:\n  kept: {inputs: [a, b], expr: 'where(a > 0, b, 1)'}\n")
    relu2ir.load(path)
    a, b = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
    spec = library.find("constant::kept")
    to_a, to_b = registry.provider("native", "").lower(spec.backward)(torch.ones(4), a.detach(), b.detach())
    relu2ir.ops.constant.kept(a, b).sum().backward()
    assert torch.equal(to_a, torch.zeros(4))
    assert torch.equal(to_b, b.grad)


@pytest.mark.needs("cpp")
def test_a_choice_is_not_kept_for_what_its_kernel_refuses():
    with relu2ir.use(providers="cpp,native"):
        for x in (
            torch.ones(2, 3),
            torch.ones([1] * 17),
            torch.eye(3).to_sparse(),
            torch.ones(2, 3),
            torch.ones([1] * 17),
        ):
            expected = torch.square(torch.relu(x))
            for op in (relu2ir.ops.relu_squared, torch.ops.relu2ir.relu_squared):
                assert torch.equal(op(x).to_dense(), expected.to_dense())


@pytest.mark.needs("cpp")
@pytest.mark.parametrize("direction", ["forward", "recorded", "backward"])
def test_compiled_kernels_free_their_results(direction):
    x = torch.randn(2**18, requires_grad=direction != "forward")  # 1 MB

    def call():
        y = relu2ir.ops.relu_squared(x)
        if direction == "backward":
            torch.autograd.grad(y.sum(), x)

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    with relu2ir.use(providers="cpp"):
        call()
        before = resident()
        for _ in range(100):
            call()
    assert resident() - before < 20 * 2**20


def test_a_name_that_is_taken_names_both_files(tmp_path):
    path = tmp_path / "theirs.yaml"
    path.write_text("ops:\n  fine: {inputs: [x], expr: relu(x)}\n  relu_squared: {inputs: [x], expr: relu(x)}\n")
    with pytest.raises(
        relu2ir.SpecError, match=r"theirs.yaml: op 'relu2ir::relu_squared' is already declared in .*ops"
    ):
        relu2ir.load(path)
    assert not hasattr(relu2ir.ops, "fine"), "a file that is refused registers nothing"


def test_functions_can_be_imported_and_are_pickled_by_name():
    library.register(specfile.read_text("namespace: pickled\nops: {twice: {inputs: [x], expr: x + x}}"))
    from relu2ir.ops import pickled, relu_squared

    assert relu_squared is relu2ir.ops.relu_squared
    for spec, function in ((library.find("relu_squared"), relu_squared), (library.find("twice"), pickled.twice)):
        python = library._python_front(spec, function)
        assert (python.__module__, python.__name__) == (library._module(spec.namespace).__name__, spec.name)
        assert getattr(importlib.import_module(python.__module__), python.__name__) is function
        assert pickle.loads(pickle.dumps(function)) is function


def test_an_op_of_the_library_and_a_namespace_do_not_share_a_name(tmp_path):
    path, stanza = tmp_path / "mine.yaml", "{inputs: [x], expr: relu(x)}"
    path.write_text(f"namespace: relu_squared\nops: {{fine: {stanza}}}")
    with pytest.raises(relu2ir.SpecError) as of_namespace:
        relu2ir.load(path)
    assert str(of_namespace.value) == (
        f"{path}: 'relu_squared' cannot name a namespace: relu2ir has an op of that name; choose another at $.namespace"
    )
    path.write_text(f"namespace: taken\nops: {{fine: {stanza}}}")
    relu2ir.load(path)
    path.write_text(f"ops: {{fine: {stanza}, taken: {stanza}}}")
    with pytest.raises(relu2ir.SpecError) as of_op:
        relu2ir.load(path)
    assert str(of_op.value) == (
        f"{path}: 'taken' cannot name an op of relu2ir: a namespace has that name; choose another at $.ops.taken"
    )
    assert not hasattr(relu2ir.ops, "fine")
    assert relu2ir.ops.taken.fine(torch.tensor([-1.0, 2.0])).tolist() == [0.0, 2.0]


def test_what_torch_has_as_attributes_cannot_name_an_op_or_a_namespace():
    own = {spec.name for spec in library.specs()}
    for scope, pattern in ((torch.ops.relu2ir, "ops: {{{}: {{inputs: [x], expr: -x}}}}"),
                           (torch.ops, "namespace: {}\nops: {{f: {{inputs: [x], expr: -x}}}}")):  # fmt: skip
        for name in dir(scope):
            is_scope = isinstance(getattr(scope, name), torch._ops._OpNamespace)
            if not name.startswith("_") and name not in own and not is_scope:
                with pytest.raises(relu2ir.SpecError, match=f"'{name}' cannot name"):
                    specfile.read_text(pattern.format(name))


def test_layers_dispatch_pickle_and_print():
    layer = relu2ir.nn.ReLUSquared()
    x = torch.randn(4)
    for each in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(each(x), torch.square(torch.relu(x)))
        assert torch.equal(each.forward_native(x), each(x))
        assert repr(each) == "ReLUSquared(relu_squared(x) = square(relu(x)))"
    assert torch.equal(layer(input=x), layer(x)), "it can stand where a module stood that was called by keyword"
    assert not list(layer.parameters())
    assert "SiLUAndMul" in dir(relu2ir.nn)
    with pytest.raises(AttributeError, match="has no layer 'ReLU6'; layers: ReLUSquared"):
        _ = relu2ir.nn.ReLU6


def test_the_library_says_what_is_registered():
    names = [spec.name for spec in specfile.read(ROOT / "ops.yaml").ops]
    assert [spec.name for spec in library.specs() if spec.namespace == "relu2ir"] == names
