"""Memory of a scheme on a rank, and the length of micro-batches that follows: App. B.1 of
Hydraulis, and what it leaves out. Lengths are tokens, sizes bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from ds_hydra.errors import HydraConfigError
from ds_hydra.strategy.schemes.scheme import Scheme, stage_layers

OPTIMIZER_BYTES = 4 + 8 + 4
"""Bytes per parameter at its owner: fp32 master, two Adam moments, gradient. DeepSpeed's step takes
4 more for one sub-group at a time, when activations are gone.
"""

GRADIENT_BYTES = 4
"""Bytes per element of a pulled slice, and of a ZeRO-3 shard: its fp32 gradient."""
GATHER_WINDOW = 2
"""Gathered layers that are with a rank at any time: the one that runs and the next one."""

EMBEDDING_BYTES_PER_ELEMENT = 16
"""`e` of App. B.1: bytes of weights, gradients and optimizer states per embedding element."""

SP_ACTIVATIONS = 1.05
"""Activations of a sequence shard of a micro-batch over its share of the micro-batch's: attention's
output is kept on both sides of an exchange. Measured on a Llama of 4 heads.
"""
SP_ACTIVATIONS_REPEATED = 1.1
"""The same where key-value heads may be repeated, because there are fewer of them than query heads.
"""

_LOGARITHM_BYTES = 4

_ELEMENT_BYTES = 2
"""Bytes of a number in 16 bit, where a profile does not say."""

ROW_TOLERANCE = 0.02
"""Share by which a row of a micro-batch may have more tokens than its part."""

MOST_KEY_VALUE_PARTS = 4
"""Parts of some heads that SP exchanges and CP gathers, each beside attention to the one before."""


def key_value_parts(num_heads: int, most: int) -> list[int]:
    """Key-value heads of each part, at most `most` parts, each about twice the one before.

    >>> key_value_parts(32, 4), key_value_parts(8, 4), key_value_parts(1, 4)
    ([2, 4, 9, 17], [1, 1, 2, 4], [1])
    """
    number = max(1, min(num_heads, most))
    ends = [0]
    for part in range(1, number + 1):
        even = round(num_heads * (2**part - 1) / (2**number - 1))
        # One head at least for this part, and for each of those that follow
        ends.append(min(max(even, ends[-1] + 1), num_heads - (number - part)))
    return [end - begin for begin, end in pairwise(ends)]


def activation_share(scheme: Scheme, key_value_share: float = 1.0) -> float:
    """Share of a micro-batch's activations, A L H S, that one rank keeps under `scheme`, of a model
    with so many key-value heads a query head.
    """
    of_sp = SP_ACTIVATIONS if key_value_share == 1 else SP_ACTIVATIONS_REPEATED
    of_sp = of_sp if scheme.sp > 1 else 1.0
    of_cp = 1 + ROW_TOLERANCE if scheme.cp > 1 else 1.0
    return of_sp * of_cp / scheme.ranks_per_stage


def ordered_share(scheme: Scheme, multiprocessors: int, num_heads: int) -> float:
    """Bytes per token and hidden unit of the copies of the gradient of queries that attention's
    backward adds up in one order: as many as fill `multiprocessors` with one sequence. 0 where
    either is not known.
    """
    if not multiprocessors or not num_heads:
        return 0.0
    heads = max(1, num_heads // (scheme.sp * scheme.tp))
    return -(-multiprocessors // heads) * GRADIENT_BYTES / scheme.ranks_per_stage


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryModel:
    """Bytes that one rank needs under <TP,PP> on N devices for a packed micro-batch of S tokens
    (App. B.1).

    activations  L * (S / SP * H / TP) * A
    states       L * H^2 / N * B * alpha + (L / PP) * (H^2 / TP) * B * (1 - alpha)
    embedding    H * V / N * e * alpha + (H * V / TP) * e * (1 - alpha)

    with L = `num_layers`, H = `hidden_size`, V = `vocab_size`, A = `activation_bytes[tp]`,
    B = `state_bytes`, alpha = `sharded_fraction`, e = 16. Activations do not shrink with PP,
    because a 1F1B stage holds up to PP micro-batches of its L/PP layers. Ours: of SP ranks each has
    1/SP of every micro-batch, which costs `SP_ACTIVATIONS` times its share. Of
    CP ranks each has a row of it, and in one layer at a time keys and values of all rows,

    gathered     S * 2 K H / (SP TP) * i * (1 + f) * (1 + 1.5 / CP)

    with K = `key_value_share` heads a query head, and of the heads a share f in the largest part
    (`key_value_parts`).

    Ours: where a profile says how many tables of H V parameters embedding and head are (2, or 1
    that both use), e is what B is for a parameter, times these; of two, a stage of PP > 1 holds
    one.

    Ours: where attention's backward adds in one order on a device of M = `ordered_multiprocessors`,
    fp32 gradients of one layer's queries,

    copies       S / CP * H / (SP TP) * 4 * ceil(M SP TP / heads)

    Ours: `exchange_bytes` / TP of packed exchange buffers of two rounds, where they are counted.

    Ours: with ep a rank holds 1 / ep of a layer's experts, whole ones, which are `expert_fraction`
    of its parameters, and 1 / TP of the rest; shards are what they were.

    Ours: where all ranks gather each layer for every pass, with p = s / i parameters per layer and
    H^2, E = 2 H V of embedding and head, shards, window and exchange buffers of one round alone,

    states       (L H^2 B + H V e) / N * alpha                    shards, as above
                 + (two layers, or twice the head) / TP * 2 i     window, with its gradients

    and with one table for embedding and head, whose gradients add up,

    table        H V / TP * (i + 4)

    A profile that the engine measured says i + 16 bytes a parameter for the shards. The published
    constants have 12.5 there.

    Stage k of a scheme with `stages` or `ckpt` has n layers, m of them checkpointed, and at most PP
    - k micro-batches in flight:

    activations  (PP - k) * ((n - m) * S * H / TP * A + m * S * (H * i + K / TP))
                 + S * H / TP * A where m > 0, the layer that runs again; + S * V / TP * 2 i on the
                 last stage
    states       as above with n in place of L / PP

    with i = `input_bytes` of an element of a hidden state, which every rank of a TP group has whole
    (1 / TP of it with `tp_sequence_parallel`), and K = `attention_bytes`, attention's output and
    log-sum-exp, which do not run again (0 where all layers are checkpointed). Of layers that
    `offload` the host has these, `host_bytes` of a rank, and the device those of the last one that
    ran forward, or of the one below the layer that runs again, whose own are in A. That layer
    counts where n = m: else the last micro-batch's n - m others are gone before it runs. Logits and
    their gradient, for which other layers no longer leave room, come on top. MaxLen is that of the
    tightest stage. A of a TP degree already accounts for which activations TP shards.

    Where a pass is `forward_only` nothing waits for backward: of a micro-batch there are

    activations  S * H / TP * A        the layer that runs, by what it would keep
                 + 2 * S * H * i       hidden states, before and after
                 + S * V / TP * 2 i    logits, with a part of them in fp32

    or as much as in training, where that is less. States stay as they are.

    Where a profile says that head and loss run in chunks, a rank has logits of one chunk at a time,

    logits       min(S * V / TP * i, `logit_chunk_bytes`)

    in place of those of all tokens.
    """

    num_layers: int
    hidden_size: int
    vocab_size: int
    activation_bytes: Mapping[int, float]
    state_bytes: float
    sharded_fraction: float
    memory_bytes: int
    reserved_bytes: int
    safety_margin_bytes: int
    slice_bytes: float = 0.0
    input_bytes: float = 0.0
    tp_sequence_parallel: bool = False
    devices_per_node: int = 8
    exchange_bytes: float = 0.0
    key_value_share: float = 1.0
    expert_fraction: float = 0.0
    vocabulary_tables: float = 0.0
    ordered_multiprocessors: int = 0
    num_heads: int = 0
    attention_width: float = 0.0
    """Features of all attention heads; 0: the hidden size."""
    logit_chunk_bytes: float = 0.0
    host_bytes: float = math.inf
    """Memory of the host that a rank may fill with what layers offload."""
    forward_only: bool = False

    def knows(self, scheme: Scheme) -> bool:
        """Whether it has the memory of `scheme`."""
        says_inputs = self.input_bytes > 0 or not (scheme.ckpt or scheme.gather)
        says_slices = self.slice_bytes > 0 or not scheme.gather
        return scheme.tp in self.activation_bytes and says_inputs and says_slices

    @property
    def usable_bytes(self) -> int:
        """Bytes that a rank may fill."""
        return self.memory_bytes - self.safety_margin_bytes - self.reserved_bytes

    @property
    def sharded_bytes(self) -> float:
        """Bytes of states that all ranks share, whatever the scheme."""
        return self._all_state_bytes() * self.sharded_fraction

    @property
    def sharded_bytes_per_param(self) -> float | None:
        """The same of a parameter of a layer; None where the profile does not say how many there
        are.
        """
        if not self.slice_bytes or not self.input_bytes:
            return None
        return self.state_bytes * self.sharded_fraction / (self.slice_bytes / self.input_bytes)

    def rank_bytes(self, scheme: Scheme, num_devices: int, micro_batch_tokens: int) -> float:
        """Bytes of one rank (left side of App. B.1, without reserved and safety margin)."""
        chunk = min(micro_batch_tokens * self._chunk_bytes(scheme), self.logit_chunk_bytes)
        return chunk + max(
            states + micro_batch_tokens * per_token
            for states, per_token in self._stages(scheme, num_devices)
        )

    def max_len_tokens(self, scheme: Scheme, num_devices: int) -> int:
        """MaxLen(P): longest packed micro-batch that fits; 0 or less where the states alone do not
        fit.
        """
        budget, chunk = self.usable_bytes, self._chunk_bytes(scheme)
        found = []
        for states, per_token in self._stages(scheme, num_devices):
            in_one = int((budget - states) // (per_token + chunk))
            in_several = int((budget - states - self.logit_chunk_bytes) // per_token)
            # Of two bounds of a sum with a minimum in it the larger one holds
            found.append(max(in_one, in_several))
        # Without backward nothing is kept for later, in the host or elsewhere
        if scheme.offload and self.host_bytes < math.inf and not self.forward_only:
            found.append(int(self.host_bytes // self.offloaded_bytes(scheme)))
        return min(found)

    def offloaded_bytes(self, scheme: Scheme) -> float:
        """Bytes per token that a rank keeps in the host's memory, of the stage with most."""
        if not scheme.offload:
            return 0.0
        stages = stage_layers(scheme, self.num_layers)
        most = max(stage.micro_batches_in_flight * stage.num_checkpointed for stage in stages)
        return most * self.checkpointed_bytes(scheme)

    def checkpointed_bytes(self, scheme: Scheme) -> float:
        """Bytes per token that a checkpointed layer keeps, wherever."""
        num_ranks = scheme.ranks_per_stage if self.tp_sequence_parallel else scheme.num_shards
        kept = self.hidden_size / num_ranks * self.input_bytes
        if scheme.keeps_attention(self.num_layers):
            kept += self.attention_bytes / scheme.ranks_per_stage
        return kept

    def _stages(self, scheme: Scheme, num_devices: int) -> list[tuple[float, float]]:
        """Bytes of states, and per token, of each stage that could be the tightest."""
        stages = self._training_stages(scheme, num_devices)
        if not self.forward_only:
            return stages
        forward = self._forward_bytes_per_token(scheme)
        return [(states, min(per_token, forward)) for states, per_token in stages]

    def _forward_bytes_per_token(self, scheme: Scheme) -> float:
        element = self.input_bytes or _ELEMENT_BYTES
        num_ranks = scheme.ranks_per_stage if self.tp_sequence_parallel else scheme.num_shards
        hidden = 2 * self.hidden_size / num_ranks * element
        logits = self._logit_bytes(scheme, element)
        return self._layer_bytes_per_token(scheme) + self._gathered_bytes(scheme) + hidden + logits

    def _chunk_bytes(self, scheme: Scheme) -> float:
        """Bytes per token of a micro-batch that is one chunk."""
        if not self.logit_chunk_bytes:
            return 0.0
        return self.vocab_size / scheme.ranks_per_stage * (self.input_bytes or _ELEMENT_BYTES)

    def _logit_bytes(self, scheme: Scheme, element: float) -> float:
        """Bytes per token of a micro-batch whose logits are there all at once."""
        if self.logit_chunk_bytes:
            return 0.0
        return self.vocab_size / scheme.ranks_per_stage * 2 * element

    def _training_stages(self, scheme: Scheme, num_devices: int) -> list[tuple[float, float]]:
        layer = self._layer_bytes_per_token(scheme)
        if not scheme.stages and not scheme.ckpt:
            layers = self.num_layers / scheme.pp
            # PP micro-batches of L / PP layers are in flight at the first stage: L, whatever PP is
            per_token = self.num_layers * layer + self._in_one_layer_bytes(scheme)
            return [(self._state_bytes(scheme, num_devices, layers), per_token)]
        if scheme.ckpt and not self.input_bytes:
            raise HydraConfigError(
                f"scheme {scheme}: the profile does not say what a checkpointed layer keeps; add "
                "input_bytes_per_token_per_layer_per_hidden to its memory (2 where hidden states are 16 bit), or "
                "measure it anew"
            )
        kept = self.checkpointed_bytes(scheme)
        again = self._logit_bytes(scheme, self.input_bytes)
        on_device = 0.0 if scheme.offload else kept
        stages = []
        for stage in stage_layers(scheme, self.num_layers):
            whole = stage.num_layers - stage.num_checkpointed
            per_token = stage.micro_batches_in_flight * (
                whole * layer + stage.num_checkpointed * on_device
            )
            if stage.num_checkpointed:
                # The layer that runs again. Whole layers beside offloaded ones are gone by then and
                # leave more than it needs
                per_token += 0.0 if scheme.offload and whole else layer
                # One layer at a time has on the device what is on its way to the host or back
                per_token += kept if scheme.offload else 0.0
            per_token += self._in_one_layer_bytes(scheme)
            per_token += again if stage.is_last else 0.0
            stages.append((self._state_bytes(scheme, num_devices, stage.num_layers), per_token))
        return stages

    @property
    def attention_bytes(self) -> float:
        """Bytes per token of a layer's attention that a checkpointed layer keeps beside its input:
        the output, and in fp32 the logarithm of each head's sum.
        """
        width = self.attention_width or self.hidden_size
        return width * (self.input_bytes or _ELEMENT_BYTES) + _LOGARITHM_BYTES * self.num_heads

    def _layer_bytes_per_token(self, scheme: Scheme) -> float:
        if scheme.tp not in self.activation_bytes:
            raise HydraConfigError(
                f"scheme {scheme}: the profile has no activation bytes for TP {scheme.tp}; "
                f"it has TP {sorted(self.activation_bytes)}"
            )
        share = activation_share(scheme, self.key_value_share)
        return self.hidden_size * share * self.activation_bytes[scheme.tp]

    def _in_one_layer_bytes(self, scheme: Scheme) -> float:
        """Bytes per token of a micro-batch that the layer that runs takes besides."""
        share = ordered_share(scheme, self.ordered_multiprocessors, self.num_heads)
        return self._gathered_bytes(scheme) + self.hidden_size * share

    def _gathered_bytes(self, scheme: Scheme) -> float:
        """Bytes per token of a micro-batch: keys and values of all rows, in the layer that runs."""
        if scheme.cp == 1:
            return 0.0
        numbers = 2 * self.key_value_share * self.hidden_size / (scheme.sp * scheme.tp)
        parts = self.key_value_parts(scheme)
        # All parts are gathered before attention to one; one at a time has its gradient. What a row
        # sends of each, gets back and has on its own is half as much again of a row
        copies = (1 + max(parts) / sum(parts)) * (1 + 1.5 / scheme.cp)
        return copies * numbers * (self.input_bytes or _ELEMENT_BYTES)

    def key_value_parts(self, scheme: Scheme) -> list[int]:
        """Key-value heads of the parts that SP exchanges, or CP gathers, where micro-batches are
        large; one part where nothing says how many heads there are.
        """
        own = self.num_heads * self.key_value_share / (scheme.sp * scheme.tp)
        return key_value_parts(max(1, int(own)), MOST_KEY_VALUE_PARTS)

    def _num_params(self) -> tuple[float, float]:
        """Parameters of a layer, and of embedding and head."""
        if not self.slice_bytes or not self.input_bytes:
            raise HydraConfigError(
                "the profile does not say how large gathered layers are; add slice_bytes_per_layer_per_hidden2 and "
                "input_bytes_per_token_per_layer_per_hidden to its memory (24 and 2 for LLaMA 7B in 16 bit), or "
                "measure it anew"
            )
        layer = self.slice_bytes / self.input_bytes * self.hidden_size**2
        return layer, 2.0 * self.hidden_size * self.vocab_size

    def _state_bytes(self, scheme: Scheme, num_devices: int, num_layers: float) -> float:
        if scheme.gather:
            layer, ends = self._num_params()
            layer *= self._held_share(scheme)
            # Weights and their gradients of one micro-batch
            each = 2 * self.input_bytes / scheme.tp
            # Nothing of a stage stays between its uses, so shards, window and buffers are all
            sharded = self._all_state_bytes() / num_devices * self.sharded_fraction
            exchanged = self._one_round_bytes(layer, ends / 2) / scheme.tp
            if scheme.hpz:
                sharded += self.on_node_bytes(self.num_layers * layer + ends, num_devices)
            return sharded + self._gathered_states(layer, ends / 2, each) + exchanged
        sharded = self._all_state_bytes() / num_devices
        tables = self.vocabulary_tables
        # Embedding and head are of different stages; one table for both is on both
        if scheme.pp > 1:
            tables = min(tables, max(1.0, tables / 2))
        held = self._all_state_bytes(self._held_share(scheme) * num_layers, tables) / scheme.tp
        states = sharded * self.sharded_fraction + held * (1 - self.sharded_fraction)
        return states + self.exchange_bytes / scheme.tp

    def _gathered_states(self, layer: float, table: float, each: float) -> float:
        """Bytes of two slots in which layers take turns, and with them embedding and head. A table
        that both use stays instead, with sums of its gradients.
        """
        if 0 < self.vocabulary_tables < 2:
            # In units of `each`, which is 2 i / TP
            kept = (self.input_bytes + GRADIENT_BYTES) / (2 * self.input_bytes) * table
            return (GATHER_WINDOW * layer + kept) * each
        # A slot is as large as the largest unit that takes its turn in it
        with_table = max(layer, table)
        # Embedding, L layers, head: both are in the first slot where L is odd
        return (with_table + (layer if self.num_layers % GATHER_WINDOW else with_table)) * each

    def on_node_bytes(self, num_params: float, num_devices: int) -> float:
        """A rank's share of so many weights, of those that its node has from others; in the node
        with the fewest ranks.
        """
        per_node = min(self.devices_per_node, num_devices)
        # The last node may be smaller, and its ranks then keep more each
        fewest = num_devices % per_node or per_node
        element = self.input_bytes or _ELEMENT_BYTES
        return num_params * element / fewest * (1 - fewest / num_devices)

    def _one_round_bytes(self, layer: float, table: float) -> float:
        """Bytes of the largest exchange buffers of one round: gathered layers keep one round in
        flight. A quarter more is for what is relayed to a node, and for sums in fp32.
        """
        # `exchange_bytes` are two rounds: that of a layer, and beside it the largest
        largest = max(layer, table)
        return 1.25 * self.exchange_bytes * largest / (layer + largest)

    def _held_share(self, scheme: Scheme) -> float:
        """Share of a layer that a TP group of a stage holds, times TP / EP for its experts where
        ranks share whole ones.
        """
        # Multiplied by the parameters / TP of a rank: experts then count 1 / EP
        return 1 - self.expert_fraction * (1 - scheme.tp / scheme.ep) if scheme.ep > 1 else 1.0

    def _all_state_bytes(
        self, num_layers: float | None = None, tables: float | None = None
    ) -> float:
        """States of so many layers and tables of the vocabulary, all if None."""
        layers = self.num_layers if num_layers is None else num_layers
        tables = self.vocabulary_tables if tables is None else tables
        per_element: float = EMBEDDING_BYTES_PER_ELEMENT
        if tables and self.slice_bytes and self.input_bytes:
            # Bytes of a parameter by those of a layer: both are given for each H^2
            per_element = tables * self.state_bytes / (self.slice_bytes / self.input_bytes)
        embedding = self.hidden_size * self.vocab_size * per_element
        return layers * self.hidden_size**2 * self.state_bytes + embedding
