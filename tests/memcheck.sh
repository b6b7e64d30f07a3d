#!/bin/sh
# The suite's GPU part under compute-sanitizer memcheck, a process for each slice: the tool keeps
# some device memory for every launch until its process ends. Without torch's caching allocator an
# access past a tensor's end is one past an allocation's end; tests that capture a graph, or measure
# memory, need that allocator and run with it. torch's own elementwise kernels are not watched.
#
#   tests/memcheck.sh [DIRECTORY FOR LOGS]
#   tests/memcheck.sh TOOL [DIRECTORY FOR LOGS]    memcheck, racecheck, synccheck or initcheck, of
#       every kernel alone (tests/every_kernel.py), in less than two minutes
export FLCE_SANITIZED=1

# initcheck has to see what torch's kernels write. --no-tma: see tests/every_kernel.py.
every_kernel() { # tool, directory for logs
  options="--print-limit 1000 --kernel-name-exclude kns=2at6native"
  calls=""
  case $1 in
    memcheck) options="$options --report-api-errors no" ;;
    racecheck) calls="--no-tma" ;;
    initcheck) options="--print-limit 1000" calls="--no-tma" ;;
  esac
  log="$2/$1.log"
  # shellcheck disable=SC2086
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$1" --error-exitcode 99 $options \
    --force-synchronization-limit 256 --log-file "$log" python3 tests/every_kernel.py $calls
  status=$?
  grep -E "ERROR SUMMARY|RACECHECK SUMMARY" "$log"
  [ $status -eq 0 ] || grep -E -m 20 "^========= +(Invalid|Error|Warning|Uninitialized|Barrier|at )" "$log"
  exit $status
}

case $1 in
  memcheck | racecheck | synccheck | initcheck) every_kernel "$1" "${2:-.}" ;;
esac
logs=${1:-.}
failed=0

slice() { # caching allocator (0: off), file, expression
  log="$logs/memcheck.log"
  if [ "$1" = 0 ]; then export PYTORCH_NO_CUDA_MEMORY_CACHING=1; else unset PYTORCH_NO_CUDA_MEMORY_CACHING; fi
  compute-sanitizer --tool memcheck --error-exitcode 99 --report-api-errors no \
    --force-synchronization-limit 256 --kernel-name-exclude kns=2at6native --log-file "$log" \
    python3 -m pytest "$2" -q --no-header -p no:cacheprovider -k "$3" > "$logs/pytest.log" 2>&1
  status=$?
  echo "$2 -k '$3': $(tail -1 "$logs/pytest.log")"
  grep "ERROR SUMMARY" "$log"
  if [ $status -ne 0 ] && [ $status -ne 5 ]; then
    failed=1
    grep -E "^(FAILED|ERROR)" "$logs/pytest.log"
    grep -A 4 -m 3 "Invalid" "$log"
  fi
}

allocator="graph or compile or peak or without_a_copy or given_back"
for dtype in "float64" "float32" "bfloat16" "(float16 and not bfloat16)"; do
  slice 0 tests/core/test_accuracy.py "cuda and test_grid and $dtype"
done
slice 0 tests/core/test_accuracy.py "cuda and not test_grid"
for file in tests/*/test_*.py; do
  [ "$file" = tests/core/test_accuracy.py ] || slice 0 "$file" "cuda and not ($allocator or more_than or out_of_memory)"
done
slice 0 tests/core/test_ragged.py "large or sums"
slice 0 tests/core/test_fused.py "fused and not ragged"
slice 0 tests/core/test_fused.py "ragged and (8- or 64-)"
slice 0 tests/core/test_fused_logits.py "fused and not captured"
slice 1 tests/core/test_fused_logits.py "captured"
slice 0 tests/core/test_skipped_rows.py "skipped and not ($allocator)"
slice 1 tests/core/test_skipped_rows.py "graph or peak"
slice 1 tests "cuda and ($allocator)"
slice 1 tests/core/test_cuda.py "out_of_memory"
for big in logits grads-16GiB grads-1GiB stats-16GiB; do
  slice 1 tests/core/test_cuda.py "more_than and $big"
done
exit $failed
