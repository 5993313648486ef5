//! Decides which images to fetch, to claim and to remove. Pure.

use std::collections::{BTreeMap, BTreeSet};

use torpor_api::node::{FetchedImage, MAX_FETCHED};
use torpor_core::ids::{ImageId, Namespace, PodUid};

/// An image of a namespace.
pub(crate) type Place = (Namespace, ImageId);

/// A Pod of this node that was created to continue from an image of a repository.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Want {
    pub(crate) pod: PodUid,
    pub(crate) place: Place,
    /// Digest of the image's manifest.
    pub(crate) digest: String,
    /// SnapshotClass of the repository.
    pub(crate) class: String,
    /// The user named the image. Many Pods may start from it, and none consumes it.
    pub(crate) copy: bool,
    /// The Pod starts without the image if it cannot be fetched.
    pub(crate) cold_start: bool,
    /// The Pod has begun: with the image or without it.
    pub(crate) settled: bool,
    /// The Pod is being deleted, or has ended.
    pub(crate) ends: bool,
}

impl Want {
    pub(crate) fn is_open(&self) -> bool {
        !self.settled && !self.ends
    }
}

/// A fetched image on this node's disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Held {
    pub(crate) place: Place,
    /// False while it is being written, and after a write that was cut off.
    pub(crate) whole: bool,
    pub(crate) consumed_by: Option<PodUid>,
}

/// Result of [`plan`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Plan {
    /// Content of `status.fetched`.
    pub(crate) claims: Vec<FetchedImage>,
    /// Images to fetch, each for one Pod. They are claimed once `claims` is written.
    pub(crate) fetch: Vec<Want>,
    /// Images to remove from the disk, after `claims` is written.
    pub(crate) remove: Vec<Place>,
}

/// Facts that [`plan`] decides from.
#[derive(Debug)]
pub(crate) struct Seen<'a> {
    /// Pods that continue from images that this node did not make.
    pub(crate) wants: &'a [Want],
    /// All Pods of this node.
    pub(crate) pods: &'a BTreeSet<PodUid>,
    pub(crate) held: &'a [Held],
    /// `status.fetched` as it is.
    pub(crate) claims: &'a [FetchedImage],
    /// Images that a SandboxSnapshot names, of those in `claims`.
    pub(crate) named: &'a BTreeSet<Place>,
}

/// Decides.
///
/// A claim is kept as long as a SandboxSnapshot names its image and its Pod is on the node or may
/// have run from the image. It is dropped when the Pod is gone and never ran, so that the next Pod
/// may use the image anywhere.
pub(crate) fn plan(seen: &Seen<'_>) -> Plan {
    let mut claims: BTreeMap<(Place, PodUid), bool> = BTreeMap::new();
    for claim in seen.claims {
        let Some((place, pod)) = parsed(claim) else {
            continue;
        };
        let mut held = seen.held.iter();
        let marked = held.any(|one| one.place == place && one.consumed_by.as_ref() == Some(&pod));
        let consumed = claim.consumed || marked;
        if seen.named.contains(&place) && (consumed || seen.pods.contains(&pod)) {
            claims.insert((place, pod), consumed);
        }
    }
    let open: Vec<&Want> = seen.wants.iter().filter(|want| want.is_open()).collect();
    for want in open.iter().filter(|want| !want.copy) {
        let claim = (want.place.clone(), want.pod.clone());
        if claims.len() < MAX_FETCHED {
            claims.entry(claim).or_insert(false);
        }
    }
    let is_whole = |place: &Place| seen.held.iter().any(|one| one.whole && one.place == *place);
    let claimed = |want: &Want| claims.contains_key(&(want.place.clone(), want.pod.clone()));
    let mut fetched = BTreeSet::new();
    let fetch = open.iter().filter(|want| {
        let may = want.copy || claimed(want);
        may && !is_whole(&want.place) && fetched.insert(want.place.clone())
    });
    let fetch = fetch.map(|want| (*want).clone()).collect();
    let is_needed = |place: &Place| {
        open.iter().any(|want| want.place == *place) || claims.keys().any(|(of, _)| of == place)
    };
    let unneeded = seen.held.iter().filter(|one| !is_needed(&one.place));
    Plan {
        fetch,
        remove: unneeded.map(|one| one.place.clone()).collect(),
        claims: claims.into_iter().map(written).collect(),
    }
}

/// Returns image and Pod of a claim; none if it was not written by an agent.
pub(crate) fn parsed(claim: &FetchedImage) -> Option<(Place, PodUid)> {
    let namespace = Namespace::new(claim.namespace.clone()).ok()?;
    let image = ImageId::parse(&claim.image_id).ok()?;
    let pod = PodUid::new(claim.pod_uid.clone()).ok()?;
    Some(((namespace, image), pod))
}

