#!/usr/bin/env bash
# A conversion by several processes that share a file system, on this machine or on several.
#
#     scripts/torchrun_conversion.sh SOURCE DESTINATION TABLE [PROCESSES]
#
# On several machines, start it on each with the same NODES and HEAD, and NODE from 0 on:
#
#     NODES=2 NODE=0 HEAD=first.example:29500 scripts/torchrun_conversion.sh ...
set -euo pipefail

source=$1 destination=$2 table=$3 processes=${4:-2}
python=${PYTHON:-python3}
where=(--standalone)
if [ "${NODES:-1}" -gt 1 ]; then
    where=(--nnodes "$NODES" --node-rank "$NODE" --rdzv-backend c10d --rdzv-endpoint "$HEAD")
fi

# -P: files in the current folder are not imported in place of what is installed.
# One thread each: the processes are the threads.  When one of them dies torchrun ends the others, and the second attempt
# goes on from what they wrote.
for attempt in 1 2; do
    if "$python" -P -m torch.distributed.run "${where[@]}" --nproc-per-node "$processes" \
        --no-python "$python" -P -m porting convert "$source" "$destination" --table "$table" --threads 1 --memory 32MiB; then
        exec "$python" -P -m porting verify-files "$destination"
    fi
    echo "attempt $attempt failed" >&2
done
exit 1
