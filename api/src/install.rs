//! Names of the objects that the manifests in `deploy/` install and that Torpor's programs look up.

/// Namespace of the controller, the agent and the router.
pub const NAMESPACE: &str = "agent-sandbox-system";
/// Deployment of the controller.
pub const CONTROLLER: &str = "agent-sandbox-controller";
/// Lease of the controller's leader election. The name is upstream's, so that only one of the two
/// controllers works.
pub const CONTROLLER_LEASE: &str = "a3317529.agent-sandbox.x-k8s.io";
/// DaemonSet of the agent.
pub const AGENT: &str = "torpor-agent";
/// DaemonSet of the installer, which puts the runtime on the nodes.
pub const INSTALLER: &str = "torpor-installer";
/// Deployment of the router.
pub const ROUTER: &str = "sandbox-router";
/// RuntimeClass, and containerd's handler of the same name.
pub const RUNTIME_CLASS: &str = "torpor";
/// Age in seconds of a SandboxNode's heartbeat above which its agent counts as not working: three
/// times the agent's interval.
pub const SILENT_AFTER_SECONDS: i64 = 90;

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    fn objects(manifests: &str) -> Vec<Value> {
        let documents = manifests.split("\n---\n");
        documents
            .map(|document| serde_saphyr::from_str(document).unwrap())
            .collect()
    }

    #[test]
    fn the_manifests_have_these_names() {
        let manifests = concat!(
            include_str!("../../deploy/base/namespace.yaml"),
            include_str!("../../deploy/base/controller.yaml"),
            include_str!("../../deploy/base/agent.yaml"),
            include_str!("../../deploy/base/installer.yaml"),
            include_str!("../../deploy/base/runtimeclass.yaml"),
            include_str!("../../deploy/router/router.yaml"),
        );
        for name in [
            NAMESPACE,
            CONTROLLER,
            AGENT,
            INSTALLER,
            ROUTER,
            RUNTIME_CLASS,
        ] {
            let line = format!("\n  name: {name}\n");
            assert!(manifests.contains(&line), "{name}");
        }
        let roles = include_str!("../../deploy/base/controller-rbac.yaml");
        assert!(roles.contains(&format!("resourceNames: [{CONTROLLER_LEASE}]")));
    }

    #[test]
    fn the_quota_covers_the_priority_class_of_agents_and_uninstall_jobs() {
        let quota = objects(include_str!("../../deploy/base/quota.yaml"));
        let scope = &quota[0]["spec"]["scopeSelector"]["matchExpressions"][0];
        for workload in [
            include_str!("../../deploy/base/agent.yaml"),
            include_str!("../../deploy/base/installer.yaml"),
            include_str!("../../deploy/uninstall/job.yaml"),
        ] {
            let workload = &objects(workload)[0];
            let priority = &workload["spec"]["template"]["spec"]["priorityClassName"];
            assert_eq!(scope["values"][0], *priority);
            assert_eq!(
                quota[0]["metadata"]["namespace"],
                workload["metadata"]["namespace"]
            );
        }
    }

    #[test]
    fn long_running_containers_on_a_node_have_no_rights_on_the_host() {
        let manifests = objects(concat!(
            include_str!("../../deploy/base/agent.yaml"),
            "\n---\n",
            include_str!("../../deploy/base/installer.yaml"),
        ));
        for set in &manifests {
            let pod = &set["spec"]["template"]["spec"];
            for container in pod["containers"].as_array().unwrap() {
                let rights = &container["securityContext"];
                assert_eq!(rights["allowPrivilegeEscalation"], false);
                assert_eq!(rights["capabilities"]["drop"], serde_json::json!(["ALL"]));
                assert!(rights["privileged"].is_null());
                let mounts = container["volumeMounts"].as_array();
                let whole = |mount: &&Value| mount["name"] == "host";
                assert_eq!(mounts.into_iter().flatten().filter(whole).count(), 0);
            }
        }
        let (agent, installer) = (
            &manifests[0]["spec"]["template"]["spec"],
            &manifests[1]["spec"]["template"]["spec"],
        );
        for field in ["hostPID", "hostNetwork", "hostIPC", "initContainers"] {
            assert!(agent[field].is_null(), "{field}");
        }
        assert_eq!(installer["automountServiceAccountToken"], false);
    }

    #[test]
    fn the_admission_policy_names_the_conditions_and_the_finalizer_that_agents_write() {
        let policy = include_str!("../../deploy/base/admission.yaml");
        let written = [
            crate::conditions::POD_HIBERNATED,
            crate::conditions::POD_RESTORED,
            crate::conditions::POD_BOUND,
            crate::conditions::POD_RESTORE_SETTLED,
            crate::pod_snapshot::POD_RESTORED,
        ];
        let all = written.map(|name| format!("'{name}'")).join(", ");
        assert!(policy.contains(&format!("\"[{all}]\"")), "{all}");
        let finalizer = format!("name != '{}'", crate::annotations::IMAGE_FINALIZER);
        assert_eq!(policy.matches(&finalizer).count(), 2);
        let accounts = [AGENT, ROUTER].map(|name| format!("endsWith(':{name}')"));
        let all = [policy, include_str!("../../deploy/router/admission.yaml")];
        for (policy, account) in all.iter().zip(accounts) {
            let policies = policy.matches("kind: ValidatingAdmissionPolicy\n").count();
            assert_eq!(policy.matches(&account).count(), policies);
            let bindings = policy.matches("kind: ValidatingAdmissionPolicyBinding\n");
            assert_eq!(bindings.count(), policies);
            assert_eq!(policy.matches("failurePolicy: Fail\n").count(), policies);
            let denied = policy.matches("validationActions: [Deny]\n").count();
            assert_eq!(denied, policies);
        }
    }

    #[test]
    fn network_policies_open_metrics_to_some_images_to_agents_the_proxy_to_all_and_keep_health_closed()
     {
        let manifests = objects(concat!(
            include_str!("../../deploy/base/controller.yaml"),
            "\n---\n",
            include_str!("../../deploy/base/agent.yaml"),
            "\n---\n",
            include_str!("../../deploy/router/router.yaml"),
        ));
        let policies = objects(include_str!("../../deploy/networkpolicy/policies.yaml"));
        for name in [CONTROLLER, AGENT, ROUTER] {
            let named = |object: &&Value| object["metadata"]["name"] == name;
            let policy = &policies.iter().find(named).unwrap()["spec"];
            let mut templates = manifests
                .iter()
                .filter(named)
                .map(|o| &o["spec"]["template"]);
            let pod = templates.find(|template| template.is_object()).unwrap();
            for (key, value) in policy["podSelector"]["matchLabels"].as_object().unwrap() {
                assert_eq!(&pod["metadata"]["labels"][key], value, "{name}");
            }
            let port = |called: &str| {
                let ports = pod["spec"]["containers"][0]["ports"].as_array();
                let found = ports.unwrap().iter().find(|port| port["name"] == called);
                found.map(|port| &port["containerPort"])
            };
            let opened = |rule: usize| -> Vec<&Value> {
                let ports = policy["ingress"][rule]["ports"].as_array();
                ports
                    .into_iter()
                    .flatten()
                    .map(|port| &port["port"])
                    .collect()
            };
            assert!(policy["ingress"][0]["from"][0].is_object(), "{name}");
            assert_eq!(opened(0), [port("metrics").unwrap()], "{name}");
            let second = port("http").or_else(|| port("images"));
            assert_eq!(opened(1).first().copied(), second, "{name}");
            assert!(!opened(1).contains(&port("health").unwrap()), "{name}");
            let from = &policy["ingress"][1]["from"];
            match name == AGENT {
                true => assert_eq!(from[0]["podSelector"], policy["podSelector"], "{name}"),
                false => assert!(from.is_null(), "{name}"),
            }
        }
    }
}
