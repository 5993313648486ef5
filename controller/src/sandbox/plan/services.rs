//! Plans the headless Service. With `spec.service` unset an own Service stays; true creates one;
//! false deletes it.

use std::{collections::BTreeMap, sync::Arc};

use k8s_openapi::{
    api::core::v1::{Container, PodSpec, Service, ServicePort},
    apimachinery::pkg::util::intstr::IntOrString,
};
use kube::ResourceExt;
use serde_json::json;
use torpor_api::labels;

use super::{
    Action, Area, Plan, ServiceOutlook,
    claims::{not_adoptable, owned_by_other},
};
use crate::{
    merge_patch,
    owners::owner_reference,
    sandbox::{
        dereference::Observed,
        validate::{Desired, Ownership, may_adopt, ownership},
    },
};

/// Plans the Service.
pub(super) fn plan(plan: &mut Plan, desired: &Desired<'_>, observed: &Observed) {
    let wish = desired.sandbox.spec.service;
    plan.service = match (&observed.service, wish) {
        (None, Some(true)) => {
            plan.step(Area::Service, Action::CreateService(new_service(desired)));
            ServiceOutlook::Wanted
        }
        (None, _) => ServiceOutlook::None,
        (Some(service), Some(false)) => {
            if ownership(&**service, desired.sandbox) == Ownership::Ours {
                let (name, uid) = (service.name_any(), service.uid().unwrap_or_default());
                plan.step(Area::Service, Action::DeleteService { name, uid });
            }
            ServiceOutlook::None
        }
        (Some(service), wish) => existing(plan, desired, service, wish == Some(true)),
    };
}

fn existing(
    plan: &mut Plan,
    desired: &Desired<'_>,
    service: &Arc<Service>,
    asked_for: bool,
) -> ServiceOutlook {
    let name = service.name_any();
    match ownership(&**service, desired.sandbox) {
        Ownership::Other(owner) => {
            let why = owned_by_other("service", &name, &owner, &desired.name);
            plan.refuse(Area::Service, why);
            return ServiceOutlook::Untouched;
        }
        Ownership::Nobody if !asked_for => return ServiceOutlook::None,
        Ownership::Nobody => {
            if let Err(why) = adoptable(service, desired) {
                plan.refuse(Area::Service, why);
                return ServiceOutlook::Untouched;
            }
            let mut owners = service.owner_references().to_vec();
            owners.push(owner_reference(desired.sandbox));
            let mut patch = drift(service, desired, true).unwrap_or_else(|| json!({}));
            // The resourceVersion limits the update to the examined version.
            patch["metadata"]["resourceVersion"] = json!(service.resource_version());
            patch["metadata"]["ownerReferences"] = json!(owners);
            plan.step(
                Area::Service,
                Action::PatchService {
                    name,
                    patch,
                    adopts: true,
                },
            );
        }
        Ownership::Ours => {
            if let Some(patch) = drift(service, desired, asked_for) {
                plan.step(
                    Area::Service,
                    Action::PatchService {
                        name,
                        patch,
                        adopts: false,
                    },
                );
            }
        }
    }
    ServiceOutlook::Exists(Arc::clone(service))
}

fn adoptable(service: &Service, desired: &Desired<'_>) -> Result<(), String> {
    let name = service.name_any();
    if !may_adopt(service, &desired.hash) {
        return Err(not_adoptable("service", &name));
    }
    let address = service
        .spec
        .as_ref()
        .and_then(|spec| spec.cluster_ip.as_deref())
        .unwrap_or("");
    if address.is_empty() || address == "None" {
        return Ok(());
    }
    Err(format!(
        "cannot adopt service {name:?}: ClusterIP is {address:?} (expected \"None\", field is immutable)"
    ))
}

/// Returns the patch that restores the wanted fields of an own Service.
fn drift(service: &Service, desired: &Desired<'_>, asked_for: bool) -> Option<serde_json::Value> {
    let spec = service.spec.as_ref();
    let mut patch = json!({});
    if service.labels().get(labels::SANDBOX_NAME_HASH) != Some(&desired.hash) {
        patch["metadata"] = json!({"labels": {labels::SANDBOX_NAME_HASH: desired.hash}});
    }
    let selector = selector_patch(service, desired);
    if selector.is_object() {
        patch["spec"]["selector"] = selector;
    }
    let have = spec.and_then(|spec| spec.ports.as_deref()).unwrap_or(&[]);
    let want = ports(desired);
    if asked_for && !same_ports(have, &want) {
        patch["spec"]["ports"] = json!(want);
    }
    (patch != json!({})).then_some(patch)
}

