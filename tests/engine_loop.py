"""The engine core's loop without its process: real scheduler and runner."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from engine_service.config import SchedulerConfig
from engine_service.kv_cache_manager import KVCacheManager
from engine_service.messages import FinishReason, RequestOutput, SamplingParams, StoppingCriteria
from engine_service.model_runner import ModelRunner
from engine_service.request import Request, RequestKey
from engine_service.scheduler import Scheduler

GREEDY = SamplingParams(temperature=0.0)
MAX_STEPS = 10_000
LARGE_STEPS = SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=4096)  # that a runner takes


class _NoGrammars:
    def accept(self, key: RequestKey, token_id: int) -> None:
        raise AssertionError("no request here has a grammar")

    def take_forced_token(self, key: RequestKey) -> int | None:
        raise AssertionError("no request here has a grammar")

    def is_terminated(self, key: RequestKey) -> bool:
        raise AssertionError("no request here has a grammar")

    def release(self, key: RequestKey) -> None:
        pass


class EngineLoop:
    """Steps until all requests are done; the prefix cache lives as long as the loop."""

    def __init__(
        self,
        runner: ModelRunner,
        block_size: int,
        token_budget: int,
        max_num_seqs: int = 64,
        num_blocks: int | None = None,  # of the runner's; None: all
    ) -> None:
        self._runner = runner
        self.kv_cache_manager = KVCacheManager(block_size, num_blocks or runner.num_blocks)
        config = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=token_budget)
        self._scheduler = Scheduler(config, self.kv_cache_manager)
        self.num_steps = 0
        self.num_preemptions = 0
        self._num_requests = 0

    def run(self, requests: Sequence[Request]) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        for request in requests:
            self._scheduler.add_request(request)
        while self._scheduler.has_unfinished_requests():
            scheduled = self._scheduler.schedule(time.monotonic_ns())
            start_ns = time.monotonic_ns()
            result = self._runner.execute_model(scheduled, None)
            self._scheduler.launched(scheduled)
            outputs += self._scheduler.update_from_output(
                scheduled, result, start_ns, time.monotonic_ns(), _NoGrammars()
            )
            self.num_steps += 1
            if self.num_steps > MAX_STEPS:
                raise AssertionError("the loop does not end")
        self.num_preemptions = self._scheduler.stats().num_preemptions
        return outputs

    def generate(
        self,
        prompts: Sequence[list[int]],
        max_tokens: int,
        sampling: SamplingParams | Callable[[int], SamplingParams] = GREEDY,
        eos_token_ids: tuple[int, ...] = (),
    ) -> list[Request]:
        """One finished request per prompt, all in the batch at once."""
        stopping = StoppingCriteria(max_tokens=max_tokens, eos_token_ids=eos_token_ids)
        requests = []
        for i, prompt in enumerate(prompts):
            params = sampling if isinstance(sampling, SamplingParams) else sampling(i)
            request_id = f"r{self._num_requests}"
            self._num_requests += 1
            requests.append(Request(request_id, 0, list(prompt), params, stopping))
        outputs = self.run(requests)
        failures = [
            output.finish.failure
            for output in outputs
            if output.finish is not None and output.finish.reason is FinishReason.ERROR
        ]
        assert failures == []
        return requests
