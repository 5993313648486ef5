# What a cluster changes on the machine, as text, to be compared after it is gone. Source it after lib.sh; it changes no option of the
# caller's shell.

# fingerprint: everything on the machine that a cluster changes. Network namespaces that others made with `ip netns` meanwhile do not
# count; those of Pods would be called cni-…. Nor do the cgroups of other services, which come and go.
fingerprint() {
	echo "# mounts" && awk '$5 !~ "^/run/netns(/[^c]|$)" {print $5, $9}' /proc/self/mountinfo | sort
	echo "# swap" && { awk 'NR > 1 {print $1, $2}' /proc/swaps 2>/dev/null | sort || true; }
	echo "# links" && ip -o link | sed 's/^[0-9]*: //; s/ state .*//' | awk '{print $1}' | sort
	echo "# addresses and routes" && ip -o address | awk '{print $2, $4}' | sort && ip route && ip -6 route | sed 's/ expires.*//'
	echo "# network namespaces" && { ls /run/netns 2>/dev/null | grep ^cni- || true; }
	# Without counters: what others have rules for goes on meanwhile.
	echo "# packet filter" && { nft --stateless list ruleset 2>/dev/null || true; }
	echo "# iptables" && { iptables-save 2>/dev/null | grep -v '^#' | sed 's/ \[[0-9]*:[0-9]*\]$//' || true; }
	echo "# cgroups" && find /sys/fs/cgroup -type d -not -path '*/process_api*' -not -path '*.scope*' -not -path '*.service*' -not -path '*/user.slice/*' | sort
	echo "# settings" && sysctl -a 2>/dev/null | grep -E '^(net\.ipv4\.ip_forward|net\.bridge|vm\.(overcommit|panic)|kernel\.(panic|keys)|net\.netfilter\.nf_conntrack_(max|tcp_be_liberal|tcp_timeout_established)|net\.ipv[46]\.conf\.(all|default))' || true
	cat /sys/kernel/rcu_expedited 2>/dev/null || true
	echo "# folders" && ls -d /run/* /var/lib/* /opt/* /etc/* /var/log/* /tmp/hostpath_pv /var/tmp/torpor* 2>/dev/null | grep -vx /run/netns || true
	echo "# processes" && live_processes
}

# live_processes: the names of processes that have the cluster's mark or the name of one of its programs.
# Those that have no memory any more do not count: they ended, and wait for their parent or went while we look.
live_processes() {
	local folder name
	for folder in /proc/[0-9]*; do
		name=$(cat "$folder/comm" 2>/dev/null) || continue
		grep -qs '^VmSize:' "$folder/status" || continue
		case $name in
		# Not the unit tests of kubectl's plugin, kubectl_torpor-….
		etcd | kube-* | kubectl | kubelet | containerd* | runc* | runsc* | torpor-oci | pause | coredns) echo "$name" ;;
		*) ! grep -qsz '^TORPOR_DEV_CLUSTER=' "$folder/environ" || echo "$name" ;;
		esac
	done | sort
}

# is_as_before FILE: whether the machine is as it was when `fingerprint` was written to FILE; says what differs.
is_as_before() { fingerprint | diff -u --label before --label after "$1" -; }
