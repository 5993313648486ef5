//! Plans the PersistentVolumeClaims of the volume claim templates. They are created once, never
//! changed, and deleted with the Sandbox.

use kube::ResourceExt;
use serde_json::json;
use torpor_api::labels;

use super::{Action, Area, Plan};
use crate::owners::owner_reference;
use crate::sandbox::{
    dereference::{Observed, claim_name},
    validate::{Desired, Ownership, may_adopt, ownership},
};

/// Plans the claims. The first failure ends it, as upstream.
pub(super) fn plan(plan: &mut Plan, desired: &Desired<'_>, observed: &Observed) {
    for template in &desired.sandbox.spec.volume_claim_templates {
        let name = claim_name(&template.metadata.name, &desired.name);
        let Some(claim) = observed.claims.get(&name) else {
            let mut claim_labels = template.metadata.labels.clone().unwrap_or_default();
            claim_labels.insert(labels::SANDBOX_NAME_HASH.to_owned(), desired.hash.clone());
            let claim = json!({
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "metadata": {
                    "name": name,
                    "namespace": desired.namespace,
                    "labels": claim_labels,
                    "annotations": template.metadata.annotations,
                    "ownerReferences": [owner_reference(desired.sandbox)],
                },
                "spec": template.spec,
            });
            plan.step(Area::Claims, Action::CreateClaim(claim));
            continue;
        };
        match ownership(&**claim, desired.sandbox) {
            Ownership::Ours => {}
            Ownership::Nobody if may_adopt(&**claim, &desired.hash) => {
                let mut owners = claim.owner_references().to_vec();
                owners.push(owner_reference(desired.sandbox));
                let patch = json!({"metadata": {"uid": claim.uid(), "ownerReferences": owners}});
                plan.step(Area::Claims, Action::PatchClaim { name, patch });
            }
            Ownership::Nobody => {
                return plan.refuse(Area::Claims, not_adoptable("PVC", &name));
            }
            Ownership::Other(owner) => {
                let why = owned_by_other("PVC", &name, &owner, &desired.name);
                return plan.refuse(Area::Claims, why);
            }
        }
    }
}

/// Returns upstream's message for an object of the right name with another controller.
pub(super) fn owned_by_other(
    kind: &str,
    name: &str,
    owner: &k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference,
    sandbox: &str,
) -> String {
    let (owner_kind, owner_name, uid) = (&owner.kind, &owner.name, &owner.uid);
    format!(
        "{kind} {name:?} is owned by {owner_kind}/{owner_name} (UID: {uid}), not by sandbox {sandbox:?}"
    )
}

/// Returns upstream's message for an object of the right name that has no controller and may not be
/// adopted.
pub(super) fn not_adoptable(kind: &str, name: &str) -> String {
    let (adoptable, tracking) = (labels::ADOPTABLE, labels::SANDBOX_NAME_HASH);
    format!(
        "cannot adopt unowned {kind} {name:?}: missing required pool authorization label ({adoptable:?}) or sandbox tracking label ({tracking:?})"
    )
}

/// Reports whether a condition's message is one of these two, which a Sandbox of another name would
/// not have.
pub(crate) fn is_name_taken(message: &str) -> bool {
    message.contains(", not by sandbox ") || message.contains("cannot adopt unowned ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_taken_name_is_distinguished_from_a_refused_pod() {
        let owned = owned_by_other("pod", "a", &Default::default(), "a");
        let unowned = not_adoptable("pod", "a");
        for taken in [owned, unowned] {
            assert!(is_name_taken(&format!("Error seen: {taken}")), "{taken}");
        }
        let quota = "Error seen: pods \"a\" is forbidden: exceeded quota: q, requested: pods=1";
        assert!(!is_name_taken(quota));
    }
}
