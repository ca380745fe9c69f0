"""Mixtures of experts: gradients of one process, and what is refused."""

import copy
from types import SimpleNamespace

import pytest
import torch
import transformers
from distributed import run_distributed
from engines import start_hydra
from models import VOCAB_SIZE, tiny
from single_process import random_examples
from test_engine_parity import LENGTHS
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import families
from ds_hydra.configs.hydra_config import HydraConfig
from ds_hydra.engine.model import experts as expert_layers
from ds_hydra.engine.model.experts import BalanceLoss, ExpertParallel
from ds_hydra.engine.model.packing_probe import build_stage_model
from ds_hydra.engine.model.scheme_support import check_scheme
from ds_hydra.engine.model.stage_model import StageModel
from ds_hydra.engine.parallel.tensor_parallel import TensorParallel
from ds_hydra.engine.profiling.profile_document import (
    estimate_profile,
    layer_params,
    model_facts,
    state_memory,
)
from ds_hydra.errors import HydraConfigError, UnsupportedModelError
from ds_hydra.strategy import Scheme
from ds_hydra.strategy.cost_models.analytic import Hardware
from ds_hydra.strategy.cost_models.decoder import describe_config
from ds_hydra.strategy.cost_models.estimate import estimate_from_config

CONFIG = HydraConfig(context_length=64, tokens_per_iteration=64)

BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 10.0}
"""A coefficient that makes it as large as the rest of the loss."""


class HostWaits(TorchDispatchMode):
    """Counts what makes a host wait for an accelerator: values that it reads, operations whose
    result has a size that the device alone knows.
    """

    def __init__(self, monkeypatch):
        super().__init__()
        self.count = 0
        read = torch.Tensor.tolist
        monkeypatch.setattr(torch.Tensor, "tolist", lambda x: self._add(1) or read(x))

    def _add(self, number):
        self.count += number

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        waits = ("bincount", "nonzero", "_local_scalar_dense", "unique_consecutive")
        has_size = (kwargs or {}).get("output_size") is not None
        self._add(function._opname in waits)
        self._add(function._opname == "repeat_interleave" and not has_size)
        return function(*args, **(kwargs or {}))


def test_tokens_travel_to_experts_with_one_wait_for_the_device(monkeypatch):
    def two_ranks_with_the_same_tokens(into, out, into_P=None, out_P=None, group=None):
        out_P = out_P or [1, 1]
        into.copy_(torch.cat([out[: out_P[0]]] * 2))

    fake = type("Two", (), {"all_to_all_single": staticmethod(two_ranks_with_the_same_tokens)})
    monkeypatch.setattr(expert_layers, "dist", fake)
    ep = ExpertParallel(TensorParallel())
    ep.enter(None, 2, 0, 2)
    hidden = torch.arange(5.0).unsqueeze(1).expand(-1, 4)
    chosen = torch.tensor([[0, 3], [1, 2], [1, 0], [3, 2], [0, 1]])
    with HostWaits(monkeypatch) as waits:
        (rows, experts, weights), travel = ep.dispatch(hidden, chosen, 1.0 + chosen, 4)
    assert waits.count == 1
    of_first = [(0, 0), (2, 0), (4, 0), (1, 1), (2, 1), (4, 1)]  # (token, expert), by expert
    assert rows[:, 0].tolist() == [token for token, _ in of_first] * 2
    assert experts.flatten().tolist() == [expert for _, expert in of_first] * 2
    assert weights.flatten().tolist() == [1 + expert for _, expert in of_first] * 2
    assert travel._sent_P == [6, 4]
    assert travel._received_P == [6, 6]


def routed_tokens(model, examples):
    """[layers, E]: tokens of all examples, run alone, that choose each expert."""
    counts = []

    def count(module, args):
        counts[-1].append(torch.bincount(args[1].flatten(), minlength=module.num_experts))

    experts = [m for name, m in model.named_modules() if name.endswith(".experts")]
    handles = [m.register_forward_pre_hook(count) for m in experts]
    for example in examples:
        counts.append([])
        model(input_ids=example["input_ids"].unsqueeze(0), use_cache=False)
    for handle in handles:
        handle.remove()
    return torch.stack([torch.stack(layers) for layers in counts]).sum(dim=0)


