"""The model's own forward over some of its layers: what stands in for layers of other stages, how
the sequences of a micro-batch pass, and layers that torch compiles.

[Note: What compiles]
`hydra.compile_layers` puts torch.compile around each decoder layer. Attention by a kernel is one
operator in its graph ([Note: One graph for all lengths]). Collectives of TP, SP and CP stay outside
(`torch.compiler.disable` where they are defined), to keep the order that the schedule gives them,
and so does attention that runs each sequence alone, whose lengths are no shapes. A layer compiles
once for each TP degree and kind of pass, with the tokens of a micro-batch as a symbolic dimension:
norms, rotary embedding, activation and residuals become few loops beside the matrix products. A
micro-batch of a single token compiles anew, because torch takes sizes of 1 for constants.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.fx.experimental._config
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

from ds_hydra.engine.model.current_micro_batch import (
    COMPILED,
    PackedMicroBatch,
    current_micro_batch,
    running,
)
from ds_hydra.engine.model.decoder_parts import (
    Binding,
    DecoderParts,
    bind,
    bindings_of,
    noting_calls,
)
from ds_hydra.engine.parallel.logit_transform import LogitTransform
from ds_hydra.engine.parallel.tensor_parallel import TensorParallel, hook_colwise
from ds_hydra.environment import count_own_cores
from ds_hydra.errors import HydraConfigError

_NUMBERS_OF_OUTPUTS = (0, 1, 2, 3)
"""Numbers of a layer's outputs that are tried: 0 for a tensor, else a tuple of as many."""
_FOREIGN = (RuntimeError, TypeError, ValueError, IndexError, AttributeError, KeyError)
"""Errors that a family's own code raises where a layer's outputs are not as it expects."""


AtHead = Callable[[Tensor, nn.Linear], Tensor]
"""(hidden states of the tokens that predict [t, H], head) -> loss."""


class StageEnd(Exception):
    """Leaves the model's forward after the last layer of a stage that is not the last one, or at
    its head.
    """

    def __init__(self, hidden: Tensor):
        super().__init__()
        self.hidden = hidden


class LayerPlaceholder(nn.Module):
    """Stands in for a layer of another stage.

    It answers as layers of the model do, with a tensor or with a tuple of `num_outputs` of which
    the hidden state is the first. The first one gives the hidden state of the stage before,
    whatever the model has made of its inputs; the one after a stage's own layers ends the forward;
    others pass the hidden state through.
    """

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.__dict__["_layer"] = layer  # no child of it
        self.num_outputs = 0
        self.entering: Tensor | None = None
        self.ends = False

    def __getattr__(self, name: str) -> Any:
        """Attributes that the model reads from its layer, as the kind of its attention."""
        return getattr(self.__dict__["_layer"], name)

    def forward(self, hidden_states: Tensor, *_args: Any, **_kwargs: Any) -> Any:
        """`hidden_states`, or those that enter the stage; raises StageEnd where the stage ends."""
        if self.ends:
            raise StageEnd(hidden_states)
        hidden = hidden_states if self.entering is None else self.entering
        return (hidden, None, None)[: self.num_outputs] if self.num_outputs else hidden


def bind_constant(
    value: float, bindings: Iterable[Binding], params: Sequence[nn.Parameter], device: Any
) -> None:
    """Put `value` everywhere in tensors of the shapes of `params`, into the modules of `bindings`:
    strides of 0, hence no memory.
    """
    for binding in bindings:
        meta = params[binding.param]
        constant = torch.full((), value, dtype=meta.dtype, device=device).expand(meta.shape)
        binding.module._parameters[binding.attribute] = nn.Parameter(constant, requires_grad=False)


@dataclass(frozen=True, slots=True)
class AfterHead:
    """Use that a model makes of its head's output and of labels."""

    transform: LogitTransform | None = None
    """Transform of the head's output; None where it is none that is known."""
    splits_by_column: bool = True
    """Whether each column of the vocabulary is a matter of its own; True where it is not known."""
    loss_problem: str = ""
    """Difference of its loss from the mean cross entropy of its logits, or ""."""
    loss_note: str = ""
    """Advice on labels for its users, or ""."""


