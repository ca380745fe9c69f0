import copy
import inspect
import json

import pytest

from ds_hydra.configs import HydraConfig, PlannerConfig, ProfilingConfig, read_ds_config
from ds_hydra.configs.ds_config import (
    _REMOVED_KEYS,
    FILL_INS,
    KNOWN_TOP_LEVEL_KEYS,
    WITHOUT_EFFECT,
    find_key,
)
from ds_hydra.configs.hydra_config import _SECTIONS
from ds_hydra.errors import HydraConfigError

SMALLEST = {"context_length": 4096, "tokens_per_iteration": 65536}


def ds_config(hydra=SMALLEST, **changes):
    return {"zero_optimization": {"stage": 3}, "hydra": copy.deepcopy(hydra), **changes}


def section_problem(**changes):
    with pytest.raises(HydraConfigError) as caught:
        HydraConfig.parse(SMALLEST | changes)
    return str(caught.value)


def config_problem(config):
    with pytest.raises(HydraConfigError) as caught:
        read_ds_config(config)
    return str(caught.value)


def nested(dotted_key, value):
    for key in reversed(dotted_key.split(".")):
        value = {key: value}
    return value


def merge(base, extra):
    """`base` with the nested dict `extra` laid over it."""
    merged = dict(base)
    for key, value in extra.items():
        merged[key] = merge(merged.get(key, {}), value) if isinstance(value, dict) else value
    return merged


# The "hydra" section


def test_the_smallest_section_gets_all_defaults():
    config = HydraConfig.parse(SMALLEST)
    assert (config.context_length, config.tokens_per_iteration) == (4096, 65536)
    assert (config.over_length, config.text_column, config.strategies) == ("truncate", "text", None)
    assert config.planner == PlannerConfig()
    assert config.profiling == ProfilingConfig()
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 1


@pytest.mark.parametrize(
    ("key", "written", "read"),
    [
        ("tokens_per_iteration", 2e5, 200_000),
        ("strategies", "candidates.json", "candidates.json"),
        ("text_column", "~", "~"),  # names are no paths
        ("float8_exclude", ["~/a"], ("~/a",)),
    ],
)
def test_values_are_read_as_they_are_meant(key, written, read):
    assert getattr(HydraConfig.parse(SMALLEST | {key: written}), key) == read


def test_a_full_section_round_trips_through_json():
    section = {
        **SMALLEST,
        "strategies": ["4x<1,1>", "1x<2,1> + 2x<1,1>"],
        "profile": "profile.json",
        "memory_limit_bytes": 10**9,
        "over_length": "refuse",
        "text_column": "body",
        "tokenizer": "tokenizer/",
        "seed": 1,
        "shuffle": False,
        "activation_checkpointing": True,
        "run_dir": "runs/1",
        "save_plans": False,
        "planner": {
            "num_workers": 0,
            "solver": "highs",
        },
        "profiling": {"lengths": [128, 512, 1024], "repeats": 1},
    }
    config = HydraConfig.parse(section)
    assert HydraConfig.parse(json.loads(config.model_dump_json())) == config
    assert merge(config.model_dump(mode="json"), section) == config.model_dump(mode="json")


