"""Which provider is chosen, who may override it, and what the errors and explanations say, word for word."""

import asyncio
import threading

import pytest
import torch
from torch._subclasses import FakeTensorMode

import relu2ir
from relu2ir import eager, library, overrides, registry, specfile
from relu2ir.registry import Accepted, Imagined, Provider, Rejected

X = torch.tensor([-1.0, 0.5, 3.0])


def constant(name, value, missing=None, refuses=None):
    """A provider whose kernels give ``value`` everywhere."""

    def lower(spec):
        return lambda *args: torch.full_like(args[0], value)

    return Provider(name, missing=lambda: missing, refuses=lambda spec, tensors: refuses, lower=lower)


def _refuses_integers_and_matrices(spec, tensors):
    return None if tensors[0].dtype.is_floating_point and len(tensors[0].shape) < 2 else "no integers, no matrices"


# One value for all tests, with a kernel that a graph can hold: a provider's op is defined in torch once.
PICKY = Provider("picky", lambda: None, _refuses_integers_and_matrices, constant("picky", 3.0).lower)
PICKY_KERNELS = torch.library.Library("relu2ir_picky", "FRAGMENT")
PICKY_KERNELS.define("relu_squared.kernel(Tensor x) -> Tensor")
PICKY_KERNELS.impl("relu_squared.kernel", lambda x: torch.full_like(x, 3.0), "CompositeExplicitAutograd")


@pytest.fixture(autouse=True)
def providers(monkeypatch):
    """``ones`` and ``twos`` run anywhere, ``absent`` nowhere; the CPU's row begins with ones."""
    for provider in (
        constant("ones", 1.0),
        constant("twos", 2.0),
        constant("absent", 0.0, missing="it is not here"),
        PICKY,
    ):
        monkeypatch.setitem(registry.PROVIDERS, provider.name, provider)
    monkeypatch.setitem(registry.ROWS, "cpu", ("ones", "native"))
    for variable in (overrides.PROVIDERS_VARIABLE, overrides.PLATFORM_VARIABLE):
        monkeypatch.delenv(variable, raising=False)
    relu2ir.refresh()
    yield
    monkeypatch.undo()
    relu2ir.refresh()


def value(**kwargs):
    """What the op gives at 3.0: 1 and 2 from the constant providers, 9 from native."""
    return relu2ir.ops.relu_squared(X, **kwargs)[2].item()


def test_the_users_table_holds():
    assert {platform: registry.row(platform) for platform in ("cuda", "rocm", "xpu")} == {
        "cuda": ("cuda", "triton", "native"),
        "rocm": ("cuda", "triton", "native"),
        "xpu": ("native",),
    }


def test_the_platforms_row_decides_when_nothing_is_asked():
    assert value() == 1


def test_a_call_beats_use_beats_the_environment_beats_the_row(monkeypatch):
    monkeypatch.setenv("RELU2IR_PROVIDERS", "twos")
    assert value() == 1, "variables are read at import and by refresh, never per call"
    relu2ir.refresh()
    assert value() == 2
    with relu2ir.use(providers="native"):
        assert value() == 9
        assert value(provider="ones") == 1
    assert value() == 2
    monkeypatch.setenv("RELU2IR_PROVIDERS", "")
    relu2ir.refresh()
    assert value() == 1, "an empty value is unset"


def test_a_request_can_name_its_op():
    with relu2ir.use(providers="silu_and_mul=twos;relu2ir::relu_squared=native"):
        assert value() == 9
        assert relu2ir.ops.silu_and_mul(torch.zeros(2, 4))[0, 0].item() == 2
    with relu2ir.use(providers={"silu_and_mul": "twos"}):
        assert value() == 1


def test_entering_the_same_use_again_decides_nothing_anew():
    choices = eager.table(library.find("relu_squared"))
    for _ in range(3):
        with relu2ir.use(providers="twos"):
            value()
    assert len(choices) == 1


def test_nested_use_keeps_what_it_does_not_set():
    with relu2ir.use(platform="xpu"):
        assert value() == 9
        with relu2ir.use(providers="twos"):
            explanation = relu2ir.explain("relu_squared", X)
            assert (explanation.platform, explanation.chosen) == ("xpu", "twos")
        assert value() == 9


def test_a_strict_request_never_falls_back():
    with pytest.raises(relu2ir.ProviderError) as error:
        value(provider="absent")
    assert str(error.value) == (
        "relu2ir::relu_squared cannot run with 'absent' on platform 'cpu' (float32 [3] on cpu)\n"
        "  absent  rejected: it is not here\n"
        "Asked by provider='absent': drop it, or end the list with a fallback: 'absent,native'."
    )
    assert value(provider="absent,twos") == 2


