"""Jump-forward against the pretend model: ids are the same with it and without, steps are saved."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_service.messages import FinishReason, SamplingParams, StoppingCriteria
from engine_service.request import Request
from engine_service.scheduler_output import ModelRunnerOutput, SchedulerOutput
from tests.core_fakes import JSON_OBJECT, VOCAB_SIZE, Core, FakeGrammars, FakeRunner, make_request

EOS = 7


class ForcingRunner(FakeRunner):
    """Samples as under a mask: where the grammar leaves no choice, what it demands."""

    def __init__(self, num_blocks: int, block_size: int, grammars: FakeGrammars) -> None:
        super().__init__(num_blocks, block_size)
        self._grammars = grammars

    def execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        output = super().execute(scheduler_output)
        for share in scheduler_output.scheduled:
            key = share.request.key
            if key not in output.sampled_token_ids or share.request.structured_output is None:
                continue
            forced = self._grammars.forced_after(self._grammars.accepted.get(key, ()))
            if forced is not None:
                output.sampled_token_ids[key] = forced
        return output


def forcing_core(share_forced: int, **options: int | bool) -> Core:
    """After about `share_forced` of ten token sequences there is no choice."""

    def forced_after(accepted: Sequence[int]) -> int | None:
        digest = hash((*accepted, 1))
        return digest // 10 % VOCAB_SIZE if digest % 10 < share_forced else None

    core = Core(**options)  # type: ignore[arg-type]  # names and types are Core's own
    core.grammars.forced_after = forced_after
    core.runner = ForcingRunner(core.kv.pool.num_blocks, core.kv.block_size, core.grammars)
    return core


@st.composite
def requests(draw: st.DrawFn, number: int) -> Request:
    params = SamplingParams(
        seed=draw(st.integers(0, 3)),
        num_logprobs=draw(st.sampled_from([None, None, None, 0])),
        allowed_token_ids=draw(st.sampled_from([(), (), (), tuple(range(VOCAB_SIZE))])),
    )
    max_tokens = draw(st.integers(1, 30))
    request = make_request(
        f"r{number}",
        draw(st.lists(st.integers(0, 3), min_size=1, max_size=20)),
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, max_tokens)),
        stop_token_ids=(EOS,),
        structured_output=draw(st.sampled_from([JSON_OBJECT, JSON_OBJECT, None])),
    )
    request.sampling = params
    return request


def copy_of(request: Request) -> Request:
    return Request(
        request.request_id,
        request.index,
        list(request.prompt_token_ids),
        request.sampling,
        request.stopping,
        request.structured_output,
    )


@settings(max_examples=150)
@given(st.data())
def test_ids_are_the_same_with_it_and_without(data: st.DataObject) -> None:
    number = data.draw(st.integers(1, 6))
    asked = [data.draw(requests(i)) for i in range(number)]
    options = {
        "num_blocks": data.draw(st.integers(14, 40)),  # few: preemption
        "block_size": data.draw(st.integers(1, 8)) if data.draw(st.booleans()) else 4,
        "max_num_batched_tokens": data.draw(st.integers(6, 32)),
        "max_num_seqs": 6,
        "enable_caching": data.draw(st.booleans()),
        "grammar_length": data.draw(st.integers(1, 40)),
    }
    if options["num_blocks"] * options["block_size"] < 52:
        options["num_blocks"] = -(-52 // options["block_size"])
    share_forced = data.draw(st.sampled_from([0, 3, 7, 10]))
    with_it = forcing_core(share_forced, **options)
    without = forcing_core(share_forced, enable_jump_forward=False, **options)
    for core in (with_it, without):
        core.add(*map(copy_of, asked))
        core.run()
    assert with_it.tokens == without.tokens
    assert without.scheduler.stats().num_forced_tokens == 0
    for key, output in with_it.finished.items():
        assert output.finish is not None and without.finished[key].finish is not None
        ends = [core.finished[key].finish for core in (with_it, without)]
        assert len({(end.reason, end.stop_token_id) for end in ends if end is not None}) == 1


def test_steps_are_saved() -> None:
    core = forcing_core(10, block_size=8)
    core.add(make_request(prompt=[1, 2, 3], max_tokens=20, structured_output=JSON_OBJECT))
    assert core.run() == 3  # 8, 8 and 4 tokens
    stats = core.scheduler.stats()
    assert (stats.num_generated_tokens, stats.num_forced_tokens) == (20, 17)


def test_each_of_many_gets_its_last_token_however_much_the_others_lack() -> None:
    core = forcing_core(10, block_size=8, max_num_batched_tokens=6, max_num_seqs=6)
    core.add(
        *(
            make_request(f"r{i}", [i], max_tokens=20, structured_output=JSON_OBJECT)
            for i in range(6)
        )
    )
    while core.has_work():
        scheduled = core.schedule()
        assert 1 <= scheduled.num_scheduled_tokens <= 6
        if len(core.scheduler._queues.running) == 6 and scheduled.step_id > 1:
            assert len(scheduled.scheduled) == 6
        core.update(scheduled)
    assert {len(tokens) for tokens in core.tokens.values()} == {20}


def test_whoever_asks_for_more_than_tokens_takes_every_step() -> None:
    stopping = StoppingCriteria(max_tokens=9)
    for params, min_tokens in (
        (SamplingParams(num_logprobs=0), 0),
        (SamplingParams(allowed_token_ids=tuple(range(VOCAB_SIZE))), 0),
        (SamplingParams(bad_token_sequences=((1, 2),)), 0),
        (SamplingParams(), 9),
    ):
        core = forcing_core(10, block_size=8)
        limits = msgspec.structs.replace(stopping, min_tokens=min_tokens)
        core.add(Request("r", 0, [1], params, limits, JSON_OBJECT))
        assert core.run() == 9
        (output,) = core.finished.values()
        assert output.finish is not None
        assert output.finish.reason is FinishReason.LENGTH
