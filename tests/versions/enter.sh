#!/bin/bash
# enter.sh ROOT COMMAND...: run COMMAND with ROOT as its /. Wants mount and PID namespaces of its own (see root.py): every
# mount here ends with them, whatever happens, and with pivot_root a dev cluster's namespaces start from ROOT as well.
set -euo pipefail
root=$1
shift
mount --bind "$root" "$root"
cd "$root"
mount -t proc proc proc
mount --rbind /sys sys
mount --rbind /dev dev
mount -t tmpfs -o mode=755 tmpfs run
IFS=: read -ra folders <<<"${BIND:-}"
for pair in "${folders[@]}"; do # FROM=TO
    mkdir -p "./${pair#*=}"
    mount --bind "${pair%%=*}" "./${pair#*=}"
done
mkdir -p .old
pivot_root . .old
umount -l /.old
unset BIND
cd /src
exec "$@"