def test_use_is_strict_too():
    with relu2ir.use(providers="absent"), pytest.raises(relu2ir.ProviderError, match=r"relu2ir\.use"):
        value()


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ("tows", "unknown provider 'tows' in provider='tows'; did you mean 'twos'?"),
        ("twos,,native", "cannot read provider='twos,,native': 'twos,,native' is not a list of providers"),
        ("relu_squared=twos", "a call takes one list of providers"),
    ],
)
def test_an_unreadable_request_says_what_was_found(asked, text):
    with pytest.raises(relu2ir.ProviderError, match=text):
        value(provider=asked)


@pytest.mark.parametrize(
    ("asked", "error", "text"),
    [
        ("relu_sqared=ones", relu2ir.OpError, "unknown op 'relu_sqared' in {}; did you mean 'relu_squared'?"),
        (
            "relu2ir::relu_square=ones",
            relu2ir.OpError,
            "unknown op 'relu2ir::relu_square' in {}; did you mean 'relu2ir::relu_squared'?",
        ),
        ("relu_squared=tows", relu2ir.ProviderError, "unknown provider 'tows' in {}; did you mean 'twos'?"),
        ("ones,tows", relu2ir.ProviderError, "unknown provider 'tows' in {}; did you mean 'twos'?"),
    ],
)
def test_a_name_that_does_not_exist_is_an_error_when_it_is_asked_for(asked, error, text, monkeypatch):
    with pytest.raises(error) as of_use, relu2ir.use(asked):
        pytest.fail("the name is unknown")
    assert str(of_use.value) == text.format(f"relu2ir.use(providers='{asked}')")
    monkeypatch.setenv("RELU2IR_PROVIDERS", asked)
    with pytest.raises(error) as of_variable:
        relu2ir.refresh()
    assert str(of_variable.value) == text.format(f"RELU2IR_PROVIDERS={asked}")


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: relu2ir.use(["ones"]).__enter__(), "cannot read relu2ir.use(providers=['ones']): found list; "),
        (lambda: relu2ir.use(3).__enter__(), "cannot read relu2ir.use(providers=3): found int; "),
        (lambda: relu2ir.use(platform=["cpu"]).__enter__(), "cannot read relu2ir.use(platform=['cpu']): found list; "),
        (lambda: value(provider=3), "cannot read provider=3: found int; "),
    ],
)
def test_a_request_that_is_no_text_says_what_to_pass(call, text):
    with pytest.raises(TypeError) as error:
        call()
    assert str(error.value) == text + "pass text, such as providers='triton,native'"


@pytest.mark.parametrize("tensors", [(), (X, X)])
def test_an_explanation_is_of_the_tensors_of_a_call(tensors):
    text = f"cannot explain 'relu_squared' for {len(tensors)} tensors; pass those of the call: (Tensor x)"
    with pytest.raises(TypeError) as error:
        relu2ir.explain("relu_squared", *tensors)
    assert str(error.value) == text


def test_an_unknown_platform_lists_the_platforms():
    with pytest.raises(relu2ir.PlatformError) as error, relu2ir.use(platform="mps"):
        pass
    text = "unknown platform 'mps' in relu2ir.use(platform='mps'); valid: 'cuda', 'rocm', 'xpu', 'cpu'"
    assert str(error.value) == text


def test_a_bad_variable_is_an_error_that_names_it(monkeypatch):
    monkeypatch.setenv("RELU2IR_PLATFORM", "gpu")
    with pytest.raises(relu2ir.PlatformError, match="RELU2IR_PLATFORM=gpu"):
        relu2ir.refresh()


def test_an_override_stays_in_its_thread():
    seen = {}
    with relu2ir.use(providers="twos"):
        thread = threading.Thread(target=lambda: seen.update(other=value()))
        thread.start()
        thread.join()
        assert (seen["other"], value()) == (1, 2)


def test_an_override_stays_in_its_async_task():
    async def asked(providers):
        with relu2ir.use(providers=providers):
            await asyncio.sleep(0)
            return value()

    async def both():
        return await asyncio.gather(asked("twos"), asked("native"), asked("ones"))

    assert asyncio.run(both()) == [2, 9, 1]


def test_a_platform_override_moves_no_tensor():
    with relu2ir.use(platform="cuda"):
        explanation = relu2ir.explain("relu_squared", X)
        assert value() == 9
    assert explanation.chosen == "native"
    assert explanation.source == "the row of platform 'cuda' (relu2ir.use(platform='cuda'))"
    assert [type(decision) for decision in explanation.decisions] == [Rejected, Rejected, Accepted]
    assert "pretended" in str(explanation)


@pytest.mark.parametrize(("device", "row"), [("cuda", ("cuda", "triton", "native")), ("xpu", ("native",))])
def test_every_device_is_decided_without_that_device(device, row):
    x = Imagined((8, 4096), torch.bfloat16, torch.device(device))
    explanation = relu2ir.explain("relu_squared", x)
    assert tuple(decision.provider for decision in explanation.decisions) == row
    assert explanation.platform == ("rocm" if device == "cuda" and torch.version.hip else device)


@pytest.mark.parametrize("device", ["meta", "mps", "hpu"])
def test_a_device_without_a_row_runs_native_and_says_so(device):
    explanation = relu2ir.explain("relu_squared", Imagined((4,), torch.float32, torch.device(device)))
    assert (explanation.chosen, explanation.platform) == ("native", device)
    assert explanation.source == "no row for this device"


