//! Check for Sandboxes and templates that name no RuntimeClass although one keeps memory.
//!
//! The controller treats them as upstream does: a suspension loses their memory.

use std::collections::BTreeSet;

use kube::ResourceExt;
use torpor_api::annotations::SANDBOX_TEMPLATE_REF;
use torpor_api::{Sandbox, node};

use super::Finding;
use super::facts::Facts;

/// Maximum number of Sandboxes that a finding names.
const NAMED: usize = 3;

/// Returns a finding for each such template, and one for all such Sandboxes of no such template.
pub fn plain(facts: &Facts) -> Vec<Finding> {
    let classes = facts.runtime_classes.iter().flatten();
    let Some(class) = node::hibernating_class(classes, facts.sandbox_nodes.iter().flatten()) else {
        return Vec::new();
    };
    let remedy = format!(
        "set podTemplate.spec.runtimeClassName to {class} for new Sandboxes; or annotate the podTemplate with torpor.dev/suspension-strategy: Stop"
    );
    let loses = "no RuntimeClass: a suspension loses the memory, as upstream's does";
    let mut reported = BTreeSet::new();
    let mut findings = Vec::new();
    // The definition of templates may be missing.
    for template in facts.templates.iter().flatten() {
        if template.spec.pod_template.is_plain(None) {
            let (namespace, name) = (
                template.namespace().unwrap_or_default(),
                template.name_any(),
            );
            let subject = format!("SandboxTemplate {namespace}/{name}");
            findings.push(Finding::warning(subject, format!("names {loses}"), &remedy));
            reported.insert((namespace, name));
        }
    }
    let is_left = |sandbox: &&Sandbox| {
        let template = sandbox.annotations().get(SANDBOX_TEMPLATE_REF);
        let template = (
            sandbox.namespace().unwrap_or_default(),
            template.cloned().unwrap_or_default(),
        );
        let own = sandbox.metadata.annotations.as_ref();
        sandbox.spec.pod_template.is_plain(own) && !reported.contains(&template)
    };
    let left: Vec<&Sandbox> = facts.sandboxes.iter().flatten().filter(is_left).collect();
    let names = left.iter().take(NAMED).map(|sandbox| {
        let namespace = sandbox.namespace().unwrap_or_default();
        format!("{namespace}/{}", sandbox.name_any())
    });
    let mut names = names.collect::<Vec<_>>().join(", ");
    if left.len() > NAMED {
        names.push_str(", …");
    }
    match left.len() {
        0 => {}
        1 => findings.push(Finding::warning(
            format!("Sandbox {names}"),
            format!("names {loses}"),
            remedy,
        )),
        count => findings.push(Finding::warning(
            format!("{count} Sandboxes"),
            format!("name {loses}: {names}"),
            remedy,
        )),
    }
    findings
}
