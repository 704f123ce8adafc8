"""The public surface: what is exported, what an import costs, the synchronous twin, secrets."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import clients
import clients.testing
from clients import (
    ClientOptions,
    EngineClient,
    GenerateStream,
    SyncEngineClient,
    SyncGenerateStream,
    TlsOptions,
)


@pytest.mark.parametrize("module", [clients, clients.testing])
def test_what_is_exported_exists(module: object) -> None:
    names = inspect.getattr_static(module, "__all__")
    assert sorted(set(names)) == sorted(names)
    for name in names:
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        getattr(module, "no_such_name")  # noqa: B009 - mypy knows that it is not there


def test_a_star_imports_all_of_it() -> None:
    code = "from clients import *; EngineClient, Usage"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_import_is_cheap_and_loads_no_sdk() -> None:
    """In a process of its own, by its CPU time, for the machine may be busy; the best of three."""
    code = (
        "import time; start = time.process_time(); from clients import EngineClient;"
        "print(time.process_time() - start);"
        "import sys; print(*[m for m in sys.modules if m.split('.')[0] in "
        "('torch', 'transformers', 'xgrammar', 'aiohttp', 'numpy', 'tokenizers', 'msgspec')"
        " or m.startswith('opentelemetry.sdk')])"
    )
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        for _ in range(3)
    ]
    answers = [run.stdout.split("\n") for run in runs]
    assert [loaded for _, loaded, _ in answers] == [""] * 3
    assert min(float(seconds) for seconds, _, _ in answers) < 0.4  # 0.1 to 0.25, by the hour


def _public(owner: type) -> dict[str, object]:
    return {name: member for name, member in vars(owner).items() if not name.startswith("_")}


def _parameters(member: object) -> list[tuple[str, object, object, object]]:
    assert callable(member)
    signature = inspect.signature(member)
    return [
        (parameter.name, parameter.kind, parameter.default, parameter.annotation)
        for parameter in signature.parameters.values()
    ]


@pytest.mark.parametrize(
    ("asynchronous", "synchronous"),
    [(EngineClient, SyncEngineClient), (GenerateStream, SyncGenerateStream)],
)
def test_the_twins_have_one_surface(asynchronous: type, synchronous: type) -> None:
    theirs = {
        ("close" if name == "aclose" else name): m for name, m in _public(asynchronous).items()
    }
    ours = _public(synchronous)
    assert theirs.keys() == ours.keys()
    for name, member in theirs.items():
        if isinstance(member, property):
            assert isinstance(ours[name], property)
        else:
            assert _parameters(ours[name]) == _parameters(member), name


def test_twins_are_constructed_alike() -> None:
    assert _parameters(SyncEngineClient.__init__) == _parameters(EngineClient.__init__)


def test_secrets_stay_out_of_reprs() -> None:
    options = ClientOptions(
        token="hunter2", tls=TlsOptions(certificate_chain=b"cert", private_key=b"hunter3")
    )
    assert "hunter" not in repr(options)
    assert "hunter" not in repr(ClientOptions(token=lambda: "hunter4"))
    with pytest.raises(ValueError, match="both"):
        TlsOptions(private_key=b"key")


def test_a_client_needs_no_loop_and_no_engine_to_exist() -> None:
    EngineClient("127.0.0.1:1")
    SyncEngineClient("127.0.0.1:1").close()
