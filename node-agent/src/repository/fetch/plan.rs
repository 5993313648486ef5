//! Decides which images to fetch, to claim and to remove. Pure.

use std::collections::{BTreeMap, BTreeSet};

use torpor_api::node::{FetchState, FetchedImage, MAX_FETCHED};
use torpor_core::ids::{ImageId, Namespace, PodUid};

/// An image of a namespace.
pub(crate) type Place = (Namespace, ImageId);

/// A Pod of this node that was created to continue from an image that other nodes can fetch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Want {
    pub(crate) pod: PodUid,
    pub(crate) place: Place,
    /// Digest of the image's manifest.
    pub(crate) digest: String,
    /// SnapshotClass of the repository that has the image.
    pub(crate) class: Option<String>,
    /// Node that gives the image to other nodes.
    pub(crate) node: Option<String>,
    /// Cluster that archived the image; none for this one.
    pub(crate) cluster: Option<String>,
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
    /// Returns the use of the image by the Pod.
    pub(crate) fn of(&self) -> Use {
        (self.place.clone(), self.pod.clone())
    }

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

/// End of a Pod that is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ended {
    /// It ran from the image.
    Ran,
    /// It never ran from the image, and never will.
    NeverRan,
}

/// Use of an image by a Pod.
pub(crate) type Use = (Place, PodUid);

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
    /// Images that Pods of this node take, as the controller has recorded it.
    pub(crate) taken: &'a [Use],
    /// Images that a SandboxSnapshot names, of those in `claims` and on the disk.
    pub(crate) named: &'a BTreeSet<Place>,
    /// Ends of Pods that are gone, as far as they are known.
    pub(crate) ended: &'a BTreeMap<Use, Ended>,
}

/// Returns the uses whose Pods are gone and of which it has to be found out how they ended.
pub(crate) fn to_settle(
    claims: &[FetchedImage],
    taken: &[Use],
    held: &[Held],
    pods: &BTreeSet<PodUid>,
) -> BTreeSet<Use> {
    let known: BTreeMap<Use, FetchState> = claims.iter().filter_map(parsed).collect();
    let open = known
        .iter()
        .filter(|(_, state)| **state == FetchState::Claimed);
    let open = open.map(|(of, _)| of.clone());
    let unanswered = taken.iter().filter(|of| !known.contains_key(of)).cloned();
    // The list may be lost, with the SandboxNode.
    let marked = marks(held);
    let marked = marked.filter(|of| !known.contains_key(of));
    let all = open.chain(unanswered).chain(marked);
    all.filter(|(_, pod)| !pods.contains(pod)).collect()
}

/// Returns the uses that fetched images have the mark of.
fn marks(held: &[Held]) -> impl Iterator<Item = Use> + '_ {
    held.iter()
        .filter_map(|one| Some((one.place.clone(), one.consumed_by.clone()?)))
}

/// Decides.
///
/// An entry of the list is kept as long as a SandboxSnapshot names its image. Its state changes
/// once: when its Pod is gone and it is known whether the Pod ran from the image.
pub(crate) fn plan(seen: &Seen<'_>) -> Plan {
    let mut claims: BTreeMap<Use, FetchState> = BTreeMap::new();
    let settled = |of: &Use, before: FetchState| match (before, seen.ended.get(of)) {
        (FetchState::Claimed, Some(Ended::Ran)) => FetchState::Consumed,
        (FetchState::Claimed, Some(Ended::NeverRan)) => FetchState::Released,
        (before, _) => before,
    };
    for (of, state) in seen.claims.iter().filter_map(parsed) {
        if seen.named.contains(&of.0) {
            let state = settled(&of, state);
            claims.insert(of, state);
        }
    }
    let marked = marks(seen.held);
    for of in seen.taken.iter().cloned().chain(marked) {
        let answer = seen.pods.contains(&of.1) || seen.ended.contains_key(&of);
        if answer && seen.named.contains(&of.0) && !claims.contains_key(&of) {
            let state = settled(&of, FetchState::Claimed);
            claims.insert(of, state);
        }
    }
    let open: Vec<&Want> = seen.wants.iter().filter(|want| want.is_open()).collect();
    for want in open.iter().filter(|want| !want.copy) {
        if claims.len() < MAX_FETCHED {
            claims.insert(want.of(), FetchState::Claimed);
        }
    }
    let is_whole = |place: &Place| seen.held.iter().any(|one| one.whole && one.place == *place);
    let mut fetched = BTreeSet::new();
    let fetch = open.iter().filter(|want| {
        let may = want.copy || claims.contains_key(&want.of());
        may && !is_whole(&want.place) && fetched.insert(want.place.clone())
    });
    let fetch = fetch.map(|want| (*want).clone()).collect();
    let is_needed = |place: &Place| {
        open.iter().any(|want| want.place == *place)
            || claims
                .iter()
                .any(|((of, _), state)| of == place && *state == FetchState::Claimed)
    };
    let unneeded = seen.held.iter().filter(|one| !is_needed(&one.place));
    Plan {
        fetch,
        remove: unneeded.map(|one| one.place.clone()).collect(),
        claims: claims.into_iter().map(written).collect(),
    }
}

