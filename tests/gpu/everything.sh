#!/usr/bin/env bash
# All that needs a GPU, part by part, each with its log and figures in a folder:
#
#   tests/gpu/everything.sh OUT [PART ...]      parts: tests cupy programs bench stress churn   (default: all, in this order)
#                                               and: again
#
# tests     pytest tests/gpu, with a million allocations in CuPy's canary, and the conformance suite
# cupy      CuPy's own tests on its own pool and on Weir; CUPY_SDIST names cupy-*.tar.gz, else this part is left out.  Nothing
#           else may use the GPU, and JOBS is 8 or 9: contexts of more processes cannot be made where a GPU is shared out
# programs  whole CuPy programs on several streams: memory reserved and throughput, by pool
# bench     weir bench --table: the aims for speed
# stress    weir stress --soak, 20 minutes unless STRESS_SECONDS says otherwise
# churn     ten minutes of products and decompositions, all pools at once
# again     CuPy's tests of its pools, AGAIN times (5) on CuPy's pool, on Weir, and on Weir without context events: which runs
#           end (docs/results/2026-12-01-h200-2.md); needs CUPY_SDIST
#
# A part that fails does not stop the others; the exit status is the number of parts that failed.
# PYTHON: the interpreter (python3); TURNS, JOBS, CUPY_CANARY, CHURN_SECONDS: see below.  Each part prints one line when it begins and one when it ends.
set -uo pipefail
cd "$(dirname "$0")/../.."
out=${1:?usage: tests/gpu/everything.sh OUT [PART ...]}
shift
mkdir -p "$out"
python=${PYTHON:-python3}
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
weir="import sys; from allocator.cli import main; sys.exit(main(sys.argv[1:]))"
failed=0
# A test that hangs ends alone, where pytest-timeout is.
limit=()
"$python" -c 'import pytest_timeout' 2>/dev/null && limit=(--timeout 120)

part() { # name, command...
  local name=$1 begin=$SECONDS status=0
  shift
  echo "== $name: $*"
  "$@" >"$out/$name.log" 2>&1 || status=$?
  tail -n 4 "$out/$name.log"
  echo "== $name: status $status after $((SECONDS - begin)) s"
  [ "$status" = 0 ] || failed=$((failed + 1))
}

[ "$#" -gt 0 ] || set -- tests cupy programs bench stress churn
{
  date -u +%F
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
  "$python" -c 'import platform, sys; print(platform.platform(), sys.version)'
  "$python" -c "$weir" doctor
} >"$out/machine.txt" 2>&1

for name; do
  case $name in
    tests)
      part tests env REQUIRE_GPU=1 GPU_TEST_SECONDS=900 CUPY_CANARY="${CUPY_CANARY:-1000000}" \
        "$python" -m pytest -q -p no:cacheprovider tests/gpu
      part conformance env REQUIRE_GPU=1 "$python" -m pytest -q -p no:cacheprovider tests/conformance
      ;;
    cupy)
      if [ -z "${CUPY_SDIST:-}" ]; then
        echo "== cupy: left out; set CUPY_SDIST to CuPy's source archive"
        continue
      fi
      # A test that hangs, or crashes, ends alone.
      suite() { # name, parts and options...
        local name=$1
        shift
        part "cupy-suite-$name" "$python" tests/cupy_suite/compare.py "$CUPY_SDIST" "$@" ${limit[@]+"${limit[@]}"} \
          --reports "$out/suite-$name" --jobs "${JOBS:-8}"
      }
      suite memory --memory
      suite cuda cuda_tests/test_stream.py cuda_tests/test_graph.py cuda_tests/test_pinned_memory.py \
        cuda_tests/memory_hooks_tests --modes allocator
      suite rest core_tests indexing_tests sorting_tests statistics_tests linalg_tests random_tests fft_tests \
        --modes allocator --weir-first
      ;;
    programs)
      part rounds "$python" -m allocator.stress.benchmarks.cupy_streams rounds --turns "${TURNS:-5}" --json "$out/rounds.jsonl"
      part fresh "$python" -m allocator.stress.benchmarks.cupy_streams fresh --pools cupy async weir \
        --turns 1 --json "$out/fresh.jsonl"
      ;;
    bench) part bench "$python" -c "$weir" bench --device 0 --table --json "$out/bench.json" --plot "$out/bench.svg" ;;
    stress)
      part stress "$python" -c "$weir" stress --device 0 --threads 8 --streams 16 --soak --every 5 \
        --seconds "${STRESS_SECONDS:-1200}" --samples "$out/soak.csv" --plot "$out/soak.svg"
      ;;
    churn)
      part churn "$python" -m allocator.stress.benchmarks.cupy_streams churn --pools cupy async weir --together --turns 1 \
        --seconds "${CHURN_SECONDS:-600}" --samples --json "$out/churn.jsonl"
      ;;
    again)
      tests=$(mktemp -d)
      tar xzf "${CUPY_SDIST:?set CUPY_SDIST to the source archive of CuPy}" -C "$tests" --wildcards '*/tests/*' '*/pyproject.toml'
      for turn in $(seq "${AGAIN:-5}"); do
        for how in cupy weir weir-no-context-events; do
          plugin=() context=
          [ "$how" = cupy ] || plugin=(-p weir_plugin)
          [ "$how" = weir-no-context-events ] && context=0
          part "again-$how-$turn" env ${context:+WEIR_CONTEXT_EVENTS=0} CUPY_TEST_GPU_LIMIT=1 PYTHONHASHSEED=0 \
            PYTHONPATH="$PWD/tests/cupy_suite:$PYTHONPATH" timeout --signal=ABRT --kill-after=5 60 \
            "$python" -X faulthandler -m pytest -v -p no:cacheprovider -n 1 --dist load \
            ${limit[@]+"${limit[@]}" --timeout-method=thread} ${plugin[@]+"${plugin[@]}"} \
            --rootdir "$(echo "$tests"/cupy-*)" "$(echo "$tests"/cupy-*)/tests/cupy_tests/cuda_tests/test_memory.py"
        done
      done
      rm -r "$tests"
      ;;
    *)
      echo "no part is called $name" >&2
      exit 64
      ;;
  esac
done
exit "$failed"
