//! No client required. Selects the golden images that a new Pod may start from.

use std::{collections::BTreeMap, sync::Arc};

use torpor_api::{PodRecord, SandboxSnapshot};

use crate::saved_pod;

/// Most images that a Pod lists. A node whose image is not listed starts the Pod cold.
const MOST: usize = 64;

/// Golden images for a new Pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Images {
    /// Image ids, one for each node.
    pub ids: Vec<String>,
    /// Nodes that hold the images.
    pub nodes: Vec<String>,
    /// References of the containers' images in all of them, by the container's name.
    pub containers: BTreeMap<String, String>,
}

/// Returns the node that holds the image of a snapshot, if the image is committed and is of the Pod
/// that the controller saved. An agent writes the status: it could name the image of another Pod.
pub(super) fn image(snapshot: &SandboxSnapshot) -> Option<(PodRecord, &String)> {
    let record = saved_pod::saved_pod(snapshot, [], None)?;
    let status = snapshot.status.as_ref()?;
    let id = status.image_id.as_ref()?;
    let pod = id.rsplit_once('.').map(|(pod, _)| pod);
    let is_of_pod =
        pod == Some(&*record.uid) && status.node_name.as_ref() == Some(&record.node_name);
    let is_there = snapshot.is_committed() && snapshot.metadata.deletion_timestamp.is_none();
    (is_of_pod && is_there).then_some((record, id))
}

/// Returns the images of the snapshots of one golden Sandbox. Those whose containers have other
/// images than the newest are left out: a tag has moved since. The age is the apiserver's, because
/// an agent writes the status.
pub fn of<'a>(snapshots: impl IntoIterator<Item = &'a Arc<SandboxSnapshot>>) -> Option<Images> {
    let mut found: Vec<_> = snapshots
        .into_iter()
        .filter_map(|snapshot| {
            let created = snapshot.metadata.creation_timestamp.as_ref()?.0;
            Some((created, image(snapshot)?))
        })
        .collect();
    found.sort_by_key(|(created, _)| std::cmp::Reverse(*created));
    let containers = found
        .first()
        .map(|(_, (newest, _))| newest.images.clone())?;
    let mut images = Images {
        ids: Vec::new(),
        nodes: Vec::new(),
        containers,
    };
    for (_, (record, id)) in found {
        let is_new = !images.nodes.contains(&record.node_name);
        if is_new && record.images == images.containers && images.ids.len() < MOST {
            images.ids.push(id.clone());
            images.nodes.push(record.node_name);
        }
    }
    Some(images)
}
