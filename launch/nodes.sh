#!/usr/bin/env bash
# Trains a recipe on several machines: run the same command on each.
#   launch/nodes.sh HEAD NODES PROCESSES RECIPE [flags of trainer fit]
#   launch/nodes.sh node1 2 4 vit_digits --run.dir /shared/runs/digits            two machines of four processes
#   launch/nodes.sh node1 1:2 4 vit_digits --run.dir … --run.resume auto          one or two: see --nnodes of torchrun
# HEAD is the name or address of the machine that hosts the rendezvous; it must stay up until the run ends.
# PORT (29500), ID (the name of HEAD and the port), RESTARTS (3) and the interfaces are read from the environment.
set -euo pipefail
if [ $# -lt 4 ]; then
    sed -n '2,7s/^# \?//p' "$0" >&2
    exit 2
fi
head=$1 nodes=$2 processes=$3
shift 3
port=${PORT:-29500}

# Find the address and interface by which this machine reaches the head, and whether it is the head. Torchrun guesses
# both from the machine's name, which may be unknown or a loopback address.
way=$(python3 -I - "$head" <<'PYTHON'
import fcntl, socket, struct, sys

head = sys.argv[1]
try:
    target = socket.gethostbyname(head)
except OSError as error:
    sys.exit(f"launch/nodes.sh: {head} is not known on {socket.gethostname()} ({error.strerror}): give its address")
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
    try:
        way.connect((target, 9))  # sends nothing
    except OSError as error:
        sys.exit(f"launch/nodes.sh: {socket.gethostname()} has no way to {head} ({target}): {error.strerror}")
    address = way.getsockname()[0]
    if address.startswith("127."):
        sys.exit(f"launch/nodes.sh: on {socket.gethostname()}, {head} is {target}, which no other machine can reach: "
                 "give its address in the network, or mend /etc/hosts")
    found = "-"
    for _, name in socket.if_nameindex():
        try:
            answer = fcntl.ioctl(way.fileno(), 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
        except OSError:
            continue
        if socket.inet_ntoa(answer[20:24]) == address:
            found = name
print(int(address == target), address, found)
PYTHON
) || exit 2
read -r is_host address interface <<<"$way"

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
if [ "$interface" != - ]; then
    export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$interface}
    export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-$interface}
fi
# Otherwise torchrun keeps one store for all rounds, and a node that joins later, or again, never learns its address.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# A lost node must be given up before the ranks, which detect the loss within 10 s, meet again.
conf="is_host=$is_host,keep_alive_interval=2,keep_alive_max_attempt=4,last_call_timeout=${LAST_CALL:-15}"

answers() { timeout 2 bash -c "exec 3<>/dev/tcp/$head/$port" 2>/dev/null; }

# A node that starts before the head waits for it.
until [ "$is_host" = 1 ] || answers; do
    if [ "$SECONDS" -ge "${WAIT:-600}" ]; then
        echo "launch/nodes.sh: nothing answers at $head, port $port: does the command run there, is the port open?" >&2
        exit 1
    fi
    [ -n "${said:-}" ] || echo "waiting for $head, port $port" >&2
    said=1
    sleep 1
done

# Not -m trainer, which would first import modules from the working directory.
export PYTHONUNBUFFERED=1
start() { # in a subshell, whose process id becomes torchrun's: ranks end when this process ends
    export TRAINER_LAUNCHER=$BASHPID
    exec torchrun "$@"
}
start --nnodes "$nodes" --nproc-per-node "$processes" --max-restarts "${RESTARTS:-3}" --local-addr "$address" \
    --rdzv-backend c10d --rdzv-endpoint "$head:$port" --rdzv-id "${ID:-$head-$port}" --rdzv-conf "$conf" \
    --no-python trainer fit "$@" &
child=$!
trap 'kill -TERM "$child" 2>/dev/null || true' TERM
trap : INT HUP # a terminal also sends them to torchrun

# If the head is unreachable, the ranks end by themselves, but torchrun waits until the kernel gives up its connection,
# 15 minutes later.
end_without_head() {
    local missed=0
    while sleep 2 && kill -0 "$child" 2>/dev/null; do
        missed=$((missed + 1))
        ! answers || missed=0
        if [ "$missed" = 4 ]; then
            echo "launch/nodes.sh: $head, port $port, cannot be reached any more: ending" >&2
            kill -KILL "$child" 2>/dev/null || true
        fi
    done
}
[ "$is_host" = 1 ] || end_without_head &
watcher=$!

while :; do # a forwarded signal interrupts the wait
    code=0
    wait "$child" || code=$?
    kill -0 "$child" 2>/dev/null || break
done
kill "$watcher" 2>/dev/null || true
exit "$code"
