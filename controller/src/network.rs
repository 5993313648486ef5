//! NetworkPolicies of sandboxes: the strict rules, and the policy of Sandboxes that have no template. Those of templates are made in [`crate::template`].

pub mod default_policy;
pub mod rules;

pub use self::rules::Cidr;
