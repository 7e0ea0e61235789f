"""Scheduler: plans and commits checked step by step, with hand-made verdicts."""

import pytest

from eyas.engine.kv_manager import KVManager
from eyas.engine.request import Request, RequestStatus
from eyas.engine.scheduler import FinishDecision, Scheduler, SchedulerOptions
from eyas.kv_spec import KVGroupSpec
from eyas.sampling.rules import SamplingRules
from eyas.types import StepResult, TokenLogprobs, Verdict

TARGET = KVGroupSpec("target", 1, 1, 1)
DRAFT = KVGroupSpec("draft", 1, 1, 1)
WINDOW = KVGroupSpec("target", 1, 1, 1, window=4)


def make_request(name, num_prompt, max_length=100, max_drafts=0, first_token=0):
    prompt = tuple(range(first_token, first_token + num_prompt))
    return Request(name, prompt, None, SamplingRules(), 7, 1, max_length, max_drafts)


def make_scheduler(
    groups=(TARGET,),
    num_blocks=100,
    block_size=4,
    seqs=8,
    budget=64,
    max_model_len=100,
    chunked=True,
):
    kv = KVManager(groups, (num_blocks,) * len(groups), block_size, True)
    return Scheduler(SchedulerOptions(seqs, budget, max_model_len, chunked), kv)


def verdict(name, *tokens, drafts=(), draft_length=0, error=None):
    logprobs = tuple(TokenLogprobs((token,), (-1.0,), (1,)) for token in tokens)
    num_accepted = max(len(tokens) - 1, 0)
    return Verdict(name, tokens, num_accepted, logprobs, (), drafts, draft_length, error)


def go_on(request, verdict):
    return None


def run(scheduler, *verdicts, decide=go_on):
    plan = scheduler.schedule()
    outcomes = scheduler.commit(plan, StepResult(verdicts), decide)
    scheduler.kv.check_integrity(scheduler.requests)
    return plan, outcomes


