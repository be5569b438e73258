"""The test harness: what a machine must have, seeds, and the backend matrix's table at the end.

A test that needs something names it, ``@pytest.mark.needs("nvcc")``, and skips with the reason where it is missing.
``--require nvcc,cuda`` turns these skips into failures, on the machines that are there to run them. A test marked
``slow`` runs with ``--slow`` only.
"""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis
import pytest
import torch
from matrix_table import TRANSFORM, BackendMatrix, MatrixTable
from requirements import why_missing

from relu2ir import library

# Two threads exercise every parallel loop; more only fight over a small machine's cores.
torch.set_num_threads(2)
hypothesis.settings.register_profile("relu2ir", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("relu2ir")


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "comma-separated tools and providers whose absence fails tests instead of skipping them: cuda,triton,nvcc"
    parser.addoption("--require", default="", help=text)
    parser.addoption("--slow", action="store_true", help="also run the tests that take too long for CI")
    parser.addoption("--matrix-counts", default="", help="also write the backend matrix's outcomes to this file")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs(name): skip with the reason where this tool or provider is missing")
    if not hasattr(config, "workerinput"):  # under xdist the controller has every report
        config.pluginmanager.register(BackendMatrix(config.getoption("--matrix-counts")), "backend-matrix")
        config.pluginmanager.register(MatrixTable(TRANSFORM, "transform matrix", "transform"), "transform-matrix")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


_OWN = {spec.qualname: spec for spec in library.specs()}


@pytest.fixture(scope="module", autouse=True)
def _ops_of_the_module(request: pytest.FixtureRequest) -> Iterator[None]:
    """A module sees the library's own ops and those it loads (``EXTRA_OPS``, at its import), not its neighbours'.

    A graph is searched for every registered op, and the longest match wins: another module's op would win here.
    """
    loaded = {spec.qualname: spec for spec in getattr(request.module, "EXTRA_OPS", [])}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "_specs", _OWN | loaded)
        yield


@pytest.fixture(scope="session")
def required(pytestconfig: pytest.Config) -> frozenset[str]:
    """The names given to ``--require``."""
    return frozenset(name for name in pytestconfig.getoption("--require").split(",") if name)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("slow") and not item.config.getoption("--slow"):
        pytest.skip("slow: run with --slow")
    required = item.config.getoption("--require").split(",")
    for marker in item.iter_markers("needs"):
        for name in marker.args:
            reason = why_missing(name)
            if reason and name in required:
                pytest.fail(f"--require {name}: {reason}", pytrace=False)
            if reason:
                pytest.skip(reason)
