"""What a config.json says of weights in FP8, as vLLM, llm-compressor and transformers write it.

Knows nothing of torch. Called by `config`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NoReturn, get_args

import regex

from minisgl_batch.errors import InvalidParameterError, ModelError
from minisgl_batch.layers.fp8_config import BLOCK_SIZE, Fp8Config, Scales
from minisgl_batch.models.config_file import ConfigFile

KEYS = ("quantization_config", "compression_config")
_BLOCK = [BLOCK_SIZE, BLOCK_SIZE]
_MATCH_S = 0.1  # expressions with nested repetitions may take for ever


@dataclass(frozen=True)
class Quantization:
    """Which linear layers are in FP8, and how.

    Attributes:
        fp8: how those are.
        skipped: what the names of layers that aren't begin with.
        key: where the config says so.
    """

    fp8: Fp8Config
    skipped: tuple[regex.Pattern[str], ...] = ()
    key: str = ""

    def of(self, block: str, *layers: str, merged: str | None = None) -> Fp8Config | None:
        """How some layers are, which are one here; None: not in FP8.

        Args:
            block: where they are, such as "model.layers.0.mlp".
            layers: their names there.
            merged: their name as one.

        Raises:
            ModelError: some of them are and some aren't.
        """
        if merged is not None and self._skips(f"{block}.{merged}"):
            return None
        skipped = [layer for layer in layers if self._skips(f"{block}.{layer}")]
        if not skipped:
            return self.fp8
        if len(skipped) < len(layers):
            raise ModelError(
                f"{self.key}: {block}.{skipped[0]} isn't in FP8, but other layers that are computed together with it "
                f"are: of {', '.join(layers)} all have to be, or none"
            )
        return None

    def at_load(self) -> Quantization:
        """The same, put into FP8 while it is loaded."""
        return replace(self, fp8=replace(self.fp8, is_stored=False))

    def _skips(self, name: str) -> bool:
        try:
            return any(pattern.match(name, timeout=_MATCH_S) for pattern in self.skipped)
        except TimeoutError:
            raise ModelError(f"{self.key}: an expression takes too long to match {name}: write a simpler one") from None

    def check_tp_size(self, size: int, *widths: int) -> None:
        """Refuse a group of ranks that would cut blocks of input channels.

        Args:
            size: how many ranks.
            widths: the inputs of layers that split theirs.

        Raises:
            InvalidParameterError: names the width.
        """
        for width in widths if self.fp8.scales == "block" and size > 1 else ():
            if width // size % BLOCK_SIZE:
                raise InvalidParameterError(
                    "tp",
                    f"{size} ranks can't share a width of {width} whose FP8 scales are for {BLOCK_SIZE} channels each: "
                    f"a rank's {width // size} must be a multiple of that",
                )


QUANTIZED_AT_LOAD = Quantization(Fp8Config("channel", is_stored=False))


def read_quantization(file: ConfigFile) -> Quantization | None:
    """What the config says, if it says that weights are in FP8.

    Raises:
        ModelError: they are in a way that isn't supported; names the file and the key.
    """
    for key in KEYS:
        config = file.child(key)
        reader = None if config is None else _READERS.get(str(config.data.get("quant_method")))
        if config is not None and reader is not None:
            return reader(config)
    return None


def refuse_experts(file: ConfigFile) -> NoReturn:
    """Of a mixture of experts in FP8.

    Raises:
        ModelError: always; names the file and the key.
    """
    key = next(key for key in KEYS if file.data.get(key))
    raise file.error(
        key,
        "checkpoints of experts in FP8 aren't supported: use the one that this was made from, in bfloat16, float16 or "
        "float32",
    )


def _read_fp8(config: ConfigFile) -> Quantization:
    """transformers' and vLLM's own."""
    config.choice("activation_scheme", ("dynamic", "static"), "dynamic")
    config.choice("fmt", ("e4m3",), "e4m3")
    config.choice("scale_fmt", ("float",), "float")
    for key in ("dequantize", "modules_to_convert"):
        if config.data.get(key):
            raise config.error(key, "isn't supported")
    block = config.data.get("weight_block_size")
    if block is not None and block != _BLOCK:
        raise config.error("weight_block_size", f"only {_BLOCK} is supported, got {block!r}")
    key = config.either("modules_to_not_convert", "ignored_layers")
    # As transformers does: by the beginning, up to a dot, as a regular expression too, or by the end.
    patterns = [rf"(?:{name})(?:(?<=\.)|(?=\.|$))|.*{regex.escape(name)}$" for name in _names(config, key)]
    return _stored("tensor" if block is None else "block", patterns, config, key)


def _read_compressed_tensors(config: ConfigFile) -> Quantization:
    """llm-compressor's."""
    if config.data.get("format") != "float-quantized":
        raise config.error("format", f"only float-quantized is supported, got {config.data.get('format')!r}")
    transforms = config.child("transform_config")
    if transforms is not None and transforms.data.get("config_groups"):
        raise config.error("transform_config", "isn't supported")
    groups = config.child("config_groups")
    if groups is None or len(groups.data) != 1:
        raise config.error("config_groups", "must be one group of layers")
    (name,) = groups.data
    group = groups.child(name)
    weights = group and group.child("weights")
    activations = group and group.child("input_activations")
    if group is None or weights is None or activations is None:
        raise groups.error(name, "both weights and input_activations must be quantized")
    if group.data.get("targets") != ["Linear"]:
        raise group.error("targets", f"must be ['Linear'], got {group.data.get('targets')!r}")
    if group.data.get("output_activations"):
        raise group.error("output_activations", "isn't supported")
    for part in (weights, activations):
        for key, wanted in (("type", "float"), ("num_bits", 8), ("symmetric", True)):
            if part.data.get(key, wanted) != wanted:
                raise part.error(key, f"must be {wanted!r}, got {part.data[key]!r}")
    scales = weights.choice("strategy", ("tensor", "channel", "block"), "tensor")
    if scales == "block" and weights.data.get("block_structure") not in (_BLOCK, "128x128"):
        raise weights.error("block_structure", f"only {_BLOCK} is supported")
    grain = activations.choice("strategy", ("tensor", "token", "group"), "tensor")
    if (grain == "group") != (scales == "block") or (grain == "group" and activations.count("group_size") != 128):
        raise activations.error("strategy", f"group is supported for 128 channels and weights in blocks of {_BLOCK}")
    # Whole names, or regular expressions for their beginnings.
    names = _names(config, "ignore")
    patterns = [name[3:] if name.startswith("re:") else f"{regex.escape(name)}$" for name in names]
    return _stored(scales, patterns, config, "ignore")


_READERS: dict[str, Callable[[ConfigFile], Quantization]] = {
    "fp8": _read_fp8,
    "compressed-tensors": _read_compressed_tensors,
}
METHODS = tuple(_READERS)


def _stored(scales: str, patterns: list[str], config: ConfigFile, key: str) -> Quantization:
    skipped = tuple(_compiled(config, key, pattern) for pattern in patterns)
    kind = next(kind for kind in get_args(Scales) if kind == scales)
    return Quantization(Fp8Config(kind, is_stored=True), skipped, f"{config.path}: {config.prefix}{key}")


def _names(config: ConfigFile, key: str) -> list[str]:
    names = config.data.get(key) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise config.error(key, f"must be a list of layers, got {names!r}")
    return names


def _compiled(config: ConfigFile, key: str, pattern: str) -> regex.Pattern[str]:
    try:
        return regex.compile(pattern)
    except regex.error as error:
        raise config.error(key, f"{pattern!r} is no regular expression: {error}") from error
