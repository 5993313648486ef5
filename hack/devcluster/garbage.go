package main

import "syscall"

const (
	// Go collects garbage when the heap has doubled; where there is memory it may grow to five
	// times what is in use.
	rarely = "GOGC=400"
	// But not beyond this: a program whose heap is larger collects as often as it has to.
	rarelyLimit = "GOMEMLIMIT=1GiB"
	// rarelyFrom is the memory of a machine that has some to spare for it.
	rarelyFrom = 12 << 30
)

// collectingRarely lets the group's programs collect their garbage rarely on a machine with so much
// memory: for tests on few processors, which would do it at the tests' cost. Not containerd: shims
// inherit its environment, and their memory is measured.
func (g group) collectingRarely(memory uint64) group {
	if memory < rarelyFrom {
		return g
	}
	for i, c := range g.Components {
		if c.Name != "containerd" {
			g.Components[i].Env = append(c.Env, rarely, rarelyLimit)
		}
	}
	return g
}

// machineMemory is in bytes; 0 if the kernel does not say it.
func machineMemory() uint64 {
	var info syscall.Sysinfo_t
	if err := syscall.Sysinfo(&info); err != nil {
		return 0
	}
	return uint64(info.Totalram) * uint64(info.Unit)
}
