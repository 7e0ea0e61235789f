"""A decoder-only model as a declarative list of layers.

A model file reads its config into a DecoderSpec; ``build_decoder`` reads the checkpoint.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

from eyas.kv_spec import KVGroupSpec
from eyas.layers.attention import AttentionPlace, AttentionTemperature, local_shape
from eyas.layers.embedding import Embedding, load_embedding_and_head
from eyas.layers.layer import Layer, LayerSpec
from eyas.layers.linear import Linear
from eyas.layers.norm import RMSNorm, load_rms_norm
from eyas.layers.rope import Rope
from eyas.layers.source import Source
from eyas.models.base import ForwardBatch, LayerGroup
from eyas.ops.base import Array, AttentionShape, Handle, KVCache, Ops, Value
from eyas.tensors import Weights


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """``tied_head``: the output head is the embedding table."""

    vocab_size: int
    hidden_size: int
    max_position: int
    layers: tuple[LayerSpec, ...]
    final_norm_eps: float
    tied_head: bool


@dataclass(frozen=True, slots=True)
class _PlacedLayer:
    """A layer, its rope and temperature, and its place in the KV: layer ``index`` of group
    ``group``."""

    layer: Layer
    rope: Rope | None
    temperature: AttentionTemperature | None
    group: int
    index: int


class Decoder:
    """The Model protocol over any list of layers."""

    def __init__(
        self,
        spec: DecoderSpec,
        ops: Ops,
        groups: tuple[LayerGroup, ...],
        embedding: Embedding,
        layers: Sequence[_PlacedLayer],
        final_norm: RMSNorm,
        head: Linear,
    ) -> None:
        self.vocab_size = spec.vocab_size
        self.hidden_size = spec.hidden_size
        self.max_position = spec.max_position
        self.groups = groups
        self._ops = ops
        self._embedding = embedding
        self._layers = tuple(layers)
        self._temperatures = tuple(
            dict.fromkeys(p.temperature for p in layers if p.temperature is not None)
        )
        self._final_norm = final_norm
        self._forward = ops.compile(self._run)
        self._logits = ops.compile(head)

    def forward(self, batch: ForwardBatch, kv: Sequence[KVCache]) -> Array:
        """See Model.forward."""
        scales = [temperature.factors(batch.positions_T) for temperature in self._temperatures]
        return self._forward(batch.token_ids_T, batch.positions_T, *scales, *batch.plans, *kv)

    def logits(self, hidden_RH: Array) -> Array:
        """See Model.logits."""
        return self._logits(hidden_RH)

    def _run(self, ids_T: Value, positions_T: Value, *inputs: Handle) -> Value:
        num_scales, num_groups = len(self._temperatures), len(self.groups)
        plans, kv = inputs[num_scales:-num_groups], inputs[-num_groups:]
        scales = dict(zip(self._temperatures, inputs[:num_scales], strict=True))
        ropes = dict.fromkeys(placed.rope for placed in self._layers if placed.rope is not None)
        angles = {rope: self._ops.angles(rope.inv_freq, positions_T) for rope in ropes}
        x_TH = self._embedding(ids_T)
        for placed in self._layers:
            place = AttentionPlace(
                plan=plans[placed.group],
                kv=kv[placed.group],
                layer=placed.index,
                angles=None if placed.rope is None else angles[placed.rope],
                query_scale=None if placed.temperature is None else scales[placed.temperature],
            )
            x_TH = placed.layer(x_TH, place)
        return self._final_norm(x_TH)


def build_decoder(spec: DecoderSpec, weights: Weights, ops: Ops, owner: str) -> Decoder:
    """Read ``model.*`` and ``lm_head`` from ``weights``; ValueError if anything is left over."""
    source = Source(weights, ops)
    embedding, head = load_embedding_and_head(
        source, spec.vocab_size, spec.hidden_size, spec.tied_head
    )
    kinds = [(layer.attention.shape, layer.attention.chunk) for layer in spec.layers]
    order = list(dict.fromkeys(kinds))  # in order of first appearance
    layers = [
        _PlacedLayer(
            layer=layer.build(source, f"model.layers.{number}", spec.hidden_size),
            rope=layer.attention.rope,
            temperature=layer.attention.temperature,
            group=order.index(kinds[number]),
            index=kinds[:number].count(kinds[number]),
        )
        for number, layer in enumerate(spec.layers)
    ]
    final_norm = load_rms_norm(source, "model.norm", spec.hidden_size, spec.final_norm_eps)
    weights.finish()
    groups = tuple(
        _group(local_shape(kind[0], ops.parallel), kind[1], kinds.count(kind), owner)
        for kind in order
    )
    return Decoder(spec, ops, groups, embedding, layers, final_norm, head)


def _group(shape: AttentionShape, chunk: int | None, num_layers: int, owner: str) -> LayerGroup:
    assert owner in ("target", "draft"), owner
    kv = KVGroupSpec(
        owner=cast(Literal["target", "draft"], owner),
        num_layers=num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        window=shape.window,
        chunk=chunk,
    )
    return LayerGroup(kv, shape)
