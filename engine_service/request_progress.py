"""How requests get on: what a step computed is booked, its tokens are taken, requests end."""

from __future__ import annotations

from engine_service.jump_forward import take_forced_token
from engine_service.messages import Failure, Finish, FinishReason, PrefillChunk, RequestOutput
from engine_service.queue_watch import QueueWatch
from engine_service.request import FINISHED_STATUS, Request
from engine_service.request_output import Grammars, accept_token, output_of
from engine_service.request_queues import RequestQueues
from engine_service.scheduler_output import ModelRunnerOutput, ScheduledRequest, SchedulerOutput
from engine_service.stop_check import Stop, check_stop


class RequestProgress:
    def __init__(
        self,
        queues: RequestQueues,
        watch: QueueWatch,
        *,
        max_model_len: int,
        max_new_tokens: int,  # of a request, in a step
    ) -> None:
        self._queues = queues
        self._watch = watch
        self._max_model_len = max_model_len
        self._max_new_tokens = max_new_tokens
        self.num_prompt_tokens = 0  # computed
        self.num_generated_tokens = 0
        self.num_forced_tokens = 0  # of those, taken without a step of their own

    def update_from_output(
        self,
        scheduler_output: SchedulerOutput,
        runner_output: ModelRunnerOutput,
        start_ns: int,
        end_ns: int,
        grammars: Grammars,
    ) -> list[RequestOutput]:
        """Books what the step computed; one output per request that has something to tell."""
        failures = runner_output.failures
        outputs = []
        for share in scheduler_output.scheduled:
            request = share.request
            if not share.is_current:
                continue  # aborted or preempted while the step ran
            samples = share.samples
            request.num_pending_outputs -= samples
            failure = failures.get(request.key) if failures else None
            if failure is None and samples:
                failure = accept_token(request, runner_output, grammars)
            if failure is not None:  # nothing is published: the KV of this step is in doubt
                outputs.append(self.end(request, FinishReason.ERROR, end_ns, failure))
            else:
                num_prefilled = self._advance(share, scheduler_output, start_ns, end_ns)
                if samples:
                    token = self._append(request, runner_output, num_prefilled, end_ns, grammars)
                    outputs.append(token)
                elif num_prefilled is not None:
                    told = runner_output.prompt_logprobs.get(request.key, ())
                    outputs.append(output_of(request, num_prefilled, prompt_logprobs=told))
            if request.structured_output is not None and request.status.is_finished:
                grammars.release(request.key)
        return outputs

    def _advance(
        self, share: ScheduledRequest, step: SchedulerOutput, start_ns: int, end_ns: int
    ) -> int | None:
        """Books the computed tokens; returns how far the prompt is now, if further than ever."""
        request = share.request
        self._queues.advance(request, share.num_scheduled_tokens)
        if share.num_computed_tokens >= request.num_admitted_tokens:
            return None  # a generated token
        request.prefill_chunks.append(
            PrefillChunk(
                step.step_id,
                start_ns,
                end_ns,
                share.num_scheduled_tokens,
                step.scheduled_ns,
                step.num_scheduled_tokens,
            )
        )
        num_prefilled = min(request.num_computed_tokens, request.num_prompt_tokens)
        if num_prefilled <= request.num_prefilled_tokens:
            return None  # computed again after a preemption
        self.num_prompt_tokens += num_prefilled - request.num_prefilled_tokens
        request.num_prefilled_tokens = num_prefilled
        return num_prefilled

    def _append(
        self,
        request: Request,
        runner_output: ModelRunnerOutput,
        num_prefilled: int | None,
        end_ns: int,
        grammars: Grammars,
    ) -> RequestOutput:
        """Takes the sampled token, and those that must follow it; ends the request with its last.

        tokens   |<---- computed ---->| sampled | forced | forced |   all known from now on
        """
        logprobs = runner_output.logprobs.get(request.key)
        is_first = request.num_output_tokens == 0
        if is_first:
            request.first_token_ns = end_ns
            self._watch.drop(request)
        new_token_ids = [runner_output.sampled_token_ids[request.key]]
        stop = self._take_token(request, new_token_ids[0], grammars)
        while stop is None and len(new_token_ids) < self._max_new_tokens:
            forced = take_forced_token(request, grammars)
            if forced is None:
                break
            new_token_ids.append(forced)
            self.num_forced_tokens += 1
            stop = self._take_token(request, forced, grammars)
        finish = None
        if stop is not None:
            finish = self._finish(request, stop.reason, end_ns, stop_token_id=stop.stop_token_id)
        told = runner_output.prompt_logprobs.get(request.key, ())
        timing = request.timing() if is_first and request.tells_timing else None
        return output_of(request, num_prefilled, new_token_ids, logprobs, finish, told, timing)

    def _take_token(self, request: Request, token_id: int, grammars: Grammars) -> Stop | None:
        """Its grammar has accepted it. The end of the request, if that was its last."""
        request.append_output(token_id)
        self.num_generated_tokens += 1
        return check_stop(
            request,
            max_model_len=self._max_model_len,
            grammar_is_terminated=(
                request.structured_output is not None and grammars.is_terminated(request.key)
            ),
        )

    # ------------------------------------------------------------ the end of a request

    def end(
        self, request: Request, reason: FinishReason, now_ns: int, failure: Failure | None = None
    ) -> RequestOutput:
        """At any time; what the steps under way yield for it counts no more."""
        return output_of(request, finish=self._finish(request, reason, now_ns, failure))

    def _finish(
        self,
        request: Request,
        reason: FinishReason,
        now_ns: int,
        failure: Failure | None = None,
        stop_token_id: int | None = None,
    ) -> Finish:
        self._queues.end(request, FINISHED_STATUS[reason])
        self._watch.drop(request)
        request.finished_ns = now_ns
        return Finish(reason, request.timing(), stop_token_id, failure)
