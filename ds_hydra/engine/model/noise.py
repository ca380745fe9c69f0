"""Noise that no strategy changes: dropout in adapters, and NEFTune's noise in the embedding.

[Note: Noise by counting]
A generator with a state gives other numbers to a token when another strategy packs, cuts or repeats
its micro-batch. So each number is a hash of what it is for: the seed and the iteration, the
sequence (its position in the global batch) and the token in it, the layer (its name) and the
feature. Ranks then agree without exchanging anything, and a layer that is computed again, in
backward or on another stage, finds the same mask. (Salmon et al. 2011 call such generators
counter-based; ours is shorter than their Philox: 64 bits of the token and 64 of layer and feature,
each well mixed, are joined and mixed by two multiplications. Four features share a hash of 64 bits,
16 bits each, so rates are multiples of 1 / 65,536.)

Legend: T tokens of a packed micro-batch or of this rank's part of one, C features.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn

from ds_hydra.engine.model.current_micro_batch import current_micro_batch
from ds_hydra.errors import UnsupportedModelError
from ds_hydra.zero_link.layout import ParamSpec, Slicing

_BITS, _LANES = 16, 4
_RATES = 1 << _BITS
_WEYL, _FIRST, _SECOND = (
    c - (1 << 64) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
"""Odd constants of SplitMix64 (Steele et al. 2014, Fig. 16), as signed numbers."""


def token_seeds(seed: int, iteration: int, sequence: int, begin: int, end: int) -> Tensor:
    """[end - begin] int64: seeds of the noise of tokens `begin` to `end` of a sequence."""
    text = f"{seed} {iteration} {sequence}".encode()
    # As SplitMix64 counts: steps of an odd constant, each mixed
    return _mixed(torch.arange(begin, end) * _WEYL + _number(text))


def keep_mask(seeds_T: Tensor, layer: int, rate: float, first: int, num_features: int) -> Tensor:
    """[T, C] bool: which of the features from `first` on dropout of `rate` keeps in the layer of
    number `layer` (`layer_number`).
    """
    # Hashes are of groups of features: a slice that begins inside of one cuts it
    begin, end = first // _LANES, -(-(first + num_features) // _LANES)
    lanes = _lanes(seeds_T, layer, begin, end).narrow(-1, first - begin * _LANES, num_features)
    # Of 65,536 signed values the lowest are dropped, a share of `rate`
    least = round(rate * _RATES) - _RATES // 2
    if least > torch.iinfo(torch.int16).max:  # a rate of 1
        return torch.zeros_like(lanes, dtype=torch.bool)
    return lanes >= least


def uniform_noise(seeds_T: Tensor, layer: int, num_features: int) -> Tensor:
    """[T, C] fp32 between -1 and 1, evenly spread over 65,536 values."""
    lanes = _lanes(seeds_T, layer, 0, -(-num_features // _LANES))
    # Half a step up: the values lie evenly around 0
    return lanes[..., :num_features].float().add_(0.5).div_(_RATES // 2)


def layer_number(name: str) -> int:
    """Hash of a layer's `name`, by which its noise differs from that of other layers."""
    return _number(name.encode())


class TokenDropout(nn.Dropout):
    """Dropout by [Note: Noise by counting]; none where the current micro-batch has no seeds, as
    outside training.
    """

    layer: int
    spec: ParamSpec
    """The weight that reads the dropped features."""
    tp: Any
    """The TP group, of which a rowwise weight has a part of the features."""

    @torch.compiler.disable
    def forward(self, input: Tensor) -> Tensor:
        """`input` [..., C] of all tokens of the micro-batch, with features dropped."""
        micro_batch = current_micro_batch()
        if micro_batch is None or micro_batch.token_seeds_T is None or not self.p:
            return input
        seeds_T = micro_batch.token_seeds_T
        # Of experts, for example, which see the tokens that chose them
        if input.shape[:-1].numel() != seeds_T.numel():
            raise UnsupportedModelError(
                f"dropout before {self.spec.fqn} sees {input.shape[:-1].numel()} of {seeds_T.numel()} tokens of a "
                "micro-batch, so it cannot know which; set lora_dropout to 0, or leave the layer out of target_modules"
            )
        is_cut = self.spec.slicing is Slicing.ROWWISE
        # A rowwise weight reads a part of the features: its mask begins at the part's place
        first = self.spec.slice_region(self.tp.size, self.tp.rank).col if is_cut else 0
        keep = keep_mask(seeds_T, self.layer, self.p, first, input.shape[-1])
        # The rate that the mask has, not the one that was asked for: no bias by rounding
        kept = 1 - round(self.p * _RATES) / _RATES
        dropped: Tensor = _Drop.apply(input, keep.view(input.shape), 1 / kept if kept else 0.0)
        return dropped


def count_noise(base: nn.Module, tp: Any, spec_of: dict[tuple[nn.Module, str], ParamSpec]) -> bool:
    """Make dropout of adapters in `base` one by counting; whether there is any.

    A rate that is 0 at the start stays out: `peft` has no dropout module then.
    """
    found = False
    for name, module in base.named_modules():
        for adapter, dropout in getattr(module, "lora_dropout", {}).items():
            if isinstance(dropout, nn.Dropout):
                # The same object: between passes it has the user's class again, and always its rate
                dropout.__class__ = TokenDropout
                dropout.layer = layer_number(f"{name}.{adapter}")
                dropout.spec = spec_of[module.lora_A[adapter], "weight"]
                dropout.tp = tp
                found = True
    return found


def add_neftune(output: Tensor, alpha: float) -> Tensor:
    """Add NEFTune's noise (Jain et al. 2023, Alg. 1) to the embedding's `output` [..., T, C]. It is
    uniform, at most `alpha` / sqrt(L C) for a token of a sequence of L tokens. Micro-batches
    without seeds get none.
    """
    micro_batch = current_micro_batch()
    if not alpha or micro_batch is None or micro_batch.token_seeds_T is None:
        return output
    num_features = output.shape[-1]
    noise_TC = uniform_noise(micro_batch.token_seeds_T, layer_number("neftune"), num_features)
    noise_TC *= alpha * (micro_batch.token_lengths_T * num_features).rsqrt().unsqueeze(-1)
    return output + noise_TC.to(output.dtype)


class _Drop(torch.autograd.Function):
    """`input` where `keep`, times `scale`; one byte a feature is kept for backward."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, keep: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(keep)
        ctx.scale = scale
        return (input * keep).mul_(scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (keep,) = ctx.saved_tensors
        return (grad * keep).mul_(ctx.scale), None, None


def _lanes(seeds_T: Tensor, layer: int, begin: int, end: int) -> Tensor:
    """[T, 4 (end - begin)] int16, any value as probable as another: a hash of each token and group
    of features.
    """
    columns = _mixed(torch.arange(begin, end, device=seeds_T.device) * _WEYL + layer)
    # Xor alone leaves patterns at corners of rectangles: the two products mix them
    bits = seeds_T.unsqueeze(-1) ^ columns
    bits.mul_(_FIRST)
    # This shift copies the sign and so loses one bit of 64, which lanes of 16 do not show
    bits ^= bits >> 32
    bits.mul_(_SECOND)
    return bits.view(torch.int16)


def _number(text: bytes) -> int:
    """64 bits of a digest, as a signed number."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big", signed=True)


def _mixed(x: Tensor) -> Tensor:
    """SplitMix64's finaliser of each of `x`; int64, which wraps around."""
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """`x >> bits` with zeros from the left."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
