"""What scheduler tests run against: a pretend model whose tokens depend on its pretend KV memory.

Each slot of the memory holds a digest of all tokens up to its own, and the next token is made of
the last slot's digest. So a block shared wrongly, overwritten or read before it was computed
changes the output or is found at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from engine_service.config import SchedulerConfig
from engine_service.errors import InternalError
from engine_service.kv_cache_manager import KVCacheManager
from engine_service.messages import (
    Failure,
    RequestOutput,
    SamplingParams,
    StoppingCriteria,
    StructuredOutput,
    TokenLogprobs,
)
from engine_service.request import Request, RequestKey
from engine_service.scheduler import Scheduler
from engine_service.scheduler_output import (
    BlockCopy,
    ModelRunnerOutput,
    ScheduledRequest,
    SchedulerOutput,
)

VOCAB_SIZE = 97
JSON_OBJECT = StructuredOutput(kind="json_object")


def make_request(
    request_id: str = "r",
    prompt: Sequence[int] = (1, 2, 3),
    *,
    index: int = 0,
    max_tokens: int = 4,
    min_tokens: int = 0,
    eos_token_ids: tuple[int, ...] = (),
    stop_token_ids: tuple[int, ...] = (),
    seed: int = 0,
    priority: int = 0,
    tenant: str = "",
    arrival_ns: int = 0,
    deadline_ns: int = 0,
    cache_salt: str = "",
    structured_output: StructuredOutput | None = None,
) -> Request:
    return Request(
        request_id=request_id,
        index=index,
        prompt_token_ids=list(prompt),
        sampling=SamplingParams(seed=seed),
        stopping=StoppingCriteria(max_tokens, min_tokens, stop_token_ids, eos_token_ids),
        structured_output=structured_output,
        priority=priority,
        tenant=tenant,
        cache_salt=cache_salt,
        arrival_ns=arrival_ns,
        deadline_ns=deadline_ns,
    )


def next_token(digest: int, request: Request) -> int:
    return hash((digest, request.sampling.seed, request.index)) % VOCAB_SIZE


def expected_tokens(request: Request, grammar_length: int | None = None) -> list[int]:
    """What the request yields when nothing disturbs it."""
    digest = 0
    for token in request.prompt_token_ids:
        digest = hash((digest, token))
    stops = {*request.stopping.eos_token_ids, *request.stopping.stop_token_ids}
    tokens: list[int] = []
    limit = request.stopping.max_tokens
    if request.structured_output is not None and grammar_length is not None:
        limit = min(limit, grammar_length)
    while len(tokens) < limit:
        tokens.append(next_token(digest, request))
        digest = hash((digest, tokens[-1]))
        if tokens[-1] in stops and len(tokens) >= request.stopping.min_tokens:
            break
    return tokens


class FakeRunner:
    """Computes a step when it is launched; it alone knows the token that the step yields."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._last_tokens: dict[RequestKey, int] = {}
        self._block_size = block_size
        self._slots = [0] * (num_blocks * block_size)

    def execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        sampled: dict[RequestKey, int] = {}
        logprobs: dict[RequestKey, TokenLogprobs] = {}
        self._copy(scheduler_output.block_copies)
        for share in scheduler_output.scheduled:
            self._write(share)
        for share in scheduler_output.scheduled:
            digest = self._read(share)
            key = share.request.key
            if share.samples:
                sampled[key] = next_token(digest, share.request)
                if share.request.sampling.num_logprobs is not None:
                    logprobs[key] = TokenLogprobs(-0.5, 1, [], [])
        self._last_tokens.update(sampled)
        return ModelRunnerOutput(sampled, logprobs)

    def _slot(self, share: ScheduledRequest, position: int) -> int:
        block_id = share.block_ids[position // self._block_size]
        return block_id * self._block_size + position % self._block_size

    def _copy(self, copies: Sequence[BlockCopy]) -> None:
        size = self._block_size
        for source, destination in copies:
            whole = self._slots[source * size : (source + 1) * size]
            self._slots[destination * size : (destination + 1) * size] = whole

    def _token(self, request: Request, position: int) -> int:
        if position < request.num_tokens:
            return request.token_ids[position]
        assert position == request.num_tokens, "two tokens are not known"
        return self._last_tokens[request.key]

    def _write(self, share: ScheduledRequest) -> None:
        start = share.num_computed_tokens
        digest = self._slots[self._slot(share, start - 1)] if start else 0
        for position in range(start, start + share.num_scheduled_tokens):
            digest = hash((digest, self._token(share.request, position)))
            self._slots[self._slot(share, position)] = digest

    def _read(self, share: ScheduledRequest) -> int:
        """The last digest, after checking that every slot of the request holds what it should."""
        digest = 0
        for position in range(share.num_computed_tokens + share.num_scheduled_tokens):
            digest = hash((digest, self._token(share.request, position)))
            found = self._slots[self._slot(share, position)]
            assert found == digest, f"{share.request.key}: wrong KV at position {position}"
        return digest


@dataclass
class FakeGrammars:
    """Complete after `length` tokens; refuses everything from the keys in `refusing`.

    `forced_after`: the only token allowed after those accepted so far; None: there is a choice.
    """

    length: int = 1_000_000
    refusing: set[RequestKey] = field(default_factory=set)
    accepted: dict[RequestKey, list[int]] = field(default_factory=dict)
    released: list[RequestKey] = field(default_factory=list)
    forced_after: Callable[[Sequence[int]], int | None] = lambda accepted: None

    def accept(self, key: RequestKey, token_id: int) -> None:
        if key in self.refusing:
            raise InternalError("the grammar does not allow this token")
        self.accepted.setdefault(key, []).append(token_id)

    def take_forced_token(self, key: RequestKey) -> int | None:
        token_id = self.forced_after(self.accepted.get(key, ()))
        if token_id is not None:
            self.accept(key, token_id)
        return token_id

    def is_terminated(self, key: RequestKey) -> bool:
        return len(self.accepted[key]) >= self.length

    def release(self, key: RequestKey) -> None:
        self.released.append(key)


class Core:
    """Scheduler, KV cache and fake runner, driven step by step; integrity is proved each time."""

    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 4,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 32,
        enable_caching: bool = True,
        grammar_length: int = 1_000_000,
        tenant_weights: dict[str, float] | None = None,
        long_prefill_token_threshold: int = 0,
        target_itl_ms: float | None = None,
        priority_aging_seconds: float = 30.0,
        enable_jump_forward: bool = True,
    ) -> None:
        config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            tenant_weights=tenant_weights or {},
            long_prefill_token_threshold=long_prefill_token_threshold,
            target_itl_ms=target_itl_ms,
            priority_aging_seconds=priority_aging_seconds,
            enable_jump_forward=enable_jump_forward,
        )
        self.kv = KVCacheManager(block_size, num_blocks, enable_caching)
        self.scheduler = Scheduler(config, self.kv)
        self.runner = FakeRunner(num_blocks, block_size)
        self.grammars = FakeGrammars(length=grammar_length)
        self.now_ns = 0
        self.tokens: dict[RequestKey, list[int]] = {}
        self.prefilled: dict[RequestKey, int] = {}
        self.finished: dict[RequestKey, RequestOutput] = {}
        self.finish_step: dict[RequestKey, int] = {}

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add_request(request)

    def schedule(self) -> SchedulerOutput:
        self.now_ns += 10
        for output in self.scheduler.expire(self.now_ns):
            self.record(output)
        scheduler_output = self.scheduler.schedule(self.now_ns)
        self.scheduler.check_integrity()
        return scheduler_output

    def update(
        self, scheduler_output: SchedulerOutput, failing: Sequence[RequestKey] = ()
    ) -> list[RequestOutput]:
        return self.finish(scheduler_output, self.launch(scheduler_output), failing)

    def launch(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        runner_output = self.runner.execute(scheduler_output)
        self.scheduler.launched(scheduler_output)
        self.scheduler.check_integrity()
        return runner_output

    def finish(
        self,
        scheduler_output: SchedulerOutput,
        runner_output: ModelRunnerOutput,
        failing: Sequence[RequestKey] = (),
    ) -> list[RequestOutput]:
        failures = {key: Failure("INTERNAL_ERROR", "NaN logits") for key in failing}
        runner_output = replace(runner_output, failures=failures)
        start_ns, self.now_ns = self.now_ns, self.now_ns + 10
        outputs = self.scheduler.update_from_output(
            scheduler_output, runner_output, start_ns, self.now_ns, self.grammars
        )
        self.scheduler.check_integrity()
        for output in outputs:
            self.record(output, scheduler_output.step_id)
        return outputs

    def step(self) -> list[RequestOutput]:
        return self.update(self.schedule())

    def record(self, output: RequestOutput | None, step_id: int = 0) -> None:
        if output is None:
            return
        key = (output.request_id, output.index)
        assert key not in self.finished, f"{key} speaks after its end"
        if output.num_prefilled_tokens is not None:
            assert output.num_prefilled_tokens > self.prefilled.get(key, 0), "progress goes back"
            assert output.num_prefilled_tokens > output.num_cached_tokens
            self.prefilled[key] = output.num_prefilled_tokens
        self.tokens.setdefault(key, []).extend(output.new_token_ids)
        if output.finish is not None:
            self.finished[key] = output
            self.finish_step[key] = step_id

    def has_work(self) -> bool:
        """Whether a step would compute something: false also while all wait for grammars."""
        return bool(self.scheduler._queues.running or self.scheduler._queues.waiting)

    def run(self, max_steps: int = 10_000) -> int:
        """Until all that can run has finished; the number of steps."""
        for num_steps in range(max_steps):
            if not self.has_work():
                return num_steps
            scheduler_output = self.schedule()
            has_work = self.has_work()
            assert scheduler_output.scheduled or not has_work, "work is there, none is scheduled"
            self.update(scheduler_output)
        raise AssertionError(f"not finished after {max_steps} steps")


def shares(scheduler_output: SchedulerOutput) -> dict[str, int]:
    """Scheduled tokens by request id, in order."""
    return {s.request.request_id: s.num_scheduled_tokens for s in scheduler_output.scheduled}