def spans(plan):
    return [(work.request_id, work.start, work.num_tokens) for work in plan.work]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((0, 8, 8, True), "max_num_seqs is 0"),
        ((1, 0, 8, True), "max_num_batched_tokens is 0"),
        ((1, 8, -1, True), "max_model_len is -1"),
        ((9, 8, 8, True), r"max_num_batched_tokens \(8\) is less than max_num_seqs \(9\)"),
        ((1, 8, 9, False), r"max_num_batched_tokens \(8\) is less than max_model_len \(9\)"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        SchedulerOptions(*options)


def test_impossible_requests_are_refused():
    scheduler = make_scheduler(num_blocks=5, max_model_len=24)
    with pytest.raises(ValueError, match="empty prompt"):
        scheduler.add(make_request("a", 0, 24))
    with pytest.raises(ValueError, match=r"24 prompt tokens.*leaves room for 23"):
        scheduler.add(make_request("a", 24, 24))
    # 22 tokens: the last has no KV, so 21 positions, 6 blocks.
    with pytest.raises(ValueError, match=r"may need 6 KV blocks of 4 tokens in group 0.*has 5"):
        scheduler.add(make_request("a", 3, 22))
    scheduler.add(make_request("a", 3, 21))
    with pytest.raises(ValueError, match="'a' is already running"):
        scheduler.add(make_request("a", 3, 21))
    assert len(scheduler.requests) == 1


def test_a_sliding_group_needs_only_the_window_and_a_chunk():
    scheduler = make_scheduler(groups=(WINDOW,), num_blocks=4, seqs=1, budget=8)
    scheduler.add(make_request("a", 90))  # 3 + 8 positions touch at most 4 blocks
    scheduler = make_scheduler(groups=(WINDOW,), num_blocks=3, seqs=1, budget=8)
    with pytest.raises(ValueError, match="may need 4 KV blocks"):
        scheduler.add(make_request("a", 90))


def test_a_prompt_in_chunks_then_decoding():
    scheduler = make_scheduler(seqs=2, budget=6)
    scheduler.add(make_request("a", 10))
    scheduler.add(make_request("b", 3, first_token=50))
    plan, _ = run(scheduler, verdict("a"))
    assert spans(plan) == [("a", 0, 6)]
    assert [new.request_id for new in plan.new] == ["a"]
    assert plan.new[0].token_ids == tuple(range(10))
    assert (plan.new[0].seed, plan.new[0].sample_index, plan.new[0].speculate) == (7, 1, False)
    plan, _ = run(scheduler, verdict("a", 90), verdict("b"))
    assert spans(plan) == [("a", 6, 4), ("b", 0, 2)]
    plan, outcomes = run(scheduler, verdict("a", 91), verdict("b", 92))
    assert spans(plan) == [("a", 10, 1), ("b", 2, 1)]
    assert plan.new == ()
    assert [(r.request_id, r.output_token_ids) for r, _ in outcomes] == [
        ("a", [90, 91]),
        ("b", [92]),
    ]


def test_without_chunks_a_prompt_waits_for_room_in_a_step():
    scheduler = make_scheduler(seqs=3, budget=10, max_model_len=10, chunked=False)
    scheduler.add(make_request("a", 6, 10))
    scheduler.add(make_request("b", 5, 10, first_token=50))
    scheduler.add(make_request("c", 1, 10, first_token=80))
    plan, _ = run(scheduler, verdict("a", 90))
    assert spans(plan) == [("a", 0, 6)]  # "c" would fit, but does not overtake
    plan, _ = run(scheduler, verdict("a", 91), verdict("b", 92), verdict("c", 93))
    assert spans(plan) == [("a", 6, 1), ("b", 0, 5), ("c", 0, 1)]


def test_drafts_are_verified_beside_a_prefill():
    scheduler = make_scheduler(groups=(TARGET, DRAFT))
    scheduler.add(make_request("a", 5, max_drafts=3))
    plan, _ = run(scheduler, verdict("a", 90, drafts=(1, 2, 3), draft_length=6))
    assert plan.work[0].max_drafts == 3
    scheduler.add(make_request("b", 9, first_token=50))
    plan, ((a, cut), _) = run(
        scheduler, verdict("a", 1, 2, 99, drafts=(4,), draft_length=9), verdict("b", 60)
    )
    assert spans(plan) == [("a", 5, 4), ("b", 0, 9)]
    assert plan.work[0].drafts == (1, 2, 3)
    assert plan.work[1].max_drafts == 0
    assert plan.work[1].tables[1].blocks == ()
    # Target: 9 positions. Draft: 10 known tokens if all are accepted, then 3 - 1 of its own.
    assert [len(table.blocks) for table in plan.work[0].tables] == [3, 3]
    assert cut.num_accepted == 2
    assert a.output_token_ids == [90, 1, 2, 99]
    assert (a.num_computed, a.num_tokens, a.drafts) == (8, 9, (4,))
    plan, _ = run(scheduler, verdict("a", 98, draft_length=10), verdict("b", 61))
    assert spans(plan) == [("a", 8, 2), ("b", 9, 1)]


def test_scarce_budget_trims_drafts_but_every_request_runs():
    scheduler = make_scheduler(seqs=3, budget=6)
    for name in "abc":
        scheduler.add(make_request(name, 2, max_drafts=4))
    run(scheduler, *(verdict(name, 9, drafts=(1, 2, 3, 4)) for name in "abc"))
    plan = scheduler.schedule()
    assert spans(plan) == [("a", 2, 4), ("b", 2, 1), ("c", 2, 1)]
    assert [work.drafts for work in plan.work] == [(1, 2, 3), (), ()]


def test_max_model_len_limits_drafts_and_max_length_does_not():
    scheduler = make_scheduler(max_model_len=20)
    scheduler.add(make_request("a", 12, max_length=14, max_drafts=4))
    plan, _ = run(scheduler, verdict("a", 9, drafts=(1, 2, 3, 4)))
    assert plan.work[0].max_drafts == 4
    plan = scheduler.schedule()
    # 12 .. 16 are verified; if all are accepted, 18 tokens are known, and one draft is of use.
    assert spans(plan) == [("a", 12, 5)]
    assert plan.work[0].max_drafts == 1

    scheduler = make_scheduler(max_model_len=16)
    scheduler.add(make_request("a", 12, max_length=16, max_drafts=4))
    plan, _ = run(scheduler, verdict("a", 9, drafts=(1, 2)))
    assert plan.work[0].max_drafts == 2  # 13 known, 2 drafts, and the token after them
    plan = scheduler.schedule()
    assert spans(plan) == [("a", 12, 3)]
    assert plan.work[0].max_drafts == 0


def test_a_stop_rule_keeps_some_tokens_and_finishes():
    scheduler = make_scheduler(block_size=1)
    scheduler.add(make_request("a", 3, max_drafts=3))
    scheduler.add(make_request("b", 3, first_token=50))
    run(scheduler, verdict("a", 90, drafts=(91, 92, 93)), verdict("b", 60))

    def decide(request, verdict):
        if request.request_id == "b":
            return None
        assert request.output_token_ids == [90]  # not yet taken
        assert verdict.tokens == (91, 92, 93, 94)
        return FinishDecision(2, "stop")

    _, ((request, cut), _) = run(
        scheduler, verdict("a", 91, 92, 93, 94), verdict("b", 61), decide=decide
    )
    assert request.output_token_ids == [90, 91, 92]
    assert (cut.tokens, len(cut.logprobs), cut.num_accepted) == ((91, 92), 2, 3)
    assert (request.status, request.finish_reason) == (RequestStatus.FINISHED, "stop")
    # What was cut off isn't published, what was kept is.
    probe = make_request("c", 9)
    probe.prompt_token_ids = (0, 1, 2, 90, 91, 92, 93, 94)
    assert scheduler.kv.find_hit(probe) == 6
    plan, _ = run(scheduler, verdict("b", 62))
    assert plan.dropped == ("a",)
    plan, _ = run(scheduler, verdict("b", 63))
    assert plan.dropped == ()


def test_an_error_finishes_its_request_alone_and_publishes_nothing():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 9))
    scheduler.add(make_request("b", 9, first_token=50))
    run(scheduler, verdict("a", error="no token survives"), verdict("b", 90))
    assert [request.request_id for request in scheduler.running] == ["b"]
    assert scheduler.kv.find_hit(make_request("c", 9)) == 0
    assert scheduler.kv.find_hit(make_request("c", 9, first_token=50)) == 8


