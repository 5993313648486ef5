# Sourced by the benchmarks of sandboxes that sleep: swap of their own.

SWAP='' ZRAM=''

# KIND MEGABYTES. zram, as torpor-agent makes it with --doze-swap=zram, where the kernel has it; else a file. It comes before the node's.
swap_on() {
	if [ "$1" = zram ] && [ -r /sys/class/zram-control/hot_add ]; then
		ZRAM=$(cat /sys/class/zram-control/hot_add)
		echo "${2}M" >"/sys/block/zram$ZRAM/disksize"
		[ -b "/dev/zram$ZRAM" ] || mknod "/dev/zram$ZRAM" b "$(cut -d: -f1 "/sys/block/zram$ZRAM/dev")" "$(cut -d: -f2 "/sys/block/zram$ZRAM/dev")"
		SWAP=/dev/zram$ZRAM
	else
		SWAP=$(mktemp /var/tmp/torpor-bench-swap-XXXXXX)
		fallocate -l "${2}M" "$SWAP"
	fi
	mkswap -q "$SWAP" >/dev/null
	swapon --priority 32767 "$SWAP"
}

swap_off() {
	# It may not be swap yet; while it is, it stays.
	[ -z "$SWAP" ] || swapoff "$SWAP" || ! grep -q "^$SWAP " /proc/swaps
	case $SWAP in /var/tmp/*) rm -f "$SWAP" ;; esac
	[ -z "$ZRAM" ] || echo "$ZRAM" >/sys/class/zram-control/hot_remove
}
