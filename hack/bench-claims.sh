#!/usr/bin/env bash
# Measures how fast claims become Ready, beside a bare client that makes the same writes, in the same run.
# usage: hack/bench-claims.sh [LOAD…]      (default: 3 10 20 40 burst gate memory; each takes about a minute)
#
#   3, 10, 20, 40   that many claims a second for SECONDS_OF_LOAD (default 30), pools as upstream's stress tool has them, each claim
#                   deleted after 5 s, so that refill and deletion go on beside
#   burst           150 claims at once, a pool of 150
#   gate            upstream's own gate: 75 claims a second for 10 s, a pool of 1050
#   memory          a pool of 5000: the controller's resident memory
#
# For each load a control plane is started from nothing (hack/cluster bench: etcd, apiserver, controller-manager, scheduler, 100
# nodes of kwok) and ended afterwards; all of it shares this machine's processors. OUT (default target/bench-claims) gets a JSON
# file per load, the controller's logs, and all results in claims.json. CONTROLLER_ARGS are further arguments of the controller.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
need go rust
cd "$REPO_ROOT"
target=${CARGO_TARGET_DIR:-$REPO_ROOT/target}
out=${OUT:-$target/bench-claims}
loads=("$@")
[ ${#loads[@]} -gt 0 ] || loads=(3 10 20 40 burst gate memory)

mkdir -p "$target"
executable() { sed -n "s/.*\"name\":\"$1\".*\"executable\":\"\([^\"]*\)\".*/\1/p" | tail -n 1; }
cargo build --locked --profile cluster -p torpor-controller -p torpor-bench --message-format=json >"$target/bench-claims.build" ||
	die "cargo build failed (see above)"
controller=$(executable torpor-controller <"$target/bench-claims.build")
bench=$(executable bench-claims <"$target/bench-claims.build")
[ -x "$controller" ] && [ -x "$bench" ] || die "cargo did not say where it built the controller and the load"

# The load and the controller get the priority of the control plane (benchNice), so that other work on this machine is measured as little as
# can be. Where the kernel weighs sessions against one another, this one has to be raised as a whole.
renice -n -15 -p $$ >/dev/null
[ ! -w /proc/self/autogroup ] || echo -15 >"/proc/$$/autogroup"

mkdir -p "$out"
trap 'hack/cluster bench down' EXIT
results=()
for load in "${loads[@]}"; do
	hack/cluster bench up
	environment=$(hack/cluster bench env)
	(
		eval "$environment"
		"$bench" run "$load" --seconds "${SECONDS_OF_LOAD:-30}" --controller "$controller" --controller-args "${CONTROLLER_ARGS:-}" --out "$out/$load.json"
	) || die "load $load failed; the controller's log is $out/$load.controller.log"
	results+=("$out/$load.json")
	say "load $load is done"
done
"$bench" report --out "$out/claims.json" "${results[@]}"
say "results: $out/claims.json"
