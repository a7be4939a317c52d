#!/usr/bin/env bash
# A nightly conversion: what training wrote yesterday becomes a directory that serving reads, or nothing changes.
#
#     scripts/nightly_conversion.sh SOURCE HOME TABLE          (from cron: 0 3 * * * .../nightly_conversion.sh ...)
#
# HOME/2026-11-21 is made, and HOME/current leads to it.  Called again on the same day it does nothing; called after the
# machine went down in the middle it goes on where it stopped.
set -euo pipefail

source=$1 home=$2 table=$3
today=$(date +%F)
python=${PYTHON:-python3}
mkdir -p "$home"

if [ ! -d "$home/$today" ]; then
    # One event a line, for whoever collects them; the exit code says whether it went well.
    "$python" -m porting convert "$source" "$home/$today" --table "$table" --shard-size 5GB --sha256 --json \
        >> "$home/events.jsonl"
fi

# Every byte is read again before anybody is sent there: a disk that lies is found at night.
"$python" -m porting verify-files "$home/$today"

# A link is exchanged in one step, so that a reader sees yesterday's directory or today's and never neither.
ln -sfn "$today" "$home/.next"
mv -T "$home/.next" "$home/current"

# The last seven stay.
find "$home" -mindepth 1 -maxdepth 1 -type d -name '20??-??-??' | sort | head -n -7 | xargs -r rm -r
