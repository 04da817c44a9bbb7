#!/usr/bin/env bash
# Everything that several GPUs can show on 2, 4 and 8 ranks: collectives, plans, pipelines, and what
# may go wrong there alone.
#
#   benchmarks/multi_gpu.sh FOLDER                              # as many ranks as there are GPUs
#   DEVICE=cpu QUICK=1 RANKS=2 benchmarks/multi_gpu.sh FOLDER   # a rehearsal over gloo
#   PARTS=pipelines RANKS="4 8" benchmarks/multi_gpu.sh FOLDER
#
# Each part is a torchrun. One that fails or hangs ends its torchrun, and another goes on with the
# case after it. nccl-tests are run too, if all_reduce_perf and its like are in PATH.
# FOLDER/multi_gpu.jsonl has a line per figure and per failure, FOLDER/summary.md the tables.
set -u
out=${1:?usage: benchmarks/multi_gpu.sh FOLDER}
python=${PYTHON:-python}
device=${DEVICE:-cuda}
parts=${PARTS:-hazards collectives plans pipelines}
mkdir -p "$out"
cd "$(dirname "$0")/.." || exit 1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
lines=$out/multi_gpu.jsonl

begun() { grep -c '"kind": "begun"' "$lines" 2>/dev/null; }

if [ "$device" = cuda ]; then
  gpus=$("$python" -c "import torch; print(torch.cuda.device_count())")
else
  gpus=8
fi
for ranks in ${RANKS:-2 4 8}; do
  if [ "$ranks" -gt "$gpus" ]; then
    echo "$ranks ranks left out: there are $gpus GPUs"
    continue
  fi
  if [ "$device" = cuda ]; then
    for op in all_reduce all_gather reduce_scatter broadcast; do
      command -v "${op}_perf" >/dev/null &&
        timeout 120 "${op}_perf" -b 4K -e 1G -f 4 -g "$ranks" >"$out/nccl_tests.$op.$ranks.txt"
    done
  fi
  for part in $parts; do
    before=-1
    # until it is done, or begins nothing any more
    until timeout -k 10 "${SECONDS_PER_PART:-900}" "$python" -m torch.distributed.run \
      --standalone --nproc-per-node "$ranks" -m benchmarks.multi_gpu "$part" \
      --out "$out" --device "$device" ${QUICK:+--quick} >>"$out/log.txt" 2>&1; do
      now=$(begun)
      [ "$now" = "$before" ] && break
      before=$now
    done
  done
done
"$python" -m benchmarks.multi_gpu summary --out "$out"
