//! Names of what the manifests in `deploy/` install, and of what its programs look for.

/// Namespace of controller, agent and router.
pub const NAMESPACE: &str = "agent-sandbox-system";
/// Deployment of the controller.
pub const CONTROLLER: &str = "agent-sandbox-controller";
/// Lease of the controller's leader election. Upstream's, so that one of the two controllers works and not both.
pub const CONTROLLER_LEASE: &str = "a3317529.agent-sandbox.x-k8s.io";
/// DaemonSet of the agent.
pub const AGENT: &str = "torpor-agent";
/// Deployment of the router.
pub const ROUTER: &str = "sandbox-router";
/// RuntimeClass, and containerd's handler of the same name.
pub const RUNTIME_CLASS: &str = "torpor";
/// A SandboxNode whose heartbeat is older, in seconds, has no agent that works: three times the agent's interval.
pub const SILENT_AFTER_SECONDS: i64 = 90;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_manifests_have_these_names() {
        let manifests = concat!(
            include_str!("../../deploy/base/namespace.yaml"),
            include_str!("../../deploy/base/controller.yaml"),
            include_str!("../../deploy/base/agent.yaml"),
            include_str!("../../deploy/base/runtimeclass.yaml"),
            include_str!("../../deploy/router/router.yaml"),
        );
        for name in [NAMESPACE, CONTROLLER, AGENT, ROUTER, RUNTIME_CLASS] {
            let line = format!("\n  name: {name}\n");
            assert!(manifests.contains(&line), "{name}");
        }
        let roles = include_str!("../../deploy/base/controller-rbac.yaml");
        assert!(roles.contains(&format!("resourceNames: [{CONTROLLER_LEASE}]")));
    }
}