/// Returns the patch that reduces the selector to the name hash, or null if it is that.
fn selector_patch(service: &Service, desired: &Desired<'_>) -> serde_json::Value {
    let have = service
        .spec
        .as_ref()
        .and_then(|spec| spec.selector.clone())
        .unwrap_or_default();
    let want = BTreeMap::from([(labels::SANDBOX_NAME_HASH.to_owned(), desired.hash.clone())]);
    merge_patch::difference(&json!(have), &json!(want)).unwrap_or_default()
}

fn same_ports(have: &[ServicePort], want: &[ServicePort]) -> bool {
    have.len() == want.len()
        && have.iter().zip(want).all(|(a, b)| {
            a.name == b.name
                && a.protocol == b.protocol
                && a.port == b.port
                && a.target_port == b.target_port
        })
}

fn new_service(desired: &Desired<'_>) -> serde_json::Value {
    let selector = json!({labels::SANDBOX_NAME_HASH: desired.hash});
    let mut service = json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": desired.name,
            "namespace": desired.namespace,
            "labels": selector,
            "ownerReferences": [owner_reference(desired.sandbox)],
        },
        "spec": {"clusterIP": "None", "selector": selector},
    });
    let ports = ports(desired);
    if !ports.is_empty() {
        service["spec"]["ports"] = json!(ports);
    }
    service
}

fn ports(desired: &Desired<'_>) -> Vec<ServicePort> {
    desired
        .template
        .as_ref()
        .map_or_else(|_| Vec::new(), service_ports)
}

/// Returns the ports of the Service, ordered by port, then protocol.
///
/// There is one for each (port, protocol) of the containers and of the init containers that keep
/// running. The first explicit name of a port is kept. A port without a name, or with a taken one,
/// is named `p-<port>-<protocol>`.
pub(super) fn service_ports(spec: &PodSpec) -> Vec<ServicePort> {
    let sidecars = spec
        .init_containers
        .iter()
        .flatten()
        .filter(|container| container.restart_policy.as_deref() == Some("Always"));
    let mut names: BTreeMap<(i32, String), Option<String>> = BTreeMap::new();
    let mut taken: Vec<String> = Vec::new();
    for container in spec.containers.iter().chain(sidecars) {
        collect_ports(container, &mut names, &mut taken);
    }
    names
        .into_iter()
        .map(|((port, protocol), name)| {
            let name = name.unwrap_or_else(|| {
                let name = free_name(port, &protocol, &taken);
                taken.push(name.clone());
                name
            });
            ServicePort {
                name: Some(name),
                port,
                protocol: Some(protocol),
                target_port: Some(IntOrString::Int(port)),
                ..ServicePort::default()
            }
        })
        .collect()
}

fn collect_ports(
    container: &Container,
    names: &mut BTreeMap<(i32, String), Option<String>>,
    taken: &mut Vec<String>,
) {
    for port in container
        .ports
        .iter()
        .flatten()
        .filter(|port| port.container_port != 0)
    {
        let protocol = port.protocol.clone().filter(|p| !p.is_empty());
        let key = (
            port.container_port,
            protocol.unwrap_or_else(|| "TCP".to_owned()),
        );
        let entry = names.entry(key).or_default();
        let Some(name) = port.name.clone().filter(|name| !name.is_empty()) else {
            continue;
        };
        if entry.is_none() && !taken.contains(&name) {
            taken.push(name.clone());
            *entry = Some(name);
        }
    }
}

fn free_name(port: i32, protocol: &str, taken: &[String]) -> String {
    let base = format!("p-{port}-{}", protocol.to_lowercase());
    let mut name = base.clone();
    let mut number = 2;
    while taken.contains(&name) {
        name = format!("{base}-{number}");
        number += 1;
    }
    name
}

#[cfg(test)]
mod tests;
