#!/bin/sh
# Runs a command under a kernel that has netem, where the machine's own has not: user-mode Linux, a kernel that is a
# program. It sees the same files and has one core, enough for some 900 Mbit/s.
#   sh analysis/wan/with_netem.sh .venv/bin/python -m analysis wan check --backend netem
set -eu
[ $# -gt 0 ] || { echo "error: name a command, such as: .venv/bin/python -m analysis wan check --backend netem" >&2; exit 2; }
PATH=$PATH:/sbin:/usr/sbin
for program in linux.uml modprobe depmod ip tc; do
    command -v $program > /dev/null ||
        { echo "error: there is no $program; run: apt-get install user-mode-linux kmod iproute2" >&2; exit 2; }
done
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
{
    export -p
    cat << 'INIT'
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t tmpfs run /run
mount -t tmpfs dev /dev
mkdir /dev/shm /dev/pts /run/tmp
mknod -m 666 /dev/null c 1 3
mknod -m 666 /dev/zero c 1 5
mknod -m 666 /dev/random c 1 8
mknod -m 666 /dev/urandom c 1 9
ln -s /proc/self/fd /dev/fd
export TMPDIR=/run/tmp COLUMNS=${COLUMNS:-150}
release=$(uname -r)
mkdir -p "/run/kernel/lib/modules/$release"
ln -s /usr/lib/uml/modules/"$release"/kernel /usr/lib/uml/modules/"$release"/modules.order \
    /usr/lib/uml/modules/"$release"/modules.builtin* "/run/kernel/lib/modules/$release"
depmod -b /run/kernel "$release" 2> /dev/null
modprobe -d /run/kernel -a bridge veth sch_htb sch_netem cls_u32
ip link set lo up
INIT
    echo "cd '$PWD'"
    for word in "$@"; do printf "'%s' " "$(printf %s "$word" | sed "s/'/'\\\\''/g")"; done
    printf "< /dev/null\necho \$? > '%s/status'\nsync\n" "$folder"
    echo "'$(command -v python3)' -c 'import ctypes; ctypes.CDLL(None).reboot(0x4321FEDC)'"
} > "$folder/commands"
printf '#!/bin/sh\n. "%s/commands"\n' "$folder" > "$folder/init"
chmod +x "$folder/init"
linux.uml root=/dev/root rootfstype=hostfs rootflags=/ rw mem=3G quiet loglevel=0 "init=$folder/init" \
    con=null con0=null,fd:1 < /dev/null 2> "$folder/kernel" || true
[ -s "$folder/status" ] || { cat "$folder/kernel" >&2; echo "error: the kernel ended before the command" >&2; exit 1; }
exit "$(cat "$folder/status")"
