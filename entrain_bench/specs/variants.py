"""Models whose head runs otherwise than by default, as the framework's options say."""

from __future__ import annotations

from dataclasses import replace

from entrain_bench.specs.framework import LABELLED, FrameworkOptions
from entrain_bench.specs.layer import Layer
from entrain_bench.specs.model import ModelSpec
from entrain_bench.specs.module_layers import UNFUSED, language_head


def with_options(model: ModelSpec, framework: FrameworkOptions) -> ModelSpec:
    """The model with the head that the framework runs, what it recomputes, and what it freezes."""
    model = with_cross_entropy(model, framework.cross_entropy)
    model = with_labelled_head(model) if framework.head_tokens == LABELLED else model
    model = model.with_recomputation(framework.recompute_granularity)
    return model.with_frozen(framework.freeze)


def with_cross_entropy(model: ModelSpec, kind: str) -> ModelSpec:
    """The model whose LLM computes its loss by one of ``CROSS_ENTROPIES``."""
    if kind == UNFUSED:
        return model
    llm = model.llm
    head = language_head(llm.config, kind)
    if not llm.layers[-1].learns:
        head = head.frozen(passes_gradients=llm.layers[-1].backward_share > 0)
    return _with_head(model, head)


def with_labelled_head(model: ModelSpec) -> ModelSpec:
    """The model with logits and loss of labelled tokens only."""
    return _with_head(model, labelled_head(model.llm.layers[-1]))


def _with_head(model: ModelSpec, head: Layer) -> ModelSpec:
    changed = replace(model.llm, layers=(*model.llm.layers[:-1], head))
    return replace(model, modules=tuple(changed if module is model.llm else module for module in model.modules))


def labelled_head(head: Layer) -> Layer:
    """An LLM's head whose logits and loss are of labelled tokens only; its norm is of all tokens.

    It keeps the norm's input of all tokens and its output of those that have a label, here as if all had one.
    """
    norm = head.replicated_elementwise_bytes_per_token
    back = head.backward_elementwise_bytes_per_token
    logits = Layer(
        kind="logits",
        gemms=head.gemms,
        elementwise_bytes_per_token=head.elementwise_bytes_per_token - norm,
        num_elementwise_kernels=head.num_elementwise_kernels - 1,
        backward_elementwise_bytes_per_token=back and back - 2 * norm,
        num_gathers=1,
        gathered_width=head.gathered_width,
        hidden_size=head.hidden_size,
        activation_bytes_per_token=head.activation_bytes_per_token - head.replicated_bytes_per_token,
        whole_bytes_per_token=head.whole_bytes_per_token,
        fp32_bytes_per_token=head.fp32_bytes_per_token,
        cast_bytes_per_token=head.cast_bytes_per_token,
        recomputed=False,
        learns=head.learns,
        backward_share=head.backward_share,
    )
    return replace(
        head,
        gemms=(),
        elementwise_bytes_per_token=norm,
        num_elementwise_kernels=1,
        backward_elementwise_bytes_per_token=back and 2 * norm,
        gathered_width=0,
        activation_bytes_per_token=head.replicated_bytes_per_token,
        whole_bytes_per_token=0.0,
        fp32_bytes_per_token=0.0,
        cast_bytes_per_token=0.0,
        labelled=logits,
    )
