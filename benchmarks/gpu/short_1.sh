#!/bin/bash
# What one GPU shows in ten minutes: what was never run and matters most first, what may hang late.
# bash benchmarks/gpu/short_1.sh [--toy] OUT
#   OUT: a folder for tables and logs; --toy: the same parts at toy size on a CPU
. benchmarks/gpu/parts.sh
begin 590 "$@"

# Nothing of these two is timed.
LOG=tests.log part tests 75 python3 -m pytest -q -p no:cacheprovider -m gpu \
  tests/unit/test_models_varlen.py tests/unit/test_models_unpadded.py tests/unit/test_on_gpu.py \
  tests/unit/test_training_host_waits.py tests/distributed/test_engine.py &
bench weights 60 made_up --models 7b bert minilm --folder "$MODELS"
wait

measure 7b 65 training --models 7b --sides auto --steps 8 --check --profile auto
PYTHONPATH=$SHIM measure 7b_peer 75 training --models 7b --sides peer --steps 8 --check
measure bert 45 training --models bert --sides auto --budget 8192 16384 65536 --profile auto
PYTHONPATH=$SHIM measure bert_peer 35 training --models bert --sides peer
measure local_job 80 whole_job --models bert --stages --runtime local --limit $((70 * SLOWER))
measure 7b_compiled 90 training --models 7b --sides compiled --steps 8 --check --profile compiled
measure encoding 45 encoding --models minilm bert 7b --sides auto in-turn --rounds 1 \
  --check minilm bert
PYTHONPATH=$SHIM measure encoding_peer 30 encoding --models minilm bert --sides peer --rounds 1
measure bert_compiled 35 training --models bert --sides compiled --budget 65536
finish
