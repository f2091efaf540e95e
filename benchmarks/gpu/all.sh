#!/bin/bash
# What one GPU shows, what matters most first; each part has its limit.
# bash benchmarks/gpu/all.sh [--toy] OUT
#   OUT: a folder for what each part prints; --toy: the same parts at toy size on a CPU, in minutes
TOY=()
COMPILED=(compiled)
JOB=120 # seconds of a whole job
if [[ ${1:-} == --toy ]]; then
  TOY=(--toy)
  COMPILED=() # a CPU would compile for minutes
  JOB=500
  shift
fi
OUT=${1:?a folder for what is printed}
if ((${#TOY[@]})); then
  MODELS=${MODELS:-$OUT/models}
else
  MODELS=${MODELS:-/dev/shm/models} # 15 GB
fi
mkdir -p "$OUT" "$MODELS"
rm -f "$OUT/failed"
began=$(date +%s)
export PYTHONPATH=${PYTHONPATH:-$PWD/platform} PYTHONUNBUFFERED=1
export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1} # all is made up

part() { # name, seconds, lines shown, command
  local limit=$2 code
  if ((${#TOY[@]})); then limit=600; fi # a CPU has other things to do
  timeout -s TERM "$limit" "${@:4}" > "$OUT/$1.log" 2>&1
  code=$?
  if ((code)); then echo "$1" >> "$OUT/failed"; fi
  echo "== $1 ended with $code after $(($(date +%s) - began)) s"
  tail -n "$3" "$OUT/$1.log" | cut -c1-200
}

bench() { # name, seconds, lines shown, module of this folder, arguments
  part "$1" "$2" "$3" python3 -m "benchmarks.gpu.$4" "${@:5}" "${TOY[@]}"
}

if ((! ${#TOY[@]})); then
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
fi
# Nothing of these two is timed.
(bench whole_job 130 40 whole_job --models bert --stages 2 --only-stages --limit "$JOB") &
part tests 100 15 python3 -m pytest -q -p no:cacheprovider -m gpu \
  tests/unit/test_models_varlen.py tests/unit/test_on_gpu.py tests/unit/test_models_unpadded.py
wait
bench training_bert 75 60 training --models bert --sides auto "${COMPILED[@]}" peer \
  --profile comes SDPA --folder "$MODELS"
# Launches of 16,384 tokens' kernels may take as long as the kernels of a small model.
bench training_bert_one_pass 40 10 training --models bert --sides auto "${COMPILED[@]}" \
  --budget 65536 --folder "$MODELS"
bench encoding 60 14 encoding --models minilm bert --rounds 1 --folder "$MODELS"
bench passes 60 40 passes --models minilm bert --folder "$MODELS"
bench training_7b 170 40 training --models 7b --sides auto "${COMPILED[@]}" peer \
  --steps 3 --profile comes --folder "$MODELS"
bench kernels 60 30 kernels --rounds 5
bench serving 40 8 serving --seconds 3
bench search 90 10 search --documents 500000
bench mining 60 8 mining --pairs 20000
if [[ -s $OUT/failed ]]; then
  echo "failed, see $OUT/NAME.log: $(sort "$OUT/failed" | tr '\n' ' ')"
  exit 1
fi
