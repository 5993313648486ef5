package main

import (
	"fmt"
	"os"
	"strconv"
	"strings"
)

// group is containerd, the kubelet and kube-proxy of one node.
func (n node) group() group {
	g := group{Name: n.name(), Components: []component{
		{Name: "containerd", Args: []string{binDir("containerd"), "--config", inner.containerdConfig()}},
		{
			Name: "kubelet", After: []string{"unix:" + inner.containerdSocket()},
			Args: []string{
				binDir("kubelet"),
				"--config=" + inner.state("kubelet.yaml"),
				"--kubeconfig=" + inner.state("kubelet.kubeconfig"),
				"--hostname-override=" + n.name(),
				"--node-ip=" + n.address(),
				"--root-dir=" + inner.state("kubelet"),
			},
		},
		{
			Name: "kube-proxy", After: []string{apiserverAddress()},
			Args: []string{binDir("kube-proxy"), "--config=" + inner.state("kube-proxy.yaml")},
		},
	}}
	if !n.onMachine() {
		g.Cgroup = n.ownCgroup()
		// A Pod of a DaemonSet would come before its image.
		g.Components[1].After = append(g.Components[1].After, "file:"+n.imagesMark())
	}
	return g
}

// write puts the files that the node's programs read.
func (n node) write() error {
	for _, dir := range []string{n.state("containerd", "conf.d"), n.state("kubelet"), n.state("pod-logs"), n.run()} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	if err := writeKubeconfig(n.state("kubelet.kubeconfig"), n.name()); err != nil {
		return err
	}
	if err := writeKubeconfig(n.state("kube-proxy.kubeconfig"), "kube-proxy"); err != nil {
		return err
	}
	files := map[string]string{
		n.containerdConfig():                       containerdTOML(),
		n.state("cni", "net.d", "10-dev.conflist"): n.cniConfig(podsHaveIPv6()),
		n.state("kubelet.yaml"):                    n.kubeletYAML(),
		n.state("kube-proxy.yaml"):                 n.proxyYAML(),
		// Pods with dnsPolicy Default get this; there is nothing outside the cluster to ask.
		n.state("resolv.conf"): "nameserver " + dnsServiceIP + "\n",
	}
	for path, content := range files {
		if err := writeFile(path, []byte(content), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// containerdTOML keeps containerd within our folders. Handlers are added by files in conf.d, which
// the product's installer writes.
func containerdTOML() string {
	if isContainerd1() {
		return containerd1TOML()
	}
	return fmt.Sprintf(`version = 3
root = "%[1]s"
state = "%[2]s"
imports = ["%[3]s/*.toml"]
oom_score = 0
# No plugin of ours runs here, and NRI's socket would lie outside our folders.
disabled_plugins = ["io.containerd.nri.v1.nri", "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.zfs", "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.blockfile", "io.containerd.snapshotter.v1.erofs", "io.containerd.tracing.processor.v1.otlp", "io.containerd.internal.v1.tracing"]

[grpc]
  address = "%[4]s"
[ttrpc]
  address = "%[4]s.ttrpc"

[plugins."io.containerd.internal.v1.opt"]
  path = "%[1]s/opt"
[plugins."io.containerd.cri.v1.images"]
  snapshotter = "overlayfs"
[plugins."io.containerd.cri.v1.images".pinned_images]
  sandbox = "%[5]s"

[plugins."io.containerd.cri.v1.runtime"]
  # Without CAP_SYS_RESOURCE no process may be given a lower score than its parent's.
  restrict_oom_score_adj = %[6]t
  # Below our own folder, so that a network namespace left by a crash is known to be ours.
  netns_mounts_under_state_dir = true
  cdi_spec_dirs = []
  [plugins."io.containerd.cri.v1.runtime".cni]
    bin_dirs = ["%[7]s"]
    conf_dir = "%[8]s"
  [plugins."io.containerd.cri.v1.runtime".containerd]
    default_runtime_name = "runc"
    [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
        BinaryName = "%[7]s/runc"
        Root = "%[9]s"
        SystemdCgroup = false
`, inner.state("containerd", "root"), inner.run("containerd"), inner.state("containerd", "conf.d"), inner.containerdSocket(),
		pauseImage, !hasCapability(capSysResource), binDir(), inner.state("cni", "net.d"), inner.run("runc"))
}

// containerd1TOML is the same for containerd 1.7.
func containerd1TOML() string {
	return fmt.Sprintf(`version = 2
root = "%[1]s"
state = "%[2]s"
imports = ["%[3]s/*.toml"]
oom_score = 0
disabled_plugins = ["io.containerd.nri.v1.nri", "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.zfs", "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.blockfile", "io.containerd.tracing.processor.v1.otlp", "io.containerd.internal.v1.tracing"]

[grpc]
  address = "%[4]s"
[ttrpc]
  address = "%[4]s.ttrpc"

[plugins."io.containerd.internal.v1.opt"]
  path = "%[1]s/opt"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "%[5]s"
  restrict_oom_score_adj = %[6]t
  netns_mounts_under_state_dir = true
  cdi_spec_dirs = []
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "%[7]s"
    conf_dir = "%[8]s"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        BinaryName = "%[7]s/runc"
        Root = "%[9]s"
        SystemdCgroup = false
`, inner.state("containerd", "root"), inner.run("containerd"), inner.state("containerd", "conf.d"), inner.containerdSocket(),
		pauseImage, !hasCapability(capSysResource), binDir(), inner.state("cni", "net.d"), inner.run("runc"))
}

// ipv6Routes does not exist where the kernel has no IPv6, and ipv6Disabled holds 1 where new links
// get no IPv6.
const (
	ipv6Routes   = "/proc/net/ipv6_route"
	ipv6Disabled = "/proc/sys/net/ipv6/conf/default/disable_ipv6"
)

// podsHaveIPv6 reports whether Pods get IPv6 addresses too. The bridge plugin makes the machine
// forward then, and a machine that forwards does not heed routers' advertisements: one that has its
// default route from them would lose it.
func podsHaveIPv6() bool {
	disabled, err := os.ReadFile(ipv6Disabled)
	if err != nil || strings.TrimSpace(string(disabled)) != "0" {
		return false
	}
	routes, err := os.ReadFile(ipv6Routes)
	return err == nil && !hasAdvertisedDefaultRoute(string(routes))
}

// hasAdvertisedDefaultRoute reads /proc/net/ipv6_route: destination, its prefix's length, source,
// its prefix's length, next hop, metric, references, uses, flags, link. RTF_ADDRCONF marks a
// route of a router advertisement.
func hasAdvertisedDefaultRoute(routes string) bool {
	const addrconf = 0x40000
	for line := range strings.Lines(routes) {
		fields := strings.Fields(line)
		if len(fields) < 10 || fields[1] != "00" {
			continue
		}
		if flags, err := strconv.ParseUint(fields[8], 16, 32); err == nil && flags&addrconf != 0 {
			return true
		}
	}
	return false
}

// cniConfig is a bridge with addresses of the node's own ranges. Pods are not masqueraded: nothing
// outside the machine is to be reached.
func (n node) cniConfig(ipv6 bool) string {
	ranges, routes := fmt.Sprintf(`[{"subnet": "%s"}]`, n.podCIDR()), `{"dst": "0.0.0.0/0"}`
	if ipv6 {
		ranges += fmt.Sprintf(`, [{"subnet": "%s"}]`, n.podCIDR6())
		routes += `, {"dst": "::/0"}`
	}
	return fmt.Sprintf(`{
  "cniVersion": "1.0.0",
  "name": "torpor-dev-%d",
  "plugins": [
    {
      "type": "bridge", "bridge": "%s", "isGateway": true, "hairpinMode": true, "ipMasq": false,
      "ipam": {
        "type": "host-local", "dataDir": "%s",
        "ranges": [%s], "routes": [%s]
      }
    },
    {"type": "portmap", "capabilities": {"portMappings": true}, "backend": "nftables"}
  ]
}
`, n.index, n.podBridge(), inner.state("cni", "addresses"), ranges, routes)
}

func (n node) kubeletYAML() string {
	return fmt.Sprintf(`apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication: {anonymous: {enabled: false}, webhook: {enabled: true}, x509: {clientCAFile: %[1]s}}
authorization: {mode: Webhook}
tlsCertFile: %[2]s
tlsPrivateKeyFile: %[3]s
address: %[4]s
port: %[5]d
healthzBindAddress: %[14]s
healthzPort: %[6]d
clusterDNS: [%[7]s]
clusterDomain: %[8]s
resolvConf: %[9]s
containerRuntimeEndpoint: unix://%[10]s
cgroupDriver: cgroupfs
cgroupRoot: /%[11]s
failCgroupV1: false
failSwapOn: false
# The kubelet's own iptables chains are of no use beside kube-proxy in nftables mode.
makeIPTablesUtilChains: false
podLogsDir: %[12]s
volumePluginDir: %[13]s
evictionHard: {nodefs.available: 1Mi, imagefs.available: 1Mi, memory.available: 50Mi}
imageGCHighThresholdPercent: 100
maxPods: 1010
serializeImagePulls: false
kubeAPIQPS: 500
kubeAPIBurst: 1000
registryPullQPS: 0
eventRecordQPS: 0
`, pkiPath("ca.crt"), pkiPath(n.name()+"-server.crt"), pkiPath(n.name()+"-server.key"), n.address(), kubeletPort,
		kubeletHealthPort, dnsServiceIP, clusterDomain, inner.state("resolv.conf"), inner.containerdSocket(), n.cgroup(),
		inner.state("pod-logs"), inner.state("kubelet", "flexvolume"), n.healthAddress())
}

// proxyYAML leaves the machine's conntrack limits alone. Where bridged packets do not pass the
// packet filter, replies between Pods of one bridge would bypass the translation, so Service
// traffic is masqueraded.
func (n node) proxyYAML() string {
	return fmt.Sprintf(`apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: nftables
clientConnection: {kubeconfig: %s, qps: 500, burst: 1000}
hostnameOverride: %s
clusterCIDR: %s
bindAddress: %s
healthzBindAddress: 127.0.0.1:%d
metricsBindAddress: 127.0.0.1:%d
nodePortAddresses: [primary]
nftables: {masqueradeAll: %t, minSyncPeriod: 100ms}
conntrack: {maxPerCore: 0, min: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}
`, inner.state("kube-proxy.kubeconfig"), n.name(), podNetwork, n.address(), proxyHealthPort, proxyMetricsPort, !fileExists(bridgeFilter))
}

// bridgeFilter exists where the kernel can pass bridged packets to the packet filter.
const bridgeFilter = "/proc/sys/net/bridge/bridge-nf-call-iptables"
