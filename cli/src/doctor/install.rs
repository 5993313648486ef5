//! Checks of the installation: definitions, controller, lease, router, RuntimeClass.

use std::collections::BTreeSet;
use std::sync::LazyLock;

use k8s_openapi::api::apps::v1::Deployment;
use kube::ResourceExt;
use torpor_api::{crds, install};

use super::facts::Facts;
use super::{Finding, nodes};
use crate::units;

/// Remedy for a missing part of Torpor.
pub(super) const APPLY: &str =
    "kubectl apply -k OVERLAY (a kustomization over deploy with your images), or helm upgrade";

/// Definitions of this version. They are large, as they contain the schema of a Pod.
pub(super) static DEFINITIONS: LazyLock<Vec<serde_json::Value>> = LazyLock::new(crds::definitions);

/// Checks that the definitions exist, are established and are those of this version.
pub fn definitions(facts: &Facts) -> Vec<Finding> {
    let there = match &facts.definitions {
        Ok(there) => there,
        Err(why) => return vec![Finding::unseen("CustomResourceDefinitions", why)],
    };
    let mut findings = Vec::new();
    for wanted in &*DEFINITIONS {
        let name = wanted["metadata"]["name"].as_str().unwrap_or_default();
        let subject = format!("CustomResourceDefinition {name}");
        let Some(found) = there.iter().find(|crd| crd.name_any() == name) else {
            findings.push(Finding::problem(
                subject,
                "is missing",
                "kubectl apply -k deploy/crds",
            ));
            continue;
        };
        let conditions = found.status.as_ref().and_then(|s| s.conditions.as_ref());
        let established = conditions.is_some_and(|all| {
            all.iter()
                .any(|c| c.type_ == "Established" && c.status == "True")
        });
        if !established {
            let text = "is not established: the apiserver does not serve it";
            let remedy =
                format!("see its conditions for the conflict: kubectl describe crd {name}");
            findings.push(Finding::problem(&subject, text, remedy));
        }
        let missing = missing_fields(wanted, &serde_json::json!(found));
        if !missing.is_empty() {
            let text = format!(
                "is of another version: it lacks {}, which the apiserver drops from objects",
                missing.join(", ")
            );
            findings.push(Finding::warning(
                subject,
                text,
                // After an installation by Helm the fields belong to Helm's field manager.
                "kubectl apply --server-side --force-conflicts -k deploy/crds",
            ));
        }
    }
    findings
}

/// Returns the fields of `spec` and `status` of this version that the installed definition lacks.
fn missing_fields(wanted: &serde_json::Value, found: &serde_json::Value) -> Vec<String> {
    let fields = |crd: &serde_json::Value, version: &str| {
        let versions = crd["spec"]["versions"].as_array();
        let version = versions.and_then(|all| all.iter().find(|v| v["name"] == version));
        let schema = version.map(|version| &version["schema"]["openAPIV3Schema"]["properties"]);
        let mut names = BTreeSet::new();
        for part in ["spec", "status"] {
            let properties = schema.and_then(|schema| schema[part]["properties"].as_object());
            let keys = properties.into_iter().flat_map(|all| all.keys());
            names.extend(keys.map(|key| format!("{part}.{key}")));
        }
        names
    };
    let versions = wanted["spec"]["versions"].as_array();
    let versions = versions.into_iter().flatten();
    versions
        .flat_map(|version| {
            let version = version["name"].as_str().unwrap_or_default();
            let known = fields(found, version);
            let all = fields(wanted, version).into_iter();
            all.filter(move |field| !known.contains(field))
        })
        .collect()
}

/// Checks that the controller exists and is ready.
pub fn controller(facts: &Facts) -> Vec<Finding> {
    deployment(facts, install::CONTROLLER).map_or_else(
        |unseen| vec![unseen],
        |found| match found {
            Some(found) => not_ready(facts, found),
            None => vec![Finding::problem(
                format!("Deployment {}/{}", facts.namespace, install::CONTROLLER),
                "is missing: no Sandbox gets a Pod",
                format!("{APPLY}; if Torpor is in another namespace: --torpor-namespace"),
            )],
        },
    )
}

/// Checks that the router is ready, if it is installed. The router is optional.
pub fn router(facts: &Facts) -> Vec<Finding> {
    match deployment(facts, install::ROUTER) {
        Err(unseen) => vec![unseen],
        Ok(None) => Vec::new(),
        Ok(Some(found)) => not_ready(facts, found),
    }
}