/// Returns what an entry says; none if it was not written by an agent.
pub(crate) fn parsed(claim: &FetchedImage) -> Option<(Use, FetchState)> {
    let namespace = Namespace::new(claim.namespace.clone()).ok()?;
    let image = ImageId::parse(&claim.image_id).ok()?;
    let pod = PodUid::new(claim.pod_uid.clone()).ok()?;
    Some((((namespace, image), pod), claim.state))
}

fn written((((namespace, image), pod), state): (Use, FetchState)) -> FetchedImage {
    FetchedImage {
        image_id: image.to_string(),
        namespace: namespace.to_string(),
        pod_uid: pod.to_string(),
        state,
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
            class: Some("c".to_owned()),
            node: None,
            cluster: None,
            copy: false,
            cold_start: false,
            settled: false,
            ends: false,
        }
    }

    fn of(uid: &str) -> Use {
        (place(), pod(uid))
    }

    fn claim(uid: &str, state: FetchState) -> FetchedImage {
        written((of(uid), state))
    }

    fn held(whole: bool, consumed_by: Option<&str>) -> Held {
        Held {
            place: place(),
            whole,
            consumed_by: consumed_by.map(pod),
        }
    }

    /// Facts of a test; `pods` are the Pods of the node.
    #[derive(Default)]
    struct Facts<'a> {
        wants: &'a [Want],
        pods: &'a [&'a str],
        held: &'a [Held],
        claims: &'a [FetchedImage],
        taken: &'a [Use],
        ended: &'a [(Use, Ended)],
        /// No SandboxSnapshot names the image.
        unnamed: bool,
    }

    impl Facts<'_> {
        fn pods(&self) -> BTreeSet<PodUid> {
            self.pods.iter().map(|uid| pod(uid)).collect()
        }

        fn plan(&self) -> Plan {
            plan(&Seen {
                wants: self.wants,
                pods: &self.pods(),
                held: self.held,
                claims: self.claims,
                taken: self.taken,
                named: &(!self.unnamed).then(place).into_iter().collect(),
                ended: &self.ended.iter().cloned().collect(),
            })
        }

        fn to_settle(&self) -> Vec<Use> {
            let all = to_settle(self.claims, self.taken, self.held, &self.pods());
            all.into_iter().collect()
        }
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
        let facts = Facts {
            wants: &wants,
            pods: &["p", "q"],
            ..Facts::default()
        };
        let fresh = facts.plan();
        assert_eq!(fresh.claims, [claim("p", FetchState::Claimed)]);
        assert_eq!(fresh.fetch, [want("p")]);
        let held_part = [held(false, None)];
        let begun = Facts {
            held: &held_part,
            claims: &fresh.claims,
            ..facts
        }
        .plan();
        assert_eq!(begun.fetch, [want("p")], "a part is fetched anew");
        let held_whole = [held(true, None)];
        let whole = Facts {
            held: &held_whole,
            claims: &fresh.claims,
            wants: &wants,
            pods: &["p", "q"],
            ..Facts::default()
        }
        .plan();
        assert_eq!(
            (&whole.claims, &whole.fetch[..], &whole.remove[..]),
            (&fresh.claims, &[][..], &[][..])
        );
    }

    #[test]
    fn a_copy_is_fetched_without_a_claim_and_removed_once_it_runs() {
        let copy = [Want {
            copy: true,
            ..want("q")
        }];
        let first = Facts {
            wants: &copy,
            pods: &["q"],
            ..Facts::default()
        }
        .plan();
        assert_eq!((&first.claims[..], &first.fetch[..]), (&[][..], &copy[..]));
        let runs = [Want {
            copy: true,
            settled: true,
            ..want("q")
        }];
        let later = Facts {
            wants: &runs,
            pods: &["q"],
            held: &[held(true, None)],
            ..Facts::default()
        };
        assert_eq!(later.plan().remove, [place()]);
    }

    #[test]
    fn a_claim_ends_when_its_pod_is_gone_and_never_ran() {
        let claims = [claim("p", FetchState::Claimed)];
        let whole = [held(true, None)];
        let gone = Facts {
            held: &whole,
            claims: &claims,
            ..Facts::default()
        };
        assert_eq!(gone.to_settle(), [of("p")]);
        assert_eq!(gone.plan().claims, claims, "as long as it is not known");
        let ended = [(of("p"), Ended::NeverRan)];
        let released = Facts {
            ended: &ended,
            ..gone
        }
        .plan();
        assert_eq!(released.claims, [claim("p", FetchState::Released)]);
        assert_eq!(released.remove, [place()]);
        let there = Facts {
            pods: &["p"],
            held: &whole,
            claims: &claims,
            ..Facts::default()
        };
        assert_eq!(
            (there.to_settle(), there.plan().claims),
            (Vec::new(), claims.to_vec())
        );
    }

    #[test]
    fn a_consumed_image_stays_claimed_until_no_snapshot_names_it() {
        let claims = [claim("p", FetchState::Claimed)];
        let marked = [held(true, Some("p"))];
        let ended = [(of("p"), Ended::Ran)];
        let ran = Facts {
            held: &marked,
            claims: &claims,
            ended: &ended,
            ..Facts::default()
        }
        .plan();
        assert_eq!(ran.claims, [claim("p", FetchState::Consumed)]);
        let lost = Facts {
            claims: &ran.claims,
            ..Facts::default()
        };
        assert_eq!(
            lost.plan().claims,
            ran.claims,
            "the entry outlives the image"
        );
        assert_eq!(lost.to_settle(), []);
        let done = Facts {
            pods: &["p"],
            held: &marked,
            claims: &claims,
            unnamed: true,
            ..Facts::default()
        };
        let done = done.plan();
        assert_eq!(
            (&done.claims[..], &done.remove[..]),
            (&[][..], &[place()][..])
        );
    }

    #[test]
    fn a_mark_changes_no_claim_while_its_pod_exists() {
        let claims = [claim("p", FetchState::Claimed)];
        let marked = [held(true, Some("p"))];
        let facts = Facts {
            pods: &["p"],
            held: &marked,
            claims: &claims,
            ..Facts::default()
        };
        assert_eq!(
            facts.plan().claims,
            claims,
            "the restore may fail and give the image back"
        );
    }

    #[test]
    fn the_node_answers_for_each_pod_that_the_controller_recorded() {
        let taken = [of("p")];
        let asked = Facts {
            taken: &taken,
            ..Facts::default()
        };
        assert_eq!(asked.to_settle(), [of("p")]);
        assert_eq!(asked.plan().claims, [], "no answer before it is known");
        let ended = [(of("p"), Ended::NeverRan)];
        let answered = Facts {
            taken: &taken,
            ended: &ended,
            ..Facts::default()
        }
        .plan();
        assert_eq!(answered.claims, [claim("p", FetchState::Released)]);
        let there = Facts {
            taken: &taken,
            pods: &["p"],
            ..Facts::default()
        }
        .plan();
        assert_eq!(there.claims, [claim("p", FetchState::Claimed)]);
    }

    #[test]
    fn a_list_that_was_lost_is_made_anew_from_the_marks() {
        let marked = [held(true, Some("p"))];
        let there = Facts {
            pods: &["p"],
            held: &marked,
            ..Facts::default()
        };
        assert_eq!(there.plan().claims, [claim("p", FetchState::Claimed)]);
        let gone = Facts {
            held: &marked,
            ..Facts::default()
        };
        assert_eq!(gone.to_settle(), [of("p")]);
        let ended = [(of("p"), Ended::Ran)];
        let answered = Facts {
            ended: &ended,
            ..gone
        }
        .plan();
        assert_eq!(answered.claims, [claim("p", FetchState::Consumed)]);
    }

    #[test]
    fn a_pod_that_ends_fetches_nothing_more() {
        let ends = [Want {
            ends: true,
            ..want("p")
        }];
        let claims = [claim("p", FetchState::Claimed)];
        let part = [held(false, None)];
        let facts = Facts {
            wants: &ends,
            pods: &["p"],
            held: &part,
            claims: &claims,
            ..Facts::default()
        };
        let plan = facts.plan();
        assert_eq!(plan.fetch, []);
        assert_eq!(plan.claims, claims, "until it is gone");
    }

    #[test]
    fn a_claim_that_no_agent_wrote_is_dropped() {
        let mut strange = claim("p", FetchState::Consumed);
        strange.image_id = "../x".to_owned();
        let facts = Facts {
            pods: &["p"],
            claims: &[strange],
            ..Facts::default()
        };
        assert_eq!(facts.plan(), Plan::default());
    }
}
