# Functions that print, as text, everything that a cluster changes on the machine, for a comparison
# after the cluster is gone. Source this file after lib.sh; it changes no shell options. Other
# activity on the machine (services, logins, log rotation) must not change the text.

# Names of the cluster's files in folders where other programs create and delete files.
OWN_NAMES='torpor|kube|containerd|cni|runc|runsc|crictl|etcd'

# fingerprint: prints everything on the machine that a cluster changes. Network namespaces count
# only if they have a Pod's name (cni-…); others may create some with `ip netns`.
fingerprint() {
	# Logins mount below /run/user, and systemd mounts binfmt_misc when a program reads it.
	echo "# mounts" && awk '$5 !~ "^/run/(netns|user|credentials)(/[^c]|$)" && $5 != "/proc/sys/fs/binfmt_misc" {print $5, $9}' /proc/self/mountinfo | sort
	echo "# swap" && { awk 'NR > 1 {print $1, $2}' /proc/swaps 2>/dev/null | sort || true; }
	echo "# links" && ip -o link | sed 's/^[0-9]*: //; s/ state .*//' | awk '{print $1}' | sort
	echo "# addresses and routes" && ip -o address | awk '{print $2, $4}' | sort && routes
	echo "# network namespaces" && { ls /run/netns 2>/dev/null | grep ^cni- || true; }
	# Without counters, which other rules keep changing.
	echo "# packet filter" && { nft --stateless list ruleset 2>/dev/null || true; }
	echo "# iptables" && { iptables-save 2>/dev/null | grep -v '^#' | sed 's/ \[[0-9]*:[0-9]*\]$//' || true; }
	echo "# cgroups" && cgroups /sys/fs/cgroup
	echo "# folders" && folders
	echo "# processes" && live_processes
	# Settings come last, because they are compared in another way.
	echo "# settings" && settings
}

# routes: prints the routes without the lifetime of advertised ones and without link states.
routes() { { ip route && ip -6 route; } 2>/dev/null | sed 's/ expires.*//; s/ linkdown\b//' || true; }

# cgroups ROOT: prints all cgroups except those of services, logins and other containers, which
# appear and disappear at any time.
cgroups() {
	{ find "$1" -type d \( -name process_api\* -o -name \*.scope -o -name \*.service -o -name user.slice -o -name system.slice -o -name machine.slice -o -name docker \) -prune \
		-o -type d -print 2>/dev/null || true; } | sort
}

# folders [ROOT]: prints the folders of /run and /var/log, and the files with a name of the cluster.
# Other programs replace their files there.
folders() {
	local root=${1:-}
	{ find "$root/run" "$root/var/log" -regextype posix-extended -mindepth 1 -maxdepth 1 -not -path "$root/run/netns" \
		\( -type d -o -regex ".*/[^/]*($OWN_NAMES)[^/]*" \) 2>/dev/null || true; } | sort
	ls -d "$root"/{var/lib,opt,etc}/* "$root/tmp/hostpath_pv" "$root"/var/tmp/torpor* 2>/dev/null || true
}

# settings: prints one setting a line, as FILE:VALUE.
settings() {
	local sys=/proc/sys
	grep -sH '' $sys/net/ipv4/ip_forward $sys/net/bridge/* $sys/vm/{overcommit,panic}* $sys/kernel/panic* $sys/kernel/keys/* \
		$sys/net/netfilter/nf_conntrack_{max,tcp_be_liberal,tcp_timeout_established} $sys/net/ipv{4,6}/conf/{all,default}/* \
		$sys/vm/min_free_kbytes /sys/kernel/rcu_expedited /sys/kernel/mm/transparent_hugepage/hugepages-64kB/shmem_enabled 2>/dev/null || true
}

# live_processes: prints the names of processes that have the cluster's mark or the name of one of
# its programs. Processes without memory have ended and do not count.
live_processes() {
	local folder name
	for folder in /proc/[0-9]*; do
		name=$(cat "$folder/comm" 2>/dev/null) || continue
		grep -qs '^VmSize:' "$folder/status" || continue
		case $name in
		# Excludes the unit tests of kubectl's plugin (kubectl_torpor-…) and container engines of
		# packages, which are below /usr.
		etcd | kube-* | kubectl | kubelet | containerd* | runc* | runsc* | pause | coredns)
			[[ $(readlink "$folder/exe" 2>/dev/null) == /usr/* ]] && ! is_marked "$folder" || echo "$name"
			;;
		*) ! is_marked "$folder" || echo "$name" ;;
		esac
	done | sort
}
is_marked() { grep -qsz '^TORPOR_DEV_CLUSTER=' "$1/environ"; }

# is_as_before FILE: compares the machine with FILE, an earlier output of `fingerprint`, and prints
# the differences. Links of network namespaces and processes get a moment to disappear.
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

# differences FILE: prints the differences between FILE and standard input. A setting that FILE does
# not have came with a kernel module that was loaded meanwhile, and does not count.
differences() {
	diff -u --label before --label after "$1" <(awk -F : '
		FNR == NR { known[$1] = 1; next }
		/^# / { settings = $0 == "# settings" }
		!settings || $1 in known' "$1" -)
}

# end_old_swap: removes the swap that a killed run of the tests left behind.
end_old_swap() {
	local file=${1:-/var/tmp/torpor-e2e.swap}
	[ -e "$file" ] || return 0
	swapoff "$file" 2>/dev/null || true
	rm -f "$file"
}
