//! No client required. The strict rules: sandboxes accept connections only from the router, and
//! reach the internet but no private network.

use std::{fmt, net::IpAddr, str::FromStr};

use serde_json::{Value, json};

/// Namespace of the router. Ingress is allowed only from the router.
const ROUTER_NAMESPACE: &str = "agent-sandbox-system";
/// Value of the router's label `app`.
const ROUTER_APP: &str = "sandbox-router";
/// Private, shared (RFC 6598) and link-local addresses, which the cluster, its DNS and the cloud's
/// metadata service use.
const PRIVATE_V4: [&str; 5] = [
    "10.0.0.0/8",
    "172.16.0.0/12",
    "192.168.0.0/16",
    "169.254.0.0/16",
    "100.64.0.0/10",
];
/// Unique local and link-local addresses, and the prefixes of NAT64 for IPv4 addresses (RFC 6052,
/// RFC 8215).
const PRIVATE_V6: [&str; 4] = ["fc00::/7", "fe80::/10", "64:ff9b::/96", "64:ff9b:1::/48"];

/// Address range as a NetworkPolicy's `ipBlock.except` takes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cidr {
    address: IpAddr,
    prefix: u8,
}

impl fmt::Display for Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.prefix)
    }
}

impl FromStr for Cidr {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let form =
            || format!("{text:?} is not an address range such as 198.51.100.0/24 or 2001:db8::/32");
        let (address, prefix) = text.split_once('/').ok_or_else(form)?;
        let address: IpAddr = address.parse().map_err(|_| form())?;
        // Kubernetes refuses a sign and leading zeros.
        let canonical = prefix.bytes().all(|digit| digit.is_ascii_digit())
            && (prefix == "0" || !prefix.starts_with('0'));
        let prefix: u8 = prefix.parse().map_err(|_| form())?;
        let bits: u8 = if address.is_ipv4() { 32 } else { 128 };
        if !canonical || prefix > bits {
            return Err(form());
        }
        if prefix == 0 {
            return Err(format!(
                "{text:?} is every address: a NetworkPolicy can exclude only a part. To block all egress of a template, \
                 set its spec.networkPolicy to {{egress: []}}"
            ));
        }
        let network = Self {
            address: masked(address, prefix),
            prefix,
        };
        if network.address != address {
            return Err(format!(
                "{text:?} has bits set after its prefix; the range is {network}"
            ));
        }
        if let IpAddr::V6(v6) = address
            && v6.to_ipv4_mapped().is_some()
        {
            return Err(format!(
                "{text:?} is a range of IPv4 addresses; write it in IPv4 notation"
            ));
        }
        Ok(network)
    }
}

/// Returns the address with all bits after the prefix cleared. The prefix is from 1 to the address
/// length.
fn masked(address: IpAddr, prefix: u8) -> IpAddr {
    match address {
        IpAddr::V4(v4) => IpAddr::V4((v4.to_bits() & (u32::MAX << (32 - prefix))).into()),
        IpAddr::V6(v6) => IpAddr::V6((v6.to_bits() & (u128::MAX << (128 - prefix))).into()),
    }
}

/// Returns the ingress rules.
pub fn ingress() -> Value {
    json!([{"from": [{
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": ROUTER_NAMESPACE}},
        "podSelector": {"matchLabels": {"app": ROUTER_APP}},
    }]}])
}

/// Returns the egress rules. `except` are the ranges that the operator blocks in addition.
pub fn egress(except: &[Cidr]) -> Value {
    let blocked = |fixed: &[&str], v4: bool| {
        let mut all: Vec<String> = fixed.iter().map(|range| (*range).to_owned()).collect();
        for range in except.iter().filter(|range| range.address.is_ipv4() == v4) {
            let range = range.to_string();
            if !all.contains(&range) {
                all.push(range);
            }
        }
        all
    };
    json!([{"to": [
        {"ipBlock": {"cidr": "0.0.0.0/0", "except": blocked(&PRIVATE_V4, true)}},
        {"ipBlock": {"cidr": "::/0", "except": blocked(&PRIVATE_V6, false)}},
    ]}])
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("198.51.100.0/24")]
    #[case("203.0.113.7/32")]
    #[case("2001:db8::/32")]
    #[case("2001:db8::1/128")]
    fn a_range_is_taken_as_kubernetes_takes_it(#[case] text: &str) {
        assert_eq!(text.parse::<Cidr>().unwrap().to_string(), text);
    }

    #[rstest]
    #[case("198.51.100.0", "such as")]
    #[case("198.51.100.0/33", "such as")]
    #[case("198.51.100.0/+24", "such as")]
    #[case("198.51.100.0/024", "such as")]
    #[case("example.com/24", "such as")]
    #[case("", "such as")]
    #[case("0.0.0.0/0", "every address")]
    #[case("::/0", "every address")]
    #[case("198.51.100.7/24", "the range is 198.51.100.0/24")]
    #[case("2001:db8::1/32", "the range is 2001:db8::/32")]
    #[case("::ffff:198.51.100.0/120", "IPv4")]
    fn a_range_that_kubernetes_would_refuse_is_refused_with_the_remedy(
        #[case] text: &str,
        #[case] expected: &str,
    ) {
        let error = text.parse::<Cidr>().unwrap_err();
        assert!(error.contains(expected) && error.contains(text), "{error}");
    }

    #[test]
    fn shared_and_translated_addresses_are_blocked_and_what_the_operator_adds() {
        let except = ["198.51.100.0/24", "2001:db8::/32", "10.0.0.0/8"]
            .map(|text| text.parse::<Cidr>().unwrap());
        let rules = egress(&except);
        let blocked = |at: usize| rules[0]["to"][at]["ipBlock"]["except"].clone();
        let v4 = [PRIVATE_V4.as_slice(), &["198.51.100.0/24"]].concat();
        assert_eq!(blocked(0), json!(v4));
        let v6 = [PRIVATE_V6.as_slice(), &["2001:db8::/32"]].concat();
        assert_eq!(blocked(1), json!(v6));
        assert!(v4.contains(&"100.64.0.0/10") && v6.contains(&"64:ff9b::/96"));
    }

    /// The apiserver refuses a policy with an exception that is not strictly within its block.
    #[test]
    fn every_fixed_range_is_one_that_a_policy_may_leave_out() {
        for text in PRIVATE_V4.into_iter().chain(PRIVATE_V6) {
            assert_eq!(text.parse::<Cidr>().unwrap().to_string(), text);
        }
    }
}
