"""Which provider runs a call, and why: providers as values, one decision per candidate, the reasons kept.

A choice is made once per (op, device, dtype) and active overrides; `eager.py` keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from itertools import takewhile
from typing import TYPE_CHECKING, Any, TypeAlias

from relu2ir.errors import ProviderError, listed, suggestion
from relu2ir.overrides import active, for_op, parse_providers
from relu2ir.platforms import DEVICE_TYPE, check_platform, platform_of
from relu2ir.spec import OpSpec

if TYPE_CHECKING:
    import torch

    TensorLike: TypeAlias = "torch.Tensor | Imagined"


@dataclass(frozen=True)
class Provider:
    """A way to run specs.

    ``missing()`` says why it cannot run on this machine at all, ``refuses(spec, tensors)`` why it cannot run this call
    (tensors may be fake or `Imagined`: only their device, dtype and shape are asked); None means it can.
    ``lower(spec)`` gives the kernel: a callable of the op's tensors in order and then its params as floats, which
    returns one tensor per output (a tuple when there are several) and records no gradient, unless ``plain`` says that
    it is made of differentiable PyTorch calls. ``source(spec)`` is the text that it generates, for ``relu2ir show``.
    """

    name: str
    missing: Callable[[], str | None]
    refuses: Callable[[OpSpec, Sequence[TensorLike]], str | None]
    lower: Callable[[OpSpec], Callable[..., Any]]
    source: Callable[[OpSpec], str] = lambda spec: f"# this provider shows no text for {spec.qualname}"
    plain: bool = False


@dataclass(frozen=True)
class Imagined:
    """A tensor on a device that need not exist: what a decision asks of one. (torch's fake tensors need the device.)"""

    shape: Sequence[int]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class Accepted:
    provider: str

    def __str__(self) -> str:
        return f"{self.provider:<8}accepted"


@dataclass(frozen=True)
class Rejected:
    """``here`` is True when the reason is this machine, not the call."""

    provider: str
    reason: str
    here: bool = False

    def __str__(self) -> str:
        return f"{self.provider:<8}rejected: {self.reason}"


Decision = Accepted | Rejected


@dataclass(frozen=True)
class Explanation:
    """Why a call runs where it runs. ``chosen`` is None only for a strict request that nothing here can serve.

    ``source`` names what decided: the platform's row, or the override with its value. ``there`` is what would be chosen
    on a machine of ``platform``, whatever is missing on this one.
    """

    op: str
    call: str
    platform: str
    source: str
    decisions: tuple[Decision, ...]
    there: str | None
    pretended: bool = False

    @property
    def chosen(self) -> str | None:
        return next((d.provider for d in self.decisions if isinstance(d, Accepted)), None)

    @property
    def reason(self) -> str:
        """One line: the source, and why each candidate before the chosen one was passed over."""
        passed = takewhile(lambda decision: isinstance(decision, Rejected), self.decisions)
        return "; ".join([self.source, *(f"{d.provider}: {d.reason}" for d in passed if isinstance(d, Rejected))])

    def __str__(self) -> str:
        pretended = " (pretended: no tensor is moved)" if self.pretended else ""
        lines = [f"{self.op} on platform '{self.platform}'{pretended}, {self.call}", f"  by {self.source}"]
        lines += [f"    {decision}" for decision in self.decisions]
        lines += [f"  runs here: {self.chosen or 'nothing'}"]
        if self.there != self.chosen:
            lines += [f"  on a machine of platform '{self.platform}': {self.there}"]
        return "\n".join(lines)


PROVIDERS: dict[str, Provider] = {}
ROWS: dict[str, tuple[str, ...]] = {}


def provider(name: str, asked: str) -> Provider:
    """The provider of that name, built in or of an entry point; ProviderError that shows how it was ``asked``."""
    if name in PROVIDERS:
        return PROVIDERS[name]
    if name in providers():
        return providers()[name]
    raise ProviderError(f"unknown provider '{name}' in {asked}{suggestion(name, providers())}")


def providers() -> Mapping[str, Provider]:
    """Every provider by its name: those built in, then those of entry points, which replace none."""
    return PROVIDERS | {name: value for name, value in _third_parties().items() if name not in PROVIDERS}


@cache
def _third_parties() -> Mapping[str, Provider]:
    """Providers of the entry-point group ``relu2ir.providers``; one that fails to import is missing with its reason."""
    return {entry.name: _loaded(entry) for entry in entry_points(group="relu2ir.providers")}


def _loaded(entry: Any) -> Provider:
    try:
        value = entry.load()
        if not isinstance(value, Provider):
            raise TypeError(f"{entry.value} is a {type(value).__name__}, not a relu2ir.registry.Provider")
        return value
    except Exception as error:
        reason = f"its entry point '{entry.value}' does not load: {type(error).__name__}: {error}"

    def lower(spec: OpSpec) -> Callable[..., Any]:
        raise ProviderError(f"provider '{entry.name}' cannot run: {reason}")

    return Provider(entry.name, missing=lambda: reason, refuses=lambda spec, tensors: None, lower=lower)


def row(platform: str) -> tuple[str, ...]:
    """The providers of a platform in order; one without a row (mps, hpu, ...) runs plain PyTorch."""
    return ROWS.get(platform, ("native",))


def requested(spec: OpSpec, providers: str | None = None) -> tuple[tuple[str, ...] | None, str]:
    """The list of providers that was asked for by name, with the words that asked; (None, "") when none was.

    A request for an op covers its gradient op.
    """
    if providers is not None:
        asked = f"provider={providers!r}"
        names = parse_providers(providers, asked)
        if set(names) != {"*"}:
            raise ProviderError(f"cannot read {asked}: a call takes one list of providers, such as 'triton,native'")
        return names["*"], asked
    overrides, forward = active(), spec.forward or spec
    names_of_op = (spec.qualname, spec.name, forward.qualname, forward.name)
    names_asked = for_op(overrides.providers, *names_of_op)
    return names_asked, overrides.providers_source if names_asked else ""


def explain(
    spec: OpSpec, *tensors: TensorLike, providers: str | None = None, platform: str | None = None
) -> Explanation:
    """Decide for one call, launch nothing. Tensors may be fake, on the meta device, or `Imagined`."""
    import torch

    actual = platform_of(tensors[0].device)
    overrides = active()
    if platform is not None:
        chosen_platform, why = check_platform(platform, f"platform={platform!r}"), f"platform={platform!r}"
    elif overrides.platform is not None:
        chosen_platform, why = overrides.platform, overrides.platform_source
    else:
        chosen_platform, why = actual, ""
    names, source = requested(spec, providers)
    if names is None:
        names = row(chosen_platform)
        what = f"the row of platform '{chosen_platform}'" if chosen_platform in ROWS else "no row for this device"
        source = f"{what} ({why})" if why else what
    candidates = [provider(name, source) for name in names]
    decisions = tuple(_decide(candidate, spec, tensors) for candidate in candidates)
    pretended = chosen_platform != actual
    device = torch.device(DEVICE_TYPE[chosen_platform]) if pretended else tensors[0].device
    there = [Imagined(t.shape, t.dtype, device) for t in tensors]
    return Explanation(
        op=spec.qualname,
        call=describe(tensors),
        platform=chosen_platform,
        source=source,
        decisions=decisions,
        there=next((c.name for c in candidates if c.refuses(spec, there) is None), None),
        pretended=pretended,
    )


def choose(spec: OpSpec, *tensors: torch.Tensor, providers: str | None = None) -> Provider:
    """The provider that runs this call; ProviderError with every candidate's reason when a request cannot be met."""
    explanation = explain(spec, *tensors, providers=providers)
    if explanation.chosen is None:
        raise ProviderError(refusal(explanation))
    return provider(explanation.chosen, explanation.source)


def refusal(explanation: Explanation, extra: str = "") -> str:
    """The message for a strict request that cannot be met: what was asked, each candidate's reason, the way out."""
    asked = [decision.provider for decision in explanation.decisions]
    lines = [
        f"{explanation.op} cannot run with {listed(asked)} on platform '{explanation.platform}' ({explanation.call})",
        *(f"  {decision}" for decision in explanation.decisions),
        *([f"  {extra}"] if extra else []),
        f"Asked by {explanation.source}: drop it, or end the list with a fallback: '{','.join([*asked, 'native'])}'.",
    ]
    return "\n".join(lines)


def describe(tensors: Sequence[TensorLike]) -> str:
    """``bfloat16 [8, 4096] on cuda:0``, for messages."""
    return ", ".join(f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)} on {t.device}" for t in tensors)


def _decide(candidate: Provider, spec: OpSpec, tensors: Sequence[TensorLike]) -> Decision:
    reason = candidate.refuses(spec, tensors)
    if reason is not None:
        return Rejected(candidate.name, reason)
    missing = candidate.missing()
    return Accepted(candidate.name) if missing is None else Rejected(candidate.name, missing, here=True)
