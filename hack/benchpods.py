"""What the benchmarks of Pods that sleep read of one on its node."""

import glob, json, os, time


def until(words, condition, seconds=90):
    deadline = time.time() + seconds
    while not condition():
        assert time.time() < deadline, words
        time.sleep(0.02)


def cpu(cgroup):
    """Seconds of processor time of a cgroup so far."""
    for folder in ["cpuacct", "cpu,cpuacct"]:
        path = f"/sys/fs/cgroup/{folder}/{cgroup}/cpuacct.usage"
        if os.path.exists(path):
            return int(open(path).read()) / 1e9
    return int(open(f"/sys/fs/cgroup/{cgroup}/cpu.stat").readline().split()[1]) / 1e6


class Pod:
    """A Pod of this node, by what the API says of it."""

    def __init__(self, said):
        self.ip, self.uid = said["status"]["podIP"], said["metadata"]["uid"]
        found = [path for path in glob.glob("/run/torpor/pods/*/pod.json") if self.uid in open(path).read()]
        self.dir = os.path.dirname(found[0])
        self.sandbox = os.path.basename(self.dir)
        # The sandbox' own; the Pod's is around it.
        self.cgroup = json.load(open(found[0]))["cgroup"]
        self.pod_cgroup = os.path.dirname(self.cgroup)

    def note(self, name):
        """A record of torpor-oci's; empty where there is none."""
        try:
            return json.load(open(f"{self.dir}/{name}"))
        except (FileNotFoundError, ValueError):
            return {}

    def dozes(self):
        return self.note("doze.json").get("reclaimed", False)

    def hibernates(self):
        return "Hibernated" in str(self.note("state.json"))