def test_fake_and_meta_tensors_are_decided_too():
    with FakeTensorMode():
        fake = torch.empty(4)
    assert relu2ir.explain("relu_squared", fake).chosen == "ones"
    assert relu2ir.explain("relu_squared", torch.empty(4, device="meta")).chosen == "native"


def test_a_refused_call_goes_to_the_next_in_the_row(monkeypatch):
    monkeypatch.setitem(registry.PROVIDERS, "ones", constant("ones", 1.0, refuses="it takes no float32"))
    eager.forget()
    assert value() == 9
    assert relu2ir.explain("relu_squared", X).reason == "the row of platform 'cpu'; ones: it takes no float32"


def test_an_explanation_prints_the_whole_decision():
    assert str(relu2ir.explain("relu_squared", X, providers="absent,twos")) == (
        "relu2ir::relu_squared on platform 'cpu', float32 [3] on cpu\n"
        "  by provider='absent,twos'\n"
        "    absent  rejected: it is not here\n"
        "    twos    accepted\n"
        "  runs here: twos\n"
        "  on a machine of platform 'cpu': absent"
    )


def test_a_third_party_provider_that_does_not_import_is_rejected_with_its_reason(monkeypatch):
    class Entry:
        name, value = "broken", "broken_package:PROVIDER"

        def load(self):
            raise ImportError("no module named broken_package")

    monkeypatch.setattr(registry, "entry_points", lambda group: [Entry()])
    registry._third_parties.cache_clear()
    try:
        assert value(provider="broken,twos") == 2
        with pytest.raises(relu2ir.ProviderError, match="'broken_package:PROVIDER' does not load: ImportError"):
            value(provider="broken")
    finally:
        monkeypatch.undo()
        registry._third_parties.cache_clear()


def test_an_unknown_op_suggests_one():
    with pytest.raises(relu2ir.OpError, match=r"unknown op .relu_square.; did you mean .relu_squared.\?"):
        relu2ir.explain("relu_square", X)


def test_operands_that_differ_in_dtype_are_decided_by_themselves():
    text = "namespace: choosing\nops:\n  scaled: {inputs: [a, b], expr: relu(a) * b}\n"
    (spec,) = library.register(specfile.read_text(text))
    refused = constant("ones", 1.0)
    registry.PROVIDERS["ones"] = Provider(
        "ones", refused.missing, lambda spec, t: "dtypes differ" if t[0].dtype != t[1].dtype else None, refused.lower
    )
    assert torch.equal(relu2ir.ops.choosing.scaled(X, X), torch.ones(3))
    promoted = relu2ir.ops.choosing.scaled(X, X.double())
    assert promoted.dtype == torch.float64
    assert torch.equal(promoted, X.relu() * X.double())
    assert len(eager.table(spec)) == 1, "only a choice among equals is kept"


def compiled_targets(x, providers, **kwargs):
    """What a graph of the op on ``x`` calls under a request, and what it gives."""
    graphs = []

    def keep(gm, inputs):
        graphs.append(gm)
        return gm

    def call(x):
        return relu2ir.ops.relu_squared(x, **kwargs)

    with relu2ir.use(providers=providers):
        y = torch.compile(call, backend=keep, fullgraph=True)(x)
    (graph,) = graphs
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"], y.flatten()[-1].item()


@pytest.mark.parametrize(
    ("x", "targets", "last"),
    [
        (X, ["relu2ir_picky.relu_squared.or_native"], 3),
        (torch.tensor([-2, 4]), ["relu2ir.relu_squared.default"], 16),
        (torch.tensor([[5.0]]), ["relu2ir.relu_squared.default"], 25),
    ],
)
def test_a_graph_gets_the_first_provider_of_a_list_that_takes_the_operand(x, targets, last):
    assert compiled_targets(x, "absent,picky,native") == (targets, last)
    assert compiled_targets(x, None, provider="absent,picky,native")[0] == targets


def test_a_strict_request_that_an_operand_refuses_is_told_when_the_graph_is_traced():
    with pytest.raises(Exception, match=r"picky   rejected: no integers, no matrices\nAsked by relu2ir\.use"):
        compiled_targets(torch.tensor([-2, 4]), "picky")


class Subclass(torch.Tensor):
    """Any class of its own."""


def test_a_tensor_subclass_runs_plain_pytorch_where_the_list_allows_it():
    x = X.as_subclass(Subclass)
    with relu2ir.use(providers="picky,native"):
        y = relu2ir.ops.relu_squared(x)
    assert type(y) is Subclass
    assert y.tolist() == [0.0, 0.25, 9.0]
    with (
        relu2ir.use(providers="picky"),
        pytest.raises(relu2ir.ProviderError, match=r"only native can run: .*Subclass is not exactly torch\.Tensor"),
    ):
        relu2ir.ops.relu_squared(x)
