#!/bin/sh
# How long a newcomer waits for the state: the third of three hosts joins five times while the others train and average.
#   python -m analysis wan run --hosts 3 --rtt-ms 100 --bandwidth-mbps 100 -- sh analysis/late_join.sh {number} {first_address}
set -eu
number=$1 first=$2 folder=runs/late_join
common="--output-dir $folder --device cpu --batch-size 16"
export PACED_SAMPLES_PER_SECOND=40 OMP_NUM_THREADS=1
address() { grep -o "/ip4/$first/tcp/[0-9]*/p2p/[A-Za-z0-9]*" "$folder/late-join/h1/status.json" 2> /dev/null | head -n 1; }
wait_until() { until "$@"; do runs_on; sleep 0.5; done; }
has_address() { [ -n "$(address)" ]; }
has_averaged() { [ "$(cat "$folder/late-join/h2/rounds.jsonl" 2> /dev/null | wc -l)" -ge 3 ]; }
has_joined() { grep -qs 'Took over' "$folder/join-$join.log"; }
is_over() { [ -e "$folder/over" ]; }
runs_on() {
    if is_over; then exit; fi
    if [ -n "${peer-}" ] && ! kill -0 "$peer" 2> /dev/null; then
        echo "error: the peer of host $number has ended: see the logs in $folder" >&2
        exit 1
    fi
}

is_over && { echo "error: remove $folder first" >&2; exit 2; }
mkdir -p "$folder"
trap 'touch "$folder/over"; [ -z "${peer-}" ] || { kill -TERM "$peer" 2> /dev/null && wait "$peer"; } || true' EXIT
case $number in
1)
    .venv/bin/python -m swarm.peer --recipe synthetic --target-batch-size 512 --run-id late-join --total-steps 1000000 \
        --validate-every-steps 1000000 --public-name h1 --port 31337 $common > "$folder/h1.log" 2>&1 &
    ;;
2)
    wait_until has_address
    .venv/bin/python -m swarm.peer --initial-peers "$(address)" --public-name h2 $common > "$folder/h2.log" 2>&1 &
    ;;
*)
    wait_until has_averaged
    for join in 1 2 3 4 5; do
        .venv/bin/python -m swarm.peer --initial-peers "$(address)" --public-name "new-$join" $common \
            > "$folder/join-$join.log" 2>&1 &
        peer=$!
        wait_until has_joined
        grep 'Took over' "$folder/join-$join.log"
        kill -TERM "$peer"
        wait "$peer" || true
        peer=
    done
    exit
    ;;
esac
peer=$!
wait_until is_over
