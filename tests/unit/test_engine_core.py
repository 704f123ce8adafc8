"""The step loop with a scripted model: what ends, what goes on, what is emitted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import pytest
import torch

from engine_service import engine_core
from engine_service.config import CacheConfig, CoreConfig, ModelConfig, SchedulerConfig
from engine_service.engine_core import MAX_FAILED_STEPS, CoreBroken, EngineCore
from engine_service.grammar_bitmask import GrammarBitmask
from engine_service.mailbox import Mailbox
from engine_service.messages import (
    AbortRequest,
    AddRequest,
    Command,
    Failure,
    FinishReason,
    FlushPrefixCache,
    Frame,
    PrefixCacheFlushed,
    RequestOutput,
    SamplingParams,
    Shutdown,
    StepFrame,
    StoppingCriteria,
    StructuredOutput,
)
from engine_service.request import Request, RequestKey
from engine_service.scheduler_output import (
    ModelRunnerOutput,
    SchedulerOutput,
    StepUnderWay,
)

CONFIG = CoreConfig(
    model=ModelConfig("nowhere", "scripted"),
    cache=CacheConfig(block_size=4),
    scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=16),
    check_integrity=True,
)
JSON = StructuredOutput("json_object")


class Channel:
    def __init__(self) -> None:
        self.mailbox = Mailbox()
        self.frames: list[StepFrame] = []
        self.flushes: list[PrefixCacheFlushed] = []

    def send(self, frame: Frame) -> None:
        if isinstance(frame, PrefixCacheFlushed):
            self.flushes.append(frame)
            return
        assert isinstance(frame, StepFrame)
        self.frames.append(frame)

    def outputs(self) -> list[RequestOutput]:
        return [output for frame in self.frames for output in frame.outputs]


class ScriptedRunner:
    """Every token is 5; `at_launch` and `at_wait` run then, and may raise."""

    num_blocks = 64

    def __init__(self, *, overlaps: bool = False) -> None:
        self.overlaps = overlaps
        self.at_launch: Callable[[SchedulerOutput], None] = lambda _: None
        self.at_wait: Callable[[SchedulerOutput], None] = lambda _: None
        self.failures: dict[RequestKey, Failure] = {}
        self.calls: list[tuple[str, int]] = []  # launch or wait, and the step's id

    def launch(self, plan: SchedulerOutput, token_bitmask: GrammarBitmask | None) -> StepUnderWay:
        self.calls.append(("launch", plan.step_id))
        self.at_launch(plan)
        return ScriptedStep(self, plan)


@dataclass
class ScriptedStep:
    runner: ScriptedRunner
    plan: SchedulerOutput

    def wait(self) -> ModelRunnerOutput:
        self.runner.calls.append(("wait", self.plan.step_id))
        self.runner.at_wait(self.plan)
        keys = [item.request.key for item in self.plan.scheduled if item.samples]
        return ModelRunnerOutput(dict.fromkeys(keys, 5), failures=self.runner.failures)


class ScriptedGrammars:
    def __init__(self) -> None:
        self.compiling: list[RequestKey] = []
        self.compiled: list[tuple[RequestKey, Failure | None]] = []
        self.released: list[RequestKey] = []
        self.has_cached = False

    def submit(self, key: RequestKey, spec: StructuredOutput) -> bool:
        self.compiling.append(key)
        return self.has_cached

    def poll(self) -> list[tuple[RequestKey, Failure | None]]:
        compiled, self.compiled = self.compiled, []
        return compiled

    def take_compile_times_ns(self) -> list[int]:
        return []

    def fill_bitmask(self, sampling: Sequence[Request]) -> GrammarBitmask | None:
        return None

    def prepare(self) -> None:
        pass

    def close(self) -> None:
        pass

    def accept(self, key: RequestKey, token_id: int) -> None:
        pass

    def take_forced_token(self, key: RequestKey) -> int | None:
        return None

    def is_terminated(self, key: RequestKey) -> bool:
        return False

    def release(self, key: RequestKey) -> None:
        self.released.append(key)


class Bench:
    def __init__(self, config: CoreConfig = CONFIG, *, overlaps: bool = False) -> None:
        self.channel = Channel()
        self.runner = ScriptedRunner(overlaps=overlaps)
        self.grammars = ScriptedGrammars()
        self.core = EngineCore(config, self.channel, self.runner, self.grammars)

    def post(self, *commands: Command) -> None:
        self.channel.mailbox.put(commands)

    def steps(self, limit: int = 100) -> int:
        """Steps until there is nothing to compute."""
        for count in range(limit):
            if not self.core.step():
                return count
        raise AssertionError("the core does not come to rest")

    def wait_until(self, holds: Callable[[], bool]) -> None:
        """For a core that runs in a thread."""
        deadline = time.monotonic() + 10
        while not holds():
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def wait_for_end(self, request_id: str) -> None:
        self.wait_until(lambda: bool(self.ends(request_id)))

    def tokens(self, request_id: str, index: int = 0) -> list[int]:
        return [
            token
            for output in self.channel.outputs()
            if (output.request_id, output.index) == (request_id, index)
            for token in output.new_token_ids
        ]

    def ends(self, request_id: str) -> list[FinishReason]:
        return [
            output.finish.reason
            for output in self.channel.outputs()
            if output.request_id == request_id and output.finish is not None
        ]

    def assert_idle(self) -> None:
        stats = self.channel.frames[-1].stats
        assert (stats.num_running, stats.num_waiting, stats.used_blocks) == (0, 0, 0)
        assert stats.free_blocks + stats.cached_blocks == stats.total_blocks == 64


@pytest.fixture(params=[False, True], ids=["in turn", "overlapped"])
def bench(request: pytest.FixtureRequest) -> Bench:
    return Bench(overlaps=request.param)


@pytest.fixture
def rare_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """So rare that an idle core that moves was woken."""
    monkeypatch.setattr(engine_core, "HEARTBEAT_SECONDS", 60.0)


@pytest.fixture
def in_turn() -> Bench:
    return Bench()


@pytest.fixture
def overlapped() -> Bench:
    return Bench(overlaps=True)


def add(
    request_id: str,
    *,
    prompt: int = 5,
    max_tokens: int = 3,
    n: int = 1,
    structured_output: StructuredOutput | None = None,
    deadline_ns: int = 0,
) -> AddRequest:
    return AddRequest(
        request_id=request_id,
        prompt_token_ids=list(range(prompt)),
        sampling=SamplingParams(),
        stopping=StoppingCriteria(max_tokens=max_tokens),
        structured_output=structured_output,
        n=n,
        arrival_ns=time.monotonic_ns(),
        deadline_ns=deadline_ns,
    )


def test_samples_share_the_prompt_that_the_first_computes_and_one_frame_a_step(
    in_turn: Bench,
) -> None:
    in_turn.post(add("a", n=3), add("b", prompt=3, max_tokens=1))
    assert in_turn.steps() == 4
    assert [len(in_turn.tokens("a", i)) for i in (0, 1, 2)] == [3, 3, 3]
    assert in_turn.ends("a") == [FinishReason.LENGTH] * 3
    assert [frame.num_scheduled_tokens for frame in in_turn.channel.frames] == [5 + 3, 3, 3, 2]
    in_turn.assert_idle()


def test_samples_share_the_lists_of_tokens(bench: Bench) -> None:
    seen: set[int] = set()

    def during(scheduler_output: SchedulerOutput) -> None:
        seen.update(id(item.request.token_lists) for item in scheduler_output.scheduled)

    bench.runner.at_launch = during
    bench.post(add("a", n=3))
    bench.steps()
    assert len(seen) == 1


def test_after_a_flush_nobody_waits_for_the_prefix_of_another() -> None:
    scheduler = SchedulerConfig(max_num_batched_tokens=16, long_prefill_token_threshold=8)
    bench = Bench(msgspec.structs.replace(CONFIG, scheduler=scheduler))
    bench.post(add("r", prompt=40), add("s", prompt=40))
    bench.core.step()
    assert bench.channel.frames[-1].stats.num_running == 1  # the other one waits for its prefix
    bench.post(FlushPrefixCache())
    bench.core.step()  # 8 tokens of each
    assert [flush.num_blocks for flush in bench.channel.flushes] == [2]
    assert bench.channel.frames[-1].stats.num_running == 2
    bench.steps()
    assert bench.tokens("r") == bench.tokens("s") == [5, 5, 5]
    bench.assert_idle()


def test_an_abort_in_the_mailbox_wins_over_its_request(bench: Bench) -> None:
    bench.post(add("a", n=3), AbortRequest("a"))
    assert bench.steps() == 0
    assert bench.ends("a") == [FinishReason.ABORT] * 3
    assert bench.tokens("a") == []
    bench.assert_idle()


def test_an_abort_while_the_model_runs_emits_no_more_tokens(in_turn: Bench) -> None:
    def abort(step: SchedulerOutput) -> None:
        if step.step_id == 3:
            in_turn.post(add("late"), AbortRequest("late"), AbortRequest("a", (1,)))

    in_turn.runner.at_launch = abort
    in_turn.post(add("a", n=2))
    in_turn.steps()
    assert len(in_turn.tokens("a", 0)) == 3
    assert len(in_turn.tokens("a", 1)) == 1
    assert sorted(in_turn.ends("a")) == [FinishReason.LENGTH, FinishReason.ABORT]
    assert in_turn.ends("late") == [FinishReason.ABORT]
    in_turn.assert_idle()


def test_aborting_the_unknown_is_no_error(bench: Bench) -> None:
    bench.post(AbortRequest("nobody"), AbortRequest("nobody", (4,)), add("a"))
    bench.steps()
    assert bench.ends("a") == [FinishReason.LENGTH]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("broken"), "INTERNAL_ERROR"),
        (torch.OutOfMemoryError("no room"), "OUT_OF_MEMORY"),
    ],
)
def test_a_step_that_raises_fails_its_requests_and_no_others(
    bench: Bench, error: Exception, reason: str
) -> None:
    """Memory, too, once the step is under way."""

    def fail_first(step: SchedulerOutput) -> None:
        if step.step_id == 1:
            raise error

    bench.runner.at_wait = fail_first
    bench.post(add("in-step", prompt=16), add("waiting", prompt=6))
    bench.steps()
    (failed,) = [o for o in bench.channel.outputs() if o.request_id == "in-step"]
    assert failed.finish is not None
    assert failed.finish.failure is not None
    assert failed.finish.failure.reason == reason
    assert str(error) not in failed.finish.failure.message or not str(error)
    assert bench.ends("waiting") == [FinishReason.LENGTH]
    bench.assert_idle()


NO_MEMORY = [
    torch.OutOfMemoryError("no room"),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate"),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    MemoryError(),
]


@pytest.mark.parametrize("error", NO_MEMORY)
def test_a_step_that_does_not_fit_into_memory_is_planned_again_with_fewer_tokens(
    bench: Bench, error: Exception
) -> None:
    def fits(step: SchedulerOutput) -> None:
        if step.num_scheduled_tokens > 9:
            raise error

    bench.runner.at_launch = fits
    bench.post(add("a", prompt=16), add("b", prompt=40), add("c", prompt=3))
    bench.steps()
    assert [bench.ends(name) for name in "abc"] == [[FinishReason.LENGTH]] * 3
    assert max(frame.num_scheduled_tokens for frame in bench.channel.frames) == 8
    bench.assert_idle()


@pytest.mark.parametrize("error", NO_MEMORY)
def test_where_no_smaller_step_is_left_one_request_ends(bench: Bench, error: Exception) -> None:
    def fits(step: SchedulerOutput) -> None:
        if any(share.request.request_id == "hog" for share in step.scheduled):
            raise error

    bench.runner.at_launch = fits
    bench.post(add("before", prompt=5), add("hog", prompt=16), add("after", prompt=5))
    bench.steps()
    (failed,) = [o for o in bench.channel.outputs() if o.request_id == "hog"]
    assert failed.finish is not None
    assert failed.finish.failure is not None
    assert failed.finish.failure.reason == "OUT_OF_MEMORY"
    assert bench.ends("before") == bench.ends("after") == [FinishReason.LENGTH]
    bench.assert_idle()


def test_a_failure_of_one_row_spares_its_neighbours(bench: Bench) -> None:
    bench.runner.failures = {("bad", 0): Failure("INTERNAL_ERROR", "its logits are not numbers")}
    bench.post(add("bad"), add("good"))
    bench.steps()
    assert bench.ends("bad") == [FinishReason.ERROR]
    assert bench.tokens("good") == [5, 5, 5]
    bench.assert_idle()


def test_a_model_that_always_raises_ends_the_core(bench: Bench) -> None:
    def fail(step: SchedulerOutput) -> None:
        raise RuntimeError("the device is lost")

    bench.runner.at_launch = fail
    for i in range(MAX_FAILED_STEPS):
        bench.post(add(f"r{i}"))
        if i + 1 < MAX_FAILED_STEPS:
            assert bench.core.step()
    with pytest.raises(CoreBroken):
        bench.core.step()


def test_one_good_step_forgives_the_failed_ones(bench: Bench) -> None:
    def fail_mostly(step: SchedulerOutput) -> None:
        if step.step_id % 3:
            raise RuntimeError("now and then")

    bench.runner.at_launch = fail_mostly
    for i in range(3 * MAX_FAILED_STEPS):
        bench.post(add(f"r{i}", max_tokens=1))
        bench.core.step()
    bench.steps()
    bench.assert_idle()


def test_a_request_waits_for_its_grammar_and_delays_nobody(bench: Bench) -> None:
    bench.post(add("json", structured_output=JSON), add("free"))
    bench.steps()
    assert bench.ends("free") == [FinishReason.LENGTH]
    assert bench.tokens("json") == []
    assert bench.channel.frames[-1].stats.num_waiting == 1
    bench.grammars.compiled = [(("json", 0), None)]
    bench.steps()
    assert bench.tokens("json") == [5, 5, 5]
    assert bench.grammars.released == [("json", 0)]
    bench.assert_idle()


@pytest.mark.parametrize("is_cached", [False, True])
def test_a_requests_timing_tells_whether_its_grammar_was_there(
    bench: Bench, is_cached: bool
) -> None:
    bench.grammars.has_cached = is_cached
    bench.post(add("json", structured_output=JSON), add("free"))
    bench.grammars.compiled = [(("json", 0), None)]
    bench.steps()
    ends = {o.request_id: o.finish.timing for o in bench.channel.outputs() if o.finish}
    assert ends["json"].grammar_was_cached is is_cached
    assert 0 < ends["json"].taken_ns <= ends["json"].grammar_ready_ns
    assert ends["json"].grammar_wait_ns == ends["json"].grammar_ready_ns - ends["json"].taken_ns
    assert ends["free"].grammar_wait_ns == 0 and not ends["free"].grammar_was_cached


def test_a_bad_grammar_fails_its_request(bench: Bench) -> None:
    bench.post(add("json", n=2, structured_output=JSON))
    bench.steps()
    failure = Failure("INVALID_VALUE", "not a schema", "structured_output.json_schema")
    bench.grammars.compiled = [(("json", 0), failure), (("json", 1), failure)]
    bench.steps()
    ends = [output.finish for output in bench.channel.outputs() if output.finish]
    assert [end.failure for end in ends] == [failure, failure]
    assert sorted(bench.grammars.released) == [("json", 0), ("json", 1)]
    bench.assert_idle()


def test_a_grammar_that_is_ready_after_the_abort_is_ignored(bench: Bench) -> None:
    bench.post(add("json", structured_output=JSON))
    bench.steps()
    bench.post(AbortRequest("json"))
    bench.steps()
    bench.grammars.compiled = [(("json", 0), None)]
    assert bench.steps() == 0
    assert bench.ends("json") == [FinishReason.ABORT]
    assert bench.grammars.released == [("json", 0)]


def test_what_can_never_run_fails_alone(bench: Bench) -> None:
    bench.post(add("huge", prompt=256), add("ok"))
    bench.steps()
    (huge,) = [output for output in bench.channel.outputs() if output.request_id == "huge"]
    assert huge.finish is not None
    assert huge.finish.failure is not None
    assert huge.finish.failure.reason == "CONTEXT_LENGTH_EXCEEDED"
    assert bench.ends("ok") == [FinishReason.LENGTH]


# ---------------------------------------------------------------- deadlines


def test_what_is_past_its_deadline_is_not_computed(bench: Bench) -> None:
    bench.post(add("late", n=2, deadline_ns=time.monotonic_ns()), add("ok"))
    bench.steps()
    ends = [o.finish.failure for o in bench.channel.outputs() if o.finish and o.request_id != "ok"]
    assert [failure.reason for failure in ends if failure] == ["DEADLINE_EXCEEDED"] * 2
    assert bench.channel.frames[-1].stats.num_prompt_tokens == 5
    assert bench.ends("ok") == [FinishReason.LENGTH]
    bench.assert_idle()


@pytest.mark.usefixtures("rare_heartbeats")
def test_a_deadline_is_kept_while_nothing_can_be_computed(bench: Bench) -> None:
    """The request waits for its grammar, and the core sleeps."""
    thread = running(bench)
    deadline_ns = time.monotonic_ns() + 150_000_000
    bench.post(add("json", structured_output=JSON, deadline_ns=deadline_ns))
    bench.wait_for_end("json")
    assert time.monotonic_ns() >= deadline_ns
    bench.channel.mailbox.close()
    thread.join(10)
    assert bench.grammars.released == [("json", 0)]
    bench.assert_idle()


# ---------------------------------------------------------------- the loop


def running(bench: Bench) -> threading.Thread:
    thread = threading.Thread(target=bench.core.run, daemon=True)
    thread.start()
    return thread


def test_an_idle_core_sleeps_and_sends_heartbeats(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_core, "HEARTBEAT_SECONDS", 0.3)
    began, cpu_began = time.monotonic(), time.process_time()
    thread = running(bench)
    bench.wait_until(lambda: len(bench.channel.frames) >= 3)
    bench.post(Shutdown())
    thread.join(10)
    assert not thread.is_alive()
    assert time.process_time() - cpu_began < 0.4
    assert len(bench.channel.frames) <= (time.monotonic() - began) / 0.3
    assert all(frame.outputs == [] for frame in bench.channel.frames)


@pytest.mark.usefixtures("rare_heartbeats")
def test_a_command_wakes_an_idle_core_at_once(bench: Bench) -> None:
    thread = running(bench)
    time.sleep(0.05)
    bench.post(add("a"))
    bench.wait_for_end("a")
    bench.channel.mailbox.close()
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.usefixtures("rare_heartbeats")
def test_a_grammar_that_is_ready_wakes_an_idle_core(bench: Bench) -> None:
    thread = running(bench)
    bench.post(add("json", structured_output=JSON))
    bench.wait_until(lambda: bench.grammars.compiling == [("json", 0)])
    time.sleep(0.05)
    bench.grammars.compiled = [(("json", 0), None)]
    bench.channel.mailbox.wake()
    bench.wait_for_end("json")
    bench.post(Shutdown())
    thread.join(10)
    assert not thread.is_alive()


# ---------------------------------------------------------------- overlapped steps


def test_a_step_is_launched_before_the_one_before_is_waited_for(overlapped: Bench) -> None:
    overlapped.post(add("a", max_tokens=3))
    overlapped.steps()
    assert overlapped.runner.calls == [
        ("launch", 1),
        ("launch", 2),
        ("wait", 1),
        ("launch", 3),
        ("wait", 2),
        ("wait", 3),  # by its length the request ends with it: nothing is planned
    ]
    assert overlapped.tokens("a") == [5, 5, 5]
    overlapped.assert_idle()


def test_what_nobody_could_know_is_computed_in_vain_and_not_told(overlapped: Bench) -> None:
    stopping = StoppingCriteria(max_tokens=30, eos_token_ids=(5,))
    overlapped.post(msgspec.structs.replace(add("a"), stopping=stopping))
    overlapped.steps()
    assert overlapped.runner.calls[-1] == ("wait", 2)
    assert overlapped.tokens("a") == [5]
    assert overlapped.ends("a") == [FinishReason.STOP]
    overlapped.assert_idle()


@pytest.mark.parametrize(
    "depends",
    [
        {"structured_output": JSON},
        {"sampling": SamplingParams(repetition_penalty=1.1)},
        {"sampling": SamplingParams(presence_penalty=0.1)},
        {"sampling": SamplingParams(bad_token_sequences=((7, 8),))},
    ],
)
def test_what_depends_on_the_last_token_waits_for_it(
    overlapped: Bench, depends: dict[str, object]
) -> None:
    overlapped.post(msgspec.structs.replace(add("a"), **depends), add("b"))
    overlapped.core.step()
    overlapped.grammars.compiled = [(key, None) for key in overlapped.grammars.compiling]
    overlapped.steps()
    last = overlapped.runner.calls[-4:]
    assert [call for call, _ in last] == ["launch", "wait", "launch", "wait"]
    assert overlapped.tokens("a") == overlapped.tokens("b") == [5, 5, 5]


def test_an_abort_is_honoured_between_two_steps_that_overlap(overlapped: Bench) -> None:
    def leave(step: SchedulerOutput) -> None:
        if step.step_id == 2:
            overlapped.post(AbortRequest("a"))

    overlapped.runner.at_wait = leave
    overlapped.post(add("a", max_tokens=20), add("b", max_tokens=5))
    overlapped.steps()
    assert overlapped.tokens("a") == [5]  # not the token of the step that it left in
    assert overlapped.ends("a") == [FinishReason.ABORT]
    assert overlapped.tokens("b") == [5] * 5
    overlapped.assert_idle()


def test_a_step_that_fails_ends_its_requests_also_in_the_one_that_was_planned_after(
    overlapped: Bench,
) -> None:
    def fail(step: SchedulerOutput) -> None:
        if step.step_id == 2:
            raise ValueError("broken")

    overlapped.runner.at_wait = fail
    overlapped.post(add("a", max_tokens=9))
    overlapped.core.step()
    overlapped.post(add("b", prompt=3, max_tokens=4))  # in step 2, too
    overlapped.core.step()
    overlapped.post(add("c", prompt=7, max_tokens=4))
    overlapped.steps()
    assert overlapped.ends("a") == overlapped.ends("b") == [FinishReason.ERROR]
    assert overlapped.tokens("a") == [5]
    assert overlapped.tokens("c") == [5] * 4
    overlapped.assert_idle()


def test_a_step_that_cannot_be_launched_ends_its_requests_before_another_is_planned(
    overlapped: Bench,
) -> None:
    def fail(step: SchedulerOutput) -> None:
        if step.step_id == 3:
            raise ValueError("broken")

    overlapped.runner.at_launch = fail
    overlapped.post(add("a", max_tokens=9), add("b", prompt=3, max_tokens=2))
    overlapped.core.step()
    overlapped.core.step()
    overlapped.post(add("c", prompt=2, max_tokens=4))  # with a in step 3; b ends with step 2
    overlapped.core.step()
    assert overlapped.runner.calls[-2:] == [("launch", 3), ("wait", 2)]
    assert overlapped.ends("a") == overlapped.ends("c") == [FinishReason.ERROR]
    assert overlapped.tokens("a") == overlapped.tokens("b") == [5, 5]
    overlapped.post(add("d", max_tokens=2))
    overlapped.steps()
    assert overlapped.tokens("d") == [5, 5]
    overlapped.assert_idle()
