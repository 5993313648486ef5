//! Restriction of an API server's clients to some namespaces.

use std::collections::BTreeSet;

use super::{Apiserver, Call};

impl Apiserver {
    /// Restricts clients to these namespaces from now on.
    pub fn confine(&self, namespaces: &[&str]) {
        let namespaces = namespaces.iter().map(ToString::to_string).collect();
        self.state.lock().unwrap().confined = Some(namespaces);
    }

    /// Returns the forbidden requests so far: `kinds` of the cluster or all of a kind, or `kinds in
    /// namespace`.
    pub fn forbidden(&self) -> BTreeSet<String> {
        self.state.lock().unwrap().forbidden.clone()
    }

    /// Reports whether a client may not make this request, and records such a request.
    pub(super) fn forbids(&self, call: &Call) -> bool {
        let mut state = self.state.lock().unwrap();
        let confined = state.confined.as_ref();
        let forbids = confined.is_some_and(|known| !known.contains(&call.namespace));
        if forbids {
            let place = match &*call.namespace {
                "" => String::new(),
                namespace => format!(" in {namespace}"),
            };
            state.forbidden.insert(format!("{}{place}", call.kind));
        }
        forbids
    }
}
