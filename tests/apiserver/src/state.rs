//! Objects of the API server, and the rules by which they are created, changed and deleted.

use std::collections::{BTreeMap, BTreeSet};

use http::StatusCode;
use serde_json::{Value, json};

use super::{Answer, Fault, KINDS, Key, Write, key, merge_patch, not_found};

/// Finalizer of an object that is deleted in the foreground.
const FOREGROUND: &str = "foregroundDeletion";

#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) version: u64,
    pub(super) has_clock: bool,
    uids: u64,
    pub(super) objects: BTreeMap<Key, Value>,
    pub(super) history: Vec<(u64, &'static str, Key, Value)>,
    pub(super) writes: Vec<Write>,
    pub(super) reads: Vec<String>,
    /// Kind and number of objects of each list that was answered.
    pub(super) lists: Vec<(String, usize)>,
    /// Tokens of clients that are authenticated.
    pub(super) tokens: Vec<String>,
    /// Namespaces to which clients are restricted; `None` for the whole cluster.
    pub(super) confined: Option<Vec<String>>,
    /// Requests of clients beyond these namespaces.
    pub(super) forbidden: BTreeSet<String>,
    /// Users and their rights, as attributes of a SubjectAccessReview.
    pub(super) rights: Vec<(String, Value)>,
    pub(super) faults: Vec<Fault>,
}

impl State {
    pub(super) fn create(&mut self, kind: &str, namespace: &str, mut object: Value) -> Answer {
        if let Some(prefix) = object["metadata"]["generateName"].as_str()
            && object["metadata"]["name"].is_null()
        {
            object["metadata"]["name"] = format!("{prefix}{:05}", self.uids).into();
        }
        let name = object["metadata"]["name"]
            .as_str()
            .unwrap_or_default()
            .to_owned();
        let key = key(kind, namespace, &name);
        if self.objects.contains_key(&key) {
            let message = format!("{kind} \"{name}\" already exists");
            return Err((StatusCode::CONFLICT, "AlreadyExists", message));
        }
        let (_, api_kind, api_version) = *KINDS.iter().find(|(p, ..)| *p == kind).unwrap();
        self.uids += 1;
        let metadata = &mut object["metadata"];
        metadata["uid"] = format!("{:08x}-0000-4000-8000-000000000000", self.uids).into();
        metadata["generation"] = 1.into();
        if metadata.get("creationTimestamp").is_none() {
            let now = jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ");
            metadata["creationTimestamp"] = match self.has_clock {
                true => now.to_string().into(),
                false => "2026-01-01T00:00:00Z".into(),
            };
        }
        object["kind"] = api_kind.into();
        object["apiVersion"] = api_version.into();
        if kind == "pods" {
            object["status"] = json!({"phase": "Pending"});
        }
        Ok(self.store(key, object))
    }

    /// Returns the merge patch that does what a strategic one does, as far as tests need it:
    /// conditions are merged by their type.
    pub(super) fn strategic(&self, key: &Key, mut patch: Value) -> Value {
        let object = self.objects.get(key).unwrap_or(&Value::Null);
        let known = object["status"]["conditions"].as_array();
        let conditions = patch.pointer_mut("/status/conditions");
        let Some(changed) = conditions.and_then(Value::as_array_mut) else {
            return patch;
        };
        let is_left = |one: &&Value| changed.iter().all(|other| other["type"] != one["type"]);
        let left: Vec<Value> = known
            .into_iter()
            .flatten()
            .filter(is_left)
            .cloned()
            .collect();
        changed.splice(0..0, left);
        patch
    }

    pub(super) fn patch(&mut self, key: &Key, patch: &Value, status: bool) -> Answer {
        let Some(object) = self.objects.get(key) else {
            return Err(not_found(&key.0, &key.2));
        };
        for field in ["uid", "resourceVersion"] {
            let wanted = &patch["metadata"][field];
            if !wanted.is_null() && *wanted != object["metadata"][field] {
                let message = format!("the {field} is another");
                return Err((StatusCode::CONFLICT, "Conflict", message));
            }
        }
        let mut patched = object.clone();
        if status {
            merge_patch::apply(&mut patched, &json!({"status": patch["status"]}));
        } else {
            merge_patch::apply(&mut patched, patch);
            // The status is another resource for all kinds that are patched here.
            patched["status"] = object["status"].clone();
            if patched["status"].is_null() {
                patched.as_object_mut().unwrap().remove("status");
            }
            if patched["spec"] != object["spec"] {
                let generation = object["metadata"]["generation"].as_u64().unwrap_or(1);
                patched["metadata"]["generation"] = (generation + 1).into();
            }
        }
        Ok(self.store(key.clone(), patched))
    }

    pub(super) fn replace(&mut self, key: &Key, object: Value) -> Answer {
        let Some(current) = self.objects.get(key) else {
            return Err(not_found(&key.0, &key.2));
        };
        if current["metadata"]["resourceVersion"] != object["metadata"]["resourceVersion"] {
            return Err((
                StatusCode::CONFLICT,
                "Conflict",
                "another resourceVersion".to_owned(),
            ));
        }
        Ok(self.store(key.clone(), object))
    }