fn written((((namespace, image), pod), consumed): ((Place, PodUid), bool)) -> FetchedImage {
    FetchedImage {
        consumed,
        image_id: image.to_string(),
        namespace: namespace.to_string(),
        pod_uid: pod.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place() -> Place {
        let namespace = Namespace::new("n").expect("a name");
        (namespace, ImageId::parse("saved.1").expect("an image"))
    }

    fn pod(uid: &str) -> PodUid {
        PodUid::new(uid).expect("a UID")
    }

    fn want(uid: &str) -> Want {
        Want {
            pod: pod(uid),
            place: place(),
            digest: "d".to_owned(),
            class: "c".to_owned(),
            copy: false,
            cold_start: false,
            settled: false,
            ends: false,
        }
    }

    fn claim(uid: &str, consumed: bool) -> FetchedImage {
        written(((place(), pod(uid)), consumed))
    }

    fn held(whole: bool, consumed_by: Option<&str>) -> Held {
        Held {
            place: place(),
            whole,
            consumed_by: consumed_by.map(pod),
        }
    }

    /// Decides. `pods`: the Pods of the node; `named`: a SandboxSnapshot names the image.
    fn decide(
        wants: &[Want],
        pods: &[&str],
        held: &[Held],
        claims: &[FetchedImage],
        named: bool,
    ) -> Plan {
        plan(&Seen {
            wants,
            pods: &pods.iter().map(|uid| pod(uid)).collect(),
            held,
            claims,
            named: &named.then(place).into_iter().collect(),
        })
    }

    #[test]
    fn an_image_is_claimed_for_its_pod_and_fetched_once() {
        let wants = [
            want("p"),
            Want {
                copy: true,
                ..want("q")
            },
        ];
        let fresh = decide(&wants, &["p", "q"], &[], &[], true);
        assert_eq!(fresh.claims, [claim("p", false)]);
        assert_eq!(fresh.fetch, [want("p")]);
        let begun = decide(
            &wants,
            &["p", "q"],
            &[held(false, None)],
            &fresh.claims,
            true,
        );
        assert_eq!(begun.fetch, [want("p")], "a part is fetched anew");
        let whole = decide(
            &wants,
            &["p", "q"],
            &[held(true, None)],
            &fresh.claims,
            true,
        );
        assert_eq!(
            (&whole.claims, &whole.fetch[..], &whole.remove[..]),
            (&fresh.claims, &[][..], &[][..])
        );
    }

    #[test]
    fn a_copy_is_fetched_without_a_claim_and_removed_once_it_runs() {
        let copy = Want {
            copy: true,
            ..want("q")
        };
        let first = decide(std::slice::from_ref(&copy), &["q"], &[], &[], true);
        assert_eq!(
            (&first.claims[..], &first.fetch[..]),
            (&[][..], &[copy.clone()][..])
        );
        let runs = Want {
            settled: true,
            ..copy
        };
        let later = decide(&[runs], &["q"], &[held(true, None)], &[], true);
        assert_eq!(later.remove, [place()]);
    }

    #[test]
    fn a_claim_ends_when_its_pod_is_gone_and_never_ran() {
        let claims = [claim("p", false)];
        let gone = decide(&[], &[], &[held(true, None)], &claims, true);
        assert_eq!(
            (&gone.claims[..], &gone.remove[..]),
            (&[][..], &[place()][..])
        );
        let there = decide(&[], &["p"], &[held(true, None)], &claims, true);
        assert_eq!(there.claims, claims, "the Pod may still run from it");
    }

    #[test]
    fn a_consumed_image_stays_claimed_until_no_snapshot_names_it() {
        let claims = [claim("p", false)];
        let ran = decide(&[], &[], &[held(true, Some("p"))], &claims, true);
        assert_eq!(ran.claims, [claim("p", true)]);
        assert_eq!(ran.remove, []);
        let lost = decide(&[], &[], &[], &ran.claims, true);
        assert_eq!(lost.claims, ran.claims, "the mark survives the image");
        let done = decide(&[], &["p"], &[held(true, Some("p"))], &ran.claims, false);
        assert_eq!(
            (&done.claims[..], &done.remove[..]),
            (&[][..], &[place()][..])
        );
    }

    #[test]
    fn a_pod_that_ends_fetches_nothing_more() {
        let ends = Want {
            ends: true,
            ..want("p")
        };
        let plan = decide(
            &[ends],
            &["p"],
            &[held(false, None)],
            &[claim("p", false)],
            true,
        );
        assert_eq!(plan.fetch, []);
        assert_eq!(plan.claims, [claim("p", false)], "until it is gone");
    }

    #[test]
    fn a_claim_that_no_agent_wrote_is_dropped() {
        let mut strange = claim("p", true);
        strange.image_id = "../x".to_owned();
        assert_eq!(decide(&[], &["p"], &[], &[strange], true), Plan::default());
    }
}
