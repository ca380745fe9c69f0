#!/usr/bin/env bash
# LLaMA2 7B on the 8 GPUs of one node. Run it in the root of the repository.
#   examples/launch/one_node.sh [deepspeed|torchrun|accelerate] [more arguments of the example]
set -euo pipefail

# What exchanges beside computation need of CUDA; it is read when a device is used first.
export CUDA_DEVICE_MAX_CONNECTIONS=32 CUDA_MODULE_LOADING=EAGER CUDA_SCALE_LAUNCH_QUEUES=4x
export PYTORCH_ALLOC_CONF=expandable_segments:True

# Each rank on the cores beside its GPU, for which both launchers need numactl.
deepspeed=(deepspeed --num_gpus 8) torchrun=(torchrun --standalone --nproc-per-node 8)
if command -v numactl > /dev/null; then
  deepspeed+=(--bind_cores_to_rank) torchrun+=(--numa-binding=node)
fi

launcher=${1:-deepspeed}
[ $# -eq 0 ] || shift
config=ds_hydra/configs/deepspeed/llama2_7b_8gpus.json
example=(examples/llama2_github/train.py --model llama2-7b --data hub --ds_config "$config" "$@")

ds-hydra check "$config" --model llama2_7b --devices 8

case $launcher in
  deepspeed) exec "${deepspeed[@]}" "${example[@]}" ;;
  torchrun) exec "${torchrun[@]}" "${example[@]}" ;;
  # Without --use_deepspeed: the script reads the DeepSpeed JSON itself.
  accelerate) exec accelerate launch --multi_gpu --num_machines 1 --num_processes 8 --mixed_precision no \
    --dynamo_backend no "${example[@]}" ;;
  *)
    echo "launcher is '$launcher', expected deepspeed, torchrun or accelerate" >&2
    exit 2
    ;;
esac
