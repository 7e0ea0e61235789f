"""The executor that runs the model in this process."""

from collections.abc import Callable

import torch

from eyas import _core
from eyas.config import EngineConfig
from eyas.drafters.registry import create_drafter
from eyas.loading.checkpoint import Checkpoint
from eyas.loading.requantise import QuantisedWeights
from eyas.models.registry import load_model
from eyas.ops.base import Ops
from eyas.ops.native import NativeOps
from eyas.ops.reference import ReferenceOps
from eyas.runner.model_runner import ModelRunner
from eyas.tensors import Weights
from eyas.types import StepPlan, StepResult

_TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_AUTO_KV_DTYPE = "float16"


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
    ops = _create_ops(config)
    weights = watch(_read_weights(config, checkpoint, ops))
    target = load_model(checkpoint.config, weights, ops, "target")
    speculative = config.speculative
    drafter = create_drafter(speculative, target, ops) if speculative else None
    acceptance = speculative.acceptance if speculative else "exact"
    kept = config.kv_cache_dtype
    kv_dtype = _TORCH_DTYPES[_AUTO_KV_DTYPE if kept == "auto" else kept]
    return InprocExecutor(ModelRunner(target, drafter, ops, acceptance, kv_dtype))


def _read_weights(config: EngineConfig, checkpoint: Checkpoint, ops: Ops) -> Weights:
    if config.quantization is None:
        return checkpoint.weights
    if isinstance(ops, NativeOps):
        context = ops.context
    else:
        context = _core.Context(_core.instruction_sets()[0], 1)
    return QuantisedWeights(checkpoint.weights, config.quantization, context)


def _create_ops(config: EngineConfig) -> Ops:
    if config.ops == "reference":
        return ReferenceOps()
    dtype = None if config.dtype == "auto" else _TORCH_DTYPES[config.dtype]
    return NativeOps(dtype, config.activation_dtype, config.num_threads)
