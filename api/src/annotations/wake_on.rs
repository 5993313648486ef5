//! Value of the annotation `torpor.dev/wake-on`.
//!
//! ```text
//! value = "any" | "none" | word *( separator word )
//! word  = "tcp" | "udp" | "icmp" | "ports=" range *( separator range )
//! range = port [ "-" port ]                            ; 1 to 65535
//! separator = 1*( "," | " " )
//! ```
//! A range that follows `ports=`, directly or after other ranges, belongs to it.

use super::{InvalidAnnotation, WAKE_ON, values::invalid};

const ALLOWED: &str =
    "any, none, or some of tcp, udp, icmp, ports=PORTS, such as tcp,ports=80,8000-8099";
/// Most ranges of ports. The limit bounds the work for each packet.
const MOST_RANGES: usize = 32;

/// Packets that wake a sleeping sandbox. Packets of protocols other than these three wake the
/// sandbox only with [`WakeOn::Any`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WakeOn {
    /// All packets. The value overrides the pod template's.
    Any,
    Some {
        tcp: bool,
        udp: bool,
        icmp: bool,
        /// TCP and UDP ports of the Pod; empty means all. The ranges are sorted and neither overlap
        /// nor touch.
        ports: Vec<Ports>,
    },
}

/// Range of ports, both ends included.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ports {
    pub first: u16,
    pub last: u16,
}

impl WakeOn {
    /// No packet wakes the sandbox; exec, port-forward and the API still do.
    const NONE: Self = Self::Some {
        tcp: false,
        udp: false,
        icmp: false,
        ports: Vec::new(),
    };

    /// Parses the annotation's value.
    pub fn parse(value: &str) -> Result<Self, InvalidAnnotation> {
        match value.trim() {
            "any" => Ok(Self::Any),
            "none" => Ok(Self::NONE),
            words => combination(words).ok_or_else(|| invalid(WAKE_ON, value, ALLOWED)),
        }
    }

    /// Returns the annotation's value in its one canonical spelling.
    pub fn canonical(&self) -> String {
        let Self::Some {
            tcp,
            udp,
            icmp,
            ports,
        } = self
        else {
            return "any".to_owned();
        };
        let mut words: Vec<String> = [(*tcp, "tcp"), (*udp, "udp"), (*icmp, "icmp")]
            .into_iter()
            .filter(|(named, _)| *named)
            .map(|(_, word)| word.to_owned())
            .collect();
        if words.is_empty() {
            return "none".to_owned();
        }
        for (n, Ports { first, last }) in ports.iter().enumerate() {
            let name = if n == 0 { "ports=" } else { "" };
            words.push(if first == last {
                format!("{name}{first}")
            } else {
                format!("{name}{first}-{last}")
            });
        }
        words.join(",")
    }
}

/// Parses the annotation [`WAKE_ON`].
pub fn wake_on<'a>(
    value: impl Fn(&str) -> Option<&'a String>,
) -> Option<Result<WakeOn, InvalidAnnotation>> {
    value(WAKE_ON).map(|value| WakeOn::parse(value))
}

fn combination(words: &str) -> Option<WakeOn> {
    let (mut tcp, mut udp, mut icmp) = (false, false, false);
    let mut ports = Vec::new();
    let mut in_ports = false;
    let mut any = false;
    for word in words.split([',', ' ']).filter(|word| !word.is_empty()) {
        any = true;
        let protocol = match word {
            "tcp" => Some(&mut tcp),
            "udp" => Some(&mut udp),
            "icmp" => Some(&mut icmp),
            _ => None,
        };
        if let Some(named) = protocol {
            *named = true;
            in_ports = false;
        } else {
            let listed = word.strip_prefix("ports=");
            in_ports |= listed.is_some();
            ports.push(range(listed.unwrap_or(word)).filter(|_| in_ports)?);
        }
    }
    if !any || ports.len() > MOST_RANGES {
        return None;
    }
    if !ports.is_empty() && !tcp && !udp {
        // Ports without a protocol mean TCP and UDP.
        (tcp, udp) = (true, true);
    }
    Some(WakeOn::Some {
        tcp,
        udp,
        icmp,
        ports: merged(ports),
    })
}

fn range(text: &str) -> Option<Ports> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let port = |text: &str| {
        let digits = text.bytes().all(|byte| byte.is_ascii_digit());
        text.parse().ok().filter(|port| digits && *port != 0)
    };
    let (first, last) = (port(first)?, port(last)?);
    (first <= last).then_some(Ports { first, last })
}

/// Merges ranges that overlap or touch.
fn merged(mut ports: Vec<Ports>) -> Vec<Ports> {
    ports.sort_unstable();
    let mut apart: Vec<Ports> = Vec::new();
    for next in ports {
        match apart.last_mut() {
            Some(before) if next.first <= before.last.saturating_add(1) => {
                before.last = before.last.max(next.last);
            }
            _ => apart.push(next),
        }
    }
    apart
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn combinations_have_one_spelling() {
        for (value, canonical) in [
            ("any", "any"),
            ("none", "none"),
            ("tcp", "tcp"),
            ("icmp, udp", "udp,icmp"),
            ("tcp tcp", "tcp"),
            (" tcp,ports=443,80 ", "tcp,ports=80,443"),
            ("ports=80", "tcp,udp,ports=80"),
            ("ports=80,443,icmp", "tcp,udp,icmp,ports=80,443"),
            ("icmp ports=80 443", "tcp,udp,icmp,ports=80,443"),
            ("ports=80,tcp,ports=90", "tcp,ports=80,90"),
            ("udp,ports=8001-8002,8000,8003-8003", "udp,ports=8000-8003"),
            ("tcp,ports=1-65535,65535", "tcp,ports=1-65535"),
        ] {
            let parsed = WakeOn::parse(value).expect(value);
            assert_eq!(parsed.canonical(), canonical, "{value:?}");
            assert_eq!(WakeOn::parse(canonical).as_ref(), Ok(&parsed), "{value:?}");
        }
    }

    #[test]
    fn invalid_combinations_are_refused() {
        let many = (1..=33_u32).map(|n| (2 * n).to_string());
        let many = format!("ports={}", many.collect::<Vec<_>>().join(","));
        for value in [
            "",
            " ",
            ",",
            "http",
            "TCP",
            "any,tcp",
            "tcp,none",
            "80",
            "tcp,80",
            "ports",
            "ports=",
            "ports=0",
            "ports=65536",
            "ports=90-80",
            "ports=80-",
            "ports=-80",
            "ports=+80",
            "ports=80,tcp,443",
            "ports=http",
            "tcp;udp",
            &many,
        ] {
            assert!(WakeOn::parse(value).is_err(), "{value:?}");
        }
    }
}
