//! Where the controller works: in the whole cluster, or in some namespaces, of each of which it has
//! a watch of its own.

use std::{str::FromStr, sync::Arc};

use kube::runtime::watcher::Event;

/// Longest name of a namespace (RFC 1123 label).
const LONGEST: usize = 63;

/// Namespaces that the controller is confined to; none: it works in all. In order, each once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Namespaces(Vec<Arc<str>>);

/// A name that no namespace can have.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no name of a namespace")]
pub struct NoNamespace(String);

impl FromStr for Namespaces {
    type Err = NoNamespace;

    /// Reads a list separated by commas. White space around names, and empty ones, are passed over.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let names = text.split(',').map(str::trim);
        let mut all: Vec<Arc<str>> = Vec::new();
        for name in names.filter(|name| !name.is_empty()) {
            if !is_label(name) {
                return Err(NoNamespace(name.to_owned()));
            }
            all.push(name.into());
        }
        all.sort();
        all.dedup();
        Ok(Self(all))
    }
}

impl Namespaces {
    /// Whether the controller works in the whole cluster.
    pub fn is_cluster(&self) -> bool {
        self.0.is_empty()
    }

    /// The namespaces; none in the whole cluster.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(AsRef::as_ref)
    }

    /// The watches that a kind needs, by what each of them shows.
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

/// RFC 1123: what a namespace may be called.
fn is_label(name: &str) -> bool {
    let inner = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit() || c == b'-';
    name.len() <= LONGEST
        && name.bytes().all(inner)
        && !name.starts_with('-')
        && !name.ends_with('-')
}

/// The part of a kind that one watch shows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scope {
    /// Its namespace; `None`: it is the whole kind.
    pub namespace: Option<Arc<str>>,
    /// How many watches the kind has in all.
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
    /// Whether objects of a namespace are in this part.
    pub fn has(&self, namespace: &str) -> bool {
        self.namespace.as_deref().is_none_or(|own| own == namespace)
    }
}

/// An event of a watch, and what the watch shows.
#[derive(Debug)]
pub struct Seen<K> {
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
    fn what_is_no_namespace_is_refused(#[case] text: &str) {
        text.parse::<Namespaces>().unwrap_err();
        let long: Result<Namespaces, _> = "a".repeat(64).parse();
        long.unwrap_err();
    }

    #[test]
    fn a_part_has_the_objects_of_its_namespace_and_the_whole_has_all() {
        let parts: Namespaces = "a,b".parse().unwrap();
        let [a, b] = &parts.scopes()[..] else {
            panic!("two");
        };
        assert!(a.has("a") && !a.has("b") && b.has("b"));
        assert!(Scope::default().has("a") && Scope::default().has(""));
    }
}
