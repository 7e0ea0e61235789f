"""One decoder layer: what it is made of, and how its parts follow each other.

A new kind of feed-forward block (mixture of experts) is a new FeedForwardSpec; a new arrangement of
norms is a new LayerSpec beside PreNormLayerSpec. Neither changes this file.
"""

from dataclasses import dataclass
from typing import Protocol

from eyas.layers.attention import Attention, AttentionPlace, AttentionSpec
from eyas.layers.norm import RMSNorm, load_rms_norm
from eyas.layers.source import Source
from eyas.ops.base import Ops, Value


class FeedForward(Protocol):
    """[T, H] -> [T, H]; a row's result depends on the row alone."""

    def __call__(self, x_TH: Value) -> Value: ...


class FeedForwardSpec(Protocol):
    def build(self, source: Source, prefix: str, hidden_size: int) -> FeedForward: ...


class Layer(Protocol):
    """The hidden states after the layer; writes the tokens' keys and values."""

    def __call__(self, x_TH: Value, place: AttentionPlace) -> Value: ...


class LayerSpec(Protocol):
    """How to build a layer, and its attention, which decides its KV group and rope."""

    @property
    def attention(self) -> AttentionSpec: ...

    def build(self, source: Source, prefix: str, hidden_size: int) -> Layer: ...


@dataclass(frozen=True, slots=True)
class PreNormLayerSpec:
    """A pre-norm layer: x + attention(norm(x)), then that + feed_forward(norm(that))."""

    attention: AttentionSpec
    feed_forward: FeedForwardSpec
    norm_eps: float

    def build(self, source: Source, prefix: str, hidden_size: int) -> "PreNormLayer":
        eps = self.norm_eps
        return PreNormLayer(
            source.ops,
            load_rms_norm(source, f"{prefix}.input_layernorm", hidden_size, eps),
            self.attention.build(source, prefix, hidden_size),
            load_rms_norm(source, f"{prefix}.post_attention_layernorm", hidden_size, eps),
            self.feed_forward.build(source, prefix, hidden_size),
        )


class PreNormLayer:
    """See PreNormLayerSpec."""

    def __init__(
        self,
        ops: Ops,
        attention_norm: RMSNorm,
        attention: Attention,
        feed_forward_norm: RMSNorm,
        feed_forward: FeedForward,
    ) -> None:
        self._ops = ops
        self._attention_norm = attention_norm
        self._attention = attention
        self._feed_forward_norm = feed_forward_norm
        self._feed_forward = feed_forward

    def __call__(self, x_TH: Value, place: AttentionPlace) -> Value:
        x_TH = self._ops.add(x_TH, self._attention(self._attention_norm(x_TH), place))
        return self._ops.add(x_TH, self._feed_forward(self._feed_forward_norm(x_TH)))
