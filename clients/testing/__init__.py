"""A scripted engine for tests: real sockets, the real protocol, no model.

async with FakeEngine(model_dir) as fake:
    fake.script(Script.of_tokens((504, 28, 2), delay_seconds=0.05))
    async with EngineClient(fake.target) as client:
        ...
"""

from __future__ import annotations

from clients.testing.fake_call import FakeCall, Outcome
from clients.testing.fake_engine import FakeAbort, FakeEngine, ScriptChooser
from clients.testing.script import (
    Accept,
    Emit,
    Fail,
    Finish,
    Hang,
    Pause,
    Progress,
    Script,
    Step,
    WaitFor,
)

__all__ = [
    "Accept",
    "Emit",
    "Fail",
    "FakeAbort",
    "FakeCall",
    "FakeEngine",
    "Finish",
    "Hang",
    "Outcome",
    "Pause",
    "Progress",
    "Script",
    "ScriptChooser",
    "Step",
    "WaitFor",
]
