package main

import "fmt"

// controlPlaneGroup is etcd and the three control-plane programs. The limits are far above
// Kubernetes' defaults: on one machine a burst of Pods would otherwise measure the client-side
// throttles.
func controlPlaneGroup() group {
	etcd := fmt.Sprintf("127.0.0.1:%d", etcdPort)
	return group{Name: controlPlane, Components: []component{
		{Name: "etcd", Args: []string{
			binDir("etcd"), "--data-dir=" + statePath("etcd"), "--client-url=http://" + etcd,
			fmt.Sprintf("--peer-url=http://127.0.0.1:%d", etcdPeerPort),
		}},
		{Name: "kube-apiserver", After: []string{"tcp:" + etcd}, Args: apiserverArgs(etcd)},
		{Name: "kube-controller-manager", After: []string{apiserverAddress()}, Args: []string{
			binDir("kube-controller-manager"),
			"--kubeconfig=" + statePath("kube-controller-manager.kubeconfig"),
			"--service-account-private-key-file=" + pkiPath("service-account.key"),
			"--root-ca-file=" + pkiPath("ca.crt"),
			"--cluster-signing-cert-file=" + pkiPath("ca.crt"),
			"--cluster-signing-key-file=" + pkiPath("ca.key"),
			"--use-service-account-credentials=true",
			"--leader-elect=false",
			"--enable-hostpath-provisioner=true",
			"--flex-volume-plugin-dir=" + statePath("flexvolume"),
			"--cert-dir=" + statePath("pki", "kube-controller-manager"),
			"--bind-address=127.0.0.1", fmt.Sprintf("--secure-port=%d", controllerManagerPort),
			"--kube-api-qps=5000", "--kube-api-burst=5000",
			// An autoscaler is looked at once in so long, and so is a change of it; 15 s would be
			// most of its test.
			"--horizontal-pod-autoscaler-sync-period=2s",
			"--profiling=false",
		}},
		{Name: "kube-scheduler", After: []string{apiserverAddress()}, Args: []string{
			binDir("kube-scheduler"),
			"--kubeconfig=" + statePath("kube-scheduler.kubeconfig"),
			"--leader-elect=false",
			"--cert-dir=" + statePath("pki", "kube-scheduler"),
			"--bind-address=127.0.0.1", fmt.Sprintf("--secure-port=%d", schedulerPort),
			"--kube-api-qps=5000", "--kube-api-burst=5000",
			"--profiling=false",
		}},
	}}
}

func apiserverAddress() string { return fmt.Sprintf("tcp:%s:%d", machineAddress, apiserverPort) }

func apiserverArgs(etcd string) []string {
	return []string{
		binDir("kube-apiserver"),
		"--etcd-servers=http://" + etcd,
		"--bind-address=" + machineAddress, "--advertise-address=" + machineAddress,
		fmt.Sprintf("--secure-port=%d", apiserverPort),
		"--service-cluster-ip-range=" + serviceNetwork,
		"--tls-cert-file=" + pkiPath("apiserver.crt"), "--tls-private-key-file=" + pkiPath("apiserver.key"),
		"--cert-dir=" + statePath("pki", "kube-apiserver"),
		"--client-ca-file=" + pkiPath("ca.crt"),
		"--service-account-key-file=" + pkiPath("service-account.pub"),
		"--service-account-signing-key-file=" + pkiPath("service-account.key"),
		"--service-account-issuer=https://kubernetes.default.svc." + clusterDomain,
		"--authorization-mode=Node,RBAC",
		"--enable-admission-plugins=NodeRestriction",
		"--kubelet-client-certificate=" + pkiPath("kubelet-client.crt"),
		"--kubelet-client-key=" + pkiPath("kubelet-client.key"),
		"--kubelet-certificate-authority=" + pkiPath("ca.crt"),
		// The node's address is in the kubelet's certificate; its name is not in any resolver.
		"--kubelet-preferred-address-types=InternalIP",
		"--allow-privileged=true",
		"--max-requests-inflight=2000", "--max-mutating-requests-inflight=1000",
		"--profiling=false",
		"--event-ttl=1h",
	}
}

// writeControlPlane puts the files that the control plane reads.
func writeControlPlane() error {
	for _, who := range []string{"kube-controller-manager", "kube-scheduler"} {
		if err := writeKubeconfig(statePath(who+".kubeconfig"), who); err != nil {
			return err
		}
	}
	return writeKubeconfig(adminKubeconfig(), "admin")
}
