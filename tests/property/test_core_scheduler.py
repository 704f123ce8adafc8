"""A state machine over the scheduler, its KV cache and a pretend model: requests of all kinds come,
are computed, share prefixes in the making, belong to several tenants, abort at any moment, fail,
miss their deadlines, are preempted in tiny pools. After every rule the books are proved, and in
the end everything has finished with the tokens it would have had alone."""

from __future__ import annotations

from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engine_service.messages import Failure, FinishReason
from engine_service.request import Request, RequestKey, RequestStatus
from engine_service.scheduler_output import ModelRunnerOutput, SchedulerOutput
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
        tenant=draw(st.sampled_from(["", "", "a", "b"])),
        arrival_ns=draw(st.integers(0, 3)),
        cache_salt=draw(st.sampled_from(["", "salt"])),
        structured_output=draw(st.sampled_from([None, None, JSON_OBJECT])),
    )


class SchedulerMachine(RuleBasedStateMachine):
    # of all examples
    num_steps = 0  # empty ones left out
    num_preemptions = 0
    num_copies = 0
    num_ahead = 0  # planned while another was under way

    @initialize(
        num_blocks=st.integers(6, 16),
        max_num_seqs=st.integers(1, 6),
        max_num_batched_tokens=st.integers(1, 24),
        enable_caching=st.sampled_from([True, True, False]),
        weight=st.sampled_from([0.5, 1.0, 3.0]),
        long_prefill_token_threshold=st.sampled_from([0, 0, 3, 9]),
        target_itl_ms=st.sampled_from([None, None, 1e-6, 2e-5, 1.0]),  # a step takes 1e-5
        priority_aging_seconds=st.sampled_from([30.0, 1e-8, 1e-7]),
    )
    def start(
        self,
        num_blocks: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        enable_caching: bool,
        weight: float,
        long_prefill_token_threshold: int,
        target_itl_ms: float | None,
        priority_aging_seconds: float,
    ) -> None:
        self.core = Core(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_caching=enable_caching,
            grammar_length=GRAMMAR_LENGTH,
            tenant_weights={"a": weight},
            long_prefill_token_threshold=long_prefill_token_threshold,
            target_itl_ms=target_itl_ms,
            priority_aging_seconds=priority_aging_seconds,
        )
        self.submitted: dict[RequestKey, Request] = {}
        self.under_way: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()

    @rule(data=st.data())
    def submit(self, data: st.DataObject) -> None:
        request_id = f"r{len(self.submitted)}"
        request = data.draw(requests(request_id, self.core.kv.capacity_tokens))
        if request.structured_output is not None and data.draw(st.booleans()):
            request.status = RequestStatus.WAITING_FOR_GRAMMAR
        if data.draw(st.integers(0, 3)) == 0:
            request.deadline_ns = self.core.now_ns + data.draw(st.integers(1, 300))
        self.submitted[request.key] = request
        self.core.add(request)

    @rule(data=st.data(), prefix_tokens=st.integers(4, 16), num_requests=st.integers(2, 4))
    def submit_burst(self, data: st.DataObject, prefix_tokens: int, num_requests: int) -> None:
        """All with one prefix that nobody has computed yet, or samples of one prompt."""
        first = len(self.submitted)
        prompt = [*range(first, first + prefix_tokens)]
        own_tokens = data.draw(st.integers(0, 3))
        are_samples = data.draw(st.booleans())
        tenants = data.draw(st.sampled_from([("",), ("a", "b"), ("", "a")]))
        for i in range(num_requests):
            ending = [50 if are_samples else 50 + i] * own_tokens
            request = make_request(
                f"r{first}" if are_samples else f"r{len(self.submitted)}",
                [*prompt, *ending][: self.core.kv.capacity_tokens - 4],
                max_tokens=data.draw(st.integers(1, 4)),
                index=i,
                tenant=tenants[0 if are_samples else i % len(tenants)],
            )
            self.submitted[request.key] = request
            self.core.add(request)

    @rule()
    def flush(self) -> None:
        self.core.scheduler.flush_prefix_cache()

    @precondition(lambda self: self.core.scheduler._queues.in_flight._following)
    @rule(data=st.data())
    def abort_a_leader(self, data: st.DataObject) -> None:
        """Of one that waits for it."""
        following = self.core.scheduler._queues.in_flight._following
        leaders = sorted({leader.key for leader in following.values()})
        key = data.draw(st.sampled_from(leaders))
        self.core.record(self.core.scheduler.abort(key, self.core.now_ns))

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

    @precondition(lambda self: self._may_plan())
    @rule()
    def schedule(self) -> None:
        self._schedule()

    def _may_plan(self) -> bool:
        """With one step under way the next may be planned, unless it depends on the first."""
        if not self.under_way:
            return True
        plan, _ = self.under_way[-1]
        return len(self.under_way) == 1 and self.core.scheduler.may_plan_after(plan)

    def _schedule(self) -> None:
        for output in self.core.scheduler.expire(self.core.now_ns + 10):
            self.core.record(output)
        had_work = self.core.has_work()
        lacking_one = self._running_that_lack_one_token()
        plan = self.core.schedule()
        shares = plan.scheduled
        assert had_work or not shares, "work out of nothing"
        assert shares or not had_work or self.under_way, "an empty step"
        assert len({s.request.key for s in shares}) == len(shares) <= 6
        assert all(s.num_scheduled_tokens > 0 for s in shares)
        assert plan.num_scheduled_tokens == sum(s.num_scheduled_tokens for s in shares)
        assert plan.num_scheduled_tokens <= self.core.scheduler.token_budget
        SchedulerMachine.num_copies += len(plan.block_copies)
        SchedulerMachine.num_ahead += len(self.under_way) if shares else 0
        scheduled = {s.request.key for s in shares}
        for request in lacking_one:  # a decode is never starved, unless blocks are short
            if request.status is RequestStatus.RUNNING and request.key not in scheduled:
                assert request is self.core.scheduler._queues.running[-1]
                assert self.core.kv.pool.num_available == 0
        self.under_way.append((plan, self.core.launch(plan)))

    def _running_that_lack_one_token(self) -> list[Request]:
        return [
            r
            for r in self._live()
            if r.status is RequestStatus.RUNNING
            and r.num_expected_tokens - r.num_planned_tokens == 1
            and not self.core.scheduler._needs_nothing(r)
        ]

    @precondition(lambda self: self.under_way)
    @rule(data=st.data())
    def update(self, data: st.DataObject) -> None:
        keys = [s.request.key for s in self.under_way[0][0].scheduled]
        failing = data.draw(st.lists(st.sampled_from(keys), max_size=1)) if keys else []
        if data.draw(st.integers(0, 9)):
            failing = []  # one step in ten has a chance to fail
        self._update(failing)

    @precondition(lambda self: self._may_plan())
    @rule(num_steps=st.integers(1, 20))
    def step(self, num_steps: int) -> None:
        """As many are under way after each as were before."""
        for _ in range(num_steps):
            while not self._may_plan():
                self._update([])
            self._schedule()
            self._update([])

    def _update(self, failing: list[RequestKey]) -> None:
        plan, runner_output = self.under_way.popleft()
        self.core.finish(plan, runner_output, failing)

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
        while self.under_way:
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
        SchedulerMachine.num_steps += stats.num_steps
        SchedulerMachine.num_preemptions += stats.num_preemptions
        assert (stats.num_running, stats.num_waiting, stats.used_blocks) == (0, 0, 0)
        assert stats.free_blocks + stats.cached_blocks == stats.total_blocks


def test_the_books_are_true_after_every_rule_of_ten_thousand_steps() -> None:
    machine = SchedulerMachine
    machine.num_steps = machine.num_preemptions = machine.num_copies = machine.num_ahead = 0
    run_state_machine_as_test(
        SchedulerMachine,
        settings=settings(max_examples=250, stateful_step_count=60),
    )
    assert machine.num_steps >= 10_000
    assert machine.num_preemptions >= 30
    assert machine.num_copies >= 30
    assert machine.num_ahead >= 200


@settings(max_examples=100)
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


@settings(max_examples=60)
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
