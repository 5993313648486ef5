//! Binary layout of the structures in the files that [`super`] builds.

/// Returns the fields of a structure in little endian. A field is a value and its width in bytes.
/// The bytes of a field beyond the value's own are zero.
pub(super) fn fields(fields: &[(u64, usize)]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (value, width) in fields {
        let end = bytes.len() + width;
        bytes.extend(value.to_le_bytes().into_iter().take(*width));
        bytes.resize(end, 0);
    }
    bytes
}
