//! Policy for addresses of sandboxes.
//!
//! Without a policy, a forged Pod status would lead the router's clients to targets that they
//! cannot reach themselves: the router's loopback, a cloud's metadata service, a whole network.

use std::net::IpAddr;

/// Addresses that the router accepts as a Pod's.
///
/// The program only uses [`AddressPolicy::default`]; no flag sets the other policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AddressPolicy {
    loopback: bool,
}

impl AddressPolicy {
    /// Returns a policy that also allows loopback, for tests with sandboxes on this machine.
    pub fn with_loopback() -> Self {
        Self { loopback: true }
    }

    /// Reports whether a Pod may have this address.
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
    fn only_addresses_that_pods_may_have_are_allowed(#[case] text: &str, #[case] allowed: bool) {
        assert_eq!(
            AddressPolicy::default().allows(text.parse().unwrap()),
            allowed
        );
    }

    #[test]
    fn the_policy_of_tests_adds_loopback_only() {
        let policy = AddressPolicy::with_loopback();
        assert!(policy.allows("127.0.0.1".parse().unwrap()));
        assert!(policy.allows("::1".parse().unwrap()));
        for text in ["169.254.169.254", "0.0.0.0", "ff02::1"] {
            assert!(!policy.allows(text.parse().unwrap()), "{text}");
        }
    }
}
