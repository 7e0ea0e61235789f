"""The executor that runs the model in this process."""

from collections.abc import Callable

import torch

from eyas.config import EngineConfig
from eyas.drafters.registry import create_drafter
from eyas.loading.checkpoint import Checkpoint
from eyas.models.registry import load_model
from eyas.ops.base import Ops
from eyas.ops.reference import ReferenceOps
from eyas.ops.torch_cpu import TorchOps
from eyas.runner.model_runner import ModelRunner
from eyas.tensors import Weights
from eyas.types import StepPlan, StepResult

_TORCH_DTYPES = {
    "auto": torch.float32,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class InprocExecutor:
    """Runs each plan at once, in the caller's thread."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.groups = runner.groups
        self.kv_element_size = runner.kv_dtype.itemsize
        self.vocab_size = runner.target.vocab_size
        self.max_position = runner.target.max_position

    def allocate_kv(self, num_blocks: tuple[int, ...], block_size: int) -> None:
        self.runner.allocate_kv(num_blocks, block_size)

    def execute(self, plan: StepPlan) -> StepResult:
        return self.runner.execute(plan)

    def shutdown(self) -> None:
        """Nothing to stop: the memory goes with this object."""


def load_executor(
    config: EngineConfig,
    checkpoint: Checkpoint,
    watch: Callable[[Weights], Weights] = lambda weights: weights,
) -> InprocExecutor:
    """Load the target from ``checkpoint`` and the draft, if any. ``watch`` may wrap the target's
    weights, to show progress. ValueError, naming what is wrong, if something doesn't load."""
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    ops = _create_ops(config)
    target = load_model(checkpoint.config, watch(checkpoint.weights), ops, "target")
    speculative = config.speculative
    drafter = create_drafter(speculative, target, ops) if speculative else None
    acceptance = speculative.acceptance if speculative else "exact"
    kv_dtype = _TORCH_DTYPES[config.kv_cache_dtype]
    return InprocExecutor(ModelRunner(target, drafter, ops, acceptance, kv_dtype))


def _create_ops(config: EngineConfig) -> Ops:
    if config.ops == "reference":
        return ReferenceOps()
    return TorchOps(_TORCH_DTYPES[config.dtype])
