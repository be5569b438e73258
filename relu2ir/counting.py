"""Counting the kernels that run: what served a call is seen at the provider, not read off a report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from relu2ir import eager, registry
from relu2ir.registry import Provider
from relu2ir.spec import OpSpec


@contextmanager
def kernel_calls() -> Iterator[Counter[str]]:
    """Within the ``with``, count each provider's kernel calls in eager execution, by the provider's name.

    Forward and gradient kernels count alike; plain PyTorch (native) counts once per op.
    """
    calls: Counter[str] = Counter()

    def counted(provider: Provider) -> Provider:
        def lower(spec: OpSpec) -> Callable[..., Any]:
            kernel = provider.lower(spec)

            def call(*args: Any) -> Any:
                calls[provider.name] += 1
                return kernel(*args)

            return call

        return replace(provider, lower=lower)

    originals = dict(registry.PROVIDERS)
    registry.PROVIDERS.update({name: counted(provider) for name, provider in originals.items()})
    eager.forget()
    try:
        yield calls
    finally:
        registry.PROVIDERS.update(originals)
        eager.forget()
