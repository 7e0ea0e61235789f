"""Engines on tiny random models, with KV slots poisoned wherever nothing true is kept."""

import functools
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from checkpoints import EOS_ID, save_tiny_hf

from eyas.drafters.base import Drafter
from eyas.engine.engine import Engine, EngineOptions
from eyas.engine.output import RequestOutput
from eyas.engine.scheduler import SchedulerOptions
from eyas.executor.inproc import InprocExecutor
from eyas.loading.checkpoint import open_checkpoint
from eyas.models.base import Model
from eyas.models.registry import load_model
from eyas.ops.base import Ops
from eyas.ops.native import NativeOps
from eyas.runner.model_runner import ModelRunner
from eyas.sampling.params import SamplingParams
from eyas.types import StepPlan, StepResult

MakeDrafter = Callable[[Model, Ops], Drafter]

_FOLDER = tempfile.TemporaryDirectory(prefix="eyas-tests-")


@functools.cache
def tiny_checkpoint(
    model_type: str, seed: int, overrides: tuple[tuple[str, Any], ...] = ()
) -> Path:
    return save_tiny_hf(Path(_FOLDER.name), model_type, seed, **dict(overrides))


@functools.cache
def tiny_target(
    model_type: str,
    seed: int,
    overrides: tuple[tuple[str, Any], ...] = (),
    owner: str = "target",
    num_threads: int | None = None,
) -> tuple[Model, Ops]:
    """A loaded tiny model; it has no state of its own, so tests may share it."""
    ops = NativeOps(num_threads=num_threads)
    checkpoint = open_checkpoint(str(tiny_checkpoint(model_type, seed, overrides)))
    return load_model(checkpoint.config, checkpoint.weights, ops, owner), ops


class PoisonedExecutor(InprocExecutor):
    """Before every step, fills with NaN each KV slot that holds no accepted token of a running
    request and is not findable in the prefix cache: free, rejected and padding slots."""

    engine: Engine

    def execute(self, plan: StepPlan) -> StepResult:
        self._poison()
        return super().execute(plan)

    def _poison(self) -> None:
        manager = self.engine.scheduler.kv
        size = manager.block_size
        for index, (group, pool) in enumerate(zip(manager.groups, manager.pools, strict=True)):
            keep = torch.zeros(pool.num_blocks * size, dtype=torch.bool)
            for block in range(pool.num_blocks):
                if pool.hash_of(block) is not None:
                    keep[block * size : (block + 1) * size] = True
            for request in self.engine.scheduler.running:
                holding = manager._holdings[request.request_id]
                table = holding.tables[index]
                length = request.num_computed if group.owner == "target" else holding.draft_length
                for i, block in enumerate(table.blocks, start=table.first):
                    valid = max(0, min(size, length - i * size))
                    keep[block * size : block * size + valid] = True
            free = ~keep.view(pool.num_blocks, size)
            for layer in self.runner.kv[index].layers:
                layer.keys[free] = float("nan")
                layer.values[free] = float("nan")


def make_engine(
    target: Model,
    ops: Ops,
    make_drafter: MakeDrafter | None = None,
    *,
    max_drafts: int = 4,
    acceptance: str = "exact",
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 128,
    block_size: int = 8,
    num_blocks: tuple[int, ...] | None = None,
    enable_prefix_caching: bool = True,
    poison: bool = True,
    kv_dtype: torch.dtype = torch.float32,
    eos_token_ids: tuple[int, ...] = (EOS_ID,),
) -> Engine:
    """``num_blocks`` overrides the pools' sizes, to force preemption."""
    drafter = make_drafter(target, ops) if make_drafter else None
    runner = ModelRunner(target, drafter, ops, acceptance, kv_dtype)
    executor = (PoisonedExecutor if poison else InprocExecutor)(runner)
    options = EngineOptions(
        vocab_size=target.vocab_size,
        eos_token_ids=eos_token_ids,
        limits=SchedulerOptions(max_num_seqs, max_num_batched_tokens, max_model_len),
        max_drafts=max_drafts if drafter else None,
        block_size=block_size,
        kv_cache_memory=32 << 20,
        enable_prefix_caching=enable_prefix_caching,
    )
    engine = Engine(executor, None, options, num_blocks=num_blocks)
    if isinstance(executor, PoisonedExecutor):
        executor.engine = engine
    return engine


def run(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    arrivals: Sequence[int] | None = None,
) -> list[RequestOutput]:
    """Run all requests to their end; request i is added before step ``arrivals[i]`` (default 0).
    The block pool's integrity is checked after every step, and everything is free at the end."""
    arrivals = arrivals or [0] * len(prompts)
    outputs: dict[str, RequestOutput] = {}
    step = 0
    while len(outputs) < len(prompts):
        for i, arrival in enumerate(arrivals):
            if arrival == step:
                engine.add_request(str(i), list(prompts[i]), params[i], output_kind="final_only")
        for output in engine.step():
            outputs[output.request_id] = output
        engine.check_integrity()
        step += 1
        assert step < 5000, "the engine makes no progress"
    engine.check_integrity()
    assert engine.scheduler.kv.num_used_blocks() == (0,) * len(engine.scheduler.kv.pools)
    return [outputs[str(i)] for i in range(len(prompts))]