def worst_imbalances():
    """Of iterations of unequal strategies: as the metrics say it, and of each sequence alone."""
    model = tiny("deepseek_v3")
    reference = copy.deepcopy(model)
    engine = start_hydra(model)
    engine.optimizer.param_groups[0]["lr"] = 0.0
    found = []
    for seed, strategy in enumerate(("1x<2,1;ckpt=4>", "1x<1,2>", "1x<sp2,1;ep=2>")):
        examples = random_examples(LENGTHS, VOCAB_SIZE, seed=seed)
        with torch.no_grad():
            tokens_LE = routed_tokens(reference, examples).double()
        engine.train_batch(examples, strategy=strategy)
        wanted = float((tokens_LE.amax(dim=1) / tokens_LE.mean(dim=1)).max()) - 1
        found.append((engine.last_metrics.expert_imbalance, wanted))
    return found


@pytest.mark.distributed
def test_the_imbalance_is_that_of_the_tokens_of_the_whole_global_batch():
    for found, wanted in run_distributed(worst_imbalances, 2)[0]:
        assert found == pytest.approx(wanted)


def test_experts_are_cut_where_grouped_products_allow():
    """40 features: eight of them, 16 bytes or more in any dtype, are not cut further."""
    stage_model = StageModel(tiny("qwen3_moe"))
    widths = [
        spec.slice_shape(spec.slice_region(4, rank))
        for spec in stage_model.specs
        if "layers.0.mlp.experts" in spec.fqn
        for rank in range(4)
    ]
    assert widths == [(16, w, 32) for w in (16, 16, 16, 32)] + [(16, 32, w) for w in (8, 8, 8, 16)]
    with pytest.raises(HydraConfigError, match=r"experts.*width 40.*5 parts.*TP 8"):
        check_scheme(StageModel(tiny("qwen3_moe", num_attention_heads=8)), Scheme(8, 1))


@pytest.mark.parametrize(
    ("family", "scheme", "message"),
    [
        ("llama", "<sp2,1;ep=2>", "LlamaForCausalLM has no experts .*leave ep out"),
        ("deepseek_v3", "<sp8,1;ep=8>", "ep 8 does not divide the 4 experts .*use ep 1, 2, 4 in"),
        ("deepseek_v3", "<8,1;ep=8>", "ep 8 does not divide the 4 experts .*use ep 1, 2, 4 in"),
    ],
)
def test_ep_that_a_model_cannot_have_is_refused(family, scheme, message):
    with pytest.raises((HydraConfigError, UnsupportedModelError), match=message):
        check_scheme(StageModel(tiny(family, num_attention_heads=8)), Scheme.parse(scheme))


def test_attention_that_is_not_cut_sees_whole_micro_batches():
    stage_model = StageModel(tiny("deepseek_v3"))
    check_scheme(stage_model, Scheme(2, 1))
    assert "attention is not cut by heads" in stage_model.uncut_because
    assert stage_model.tp.micro_batch_multiple(2) == 1


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3", "ernie4_5_moe"])
def test_a_described_config_has_the_parameters_of_the_real_one(family):
    """But for norms, routers and, in DeepSeek-V3, latent attention."""
    stage_model = StageModel(tiny(family))
    shape, _ = describe_config(stage_model.config.to_dict(), family)
    assert shape.means.params == pytest.approx(layer_params(stage_model), rel=0.1)
    experts = state_memory(stage_model)["expert_fraction"] * layer_params(stage_model)
    assert shape.means.expert_params == pytest.approx(experts)
    profile = estimate_profile(stage_model, Hardware.load("a800"), 8, CONFIG, name="estimate")
    assert Scheme(1, 1, sp=4, ep=4) in profile.latency


def test_a_profile_of_a_dense_model_is_refused():
    dense, _ = estimate_from_config("llama2_7b", "h100", 8, 4096)
    facts = {"num_layers": 32, "hidden_size": 4096, "vocab_size": 32000}
    dense.check_model(**facts)
    with pytest.raises(HydraConfigError, match="another model: num_experts 0 instead of 8"):
        dense.check_model(**facts, num_experts=8)
    assert model_facts(StageModel(tiny("mixtral")))["num_experts"] == 4