    pub(super) fn checked_delete(&mut self, key: &Key, options: &Value) -> Answer {
        let preconditions = &options["preconditions"];
        let Some(object) = self.objects.get(key) else {
            return Err(not_found(&key.0, &key.2));
        };
        for field in ["uid", "resourceVersion"] {
            let wanted = &preconditions[field];
            if !wanted.is_null() && *wanted != object["metadata"][field] {
                let message = format!("Precondition failed: {field}");
                return Err((StatusCode::CONFLICT, "Conflict", message));
            }
        }
        let object = object.clone();
        if options["propagationPolicy"] == "Foreground" {
            self.delete_foreground(key);
        } else {
            self.delete(key);
        }
        Ok(object)
    }

    pub(super) fn delete(&mut self, key: &Key) {
        let Some(object) = self.objects.get(key) else {
            return;
        };
        let held = object["metadata"]["finalizers"]
            .as_array()
            .is_some_and(|f| !f.is_empty());
        if key.0 != "pods" && !held {
            return self.remove(key);
        }
        if object["metadata"].get("deletionTimestamp").is_none() {
            let mut object = object.clone();
            object["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into();
            self.store(key.clone(), object);
        }
    }

    /// Deletes what the object owns first; a finalizer keeps the object until then.
    fn delete_foreground(&mut self, key: &Key) {
        let mut object = self.objects[key].clone();
        object["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into();
        object["metadata"]["finalizers"] = json!([FOREGROUND]);
        let uid = object["metadata"]["uid"].clone();
        self.store(key.clone(), object);
        for owned in self.owned_by(&uid) {
            if self.objects.contains_key(&owned) {
                self.delete_foreground_or_gracefully(&owned);
            }
        }
        self.end_foreground_deletions();
    }

    fn delete_foreground_or_gracefully(&mut self, key: &Key) {
        if key.0 == "pods" {
            self.delete(key);
        } else {
            self.delete_foreground(key);
        }
    }

    fn end_foreground_deletions(&mut self) {
        let ended = self.objects.iter().find(|(_, object)| {
            object["metadata"]["finalizers"] == json!([FOREGROUND])
                && self.owned_by(&object["metadata"]["uid"]).is_empty()
        });
        if let Some(key) = ended.map(|(key, _)| key.clone()) {
            self.remove(&key);
        }
    }

    pub(super) fn collect_garbage(&mut self) {
        let all = self.objects.values();
        let living: std::collections::BTreeSet<String> = all
            .map(|object| object["metadata"]["uid"].to_string())
            .collect();
        let left_behind = |object: &Value| {
            let owners = object["metadata"]["ownerReferences"].as_array();
            owners.is_some_and(|all| {
                !all.is_empty() && all.iter().all(|o| !living.contains(&o["uid"].to_string()))
            })
        };
        let garbage: Vec<Key> = self
            .objects
            .iter()
            .filter(|(_, object)| left_behind(object))
            .map(|(key, _)| key.clone())
            .collect();
        for key in garbage {
            self.delete(&key);
        }
    }

    fn owned_by(&self, uid: &Value) -> Vec<Key> {
        let owns = |object: &Value| {
            let owners = object["metadata"]["ownerReferences"].as_array();
            owners.is_some_and(|all| all.iter().any(|owner| owner["uid"] == *uid))
        };
        let all = self.objects.iter();
        all.filter(|(_, object)| owns(object))
            .map(|(key, _)| key.clone())
            .collect()
    }

    /// Stores an object under a new version; a write that changes nothing makes none.
    pub(super) fn store(&mut self, key: Key, mut object: Value) -> Value {
        let before = self.objects.get(&key);
        if let Some(before) = before {
            object["metadata"]["resourceVersion"] = before["metadata"]["resourceVersion"].clone();
            if *before == object {
                return object;
            }
        }
        let type_ = if before.is_some() {
            "MODIFIED"
        } else {
            "ADDED"
        };
        self.version += 1;
        object["metadata"]["resourceVersion"] = self.version.to_string().into();
        let dying = object["metadata"].get("deletionTimestamp").is_some() && key.0 != "pods";
        let held = object["metadata"]["finalizers"]
            .as_array()
            .is_some_and(|f| !f.is_empty());
        self.history
            .push((self.version, type_, key.clone(), object.clone()));
        self.objects.insert(key.clone(), object.clone());
        if dying && !held {
            self.remove(&key);
        }
        object
    }

    /// Removes an object, and what it owns.
    pub(super) fn remove(&mut self, key: &Key) {
        let Some(mut object) = self.objects.remove(key) else {
            return;
        };
        self.version += 1;
        object["metadata"]["resourceVersion"] = self.version.to_string().into();
        let uid = object["metadata"]["uid"].clone();
        self.history
            .push((self.version, "DELETED", key.clone(), object));
        let owned = self.owned_by(&uid);
        for key in owned {
            self.delete(&key);
        }
        self.end_foreground_deletions();
    }
}
