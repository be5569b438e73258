"""``relu2ir demo`` and ``relu2ir fuse``: a model before and after, every result compared before anything is timed.

What served a site is counted by the kernels that ran, not by the rows of a report.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

import relu2ir
from relu2ir import registry
from relu2ir.counting import kernel_calls
from relu2ir.errors import FuseError

PRETENDED = ("cuda", "rocm", "xpu")
ROUNDS = 25


def demo() -> int:
    """A small NemotronForCausalLM, fused and compared; 0 when everything agrees."""
    try:
        from transformers import NemotronConfig, NemotronForCausalLM
    except ImportError:
        print('The demo needs the transformers library. Install it with: pip install "relu2ir[demo]"', file=sys.stderr)
        return 2
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    _step("building a NemotronForCausalLM of 4 layers with random weights")
    config = NemotronConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = NemotronForCausalLM(config).eval().to(device)
    tokens = torch.randint(3, config.vocab_size, (2, 64), device=device)
    _show_graphs(model.model.layers[0].mlp, torch.randn(2, 64, config.hidden_size, device=device))
    runs: list[str | None] = [None] if device == "cuda" else [None, "cpp,native"]
    failures = [failure for asked in runs for failure in _compare(model, {"input_ids": tokens}, asked, generate=True)]
    return _verdict(failures)


def fuse_factory(where: str) -> int:
    """The same for ``package.module:function``, which returns a model and its example inputs (a tuple or a dict)."""
    module_name, colon, name = where.partition(":")
    sys.path.insert(0, "")
    try:
        factory = getattr(importlib.import_module(module_name), name) if colon else None
    except (ImportError, AttributeError) as error:
        raise FuseError(
            f"cannot find '{where}': {error}. Pass package.module:function, importable from here."
        ) from None
    made = factory() if callable(factory) else None
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], torch.nn.Module)):
        raise FuseError(
            f"'{where}' must be a function that returns (an nn.Module, its example inputs); found {made!r:.80}"
        )
    model, inputs = made
    if not isinstance(inputs, Mapping | tuple | list):
        inputs = (inputs,)
    return _verdict(_compare(model, inputs, None))


def _show_graphs(mlp: torch.nn.Module, x: torch.Tensor) -> None:
    captured = torch.fx.symbolic_trace(mlp)
    _title("one MLP as captured")
    print(captured.code.strip())
    fused = relu2ir.fuse(captured).module
    _title("the same, fused")
    print(fused.code.strip())
    _title("lowered for this machine")
    print(relu2ir.lower(fused, x).code.strip())
    for platform in PRETENDED:
        _title(f"lowered as on a machine of platform '{platform}' (decided here, not run)")
        print(relu2ir.lower(fused, x, platform=platform, there=True).code.strip())


def _compare(model: torch.nn.Module, inputs: Any, providers: str | None, generate: bool = False) -> list[str]:
    """Fuse ``model``, print the report, compare and time; return what is wrong."""
    _title("the model, fused" + (f", with relu2ir.use(providers='{providers}')" if providers else ""))
    with relu2ir.use(providers=providers), torch.no_grad():
        _step("fusing")
        result = relu2ir.fuse(model)
        print(result)
        _step("running the original and the fused model")
        before = _run(model, inputs)
        with kernel_calls() as calls:
            after = _run(result.module, inputs)
        failures = _differences(before, after, exact=all(site.exact for site in result.sites))
        print(f"outputs: {'different' if failures else 'equal'}; kernel calls: {dict(calls) or 'none'}")
        if not result.sites:
            failures.append("no site was fused")
        built = registry.PROVIDERS["cpp"].missing() is None
        if providers and built and not calls["cpp"]:
            failures.append("the provider 'cpp' is built, was asked for and served no site")
        if generate:
            _step("generating 16 tokens with each")
            same = torch.equal(
                *(m.generate(**inputs, max_new_tokens=16, do_sample=False) for m in (model, result.module))
            )
            print(f"generate(): {'equal' if same else 'different'}")
            failures += [] if same else ["generate() gives other tokens"]
        _step(f"timing, {ROUNDS} interleaved rounds")
        original, fused = _times(lambda: _run(model, inputs), lambda: _run(result.module, inputs))
        print(f"forward: original {original * 1e3:.2f} ms, fused {fused * 1e3:.2f} ms, ratio {fused / original:.3f}")
    return failures


def _run(model: torch.nn.Module, inputs: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)  # so that dropout, if any, drops the same
    output = model(**inputs) if isinstance(inputs, Mapping) else model(*inputs)
    values = output.to_tuple() if hasattr(output, "to_tuple") else output
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _differences(before: list[torch.Tensor], after: list[torch.Tensor], exact: bool) -> list[str]:
    """Exact ops must give the same bits; others may differ by the rounding of a half type."""
    if len(before) != len(after):
        return [f"the fused model returns {len(after)} tensors, the original {len(before)}"]
    failures = []
    for index, (old, new) in enumerate(zip(before, after, strict=True)):
        same = torch.equal(old.isnan(), new.isnan()) and torch.equal(old.nan_to_num(), new.nan_to_num())
        if not same and (exact or not torch.allclose(old, new, rtol=1e-2, atol=1e-2, equal_nan=True)):
            worst = (old.double() - new.double()).abs().max()
            failures.append(f"output {index} differs by up to {worst:.3g}")
    return failures


def _times(*calls: Callable[[], Any]) -> list[float]:
    """Median seconds of each call over interleaved rounds."""
    rounds: list[list[float]] = [[] for _ in calls]
    for _ in range(ROUNDS):
        for call, seconds in zip(calls, rounds, strict=True):
            start = time.perf_counter()
            call()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
    return [median(seconds) for seconds in rounds]


def _verdict(failures: list[str]) -> int:
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    print("failed" if failures else "all equal")
    return 1 if failures else 0


def _title(text: str) -> None:
    print(f"\n== {text} ==", flush=True)


def _step(text: str) -> None:
    print(f".. {text}", file=sys.stderr, flush=True)