@pytest.mark.parametrize(
    "key", ["run_dir", "profile", "tokenizer", "strategies", "faults.save_on_sigterm"]
)
def test_a_path_may_begin_with_the_home_folder(key, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    section = HydraConfig.parse(merge(SMALLEST, nested(key, "~/a"))).model_dump()
    assert find_key(section, key) == "/home/me/a"
    problem = section_problem(**nested(key, "~nobody-at-all/a"))
    assert f"hydra.{key} is" in problem
    assert "no home folder ~nobody-at-all; write the whole path, or ./~nobody-at-all/a" in problem


def test_every_field_says_what_it_is():
    for section in _SECTIONS.values():
        for name, field in section.model_fields.items():
            assert field.description, f"{section.__name__}.{name} has no sentence under it"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context_lenght": 1}, "hydra.context_lenght is not a key; did you mean hydra.context_length?"),
        ({"planner": {"solvr": 2}}, "hydra.planner.solvr is not a key; did you mean hydra.planner.solver?"),
        ({"num_workers": 2}, "hydra.num_workers is not a key here; write hydra.planner.num_workers"),
        ({"profiling": {"zzz": 2}}, "hydra.profiling.zzz is not a key; hydra.profiling has lengths, repeats"),
        ({"context_length": 1}, "hydra.context_length is 1: it should be greater than or equal to 2"),
        ({"context_length": "4096"}, 'hydra.context_length is "4096": it should be a valid integer'),
        ({"context_length": True}, "hydra.context_length is true: it should be a valid integer"),
        ({"tokens_per_iteration": 2.5}, "hydra.tokens_per_iteration is 2.5: it should be a valid integer"),
        ({"over_length": "cut"}, "hydra.over_length is \"cut\": it should be 'truncate', 'drop' or 'refuse'"),
        ({"shuffle": 1}, "hydra.shuffle is 1: it should be a valid boolean"),
        ({"strategies": "4x<1,1>"}, 'hydra.strategies is "4x<1,1>": write ["4x<1,1>"]'),
        ({"strategies": []}, "hydra.strategies is []: wanted a list such as"),
        ({"planner": []}, "hydra.planner is []: it should be an object"),
        (
            {"profiling": {"lengths": [8, 8, 8]}},
            "hydra.profiling.lengths is [8, 8, 8]: wanted three different lengths of 2 tokens or more",
        ),
        ({"planner": {"space": "wide"}}, 'hydra.planner.space is "wide": it is called "full" now'),
        ({"attention": "flash_attention"}, "hydra.attention is \"flash_attention\": 'flash_attention' is no kernel"),
        ({"float8_exclude": "gate"}, 'hydra.float8_exclude is "gate": write a list: ["gate"]'),
        ({"seed": "auto"}, 'hydra.seed is "auto", which the Trainer fills in for DeepSpeed\'s keys only'),
        ({"planner": {"num_workers": "auto"}}, 'hydra.planner.num_workers is "auto", which the Trainer'),
    ],
)  # fmt: skip
def test_a_wrong_value_is_named_with_its_key_and_what_is_wanted(changes, message):
    assert section_problem(**changes).startswith(message)


def test_all_problems_are_listed():
    text = section_problem(seed=-1, shufle=True, planner={"solver": "auto", "num_workers": -1})
    assert text.startswith('the "hydra" section has 4 problems:\n')
    for key in ("hydra.seed", "hydra.shufle", "hydra.planner.solver", "hydra.planner.num_workers"):
        assert f"\n  {key} is " in text


def test_missing_keys_come_with_the_smallest_section():
    missing = r'hydra.context_length is missing .*"tokens_per_iteration": 65536'
    with pytest.raises(HydraConfigError, match=missing):
        HydraConfig.parse({"tokens_per_iteration": 1})
    with pytest.raises(HydraConfigError, match='"hydra" is \\[\\], expected an object, at least'):
        HydraConfig.parse([])


# The DeepSpeed JSON around it


def test_a_file_and_its_content_give_the_same(tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(ds_config()))
    assert read_ds_config(path) == read_ds_config(str(path)) == read_ds_config(ds_config())


def test_the_users_dict_is_not_changed():
    config = ds_config(optimizer={"type": "AdamW", "params": {"lr": 1e-3}})
    before = copy.deepcopy(config)
    result, _ = read_ds_config(config)
    result["optimizer"]["params"]["lr"] = 5
    assert config == before


def test_silence_is_filled_in():
    result, _ = read_ds_config(ds_config())
    assert result == {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "contiguous_gradients": False,
            "memory_efficient_linear": False,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    }


def test_an_explicit_null_is_silence():
    result, _ = read_ds_config(ds_config(data_types=None, gradient_accumulation_steps=None))
    assert result["data_types"] == {"grad_accum_dtype": "fp32"}
    assert result["gradient_accumulation_steps"] == 1


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("train_micro_batch_size_per_gpu", "auto"),
        ("data_types.grad_accum_dtype", "bf16"),
        ("zero_optimization.stage3_param_persistence_threshold", 100),
        ("zero_optimization.contiguous_gradients", True),
    ],
)
def test_what_the_user_said_stays(key, value):
    result, _ = read_ds_config(merge(ds_config(), nested(key, value)))
    assert find_key(result, key) == value