class StageForward:
    """Runs `model`, whose parts are `parts`, a packed micro-batch at a time, whose boundaries its
    layers are told where it `takes_boundaries`, or, where that would mix sequences, `one_by_one`.
    While nothing else is bound its modules have the `params`.
    """

    def __init__(
        self,
        model: nn.Module,
        parts: DecoderParts,
        params: Sequence[nn.Parameter],
        tp: TensorParallel,
        *,
        one_by_one: bool,
        takes_boundaries: bool,
    ):
        self._model, self._head, self._tp = model, parts.head, tp
        self.outer = parts.outer_modules(model)
        """Modules outside the layers."""
        index_of = {id(param): number for number, param in enumerate(params)}
        self._params, self._outer_bindings = params, bindings_of(self.outer, index_of)
        self._at_head: AtHead | None = None
        self._list = parts.layers
        self._layers = list(parts.layers)
        self._placeholders = [LayerPlaceholder(layer) for layer in self._layers]
        self._width: int = parts.embedding.weight.shape[1]
        self._one_by_one = one_by_one
        self._takes_boundaries = takes_boundaries
        names = inspect.signature(type(model).forward).parameters
        self._takes_positions = "position_ids" in names and not one_by_one
        self.device = _device_of(model)
        """Device of the buffers at the start."""

    @property
    def inside_layers(self) -> set[nn.Module]:
        """The layers, and all modules in them."""
        return {module for layer in self._layers for module in layer.modules()}

    def show_layers(self, own: range) -> None:
        """Put the layers `own` in their places; the forward ends after them where others follow."""
        # In the entries of the list, by which the model's forward finds them: the list stays
        for index, (layer, placeholder) in enumerate(
            zip(self._layers, self._placeholders, strict=True)
        ):
            self._list._modules[str(index)] = layer if index in own else placeholder
            placeholder.ends = index == own.stop

    def run(
        self,
        micro_batch: PackedMicroBatch,
        input_ids: Tensor | None,
        hidden: Tensor | None,
        at_head: AtHead | None = None,
    ) -> Tensor:
        """Run the model's own forward over the bound stage. Returns hidden states, or on the last
        stage this rank's logits [1, T, V] of all tokens, or of those that `micro_batch.predicting`
        names, or what `at_head` makes of their hidden states [1, T, H].

        `input_ids` [1, T] on the first stage, else `hidden` [1, T, H] from the stage before; where
        TP cuts micro-batches hidden states are this rank's shard [1, T / TP, H].
        """
        if not self._one_by_one or len(micro_batch.lengths) == 1:
            return self._run(micro_batch, input_ids, hidden, at_head)
        parts = (_split(tensor, micro_batch.lengths) for tensor in (input_ids, hidden))
        outputs = [
            self._run(alone, ids, part, at_head and _hand_on)
            for alone, ids, part in zip(micro_batch.each_alone(), *parts, strict=True)
        ]
        # Each alone has no `predicting`: its places count tokens of the whole micro-batch
        output = torch.cat(outputs, dim=1)
        if micro_batch.predicting is not None:  # on the last stage alone
            output = output.index_select(1, micro_batch.predicting)
        return output if at_head is None else at_head(output, self._head)

    def _run(
        self,
        micro_batch: PackedMicroBatch,
        input_ids: Tensor | None,
        hidden: Tensor | None,
        at_head: AtHead | None,
    ) -> Tensor:
        inputs: dict[str, Any] = {"input_ids": input_ids}
        if hidden is not None:  # what runs before the layers gets something to run on
            inputs = {"inputs_embeds": hidden.new_zeros(*hidden.shape[:2], self._width)}
        self._placeholders[0].entering, self._at_head = hidden, at_head
        try:
            logits: Tensor = self._call(micro_batch, inputs).logits
        except StageEnd as end:
            return end.hidden
        finally:
            self._placeholders[0].entering = self._at_head = None
            self._tp.forget_input()
        assert not any(p.ends for p in self._placeholders), "the layer after was not called"
        return logits

    def _call(self, micro_batch: PackedMicroBatch, inputs: dict[str, Any]) -> Any:
        if self._takes_positions:
            inputs["position_ids"] = micro_batch.position_ids
        if self._takes_boundaries:
            inputs |= _boundaries(micro_batch)
        with running(micro_batch):
            return self._model(**inputs, use_cache=False)

    @contextlib.contextmanager
    def _outer_bound_to(self, value: float, device: torch.device) -> Iterator[None]:
        """Fill parameters outside the layers with `value` inside."""
        bind_constant(value, self._outer_bindings, self._params, device)
        try:
            yield
        finally:
            bind(self._outer_bindings, self._params)

    @contextlib.contextmanager
    def _without_layers(self) -> Iterator[None]:
        """Replace all layers by placeholders inside, none of which ends the forward."""
        self.show_layers(range(0))
        self._placeholders[0].ends = False
        try:
            yield
        finally:
            self.show_layers(range(len(self._layers)))

    def find_modules_before(self) -> tuple[list[nn.Module], list[nn.Module], str]:
        """Find the outer modules that a stage has to run by running them on zeros. Returns

        - the modules that run before the first layer;
        - the modules whose parameters are read though they do not run, as far as is known;
        - why this could not be found, or "".
        """
        problem = ""
        tokens = torch.zeros(1, 5, dtype=torch.int64)
        called: set[nn.Module] = {self._head}
        try:
            with self._without_layers(), self._outer_bound_to(0.0, self.device):
                # Up to the layers, then to the head: what runs in neither is read without a call
                self._placeholders[0].ends = True
                with noting_calls(self.outer) as before:
                    self._run_few(tokens, None)
                self._placeholders[0].ends = False
                with self._head.register_forward_pre_hook(_end_at_head):
                    for num_outputs in _NUMBERS_OF_OUTPUTS:
                        self._answer_with(num_outputs)
                        with noting_calls(self.outer) as calls, contextlib.suppress(*_FOREIGN):
                            self._run_few(tokens, None)
                            called |= set(calls)
                            break
        except Exception as error:  # a family's own code, where it wants more than tokens
            problem = f"running it without layers fails ({error})"
        return (
            [m for m in self.outer if m in before],
            [m for m in self.outer if m not in called and m not in before],
            problem,
        )

    def try_head(self) -> AfterHead:
        """Find the use that the model makes of its head's output and of labels.

        Its own forward runs on five tokens, without layers and with numbers of many sizes in the
        place of that output.
        """
        device = _device_of(self._model)
        numbers = torch.linspace(-90, 90, 5 * self._head.weight.shape[0], device=device)
        numbers[-1] = _LARGE
        numbers = numbers.view(1, 5, -1)
        answers = self._placeholders[0].num_outputs
        with self._without_layers():
            try:
                for num_outputs in _NUMBERS_OF_OUTPUTS:
                    self._answer_with(num_outputs)
                    with contextlib.suppress(Exception):  # a family's or a user's own code
                        return self._try_head(numbers)
                return AfterHead()
            finally:
                self._answer_with(answers)

    def _try_head(self, numbers: Tensor) -> AfterHead:
        with self._outer_bound_to(1.0, numbers.device):
            logits = self._answer(numbers).logits
            # A transform of each column for itself gives the same of mirrored columns
            mirrored = self._answer(numbers.flip(-1)).logits.flip(-1)
            found = self._find_loss(numbers)
        with self._outer_bound_to(0.37, numbers.device), self._with_other_buffers():
            # A parameter changes the logits, or a buffer, which may be set while training runs
            depends = not torch.equal(logits, self._answer(numbers).logits)
        transform = None if depends else LogitTransform.find(numbers, logits.float())
        splits = not depends and torch.equal(logits, mirrored)
        return replace(found, transform=transform, splits_by_column=splits)

    @contextlib.contextmanager
    def _with_other_buffers(self) -> Iterator[None]:
        """Give buffers outside the layers other numbers inside."""
        inside = self.inside_layers  # which placeholders stand for
        held = [
            (module, key, buffer)
            for module in self._model.modules()
            if module not in inside
            for key, buffer in module._buffers.items()
            if buffer is not None and buffer.is_floating_point()
        ]
        for module, key, buffer in held:
            module._buffers[key] = 1.37 * buffer
        try:
            yield
        finally:
            for module, key, buffer in held:
                module._buffers[key] = buffer

    def _find_loss(self, like: Tensor) -> AfterHead:
        generator = torch.Generator().manual_seed(0)
        losses = []
        for _ in range(2):  # one may be the same by chance
            numbers = 3 * torch.randn(like.shape, generator=generator).to(like.device)
            ids_1T = _few_tokens(numbers)
            logits_TV = self._answer(numbers).logits.float()[0]
            try:
                loss = self._answer(numbers, labels=ids_1T).loss
            except Exception:  # a forward that takes no labels
                return AfterHead()
            if not isinstance(loss, Tensor):
                return AfterHead()
            shifted = nn.functional.cross_entropy(logits_TV[:-1], ids_1T[0, 1:])
            # Unshifted as well: such a loss is no error, its users are told how to give labels
            losses.append((loss, shifted, nn.functional.cross_entropy(logits_TV, ids_1T[0])))
        values = torch.tensor(losses, dtype=torch.float64)
        found, wanted, unshifted = values.unbind(1)
        is_known = bool(values.isfinite().all())  # its logits may not be made for such numbers
        if not is_known or torch.allclose(found, wanted, rtol=_MOST_DIFFERENCE):
            return AfterHead()
        of_class = f"its forward of {type(self._model).forward.__module__}"
        if torch.allclose(found, unshifted, rtol=_MOST_DIFFERENCE):
            return AfterHead(
                loss_note=f"{of_class} does not shift labels, and training does, as for all causal language models: "
                "give labels as input_ids (a copy, -100 where nothing is learned), not those of the next token"
            )
        return AfterHead(
            loss_problem=f"{of_class} returns a loss of {found[0]:.4g} where the mean cross entropy of its logits is "
            f"{wanted[0]:.4g}"
        )

    def _answer(self, numbers: Tensor, **more: Tensor) -> Any:
        """Run the model's forward once with `numbers` for its head's output."""
        given = []

        def answer(_hidden: Tensor) -> Tensor:
            given.append(numbers.clone())
            return given[-1]

        own = vars(self._head).get("forward")
        # In the instance, so that hooks of the head run as in training
        self._head.forward = answer
        micro_batch = PackedMicroBatch.build([5], numbers.device)
        try:
            with torch.no_grad():
                outputs = self._call(micro_batch, {"input_ids": _few_tokens(numbers), **more})
        finally:
            del self._head.forward
            if own is not None:
                self._head.forward = own
            self._tp.forget_input()
        if len(given) != 1 or outputs.logits.shape != numbers.shape:
            raise ValueError("the output of the head is not what logits follow from")
        return outputs

    def find_placeholder_problem(self, hidden: Tensor) -> str:
        """Let placeholders answer as layers do. Returns why they cannot stand in for them, or "".

        `hidden` [1, 5, H] may be anything; what runs before the layers has to have parameters.
        """
        if len(self._layers) == 1:
            return ""
        problem = ""
        with self._without_layers():
            # The hidden state enters at the first one, passes the others and ends at the last
            self._placeholders[-1].ends = True
            for num_outputs in _NUMBERS_OF_OUTPUTS:
                self._answer_with(num_outputs)
                try:
                    output = self._run_few(None, hidden)
                except Exception as error:  # a family's own code
                    problem = f"running it without layers fails ({error})"
                    continue
                if torch.equal(output.cpu(), hidden):
                    return ""
                problem = "its layers do not hand their hidden state to each other alone"
        return problem

    def _answer_with(self, num_outputs: int) -> None:
        for placeholder in self._placeholders:
            placeholder.num_outputs = num_outputs

    def _run_few(self, input_ids: Tensor | None, hidden: Tensor | None) -> Tensor:
        """Run five tokens through the placeholders of the layers, without gradient."""
        # One by one a micro-batch that runs has a single sequence
        lengths = [5] if self._one_by_one else [3, 2]
        micro_batch = PackedMicroBatch.build(lengths, self.device)
        ids, hidden = (t if t is None else t.to(self.device) for t in (input_ids, hidden))
        with torch.no_grad():
            return self._run(micro_batch, ids, hidden, None)

    def hook_head(self) -> None:
        """Columnwise parallel logits, of those tokens alone that predict something where others are
        many; the model's forward ends with the loss where a run has one for the head.
        """
        self._head.register_forward_pre_hook(_select_predicting)
        hook_colwise(self._head, self._tp)
        plain = self._head.forward

        @functools.wraps(plain)
        def forward(hidden: Tensor) -> Tensor:
            if self._at_head is None:
                return plain(hidden)
            # Here, where the head's slices are there
            raise StageEnd(self._at_head(hidden, self._head))

        self._head.forward = forward


