#!/bin/bash
# What short_1.sh leaves, in 200 s, sent while the machine is warm: its models are used again.
# bash benchmarks/gpu/short_2.sh [--toy] OUT
#   OUT: a folder for tables and logs; --toy: the same parts at toy size on a CPU
. benchmarks/gpu/parts.sh
begin 200 "$@"

bench search 50 search --documents 500000 --record "$OUT/tables.md"
bench mining 50 mining --pairs 20000 --record "$OUT/tables.md"
measure passes 35 passes --models bert
TORCH_LOGS=graph_breaks,recompiles measure 7b_graphs 55 training --models 7b --sides compiled \
  --steps 3 --check
finish
