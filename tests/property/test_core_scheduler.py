"""A state machine over the scheduler, its KV cache and a pretend model: requests of all kinds come,
are computed, abort at any moment, fail, are preempted in tiny pools. After every rule the books
are proved, and in the end everything has finished with the tokens it would have had alone."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine_service.messages import Failure, FinishReason
from engine_service.request import Request, RequestKey, RequestStatus
from engine_service.scheduler_output import SchedulerOutput
from tests.core_fakes import JSON_OBJECT, VOCAB_SIZE, Core, expected_tokens, make_request

BLOCK_SIZE = 4
GRAMMAR_LENGTH = 5

# Few prefixes with few endings: hits of every length, and equal prompts side by side.
prompts = st.builds(
    lambda prefix, length, ending: [*([prefix] * length), *ending],
    st.integers(0, 2),
    st.integers(0, 17),
    st.lists(st.integers(3, 5), min_size=1, max_size=4),
)


@st.composite
def requests(draw: st.DrawFn, request_id: str = "r", max_total: int = 10_000) -> Request:
    prompt = draw(prompts)[: max_total - 1]
    end_ids = tuple(range(draw(st.sampled_from([0, 0, 8]))))
    return make_request(
        request_id,
        prompt,
        max_tokens=draw(st.integers(1, min(20, max_total - len(prompt)))),
        min_tokens=draw(st.integers(0, 3)),
        eos_token_ids=end_ids,
        seed=draw(st.integers(0, 3)),
        priority=draw(st.integers(-1, 1)),
        arrival_ns=draw(st.integers(0, 3)),
        cache_salt=draw(st.sampled_from(["", "salt"])),
        structured_output=draw(st.sampled_from([None, None, JSON_OBJECT])),
    )


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(6, 16),
        max_num_seqs=st.integers(1, 6),
        max_num_batched_tokens=st.integers(1, 24),
        enable_caching=st.booleans(),
    )
    def start(
        self, num_blocks: int, max_num_seqs: int, max_num_batched_tokens: int, enable_caching: bool
    ) -> None:
        self.core = Core(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_caching=enable_caching,
            grammar_length=GRAMMAR_LENGTH,
        )
        self.submitted: dict[RequestKey, Request] = {}
        self.in_flight: SchedulerOutput | None = None

    @rule(data=st.data())
    def submit(self, data: st.DataObject) -> None:
        request_id = f"r{len(self.submitted)}"
        request = data.draw(requests(request_id, self.core.kv.capacity_tokens))
        if request.structured_output is not None and data.draw(st.booleans()):
            request.status = RequestStatus.WAITING_FOR_GRAMMAR
        self.submitted[request.key] = request
        self.core.add(request)

    def _live(self) -> list[Request]:
        return [r for r in self.submitted.values() if not r.status.is_finished]

    def _pick_live(self, data: st.DataObject) -> RequestKey:
        return data.draw(st.sampled_from([request.key for request in self._live()]))

    @precondition(lambda self: self._live())
    @rule(data=st.data(), as_error=st.booleans())
    def abort_or_fail(self, data: st.DataObject, as_error: bool) -> None:
        """Also between schedule and update."""
        key = self._pick_live(data)
        scheduler, now_ns = self.core.scheduler, self.core.now_ns
        if as_error:
            output = scheduler.fail(key, Failure("INTERNAL_ERROR", "the step failed"), now_ns)
        else:
            output = scheduler.abort(key, now_ns)
        assert output is not None
        self.core.record(output)
        assert scheduler.abort(key, now_ns) is None

    @precondition(lambda self: self._live())
    @rule(data=st.data())
    def grammar_is_ready(self, data: st.DataObject) -> None:
        self.core.scheduler.grammar_ready(self._pick_live(data), self.core.now_ns)

    @precondition(lambda self: self.in_flight is None)
    @rule()
    def schedule(self) -> None:
        had_work = self.core.scheduler.has_schedulable_requests()
        lacking_one = self._running_that_lack_one_token()
        self.in_flight = self.core.schedule()
        shares = self.in_flight.scheduled
        assert bool(shares) == had_work, "an empty step, or work out of nothing"
        assert len({s.request.key for s in shares}) == len(shares) <= 6
        assert all(s.num_scheduled_tokens > 0 for s in shares)
        assert self.in_flight.num_scheduled_tokens == sum(s.num_scheduled_tokens for s in shares)
        assert self.in_flight.num_scheduled_tokens <= self.core.scheduler._token_budget
        scheduled = {s.request.key for s in shares}
        for request in lacking_one:  # a decode is never starved, unless blocks are short
            if request.status is RequestStatus.RUNNING and request.key not in scheduled:
                assert request is self.core.scheduler._running[-1]
                assert self.core.kv.pool.num_available == 0

    def _running_that_lack_one_token(self) -> list[Request]:
        return [
            r
            for r in self._live()
            if r.status is RequestStatus.RUNNING and r.num_tokens - r.num_computed_tokens == 1
        ]

    @precondition(lambda self: self.in_flight is not None)
    @rule(data=st.data())
    def update(self, data: st.DataObject) -> None:
        assert self.in_flight is not None
        keys = [s.request.key for s in self.in_flight.scheduled]
        failing = data.draw(st.lists(st.sampled_from(keys), max_size=1)) if keys else []
        if data.draw(st.integers(0, 9)):
            failing = []  # one step in ten has a chance to fail
        self._update(failing)

    def _update(self, failing: list[RequestKey]) -> None:
        assert self.in_flight is not None
        self.core.update(self.in_flight, failing)
        self.in_flight = None

    @invariant()
    def books_are_true(self) -> None:
        self.core.scheduler.check_integrity()

    @invariant()
    def tokens_are_those_of_the_request_alone(self) -> None:
        for key, tokens in self.core.tokens.items():
            expected = expected_tokens(self.submitted[key], GRAMMAR_LENGTH)
            assert tokens == expected[: len(tokens)]

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        if self.in_flight is not None:
            self._update([])
        for request in self._live():
            self.core.scheduler.grammar_ready(request.key, self.core.now_ns)
        total = sum(r.num_prompt_tokens + r.stopping.max_tokens for r in self.submitted.values())
        self.core.run(max_steps=10 * total + 10)
        assert set(self.core.finished) == set(self.submitted)
        for key, request in self.submitted.items():
            finish = self.core.finished[key].finish
            assert finish is not None
            if finish.reason in (FinishReason.STOP, FinishReason.LENGTH):
                assert self.core.tokens[key] == expected_tokens(request, GRAMMAR_LENGTH)
                assert self.core.prefilled[key] == request.num_prompt_tokens
        stats = self.core.scheduler.stats()
        assert (stats.num_running, stats.num_waiting, stats.used_blocks) == (0, 0, 0)
        assert stats.free_blocks + stats.cached_blocks == stats.total_blocks


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=200, stateful_step_count=60, deadline=None)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(requests(max_total=6 * BLOCK_SIZE), min_size=2, max_size=8),
    st.integers(1, 40),
    st.booleans(),
)
def test_outputs_depend_neither_on_pool_nor_on_budget_nor_on_cache(
    batch: list[Request], max_num_batched_tokens: int, enable_caching: bool
) -> None:
    core = Core(
        num_blocks=6,
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_caching=enable_caching,
        grammar_length=GRAMMAR_LENGTH,
    )
    for i, request in enumerate(batch):
        request.request_id, request.key = f"r{i}", (f"r{i}", 0)
        core.add(request)
    core.run(max_steps=2000)
    assert core.tokens == {r.key: expected_tokens(r, GRAMMAR_LENGTH) for r in batch}
    assert all(0 <= token < VOCAB_SIZE for tokens in core.tokens.values() for token in tokens)


@settings(max_examples=60, deadline=None)
@given(st.integers(4, 10), st.integers(2, 6), st.integers(8, 40))
def test_preemption_is_rare(num_requests: int, blocks_each: int, max_tokens: int) -> None:
    """Nobody is thrown out over and over: each time, somebody took a whole block in between."""
    core = Core(num_blocks=2 * blocks_each + 8, block_size=BLOCK_SIZE, max_num_seqs=16)
    batch = [
        make_request(f"r{i}", [i] * BLOCK_SIZE * blocks_each, max_tokens=max_tokens, arrival_ns=i)
        for i in range(num_requests)
    ]
    batch = [r for r in batch if r.num_prompt_tokens + max_tokens <= core.kv.capacity_tokens]
    core.add(*batch)
    num_steps = core.run()
    for request in batch:
        assert request.num_preemptions <= 1 + num_steps // BLOCK_SIZE
    total = sum(r.num_preemptions for r in batch)
    assert total <= len(batch) * (1 + max_tokens // BLOCK_SIZE)
