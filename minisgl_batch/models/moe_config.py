"""What a config.json says of a mixture of experts, by architecture. Knows nothing of torch. Called by `config`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from minisgl_batch.models.config_file import ConfigFile


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """The sparse MLPs of a mixture of experts.

    Attributes:
        num_experts: of each sparse layer.
        top_k: how many of them a token goes through.
        intermediate_size: width of an expert.
        shared_intermediate_size: width of the gated expert that all tokens go through besides; None: there is none.
        renormalize: the weights of a token's experts are scaled to a sum of 1.
        is_sparse: per layer, whether its MLP is sparse.
        block: a sparse MLP's name in checkpoints.
        router: the router's name there.
        projections: the names of an expert's gate, up and down projections there; None: a layer's experts are one
            tensor each of gate and up, in turns, and of down projections.
        has_biases: router and experts have biases.
        clamped_swiglu: (alpha, limit) of an activation in silu's place; see `ClampedSwiglu`.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    shared_intermediate_size: int | None
    renormalize: bool
    is_sparse: tuple[bool, ...]
    block: str = "mlp"
    router: str = "gate"
    projections: tuple[str, str, str] | None = ("gate_proj", "up_proj", "down_proj")
    has_biases: bool = False
    clamped_swiglu: tuple[float, float] | None = None


def no_experts(_file: ConfigFile, _num_layers: int) -> None:
    """Of dense models."""


def qwen_moe(
    *, num_experts: int, top_k: int, intermediate_size: int, shared_intermediate_size: int | None
) -> Callable[[ConfigFile, int], MoEConfig]:
    """A reader of Qwen's configs; the arguments are what they may leave out.

    Sparse is every `decoder_sparse_step`-th layer, but for `mlp_only_layers`. A checkpoint has a shared expert if its
    architecture has a default for it.
    """

    def read(file: ConfigFile, num_layers: int) -> MoEConfig:
        step = file.count("decoder_sparse_step", 1)
        dense_layers = file.data.get("mlp_only_layers") or []
        if not isinstance(dense_layers, list) or any(layer not in range(num_layers) for layer in dense_layers):
            raise file.error("mlp_only_layers", f"must be a list of layers from 0 to {num_layers - 1}")
        shared = shared_intermediate_size
        return _checked(
            file,
            MoEConfig(
                num_experts=file.count(file.either("num_experts", "num_local_experts"), num_experts),
                top_k=file.count("num_experts_per_tok", top_k),
                intermediate_size=file.count("moe_intermediate_size", intermediate_size),
                shared_intermediate_size=shared and file.count("shared_expert_intermediate_size", shared),
                renormalize=file.flag("norm_topk_prob", False),
                is_sparse=tuple((i + 1) % step == 0 and i not in dense_layers for i in range(num_layers)),
            ),
        )

    return read


def read_mixtral(file: ConfigFile, num_layers: int) -> MoEConfig:
    """Mixtral's, whose layers are all sparse."""
    return _checked(
        file,
        MoEConfig(
            num_experts=file.count("num_local_experts", 8),
            top_k=file.count("num_experts_per_tok", 2),
            intermediate_size=file.count("intermediate_size"),
            shared_intermediate_size=None,
            renormalize=True,
            is_sparse=(True,) * num_layers,
            block="block_sparse_moe",
            projections=("w1", "w3", "w2"),
        ),
    )


def read_gpt_oss(file: ConfigFile, num_layers: int) -> MoEConfig:
    """gpt-oss', whose layers are all sparse."""
    return _checked(
        file,
        MoEConfig(
            num_experts=file.count("num_local_experts", 128),
            top_k=file.count("num_experts_per_tok", 4),
            intermediate_size=file.count("intermediate_size"),
            shared_intermediate_size=None,
            renormalize=True,  # a softmax of the best experts' logits alone is the same
            is_sparse=(True,) * num_layers,
            router="router",
            projections=None,
            has_biases=True,
            clamped_swiglu=(file.number("swiglu_alpha", 1.702), file.number("swiglu_limit", 7.0)),
        ),
    )


def _checked(file: ConfigFile, moe: MoEConfig) -> MoEConfig:
    if moe.top_k > moe.num_experts:
        raise file.error("num_experts_per_tok", f"{moe.top_k} is more than the {moe.num_experts} experts")
    return moe