@pytest.mark.parametrize("fill_in", [f for f in FILL_INS if f.unless], ids=lambda f: f.key)
def test_other_spellings_of_a_key_are_not_silence(fill_in):
    for key in fill_in.unless:
        result, _ = read_ds_config(merge(ds_config(), nested(key, 7)))
        assert find_key(result, fill_in.key) is None


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("zero_optimisation", "zero_optimization"),
        ("Zero-Optimization", "zero_optimization"),
        ("gradient_accumulation_step", "gradient_accumulation_steps"),
        ("bf_16", "bf16"),
        ("hydr", "hydra"),
    ],
)
def test_a_near_miss_of_a_top_level_key_is_an_error(key, meant):
    text = config_problem(ds_config(**{key: {}}))
    assert text == f'"{key}" is not a DeepSpeed key and would be ignored; did you mean "{meant}"?'


def test_sections_of_other_names_and_other_values_are_told_at_once():
    stage = {"stage": 3}
    misspelled = config_problem({"zero_optimisation": stage, "hydra": SMALLEST})
    assert misspelled.startswith('"zero_optimisation" is not a DeepSpeed key')
    other_name = config_problem({"zero_optimization": stage, "hydar": SMALLEST})
    assert other_name.endswith('did you mean it with "hydar"?')
    text = config_problem(ds_config(zero_optimization={"stage": 2}, sequence_parallel_size=2))
    assert text.startswith("the DeepSpeed config has 2 problems:\n  zero_optimization.stage is 2")


@pytest.mark.parametrize(
    ("section", "key", "hint"),
    [
        ("optimizer", "param", 'did you mean "params"?'),
        ("optimizer", "lr", 'write it into "optimizer.params"'),
        ("scheduler", "warmup_num_steps", 'write it into "scheduler.params"'),
    ],
)
def test_what_deepspeed_does_not_read_of_a_section_is_an_error(section, key, hint):
    """It would train with defaults, without a word."""
    text = config_problem(ds_config(**{section: {"type": "AdamW", key: 1, "_comment": "mine"}}))
    assert text == f"{section}.{key} is not read by DeepSpeed and would be ignored; {hint}"


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("bf16.enabled", "true", 'bf16.enabled is "true", expected true or false'),
        ("fp16.enabled", 1, "fp16.enabled is 1, expected true or false"),
        ("gradient_clipping", "0.5", "is '0.5', expected a number; write it without quotes"),
        ("gradient_clipping", True, "is True, expected a number; write it without quotes"),
        ("gradient_clipping", -1.0, "gradient_clipping is -1.0, expected 0 or more"),
        ("steps_per_print", "10", "is '10', expected a number; write it without quotes"),
        ("checkpoint.use_node_local_storage", "no", 'storage is "no", expected true or false'),
        ("zero_allow_untested_optimizer", "false", 'is "false", expected true or false'),
        ("torch_autocast", True, "torch_autocast is true, expected an object: {...}"),
        ("zero_optimization", [3], "zero_optimization is [3], expected an object: {...}"),
        ("bfloat16.enabled", "true", 'bf16.enabled is "true", expected true or false'),
        ("hydra.profiling.lengths", [8, 16, 8192], "up to hydra.context_length, 4096"),
    ],
)
def test_values_of_another_type_are_refused_before_anything_starts(key, value, words):
    text = config_problem(merge(ds_config(), nested(key, value)))
    assert text.endswith(words)


def test_bfloat16_is_another_name_of_bf16():
    document, hydra = read_ds_config(ds_config(bfloat16={"enabled": True}))
    assert document["bf16"] == {"enabled": True}
    assert "bfloat16" not in document
    assert hydra.link.gradient_dtype == "bf16"
    both = {"bfloat16": {"enabled": True}, "bf16": {"enabled": True}}
    assert read_ds_config(ds_config(**both))[0]["bf16"] == {"enabled": True}
    both["bf16"]["enabled"] = False
    assert config_problem(ds_config(**both)).startswith("bf16.enabled and bfloat16.enabled differ")
    both["bf16"]["enabled"] = [True]
    assert config_problem(ds_config(**both)) == "bf16.enabled is [true], expected true or false"
    masters = ds_config(bfloat16={"enabled": True, "bf16_master_weights_and_grads": True})
    assert config_problem(masters).startswith("bf16.bf16_master_weights_and_grads is true")


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"data_types": {"grad_acum_dtype": "bf16"}}, 'did you mean "grad_accum_dtype"?'),
        ({"checkpoint": {"use_node_local_storag": True}}, 'mean "use_node_local_storage"?'),
        ({"checkpoint": {"x": 1}}, "it reads tag_validation, load_universal"),
    ],
)
def test_misspelled_keys_of_sections_without_validation_are_errors(sections, words):
    assert words in config_problem(ds_config(**sections))


