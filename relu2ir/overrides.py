"""What the user asked for: the environment variables, ``use()``, and how a request is written.

Order: per call, then ``use()``, then the environment, then the platform's row. The environment is read at import and by
`read_environment`, never per call. An `Overrides` is a value: dispatch caches on the identity of the active one, so an
override costs a call nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType

from relu2ir.errors import Error, ProviderError, SaveError
from relu2ir.platforms import check_platform

PROVIDERS_VARIABLE = "RELU2IR_PROVIDERS"
PLATFORM_VARIABLE = "RELU2IR_PLATFORM"
EVERY_OP = "*"


@dataclass(frozen=True, eq=False)
class Overrides:
    """``providers`` and ``saves`` map an op's name, or ``*``, to the list asked for; each with the words that asked."""

    providers: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    providers_source: str = ""
    platform: str | None = None
    platform_source: str = ""
    saves: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    saves_source: str = ""

    @property
    def key(self) -> str:
        """Text that is equal for equal overrides, empty for none: compiled code is guarded on it."""
        asked = [f"{op}={','.join(names)}" for op, names in sorted(self.providers.items())]
        asked += [f"save {op}={','.join(names)}" for op, names in sorted(self.saves.items())]
        return ";".join([*asked, *([f"platform={self.platform}"] if self.platform else [])])


def for_op(requests: Mapping[str, tuple[str, ...]], *names: str) -> tuple[str, ...] | None:
    """The list that ``requests`` hold for the op that goes by any of ``names``, or for every op."""
    return next((requests[name] for name in (*names, EVERY_OP) if name in requests), None)


_environment = Overrides()
_context: ContextVar[Overrides | None] = ContextVar("relu2ir.use", default=None)
context_get = _context.get


# Called with the op (or ``*``), the providers and the words of each request, to raise if there are none of these names:
# what exists is known further up.
checks: list[Callable[[str, tuple[str, ...], str], None]] = []
# The same of each request for what to save.
save_checks: list[Callable[[str, tuple[str, ...], str], None]] = []


def active() -> Overrides:
    """The overrides in force here and now: of the innermost ``use()`` of this context, else of the environment."""
    return context_get() or _environment


def __getattr__(name: str) -> str:
    # `active_key` is a computed module attribute because Dynamo guards on what it reads from a module, and evaluates
    # that read again at every call: code compiled under one override is never run under another.
    if name == "active_key":
        return active().key
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def read_environment() -> None:
    """Read RELU2IR_PROVIDERS and RELU2IR_PLATFORM; an empty value is unset. The ops named must be loaded by now."""
    global _environment
    providers, platform = os.environ.get(PROVIDERS_VARIABLE, ""), os.environ.get(PLATFORM_VARIABLE, "")
    asked = f"{PLATFORM_VARIABLE}={platform}"
    _environment = Overrides(
        providers=parse_providers(providers, f"{PROVIDERS_VARIABLE}={providers}"),
        providers_source=f"{PROVIDERS_VARIABLE}={providers}" if providers else "",
        platform=check_platform(platform, asked) if platform else None,
        platform_source=asked if platform else "",
    )


@contextmanager
def use(
    providers: str | Mapping[str, str] | None = None,
    platform: str | None = None,
    save: str | Mapping[str, str] | None = None,
) -> Iterator[Overrides]:
    """Within the ``with``, in this thread or async task only, choose as asked.

    ``providers`` is a list by name in order (``"triton"``, ``"triton,native"``), or one per op
    (``"relu_squared=triton,native;silu_and_mul=cuda"``, also as a mapping). A request is strict: what was asked for
    runs, or ProviderError says why not. ``platform`` chooses by another platform's row; it moves no tensor. ``save``
    says, written like ``providers``, what a recorded call keeps for its backward: ``"input"``, ``"output"`` (strictly),
    or ``"output,input"``. What is not given stays as it was. A name that does not exist is an OpError, ProviderError,
    PlatformError or SaveError at once.
    """
    providers, save = (
        ";".join(f"{op}={names}" for op, names in asked.items()) if isinstance(asked, Mapping) else asked
        for asked in (providers, save)
    )
    for what, value in (("providers", providers), ("platform", platform), ("save", save)):
        if value is not None:
            check_text(value, f"relu2ir.use({what}={value!r})")
    now = _overridden(active(), providers, platform, save)
    token = _context.set(now)
    try:
        yield now
    finally:
        _context.reset(token)


@lru_cache
def _overridden(now: Overrides, providers: str | None, platform: str | None, save: str | None) -> Overrides:
    """``now`` with what ``use()`` was given. Kept, so that entering the same ``use()`` again decides nothing anew."""
    if providers is not None:
        asked = f"relu2ir.use(providers={providers!r})"
        now = replace(now, providers=parse_providers(providers, asked), providers_source=asked)
    if platform is not None:
        asked = f"relu2ir.use(platform={platform!r})"
        now = replace(now, platform=check_platform(platform, asked), platform_source=asked)
    if save is not None:
        asked = f"relu2ir.use(save={save!r})"
        now = replace(now, saves=parse_saves(save, asked), saves_source=asked)
    return now


@dataclass(frozen=True)
class _Kind:
    """What a request lists, for the messages."""

    what: str
    example: str
    error: type[Error]


_PROVIDERS = _Kind("providers", "'triton,native' or 'relu_squared=triton;silu_and_mul=cuda,native'", ProviderError)
_SAVES = _Kind("what to save", "'output' or 'relu_squared=output,input;softplus=input'", SaveError)


def parse_providers(text: str, asked: str) -> Mapping[str, tuple[str, ...]]:
    """``triton,native`` or ``relu_squared=triton,native;silu_and_mul=cuda`` as a mapping; ProviderError if unreadable.

    A name that does not exist is an error of the `checks`.
    """
    return _parsed(text, asked, _PROVIDERS, checks)


def parse_saves(text: str, asked: str) -> Mapping[str, tuple[str, ...]]:
    """``output,input`` or ``relu_squared=output`` as a mapping; SaveError if unreadable."""
    return _parsed(text, asked, _SAVES, save_checks)


def _parsed(
    text: str, asked: str, kind: _Kind, checks: Iterable[Callable[[str, tuple[str, ...], str], None]]
) -> Mapping[str, tuple[str, ...]]:
    check_text(text, asked)
    requests: dict[str, tuple[str, ...]] = {}
    for request in filter(None, (part.strip() for part in text.split(";"))):
        op, equals, listed = request.rpartition("=")
        op, names = op.strip() if equals else EVERY_OP, tuple(name.strip() for name in listed.split(","))
        if not op or not all(names) or op in requests:
            raise kind.error(
                f"cannot read {asked}: '{request}' is not a list of {kind.what} such as {kind.example} (each op once)"
            )
        for check in checks:
            check(op, names, asked)
        requests[op] = names
    return MappingProxyType(requests)


def check_text(value: object, asked: str) -> None:
    """TypeError for a request that is not text."""
    if not isinstance(value, str):
        kind = type(value).__name__
        raise TypeError(f"cannot read {asked}: found {kind}; pass text, such as providers='triton,native'")