_LARGE = 1e8
"""A logit that any cap cuts off."""
_MOST_DIFFERENCE = 1e-3


def _device_of(model: nn.Module) -> torch.device:
    return next((buffer.device for buffer in model.buffers()), torch.device("cpu"))


def _few_tokens(numbers: Tensor) -> Tensor:
    """[1, 5] all over the vocabulary, but for its end, which may be reserved."""
    end = 0.9 * (numbers.shape[-1] - 1)
    return torch.linspace(1, end, 5, device=numbers.device).long().unsqueeze(0)


def _hand_on(hidden: Tensor, _head: nn.Linear) -> Tensor:
    return hidden


def _select_predicting(_head: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    micro_batch = current_micro_batch()
    if micro_batch is None or micro_batch.predicting is None:
        return None
    # Tokens are the last dimension but one: ProphetNet's head sees several streams of them.
    return (args[0].index_select(-2, micro_batch.predicting), *args[1:])


def _boundaries(micro_batch: PackedMicroBatch) -> dict[str, Tensor]:
    """Begins of the sequences of `micro_batch`, in transformers' form for the kernels of
    flash-linear-attention (`cu_seq_lens_q`) and causal-conv1d (`seq_idx` [1, T] int32).
    """
    cu_seqlens = micro_batch.cu_seqlens
    numbers = torch.arange(len(cu_seqlens) - 1, dtype=torch.int32, device=cu_seqlens.device)
    lengths, num_tokens = cu_seqlens.diff(), micro_batch.num_tokens
    numbers_T = numbers.repeat_interleave(lengths, output_size=num_tokens)
    return {"cu_seq_lens_q": cu_seqlens, "seq_idx": numbers_T.unsqueeze(0)}


def _end_at_head(_module: nn.Module, args: tuple[Any, ...]) -> None:
    raise StageEnd(args[0])


def _split(tensor: Tensor | None, lengths: Sequence[int]) -> Sequence[Tensor | None]:
    return [None] * len(lengths) if tensor is None else tensor.split(lengths, dim=1)


_MOST_VARIANTS = 64
"""Compiled forms of one layer: TP degrees x (training, evaluation) x kinds of layers. torch gives
up after 8.
"""


_MOST_THREADS = 32
"""torch's own number of processes that compile, of one rank."""


LEAST_KEPT = {"ban_recompute_materialized_backward": False}
"""Settings of torch's partitioner by which backward computes outputs of norms and the product of
gate and up again, in kernels that read their inputs anyway.
"""


def compile_each(layers: Iterable[nn.Module]) -> None:
    """Compile the forward of each layer at its first use; layers of one class share the compiled
    code.

    The forward alone, so that the module's own hooks (waiting for slices, activation checkpointing)
    stay outside. Raises HydraConfigError where the code cannot be compiled.
    """
    if get_accelerator().device_name() == "cpu":
        _check_cpp_compiler()
    dynamo = torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, _MOST_VARIANTS)
    # Otherwise a micro-batch of as many tokens as hidden units is a layer of its own.
    torch.fx.experimental._config.use_duck_shape = False
    for name, value in LEAST_KEPT.items():
        setattr(torch._functorch.config, name, value)
    if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:  # torch counts on the host for itself
        cores = count_own_cores(dist.get_world_size() if dist.is_initialized() else 1)
        torch._inductor.config.compile_threads = min(cores, _MOST_THREADS)
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True)
        COMPILED.add(layer)


def _check_cpp_compiler() -> None:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise HydraConfigError(
            "hydra.compile_layers is true, and torch finds no C++ compiler for CPU code; install g++ or name a "
            f"compiler in the environment variable CXX, or set hydra.compile_layers to false ({error})"
        ) from error
