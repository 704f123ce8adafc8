"""What the core tells of its steps, and that it tells nothing while nobody is traced."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from engine_service.config import CacheConfig, CoreConfig, ModelConfig, SchedulerConfig
from engine_service.engine_core import EngineCore
from engine_service.grammar_bitmask import GrammarBitmask
from engine_service.mailbox import Mailbox
from engine_service.messages import (
    MAX_STEP_SHARES,
    AddRequest,
    Failure,
    Frame,
    RequestTiming,
    SamplingParams,
    StepFrame,
    StepRecord,
    StoppingCriteria,
    StructuredOutput,
)
from engine_service.request import Request, RequestKey
from engine_service.scheduler_output import (
    ModelRunnerOutput,
    SchedulerOutput,
    StepDone,
    StepUnderWay,
)
from tests.core_fakes import FakeGrammars


class Grammars(FakeGrammars):
    """No request here has one."""

    def submit(self, key: RequestKey, spec: StructuredOutput) -> bool:
        raise AssertionError("no request here has a grammar")

    def poll(self) -> list[tuple[RequestKey, Failure | None]]:
        return []

    def take_compile_times_ns(self) -> list[int]:
        return []

    def fill_bitmask(self, sampling: Sequence[Request]) -> GrammarBitmask | None:
        return None

    def prepare(self) -> None:
        pass

    def close(self) -> None:
        pass


class Bench:
    """A core that is its own channel and runner."""

    num_blocks = 512
    overlaps = False

    def __init__(self, max_num_seqs: int = 128) -> None:
        self.mailbox = Mailbox()
        self.frames: list[StepFrame] = []
        self.num_added = 0
        self.during: Callable[[], None] = lambda: None
        config = CoreConfig(
            model=ModelConfig("nowhere", "scripted"),
            cache=CacheConfig(block_size=4),
            scheduler=SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=128),
            check_integrity=True,
        )
        self.core = EngineCore(config, self, self, Grammars())

    def send(self, frame: Frame) -> None:
        assert isinstance(frame, StepFrame)
        self.frames.append(frame)

    def launch(
        self, scheduler_output: SchedulerOutput, token_bitmask: GrammarBitmask | None
    ) -> StepUnderWay:
        self.during()
        keys = [item.request.key for item in scheduler_output.scheduled if item.samples]
        return StepDone(ModelRunnerOutput(dict.fromkeys(keys, 5)))

    def add(
        self, request_id: str, prompt: int, *, is_traced: bool = False, tells_timing: bool = False
    ) -> None:
        self.num_added += 1
        command = AddRequest(
            request_id,
            [self.num_added * 1_000 + position for position in range(prompt)],  # no two alike
            SamplingParams(),
            StoppingCriteria(max_tokens=4),
            arrival_ns=time.monotonic_ns(),
            is_traced=is_traced,
            tells_timing=tells_timing,
        )
        self.mailbox.put([command])

    def run(self) -> None:
        while self.core.step():
            pass

    @property
    def records(self) -> list[StepRecord]:
        return [record for frame in self.frames for record in frame.records]


def test_nothing_is_told_while_nobody_is_traced() -> None:
    bench = Bench()
    bench.add("a", 300)
    bench.add("b", 10, tells_timing=True)
    bench.run()
    assert bench.records == []


def test_the_steps_of_a_prompt_are_told_with_all_that_is_in_them() -> None:
    bench = Bench()
    bench.add("other", 100)
    bench.add("mine", 200, is_traced=True)
    bench.run()
    assert [record.step_id for record in bench.records] == [1, 2, 3]
    for record in bench.records:
        assert sum(share.num_tokens for share in record.shares) == record.num_tokens
        assert record.num_tokens <= record.token_budget == 128
        prefill = sum(share.num_tokens for share in record.shares if share.is_prefill)
        assert prefill == record.num_prefill_tokens
        stamps = (
            record.drained_ns,
            record.scheduled_ns,
            record.start_ns,
            record.mask_ns,
            record.batch_ns,
            record.forward_ns,
            record.end_ns,
            record.updated_ns,
        )
        assert list(stamps) == sorted(stamps)
    mine = [s.num_tokens for r in bench.records for s in r.shares if s.request_id == "mine"]
    assert sum(mine) == 200


def test_a_step_that_ran_when_a_request_came_is_told_after_it() -> None:
    bench = Bench()
    bench.add("other", 100)
    came: list[str] = []

    def come() -> None:
        if not came:
            came.append("mine")
            bench.add("mine", 10, is_traced=True)

    bench.during = come
    bench.run()
    assert [record.step_id for record in bench.records] == [1, 2]
    assert [share.request_id for share in bench.records[0].shares] == ["other"]
    assert {share.request_id for share in bench.records[1].shares} == {"other", "mine"}


def test_who_waits_for_a_step_is_told() -> None:
    bench = Bench(max_num_seqs=1)
    bench.add("other", 10)
    bench.add("mine", 10, is_traced=True)
    bench.run()
    waiting = [record for record in bench.records if record.waiting]
    assert len(waiting) == 4  # as many steps as the other has
    assert all(record.waiting == [("mine", 0)] for record in waiting)
    assert all(record.num_waiting == 1 for record in waiting)


def test_a_step_of_many_is_told_in_bounded_size_the_largest_shares_first() -> None:
    bench = Bench()
    for number in range(100):
        bench.add(f"stream-{number}", 1)
    bench.run()
    bench.frames.clear()
    for number in range(100):
        bench.add(f"again-{number}", 1)
    bench.add("mine", 20, is_traced=True)
    bench.run()
    record = bench.records[0]
    assert record.num_requests == 101 and len(record.shares) == MAX_STEP_SHARES
    assert record.shares[0].request_id == "mine"


def test_timing_comes_with_the_first_token_where_it_is_asked_for() -> None:
    bench = Bench()
    bench.add("mine", 200, tells_timing=True)
    bench.add("other", 5)
    bench.run()
    told: list[tuple[str, RequestTiming]] = [
        (output.request_id, output.timing)
        for frame in bench.frames
        for output in frame.outputs
        if output.timing is not None
    ]
    ((request_id, timing),) = told
    assert request_id == "mine"
    assert timing.first_token_ns and not timing.finished_ns
    assert len(timing.prefill_chunks) == 2
    assert timing.waits[0].start_ns == timing.taken_ns