def built_by(name, *, sections=None, key="optimizer", **params):
    return {key: {"type": name, "params": {"lr": 1e-3, **params}}, **(sections or {})}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (built_by("AdamW", lr="1e-3"), "lr is '1e-3', a text; write the number without quotes"),
        (built_by("Adam", max_grad_norm=1), 'write "gradient_clipping" beside "optimizer"'),
        (built_by("Muon", momentun=0.9), "momentun is not a parameter of Muon; did you mean 'mom"),
        (built_by("Muon", sections={"zero_optimization": {"reduce_scatter": True}}), "reduce_scatter has"),
        (built_by("SGD", momentun=0.9, sections={"zero_allow_untested_optimizer": True}), "momentun is not a"),
        (built_by("SGD"), "set zero_allow_untested_optimizer to true"),
        (built_by("LBFGS"), "computes the loss several times"),
        (built_by("AdamWW"), "'AdamWW', which neither DeepSpeed nor torch.optim has; did you mean 'adamw'?"),
        (built_by("sgd"), "did you mean 'SGD'?"),
        ({"scheduler": {"type": "WarmupLR"}}, "expected {\"type\": \"WarmupLR\", \"params\": {"),
        (built_by("Optimizer"), "neither DeepSpeed nor torch.optim has"),
        (built_by("lr_scheduler"), "neither DeepSpeed nor torch.optim has"),
        (built_by("StepLR", key="scheduler"), "lr_scheduler=lambda optimizer: torch.optim.lr_sch"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "10"}}}, "is '10', a text"),
        ({"scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 10}}}, "total_num_steps is missing"),
        ({"zero_optimization": {"overlap_com": True}}, "overlap_com is not a key of DeepSpeed; did you mean 'overlap_"),
        ({"zero_optimization": {"offload_optimizer": {"device": "gpu"}}}, "it should be 'none', 'cpu' or 'nvme'"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "cannot be simultaneously enabled"),
        ({"log_level": "warnign"}, "log_level is 'warnign', expected one of debug, info"),
        ({"tensorboard": {"output_pth": "x"}}, "tensorboard.output_pth is not a key of DeepSpeed; did"),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu", "divice": 1}}},
            "zero_optimization.offload_optimizer.divice is not a key of DeepSpeed; did you mean 'device'?",
        ),
    ],
)  # fmt: skip
def test_what_deepspeed_cannot_build_is_named_by_its_key(config, words):
    from ds_hydra.engine.checks.deepspeed_section import find_deepspeed_problems

    document, _ = read_ds_config(merge(ds_config(), config))
    (problem,) = find_deepspeed_problems(document)
    assert words in problem


@pytest.mark.parametrize("name", ["Muon", "AdamW", "Adagrad"])
def test_what_deepspeed_can_build_passes(name):
    from ds_hydra.engine.checks.deepspeed_section import find_deepspeed_problems

    document, _ = read_ds_config(merge(ds_config(), built_by(name)))
    assert not find_deepspeed_problems(document)


def test_unrelated_keys_pass_with_a_warning(caplog):
    result, _ = read_ds_config(ds_config(my_notes="v2", eval_batch_size=4))
    assert result["my_notes"] == "v2"
    assert [record.message.split('"')[1] for record in caplog.records] == [
        "my_notes",
        "eval_batch_size",
    ]


def test_known_keys_pass_in_silence(caplog):
    for key in KNOWN_TOP_LEVEL_KEYS - {row.name for row in WITHOUT_EFFECT} - {"zero_optimization"}:
        read_ds_config(ds_config(**{key: None}))
    assert not caplog.records


@pytest.mark.parametrize(
    ("sections", "wanted"),
    [
        ({}, "fp32"),
        ({"bf16": {"enabled": True}}, "bf16"),
        ({"bf16": {"enabled": True}, "communication_data_type": "fp32"}, "fp32"),
        ({"bf16": {"enabled": "auto"}, "communication_data_type": None}, "bf16"),
        ({"bf16": {"enabled": False}, "communication_data_type": "bf16"}, "bf16"),
        ({"fp16": {"enabled": True}}, "fp32"),
    ],
)
def test_gradients_are_sent_as_deepspeed_says(sections, wanted):
    _, hydra = read_ds_config(ds_config(**sections))
    assert hydra.link.gradient_dtype == wanted
    assert hydra.link.with_gradient_dtype("fp32").gradient_dtype == "fp32"


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"comms_logger": {"enabled": False}}, None),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, "data_types.grad_accum_dtype is bf16"),
        ({"communication_data_type": "fp16"}, "communication_data_type is fp16"),
    ],
)
def test_what_is_read_otherwise_than_it_is_written_is_said(caplog, sections, said):
    _, hydra = read_ds_config(ds_config(**sections))
    assert hydra.link.gradient_dtype == "fp32"
    assert [said in record.message for record in caplog.records] == [True] * (said is not None)


