//! NetworkPolicies of sandboxes: the strict rules, and the policy of Sandboxes without a template.
//! [`crate::template`] makes the policies of templates.

pub mod default_policy;
pub mod rules;

pub use self::rules::Cidr;
