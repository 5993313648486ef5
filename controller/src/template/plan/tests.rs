use rstest::rstest;

use super::*;

fn template(change: Value) -> Arc<SandboxTemplate> {
    let mut whole = json!({
        "apiVersion": "extensions.agents.x-k8s.io/v1beta1", "kind": "SandboxTemplate",
        "metadata": {
            "name": "t", "namespace": "ns", "uid": "u-t",
            "labels": {"agents.x-k8s.io/sandbox-template-ref-hash": name_hash("t")},
        },
        "spec": {"podTemplate": {"spec": {"containers": []}}},
    });
    merge_patch::apply(&mut whole, &change);
    Arc::new(serde_json::from_value(whole).unwrap())
}

fn policy_of(template: &SandboxTemplate) -> Arc<NetworkPolicy> {
    let mut made = policy(template, &[]);
    made["metadata"]["uid"] = "u-n".into();
    made["metadata"]["resourceVersion"] = "4".into();
    Arc::new(serde_json::from_value(made).unwrap())
}

fn planned(
    template: &Arc<SandboxTemplate>,
    policy: Option<Arc<NetworkPolicy>>,
) -> Result<Vec<Action>, String> {
    plan(&Observed {
        template: Arc::clone(template),
        policy,
        except: Vec::new(),
    })
}

fn unmanaged() -> Value {
    json!({"spec": {"networkPolicyManagement": "Unmanaged"}})
}

#[test]
fn a_template_gets_its_label_and_the_strict_default() {
    let new = template(json!({"metadata": {"labels": null}}));
    let steps = planned(&new, None).unwrap();
    let [Action::LabelTemplate(label), Action::CreatePolicy(policy)] = &steps[..] else {
        panic!("{steps:?}")
    };
    assert_eq!(
        label["metadata"]["labels"]["agents.x-k8s.io/sandbox-template-ref-hash"],
        name_hash("t")
    );
    insta::assert_json_snapshot!(policy["spec"], @r#"
    {
      "egress": [
        {
          "to": [
            {
              "ipBlock": {
                "cidr": "0.0.0.0/0",
                "except": [
                  "10.0.0.0/8",
                  "172.16.0.0/12",
                  "192.168.0.0/16",
                  "169.254.0.0/16",
                  "100.64.0.0/10"
                ]
              }
            },
            {
              "ipBlock": {
                "cidr": "::/0",
                "except": [
                  "fc00::/7",
                  "fe80::/10",
                  "64:ff9b::/96",
                  "64:ff9b:1::/48"
                ]
              }
            }
          ]
        }
      ],
      "ingress": [
        {
          "from": [
            {
              "namespaceSelector": {
                "matchLabels": {
                  "kubernetes.io/metadata.name": "agent-sandbox-system"
                }
              },
              "podSelector": {
                "matchLabels": {
                  "app": "sandbox-router"
                }
              }
            }
          ]
        }
      ],
      "podSelector": {
        "matchLabels": {
          "agents.x-k8s.io/sandbox-template-ref-hash": "f10c3da3"
        }
      },
      "policyTypes": [
        "Ingress",
        "Egress"
      ]
    }
    "#);
    assert_eq!(policy["metadata"]["name"], "t-network-policy");
    assert_eq!(policy["metadata"]["ownerReferences"][0]["uid"], "u-t");
}

#[rstest]
#[case::no_rules_allow_nothing(json!({}), json!([]), json!([]))]
#[case::own_rules(
    json!({"egress": [{"ports": [{"port": 53, "protocol": "UDP"}, {"port": 443}]}]}),
    json!([]),
    json!([{"ports": [{"port": 53, "protocol": "UDP"}, {"port": 443, "protocol": "TCP"}]}])
)]
fn rules_of_the_template_are_the_only_ones(
    #[case] rules: Value,
    #[case] ingress: Value,
    #[case] egress: Value,
) {
    let steps = planned(&template(json!({"spec": {"networkPolicy": rules}})), None).unwrap();
    let [Action::CreatePolicy(policy)] = &steps[..] else {
        panic!("{steps:?}")
    };
    assert_eq!(policy["spec"]["ingress"], ingress);
    assert_eq!(policy["spec"]["egress"], egress);
    assert_eq!(policy["spec"]["policyTypes"], json!(["Ingress", "Egress"]));
}

