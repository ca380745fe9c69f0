"""Faults put into the engine by hand, one at a time: which test notices which.

`python -m benchmarks.mutants` copies the tree, puts in each fault in turn, and runs rows of the
parity table that could notice it until one fails, or the tests that are named beside the fault. A
fault that is not noticed is printed and makes the exit code 1.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "ds_hydra"
TIMEOUT_S = 240
"""Of a start of ranks; of a collective a quarter."""
ROWS_AT_ONCE = 5
NO_FAULTS = (
    "deepspeed.runtime.zero.muon.original_muon",
    "hypothesis",
    "numba",
    "peft",
    "pytest",
    "transformers.models.llama.modeling_llama",
)
"""Loaded once; what may have a fault is loaded anew for each."""


class Mutant(NamedTuple):
    """`old`, which occurs once in `file` of the package, is replaced by `new`."""

    name: str
    file: str
    old: str
    new: str
    families: tuple[str, ...] = ("llama", "qwen2")
    """Of the table: their rows are run until one fails."""
    values: tuple[str, ...] = ()
    """Rows that have one of these alone; all if empty."""
    tests: tuple[str, ...] = ()
    """Run instead of the table: what it cannot see."""


_TP = "engine/parallel/tensor_parallel.py"
_LINEAR = "engine/parallel/linear.py"
_CUTS = "engine/parallel/token_cuts.py"
_EP = "engine/model/experts.py"
_CROSS = "engine/parallel/logits.py"
_ATTENTION = "engine/model/attention.py"
_RUNNING = "engine/model/current_micro_batch.py"
_ROWS = "engine/model/micro_batches.py"
_BALANCE = "engine/model/experts.py"
_PLACES = "strategy/schemes/placement.py"
_RUN = "engine/propagation.py"
_WEIGHTS = "engine/transfer/stage_weights.py"
_SCHEDULE = "engine/transfer/schedule.py"

MUTANTS = (
    Mutant(
        "a column-wise layer's input has one rank's gradient",
        _TP,
        "summed, wait = _post_sum_over(grad, ctx.group, may_write=may_write)",
        "summed, wait = grad, lambda: None",
        values=("tp2", "tp4", "tp2pp2"),
    ),
    Mutant(
        "a row-wise layer's output is one rank's part",
        _TP,
        "summed, wait = _post_sum_over(part, group)",
        "summed, wait = part.clone(), lambda: None",
        values=("tp2", "tp4", "tp2pp2"),
    ),
    Mutant(
        "a sum over a TP group is written where somebody reads the part",
        _TP,
        "if not (may_write and part.is_contiguous() and _is_alone(part)):",
        "if not part.is_contiguous():",
        tests=("tests/test_tensor_parallel.py",),
    ),
    Mutant(
        "parts of the vocabulary in the other order of ranks",
        _TP,
        "return self.rank * num_rows // self.size",
        "return (self.size - 1 - self.rank) * num_rows // self.size",
        values=("tp2", "tp4"),
    ),
    Mutant(
        "gathered features: the neighbour's gradient",
        _TP,
        "functools.partial(_own_features, size=tp.size, rank=tp.rank)",
        "functools.partial(_own_features, size=tp.size, rank=tp.rank - 1)",
        ("phi3", "olmo2"),
        values=("tp2", "tp4"),
    ),
    Mutant(
        "split features: the neighbour's",
        _TP,
        "_own_features(whole, tp.size, tp.rank).contiguous()",
        "_own_features(whole, tp.size, tp.rank - 1).contiguous()",
        ("phi3", "olmo2"),
        values=("tp2", "tp4"),
    ),
    Mutant(
        "the key beside latent attention has one rank's gradient",
        _TP,
        "_CopyToGroup.apply(key, tp.group)",
        "key",
        tests=(
            "tests/test_engine_parity.py::test_other_structures_have_the_gradients_of_one_process",
        ),
    ),
    Mutant(
        "routers' weights have one rank's gradient",
        _TP,
        "_CopyToGroup.apply(weights, tp.group)",
        "weights",
        ("qwen3_moe", "mixtral", "qwen2_moe"),
        values=("tp2", "tp4", "tp2pp2", "cp2tp2"),
    ),
    Mutant(
        "compiled: products that a repeated pass postpones are never made",
        _TP,
        "                again.run()\n",
        "                pass\n",
        tests=(
            "tests/test_compilation.py::test_gradients_of_layers_that_run_again_wait_for_the_exchange_that_runs",
        ),
    ),
    Mutant(
        "shards of a TP group: a sum without the first rank",
        _TP,
        "torch.sum(parts.unflatten(0, (self.size, -1)), dim=0, out=shard)",
        "torch.sum(parts.unflatten(0, (self.size, -1))[1:], dim=0, out=shard)",
    ),
    Mutant(
        "a bias has the mean of its gradients",
        _LINEAR,
        "grad_bias = grad_TO.sum(dim=0) if ctx.trains_bias",
        "grad_bias = grad_TO.mean(dim=0) if ctx.trains_bias",
        ("llama_bias", "qwen2"),
    ),
    Mutant(
        "a gradient made in the product is that of the last micro-batch",
        _WEIGHTS,
        "adds=not is_first()",
        "adds=is_first() and False",
        values=("dp",),
    ),
    Mutant(
        "a gradient is told to be complete before its postponed product",
        _WEIGHTS,
        "self._is_passed = bool(self._num_expected)",
        "self._is_passed = False",
        tests=("tests/test_weight_gradients.py",),
    ),
    Mutant(
        "norms under shards of a TP group are pushed by its first rank",
        "engine/model/decoder_parts.py",
        "Slicing.REPLICATED_PARTIAL_GRAD if cuts_micro_batches else Slicing.REPLICATED",
        "Slicing.REPLICATED",
    ),
    Mutant(
        "the bias of a row-wise layer is added by every rank",
        "zero_link/layout.py",
        "if self.slicing is Slicing.FIRST_RANK and tp_rank > 0:",
        "if self.slicing is Slicing.FIRST_RANK and tp_rank > 1:",
        ("llama_bias",),
        values=("tp2", "tp4", "sp2tp2"),
    ),
    Mutant(
        "a parameter that all ranks have is pushed by all of them",
        "zero_link/layout.py",
        "return tp_rank == 0 or self.slicing not in (Slicing.REPLICATED, Slicing.FIRST_RANK)",
        "return tp_rank == 0 or self.slicing is not Slicing.FIRST_RANK",
        values=("tp2", "tp4", "sp2tp2"),
    ),
    Mutant(
        "Ulysses: keys repeated in another order",
        _CUTS,
        "key_BKtD = key_BKtD.repeat_interleave(copies, dim=1)",
        "key_BKtD = key_BKtD.repeat(1, copies, 1, 1)",
        values=("sp2", "sp4", "sp2tp2", "sp2pp2", "sp2cp2", "with_sp"),
    ),
    Mutant(
        "Ulysses: nothing is exchanged in backward",
        _CUTS,
        "back, wait = _post_all_to_all(grad, ctx.group)",
        "back, wait = grad, nothing",
        values=("sp2", "sp4", "sp2tp2", "sp2pp2", "sp2cp2", "with_sp"),
    ),
    Mutant(
        "Ulysses: the neighbour's shard",
        _CUTS,
        ".chunk(self.size)[self.rank]",
        ".chunk(self.size)[self.rank - 1]",
        values=("sp2", "sp4", "sp2tp2", "sp2pp2", "sp2cp2", "with_sp"),
    ),
    Mutant(
        "Ulysses: the first rank's sinks",
        _ATTENTION,
        "sinks_H = sinks_H.chunk(layout.size)[layout.rank]",
        "sinks_H = sinks_H.chunk(layout.size)[0]",
        ("gpt_oss",),
        values=("sp2", "sp4", "sp2tp2", "sp2pp2", "sp2cp2", "with_sp"),
    ),
    Mutant(
        "the ranks of an SP group in another order",
        _PLACES,
        "return self.shard % self.scheme.sp",
        "return (self.shard + 1) % self.scheme.sp",
        values=("sp2", "sp4", "sp2tp2", "sp2pp2"),
    ),
    Mutant(
        "the rows of a CP group in another order",
        _PLACES,
        "return self.shard // self.scheme.sp",
        "return self.scheme.cp - 1 - self.shard // self.scheme.sp",
        values=("cp2", "cp4"),
    ),
    Mutant(
        "places in a group that shares experts, TP first",
        _PLACES,
        "return self.sp_rank * self.scheme.tp + self.tp_rank",
        "return self.tp_rank * self.scheme.sp + self.sp_rank",
        ("deepseek_v3", "mixtral", "glm4_moe", "dots1"),
        values=("sp2tp2",),
    ),
    Mutant(
        "CP: every piece begins at position 0",
        _RUNNING,
        "*(torch.arange(segment.begin, segment.end) for segment in segments)",
        "*(torch.arange(0, segment.end - segment.begin) for segment in segments)",
        values=("cp2", "cp4", "sp2cp2", "cp2tp2"),
    ),
    Mutant(
        "CP: pieces of a sequence in the order of ranks",
        _CUTS,
        "sorted(found, key=lambda part: part[0])",
        "found",
        values=("cp2", "cp4", "sp2cp2", "cp2tp2"),
    ),
    Mutant(
        "CP: a second piece's gradient replaces the first's",
        _CUTS,
        "whole.index_copy_(0, places_n, whole.index_select(0, places_n).add_(values))",
        "whole.index_copy_(0, places_n, values)",
        values=("cp2", "cp4", "sp2cp2", "cp2tp2"),
    ),
    Mutant(
        "CP: gradients of sent keys are forgotten",
        _CUTS,
        "_add_at(row, self.sent_S[: self.num_sent], own[0, : self.num_sent])",
        "own[0, : self.num_sent]",
        values=("cp2", "cp4", "sp2cp2", "cp2tp2"),
    ),
    Mutant(
        "CP: sinks of the first heads for every part of the heads",
        _ATTENTION,
        "sinks_H=None if sinks_H is None else sinks_H[heads]",
        "sinks_H=None if sinks_H is None else sinks_H[: heads.stop - heads.start]",
        ("gpt_oss",),
        values=("cp2", "cp4", "sp2cp2", "cp2tp2"),
    ),
    Mutant(
        "labels are shifted inside a piece",
        _ROWS,
        "shift_labels(labels)[part]",
        "shift_labels(labels[part])",
        values=("cp2", "cp4", "cp2pp2"),
    ),
    Mutant(
        "a window one token wider",
        _ATTENTION,
        "Scoring(scale, sliding_window, softcap, s_aux)",
        "Scoring(scale, sliding_window and sliding_window + 1, softcap, s_aux)",
        ("gemma2", "gemma3"),
    ),
    Mutant(
        "the labels of tokens that the head is not asked about",
        _ROWS,
        "targets = to_device(targets[predicting], device)",
        "targets = to_device(targets[: len(targets[predicting])], device)",
        values=("few_labels",),
    ),
    Mutant(
        "the gradient of the loss without its scale",
        _RUN,
        "return PLAIN(tokens) * scale",
        "return PLAIN(tokens)",
    ),
    Mutant(
        "the largest logit of this rank's part of the vocabulary alone",
        _CROSS,
        "            dist.all_reduce(max_T, op=dist.ReduceOp.MAX, group=tp.group)\n            factor_T =",
        "            factor_T =",
        values=("tp2", "tp4"),
    ),
    Mutant(
        "every TP rank counts the loss",
        _RUN,
        "if not losses or role.tp_rank > 0:",
        "if not losses:",
        values=("tp2", "tp4"),
    ),
    Mutant(
        "gradients are pushed one micro-batch early",
        "engine/parallel/one_f_one_b.py",
        "if index == len(micro_batch_tokens) - 1:",
        "if index == max(0, len(micro_batch_tokens) - 2):",
    ),
    Mutant(
        "gradients are pushed after the first phase",
        _RUN,
        "is_last = number == busy[-1]",
        "is_last = number == busy[0]",
        ("llama", "qwen2", "qwen3", "mistral"),
        values=("then",),
    ),
    Mutant(
        "a rank has its first phase's role in all of them",
        "sampler/plan.py",
        "Role.find(phase.strategy, rank)) for phase",
        "Role.find(self.in_turn[0].strategy, rank)) for phase",
        ("llama", "qwen2", "qwen3", "mistral"),
        values=("then",),
    ),
    Mutant(
        "a layer arrives in its slot one use early",
        _SCHEDULE,
        "transfers.append(Transfer(bringing, bucket, last_use[slot], number, readers))",
        "transfers.append(Transfer(bringing, bucket, max(AT_ONCE, last_use[slot] - 1), number, readers))",
        values=("gather", "stream"),
    ),
    Mutant(
        "a gathered layer's second micro-batch adds to the first",
        _WEIGHTS,
        "            state = self._states[index]\n            state.without_gradient.update(state.gradients)\n",
        "            pass\n",
        values=("gather",),
    ),
    Mutant(
        "an iteration's gradients add to those of the one before",
        _WEIGHTS,
        "        for state in self._states:\n            state.without_gradient.update(state.gradients)\n",
        "        for state in self._states:\n",
        tests=("tests/test_weight_gradients.py",),
    ),
    Mutant(
        "the second iteration does not say when a bucket's gradients are complete",
        _WEIGHTS,
        "            state.missing.update(state.trained)\n",
        "",
        tests=("tests/test_weight_gradients.py",),
    ),
    Mutant(
        "backward of a gathered layer does not wait for the push before",
        _SCHEDULE,
        "transfers.append(Transfer(taking, before, left, number))",
        "transfers.append(Transfer(taking, before, left))",
        tests=("tests/test_transfer_schedule.py",),
    ),
    Mutant(
        "computation does not wait for what a use needs",
        "engine/transfer/session.py",
        "if self._use in self._needed:",
        "if False:",
        tests=("tests/test_transfer_session.py",),
    ),
    Mutant(
        "a rank comes to its next phase while others are in the one before",
        "engine/transfer/session.py",
        "while self._use + 1 < self._schedule.phases[number]:",
        "while False:",
        tests=("tests/test_transfer_session.py",),
    ),
    Mutant(
        "without overlap kept weights are pushed inside backward passes",
        _SCHEDULE,
        "is_early = overlap and num_buckets > 0",
        "is_early = num_buckets > 0",
        tests=("tests/test_transfer_schedule.py",),
    ),
    Mutant(
        "streamed: every rank of a TP group adds what one has to",
        _WEIGHTS,
        "        if entry.pushes_gradient:\n            self._home.add",
        "        if True:\n            self._home.add",
        values=("stream",),
    ),
    Mutant(
        "streamed: copies of the first columns",
        "engine/transfer/home.py",
        "_rectangle(weights, first, rows, cols, num_cols)",
        "_rectangle(weights, first, rows, _shifted(cols, cols.start), num_cols)",
        values=("stream",),
    ),
    Mutant(
        "streamed: sums of a row's first columns",
        "engine/transfer/home.py",
        "self._adder.add(*sums, addend, piece.addend_col, self._width)",
        "self._adder.add(*sums, addend, 0, self._width)",
        values=("stream",),
    ),
    Mutant(
        "exact sums: nothing below the first digit",
        "engine/transfer/exact_sums.py",
        "        low[:, cols].add_(digits)\n",
        "",
        tests=("tests/test_exact_sums.py",),
    ),
    Mutant(
        "the first bucket is not pushed",
        _SCHEDULE,
        "for bucket in reversed(range(num_rounds)) if pushes else ():",
        "for bucket in reversed(range(1, num_rounds)) if pushes else ():",
    ),
    Mutant(
        "a slice's columns come from the parameter's beginning",
        "zero_link/plan.py",
        "offset += blocks.start % row_len - asks.slice_col[ask]",
        "offset += blocks.start % row_len",
        values=("tp2", "tp4"),
    ),
    Mutant(
        "what a node needs twice comes for the second need",
        "zero_link/plan.py",
        "rounds.append(min(want.round for want in readers))",
        "rounds.append(max(want.round for want in readers))",
        ("llama", "qwen2", "llama_bias", "qwen3", "gemma2"),
        values=("tied",),
    ),
    Mutant(
        "frozen slices stay when the strategy changes",
        _WEIGHTS,
        "is_same = self._key == key",
        "is_same = self._key is not None",
        ("gemma3", "phi3"),
        values=("frozen",),
    ),
    Mutant(
        "experts of other ranks' tokens: padding on the other side",
        _EP,
        "F.pad(own_TH, (0, 0, first, num_tokens - end))",
        "F.pad(own_TH, (0, 0, num_tokens - end, first))",
        ("qwen3_moe", "mixtral", "glm4_moe"),
        values=("ep2", "ep4"),
    ),
    Mutant(
        "what experts send back stays in their order",
        _EP,
        "rows_SH[inverse_S]",
        "rows_SH",
        ("qwen3_moe", "mixtral"),
        values=("ep2", "ep4"),
    ),
    Mutant(
        "rows for experts go to the neighbours in the other order",
        _EP,
        "= sent_E.view(-1, each)",
        "= sent_E.view(-1, each).flip(0)",
        ("qwen3_moe", "mixtral", "glm4_moe"),
        values=("ep2",),
    ),
    Mutant(
        "balance: counts of this row of a CP group",
        _BALANCE,
        "        if keys is not None:\n            dist.all_reduce",
        "        if False:\n            dist.all_reduce",
        ("qwen3_moe", "mixtral", "qwen2_moe"),
        values=("cp2", "cp4", "sp2cp2", "cp2tp2"),
    ),
    Mutant(
        "balance: layers that run again count twice",
        _BALANCE,
        "return has_own_tokens and not is_computed_again()",
        "return has_own_tokens",
        ("qwen3_moe", "mixtral", "qwen2_moe"),
        values=("ckpt_all", "ckpt"),
    ),
)  # fmt: skip


def put_in(mutant: Mutant, package: Path) -> str:
    """Write the fault into the copy of the package; the text that was there."""
    file = package / mutant.file
    text = file.read_text()
    assert text.count(mutant.old) == 1, (
        f"{mutant.name}: {text.count(mutant.old)} places in {mutant.file}"
    )
    file.write_text(text.replace(mutant.old, mutant.new))
    return text


def find_in_table(mutant: Mutant) -> Iterator[str]:
    """What notices the fault: a row and its error. Runs in a process of its own."""
    import test_parity_table as table
    from distributed import run_distributed

    for family in mutant.families:
        of_family = (n for n in table.read_table() if table.row_of(n)["family"] == family)
        names = [name for name in of_family if not table.is_compiled(name)]  # which take long
        if mutant.values:
            names = [n for n in names if set(table.row_of(n).values()) & {*mutant.values}]
        for begin in range(0, len(names), ROWS_AT_ONCE):
            some = names[begin : begin + ROWS_AT_ONCE]
            try:
                found = run_distributed(table.check_rows, 4, some, timeout_s=TIMEOUT_S)[0]
            except AssertionError as error:
                yield f"{some[0]}: {str(error).splitlines()[-1]}"
                continue
            for name, (error, _, loss_error) in found.items():
                if max(error, loss_error) > table.RELATIVE_TOLERANCE or error != error:
                    yield f"{name}: gradient {error:.0e}, loss {loss_error:.0e}"


def find_in_tests(mutant: Mutant, tree: Path) -> Iterator[str]:
    """The same, of the named tests."""
    import pytest

    chosen = [str(tree / test) for test in mutant.tests]
    if pytest.main(["-q", "-x", "-p", "no:cacheprovider", "--rootdir", str(tree), *chosen]):
        yield mutant.tests[0]


def look(mutant: Mutant, tree: Path, queue: Any) -> None:
    """Put the first thing that notices the fault into `queue`, or nothing."""
    sys.path[:] = [str(tree), str(tree / "tests"), *(p for p in sys.path if not is_of_root(p))]
    with (tree / "output").open("w") as output:
        for stream in (1, 2):  # of ranks, too
            os.dup2(output.fileno(), stream)
        found = find_in_tests(mutant, tree) if mutant.tests else find_in_table(mutant)
        try:
            queue.put(next(found, ""))
        except BaseException as error:
            queue.put(repr(error))


def is_of_root(path: str) -> bool:
    """Whether modules of this tree would be found in `path`."""
    return Path(path or ".").resolve() in (ROOT, ROOT / "tests")


def main(
    only: Annotated[str, typer.Option(help="Faults whose names hold this text")] = "",
) -> None:
    """Put in each fault and say what notices it."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    for module in NO_FAULTS:
        importlib.import_module(module)

    survivors = []
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for part in ("ds_hydra", "tests"):
            shutil.copytree(ROOT / part, tree / part)  # with bytecode and the compiled planner
        shutil.copy2(ROOT / "setup.cfg", tree / "setup.cfg")
        for mutant in MUTANTS:
            if only not in mutant.name:
                continue
            file = tree / "ds_hydra" / mutant.file
            text, begin = put_in(mutant, tree / "ds_hydra"), time.monotonic()
            queue = context.Queue()
            process = context.Process(target=look, args=(mutant, tree, queue))
            process.start()
            said = queue.get()
            process.join()
            file.write_text(text)
            survivors += [] if said else [mutant.name]
            word = "noticed" if said else "SURVIVES"
            typer.echo(f"{word}  {mutant.name}  ({time.monotonic() - begin:.0f} s)  {said:.300}")
    typer.echo(f"{len(survivors)} survive")
    raise typer.Exit(bool(survivors))


if __name__ == "__main__":
    typer.run(main)
