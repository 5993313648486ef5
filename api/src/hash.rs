//! Hash of names, which objects in a cluster carry. It must equal that of upstream's controller, so
//! that both controllers can serve the same objects.

/// Returns the 32-bit FNV-1a hash of the UTF-8 bytes of `text` as 8 lowercase hexadecimal digits.
pub fn name_hash(text: &str) -> String {
    const OFFSET: u32 = 0x811c_9dc5;
    const PRIME: u32 = 0x0100_0193;
    let hash = text.bytes().fold(OFFSET, |hash, byte| {
        (hash ^ u32::from(byte)).wrapping_mul(PRIME)
    });
    format!("{hash:08x}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hash_matches_the_published_fnv1a_vectors() {
        // From the FNV reference test suite.
        for (text, hash) in [
            ("", "811c9dc5"),
            ("a", "e40c292c"),
            ("b", "e70c2de5"),
            ("foobar", "bf9cf968"),
            ("chongo was here!\n", "d49930d5"),
        ] {
            assert_eq!(name_hash(text), hash, "{text:?}");
        }
    }

    #[test]
    fn short_hashes_are_padded_to_eight_digits() {
        // Known 32-bit FNV-1a collision with zero.
        assert_eq!(name_hash("\u{1}\u{47}\u{6c}\u{1d}").len(), 8);
        for number in 0..5000 {
            assert_eq!(name_hash(&format!("sandbox-{number}")).len(), 8);
        }
    }
}
