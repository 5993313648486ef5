//! The API server's own record of the controller's writes, claim by claim.

use std::{
    collections::{BTreeMap, HashMap},
    fs::File,
    io::{BufRead, BufReader, Seek, SeekFrom},
    path::Path,
};

use anyhow::Context as _;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::board::Record;

/// Write as the audit log has it. Fields are Kubernetes' audit.k8s.io/v1.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Write {
    verb: String,
    object_ref: Object,
    request_received_timestamp: Timestamp,
    stage_timestamp: Timestamp,
    response_status: Option<Response>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Object {
    resource: String,
    namespace: String,
    name: String,
    subresource: String,
}

#[derive(Clone, Debug, Deserialize)]
struct Response {
    #[serde(default)]
    code: u16,
}

/// Writes of the controller during a load.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Writes {
    /// Number of claims that took a member of a pool that had its Pod, and are counted here.
    pub claims: usize,
    /// Writes per such claim, up to the write that made it Ready.
    pub before_ready: f64,
    pub most_before_ready: usize,
    /// Writes per such claim, as long as it existed.
    pub in_all: f64,
    pub most_in_all: usize,
    /// Writes per such claim, by kind.
    pub per_claim: BTreeMap<String, f64>,
    /// All writes of the controller, refill and pools included.
    pub all: BTreeMap<String, usize>,
    /// Number of these that the API server refused.
    pub refused: usize,
}

impl Write {
    fn kind(&self) -> String {
        let Object {
            resource,
            subresource,
            ..
        } = &self.object_ref;
        let slash = if subresource.is_empty() { "" } else { "/" };
        format!("{} {resource}{slash}{subresource}", self.verb)
    }

    fn went_through(&self) -> bool {
        self.response_status
            .as_ref()
            .is_none_or(|status| status.code < 400)
    }

    /// Returns kind, namespace and name of what the write is about. An Event is about the object
    /// that its name begins with.
    fn about(&self) -> (&str, &str, &str) {
        let Object {
            resource,
            namespace,
            name,
            ..
        } = &self.object_ref;
        match resource.as_str() {
            "events" => {
                let about = name
                    .rsplit_once('.')
                    .map_or(name.as_str(), |(about, _)| about);
                ("sandboxclaims", namespace, about)
            }
            resource => (resource, namespace, name),
        }
    }
}

/// Returns the length of the log.
pub(crate) fn length(log: &Path) -> anyhow::Result<u64> {
    let found = std::fs::metadata(log).with_context(|| log.display().to_string())?;
    Ok(found.len())
}

/// Returns the writes after an offset of the log.
pub(crate) fn read(log: &Path, from: u64) -> anyhow::Result<Vec<Write>> {
    let mut file = File::open(log).with_context(|| log.display().to_string())?;
    file.seek(SeekFrom::Start(from))?;
    let lines = BufReader::new(file).lines();
    let parsed = lines.map(|line| {
        let line = line?;
        serde_json::from_str(&line).with_context(|| format!("the audit log has the line {line}"))
    });
    parsed.collect()
}