@pytest.mark.parametrize("config", [{"prescale_gradients": True}, {"gradient_predivide_factor": 2}])
def test_scales_of_gradients_without_effect_are_not_refused_by_deepspeed(config):
    document, _ = read_ds_config(ds_config(**config))
    assert [document[key] for key in config] in ([False], [1.0])


def test_keys_that_deepspeed_no_longer_reads_are_left_to_what_it_says_of_them(caplog):
    from deepspeed.runtime.config import _REMOVED_TOP_LEVEL_CONFIG_KEYS as REMOVED

    from ds_hydra.engine.checks.deepspeed_section import find_deepspeed_problems

    caplog.clear()  # of what imports say
    assert set(REMOVED) == _REMOVED_KEYS
    assert not KNOWN_TOP_LEVEL_KEYS & _REMOVED_KEYS
    documents = [read_ds_config(ds_config(**{key: True}))[0] for key in REMOVED]
    assert not caplog.records
    for document in documents:
        assert any("removed" in problem for problem in find_deepspeed_problems(document))


def test_no_hydra_section_shows_the_smallest_one():
    text = config_problem({"zero_optimization": {"stage": 3}})
    assert 'has no "hydra" section' in text
    advised = json.loads("{" + text.partition("the smallest one is ")[2] + "}")
    read_ds_config({"zero_optimization": {"stage": 3}, **advised})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"a": 1,}', "is not JSON"),
        ("[]", "holds a JSON list, expected an object"),
        ('{"bf16": {"enabled": true, "enabled": false}}', '"enabled" is given twice'),
    ],
)
def test_an_unreadable_file_is_named(tmp_path, content, message):
    path = tmp_path / "ds_config.json"
    assert config_problem(path).endswith("ds_config.json: No such file or directory")
    path.write_text(content)
    text = config_problem(path)
    assert str(path) in text
    assert message in text


def test_what_is_no_configuration_is_refused():
    assert "less than 4096 bytes whose parts have 255 at most" in section_problem(run_dir="a" * 256)
    assert config_problem(3).startswith("the DeepSpeed config is of type int, expected a dict or")


# Against the installed DeepSpeed


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"train_micro_batch_size_per_gpu": 4, "train_batch_size": 512},
        {"fp16": {"enabled": True}},
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}},
        {"zero_optimization": {"stage": 3, "stage3_gather_fp16_weights_on_model_save": True}},
    ],
    ids=str,
)
def test_deepspeed_accepts_the_result(changes):
    from deepspeed.runtime.config import DeepSpeedConfig

    result, _ = read_ds_config(ds_config(**changes))
    config = DeepSpeedConfig(copy.deepcopy(result))
    assert config.gradient_accumulation_steps == 1
    assert config.grad_accum_dtype == "fp32"
    assert config.zero_config.param_persistence_threshold == 0
    assert not config.zero_config.contiguous_gradients
    assert config.zero_config.gather_16bit_weights_on_model_save


def test_every_key_that_deepspeed_reads_is_known():
    """Keys are looked up by constants of these modules; a new one must not be called unknown."""
    from deepspeed.runtime import config, constants

    source = inspect.getsource(config)
    read = {
        value
        for module in (config, constants)
        for name, value in vars(module).items()
        if name.isupper() and isinstance(value, str) and f"param_dict, {name}" in source
    }
    assert len(read) > 10
    assert read <= KNOWN_TOP_LEVEL_KEYS


def test_never_print_is_read():
    """accelerate writes infinity for `steps_per_print`, which a JSON file cannot hold; DeepSpeed
    divides by 0.
    """
    never = float("inf")
    for value in (never, 0, 0.0):
        read, _ = read_ds_config(ds_config(steps_per_print=value))
        assert read["steps_per_print"] > 1 << 40
    assert "gradient_clipping is inf" in config_problem(ds_config(gradient_clipping=never))