fn deployment<'a>(facts: &'a Facts, name: &str) -> Result<Option<&'a Deployment>, Finding> {
    let all = facts.deployments.as_ref();
    let all = all.map_err(|why| Finding::unseen("Deployments", why))?;
    Ok(all.iter().find(|deployment| deployment.name_any() == name))
}

fn not_ready(facts: &Facts, deployment: &Deployment) -> Vec<Finding> {
    let name = deployment.name_any();
    let wanted = deployment.spec.replicas;
    let wanted = wanted.unwrap_or(1);
    let ready = deployment.status.as_ref().and_then(|s| s.ready_replicas);
    let ready = ready.unwrap_or(0);
    if ready >= wanted && wanted > 0 {
        return Vec::new();
    }
    let namespace = &facts.namespace;
    let subject = format!("Deployment {namespace}/{name}");
    let why = nodes::pod_faults(facts, |pod| pod.name_any().starts_with(&name));
    let text = format!("{ready} of {wanted} replicas are ready{why}");
    let remedy = match wanted {
        0 => format!("kubectl -n {namespace} scale deployment {name} --replicas=1"),
        _ => format!(
            "kubectl -n {namespace} describe pods; kubectl -n {namespace} logs deploy/{name}"
        ),
    };
    vec![match ready {
        0 => Finding::problem(subject, text, remedy),
        _ => Finding::warning(subject, text, remedy),
    }]
}

/// Checks that a controller holds the lease and renews it.
pub fn leader(facts: &Facts) -> Vec<Finding> {
    let leases = match &facts.leases {
        Ok(leases) => leases,
        Err(why) => return vec![Finding::unseen("Leases", why)],
    };
    let namespace = &facts.namespace;
    let subject = format!("Lease {namespace}/{}", install::CONTROLLER_LEASE);
    let logs = format!("kubectl -n {namespace} logs deploy/{}", install::CONTROLLER);
    let lease = leases
        .iter()
        .find(|l| l.name_any() == install::CONTROLLER_LEASE);
    let Some(spec) = lease.and_then(|lease| lease.spec.as_ref()) else {
        let text = "is missing: no controller is the leader (or it runs with --leader-elect=false)";
        return vec![Finding::warning(subject, text, logs)];
    };
    let Some(renewed) = &spec.renew_time else {
        return vec![Finding::problem(
            subject,
            "was released: no controller is the leader",
            logs,
        )];
    };
    // The leader renews long before the lease expires; another half covers clock skew.
    let lasts = i64::from(spec.lease_duration_seconds.unwrap_or(15)) * 3 / 2;
    let silent = facts.now.duration_since(renewed.0).as_secs();
    if silent <= lasts {
        return Vec::new();
    }
    let holder = spec.holder_identity.as_deref().unwrap_or("(none)");
    let text = format!(
        "was not renewed for {}: its last holder is {holder}, and no controller is the leader",
        units::age(renewed.0, facts.now)
    );
    vec![Finding::problem(subject, text, logs)]
}

/// Checks that the RuntimeClass exists and names a handler of the nodes.
pub fn runtime_class(facts: &Facts) -> Vec<Finding> {
    let classes = match &facts.runtime_classes {
        Ok(classes) => classes,
        Err(why) => return vec![Finding::unseen("RuntimeClasses", why)],
    };
    let handlers: BTreeSet<&str> = facts
        .sandbox_nodes
        .iter()
        .flatten()
        .filter_map(|node| node.status.as_ref())
        .flat_map(|status| &status.runtimes)
        .map(|runtime| runtime.handler.as_str())
        .collect();
    let serves = |handler: &str| handlers.is_empty() || handlers.contains(handler);
    if classes
        .iter()
        .any(|class| handlers.contains(class.handler.as_str()))
    {
        return Vec::new();
    }
    let subject = format!("RuntimeClass {}", install::RUNTIME_CLASS);
    match classes
        .iter()
        .find(|c| c.name_any() == install::RUNTIME_CLASS)
    {
        Some(class) if serves(&class.handler) => Vec::new(),
        Some(class) => {
            let known: Vec<&str> = handlers.into_iter().collect();
            let text = format!(
                "names the handler {}, but the nodes have {}: its Pods do not start",
                class.handler,
                known.join(", ")
            );
            vec![Finding::problem(
                subject,
                text,
                "set the same handler in the RuntimeClass and in the agents' --runtime-handler",
            )]
        }
        None => vec![Finding::problem(
            subject,
            "is missing: Pods that name it are refused, and other Pods cannot hibernate",
            APPLY,
        )],
    }
}
