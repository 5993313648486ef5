//! Which addresses a sandbox may have. Everything else would make the router a way to places that its clients cannot reach themselves: its own loopback, the metadata
//! service of a cloud, a whole network at once.

use std::net::IpAddr;

/// Which addresses are taken for a Pod's. [`AddressPolicy::default`] is the only one that the program itself ever makes: there is no flag for the other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AddressPolicy {
    loopback: bool,
}

impl AddressPolicy {
    /// For tests, whose sandboxes listen on this machine.
    pub fn with_loopback() -> Self {
        Self { loopback: true }
    }

    /// Whether a Pod may have this address.
    pub fn allows(self, address: IpAddr) -> bool {
        let address = address.to_canonical();
        if address.is_unspecified() || address.is_multicast() || link_local(address) {
            return false;
        }
        match address {
            IpAddr::V4(v4) if v4.is_broadcast() => false,
            _ => self.loopback || !address.is_loopback(),
        }
    }
}

fn link_local(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => v4.is_link_local(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("10.0.0.1", true)]
    #[case("192.168.1.50", true)]
    #[case("fd00::1", true)]
    #[case("2001:db8::1", true)]
    #[case("127.0.0.1", false)]
    #[case("127.8.8.8", false)]
    #[case("::1", false)]
    #[case("0.0.0.0", false)]
    #[case("::", false)]
    #[case("169.254.169.254", false)]
    #[case("fe80::1", false)]
    #[case("224.0.0.1", false)]
    #[case("ff02::1", false)]
    #[case("255.255.255.255", false)]
    #[case("::ffff:127.0.0.1", false)]
    #[case("::ffff:169.254.169.254", false)]
    #[case("::ffff:10.0.0.1", true)]
    fn only_addresses_that_pods_have_are_dialled(#[case] text: &str, #[case] allowed: bool) {
        assert_eq!(
            AddressPolicy::default().allows(text.parse().unwrap()),
            allowed
        );
    }

    #[test]
    fn tests_may_add_loopback_and_nothing_else() {
        let policy = AddressPolicy::with_loopback();
        assert!(policy.allows("127.0.0.1".parse().unwrap()));
        assert!(policy.allows("::1".parse().unwrap()));
        for text in ["169.254.169.254", "0.0.0.0", "ff02::1"] {
            assert!(!policy.allows(text.parse().unwrap()), "{text}");
        }
    }
}