/// Counts the writes for each claim: those on the claim, and, since it was sent, those on its
/// Sandbox and on objects of the same name.
pub(crate) fn count(writes: &[Write], claims: &HashMap<String, Record>) -> Writes {
    let mut counted = Writes::default();
    let mut of_claim: HashMap<&str, Vec<&Write>> = HashMap::new();
    let mut claim_of: HashMap<(&str, &str), &str> = HashMap::new();
    for (name, record) in claims {
        if let (true, Some(sandbox)) = (record.is_warm(name), &record.sandbox) {
            of_claim.insert(name, Vec::new());
            claim_of.insert((&record.namespace, sandbox), name);
        }
    }
    for write in writes {
        *counted.all.entry(write.kind()).or_default() += 1;
        counted.refused += usize::from(!write.went_through());
        let (resource, namespace, name) = write.about();
        let claim = match resource {
            "sandboxclaims" => Some(name),
            _ => claim_of.get(&(namespace, name)).copied(),
        };
        let Some(claim) = claim else { continue };
        let later = claims
            .get(claim)
            .is_some_and(|record| write.request_received_timestamp >= record.sent_at);
        if let Some(of) = of_claim
            .get_mut(claim)
            .filter(|_| later && write.went_through())
        {
            of.push(write);
        }
    }
    // A member whose Pod was made later was not complete yet: its writes are the pool's refill.
    of_claim.retain(|_, of| of.iter().all(|write| write.kind() != "create pods"));
    counted.claims = of_claim.len();
    let (mut before_ready, mut in_all) = (0, 0);
    for of in of_claim.values() {
        let before = until_ready(of);
        before_ready += before;
        in_all += of.len();
        counted.most_before_ready = counted.most_before_ready.max(before);
        counted.most_in_all = counted.most_in_all.max(of.len());
        for write in of {
            *counted.per_claim.entry(write.kind()).or_default() += 1.0;
        }
    }
    let each = |sum: usize| sum as f64 / counted.claims.max(1) as f64;
    counted.before_ready = each(before_ready);
    counted.in_all = each(in_all);
    for count in counted.per_claim.values_mut() {
        *count /= of_claim.len().max(1) as f64;
    }
    counted
}

/// Returns the number of writes on the claim and its Sandbox up to the claim's status.
///
/// The first status says Ready if a member of a pool existed. (The write of the Pod's labels runs
/// beside it, and may be faster.)
fn until_ready(writes: &[&Write]) -> usize {
    let says = |write: &&&Write| {
        let object = &write.object_ref;
        object.resource == "sandboxclaims" && object.subresource == "status" && write.went_through()
    };
    let Some(ready) = writes.iter().find(says).map(|write| write.stage_timestamp) else {
        return 0;
    };
    let before = |write: &&&Write| {
        write.stage_timestamp <= ready && write.object_ref.resource.starts_with("sandbox")
    };
    writes.iter().filter(before).count()
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use serde_json::json;

    use super::*;

    fn write(verb: &str, resource: &str, subresource: &str, name: &str, second: u8) -> Write {
        let at = format!("2026-11-21T10:00:{second:02}.000000Z");
        serde_json::from_value(json!({
            "verb": verb,
            "objectRef": {"resource": resource, "subresource": subresource, "namespace": "ns", "name": name},
            "requestReceivedTimestamp": at, "stageTimestamp": at, "responseStatus": {"code": 200},
        }))
        .unwrap()
    }

    #[test]
    fn a_claims_writes_are_those_on_it_and_on_its_sandbox_since_it_came() {
        let record = Record {
            namespace: "ns".into(),
            sent: Instant::now(),
            sent_at: "2026-11-21T10:00:05Z".parse().unwrap(),
            ready: None,
            sandbox: Some("pool-abcde".into()),
        };
        let cold = Record {
            sandbox: Some("cold".into()),
            ..record.clone()
        };
        let claims = HashMap::from([("c".to_owned(), record), ("cold".to_owned(), cold)]);
        let writes = [
            write("create", "sandboxes", "", "pool-abcde", 1),
            write("patch", "sandboxes", "", "pool-abcde", 6),
            write("patch", "sandboxclaims", "status", "c", 7),
            write("create", "events", "", "c.18f", 8),
            write("patch", "pods", "", "pool-abcde", 9),
            write("patch", "sandboxclaims", "status", "cold", 9),
            write("create", "sandboxes", "", "pool-other", 9),
        ];
        let counted = count(&writes, &claims);
        assert_eq!(
            (counted.claims, counted.before_ready, counted.in_all),
            (1, 2.0, 4.0)
        );
        assert_eq!(counted.per_claim["create events"], 1.0);
        assert_eq!(counted.all["create sandboxes"], 2);
    }
}
