"""Do ranks ever wait for each other for ever, and is what they compute ever wrong, whatever is
late?

Random strategies, random lengths, random delays of the device (a spinning kernel) and of the host,
on every rank at places of its own: before layers, before and after messages of PP, before rounds of
the link, between a send and a receive. Weights do not change (learning rate 0): two strategies of
one mini-batch must have one loss and one norm of gradients, so a wrong order or a race is seen as a
number, not only as a hang.

    python -m benchmarks.one_gpu.ranks --way hostid 4 -m benchmarks.one_gpu.soak --seconds 150
        [--seed 1] [--dtype fp32]
        [--late 0.1] [--nodes 2] [--compile] [--moe] [--no-overlap] [--full]

--nodes 2: routes for nodes of two ranks, hpz among the strategies. --full: memory is nearly full
(the allocator frees cached blocks, which waits for the device). A hang ends with the stacks of all
ranks after --silence s.
"""

from __future__ import annotations

import argparse
import faulthandler
import random
import sys
import time

import torch
import torch.distributed as dist

from benchmarks.one_gpu.common import engine_of, llama, rows_of, say
from benchmarks.one_gpu.device import DTYPE, HAS_GPU, join

STRATEGIES = {
    1: ("1x<1,1>", "1x<1,1;gather>", "1x<1,1;ckpt=2>"),
    2: (
        "2x<1,1>",
        "1x<1,2>",
        "1x<2,1>",
        "1x<sp2,1>",
        "1x<cp2,1>",
        "2x<1,1;gather>",
        "1x<sp2,1;gather>",
        "1x<cp2,1;gather>",
        "1x<2,1;gather>",
        "1x<1,2;ckpt=3>",
    ),
    4: (
        "4x<1,1>",
        "1x<1,2> + 2x<1,1>",
        "1x<2,1> + 2x<1,1>",
        "1x<2,1> + 1x<1,2>",
        "1x<1,3> + 1x<1,1>",
        "1x<2,2>",
        "2x<1,2>",
        "1x<1,4>",
        "1x<cp2,2,1>",
        "1x<sp2,cp2,1>",
        "1x<sp4,1;gather>",
        "4x<1,1;gather>",
        "1x<sp2,1;gather> + 2x<1,1;gather>",
        "1x<cp4,1;gather>",
        "1x<sp2,2,1>",
    ),
    8: (
        "1x<2,2> + 4x<1,1>",
        "8x<1,1>",
        "1x<2,2> + 2x<1,2>",
        "1x<4,1> + 1x<1,4>",
        "1x<sp4,1> + 4x<1,1>",
        "1x<cp4,1> + 2x<2,1>",
        "1x<sp4,1;gather> + 1x<cp2,1;gather> + 2x<1,1;gather>",
        "8x<1,1;gather>",
        "2x<2,2>",
        "1x<1,8>",
        "1x<sp2,2,2>",
        "1x<sp8,1;gather>",
    ),
}
ON_NODES = {
    4: ("4x<1,1;hpz>", "1x<sp4,1;hpz>", "2x<sp2,1;hpz>"),
    8: ("8x<1,1;hpz>", "1x<sp8,1;hpz>"),
}
MOE = {
    2: ("1x<sp2,1;ep=2>", "2x<1,1>", "2x<1,1;gather>"),
    4: ("2x<sp2,1;ep=2>", "1x<4,1;ep=2>", "1x<sp4,1;ep=4>"),
}


class Lateness:
    """Random delays of this rank."""

    def __init__(self, rank: int, seed: int, share: float, device: torch.device):
        self._draw = random.Random(1000 * seed + rank)
        self.share, self._device = share, device
        self.count = 0

    def maybe(self) -> None:
        if self._draw.random() >= self.share:
            return
        self.count += 1
        kind = self._draw.random()
        if HAS_GPU and kind < 0.5:
            torch.cuda._sleep(
                int(1.8e6 * self._draw.uniform(0.1, 10))
            )  # 0.1 to 10 ms of the current stream
        elif HAS_GPU and kind < 0.7:
            torch.cuda.current_stream().synchronize()  # as a launch that loads a kernel waits
        elif HAS_GPU and kind < 0.75:
            torch.cuda.synchronize()  # the worst: all streams
        else:
            time.sleep(self._draw.uniform(0, 0.01))

    def around(self, owner: object, name: str, *, before: bool = True, after: bool = False) -> None:
        plain = getattr(owner, name)

        def late(*arguments, **options):
            if before:
                self.maybe()
            found = plain(*arguments, **options)
            if after:
                self.maybe()
            return found

        setattr(owner, name, late)


