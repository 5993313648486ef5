# What a cluster changes on the machine, as text, to be compared after it is gone. Source it after lib.sh; it changes no option of the
# caller's shell. Nothing in it may differ because of what others do on the machine meanwhile: services, logins, log rotation.

# Names that a cluster leaves behind, where others have files that come and go.
OWN_NAMES='torpor|kube|containerd|cni|runc|runsc|crictl|etcd'

# fingerprint: everything on the machine that a cluster changes. Network namespaces that others made with `ip netns` meanwhile do not
# count; those of Pods would be called cni-….
fingerprint() {
	# Logins mount below /run/user, and who looks for settings mounts binfmt_misc (systemd does it for him).
	echo "# mounts" && awk '$5 !~ "^/run/(netns|user|credentials)(/[^c]|$)" && $5 != "/proc/sys/fs/binfmt_misc" {print $5, $9}' /proc/self/mountinfo | sort
	echo "# swap" && { awk 'NR > 1 {print $1, $2}' /proc/swaps 2>/dev/null | sort || true; }
	echo "# links" && ip -o link | sed 's/^[0-9]*: //; s/ state .*//' | awk '{print $1}' | sort
	echo "# addresses and routes" && ip -o address | awk '{print $2, $4}' | sort && routes
	echo "# network namespaces" && { ls /run/netns 2>/dev/null | grep ^cni- || true; }
	# Without counters: what others have rules for goes on meanwhile.
	echo "# packet filter" && { nft --stateless list ruleset 2>/dev/null || true; }
	echo "# iptables" && { iptables-save 2>/dev/null | grep -v '^#' | sed 's/ \[[0-9]*:[0-9]*\]$//' || true; }
	echo "# cgroups" && cgroups /sys/fs/cgroup
	echo "# folders" && folders
	echo "# processes" && live_processes
	# The last, because they are compared otherwise.
	echo "# settings" && settings
}

# routes: a router's advertisement has a time that runs, a link without a carrier a mark.
routes() { { ip route && ip -6 route; } 2>/dev/null | sed 's/ expires.*//; s/ linkdown\b//' || true; }

# cgroups ROOT: but those of services, logins and other containers, which come and go, also while this looks.
cgroups() {
	{ find "$1" -type d \( -name process_api\* -o -name \*.scope -o -name \*.service -o -name user.slice -o -name system.slice -o -name machine.slice -o -name docker \) -prune \
		-o -type d -print 2>/dev/null || true; } | sort
}

# folders [ROOT]: in /run and /var/log only folders count, and what has a name of ours: other programs have files there that they replace.
folders() {
	local root=${1:-}
	{ find "$root/run" "$root/var/log" -regextype posix-extended -mindepth 1 -maxdepth 1 -not -path "$root/run/netns" \
		\( -type d -o -regex ".*/[^/]*($OWN_NAMES)[^/]*" \) 2>/dev/null || true; } | sort
	ls -d "$root"/{var/lib,opt,etc}/* "$root/tmp/hostpath_pv" "$root"/var/tmp/torpor* 2>/dev/null || true
}

# settings: one a line, as FILE:VALUE.
settings() {
	local sys=/proc/sys
	grep -sH '' $sys/net/ipv4/ip_forward $sys/net/bridge/* $sys/vm/{overcommit,panic}* $sys/kernel/panic* $sys/kernel/keys/* \
		$sys/net/netfilter/nf_conntrack_{max,tcp_be_liberal,tcp_timeout_established} $sys/net/ipv{4,6}/conf/{all,default}/* \
		$sys/vm/min_free_kbytes /sys/kernel/rcu_expedited /sys/kernel/mm/transparent_hugepage/hugepages-64kB/shmem_enabled 2>/dev/null || true
}

# live_processes: the names of processes that have the cluster's mark or the name of one of its programs.
# Those that have no memory any more do not count: they ended, and wait for their parent or went while we look.
live_processes() {
	local folder name
	for folder in /proc/[0-9]*; do
		name=$(cat "$folder/comm" 2>/dev/null) || continue
		grep -qs '^VmSize:' "$folder/status" || continue
		case $name in
		# Not the unit tests of kubectl's plugin, kubectl_torpor-…, nor another container engine's, which packages have put below /usr.
		etcd | kube-* | kubectl | kubelet | containerd* | runc* | runsc* | torpor-oci | pause | coredns)
			[[ $(readlink "$folder/exe" 2>/dev/null) == /usr/* ]] && ! is_marked "$folder" || echo "$name"
			;;
		*) ! is_marked "$folder" || echo "$name" ;;
		esac
	done | sort
}
is_marked() { grep -qsz '^TORPOR_DEV_CLUSTER=' "$1/environ"; }

# is_as_before FILE: whether the machine is as it was when `fingerprint` was written to FILE; says what differs. Some of what `down` ends
# goes a moment later (links of network namespaces, processes that others reap).
is_as_before() {
	local tries=0 found
	until found=$(fingerprint | differences "$1"); do
		if [ $((tries += 1)) -ge "${TRIES:-10}" ]; then
			printf '%s\n' "$found"
			return 1
		fi
		sleep 0.5
	done
}

# differences FILE: between it and standard input. A setting that was not there before came with a module of the kernel's, by whoever
# needed that first; nobody has changed it.
differences() {
	diff -u --label before --label after "$1" <(awk -F : '
		FNR == NR { known[$1] = 1; next }
		/^# / { settings = $0 == "# settings" }
		!settings || $1 in known' "$1" -)
}

# end_old_swap: a run of the tests that was killed leaves its swap; the next would take it for the machine's, or remove it.
end_old_swap() {
	local file=${1:-/var/tmp/torpor-e2e.swap}
	[ -e "$file" ] || return 0
	swapoff "$file" 2>/dev/null || true
	rm -f "$file"
}
