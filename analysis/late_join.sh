#!/bin/sh
# How long a newcomer waits for the state: the third of three hosts joins five times while the others train and average.
#   python -m analysis.wan run --hosts 3 --rtt-ms 100 --bandwidth-mbps 100 -- sh analysis/late_join.sh {number} {first_address}
set -eu
number=$1 first=$2 folder=runs/late_join
common="--output-dir $folder --device cpu --batch-size 16"
export PACED_SAMPLES_PER_SECOND=40 OMP_NUM_THREADS=1
address() { grep -o "/ip4/$first/tcp/[0-9]*/p2p/[A-Za-z0-9]*" "$folder/late-join/h1/status.json" 2> /dev/null | head -n 1; }
until_true() { until "$@"; do sleep 0.5; done; }
has_address() { [ -n "$(address)" ]; }
has_averaged() { [ "$(cat "$folder/late-join/h2/rounds.jsonl" 2> /dev/null | wc -l)" -ge 3 ]; }
has_joined() { grep -qs 'Took over' "$folder/join-$join.log"; }
is_over() { [ -e "$folder/over" ]; }

is_over && { echo "error: remove $folder first" >&2; exit 2; }
case $number in
1)
    mkdir -p "$folder"
    .venv/bin/python -m swarm.peer --recipe synthetic --target-batch-size 512 --run-id late-join --total-steps 1000000 \
        --validate-every-steps 1000000 --public-name h1 --port 31337 $common > "$folder/h1.log" 2>&1 &
    ;;
2)
    until_true has_address
    .venv/bin/python -m swarm.peer --initial-peers "$(address)" --public-name h2 $common > "$folder/h2.log" 2>&1 &
    ;;
*)
    until_true has_averaged
    for join in 1 2 3 4 5; do
        .venv/bin/python -m swarm.peer --initial-peers "$(address)" --public-name "new-$join" $common \
            > "$folder/join-$join.log" 2>&1 &
        until_true has_joined
        grep 'Took over' "$folder/join-$join.log"
        kill -TERM $!
        wait $! || true
    done
    touch "$folder/over"
    exit
    ;;
esac
until_true is_over
kill -TERM $!
wait $! || true