def routers_in_fp32():
    model = tiny("mixtral").bfloat16()
    for layer in model.model.layers:
        layer.mlp.gate.float()
    return model


def train_in_bf16():
    """Models that DeepSpeed casts have the losses of those that are cast before; experts are cut
    before it casts them. Without bf16 routers in fp32 are refused.
    """
    examples = random_examples(LENGTHS, VOCAB_SIZE, seed=1)
    mixed = (
        r"(?s)35 in torch.bfloat16 .*4 in torch.float32 \(model.layers.0.*gate.*set bf16.enabled"
    )
    with pytest.raises(UnsupportedModelError, match=mixed):
        start_hydra(routers_in_fp32())
    for make in (routers_in_fp32, lambda: tiny("qwen3_moe")):
        cast = make()
        for param in cast.parameters():  # as DeepSpeed does, buffers stay
            param.data = param.data.bfloat16()
        found = []
        for model in (make(), cast):
            engine = start_hydra(model, bf16={"enabled": True})
            found.append([float(engine.train_batch(examples, "1x<2,1>")) for _ in range(2)])
        assert found[0] == found[1]


@pytest.mark.distributed
def test_models_of_another_dtype_are_cast_as_deepspeed_does():
    run_distributed(train_in_bf16, 2)


def test_experts_that_raise_leave_nothing_to_the_next_call():
    """As recomputing a layer does, which an exception ends as soon as it has what it needs."""

    class Experts(torch.nn.Module):
        num_experts, fails = 4, True

        def forward(self, hidden, experts, weights):
            if self.fails:
                raise ValueError("enough")
            return hidden * self.num_experts

    experts = Experts()
    ep = SimpleNamespace(size=2, dispatch=lambda *args: (args[:3], "travel"))
    ep.combine = lambda output, travel, num_tokens: output + 100
    expert_layers.hook_dispatch(experts, ep)
    hidden = torch.ones(3)
    with pytest.raises(ValueError, match="enough"):
        experts(hidden, None, None)
    experts.fails = False
    assert experts(hidden, None, None).tolist() == [102.0] * 3
    ep.size = 1
    assert experts(hidden, None, None).tolist() == [4.0] * 3


class Subclassed(transformers.MixtralForCausalLM):
    """Of a module of its own, where transformers' loss of balance is not."""


def test_the_loss_of_balance_is_what_the_model_asks_for():
    """Of a subclass, with the coefficient that its forward reads, or refused by name."""
    model = tiny("mixtral", **BALANCED)
    of_family = BalanceLoss.find(model)
    assert of_family.is_own
    assert BalanceLoss.find(Subclassed(model.config)) == of_family
    model.config.router_aux_loss_coef = 7.0  # which transformers reads when it makes a model
    assert BalanceLoss.find(model) == of_family
    model.router_aux_loss_coef = 0.5
    assert BalanceLoss.find(model).coefficient == 0.5
    model.router_aux_loss_coef = 0.0
    assert BalanceLoss.find(model) is None
    model.router_aux_loss_coef = 0.5
    stage_model = StageModel(model)
    for coefficient in (0.25, 0.0):  # set while training goes on, as a schedule does
        model.router_aux_loss_coef = coefficient
        stage_model.check_unchanged()
        stage_model.balance.begin(torch.device("cpu"), None, 1)
        assert stage_model.balance.loss.coefficient == coefficient
    dense = families.build("doge")
    dense.config.output_router_logits = True
    assert build_stage_model(dense).balance.loss is None
    model = families.build("jetmoe")
    model.config.output_router_logits = True
    with pytest.raises(
        UnsupportedModelError, match=r"[46] routers and 0 experts.*output_router_logits = False"
    ):
        build_stage_model(model)
    build_stage_model(model, aux_loss=False)
    hashed = families.build("deepseek_v4")  # its first layers choose experts by the token
    hashed.config.output_router_logits = True
    hashed.router_aux_loss_coef = hashed.config.router_aux_loss_coef = 0.5
    balance = StageModel(hashed).balance
    assert 0 < balance._num_routers < len(balance.layers)
