//! The sender address of Ethernet frames.

use torpor_link::packet_drop::Sender;
use torpor_link::tap::HEADER;

/// The bytes of an Ethernet frame that contain the sender's address.
pub(super) const ADDRESS: std::ops::Range<usize> = 6..12;

/// Returns a copy of a frame of a tap, which has a `virtio_net_hdr`, with another sender.
pub(super) fn with_sender(frame: &[u8], sender: Sender) -> Option<Vec<u8>> {
    let mut frame = frame.to_vec();
    set_sender(frame.get_mut(HEADER..)?, sender);
    Some(frame)
}

pub(super) fn set_sender(ethernet: &mut [u8], sender: Sender) {
    if let Some(field) = ethernet.get_mut(ADDRESS) {
        field.copy_from_slice(&sender.address());
    }
}
