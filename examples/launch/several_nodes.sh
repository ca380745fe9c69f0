#!/usr/bin/env bash
# LLaMA2 7B on the nodes of examples/launch/hostfile, started from one of them. The repository and its environment
# must be at the same place on every node. DeepSpeed passes NCCL_* and what .deepspeed_env lists to the other nodes.
set -euo pipefail
cd "$(dirname "$0")/../.."

config=ds_hydra/configs/deepspeed/llama2_7b_16gpus.json
# What exchanges beside computation need of CUDA; it is read when a device is used first.
# DeepSpeed gives it to every rank.
export DS_ENV_FILE=${DS_ENV_FILE:-examples/launch/cuda.env}
export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-eth0} # the interface that reaches the other nodes

ds-hydra check "$config" --model llama2_7b --devices 16

# Each rank on its share of the cores, for which DeepSpeed needs numactl.
exec deepspeed $(command -v numactl > /dev/null && echo --bind_cores_to_rank) \
  --hostfile examples/launch/hostfile --master_port 29500 \
  examples/llama2_github/train.py --model llama2-7b --data hub --ds_config "$config" "$@"