def test_the_latest_to_arrive_is_preempted_and_resumes_at_its_output_position():
    scheduler = make_scheduler(num_blocks=4, max_model_len=16)
    scheduler.add(make_request("a", 7, 16))
    scheduler.add(make_request("b", 7, 16, first_token=50))
    run(scheduler, verdict("a", 90), verdict("b", 60))
    run(scheduler, verdict("a", 91), verdict("b", 61))
    plan, _ = run(scheduler, verdict("a", 92))  # both need a third block
    assert spans(plan) == [("a", 8, 1)]
    assert plan.dropped == ("b",)
    assert scheduler.num_preemptions == 1
    (b,) = scheduler.waiting
    assert (b.output_token_ids, b.num_computed, b.status) == ([60, 61], 0, RequestStatus.WAITING)
    scheduler.add(make_request("c", 1, 16))
    plan, _ = run(scheduler, verdict("a", 93))  # "c" doesn't overtake "b"
    assert spans(plan) == [("a", 9, 1)]
    run(scheduler, verdict("a", 94), decide=lambda request, _: FinishDecision(1, "length"))
    plan, _ = run(scheduler, verdict("b", 62), verdict("c", 30))
    # One of the two blocks of "b" was taken by "a": its tail, so its head is still a hit.
    assert spans(plan) == [("b", 4, 5), ("c", 0, 1)]
    assert plan.dropped == ("a",)
    assert plan.new[0].token_ids == (*range(50, 57), 60, 61)
    assert plan.new[0].num_prompt_tokens == 7
    assert (b.output_token_ids, b.num_cached_tokens) == ([60, 61, 62], 0)
    # The restart doesn't count as a query: users would take its hit for their own.
    assert (scheduler.kv.num_queried_tokens, scheduler.kv.num_hit_tokens) == (7 + 7 + 1, 0)


def test_a_failed_step_preempts_all_and_repeats_what_the_runner_was_told():
    scheduler = make_scheduler()
    for name in "abc":
        scheduler.add(make_request(name, 5, first_token=ord(name)))
    run(scheduler, *(verdict(name, 1) for name in "abc"))
    scheduler.abort("b")
    plan = scheduler.schedule()
    assert plan.dropped == ("b",)
    scheduler.fail_step(plan)
    scheduler.kv.check_integrity(scheduler.requests)
    assert scheduler.kv.num_used_blocks() == (0,)
    assert [request.request_id for request in scheduler.waiting] == ["a", "c"]
    plan, _ = run(scheduler, verdict("a", 2), verdict("c", 2))
    assert set(plan.dropped) == {"a", "b", "c"}
    assert [new.request_id for new in plan.new] == ["a", "c"]
    assert spans(plan) == [("a", 4, 2), ("c", 4, 2)]  # published before the failure


def test_a_stop_rule_that_raises_leaves_the_step_to_be_undone():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 5))
    plan = scheduler.schedule()

    def decide(request, verdict):
        raise RuntimeError

    with pytest.raises(RuntimeError):
        scheduler.commit(plan, StepResult((verdict("a", 1),)), decide)
    scheduler.fail_step(plan)
    scheduler.abort("a")
    scheduler.kv.check_integrity([])
    assert not scheduler.has_unfinished_requests()


def test_abort_of_a_waiting_request_tells_the_runner_nothing():
    scheduler = make_scheduler(seqs=1)
    scheduler.add(make_request("a", 5))
    scheduler.add(make_request("b", 5))
    run(scheduler, verdict("a", 1))
    assert scheduler.abort("b").finish_reason == "abort"
    assert scheduler.abort("b") is None
    assert scheduler.schedule().dropped == ()


def test_misuse_is_caught():
    scheduler = make_scheduler()
    with pytest.raises(AssertionError, match="nothing to schedule"):
        scheduler.schedule()
    scheduler.add(make_request("a", 5, max_drafts=2))
    plan = scheduler.schedule()
    with pytest.raises(AssertionError, match="neither committed nor failed"):
        scheduler.schedule()
    with pytest.raises(AssertionError, match="in flight"):
        scheduler.abort("a")
    for wrong in (
        verdict("b", 1),  # another request
        verdict("a"),  # the prompt ends here, so there must be a token
        verdict("a", 1, 2),  # accepted a draft that it didn't get
        verdict("a", 1, drafts=(1, 2, 3)),  # more drafts than asked for
    ):
        with pytest.raises(AssertionError):
            scheduler.commit(plan, StepResult((wrong,)), go_on)
    scheduler.commit(plan, StepResult((verdict("a", 1),)), go_on)
