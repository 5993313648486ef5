#!/usr/bin/env bash
# Measures what gVisor alone takes to restore many pods: each of two containers, a pause and a program of 30 MB, with runsc's own commands and
# Torpor's flags, without Kubernetes, containerd and Torpor. What hack/bench-many.sh says of hibernated sandboxes contains as much.
# The pause containers have the root file system that Torpor has placed beside runsc, if there is one.
# usage: hack/bench-bare.sh [PODS [AT-ONCE…]]        (default 50, 2 and 4 at once; RUNSC=PATH, or else the runsc of the Torpor that is installed here)
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
. "$REPO_ROOT/hack/benchrunsc.sh"

PODS=${1:-50}
shift || true
[ $# -gt 0 ] || set -- 2 4
EXPEDITED=/sys/kernel/rcu_expedited
FOLIOS=/sys/kernel/mm/transparent_hugepage/hugepages-64kB/shmem_enabled
if [ -z "${RUNSC:-}" ]; then
	need_torpor "starts sandboxes"
	RUNSC=$(installed_runsc)
fi
# The pause containers' root file system, where Torpor has placed it beside runsc: without it they are served by a gofer.
PAUSE=$(find "$(dirname "$RUNSC")" -maxdepth 1 -name 'pause-*.erofs' | head -n 1)
PYTHON=$(realpath "$(command -v python3)")
PROGRAM='import os,time; held = bytearray(os.urandom(26 << 20)); print(len(held), flush=True); time.sleep(1e6)'

TMP=$(mktemp -d)
expedited_before=$(cat "$EXPEDITED")
folios_before=$(sed -n 's/.*\[\(.*\)\].*/\1/p' "$FOLIOS" 2>/dev/null || true)
settings_back() {
	echo "$expedited_before" >"$EXPEDITED"
	[ -z "$folios_before" ] || echo "$folios_before" >"$FOLIOS"
}
cleanup() {
	settings_back
	end_all || true
	for n in $(seq 0 "$PODS"); do ip netns del "torpor-bare-$n" 2>/dev/null || true; done
	umount "$TMP/root/null-netns" 2>/dev/null || true
	rm -rf "$TMP"
}
trap cleanup EXIT

bare() { timeout 120 "$RUNSC" --root "$TMP/root" "${FLAGS[@]}" "$@" </dev/null >>"$TMP/bare.log" 2>&1; }

bundle() { # DIRECTORY POD ARGUMENTS-JSON ANNOTATIONS-JSON
	mkdir -p "$1"
	cat >"$1/config.json" <<-J
		{"ociVersion": "1.2.0", "root": {"path": "/", "readonly": true}, "annotations": $4,
		 "process": {"user": {"uid": 0, "gid": 0}, "args": $3, "cwd": "/", "env": ["PATH=/usr/bin:/bin"]},
		 "mounts": [{"destination": "/proc", "type": "proc", "source": "proc"}, {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs"}],
		 "linux": {"namespaces": [{"type": "pid"}, {"type": "mount"}, {"type": "network", "path": "/run/netns/torpor-bare-$2"}]}}
	J
}

prepare() { # POD
	local kind='"io.kubernetes.cri.container-type"' name='"io.kubernetes.cri.container-name"'
	ip netns add "torpor-bare-$1"
	if [ -n "$PAUSE" ]; then
		local root='"dev.gvisor.spec.rootfs'
		bundle "$TMP/pause-$1" "$1" '["/pause"]' "{$kind: \"sandbox\", $root.source\": \"$PAUSE\", $root.type\": \"erofs\"}"
	else
		bundle "$TMP/pause-$1" "$1" '["/bin/sleep", "infinity"]' "{$kind: \"sandbox\"}"
	fi
	bundle "$TMP/main-$1" "$1" "[\"$PYTHON\", \"-c\", \"$PROGRAM\"]" "{$kind: \"container\", $name: \"main\", \"io.kubernetes.cri.sandbox-id\": \"pause-$1\"}"
}

# All that this run has started: runsc's own removal takes a second or two for each pod.
end_all() {
	pkill -KILL -f -- "$TMP/root" || true
	until_true 30 all_have_ended
	rm -f "$TMP"/root/*.state "$TMP"/root/*.lock "$TMP"/root/*.sock
}

all_have_ended() { ! pgrep -f -- "$TMP/root" >/dev/null; }

# One image for all: a pod's spec differs from another's in its network namespace only, which runsc does not compare.
save() {
	prepare 0
	bare create --bundle "$TMP/pause-0" pause-0
	bare start pause-0
	bare create --bundle "$TMP/main-0" main-0
	# The container has the streams of the command that starts it.
	"$RUNSC" --root "$TMP/root" "${FLAGS[@]}" start main-0 </dev/null >"$TMP/said" 2>>"$TMP/bare.log"
	# The program has its memory when it says so.
	until_true 60 test -s "$TMP/said"
	bare checkpoint --leave-running --compression=none --exclude-committed-zero-pages --image-path="$TMP/image" pause-0
	end_all
}

restore() { # POD: every step of it must succeed, each in a process of xargs' own
	bare restore --detach --bundle "$TMP/pause-$1" --image-path "$TMP/image" "pause-$1"
	bare restore --detach --bundle "$TMP/main-$1" --image-path "$TMP/image" "main-$1"
}

# busy: the processor time of the whole machine since it started, in hundredths of a second.
busy() { awk '/^cpu / { print $2 + $3 + $4 + $7 + $8 }' /proc/stat; }

printf '%s, %s processors\n' "$(uname -srm)" "$(nproc)"
save
for n in $(seq "$PODS"); do prepare "$n"; done
export -f bare restore
export RUNSC TMP FLAGS_TEXT="${FLAGS[*]}"
for at_once in "$@"; do
	# As Torpor does for the time of a wake.
	echo 1 >"$EXPEDITED"
	[ "$folios_before" != never ] || echo always >"$FOLIOS"
	before=$(busy) began=$(date +%s%N)
	seq "$PODS" | xargs -P "$at_once" -I{} bash -ec 'read -ra FLAGS <<<"$FLAGS_TEXT"; restore {}'
	took=$((($(date +%s%N) - began) / 1000000)) used=$(($(busy) - before))
	settings_back
	printf '%s pods restored by bare runsc, %s at a time: %6d ms; %d ms of processor time each\n' "$PODS" "$at_once" "$took" "$((used * 10 / PODS))"
	end_all
done
