#!/bin/bash
# What one GPU shows, what matters most first; each part has its limit.
# bash benchmarks/gpu/all.sh OUT   (OUT: a folder for what each part prints)
OUT=${1:?a folder for what is printed}
MODELS=${MODELS:-/dev/shm/models} # 15 GB
mkdir -p "$OUT" "$MODELS"
began=$(date +%s)
export PYTHONPATH=${PYTHONPATH:-$PWD/platform} PYTHONUNBUFFERED=1

part() { # name, seconds, lines shown, command
  timeout -s TERM "$2" "${@:4}" > "$OUT/$1.log" 2>&1
  echo "== $1 ended with $? after $(($(date +%s) - began)) s"
  tail -n "$3" "$OUT/$1.log" | cut -c1-200
}

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
# Nothing of these two is timed.
(part whole_job 130 40 python3 -m benchmarks.gpu.whole_job --models bert --stages 2 --only-stages --limit 120) &
part tests 100 15 python3 -m pytest -q -p no:cacheprovider -m gpu \
  tests/unit/test_models_varlen.py tests/unit/test_on_gpu.py tests/unit/test_models_unpadded.py
wait
part training_bert 75 60 python3 -m benchmarks.gpu.training --models bert --sides auto compiled peer \
  --profile comes SDPA --folder "$MODELS"
# Launches of 16,384 tokens' kernels may take as long as the kernels of a small model.
part training_bert_one_pass 40 10 python3 -m benchmarks.gpu.training --models bert --sides auto compiled \
  --budget 65536 --folder "$MODELS"
part encoding 60 14 python3 -m benchmarks.gpu.encoding --models minilm bert --rounds 1 --folder "$MODELS"
part passes 60 40 python3 -m benchmarks.gpu.passes --models minilm bert --folder "$MODELS"
part training_7b 170 40 python3 -m benchmarks.gpu.training --models 7b --sides auto compiled peer --steps 3 \
  --profile comes --folder "$MODELS"
part kernels 60 30 python3 -m benchmarks.gpu.kernels --rounds 5
part serving 40 8 python3 -m benchmarks.gpu.serving --seconds 3
part search 90 10 python3 -m benchmarks.gpu.search --documents 500000
part mining 60 8 python3 -m benchmarks.gpu.mining --pairs 20000
