# shellcheck shell=bash disable=SC1091,SC2034
# Sourced by short_1.sh and short_2.sh in the checkout's root: parts with limits, tables, a summary.
# OUT/tables.md   tables, each row added once it is measured
# OUT/log.txt     what the parts print; OUT/tests.log of the tests, which run beside others
# OUT/parts.txt   each part that ended: name, exit code, seconds, limit

begin() { # seconds of the whole call; then arguments of the script
  TOTAL=$1
  TOY=()
  SLOWER=1
  if [[ ${2:-} == --toy ]]; then
    TOY=(--toy)
    SLOWER=${SLOWER_BY:-4} # a CPU, with other work beside it
    shift
  fi
  OUT=${2:?a folder for what is printed}
  BEGAN=$SECONDS
  if ((${#TOY[@]})); then
    MODELS=${MODELS:-$OUT/models}
  else
    if [[ -e .pack/setup.sh ]]; then . .pack/setup.sh; fi
    MODELS=${MODELS:-/dev/shm/models} # 16 GB
  fi
  mkdir -p "$OUT" "$MODELS"
  rm -f "$OUT"/{log.txt,tests.log,parts.txt}
  export PYTHONPATH=${PYTHONPATH:-$PWD/platform} PYTHONUNBUFFERED=1
  export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1} # all is made up
  SHIM=$PWD/benchmarks/gpu/flash_shim:$PYTHONPATH
  echo "## $(date +%F) · $(basename "$0") ${TOY[*]}" > "$OUT/tables.md"
  if ! ((${#TOY[@]})); then
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
  fi
  echo "set up after $((SECONDS - BEGAN)) s"
}

part() { # name, seconds, command
  local limit=$(($2 * SLOWER)) start=$SECONDS log=$OUT/${LOG:-log.txt} code lines
  local left=$((TOTAL * SLOWER - SECONDS + BEGAN))
  if ((left < limit)); then limit=$left; fi
  lines=$(cat "$log" 2> /dev/null | wc -l)
  if ((limit > 0)); then
    timeout -k 5 -s TERM "$limit" "${@:3}" >> "$log" 2>&1
    code=$?
  else
    code="no time left"
  fi
  echo "$1|$code|$((SECONDS - start))|$limit" >> "$OUT/parts.txt"
  echo "== $1 ended with $code after $((SECONDS - start)) s of $limit"
  tail -n "+$((lines + 1))" "$log" | tail -n 40 | cut -c1-240
}

bench() { # name, seconds, module of this folder, arguments
  part "$1" "$2" python3 -m "benchmarks.gpu.$3" "${@:4}" "${TOY[@]}"
}

measure() { # the same, its tables recorded, its models kept for the next part
  bench "$@" --record "$OUT/tables.md" --folder "$MODELS"
}

finish() { # a summary; exits with 1 where a part failed
  local failed
  {
    printf '\n| part | ended with | seconds | limit |\n|---|---:|---:|---:|\n'
    sed 's/|/ | /g; s/.*/| & |/' "$OUT/parts.txt"
  } >> "$OUT/tables.md"
  echo
  cat "$OUT/tables.md"
  failed=$(awk -F'|' '$2 != "0" { printf "%s ", $1 }' "$OUT/parts.txt")
  if [[ $failed ]]; then
    echo "failed, see $OUT/log.txt (tests: $OUT/tests.log): $failed"
    exit 1
  fi
  exit 0
}
