package main

import (
	"slices"
	"testing"
)

func TestGarbageIsCollectedRarelyWhereThereIsMemoryAndNeverByWhatContainersInherit(t *testing.T) {
	rare := func(g group, name string) bool {
		i := slices.IndexFunc(g.Components, func(c component) bool { return c.Name == name })
		return i >= 0 && slices.Equal(g.Components[i].Env, []string{rarely, rarelyLimit})
	}
	plane, worker := controlPlaneGroup().collectingRarely(rarelyFrom), node{0}.group().collectingRarely(rarelyFrom)
	if !rare(plane, "kube-apiserver") || !rare(plane, "etcd") || !rare(worker, "kubelet") {
		t.Errorf("they collect as always: %v, %v", plane, worker)
	}
	for _, c := range worker.Components {
		if c.Name == "containerd" && len(c.Env) != 0 {
			t.Errorf("containerd's environment: %v", c.Env)
		}
	}
	for what, g := range map[string]group{
		"a small machine":         controlPlaneGroup().collectingRarely(rarelyFrom - 1),
		"the benchmark of claims": benchGroup(),
	} {
		for _, c := range g.Components {
			if len(c.Env) != 0 {
				t.Errorf("%s: the environment of %s is %v", what, c.Name, c.Env)
			}
		}
	}
}