def make_late(late: Lateness, *, between_messages: bool) -> None:
    """Where this rank is late. A synchronise of all streams between a send and a receive is what
    the design excludes (nothing is launched there), so it is asked for by itself.
    """
    from ds_hydra.engine.parallel.one_f_one_b import PipelineStage
    from ds_hydra.engine.transfer.session import LinkCarrier, TransferSession
    from ds_hydra.zero_link.exchange import Link

    late.around(TransferSession, "await_bucket")
    late.around(TransferSession, "enter")
    late.around(TransferSession, "finish")
    late.around(LinkCarrier, "begin")
    late.around(Link, "_post", after=True)
    for name in ("receive_activation", "receive_gradient"):  # before one is between a send and it
        late.around(PipelineStage, name, before=between_messages, after=True)
    if between_messages:
        late.around(PipelineStage, "_send", after=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--late", type=float, default=0.05)
    parser.add_argument("--silence", type=float, default=40)
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16" if HAS_GPU else "fp32")
    parser.add_argument("--nodes", type=int, default=0)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--moe", action="store_true")
    parser.add_argument("--no-overlap", action="store_true")
    parser.add_argument(
        "--between", action="store_true", help="also between a send and a receive of 1F1B"
    )
    parser.add_argument("--full", action="store_true")
    parser.add_argument(
        "--fault", action="store_true", help="a fault on purpose, which has to be found"
    )
    options = parser.parse_args()
    device = join()
    rank, world = dist.get_rank(), dist.get_world_size()
    faulthandler.dump_traceback_later(max(options.silence, 300), exit=True, file=sys.stderr)
    dtype = DTYPE if options.dtype == "bf16" else torch.float32
    context, vocab = (4096, 512) if HAS_GPU else (128, 256)
    sizes = (
        {"hidden": 1024, "inner": 2816, "layers": 8, "heads": 16, "kv": 8}
        if HAS_GPU
        else {"hidden": 64, "inner": 160, "layers": 8, "heads": 8, "kv": 8}
    )
    if options.moe:
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        config = Qwen3MoeConfig(
            hidden_size=sizes["hidden"],
            intermediate_size=sizes["inner"],
            moe_intermediate_size=sizes["hidden"] // 2,
            num_hidden_layers=4,
            num_attention_heads=sizes["heads"],
            num_key_value_heads=sizes["kv"],
            head_dim=sizes["hidden"] // sizes["heads"],
            num_experts=8,
            num_experts_per_tok=2,
            vocab_size=vocab,
            max_position_embeddings=context,
            use_cache=False,
            pad_token_id=0,
            tie_word_embeddings=False,
        )
        torch.manual_seed(0)
        with device:
            model = Qwen3MoeForCausalLM(config).to(dtype)
    else:
        model = llama(device, dtype, **sizes, vocab=vocab, context=context)
    hydra = {"compile_layers": options.compile, "link": {"overlap": not options.no_overlap}}
    if options.nodes:
        hydra["link"]["devices_per_node"] = options.nodes
    sections = {"bf16": {"enabled": True}} if dtype == torch.bfloat16 else {}
    engine = engine_of(model, lr=0.0, context=context, tokens=4 * context, hydra=hydra, **sections)
    texts = list((MOE if options.moe else STRATEGIES)[world]) + (
        list(ON_NODES.get(world, ())) if options.nodes else []
    )
    held = []
    if options.full and HAS_GPU:  # leave 2 GB for each rank
        free, _ = torch.cuda.mem_get_info()
        dist.barrier()
        size = max(0, free // world - (2 << 30))
        held.append(torch.empty(size, dtype=torch.uint8, device=device))
    late = Lateness(rank, options.seed, options.late, device)
    make_late(late, between_messages=options.between)
    if options.fault:  # does the comparison notice a round whose end is not unpacked?
        from ds_hydra.zero_link.exchange import Link

        unlucky = random.Random(rank)

        def forgetful(plain):
            def unpack(link, posted, *rest):
                if unlucky.random() > 0.1:
                    return plain(link, posted, *rest)
                posted.work.wait()
                return link._give_back(posted)

            return unpack

        Link._unpack = forgetful(Link._unpack)
    draw = random.Random(options.seed)  # equal on all ranks
    end, number, worst = time.perf_counter() + options.seconds, 0, (0.0, "")
    slowest, tolerance = (0.0, ""), 2e-2 if dtype == torch.bfloat16 else 1e-4
    bad = []
    while True:
        go_on = torch.tensor([float(time.perf_counter() < end)], device=device)
        dist.broadcast(go_on, 0)
        if not go_on.item():
            break
        lengths = [
            int(context ** draw.uniform(0.5, 1)) for _ in range(draw.randint(world, 4 * world))
        ]
        examples = rows_of(lengths, vocab, seed=number)
        found = {}
        for text in draw.sample(texts, min(2, len(texts))):
            faulthandler.dump_traceback_later(options.silence, exit=True, file=sys.stderr)
            begin = time.perf_counter()
            loss = float(engine.train_batch(examples, strategy=text))
            found[text] = loss, float(engine.last_metrics.grad_norm)
            slowest = max(slowest, (time.perf_counter() - begin, text))
            number += 1
        (first, *others) = found.items()
        for text, values in others:
            for what, a, b in zip(("loss", "norm"), first[1], values, strict=True):
                error = abs(a - b) / max(abs(a), 1e-9)
                worst = max(worst, (error, f"{what}: {first[0]} / {text}"))
                if not error <= tolerance:
                    bad.append((number, what, first[0], text, a, b))
                    say(
                        "DIFFERENT",
                        iteration=number,
                        what=what,
                        strategies=[first[0], text],
                        values=[a, b],
                        lengths=lengths,
                    )
    faulthandler.cancel_dump_traceback_later()
    counts = torch.tensor([late.count], device=device)
    dist.all_reduce(counts)
    say(
        "soak",
        ranks=world,
        iterations=number,
        late=int(counts),
        worst_difference=worst[0],
        of=worst[1],
        slowest_s=slowest[0],
        slowest=slowest[1],
        different=len(bad),
        well=not bad,
        reserved_gb=torch.cuda.memory_reserved() / 1e9 if HAS_GPU else 0.0,
    )
    engine.destroy()


if __name__ == "__main__":
    main()
