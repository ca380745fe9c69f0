"""`ds-hydra link` as a user calls it."""

from __future__ import annotations

import json

import pytest
from command_line import accepted, document_of, invoke, refused

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 72,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 251,
    "tie_word_embeddings": False,
}


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def arguments(model, *more, strategy="1x<2,1> + 2x<1,1>", devices=4):
    return ("--strategy", strategy, "--model", model, "--devices", devices, *more)


def test_json_counts_bytes_in_the_direction_in_which_they_travel(model):
    wide = ("--gradient-dtype", "fp32")
    document = document_of("link", *arguments(model, "--devices-per-node", 2, "--json", *wide))
    assert document["rounds"] == 6
    for direction, size in (("pull", 2), ("push", 4)):
        part = document[direction]
        assert part["bytes_per_element"] == size
        assert part["node_aware"]["bytes_across_nodes"] == part["least_bytes_across_nodes"]
        assert part["direct"]["bytes_across_nodes"] > part["least_bytes_across_nodes"]
        for routes in (part["direct"], part["node_aware"]):
            assert (
                sum(routes["sent_bytes"]) == sum(routes["received_bytes"]) == routes["total_bytes"]
            )
            assert sum(count for _, _, count in routes["pair_bytes"]) == routes["total_bytes"]
            assert routes["predicted_ms"] > 0
    # Ranks 2 and 3 receive the whole model less a quarter when they pull, and send it all when they
    # push.
    whole = 2 * document["parameters"]
    pulled, pushed = document["pull"]["direct"], document["push"]["direct"]
    assert pulled["received_bytes"][3] + pulled["local_bytes"][3] == whole
    assert pushed["sent_bytes"][3] + pushed["local_bytes"][3] == 2 * whole
    assert {"is": "broadcast", "ranks": [2, 3], "rounds": 6} in document["pull"]["special_cases"]


def test_pipelines_pull_each_layer_once_and_their_own_stage_only(model):
    document = document_of("link", *arguments(model, "--json", strategy="1x<2,2>"))
    pulled = document["pull"]["direct"]
    received = sum(pulled["received_bytes"]) + sum(pulled["local_bytes"])
    # Once in all, and the norms, which are not sliced, once more.
    assert 2 * document["parameters"] <= received < 2.1 * document["parameters"]


def test_the_table_names_collectives_and_the_lower_bound(model):
    result = accepted("link", *arguments(model, strategy="4x<1,1>"))
    assert "  all-gather: ranks 0, 1, 2, 3, 6 rounds" in result.stdout
    assert (
        "  reduce-scatter, summed in the order of ranks: ranks 0, 1, 2, 3, 6 rounds"
        in result.stdout
    )
    assert "lower bound" not in result.stdout, "one node of eight devices"
    assert "lower bound" in invoke("link", *arguments(model, "--devices-per-node", 2)).stdout


def test_a_topology_file_gives_nodes_and_times(model, tmp_path):
    def predicted(bytes_per_s, devices=4, **options):
        document = {
            "schema": "ds_hydra.topology/1",
            "nodes": [
                {"count": 2, "num_devices": 2, "device": "X", "latency_s": 0, "bytes_per_s": 1e9}
            ],
            "between_nodes": {"latency_s": 0, "bytes_per_s": bytes_per_s},
        }
        (tmp_path / "T.json").write_text(json.dumps(document))
        return invoke(
            "link",
            *arguments(
                model, "--topology", tmp_path / "T.json", "--json", devices=devices, **options
            ),
        )

    slow, fast = (json.loads(predicted(rate).stdout) for rate in (1e8, 1e9))
    assert slow["devices_per_node"] == 2
    assert slow["pull"]["direct"]["predicted_ms"] > 3 * fast["pull"]["direct"]["predicted_ms"]
    result = predicted(1e9, devices=8)
    assert result.exit_code == 1
    assert "has 4 devices, --devices is 8; use --devices 4 or another --topology" in result.stderr


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"devices": 3}, "needs 4 devices, --devices is 3; use --devices 4 or more"),
        ({"strategy": "1x[2,1]"}, "write terms like '2x<4,1>'"),
        (
            {"strategy": "1x<3,1>"},
            "TP 3 does not divide the model's 4 attention heads; use TP 1, 2, 4",
        ),
        ({"strategy": "1x<1,5>", "devices": 5}, "PP 5 is above the model's 4 layers"),
    ],
)
def test_mistakes_are_explained(model, options, says):
    assert says in refused("link", *arguments(model, **options))


def test_unknown_hardware_and_wrong_files_are_explained(model, tmp_path):
    assert "did you mean 'a800'?" in invoke("link", *arguments(model, "--topology", "a900")).stderr
    (tmp_path / "X.json").write_text('{"schema": "ds_hydra.profile/1"}')
    result = invoke("link", *arguments(model, "--topology", tmp_path / "X.json"))
    assert "expected 'ds_hydra.topology/1' or 'ds_hydra.hardware/1'" in result.stderr
