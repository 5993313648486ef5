//! Scope of the controller: the whole cluster, or some namespaces with a watch for each of them.

use std::{str::FromStr, sync::Arc};

use kube::runtime::watcher::Event;

/// Longest name of a namespace (RFC 1123 label).
const LONGEST: usize = 63;

/// Namespaces to which the controller is confined, sorted and unique; empty for the whole cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Namespaces(Vec<Arc<str>>);

/// Error for a name that no namespace can have.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a valid namespace name")]
pub struct InvalidNamespace(String);

impl FromStr for Namespaces {
    type Err = InvalidNamespace;

    /// Parses a comma-separated list. White space around names and empty names are ignored.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let names = text.split(',').map(str::trim);
        let mut all: Vec<Arc<str>> = Vec::new();
        for name in names.filter(|name| !name.is_empty()) {
            if !is_label(name) {
                return Err(InvalidNamespace(name.to_owned()));
            }
            all.push(name.into());
        }
        all.sort();
        all.dedup();
        Ok(Self(all))
    }
}

impl Namespaces {
    /// Reports whether the controller works in the whole cluster.
    pub fn is_cluster(&self) -> bool {
        self.0.is_empty()
    }

    /// Reports whether the controller works in a namespace.
    pub fn has(&self, namespace: &str) -> bool {
        self.is_cluster() || self.names().any(|own| own == namespace)
    }

    /// Returns the namespaces; none for the whole cluster.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(AsRef::as_ref)
    }

    /// Returns the scopes of the watches that a kind needs.
    pub fn scopes(&self) -> Vec<Scope> {
        if self.is_cluster() {
            return vec![Scope::default()];
        }
        let scope = |namespace: &Arc<str>| Scope {
            namespace: Some(Arc::clone(namespace)),
            parts: self.0.len(),
        };
        self.0.iter().map(scope).collect()
    }
}

/// Reports whether a name is an RFC 1123 label.
fn is_label(name: &str) -> bool {
    let inner = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit() || c == b'-';
    name.len() <= LONGEST
        && name.bytes().all(inner)
        && !name.starts_with('-')
        && !name.ends_with('-')
}

/// Part of a kind that one watch covers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scope {
    /// Namespace of the watch; `None` for the whole cluster.
    pub namespace: Option<Arc<str>>,
    /// Number of watches of the kind.
    pub parts: usize,
}

impl Default for Scope {
    fn default() -> Self {
        Self {
            namespace: None,
            parts: 1,
        }
    }
}

impl Scope {
    /// Reports whether objects of a namespace are in this part.
    pub fn has(&self, namespace: &str) -> bool {
        self.namespace.as_deref().is_none_or(|own| own == namespace)
    }
}

/// Event of a watch, with the scope of the watch.
#[derive(Debug)]
pub struct ScopedEvent<K> {
    pub scope: Scope,
    pub event: Event<K>,
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("", &[])]
    #[case(" b, a ,,b", &["a", "b"])]
    fn a_list_of_namespaces_is_read(#[case] text: &str, #[case] expected: &[&str]) {
        let read: Namespaces = text.parse().unwrap();
        let names: Vec<&str> = read.names().collect();
        assert_eq!(names, expected);
        assert_eq!(read.is_cluster(), expected.is_empty());
        let scopes = read.scopes();
        assert_eq!(scopes.len(), expected.len().max(1));
        assert!(scopes.iter().all(|scope| scope.parts == scopes.len()));
    }

    #[rstest]
    #[case("a/b")]
    #[case("A")]
    #[case("-a")]
    #[case("a,b.c")]
    fn an_invalid_namespace_is_refused(#[case] text: &str) {
        text.parse::<Namespaces>().unwrap_err();
        let long: Result<Namespaces, _> = "a".repeat(64).parse();
        long.unwrap_err();
    }

    #[test]
    fn a_scope_covers_its_namespace_and_the_default_scope_covers_all() {
        let parts: Namespaces = "a,b".parse().unwrap();
        let [a, b] = &parts.scopes()[..] else {
            panic!("two");
        };
        assert!(a.has("a") && !a.has("b") && b.has("b"));
        assert!(Scope::default().has("a") && Scope::default().has(""));
    }
}