#[test]
fn a_correct_policy_is_kept_and_a_changed_one_is_restored() {
    let template = template(json!({}));
    let policy = policy_of(&template);
    assert_eq!(planned(&template, Some(Arc::clone(&policy))), Ok(vec![]));
    let mut loosened = (*policy).clone();
    loosened.spec.as_mut().unwrap().egress = None;
    let steps = planned(&template, Some(Arc::new(loosened))).unwrap();
    let [Action::PatchPolicy(patch)] = &steps[..] else {
        panic!("{steps:?}")
    };
    assert_eq!(
        patch["metadata"],
        json!({"uid": "u-n", "resourceVersion": "4"})
    );
    assert_eq!(patch["spec"]["egress"], rules::egress(&[]));
}

#[test]
fn an_unmanaged_template_deletes_its_own_policy_only() {
    let own = policy_of(&template(json!({})));
    let unmanaged = template(unmanaged());
    let uid = "u-n".to_owned();
    assert_eq!(
        planned(&unmanaged, Some(Arc::clone(&own))),
        Ok(vec![Action::DeletePolicy { uid }])
    );
    assert_eq!(planned(&unmanaged, None), Ok(vec![]));
    let mut foreign = (*own).clone();
    foreign.metadata.owner_references = None;
    assert_eq!(
        planned(&unmanaged, Some(Arc::new(foreign.clone()))),
        Ok(vec![])
    );
    assert_eq!(
        planned(&template(json!({})), Some(Arc::new(foreign))),
        Err("t-network-policy".to_owned())
    );
}

#[test]
fn a_deleted_template_leaves_its_policy_to_garbage_collection() {
    let going = template(
        json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z", "labels": null}}),
    );
    assert_eq!(planned(&going, None), Ok(vec![]));
}

fn state(template: &SandboxTemplate, policy: Option<&NetworkPolicy>) -> Result<(), Unisolated> {
    isolation(template, policy, &[])
}

#[test]
fn no_sandbox_is_created_before_the_templates_own_policy_exists() {
    let template = template(json!({}));
    let name = || "t-network-policy".to_owned();
    let own = policy_of(&template);
    assert_eq!(state(&template, Some(&own)), Ok(()));
    assert_eq!(state(&template, None), Err(Unisolated::Missing(name())));
    let mut going = (*own).clone();
    going.metadata.deletion_timestamp = serde_json::from_value(json!("2026-01-01T00:00:00Z")).ok();
    let gone = Err(Unisolated::Missing(name()));
    assert_eq!(state(&template, Some(&going)), gone);
    let mut foreign = (*own).clone();
    foreign.metadata.owner_references = None;
    let not_owned = state(&template, Some(&foreign)).unwrap_err();
    assert_eq!(not_owned, Unisolated::NotOwned(name()));
    assert!(!not_owned.is_passing());
    for words in [
        "\"t-network-policy\"",
        "Delete",
        "networkPolicyManagement: Unmanaged",
    ] {
        assert!(not_owned.to_string().contains(words), "{not_owned}");
    }
}

#[test]
fn no_sandbox_is_created_with_outdated_rules() {
    let own = policy_of(&template(json!({})));
    let edited = template(json!({"spec": {"networkPolicy": {"egress": []}}}));
    let outdated = Err(Unisolated::Outdated("t-network-policy".to_owned()));
    assert_eq!(state(&edited, Some(&own)), outdated);
    let except = ["198.51.100.0/24".parse().unwrap()];
    let unedited = template(json!({}));
    assert_eq!(isolation(&unedited, Some(&own), &except), outdated);
    // The template's own rules replace the default ones entirely.
    let own = policy_of(&edited);
    assert_eq!(isolation(&edited, Some(&own), &except), Ok(()));
}

#[test]
fn an_unmanaged_template_waits_for_no_policy() {
    assert_eq!(state(&template(unmanaged()), None), Ok(()));
}
