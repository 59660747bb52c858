#!/bin/sh
# Most memory that each process of an island of two held while it trained a ViT-B for two updates: with a whole model
# in each (ddp), and with one that they share (fsdp). What a process holds before it trains is told beside it.
#   sh analysis/island_memory.sh
set -eu
folder=runs/island_memory python=${PYTHON:-.venv/bin/python}
export OMP_NUM_THREADS=1
rm -rf "$folder" && mkdir -p "$folder"
resident() { sed -n "s/^$2: *\([0-9]*\) kB/\1/p" "/proc/$1/status"; }
rank() { tr '\0' '\n' < "/proc/$1/environ" 2> /dev/null | sed -n 's/^RANK=//p'; }
"$python" -c 'import lightning, hivemind, swarm.peer.session; print(open("/proc/self/status").read())' \
    | sed -n 's/^VmRSS: *\([0-9]*\) kB/\1/p' | awk '{printf "imports alone: %d MB\n", $1 / 1024}'
for inside in ddp fsdp; do
    "$python" -m torch.distributed.run --standalone --nproc-per-node 2 -m swarm.peer --inside "$inside" \
        --recipe synthetic --model vit_base_patch32_224 --depth 12 --embed-dim 768 --num-heads 12 --averaging sync \
        --batch-size 2 --target-batch-size 8 --total-steps 2 --warmup-steps 1 --validate-every-steps 1000 \
        --output-dir "$folder" --run-id "$inside" --public-name island --device cpu > "$folder/$inside.log" 2>&1 &
    launcher=$!
    while kill -0 "$launcher" 2> /dev/null; do
        for process in $(pgrep -P "$launcher"); do
            if number=$(rank "$process") && [ -n "$number" ]; then
                resident "$process" VmHWM > "$folder/$inside-$number.new" 2> /dev/null || true
                [ -s "$folder/$inside-$number.new" ] && mv "$folder/$inside-$number.new" "$folder/$inside-$number"
            fi
        done
        sleep 0.2
    done
    wait "$launcher"
    for number in 0 1; do
        awk -v name="$inside, process $number" '{printf "%s: %d MB\n", name, $1 / 1024}' "$folder/$inside-$number"
    done
done
