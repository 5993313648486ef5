# Sourced by the benchmarks that run runsc by themselves, after lib.sh.

# Torpor's own (SANDBOX_FLAGS in node-agent/gvisor/src/runsc.rs), and the platform that it has here.
FLAGS=(--ignore-cgroups --network=sandbox --allow-connected-on-save --platform=systrap)

# installed_runsc: path of the runsc of the Torpor that is installed on this node.
installed_runsc() { sed -n 's/.*"runsc": *"\([^"]*\)".*/\1/p' /opt/torpor/bin/torpor-oci.json; }

until_true() { # SECONDS COMMAND…
	local deadline=$((SECONDS + $1))
	shift
	until "$@"; do
		[ "$SECONDS" -lt "$deadline" ] || die "not seen in time: $*"
		sleep 0.05
	done
}
